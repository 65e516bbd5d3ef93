/* The inner product at the heart of everything: four weight rows with up to four rows of x, each element read once.

   dot_f32 multiplies float32 rows. dot_bf16 multiplies bfloat16 weights with an operand of x, which is bfloat16 where
   the processor has a bfloat16 dot product and float32 elsewhere. The order of additions of one output is the same
   whatever the number of rows, so a row's result does not depend on the rows beside it. */

#ifndef BATON_DOT_H
#define BATON_DOT_H

#include "lanes.h"

#define ROWS_AT_ONCE 4
#define OUTPUTS_AT_ONCE 4

#if defined(__AVX512BF16__)
#define OPERAND_OF_BF16 BATON_BF16
#define PAIRS (2 * LANES)
typedef __m512bh Pairs;
INLINE Pairs load_pairs(const void *from) { return (Pairs)_mm512_loadu_si512(from); }
INLINE Lanes dot_pairs(Lanes sum, Pairs a, Pairs b) { return (Lanes)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
#define OPERAND_OF_BF16 BATON_F32
#endif

/* How x must be stored to be multiplied with weights of dtype. */
INLINE int64_t operand_dtype(int64_t dtype) { return dtype == BATON_BF16 ? OPERAND_OF_BF16 : BATON_F32; }

/* out[row][n] = x[row] . w[n] over k elements; strides in elements; ahead: bytes from w to what is worth prefetching. */
#define DEFINE_DOT(NAME, STEP, VALUE, W_BYTES, X_BYTES, LOAD_W, LOAD_X, MULTIPLY_ADD)                                  \
    INLINE void NAME##_rows(float *out, int64_t out_stride, const char *const w[OUTPUTS_AT_ONCE], const char *x,       \
                            int64_t x_stride, int64_t k, int64_t ahead, const int rows) {                             \
        Lanes sums[ROWS_AT_ONCE][OUTPUTS_AT_ONCE] = {};                                                                \
        int64_t at = 0;                                                                                                \
        for (; at + STEP <= k; at += STEP) {                                                                           \
            VALUE weights[OUTPUTS_AT_ONCE];                                                                            \
            _Pragma("GCC unroll 4") for (int n = 0; n < OUTPUTS_AT_ONCE; n++) {                                        \
                weights[n] = LOAD_W(w[n] + at * W_BYTES);                                                              \
                if (ahead) __builtin_prefetch(w[n] + at * W_BYTES + ahead, 0, 2);                                      \
            }                                                                                                          \
            _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++) {                                             \
                VALUE value = LOAD_X(x + (row * x_stride + at) * X_BYTES);                                             \
                _Pragma("GCC unroll 4") for (int n = 0; n < OUTPUTS_AT_ONCE; n++) sums[row][n] =                       \
                    MULTIPLY_ADD(sums[row][n], weights[n], value);                                                     \
            }                                                                                                          \
        }                                                                                                              \
        if (at < k) {                                                                                                  \
            char padded[2][64] = {}; /* the last elements, then zeros */                                               \
            VALUE weights[OUTPUTS_AT_ONCE];                                                                            \
            _Pragma("GCC unroll 4") for (int n = 0; n < OUTPUTS_AT_ONCE; n++) {                                        \
                memcpy(padded[0], w[n] + at * W_BYTES, (size_t)((k - at) * W_BYTES));                                  \
                weights[n] = LOAD_W(padded[0]);                                                                        \
            }                                                                                                          \
            _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++) {                                             \
                memcpy(padded[1], x + (row * x_stride + at) * X_BYTES, (size_t)((k - at) * X_BYTES));                  \
                VALUE value = LOAD_X(padded[1]);                                                                       \
                _Pragma("GCC unroll 4") for (int n = 0; n < OUTPUTS_AT_ONCE; n++) sums[row][n] =                       \
                    MULTIPLY_ADD(sums[row][n], weights[n], value);                                                     \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++)                                                   \
            store_lane_sums(out + row * out_stride, sums[row][0], sums[row][1], sums[row][2], sums[row][3]);           \
    }                                                                                                                  \
    static void NAME(float *out, int64_t out_stride, const char *const w[OUTPUTS_AT_ONCE], const char *x,              \
                     int64_t x_stride, int64_t k, int64_t ahead, int64_t rows) {                                       \
        for (; rows >= 4; rows -= 4, out += 4 * out_stride, x += 4 * x_stride * X_BYTES, ahead = 0)                    \
            NAME##_rows(out, out_stride, w, x, x_stride, k, ahead, 4);                                                 \
        if (rows == 3) NAME##_rows(out, out_stride, w, x, x_stride, k, ahead, 3);                                      \
        if (rows == 2) NAME##_rows(out, out_stride, w, x, x_stride, k, ahead, 2);                                      \
        if (rows == 1) NAME##_rows(out, out_stride, w, x, x_stride, k, ahead, 1);                                      \
    }

#define LOAD_F32(from) load(from, 0, BATON_F32)
#define LOAD_BF16(from) load(from, 0, BATON_BF16)
#define MULTIPLY_ADD_LANES(sum, a, b) ((sum) + (a) * (b))

DEFINE_DOT(dot_f32, LANES, Lanes, 4, 4, LOAD_F32, LOAD_F32, MULTIPLY_ADD_LANES)
#if defined(__AVX512BF16__)
DEFINE_DOT(dot_bf16, PAIRS, Pairs, 2, 2, load_pairs, load_pairs, dot_pairs)
#else
DEFINE_DOT(dot_bf16, LANES, Lanes, 2, 4, LOAD_BF16, LOAD_F32, MULTIPLY_ADD_LANES)
#endif

/* The same for weights of a dtype known at run time. */
INLINE void dot(float *out, int64_t out_stride, const char *const w[OUTPUTS_AT_ONCE], const char *x, int64_t x_stride,
                int64_t k, int64_t ahead, int64_t rows, int64_t dtype) {
    if (dtype == BATON_BF16)
        dot_bf16(out, out_stride, w, x, x_stride, k, ahead, rows);
    else
        dot_f32(out, out_stride, w, x, x_stride, k, ahead, rows);
}

#endif
