/* float32 lanes, as many as one register of this level holds, and the few operations on them that loops need.

   Included by level.c, which is compiled once for each level of instruction set. */

#ifndef BATON_LANES_H
#define BATON_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "baton_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define LOWEST -3.0e38f

typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t IntLanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t BitLanes __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfLanes __attribute__((vector_size(LANES * 2)));

INLINE Lanes splat(float value) { return value - (Lanes){}; }

INLINE int64_t element_bytes(int64_t dtype) { return dtype == BATON_BF16 ? 2 : 4; }

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The element at index, and the lanes from index on, as float32. */
INLINE float load_one(const void *from, int64_t index, const int64_t dtype) {
    if (dtype == BATON_F32) return ((const float *)from)[index];
    return float_of_bits((uint32_t)((const uint16_t *)from)[index] << 16);
}

INLINE Lanes load(const void *from, int64_t index, const int64_t dtype) {
    if (dtype == BATON_F32) {
        Lanes value;
        memcpy(&value, (const float *)from + index, sizeof value);
        return value;
    }
    HalfLanes half;
    memcpy(&half, (const uint16_t *)from + index, sizeof half);
    return (Lanes)(__builtin_convertvector(half, BitLanes) << 16);
}

/* Round to the nearest bfloat16, ties to even; a NaN stays one. */
INLINE uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store_one(void *to, int64_t index, float value, const int64_t dtype) {
    if (dtype == BATON_F32)
        ((float *)to)[index] = value;
    else
        ((uint16_t *)to)[index] = bf16_of(value);
}

INLINE void store(void *to, int64_t index, Lanes value, const int64_t dtype) {
    if (dtype == BATON_F32) {
        memcpy((float *)to + index, &value, sizeof value);
        return;
    }
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)value);
    memcpy((uint16_t *)to + index, &half, sizeof half);
#else
    BitLanes bits = (BitLanes)value, is_nan = (BitLanes)(value != value);
    BitLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    HalfLanes half = __builtin_convertvector(rounded, HalfLanes);
    memcpy((uint16_t *)to + index, &half, sizeof half);
#endif
}

INLINE float lane_sum(Lanes value) {
    float sum = 0;
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) value[lane] += value[lane + width];
    return sum + value[0];
}

INLINE float lane_max(Lanes value) {
    float highest = value[0];
    for (int lane = 1; lane < LANES; lane++) highest = value[lane] > highest ? value[lane] : highest;
    return highest;
}

INLINE Lanes select_lanes(IntLanes where, Lanes yes, Lanes no) {
    return (Lanes)(((IntLanes)yes & where) | ((IntLanes)no & ~where));
}

INLINE Lanes max_lanes(Lanes a, Lanes b) { return select_lanes(a > b, a, b); }

/* Write the sums of the lanes of a, b, c and d to four floats. Each sum is added in the same order, so that a value
   does not depend on its neighbours or its place. */
#if defined(__AVX2__)
INLINE __m128 quarter_sums(Lanes a, Lanes b, Lanes c, Lanes d) {
#if defined(__AVX512F__)
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d), _mm256_unpackhi_ps((__m256)c, (__m256)d));
    __m256 half = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

INLINE void store_lane_sums(float *to, Lanes a, Lanes b, Lanes c, Lanes d) {
    _mm_storeu_ps(to, quarter_sums(a, b, c, d));
}
#else
INLINE void store_lane_sums(float *to, Lanes a, Lanes b, Lanes c, Lanes d) {
    to[0] = lane_sum(a);
    to[1] = lane_sum(b);
    to[2] = lane_sum(c);
    to[3] = lane_sum(d);
}
#endif

/* e**x for x up to 88, to two units in the last place; below -87 as at -87. x = n ln 2 + r, |r| <= ln 2 / 2; e**r by
   the polynomial of the Cephes library (expf), times 2**n made of bits. */
INLINE Lanes exp_lanes(Lanes x) {
    const float magic = 12582912.0f; /* 1.5 * 2**23: adding it rounds to an integer */
    x = max_lanes(x, splat(-87.0f));
    Lanes n = (x * 1.44269504f + magic) - magic;
    Lanes r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Lanes power = splat(1.9875691500e-4f);
    power = power * r + 1.3981999507e-3f;
    power = power * r + 8.3334519073e-3f;
    power = power * r + 4.1665795894e-2f;
    power = power * r + 1.6666665459e-1f;
    power = power * r + 5.0000001201e-1f;
    power = power * r * r + r + 1.0f;
    IntLanes exponent = (__builtin_convertvector(n, IntLanes) + 127) << 23;
    return power * (Lanes)exponent;
}

INLINE float exp_one(float x) { return exp_lanes(splat(x))[0]; }

#endif
