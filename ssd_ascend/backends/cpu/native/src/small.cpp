// The small operators between the matrix products: norms, activation, rotary embedding. Each works row by row.
#include <cmath>

#include "common.h"
#include "pool.h"
#include "tape.h"

namespace ssd {

constexpr int64_t kSmallest = 1 << 15;  // elements below which a second thread does not pay

// Where row i of a [outer, inner, size] view begins: rows of one outer index are adjacent.
struct Rows {
    int64_t inner, stride, size;
    int64_t offset(int64_t i) const { return i / inner * stride + i % inner * size; }
};

template <typename T>
SSD_INLINE float inverse_rms(const T* x, int64_t size, float eps) {
    F8 squares = {};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        F8 v = load<8>(x + i);
        squares = fma8(v, v, squares);
    }
    float total = sum(squares);
    for (; i < size; ++i) total += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt(total / float(size) + eps);
}

template <typename T>
void rms_norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
    const float scale = inverse_rms(x, size, eps);
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) store<8>(out + i, load<8>(x + i) * scale * load<8>(weight + i));
    for (; i < size; ++i) out[i] = narrow<T>(widen(x[i]) * scale * widen(weight[i]));
}

template <typename T>
void add_row(const T* x, T* residual, int64_t size) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) store<8>(residual + i, load<8>(residual + i) + load<8>(x + i));
    for (; i < size; ++i) residual[i] = narrow<T>(widen(residual[i]) + widen(x[i]));
}

template <typename T>
void silu_and_mul_row(const T* x, T* out, int64_t size) {
    const T* up = x + size;
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        F8 gate = load<8>(x + i);
        store<8>(out + i, gate / (exp8(-gate) + 1.0f) * load<8>(up + i));
    }
    for (; i < size; ++i) {
        F8 gate = splat8(widen(x[i]));
        out[i] = narrow<T>((gate / (exp8(-gate) + 1.0f))[0] * widen(up[i]));
    }
}

template <typename T>
void rotate_head(T* x, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        F8 a = load<8>(x + i), b = load<8>(x + half + i), c = load<8>(cos + i), s = load<8>(sin + i);
        store<8>(x + i, a * c - b * s);
        store<8>(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = widen(x[i]), b = widen(x[half + i]);
        x[i] = narrow<T>(a * cos[i] - b * sin[i]);
        x[half + i] = narrow<T>(b * cos[i] + a * sin[i]);
    }
}

// The first place of the largest of x, or of a NaN where there is one.
SSD_INLINE int64_t arg_max(const float* x, int64_t size) {
    F8 best = splat8(-kInfinity);
    I8 place = {0, 1, 2, 3, 4, 5, 6, 7}, where = place, nan = {};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8, place += 8) {
        const F8 v = load<8>(x + i);
        const I8 larger = (I8)(v > best);
        best = select(larger, v, best);
        where = (larger & place) | (~larger & where);
        nan |= (I8)(v != v);
    }
    int64_t found = 0;  // also where nothing is above minus infinity
    float top = -kInfinity;
    for (int lane = 0; lane < 8; ++lane)
        if (best[lane] > top || (best[lane] == top && top > -kInfinity && where[lane] < found))
            top = best[lane], found = where[lane];
    bool any_nan = false;
    for (int lane = 0; lane < 8; ++lane) any_nan |= nan[lane] != 0;
    for (; i < size; ++i) {
        if (x[i] > top) top = x[i], found = i;
        any_nan |= x[i] != x[i];
    }
    if (any_nan)
        for (found = 0; x[found] == x[found];) ++found;
    return found;
}

template <typename Fn>
SSD_INLINE void for_rows(int64_t rows, int64_t work, int64_t threads, const Fn& fn) {
    parallel_ranges(rows, team(work, kSmallest, threads), [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) fn(i);
    });
}

}  // namespace ssd

using namespace ssd;

// x: [rows / inner, inner, size] whose outer stride is `stride`; out is contiguous.
SSD_API void ssd_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t inner, int64_t stride,
                          int64_t size, float eps, int64_t dtype, int64_t threads) {
    const Rows view{inner, stride, size};
    perform([=] {
        SSD_DISPATCH(dtype, T, for_rows(rows, rows * size, threads, [=](int64_t i) {
            rms_norm_row(static_cast<const T*>(x) + view.offset(i), static_cast<const T*>(weight),
                         static_cast<T*>(out) + i * size, size, eps);
        }))
    });
}

// residual += x, then out = rms_norm(residual); all contiguous.
SSD_API void ssd_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t size,
                              float eps, int64_t dtype, int64_t threads) {
    perform([=] {
        SSD_DISPATCH(dtype, T, for_rows(rows, rows * size, threads, [=](int64_t i) {
            T* total = static_cast<T*>(residual) + i * size;
            add_row(static_cast<const T*>(x) + i * size, total, size);
            rms_norm_row(total, static_cast<const T*>(weight), static_cast<T*>(out) + i * size, size, eps);
        }))
    });
}

// x: [rows, 2 * size] -> out: [rows, size].
SSD_API void ssd_silu_and_mul(const void* x, void* out, int64_t rows, int64_t size, int64_t dtype, int64_t threads) {
    perform([=] {
        SSD_DISPATCH(dtype, T, for_rows(rows, rows * size * 4, threads, [=](int64_t i) {
            silu_and_mul_row(static_cast<const T*>(x) + i * 2 * size, static_cast<T*>(out) + i * size, size);
        }))
    });
}

// In place on q [tokens, q_heads, dim] and k [tokens, k_heads, dim], whose token strides are given.
SSD_API void ssd_rotary(void* q, void* k, const int64_t* positions, const float* cos_sin, int64_t tokens,
                        int64_t q_heads, int64_t k_heads, int64_t q_stride, int64_t k_stride, int64_t dim,
                        int64_t rotary_dim, int64_t dtype, int64_t threads) {
    const int64_t half = rotary_dim / 2;
    perform([=] {
        SSD_DISPATCH(dtype, T, for_rows(tokens, tokens * (q_heads + k_heads) * dim, threads, [=](int64_t t) {
            const float *cos = cos_sin + positions[t] * rotary_dim, *sin = cos + half;
            T *queries = static_cast<T*>(q) + t * q_stride, *keys = static_cast<T*>(k) + t * k_stride;
            for (int64_t h = 0; h < q_heads; ++h) rotate_head(queries + h * dim, cos, sin, half);
            for (int64_t h = 0; h < k_heads; ++h) rotate_head(keys + h * dim, cos, sin, half);
        }))
    });
}

// logits: [rows, size] -> the arg-max of each row and its value.
SSD_API void ssd_top_tokens(const float* logits, int64_t* tokens, float* values, int64_t rows, int64_t size,
                            int64_t threads) {
    perform([=] {
        for_rows(rows, rows * size, threads, [=](int64_t i) {
            tokens[i] = arg_max(logits + i * size, size);
            values[i] = logits[i * size + tokens[i]];
        });
    });
}
