/* The threads and the scratch memory of one caller, and the operations of one instruction-set level. */

#ifndef BATON_CONTEXT_H
#define BATON_CONTEXT_H

#include "baton_cpu.h"
#include "pool.h"

struct BatonContext {
    Pool *pool;
    float *scratch[2];
    int64_t scratch_floats[2];
};

/* Operations run inside a layer, and each has its own. */
enum { LAYER_SCRATCH = 0, OPERATION_SCRATCH = 1 };

/* Scratch for num_floats, aligned to a cache line, its contents undefined; NULL when memory is short. */
float *context_scratch(BatonContext *context, int which, int64_t num_floats);

/* All return 0, or -1 when memory is short. */
typedef struct {
    const char *name;
    int (*linear)(BatonContext *, const BatonLinear *, int64_t dtype, const void *x, int64_t x_stride, void *out,
                  int64_t rows);
    int (*norm)(BatonContext *, const void *x, const float *weight, void *out, int64_t rows, int64_t width,
                double epsilon, int64_t dtype);
    int (*silu_mul)(BatonContext *, const void *gate, const void *up, int64_t stride, void *out, int64_t rows,
                    int64_t width, int64_t dtype);
    int (*rotate)(BatonContext *, void *x, int64_t row_stride, int64_t heads, int64_t head_dim, const void *cos,
                  const void *sin, int64_t width, int64_t rows, int64_t dtype);
    int (*attend)(BatonContext *, const BatonCache *, const BatonRows *, const BatonForm *, const void *q,
                  int64_t q_stride, int64_t q_heads, void *out, int64_t dtype);
    int (*attend_chunk)(BatonContext *, const BatonCache *, const BatonForm *, const int32_t *table, const void *q,
                        int64_t q_heads, void *out, int64_t num_queries, int64_t position);
    int (*layer)(BatonContext *, const BatonLayer *, const BatonCache *, const BatonRows *, void *hidden,
                 const void *cos, const void *sin, int64_t rotary_width);
    int (*layer_kv)(BatonContext *, const BatonLayer *, const BatonCache *, const BatonRows *, const void *hidden,
                    const void *cos, const void *sin, int64_t rotary_width);
    int64_t (*race)(const double *weights, const int64_t *ids, int64_t count, uint64_t key);
} BatonLevel;

#endif
