// y = x W^T + b for any number of rows, with W kept in its 16-bit (or 32-bit) type and widened in registers.
//
// W is packed into panels of kPanel outputs, stored input by input, so that a panel is one forward stream. Each output
// is one accumulator that runs over the inputs in order, whatever the number of rows, tiles or threads: a row's
// result is bitwise the same in any company.
#include <vector>

#include "common.h"
#include "pool.h"
#include "tape.h"

namespace ssd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // on NEON the compiler splits each into two registers; 32 of them are enough
#endif
constexpr int kPanel = 2 * kLanes;
constexpr int kMaxRows = 6;                   // 6 x 2 accumulators fill 16 registers, and the multiplier's latency
constexpr int64_t kBlockBytes = 192 * 1024;   // weights kept in the second-level cache while tiles of rows pass by
constexpr int64_t kPieces = 8;                // per thread, so that a slow one takes fewer
constexpr int64_t kSmallest = 1 << 16;        // multiplications below which a second thread does not pay

using F = Vec<kLanes>::F;
using U = Vec<kLanes>::U;

// The Structure in native/library.py mirrors this.
struct Linear {
    const void* panels;
    const void* bias;  // float32 or null
    int64_t outputs, inputs, weight_dtype;
};

template <typename W>
SSD_INLINE void load_panel(const W* p, F& first, F& second) {
    first = load<kLanes>(p);
    second = load<kLanes>(p + kLanes);
}
// bfloat16 pairs output i with output kLanes + i in one 32-bit word: widening is a shift and a mask.
SSD_INLINE void load_panel(const bf16* p, F& first, F& second) {
    U pair;
    std::memcpy(&pair, p, sizeof pair);
    first = (F)(pair << 16);
    second = (F)(pair & 0xffff0000u);
}

// R rows times P panels. x: [inputs][R]; out: [R][P * kPanel].
template <typename W, int R, int P>
void tile(const W* panels, const float* x, int64_t inputs, float* out) {
    F total[R][P][2] = {};
    const int64_t stride = inputs * kPanel;
    constexpr int64_t ahead = P == 1 ? 2048 : 1024;  // bytes; several panels are several streams from memory
    for (int64_t k = 0; k < inputs; ++k, x += R, panels += kPanel) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            F first, second;
            __builtin_prefetch(reinterpret_cast<const char*>(panels + p * stride) + ahead);
            load_panel(panels + p * stride, first, second);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const F value = splat<kLanes>(x[r]);
                total[r][p][0] = fma<kLanes>(first, value, total[r][p][0]);
                total[r][p][1] = fma<kLanes>(second, value, total[r][p][1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            store<kLanes>(out + (r * P + p) * kPanel, total[r][p][0]);
            store<kLanes>(out + (r * P + p) * kPanel + kLanes, total[r][p][1]);
        }
}

template <typename W, int P>
void tile_of(int rows, const W* panels, const float* x, int64_t inputs, float* out) {
    switch (rows) {
        case 1: return tile<W, 1, P>(panels, x, inputs, out);
        case 2: return tile<W, 2, P>(panels, x, inputs, out);
        case 3: return tile<W, 3, P>(panels, x, inputs, out);
    }
    if constexpr (P == 1) {  // more rows than three leave no registers for a second panel
        switch (rows) {
            case 4: return tile<W, 4, 1>(panels, x, inputs, out);
            case 5: return tile<W, 5, 1>(panels, x, inputs, out);
            case 6: return tile<W, 6, 1>(panels, x, inputs, out);
        }
    }
}

// How many panels to take at once: few rows need several to keep the multipliers busy.
SSD_INLINE int panels_at_once(int rows, int64_t left) {
    if (rows == 1 && left >= 4) return 4;
    return rows <= 3 && left >= 2 ? 2 : 1;
}

template <typename T>
void write(const float* tile, int rows, int64_t width, const float* bias, T* out, int64_t first, int64_t outputs) {
    const int64_t count = std::min(width, outputs - first);
    for (int r = 0; r < rows; ++r, tile += width) {
        T* to = out + r * outputs + first;
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) {
            F8 v = load<8>(tile + i);
            store<8>(to + i, bias ? v + load<8>(bias + first + i) : v);
        }
        for (; i < count; ++i) to[i] = narrow<T>(bias ? tile[i] + bias[first + i] : tile[i]);
    }
}

// Rows are cut into equal tiles, never a full one and a sliver.
struct Tiles {
    int64_t rows, count;
    explicit Tiles(int64_t rows) : rows(rows), count((rows + kMaxRows - 1) / kMaxRows) {}
    int64_t start(int64_t i) const { return rows * i / count; }
};

template <typename T>
void widen_tiles(const T* x, const Tiles& tiles, int64_t inputs, float* wide, int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
        const int64_t first = tiles.start(t), rows = tiles.start(t + 1) - first;
        float* out = wide + first * inputs;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < inputs; ++k) out[k * rows + r] = widen(x[(first + r) * inputs + k]);
    }
}

template <typename W, typename T>
void panels_range(const Linear& w, const float* wide, const Tiles& tiles, T* out, int64_t from, int64_t to) {
    alignas(64) float result[kMaxRows * 4 * kPanel];
    const W* weights = static_cast<const W*>(w.panels);
    const int64_t size = w.inputs * kPanel;
    const int64_t block = std::max<int64_t>(4, kBlockBytes / (size * int64_t(sizeof(W))));
    for (int64_t begin = from; begin < to; begin += block) {
        const int64_t end = std::min(to, begin + block);
        for (int64_t t = 0; t < tiles.count; ++t) {
            const int64_t first = tiles.start(t);
            const int rows = int(tiles.start(t + 1) - first);
            for (int64_t p = begin; p < end;) {
                const int count = panels_at_once(rows, end - p);
                const W* panel = weights + p * size;
                const float* x = wide + first * w.inputs;
                if (count == 4) tile<W, 1, 4>(panel, x, w.inputs, result);
                else if (count == 2) tile_of<W, 2>(rows, panel, x, w.inputs, result);
                else tile_of<W, 1>(rows, panel, x, w.inputs, result);
                write(result, rows, int64_t(count) * kPanel, static_cast<const float*>(w.bias),
                      out + first * w.outputs, p * kPanel, w.outputs);
                p += count;
            }
        }
    }
}

template <typename W, typename T>
void run(const Linear& w, const T* x, T* out, int64_t rows, int64_t threads) {
    static thread_local std::vector<float> scratch;
    const Tiles tiles(rows);
    const int64_t needed = rows * w.inputs, panels = (w.outputs + kPanel - 1) / kPanel;
    if (int64_t(scratch.size()) < needed) scratch.resize(needed);
    float* wide = scratch.data();
    const int64_t n = team(needed * w.outputs, kSmallest, threads);
    parallel_ranges(tiles.count, tiles.count > 1 ? n : 1, [&](int64_t from, int64_t to) {
        widen_tiles(x, tiles, w.inputs, wide, from, to);
    });
    const int64_t piece = n == 1 ? panels : std::max<int64_t>(1, panels / (kPieces * n) / 4) * 4;  // fours: see tile
    parallel((panels + piece - 1) / piece, n, [&](int64_t i) {
        panels_range<W, T>(w, wide, tiles, out, i * piece, std::min(panels, (i + 1) * piece));
    });
}

template <typename W>
void pack_panel(const W* weight, int64_t outputs, int64_t inputs, W* panel, int64_t p) {
    for (int64_t k = 0; k < inputs; ++k, panel += kPanel)
        for (int64_t i = 0; i < kPanel; ++i) {
            const int64_t output = p * kPanel + i;
            int64_t slot = i;
            if constexpr (std::is_same_v<W, bf16>) slot = 2 * (i % kLanes) + i / kLanes;
            panel[slot] = output < outputs ? weight[output * inputs + k] : W{};
        }
}

template <typename W>
void pack(const W* weight, int64_t outputs, int64_t inputs, W* panels, int64_t threads) {
    const int64_t count = (outputs + kPanel - 1) / kPanel;
    parallel(count, team(outputs * inputs, kSmallest, threads),
             [&](int64_t p) { pack_panel(weight, outputs, inputs, panels + p * inputs * kPanel, p); });
}

}  // namespace ssd

using namespace ssd;

// Elements of the packed form of a weight [outputs, inputs].
SSD_API int64_t ssd_packed_size(int64_t outputs, int64_t inputs) {
    return (outputs + kPanel - 1) / kPanel * kPanel * inputs;
}

SSD_API void ssd_pack(const void* weight, int64_t outputs, int64_t inputs, int64_t dtype, void* panels,
                      int64_t threads) {
    SSD_DISPATCH(dtype, W, pack(static_cast<const W*>(weight), outputs, inputs, static_cast<W*>(panels), threads))
}

// x: [rows, inputs] -> out: [rows, outputs], both of `dtype`.
SSD_API void ssd_linear(const Linear* w, const void* x, void* out, int64_t rows, int64_t dtype, int64_t threads) {
    perform([=] {
        SSD_DISPATCH(w->weight_dtype, W, SSD_DISPATCH(dtype, T, run<W, T>(*w, static_cast<const T*>(x),
                                                                          static_cast<T*>(out), rows, threads)))
    });
}
