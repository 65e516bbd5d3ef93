/* Products of many rows with weight matrices in bfloat16. A tile is COLUMNS outputs of WIDE_TILE_ROWS rows; tiles of the same
   outputs follow each other, so that a thread packs their weights once and then has them in its cache. Multiplying leaves
   the memory idle; so the weights that are packed next are brought into the cache meanwhile.

   Needs the processor's bfloat16 dot product; elsewhere there is nothing in here. */

#ifndef BATON_WIDE_H
#define BATON_WIDE_H

#include "linear.h"
#include "pairs.h"

#if defined(__AVX512BF16__)

#define WIDE_TILE_ROWS (16 * GROUP_ROWS)

/* The weights that one thread has packed last. */
typedef struct {
    int64_t panel; /* which; -1: none */
    uint32_t pairs[] __attribute__((aligned(64))); /* [inputs / 2, COLUMNS] */
} PackedWeights;

INLINE int64_t packed_bytes(int64_t inputs) { return (int64_t)sizeof(PackedWeights) + inputs / 2 * COLUMNS * 4; }

INLINE int64_t wide_row_tiles(const LinearJob *job) { return (job->rows + WIDE_TILE_ROWS - 1) / WIDE_TILE_ROWS; }

/* Outputs of a tile: of a gate half of the columns, the other half are its up states. */
INLINE int64_t wide_outputs(const LinearJob *job) { return job->up ? COLUMNS / 2 : COLUMNS; }

INLINE int64_t wide_tiles(const LinearJob *job) {
    return (job->linear->outputs + wide_outputs(job) - 1) / wide_outputs(job) * wide_row_tiles(job);
}

/* Pack the weights of count outputs from first on, those of the gate before those of up; columns behind them repeat. */
static void pack_weights(PackedWeights *packed, const LinearJob *job, int64_t first, int64_t count) {
    const uint16_t *rows[COLUMNS];
    int64_t inputs = job->linear->inputs, outputs = wide_outputs(job);
    for (int64_t column = 0; column < COLUMNS; column++) {
        const BatonLinear *linear = column < outputs ? job->linear : job->up;
        int64_t n = column % outputs;
        rows[column] = (const uint16_t *)linear->weight + (first + (n < count ? n : count - 1)) * inputs;
    }
    pack_pairs(packed->pairs, rows, inputs / 2);
}

/* Bytes that are read ahead with each pair: when all rows have been multiplied, it was as much as is packed at a time. */
INLINE int64_t ahead_step(const LinearJob *job) {
    int64_t groups = (job->rows + GROUP_ROWS - 1) / GROUP_ROWS;
    return (COLUMNS * 4 + groups - 1) / groups;
}

/* Where to read ahead while the rows from row on are multiplied: in the weights behind those of the outputs from first
   on, which are packed next. Behind the last ones there are often those of the next product, and nothing else does no
   harm: it is only a hint. */
INLINE const char *ahead_of(const LinearJob *job, int64_t first, int64_t row) {
    int64_t inputs = job->linear->inputs, bytes = wide_outputs(job) * inputs * 2;
    int64_t at = row / GROUP_ROWS * (inputs / 2) * ahead_step(job), is_up = job->up && at >= bytes;
    const BatonLinear *linear = is_up ? job->up : job->linear;
    return (const char *)linear->weight + first * inputs * 2 + (is_up ? at : bytes + at);
}

/* The outputs from first on of up to GROUP_ROWS rows from row on. */
static void wide_group(const LinearJob *job, const PackedWeights *packed, int64_t first, int64_t count, int64_t row,
                       int64_t rows) {
    const char *x[GROUP_ROWS]; /* behind the last row it repeats */
    for (int64_t r = 0; r < GROUP_ROWS; r++)
        x[r] = (const char *)job->x + (row + (r < rows ? r : rows - 1)) * job->x_stride * 2;
    Lanes sums[GROUP_ROWS][VECTORS];
    multiply_pairs(sums, x, packed->pairs, job->linear->inputs / 2, 1, ahead_of(job, first, row), ahead_step(job));
    for (int64_t r = 0; r < rows; r++) {
        float *values = (float *)sums[r], *up = job->up ? values + COLUMNS / 2 : NULL;
        add_bias(values, job->linear, first, count);
        if (up) add_bias(up, job->up, first, count);
        if (job->out_dtype == BATON_BF16)
            finish_row(job, row + r, first, count, values, up, BATON_BF16);
        else
            finish_row(job, row + r, first, count, values, up, BATON_F32);
    }
}

/* Tile number tile of job; panel names its weights among all that the thread packs. */
static void wide_tile(const LinearJob *job, int64_t tile, int64_t panel, PackedWeights *packed) {
    int64_t first = tile / wide_row_tiles(job) * wide_outputs(job), left = job->linear->outputs - first;
    int64_t count = left < wide_outputs(job) ? left : wide_outputs(job);
    int64_t begin = tile % wide_row_tiles(job) * WIDE_TILE_ROWS;
    int64_t end = begin + WIDE_TILE_ROWS < job->rows ? begin + WIDE_TILE_ROWS : job->rows;
    if (packed->panel != panel) pack_weights(packed, job, first, count);
    packed->panel = panel;
    for (int64_t row = begin; row < end; row += GROUP_ROWS)
        wide_group(job, packed, first, count, row, end - row < GROUP_ROWS ? end - row : GROUP_ROWS);
}

#endif
#endif
