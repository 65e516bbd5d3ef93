/* Products of pairs of bfloat16 with packed pairs, which the processor's bfloat16 dot product takes: the heart of whatever
   multiplies many rows.

   Packed are COLUMNS rows of a matrix (keys, or the weights of as many outputs): first the pair at 0 of each of them, then
   the pair at 1, and so on, so that a register holds one pair of 16 rows. Then one pair of a row of the other matrix is
   multiplied with all of them, and a result is a lane of its own: nothing is added across lanes, and the order of
   additions is that of the pairs.

   Needs the processor's bfloat16 dot product; elsewhere there is nothing in here. */

#ifndef BATON_PAIRS_H
#define BATON_PAIRS_H

#include "dot.h"

#if defined(__AVX512BF16__)

#define COLUMNS 64 /* packed together */
#define VECTORS (COLUMNS / LANES)
#define GROUP_ROWS 6 /* at once: with VECTORS sums each they fill the registers */

/* sums[row] = the pairs of row a[row] times the packed pairs of b, and what was there before unless from_zero. With each
   pair ahead_step bytes of what lies ahead, if anything does, are brought into the second-level cache. */
INLINE void multiply_pairs(Lanes sums[GROUP_ROWS][VECTORS], const char *const a[GROUP_ROWS], const uint32_t *b,
                           int64_t num_pairs, const int from_zero, const char *ahead, int64_t ahead_step) {
    Lanes total[GROUP_ROWS][VECTORS];
    _Pragma("GCC unroll 6") for (int row = 0; row < GROUP_ROWS; row++)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) total[row][v] = from_zero ? (Lanes){} : sums[row][v];
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        if (ahead) __builtin_prefetch(ahead + pair * ahead_step, 0, 2);
        Pairs packed[VECTORS];
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) packed[v] = load_pairs(b + pair * COLUMNS + v * LANES);
        _Pragma("GCC unroll 6") for (int row = 0; row < GROUP_ROWS; row++) {
            int32_t both;
            memcpy(&both, a[row] + 4 * pair, 4);
            Pairs value = (Pairs)_mm512_set1_epi32(both);
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
                total[row][v] = dot_pairs(total[row][v], value, packed[v]);
        }
    }
    _Pragma("GCC unroll 6") for (int row = 0; row < GROUP_ROWS; row++)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) sums[row][v] = total[row][v];
}

/* Turn 16 rows of 16 pairs into 16 columns of them, COLUMNS apart: halves, then quarters, are exchanged between rows. */
INLINE void transpose_pairs(uint32_t *to, const uint16_t *const rows[LANES], int64_t pair) {
    __m512i a[LANES], b[LANES];
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(rows[i] + 2 * pair);
    _Pragma("GCC unroll 8") for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < LANES; i += 4)
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
        }
    _Pragma("GCC unroll 2") for (int i = 0; i < LANES; i += 8)
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0x88);
            b[i + 4 + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0xdd);
        }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
            _mm512_storeu_si512(to + (4 * i + j) * COLUMNS, _mm512_shuffle_i32x4(b[4 * i + j], b[8 + 4 * i + j], 0x88));
            _mm512_storeu_si512(to + (8 + 4 * i + j) * COLUMNS, _mm512_shuffle_i32x4(b[4 * i + j], b[8 + 4 * i + j], 0xdd));
        }
}

/* Pack the first num_pairs pairs of COLUMNS rows. */
static void pack_pairs(uint32_t *to, const uint16_t *const rows[COLUMNS], int64_t num_pairs) {
    for (int64_t begin = 0; begin < COLUMNS; begin += LANES) {
        int64_t pair = 0;
        for (; pair + LANES <= num_pairs; pair += LANES) transpose_pairs(to + pair * COLUMNS + begin, rows + begin, pair);
        for (; pair < num_pairs; pair++)
            for (int64_t row = begin; row < begin + LANES; row++) memcpy(&to[pair * COLUMNS + row], rows[row] + 2 * pair, 4);
    }
}

#endif
#endif
