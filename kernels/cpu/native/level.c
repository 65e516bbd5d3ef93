/* All operations for one level of instruction set. Compiled once for each level, with LEVEL as its name and the
   compiler flags that allow its instructions; dispatch.c chooses. */

#include "layer.h"
#include "race.h"

#define JOIN(a, b) a##b
#define TABLE(level) JOIN(baton_level_, level)
#define TEXT(level) #level
#define NAME(level) TEXT(level)

static int level_linear(BatonContext *context, const BatonLinear *linear, int64_t dtype, const void *x,
                        int64_t x_stride, void *out, int64_t rows) {
    LinearJob job = {.linear = linear, .x = x, .x_stride = x_stride, .out = out, .out_stride = linear->outputs,
                     .dtype = dtype, .out_dtype = dtype, .rows = rows};
    if (operand_dtype(dtype) != dtype) { /* widen x once, not at each use */
        float *wide = context_scratch(context, OPERATION_SCRATCH, rows * linear->inputs);
        if (!wide) return -1;
        for (int64_t row = 0; row < rows; row++)
            convert_any(wide + row * linear->inputs, BATON_F32, (const char *)x + row * x_stride * element_bytes(dtype),
                        dtype, linear->inputs);
        job.x = wide;
        job.x_stride = linear->inputs;
    }
    return run_product(context, (Product){.jobs = {job}, .num_jobs = 1});
}

static int level_norm(BatonContext *context, const void *x, const float *weight, void *out, int64_t rows,
                      int64_t width, double epsilon, int64_t dtype) {
    run_norm(context, (NormJob){out, x, weight, dtype, dtype, rows, width, (float)epsilon});
    return 0;
}

typedef struct {
    const char *gate, *up; /* [rows, width], rows stride apart */
    char *out;
    int64_t stride, rows, width, dtype;
} ActivationJob;

static void activation_task(const void *argument, int64_t tile, int64_t thread) {
    (void)thread;
    const ActivationJob *job = argument;
    int64_t bytes = element_bytes(job->dtype);
    for (int64_t row = tile * ROWS_A_TILE; row < job->rows && row < (tile + 1) * ROWS_A_TILE; row++) {
        const char *gate = job->gate + row * job->stride * bytes, *up = job->up + row * job->stride * bytes;
        char *out = job->out + row * job->width * bytes;
        if (job->dtype == BATON_BF16)
            silu_mul_row(out, BATON_BF16, gate, up, BATON_BF16, job->width);
        else
            silu_mul_row(out, BATON_F32, gate, up, BATON_F32, job->width);
    }
}

static int level_silu_mul(BatonContext *context, const void *gate, const void *up, int64_t stride, void *out,
                          int64_t rows, int64_t width, int64_t dtype) {
    ActivationJob job = {gate, up, out, stride, rows, width, dtype};
    pool_run(context->pool, activation_task, &job, (rows + ROWS_A_TILE - 1) / ROWS_A_TILE);
    return 0;
}

typedef struct {
    char *x;
    const char *cos, *sin;
    int64_t row_stride, heads, head_dim, width, dtype;
} RotateJob;

static void rotate_tile(const void *argument, int64_t row, int64_t thread) {
    (void)thread;
    const RotateJob *job = argument;
    int64_t bytes = element_bytes(job->dtype), angles = row * job->width * bytes;
    for (int64_t head = 0; head < job->heads; head++) {
        char *x = job->x + (row * job->row_stride + head * job->head_dim) * bytes;
        if (job->dtype == BATON_BF16)
            rotate_head(x, BATON_BF16, job->cos + angles, job->sin + angles, BATON_BF16, job->width);
        else
            rotate_head(x, BATON_F32, job->cos + angles, job->sin + angles, BATON_F32, job->width);
    }
}

static int level_rotate(BatonContext *context, void *x, int64_t row_stride, int64_t heads, int64_t head_dim,
                        const void *cos, const void *sin, int64_t width, int64_t rows, int64_t dtype) {
    RotateJob job = {x, cos, sin, row_stride, heads, head_dim, width, dtype};
    pool_run(context->pool, rotate_tile, &job, rows);
    return 0;
}

static int level_attend(BatonContext *context, const BatonCache *cache, const BatonRows *rows, const BatonForm *form,
                        const void *q, int64_t q_stride, int64_t q_heads, void *out, int64_t dtype) {
    int64_t width = attention_width(rows, cache->block_size), group = q_heads / cache->kv_heads;
    int64_t floats = (attention_scratch_floats(group, width, cache->k_dim, cache->v_dim) + 15) / 16 * 16;
    float *scratch = context_scratch(context, OPERATION_SCRATCH, floats * pool_num_threads(context->pool));
    if (!scratch) return -1;
    AttentionJob job = {.cache = cache, .rows = rows, .form = form, .q = q, .out = out, .q_dtype = dtype,
                        .q_stride = q_stride, .out_dtype = dtype, .q_heads = q_heads, .width = width,
                        .scratch = scratch, .scratch_floats = floats};
    pool_run(context->pool, attention_task, &job, rows->num_rows * cache->kv_heads);
    return 0;
}

/* See baton_attend_chunk. */
static int level_attend_chunk(BatonContext *context, const BatonCache *cache, const BatonForm *form,
                              const int32_t *table, const void *q, int64_t q_heads, void *out, int64_t num_queries,
                              int64_t position) {
#if defined(__AVX512BF16__)
    return run_chunk(context, (ChunkJob){.cache = cache, .form = form, .table = table, .q = q, .q_dtype = BATON_BF16,
                                         .q_stride = q_heads * cache->k_dim, .out = out, .q_heads = q_heads,
                                         .num_queries = num_queries, .position = position});
#else
    (void)context, (void)cache, (void)form, (void)table, (void)q, (void)q_heads, (void)out, (void)num_queries;
    (void)position;
    return -1;
#endif
}

extern const BatonLevel TABLE(LEVEL);
const BatonLevel TABLE(LEVEL) = {
    .name = NAME(LEVEL),
    .linear = level_linear,
    .norm = level_norm,
    .silu_mul = level_silu_mul,
    .rotate = level_rotate,
    .attend = level_attend,
    .attend_chunk = level_attend_chunk,
    .layer = level_layer,
    .layer_kv = level_layer_kv,
    .race = run_race,
};
