// Attention over the paged cache, with the store of the new keys and values in front of it.
//
// One unit of work is (row, tile of its queries, kv head). Keys are taken in chunks that begin at multiples of kChunk,
// and a masked key adds exactly nothing, so a query's result is bitwise the same as decode row, verify row or part of
// a prefill, in any block size. Online softmax, everything in float32.
#include <vector>

#include "common.h"
#include "pool.h"
#include "tape.h"

namespace ssd {

constexpr int kChunk = 64;
constexpr int64_t kTileRows = 32;       // (queries x heads of a group) that share the keys they load
constexpr int64_t kSmallest = 1 << 15;  // multiplications below which a second thread does not pay

// The Structures in native/library.py mirror these two.
struct Step {  // the same for all layers of a forward
    const int32_t *query_start, *kv_lens, *block_table;
    const int64_t* slots;
    const uint8_t* tree_mask;  // or null
    int64_t rows, tokens, table_stride, mask_stride;
};
struct Shape {
    int64_t heads, kv_heads, dim, block_size, dtype;
    float scale;
};
struct Unit {
    int64_t row, first, count, kv_head;
};

template <typename T>
struct Layer {
    const T *q, *k, *v;
    T *keys, *values, *out;
    int64_t q_stride, k_stride, v_stride;
};

// R queries against the chunk's keys: scores[r][c], for c up to count rounded up to the keys taken at once.
template <typename T, int R>
void score(const float* q, const T* const* keys, int64_t count, int64_t dim, float* scores) {
    constexpr int kSlots = R <= 1 ? 1 : R <= 2 ? 2 : R <= 4 ? 4 : 8, kKeys = 8 / kSlots;
    for (int64_t c = 0; c < count; c += kKeys) {
        F8 total[8] = {};
        for (int64_t d = 0; d < dim; d += 8)
#pragma GCC unroll 8
            for (int i = 0; i < kKeys; ++i) {
                const F8 key = load<8>(keys[c + i] + d);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    total[i * kSlots + r] = fma8(key, load<8>(q + r * dim + d), total[i * kSlots + r]);
            }
        const F8 result = sums(total);
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) scores[r * kChunk + c + i] = result[i * kSlots + r];
    }
}

// out[r] = out[r] * decay[r] + sum over c of weights[r][c] * values[c], for R queries and V vectors of 8 at offset d.
template <typename T, int R, int V>
void accumulate(const float* weights, const float* decay, const T* const* values, int64_t count, int64_t dim, int64_t d,
                float* out) {
    F8 total[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) total[r][i] = load<8>(out + r * dim + d + 8 * i) * decay[r];
    for (int64_t c = 0; c < count; ++c)
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const F8 value = load<8>(values[c] + d + 8 * i);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) total[r][i] = fma8(value, splat8(weights[r * kChunk + c]), total[r][i]);
        }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) store<8>(out + r * dim + d + 8 * i, total[r][i]);
}

template <typename T, int R>
void accumulate_all(const float* weights, const float* decay, const T* const* values, int64_t count, int64_t dim,
                    float* out) {
    int64_t d = 0;
    if constexpr (R <= 3)
        for (; d + 32 <= dim; d += 32) accumulate<T, R, 4>(weights, decay, values, count, dim, d, out);
    for (; d + 16 <= dim; d += 16) accumulate<T, R, 2>(weights, decay, values, count, dim, d, out);
    for (; d < dim; d += 8) accumulate<T, R, 1>(weights, decay, values, count, dim, d, out);
}

// Calls fn<R>() for R = count, one of the numbers of rows 1 .. Most.
template <int Most, typename Fn>
SSD_INLINE void with_rows(int64_t count, const Fn& fn) {
    if constexpr (Most > 0) {
        if (count == Most) return fn(std::integral_constant<int, Most>());
        with_rows<Most - 1>(count, fn);
    }
}

// Turn one query's scores into weights; returns the factor by which earlier sums shrink.
SSD_INLINE float soften(float* scores, int64_t padded, float& highest, float& denominator) {
    F8 peak = splat8(-kInfinity);
    for (int64_t c = 0; c < padded; c += 8) peak = maximum(load<8>(scores + c), peak);
    float top = highest;
    for (int i = 0; i < 8; ++i) top = std::max(top, peak[i]);
    if (top == -kInfinity) {  // nothing visible yet
        std::fill(scores, scores + padded, 0.0f);
        return 1.0f;
    }
    F8 total = {};
    for (int64_t c = 0; c < padded; c += 8) {
        const F8 weight = exp8(load<8>(scores + c) - top);
        store<8>(scores + c, weight);
        total += weight;
    }
    const float decay = exp8(splat8(highest - top))[0];
    denominator = denominator * decay + sum(total);
    highest = top;
    return decay;
}

struct Scratch {
    std::vector<float> q, out, scores, decay, highest, denominator;
    void reset(int64_t rows, int64_t dim) {
        q.resize(rows * dim);
        out.assign(rows * dim, 0.0f);
        scores.resize(rows * kChunk);
        decay.resize(rows);
        highest.assign(rows, -kInfinity);
        denominator.assign(rows, 0.0f);
    }
};

// Hide from query j of the row what it may not see of the chunk's keys first_key .. first_key + padded.
SSD_INLINE void hide(float* scores, const Step& step, int64_t token, int64_t j, int64_t prefix, int64_t kv_len,
                     int64_t first_key, int64_t count, int64_t padded) {
    int64_t visible = std::min(count, std::max<int64_t>(0, prefix + j + 1 - first_key));
    if (step.tree_mask) {
        visible = count;
        const uint8_t* mask = step.tree_mask + token * step.mask_stride;
        const int64_t origin = kv_len - step.mask_stride;  // the key of the mask's first column
        for (int64_t c = std::max<int64_t>(0, origin - first_key); c < count; ++c)
            if (!mask[first_key + c - origin]) scores[c] = -kInfinity;
    }
    std::fill(scores + visible, scores + padded, -kInfinity);
}

// The cache slots of `count` positions; padding repeats the last, and `hide` removes what it scores.
SSD_INLINE void locate(const int32_t* table, const Shape& shape, int64_t first_key, int64_t count, int64_t padded,
                       int64_t* slots) {
    int64_t block = first_key / shape.block_size, offset = first_key % shape.block_size;
    for (int64_t c = 0; c < count; ++c) {
        slots[c] = table[block] * shape.block_size + offset;
        if (++offset == shape.block_size) ++block, offset = 0;
    }
    std::fill(slots + count, slots + padded, slots[count - 1]);
}

template <typename T>
void attend(const Step& step, const Shape& shape, const Layer<T>& layer, const Unit& unit, Scratch& scratch) {
    const int64_t dim = shape.dim, group = shape.heads / shape.kv_heads, rows = unit.count * group;
    const int64_t token = step.query_start[unit.row] + unit.first, kv_len = step.kv_lens[unit.row];
    const int64_t prefix = kv_len - (step.query_start[unit.row + 1] - step.query_start[unit.row]);
    const int64_t limit = step.tree_mask ? kv_len : prefix + unit.first + unit.count;
    const int32_t* table = step.block_table + unit.row * step.table_stride;
    const int64_t key_stride = shape.kv_heads * dim;
    scratch.reset(rows, dim);
    for (int64_t r = 0; r < rows; ++r) {
        const T* q = layer.q + (token + r / group) * layer.q_stride + (unit.kv_head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += 8) store<8>(&scratch.q[r * dim + d], load<8>(q + d) * shape.scale);
    }
    const T *keys[kChunk], *values[kChunk];
    int64_t slots[kChunk];
    for (int64_t first_key = 0; first_key < limit; first_key += kChunk) {
        const int64_t count = std::min<int64_t>(kChunk, limit - first_key), padded = (count + 7) / 8 * 8;
        locate(table, shape, first_key, count, padded, slots);
        for (int64_t c = 0; c < padded; ++c) {
            keys[c] = layer.keys + slots[c] * key_stride + unit.kv_head * dim;
            values[c] = layer.values + slots[c] * key_stride + unit.kv_head * dim;
        }
        for (int64_t r = 0; r < rows; r += 8)
            with_rows<8>(std::min<int64_t>(8, rows - r), [&](auto n) {
                score<T, n()>(&scratch.q[r * dim], keys, count, dim, &scratch.scores[r * kChunk]);
            });
        for (int64_t r = 0; r < rows; ++r) {
            float* scores = &scratch.scores[r * kChunk];
            hide(scores, step, token + r / group, unit.first + r / group, prefix, kv_len, first_key, count, padded);
            scratch.decay[r] = soften(scores, padded, scratch.highest[r], scratch.denominator[r]);
        }
        for (int64_t r = 0; r < rows; r += 4)  // more would spill accumulators
            with_rows<4>(std::min<int64_t>(4, rows - r), [&](auto n) {
                accumulate_all<T, n()>(&scratch.scores[r * kChunk], &scratch.decay[r], values, count, dim,
                                       &scratch.out[r * dim]);
            });
    }
    for (int64_t r = 0; r < rows; ++r) {
        T* out = layer.out + (token + r / group) * shape.heads * dim + (unit.kv_head * group + r % group) * dim;
        const float inverse = scratch.denominator[r] > 0.0f ? 1.0f / scratch.denominator[r] : 0.0f;
        for (int64_t d = 0; d < dim; d += 8) store<8>(out + d, load<8>(&scratch.out[r * dim + d]) * inverse);
    }
}

template <typename T>
void store_token(const Step& step, const Shape& shape, const Layer<T>& layer, int64_t t) {
    const int64_t slot = step.slots[t], size = shape.kv_heads * shape.dim;
    if (slot < 0) return;
    std::memcpy(layer.keys + slot * size, layer.k + t * layer.k_stride, size * sizeof(T));
    std::memcpy(layer.values + slot * size, layer.v + t * layer.v_stride, size * sizeof(T));
}

// The step's units, the longest (those at the end of a prefill) first; returns the multiplications of all of them.
int64_t list_units(const Step& step, const Shape& shape, std::vector<Unit>& units) {
    const int64_t per_tile = std::max<int64_t>(1, kTileRows / (shape.heads / shape.kv_heads));
    int64_t work = 0;
    units.clear();
    for (int64_t row = 0; row < step.rows; ++row) {
        const int64_t queries = step.query_start[row + 1] - step.query_start[row];
        work += queries * step.kv_lens[row] * shape.heads * shape.dim;
        const int64_t tiles = (queries + per_tile - 1) / per_tile;
        for (int64_t tile = tiles; tile-- > 0;)
            for (int64_t head = 0; head < shape.kv_heads; ++head)
                units.push_back({row, tile * per_tile, std::min(per_tile, queries - tile * per_tile), head});
    }
    return work;
}

template <typename T>
void run(const Step& step, const Shape& shape, const Layer<T>& layer, int64_t tokens, int64_t threads) {
    static thread_local std::vector<Unit> unit_list;
    const int64_t work = list_units(step, shape, unit_list);
    const std::vector<Unit>& units = unit_list;  // the caller's list, for all threads
    const int64_t count = int64_t(units.size()), attended = step.rows ? step.query_start[step.rows] : 0;
    const int64_t width = shape.heads * shape.dim;
    std::fill(reinterpret_cast<char*>(layer.out + attended * width),
              reinterpret_cast<char*>(layer.out + tokens * width), 0);
    const int64_t stored = step.tokens * shape.kv_heads * shape.dim;
    parallel_ranges(step.tokens, team(stored, kSmallest, threads), [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; ++t) store_token(step, shape, layer, t);
    });
    parallel(count, team(work, kSmallest, threads), [&](int64_t i) {
        static thread_local Scratch scratch;
        attend(step, shape, layer, units[i], scratch);
    });
}

}  // namespace ssd

using namespace ssd;

// The step and the shape are read now, what they point to whenever the call runs.
// q: [tokens, heads, dim], k and v: [tokens, kv_heads, dim] with the given token strides; kv: [2, blocks, block_size,
// kv_heads, dim]; out: [tokens, heads * dim].
SSD_API void ssd_attention(const Step* step, const Shape* shape, const void* q, const void* k, const void* v, void* kv,
                           void* out, int64_t tokens, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                           int64_t blocks, int64_t threads) {
    perform([=, step = *step, shape = *shape] {
        const int64_t half = blocks * shape.block_size * shape.kv_heads * shape.dim;
        SSD_DISPATCH(shape.dtype, T, {
            T* cache = static_cast<T*>(kv);
            const Layer<T> layer{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), cache,
                                 cache + half, static_cast<T*>(out), q_stride, k_stride, v_stride};
            run(step, shape, layer, tokens, threads);
        })
    });
}
