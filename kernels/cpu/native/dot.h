/* The inner product at the heart of everything: four weight rows with up to four rows of x, each element read once.

   dot_f32 multiplies float32 rows. dot_bf16 multiplies bfloat16 weights with an operand of x, which is bfloat16 where
   the processor has a bfloat16 dot product and float32 elsewhere. The order of additions of one output is the same
   whatever the number of rows, so a row's result does not depend on the rows beside it. */

#ifndef BATON_DOT_H
#define BATON_DOT_H

#include "lanes.h"

#define ROWS_AT_ONCE 4
#define OUTPUTS_AT_ONCE 4
#define STREAM_AHEAD 2048 /* bytes that a stream is prefetched ahead */

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

/* out[row][n] = x[row] . w[n] over k elements; strides in elements; ahead: bytes from w to what is read next, 0: w is in
   the cache.

   With up to three rows the first goes through one weight row after the other: a single stream, which the processor
   fetches at twice the speed of four weight rows side by side; the other rows find the weights in the cache. From four
   rows on the loads of x cost more than that, and four outputs at once share them. Both ways add each output in the same
   order. */
#define DEFINE_DOT(NAME, STEP, VALUE, W_BYTES, X_BYTES, LOAD_W, LOAD_X, MULTIPLY_ADD)                                  \
    /* The count elements before the end of a row, then zeros. */                                                      \
    INLINE VALUE NAME##_last_w(const char *from, int64_t count) {                                                      \
        char padded[64] = {};                                                                                          \
        memcpy(padded, from, (size_t)(count * W_BYTES));                                                               \
        return LOAD_W(padded);                                                                                         \
    }                                                                                                                  \
    INLINE VALUE NAME##_last_x(const char *from, int64_t count) {                                                      \
        char padded[64] = {};                                                                                          \
        memcpy(padded, from, (size_t)(count * X_BYTES));                                                               \
        return LOAD_X(padded);                                                                                         \
    }                                                                                                                  \
    INLINE Lanes NAME##_add(Lanes sum, VALUE weight, VALUE value) { return MULTIPLY_ADD(sum, weight, value); }         \
    static Lanes NAME##_one(const char *w, const char *x, int64_t k) {                                                 \
        Lanes sum = {};                                                                                                \
        int64_t at = 0;                                                                                                \
        _Pragma("GCC unroll 2") for (; at + STEP <= k; at += STEP) {                                                   \
            __builtin_prefetch(w + at * W_BYTES + STREAM_AHEAD, 0, 2);                                                 \
            sum = NAME##_add(sum, LOAD_W(w + at * W_BYTES), LOAD_X(x + at * X_BYTES));                                 \
        }                                                                                                              \
        if (at == k) return sum;                                                                                       \
        return NAME##_add(sum, NAME##_last_w(w + at * W_BYTES, k - at), NAME##_last_x(x + at * X_BYTES, k - at));      \
    }                                                                                                                  \
    INLINE void NAME##_stream(float *out, const char *const w[OUTPUTS_AT_ONCE], const char *x, int64_t k) {            \
        Lanes a = NAME##_one(w[0], x, k), b = NAME##_one(w[1], x, k);                                                  \
        Lanes c = NAME##_one(w[2], x, k), d = NAME##_one(w[3], x, k);                                                  \
        store_lane_sums(out, a, b, c, d);                                                                              \
    }                                                                                                                  \
    INLINE void NAME##_block(float *out, int64_t out_stride, const char *const w[OUTPUTS_AT_ONCE], const char *x,      \
                             int64_t x_stride, int64_t k, int64_t ahead, const int rows) {                            \
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
                    NAME##_add(sums[row][n], weights[n], value);                                                       \
            }                                                                                                          \
        }                                                                                                              \
        if (at < k) {                                                                                                  \
            VALUE weights[OUTPUTS_AT_ONCE];                                                                            \
            _Pragma("GCC unroll 4") for (int n = 0; n < OUTPUTS_AT_ONCE; n++) weights[n] =                             \
                NAME##_last_w(w[n] + at * W_BYTES, k - at);                                                            \
            _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++) {                                             \
                VALUE value = NAME##_last_x(x + (row * x_stride + at) * X_BYTES, k - at);                              \
                _Pragma("GCC unroll 4") for (int n = 0; n < OUTPUTS_AT_ONCE; n++) sums[row][n] =                       \
                    NAME##_add(sums[row][n], weights[n], value);                                                       \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++)                                                   \
            store_lane_sums(out + row * out_stride, sums[row][0], sums[row][1], sums[row][2], sums[row][3]);           \
    }                                                                                                                  \
    static void NAME(float *out, int64_t out_stride, const char *const w[OUTPUTS_AT_ONCE], const char *x,              \
                     int64_t x_stride, int64_t k, int64_t ahead, int64_t rows) {                                       \
        if (ahead && rows > 0 && rows < ROWS_AT_ONCE) {                                                                \
            NAME##_stream(out, w, x, k);                                                                               \
            rows--, out += out_stride, x += x_stride * X_BYTES, ahead = 0;                                             \
        }                                                                                                              \
        for (; rows >= 4; rows -= 4, out += 4 * out_stride, x += 4 * x_stride * X_BYTES, ahead = 0)                    \
            NAME##_block(out, out_stride, w, x, x_stride, k, ahead, 4);                                                \
        if (rows == 3) NAME##_block(out, out_stride, w, x, x_stride, k, 0, 3);                                         \
        if (rows == 2) NAME##_block(out, out_stride, w, x, x_stride, k, 0, 2);                                         \
        if (rows == 1) NAME##_block(out, out_stride, w, x, x_stride, k, 0, 1);                                         \
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
