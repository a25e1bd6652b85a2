// What all kernels share: vector types, the three storage types, conversions, exp, and when to share.
//
// Written with GCC's vector extensions instead of intrinsics, so that one source serves AVX2, AVX-512 and NEON. The
// only intrinsics are conversions and multiply-add, for which there are portable paths too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SSD_API extern "C" __attribute__((visibility("default")))
#define SSD_INLINE inline __attribute__((always_inline))

namespace ssd {

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // the order native/library.py uses
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <int L>
struct Vec {
    typedef float F __attribute__((vector_size(L * 4)));
    typedef int32_t I __attribute__((vector_size(L * 4)));
    typedef uint32_t U __attribute__((vector_size(L * 4)));
    typedef uint16_t H __attribute__((vector_size(L * 2)));
};
using F8 = Vec<8>::F;
using I8 = Vec<8>::I;
using U8 = Vec<8>::U;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- one value ------------------------------------------------------------------------------------------------

SSD_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
SSD_INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

SSD_INLINE float widen(float x) { return x; }
SSD_INLINE float widen(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
SSD_INLINE float widen(f16 x) {
    uint32_t magnitude = x.bits & 0x7fffu, sign = uint32_t(x.bits & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // inf, nan
    // moving the exponent by a product is exact, and right for subnormals too
    return as_float(sign | as_bits(as_float(magnitude << 13) * as_float(0x77800000u)));  // * 2^112
}

template <typename T>
T narrow(float x);
template <>
SSD_INLINE float narrow<float>(float x) {
    return x;
}
template <>
SSD_INLINE bf16 narrow<bf16>(float x) {
    uint32_t bits = as_bits(x);
    if (x != x) return {uint16_t(bits >> 16 | 0x40u)};
    return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};  // to nearest, ties to even
}
template <>
SSD_INLINE f16 narrow<f16>(float x) {
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // rounds to 65536 or more
    if (magnitude < 0x38800000u) {                                    // subnormal: let the adder round
        float shifted = as_float(magnitude) + 0.5f;
        return {uint16_t(sign | (as_bits(shifted) - 0x3f000000u))};
    }
    return {uint16_t(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13)};
}

// ---- vectors of L values ----------------------------------------------------------------------------------------

template <int L>
SSD_INLINE typename Vec<L>::F load(const float* p) {
    typename Vec<L>::F v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <int L>
SSD_INLINE typename Vec<L>::F load(const bf16* p) {
    typename Vec<L>::U wide;
#if defined(__AVX512F__)
    if constexpr (L == 16) {
        wide = (typename Vec<L>::U)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return (typename Vec<L>::F)(wide << 16);
    }
#endif
#if defined(__AVX2__)  // GCC takes five instructions for what is one
    if constexpr (L == 8) {
        wide = (typename Vec<L>::U)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return (typename Vec<L>::F)(wide << 16);
    }
#endif
    typename Vec<L>::H half;
    std::memcpy(&half, p, sizeof half);
    wide = __builtin_convertvector(half, typename Vec<L>::U);
    return (typename Vec<L>::F)(wide << 16);
}
template <int L>
SSD_INLINE typename Vec<L>::F load(const f16* p) {
    typename Vec<L>::F v;
#if defined(__F16C__)
    for (int i = 0; i < L; i += 8) {
        __m256 part = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)));
        std::memcpy(reinterpret_cast<float*>(&v) + i, &part, sizeof part);
    }
#elif defined(__aarch64__)
    typedef __fp16 Half __attribute__((vector_size(L * 2)));
    Half half;
    std::memcpy(&half, p, sizeof half);
    v = __builtin_convertvector(half, typename Vec<L>::F);
#else
    for (int i = 0; i < L; ++i) v[i] = widen(p[i]);
#endif
    return v;
}

template <int L>
SSD_INLINE void store(float* p, typename Vec<L>::F v) {
    std::memcpy(p, &v, sizeof v);
}
template <int L>
SSD_INLINE void store(bf16* p, typename Vec<L>::F v) {
    using U = typename Vec<L>::U;
    U bits = (U)v;
    U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    U nan = bits >> 16 | 0x40u;
    U is_nan = (U)(v != v);
    auto half = __builtin_convertvector((nan & is_nan) | (rounded & ~is_nan), typename Vec<L>::H);
    std::memcpy(p, &half, sizeof half);
}
template <int L>
SSD_INLINE void store(f16* p, typename Vec<L>::F v) {
#if defined(__F16C__)
    for (int i = 0; i < L; i += 8) {
        __m256 part;
        std::memcpy(&part, reinterpret_cast<const float*>(&v) + i, sizeof part);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    for (int i = 0; i < L; ++i) p[i] = narrow<f16>(v[i]);
#endif
}

// a * b + c. Spelt out, and contraction switched off, because a compiler left to choose (GCC tuning for Zen) fuses in
// one instance of a kernel and not in another, and then a row's bits depend on its neighbours.
template <int L>
SSD_INLINE typename Vec<L>::F fma(typename Vec<L>::F a, typename Vec<L>::F b, typename Vec<L>::F c) {
#if defined(__AVX512F__)
    if constexpr (L == 16) return (typename Vec<L>::F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (L == 8) return (typename Vec<L>::F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    float32x4_t parts[3][L / 4];
    std::memcpy(parts[0], &a, sizeof a);
    std::memcpy(parts[1], &b, sizeof b);
    std::memcpy(parts[2], &c, sizeof c);
    for (int i = 0; i < L / 4; ++i) parts[2][i] = vfmaq_f32(parts[2][i], parts[0][i], parts[1][i]);
    std::memcpy(&c, parts[2], sizeof c);
    return c;
#endif
    return a * b + c;
}
SSD_INLINE F8 fma8(F8 a, F8 b, F8 c) { return fma<8>(a, b, c); }
// Subtracting 0 disappears in the compiler; adding it would not (it turns -0 into 0).
template <int L>
SSD_INLINE typename Vec<L>::F splat(float x) {
    return x - typename Vec<L>::F{};
}
SSD_INLINE F8 splat8(float x) { return splat<8>(x); }

// Bits of a where the mask is set, of b elsewhere.
SSD_INLINE F8 select(I8 mask, F8 a, F8 b) { return (F8)((mask & (I8)a) | (~mask & (I8)b)); }
SSD_INLINE F8 maximum(F8 a, F8 b) { return select((I8)(a > b), a, b); }

// e^x to about 1 ulp; exactly 1 at 0, infinite above 88, and exactly 0 below -87, which lets masked keys vanish.
SSD_INLINE F8 exp8(F8 x) {
    const F8 zero = {};
    const F8 magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const I8 underflow = (I8)(x < -87.0f), overflow = (I8)(x > 88.0f);
    F8 n = fma8(x, zero + 1.44269504f, magic) - magic;
    F8 r = fma8(n, zero - 0.693359375f, x);
    r = fma8(n, zero + 2.12194440e-4f, r);
    F8 p = zero + 1.9875691500e-4f;  // Cephes expf
    p = fma8(p, r, zero + 1.3981999507e-3f);
    p = fma8(p, r, zero + 8.3334519073e-3f);
    p = fma8(p, r, zero + 4.1665795894e-2f);
    p = fma8(p, r, zero + 1.6666665459e-1f);
    p = fma8(p, r, zero + 5.0000001201e-1f);
    p = fma8(p, r * r, r) + 1.0f;
    n = select(underflow | overflow, zero, n);  // keeps the conversion in range
    const I8 power = (__builtin_convertvector(n, I8) + 127) << 23;
    return select(underflow, zero, select(overflow, zero + kInfinity, p * (F8)power));
}

#if defined(__clang__)
#define SSD_SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SSD_SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, ::ssd::I8{__VA_ARGS__})
#endif

// Sums a pair of vectors half-way: every lane of every input goes through the same tree, so a sum does not depend on
// which of the eight slots its vector sits in.
SSD_INLINE F8 fold(F8 a, F8 b) {
    return SSD_SHUFFLE8(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SSD_SHUFFLE8(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
// The eight sums of eight vectors.
SSD_INLINE F8 sums(const F8* v) {
    F8 low = fold(fold(v[0], v[1]), fold(v[2], v[3])), high = fold(fold(v[4], v[5]), fold(v[6], v[7]));
    return SSD_SHUFFLE8(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SSD_SHUFFLE8(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}
SSD_INLINE float sum(F8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

// How many threads a piece of work deserves: one when it is too small to share.
SSD_INLINE int64_t team(int64_t work, int64_t smallest, int64_t threads) {
    return work < smallest ? 1 : std::min(threads, work / (smallest / 2));
}

}  // namespace ssd

// Calls fn<T>(args...) for the storage type a dtype number stands for.
#define SSD_DISPATCH(dtype, T, ...)                     \
    switch (dtype) {                                    \
        case ::ssd::kFloat32: { using T = float; __VA_ARGS__; break; }       \
        case ::ssd::kBFloat16: { using T = ::ssd::bf16; __VA_ARGS__; break; } \
        case ::ssd::kFloat16: { using T = ::ssd::f16; __VA_ARGS__; break; }   \
    }
