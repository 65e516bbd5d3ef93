/* Attention of single query rows over paged keys and values. A task is one row and one kv head: its group of query
   heads shares every key and value that is read. Two passes over the visible keys: all scores, then the weighted
   values, softmax between them in float32. See kernels/paged_attention.py for the formula. */

#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "dot.h"
#include "elementwise.h"

#define VECTORS_AT_ONCE 4

typedef struct {
    const BatonCache *cache;
    const BatonRows *rows;
    const BatonForm *form;
    const void *q; /* [T, q_heads, k_dim] in q_dtype, heads behind each other, rows q_stride apart */
    void *out;     /* [num_rows, q_heads, v_dim] in out_dtype, or at row_ids when scattered */
    int64_t q_dtype;
    int64_t q_stride;
    int64_t out_dtype;
    int64_t q_heads;
    int64_t width; /* scores a head: a multiple of LANES that fits the longest row and a block beyond */
    float *scratch;
    int64_t scratch_floats; /* of each thread */
} AttentionJob;

INLINE int64_t attention_width(const BatonRows *rows, int64_t block_size) {
    int64_t longest = 0;
    for (int64_t row = 0; row < rows->num_rows; row++)
        if (rows->positions[row] >= longest) longest = rows->positions[row] + 1;
    return (longest + block_size + OUTPUTS_AT_ONCE + LANES) / LANES * LANES;
}

INLINE int64_t attention_scratch_floats(int64_t group, int64_t width, int64_t k_dim, int64_t v_dim) {
    return group * (width + k_dim + v_dim) + 3 * LANES;
}

INLINE int64_t first_key(const BatonForm *form, int64_t position) {
    int64_t first = 0;
    if (form->window > 0 && position - form->window + 1 > first) first = position - form->window + 1;
    if (form->chunk > 0 && position / form->chunk * form->chunk > first) first = position / form->chunk * form->chunk;
    return first;
}

INLINE void prefetch_block(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* scores[head][key] = query[head] . key for the keys from first to stop. */
static void score_keys(float *scores, int64_t width, const char *queries, int64_t group, const BatonCache *cache,
                       const int32_t *table, int64_t head, int64_t first, int64_t stop) {
    int64_t size = cache->block_size, dim = cache->k_dim, key_bytes = dim * element_bytes(cache->dtype);
    int64_t block_bytes = cache->k_stride * element_bytes(cache->dtype), offset = head * size * key_bytes;
    for (int64_t block = first / size; block * size < stop; block++) {
        const char *keys = (const char *)cache->k + table[block] * block_bytes + offset;
        int64_t low = first > block * size ? first - block * size : 0;
        int64_t high = stop - block * size < size ? stop - block * size : size;
        if ((block + 1) * size < stop)
            prefetch_block((const char *)cache->k + table[block + 1] * block_bytes + offset, size * key_bytes);
        for (int64_t key = low; key < high; key += OUTPUTS_AT_ONCE) {
            const char *w[OUTPUTS_AT_ONCE];
            for (int64_t i = 0; i < OUTPUTS_AT_ONCE; i++)
                w[i] = keys + (key + i < high ? key + i : high - 1) * key_bytes;
            dot(scores + block * size + key, width, w, queries, dim, dim, 0, group, cache->dtype);
        }
    }
}

/* Turn scores [first, stop) into weights; what lies beside them up to whole lanes becomes 0. */
static void softmax(float *scores, int64_t first, int64_t stop, const BatonForm *form, int64_t head) {
    int64_t begin = first / LANES * LANES, end = (stop + LANES - 1) / LANES * LANES;
    float scaling = (float)form->scaling, cap = (float)form->softcap;
    for (int64_t key = begin; key < first; key++) scores[key] = LOWEST;
    for (int64_t key = stop; key < end; key++) scores[key] = LOWEST;
    Lanes highest = splat(form->sinks ? form->sinks[head] : LOWEST), total = {};
    for (int64_t key = begin; key < end; key += LANES) {
        Lanes score = load(scores, key, BATON_F32), scaled = score * scaling;
        if (cap > 0) {
            Lanes power = exp_lanes(select_lanes(scaled * (2 / cap) > 80.0f, splat(80.0f), scaled * (2 / cap)));
            scaled = cap * (1.0f - 2.0f / (power + 1.0f));
        }
        score = select_lanes(score > LOWEST, scaled, splat(LOWEST));
        store(scores, key, score, BATON_F32);
        highest = max_lanes(highest, score);
    }
    float top = lane_max(highest);
    for (int64_t key = begin; key < end; key += LANES) {
        Lanes score = load(scores, key, BATON_F32);
        Lanes weight = select_lanes(score > LOWEST, exp_lanes(score - top), (Lanes){});
        store(scores, key, weight, BATON_F32);
        total += weight;
    }
    float sum = lane_sum(total) + (form->sinks ? exp_one(form->sinks[head] - top) : 0.0f);
    for (int64_t key = begin; key < end; key += LANES)
        store(scores, key, load(scores, key, BATON_F32) * (1.0f / sum), BATON_F32);
}

/* sums[head][dim] += weight[head][key] * value[key][dim], for the keys low to high of one block. */
INLINE void weigh_lanes(float *sums, const float *weights, int64_t width, const char *values, int64_t dim, int64_t at,
                        int64_t low, int64_t high, const int heads, const int vectors, const int64_t dtype) {
    Lanes totals[ROWS_AT_ONCE][VECTORS_AT_ONCE];
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < vectors; v++) totals[head][v] = load(sums + head * dim, at + v * LANES, BATON_F32);
    for (int64_t key = low; key < high; key++) {
        Lanes value[VECTORS_AT_ONCE];
        for (int v = 0; v < vectors; v++) value[v] = load(values, key * dim + at + v * LANES, dtype);
        for (int head = 0; head < heads; head++) {
            Lanes weight = splat(weights[head * width + key]);
            for (int v = 0; v < vectors; v++) totals[head][v] += weight * value[v];
        }
    }
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < vectors; v++) store(sums + head * dim, at + v * LANES, totals[head][v], BATON_F32);
}

INLINE void weigh_heads(float *sums, const float *weights, int64_t width, const char *values, int64_t dim, int64_t low,
                        int64_t high, const int heads, const int64_t dtype) {
    int64_t at = 0;
    for (; at + VECTORS_AT_ONCE * LANES <= dim; at += VECTORS_AT_ONCE * LANES)
        weigh_lanes(sums, weights, width, values, dim, at, low, high, heads, VECTORS_AT_ONCE, dtype);
    for (; at + LANES <= dim; at += LANES)
        weigh_lanes(sums, weights, width, values, dim, at, low, high, heads, 1, dtype);
    for (; at < dim; at++)
        for (int head = 0; head < heads; head++)
            for (int64_t key = low; key < high; key++)
                sums[head * dim + at] += weights[head * width + key] * load_one(values, key * dim + at, dtype);
}

INLINE void weigh_block(float *sums, const float *weights, int64_t width, int64_t group, const char *values,
                        int64_t dim, int64_t low, int64_t high, const int64_t dtype) {
    for (; group >= 4; group -= 4, sums += 4 * dim, weights += 4 * width)
        weigh_heads(sums, weights, width, values, dim, low, high, 4, dtype);
    if (group == 3) weigh_heads(sums, weights, width, values, dim, low, high, 3, dtype);
    if (group == 2) weigh_heads(sums, weights, width, values, dim, low, high, 2, dtype);
    if (group == 1) weigh_heads(sums, weights, width, values, dim, low, high, 1, dtype);
}

static void weigh_values(float *sums, const float *weights, int64_t width, int64_t group, const BatonCache *cache,
                         const int32_t *table, int64_t head, int64_t first, int64_t stop) {
    int64_t size = cache->block_size, dim = cache->v_dim, bytes = element_bytes(cache->dtype);
    memset(sums, 0, (size_t)(group * dim) * sizeof(float));
    for (int64_t block = first / size; block * size < stop; block++) {
        const char *values = (const char *)cache->v + (table[block] * cache->v_stride + head * size * dim) * bytes;
        int64_t low = first > block * size ? first - block * size : 0;
        int64_t high = stop - block * size < size ? stop - block * size : size;
        if ((block + 1) * size < stop) {
            int64_t next = table[block + 1] * cache->v_stride + head * size * dim;
            prefetch_block((const char *)cache->v + next * bytes, size * dim * bytes);
        }
        if (cache->dtype == BATON_BF16)
            weigh_block(sums, weights + block * size, width, group, values, dim, low, high, BATON_BF16);
        else
            weigh_block(sums, weights + block * size, width, group, values, dim, low, high, BATON_F32);
    }
}

INLINE void convert_any(void *to, int64_t to_dtype, const void *from, int64_t from_dtype, int64_t count) {
    if (to_dtype == BATON_F32 && from_dtype == BATON_F32)
        convert(to, BATON_F32, from, BATON_F32, count);
    else if (to_dtype == BATON_F32)
        convert(to, BATON_F32, from, BATON_BF16, count);
    else if (from_dtype == BATON_F32)
        convert(to, BATON_BF16, from, BATON_F32, count);
    else
        memcpy(to, from, (size_t)count * 2);
}

static void attention_task(const void *argument, int64_t task, int64_t thread) {
    const AttentionJob *job = argument;
    const BatonCache *cache = job->cache;
    int64_t row = task / cache->kv_heads, head = task % cache->kv_heads, group = job->q_heads / cache->kv_heads;
    float *scores = job->scratch + thread * job->scratch_floats;
    float *queries = scores + group * job->width, *sums = queries + group * cache->k_dim;
    const int32_t *table = job->rows->tables + job->rows->sequences[row] * job->rows->table_width;
    int64_t position = job->rows->positions[row], first = first_key(job->form, position);
    int64_t q_at = job->rows->row_ids[row] * job->q_stride + head * group * cache->k_dim;
    convert_any(queries, operand_dtype(cache->dtype), (const char *)job->q + q_at * element_bytes(job->q_dtype),
                job->q_dtype, group * cache->k_dim);
    score_keys(scores, job->width, (const char *)queries, group, cache, table, head, first, position + 1);
    for (int64_t member = 0; member < group; member++)
        softmax(scores + member * job->width, first, position + 1, job->form, head * group + member);
    weigh_values(sums, scores, job->width, group, cache, table, head, first, position + 1);
    int64_t out_at = (job->rows->row_ids[row] * job->q_heads + head * group) * cache->v_dim;
    convert_any((char *)job->out + out_at * element_bytes(job->out_dtype), job->out_dtype, sums, BATON_F32,
                group * cache->v_dim);
}

/* Write one row's key or value heads, x [kv_heads, dim], to their slot. */
INLINE void store_slot(void *pool, int64_t stride, int64_t slot, int64_t block_size, int64_t heads, int64_t dim,
                       const void *x, int64_t x_dtype, int64_t dtype) {
    if (slot < 0) return;
    int64_t bytes = element_bytes(dtype);
    char *to = (char *)pool + (slot / block_size * stride + slot % block_size * dim) * bytes;
    for (int64_t head = 0; head < heads; head++)
        convert_any(to + head * block_size * dim * bytes, dtype,
                    (const char *)x + head * dim * element_bytes(x_dtype), x_dtype, dim);
}

#endif
