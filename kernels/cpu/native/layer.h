/* One decoder layer of the Llama pattern: norm, q/k/v, rotary, store, attention, output + residual, norm,
   silu(gate) * up, down + residual. Between the operations values stay in float32, or in what the next product takes.
   The layer's output takes the place of its input. */

#ifndef BATON_LAYER_H
#define BATON_LAYER_H

#include "chunk_attention.h"
#include "product.h"

#define ROWS_A_TILE 16

typedef struct {
    const BatonLayer *layer;
    const BatonCache *cache;
    const BatonRows *rows;
    const void *cos, *sin; /* [T, rotary_width] in the layer's dtype */
    int64_t rotary_width;
    float *qkv; /* [T, (q_heads + 2 kv_heads) * head_dim] */
    int64_t qkv_stride;
    int64_t first_head; /* q_heads, when there are no queries */
} PlaceJob;

/* Normalise and rotate one row's query and key heads, store its keys and values. */
INLINE void place_row(const PlaceJob *job, int64_t row, const int64_t dtype) {
    const BatonLayer *layer = job->layer;
    const BatonCache *cache = job->cache;
    int64_t dim = layer->head_dim, angles = row * job->rotary_width * element_bytes(dtype);
    float *q = job->qkv + row * job->qkv_stride, *k = q + layer->q_heads * dim, *v = k + layer->kv_heads * dim;
    for (int64_t head = job->first_head; head < layer->q_heads + layer->kv_heads; head++) {
        const float *weight = head < layer->q_heads ? layer->q_norm : layer->k_norm;
        float *x = q + head * dim;
        if (weight) norm_row(x, BATON_F32, x, BATON_F32, weight, dim, (float)layer->epsilon);
        rotate_head(x, BATON_F32, (const char *)job->cos + angles, (const char *)job->sin + angles, dtype,
                    job->rotary_width);
    }
    int64_t slot = job->rows->slots[row];
    store_slot(cache->k, cache->k_stride, slot, cache->block_size, cache->kv_heads, dim, k, BATON_F32, cache->dtype);
    store_slot(cache->v, cache->v_stride, slot, cache->block_size, cache->kv_heads, dim, v, BATON_F32, cache->dtype);
}

static void place_task(const void *argument, int64_t tile, int64_t thread) {
    (void)thread;
    const PlaceJob *job = argument;
    int64_t end = (tile + 1) * ROWS_A_TILE, last = end < job->rows->num_tokens ? end : job->rows->num_tokens;
    for (int64_t row = tile * ROWS_A_TILE; row < last; row++) {
        if (job->layer->dtype == BATON_BF16)
            place_row(job, row, BATON_BF16);
        else
            place_row(job, row, BATON_F32);
    }
}

/* Scratch of one layer step. */
typedef struct {
    void *normed, *attended, *active; /* [T, hidden], [T, q_heads * head_dim], [T, gate.outputs] operands */
    float *qkv, *middle;              /* [T, (q_heads + 2 kv_heads) * head_dim], [T, hidden] */
    float *attention;                 /* of each thread */
} LayerScratch;

INLINE int64_t qkv_width(const BatonLayer *layer) { return (layer->q_heads + 2 * layer->kv_heads) * layer->head_dim; }

static int take_scratch(BatonContext *context, const BatonLayer *layer, int64_t rows, int64_t attention,
                        LayerScratch *scratch) {
    int64_t hidden = layer->o.outputs, operand = element_bytes(operand_dtype(layer->dtype)), line = 64;
    struct {
        void **part;
        int64_t bytes;
    } parts[] = {
        {&scratch->normed, rows * hidden * operand},
        {&scratch->attended, rows * layer->q_heads * layer->head_dim * operand},
        {&scratch->active, rows * layer->gate.outputs * operand},
        {(void **)&scratch->qkv, rows * qkv_width(layer) * 4},
        {(void **)&scratch->middle, rows * hidden * 4},
        {(void **)&scratch->attention, attention * pool_num_threads(context->pool) * 4},
    };
    int64_t total = 0;
    for (int i = 0; i < 6; i++) total += (parts[i].bytes + line - 1) / line * line;
    char *at = (char *)context_scratch(context, LAYER_SCRATCH, total / 4);
    if (!at) return -1;
    for (int i = 0; i < 6; i++) {
        *parts[i].part = at;
        at += (parts[i].bytes + line - 1) / line * line;
    }
    return 0;
}

typedef struct {
    void *to; /* [rows, width] operands */
    const void *x;
    const float *weight;
    int64_t dtype, operand, rows, width;
    float epsilon;
} NormJob;

INLINE void norm_rows_as(const NormJob *job, int64_t row, int64_t end, const int64_t dtype, const int64_t operand) {
    for (; row < end; row++)
        norm_row((char *)job->to + row * job->width * element_bytes(operand), operand,
                 (const char *)job->x + row * job->width * element_bytes(dtype), dtype, job->weight, job->width, job->epsilon);
}

static void norm_task(const void *argument, int64_t tile, int64_t thread) {
    (void)thread;
    const NormJob *job = argument;
    int64_t row = tile * ROWS_A_TILE, end = row + ROWS_A_TILE < job->rows ? row + ROWS_A_TILE : job->rows;
    if (job->dtype == BATON_BF16 && job->operand == BATON_BF16) norm_rows_as(job, row, end, BATON_BF16, BATON_BF16);
    else if (job->dtype == BATON_BF16) norm_rows_as(job, row, end, BATON_BF16, BATON_F32);
    else if (job->operand == BATON_BF16) norm_rows_as(job, row, end, BATON_F32, BATON_BF16);
    else norm_rows_as(job, row, end, BATON_F32, BATON_F32);
}

INLINE void run_norm(BatonContext *context, NormJob job) {
    pool_run(context->pool, norm_task, &job, (job.rows + ROWS_A_TILE - 1) / ROWS_A_TILE);
}

static int run_chunks(BatonContext *context, const BatonLayer *layer, const BatonCache *cache, const BatonRows *rows,
                      const LayerScratch *scratch) {
#if defined(__AVX512BF16__)
    for (int64_t i = 0; i < rows->num_chunks; i++) {
        const BatonChunk *chunk = &rows->chunks[i];
        ChunkJob job = {
            .cache = cache, .form = &layer->form, .table = chunk->table, .q_dtype = BATON_F32, .q_stride = qkv_width(layer),
            .q = (const char *)(scratch->qkv + chunk->begin * qkv_width(layer)), .q_heads = layer->q_heads,
            .out = (char *)scratch->attended + chunk->begin * layer->q_heads * layer->head_dim * 2,
            .num_queries = chunk->num_queries, .position = chunk->position,
        };
        if (run_chunk(context, job)) return -1;
    }
    return 0;
#else
    (void)context, (void)layer, (void)cache, (void)scratch;
    return rows->num_chunks ? -1 : 0;
#endif
}

static void run_rows(BatonContext *context, const BatonLayer *layer, const BatonCache *cache, const BatonRows *rows,
                     const LayerScratch *scratch, int64_t width, int64_t floats) {
    AttentionJob job = {
        .cache = cache, .rows = rows, .form = &layer->form, .q = scratch->qkv, .out = scratch->attended,
        .q_dtype = BATON_F32, .q_stride = qkv_width(layer), .out_dtype = operand_dtype(layer->dtype),
        .q_heads = layer->q_heads, .width = width, .scratch = scratch->attention, .scratch_floats = floats,
    };
    pool_run(context->pool, attention_task, &job, rows->num_rows * layer->kv_heads);
}

static int run_qkv(BatonContext *context, const BatonLayer *layer, const LayerScratch *scratch, int64_t rows,
                   int has_queries) {
    const BatonLinear *linears[] = {&layer->q, &layer->k, &layer->v};
    float *out = scratch->qkv;
    Product product = {.num_jobs = 0};
    for (int i = 0; i < 3; i++) {
        if (i > 0 || has_queries)
            product.jobs[product.num_jobs++] = (LinearJob){
                .linear = linears[i], .x = scratch->normed, .x_stride = linears[i]->inputs, .out = out,
                .out_stride = qkv_width(layer), .dtype = layer->dtype, .out_dtype = BATON_F32, .rows = rows,
            };
        out += linears[i]->outputs;
    }
    return run_product(context, product);
}

/* A product of the layer's own, contiguous rows. */
static int run_linear(BatonContext *context, LinearJob job) {
    job.x_stride = job.linear->inputs;
    job.residual_stride = job.out_stride = job.linear->outputs;
    return run_product(context, (Product){.jobs = {job}, .num_jobs = 1});
}

/* The layer up to its keys and values, which are stored, and its queries, if it is to have any. */
static int begin_layer(BatonContext *context, const BatonLayer *layer, const BatonCache *cache, const BatonRows *rows,
                       const void *hidden, const void *cos, const void *sin, int64_t rotary_width,
                       const LayerScratch *scratch, int has_queries) {
    int64_t num_tokens = rows->num_tokens, first_head = has_queries ? 0 : layer->q_heads;
    run_norm(context, (NormJob){scratch->normed, hidden, layer->attention_norm, layer->dtype, operand_dtype(layer->dtype),
                                num_tokens, layer->o.outputs, (float)layer->epsilon});
    if (run_qkv(context, layer, scratch, num_tokens, has_queries)) return -1;
    PlaceJob place = {layer, cache, rows, cos, sin, layer->rotary ? rotary_width : 0, scratch->qkv, qkv_width(layer),
                      first_head};
    pool_run(context->pool, place_task, &place, (num_tokens + ROWS_A_TILE - 1) / ROWS_A_TILE);
    return 0;
}

/* See baton_layer_kv. */
static int level_layer_kv(BatonContext *context, const BatonLayer *layer, const BatonCache *cache,
                          const BatonRows *rows, const void *hidden, const void *cos, const void *sin,
                          int64_t rotary_width) {
    LayerScratch scratch;
    if (take_scratch(context, layer, rows->num_tokens, 0, &scratch)) return -1;
    return begin_layer(context, layer, cache, rows, hidden, cos, sin, rotary_width, &scratch, 0);
}

static int level_layer(BatonContext *context, const BatonLayer *layer, const BatonCache *cache, const BatonRows *rows,
                       void *hidden, const void *cos, const void *sin, int64_t rotary_width) {
    int64_t num_tokens = rows->num_tokens, size = layer->o.outputs, dtype = layer->dtype, operand = operand_dtype(dtype);
    int64_t group = layer->q_heads / layer->kv_heads, width = attention_width(rows, cache->block_size);
    int64_t floats = (attention_scratch_floats(group, width, cache->k_dim, cache->v_dim) + 15) / 16 * 16;
    LayerScratch scratch;
    if (take_scratch(context, layer, num_tokens, floats, &scratch)) return -1;
    if (begin_layer(context, layer, cache, rows, hidden, cos, sin, rotary_width, &scratch, 1)) return -1;
    if (run_chunks(context, layer, cache, rows, &scratch)) return -1;
    run_rows(context, layer, cache, rows, &scratch, width, floats);
    LinearJob o = {.linear = &layer->o, .x = scratch.attended, .residual = hidden, .residual_dtype = dtype,
                   .out = scratch.middle, .out_dtype = BATON_F32, .dtype = dtype, .rows = num_tokens};
    if (run_linear(context, o)) return -1;
    run_norm(context, (NormJob){scratch.normed, scratch.middle, layer->mlp_norm, BATON_F32, operand, num_tokens, size,
                                (float)layer->epsilon});
    LinearJob activate = {.linear = &layer->gate, .up = &layer->up, .x = scratch.normed, .out = scratch.active,
                          .out_dtype = operand, .dtype = dtype, .rows = num_tokens};
    if (run_linear(context, activate)) return -1;
    LinearJob down = {.linear = &layer->down, .x = scratch.active, .residual = scratch.middle,
                      .residual_dtype = BATON_F32, .out = hidden, .out_dtype = dtype, .dtype = dtype, .rows = num_tokens};
    return run_linear(context, down);
}

#endif
