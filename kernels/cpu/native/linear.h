/* Products of a few rows with weight matrices that are read once: out = x weight^T + bias (+ residual), or
   silu(x gate^T) * (x up^T). A tile is a range of outputs for all rows; rows go through in panels that stay in the
   cache together with the tile's weights. */

#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include "dot.h"
#include "elementwise.h"

#define TILE_OUTPUTS 32
#define PANEL_ROWS 64

typedef struct {
    const BatonLinear *linear;
    const BatonLinear *up; /* NULL, or linear is the gate of silu(gate) * up */
    const void *x;         /* [rows, inputs] in the operand's dtype */
    const void *residual;  /* [rows, outputs] in residual_dtype, or NULL */
    void *out;             /* [rows, outputs] in out_dtype */
    int64_t dtype;         /* of the weights */
    int64_t out_dtype;
    int64_t residual_dtype;
    int64_t x_stride;
    int64_t residual_stride;
    int64_t out_stride;
    int64_t rows;
} LinearJob;

INLINE int64_t linear_tiles(const LinearJob *job) { return (job->linear->outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS; }

INLINE void add_bias(float *sums, const BatonLinear *linear, int64_t first, int64_t count) {
    if (!linear->bias) return;
    for (int64_t n = 0; n < count; n++) sums[n] += linear->bias[first + n];
}

/* sums[row][n] = x[row] . weight[first + n] + bias for count outputs from first on. */
static void linear_sums(float sums[PANEL_ROWS][TILE_OUTPUTS], const BatonLinear *linear, const char *x,
                        int64_t x_stride, int64_t rows, int64_t first, int64_t count, int64_t dtype, int is_first_panel) {
    int64_t row_bytes = linear->inputs * element_bytes(dtype);
    for (int64_t n = 0; n < count; n += OUTPUTS_AT_ONCE) {
        const char *w[OUTPUTS_AT_ONCE];
        for (int64_t i = 0; i < OUTPUTS_AT_ONCE; i++) {
            int64_t output = n + i < count ? n + i : count - 1; /* past the end: the last one again */
            w[i] = (const char *)linear->weight + (first + output) * row_bytes;
        }
        int64_t ahead = is_first_panel ? OUTPUTS_AT_ONCE * row_bytes : 0;
        dot(&sums[0][n], TILE_OUTPUTS, w, x, x_stride, linear->inputs, ahead, rows, dtype);
    }
    for (int64_t row = 0; row < rows; row++) add_bias(sums[row], linear, first, count);
}

INLINE void finish_row(const LinearJob *job, int64_t row, int64_t first, int64_t count, float *sums, const float *up,
                       const int64_t out_dtype) {
    char *out = (char *)job->out + (row * job->out_stride + first) * element_bytes(out_dtype);
    if (up) {
        silu_mul_row(out, out_dtype, sums, up, BATON_F32, count);
        return;
    }
    if (job->residual) {
        int64_t at = row * job->residual_stride + first;
        for (int64_t n = 0; n < count; n++) sums[n] += load_one(job->residual, at + n, job->residual_dtype);
    }
    convert(out, out_dtype, sums, BATON_F32, count);
}

static void linear_tile(const LinearJob *job, int64_t tile) {
    int64_t first = tile * TILE_OUTPUTS, left = job->linear->outputs - first;
    int64_t count = left < TILE_OUTPUTS ? left : TILE_OUTPUTS;
    int64_t x_row_bytes = job->x_stride * element_bytes(operand_dtype(job->dtype));
    float sums[PANEL_ROWS][TILE_OUTPUTS], up[PANEL_ROWS][TILE_OUTPUTS];
    for (int64_t begin = 0; begin < job->rows; begin += PANEL_ROWS) {
        int64_t rows = job->rows - begin < PANEL_ROWS ? job->rows - begin : PANEL_ROWS;
        const char *x = (const char *)job->x + begin * x_row_bytes;
        linear_sums(sums, job->linear, x, job->x_stride, rows, first, count, job->dtype, begin == 0);
        if (job->up) linear_sums(up, job->up, x, job->x_stride, rows, first, count, job->dtype, begin == 0);
        for (int64_t row = 0; row < rows; row++) {
            const float *up_row = job->up ? up[row] : NULL;
            if (job->out_dtype == BATON_BF16)
                finish_row(job, begin + row, first, count, sums[row], up_row, BATON_BF16);
            else
                finish_row(job, begin + row, first, count, sums[row], up_row, BATON_F32);
        }
    }
}

#endif
