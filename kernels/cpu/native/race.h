/* Which of some weighted tokens is drawn: see common/model/race.py, which says the same in numpy. */

#ifndef BATON_RACE_H
#define BATON_RACE_H

#include "lanes.h"

#define RACE_BLOCK 64

/* splitmix64 of Steele, Lea and Flood at the place id of the sequence that key begins; the highest 52 bits of it as a
   number between 0 and 1, neither included. */
INLINE double race_number(uint64_t key, int64_t id) {
    uint64_t word = key + ((uint64_t)id + 1) * 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    word ^= word >> 31;
    word = (word >> 12) | 0x3FF0000000000000u; /* the bits of 1 + word / 2**52 */
    double value;
    memcpy(&value, &word, sizeof value);
    return value - 1.0 + 0x1p-53;
}

/* Return the index of the largest weight / -log(number), of equals the first. ids may be NULL: 0 to count - 1.

   -log(u) is at least 1 - u. So a token whose weight is below best * (1 - u) needs no logarithm: nearly none does. */
static int64_t run_race(const double *weights, const int64_t *ids, int64_t count, uint64_t key) {
    int64_t winner = 0;
    double best = 0, least[RACE_BLOCK];
    for (int64_t begin = 0; begin < count; begin += RACE_BLOCK) {
        int64_t size = count - begin < RACE_BLOCK ? count - begin : RACE_BLOCK;
        const double *weight = weights + begin;
        int may_win = 0;
        if (ids)
            for (int64_t i = 0; i < size; i++) least[i] = 1.0 - race_number(key, ids[begin + i]);
        else
            for (int64_t i = 0; i < size; i++) least[i] = 1.0 - race_number(key, begin + i);
        for (int64_t i = 0; i < size; i++) may_win |= weight[i] > best * least[i];
        if (!may_win) continue;
        for (int64_t i = 0; i < size; i++) {
            if (weight[i] <= best * least[i]) continue;
            double arrived = weight[i] / -log(race_number(key, ids ? ids[begin + i] : begin + i));
            if (arrived <= best) continue;
            best = arrived;
            winner = begin + i;
        }
    }
    return winner;
}

#endif
