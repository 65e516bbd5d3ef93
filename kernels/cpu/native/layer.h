/* One decoder layer of the Llama pattern for rows that are attended one by one: norm, q/k/v, rotary, store, attention,
   output + residual, norm, silu(gate) * up, down + residual. Between the operations values stay in float32, or in what
   the next product takes. The layer's output takes the place of its input. */

#ifndef BATON_LAYER_H
#define BATON_LAYER_H

#include "attention.h"
#include "context.h"
#include "linear.h"

typedef struct {
    LinearJob jobs[3];
    int64_t ends[3]; /* tiles up to and with each job */
} QkvJob;

static void qkv_tile(const void *argument, int64_t tile, int64_t thread) {
    const QkvJob *job = argument;
    int index = (tile >= job->ends[0]) + (tile >= job->ends[1]);
    linear_tile(&job->jobs[index], tile - (index ? job->ends[index - 1] : 0), thread);
}

typedef struct {
    const BatonLayer *layer;
    const BatonCache *cache;
    const BatonRows *rows;
    const void *cos, *sin; /* [T, rotary_width] in the layer's dtype */
    int64_t rotary_width;
    float *qkv; /* [T, (q_heads + 2 kv_heads) * head_dim] */
    int64_t qkv_stride;
} PlaceJob;

/* Normalise and rotate one row's query and key heads, store its keys and values. */
INLINE void place_row(const PlaceJob *job, int64_t row, const int64_t dtype) {
    const BatonLayer *layer = job->layer;
    const BatonCache *cache = job->cache;
    int64_t dim = layer->head_dim, angles = row * job->rotary_width * element_bytes(dtype);
    float *q = job->qkv + row * job->qkv_stride, *k = q + layer->q_heads * dim, *v = k + layer->kv_heads * dim;
    for (int64_t head = 0; head < layer->q_heads + layer->kv_heads; head++) {
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

static void place_tile(const void *argument, int64_t row, int64_t thread) {
    (void)thread;
    const PlaceJob *job = argument;
    if (job->layer->dtype == BATON_BF16)
        place_row(job, row, BATON_BF16);
    else
        place_row(job, row, BATON_F32);
}

/* Scratch of one layer step; sizes in floats, operands take at most that. */
typedef struct {
    float *normed, *qkv, *attended, *middle, *active, *attention;
} LayerScratch;

static int take_scratch(BatonContext *context, const BatonLayer *layer, int64_t rows, int64_t attention,
                        LayerScratch *scratch) {
    int64_t hidden = layer->o.outputs, heads = layer->q_heads + 2 * layer->kv_heads, line = 16;
    int64_t sizes[] = {rows * hidden, rows * heads * layer->head_dim, rows * layer->q_heads * layer->head_dim,
                       rows * hidden, rows * layer->gate.outputs, attention * pool_num_threads(context->pool)};
    float **parts[] = {&scratch->normed, &scratch->qkv, &scratch->attended,
                       &scratch->middle, &scratch->active, &scratch->attention};
    int64_t total = 0;
    for (int i = 0; i < 6; i++) total += (sizes[i] + line - 1) / line * line;
    float *at = context_scratch(context, total);
    if (!at) return -1;
    for (int i = 0; i < 6; i++) {
        *parts[i] = at;
        at += (sizes[i] + line - 1) / line * line;
    }
    return 0;
}

INLINE void norm_rows_into(void *to, const void *x, const int64_t dtype, const float *weight, int64_t rows,
                           int64_t width, double epsilon, int64_t operand) {
    for (int64_t row = 0; row < rows; row++) {
        const char *from = (const char *)x + row * width * element_bytes(dtype);
        if (operand == BATON_BF16)
            norm_row((uint16_t *)to + row * width, BATON_BF16, from, dtype, weight, width, (float)epsilon);
        else
            norm_row((float *)to + row * width, BATON_F32, from, dtype, weight, width, (float)epsilon);
    }
}

static void run_attention(BatonContext *context, const BatonLayer *layer, const BatonCache *cache,
                          const BatonRows *rows, const LayerScratch *scratch, int64_t width, int64_t floats) {
    int64_t dim = layer->head_dim;
    AttentionJob job = {
        .cache = cache, .rows = rows, .form = &layer->form, .q = scratch->qkv, .out = scratch->attended,
        .q_dtype = BATON_F32, .q_stride = (layer->q_heads + 2 * layer->kv_heads) * dim,
        .out_dtype = operand_dtype(layer->dtype), .q_heads = layer->q_heads, .width = width,
        .scratch = scratch->attention, .scratch_floats = floats,
    };
    pool_run(context->pool, attention_task, &job, rows->num_rows * layer->kv_heads);
}

static void run_qkv(BatonContext *context, const BatonLayer *layer, const LayerScratch *scratch, int64_t rows) {
    const BatonLinear *linears[] = {&layer->q, &layer->k, &layer->v};
    int64_t stride = (layer->q_heads + 2 * layer->kv_heads) * layer->head_dim, tiles = 0, column = 0;
    QkvJob job;
    for (int i = 0; i < 3; i++) {
        job.jobs[i] = (LinearJob){
            .linear = linears[i], .x = scratch->normed, .x_stride = linears[i]->inputs, .out = scratch->qkv + column,
            .out_stride = stride, .dtype = layer->dtype, .out_dtype = BATON_F32, .rows = rows,
        };
        column += linears[i]->outputs;
        job.ends[i] = tiles += num_linear_tiles(linears[i]);
    }
    pool_run(context->pool, qkv_tile, &job, tiles);
}

static void run_linear(BatonContext *context, LinearJob job) {
    job.x_stride = job.linear->inputs;
    job.residual_stride = job.out_stride = job.linear->outputs;
    pool_run(context->pool, linear_tile, &job, num_linear_tiles(job.linear));
}

static int level_layer(BatonContext *context, const BatonLayer *layer, const BatonCache *cache, const BatonRows *rows,
                       void *hidden, const void *cos, const void *sin, int64_t rotary_width) {
    int64_t num_rows = rows->num_rows, size = layer->o.outputs, dtype = layer->dtype, operand = operand_dtype(dtype);
    int64_t group = layer->q_heads / layer->kv_heads, width = attention_width(rows, cache->block_size);
    int64_t floats = (attention_scratch_floats(group, width, cache->k_dim, cache->v_dim) + 15) / 16 * 16;
    LayerScratch scratch;
    if (take_scratch(context, layer, num_rows, floats, &scratch)) return -1;
    if (dtype == BATON_BF16)
        norm_rows_into(scratch.normed, hidden, BATON_BF16, layer->attention_norm, num_rows, size, layer->epsilon, operand);
    else
        norm_rows_into(scratch.normed, hidden, BATON_F32, layer->attention_norm, num_rows, size, layer->epsilon, operand);
    run_qkv(context, layer, &scratch, num_rows);
    PlaceJob place = {layer, cache, rows, cos, sin, layer->rotary ? rotary_width : 0, scratch.qkv,
                      (layer->q_heads + 2 * layer->kv_heads) * layer->head_dim};
    for (int64_t row = 0; row < num_rows; row++) place_tile(&place, row, 0);
    run_attention(context, layer, cache, rows, &scratch, width, floats);
    run_linear(context, (LinearJob){.linear = &layer->o, .x = scratch.attended, .residual = hidden,
                                    .residual_dtype = dtype, .out = scratch.middle, .out_dtype = BATON_F32,
                                    .dtype = dtype, .rows = num_rows});
    norm_rows_into(scratch.normed, scratch.middle, BATON_F32, layer->mlp_norm, num_rows, size, layer->epsilon, operand);
    run_linear(context, (LinearJob){.linear = &layer->gate, .up = &layer->up, .x = scratch.normed,
                                    .out = scratch.active, .out_dtype = operand, .dtype = dtype, .rows = num_rows});
    run_linear(context, (LinearJob){.linear = &layer->down, .x = scratch.active, .residual = scratch.middle,
                                    .residual_dtype = BATON_F32, .out = hidden, .out_dtype = dtype, .dtype = dtype,
                                    .rows = num_rows});
    return 0;
}

#endif
