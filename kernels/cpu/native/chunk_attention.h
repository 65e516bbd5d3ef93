/* Attention of many query rows of one sequence over its paged keys and values, in bfloat16 with sums in float32: one
   pass with an online softmax (Dao et al., FlashAttention, 2022).

   Keys and values are packed first, KEYS of them at a time, so that one product serves both steps: pairs of bfloat16 of
   a row, times packed pairs whose lanes are keys (scores) or columns (values). Where a block of keys begins depends on
   the position of the keys only, so a row's result is the same however its prompt was cut.

   Needs the processor's bfloat16 dot product; elsewhere there is nothing in here. */

#ifndef BATON_CHUNK_ATTENTION_H
#define BATON_CHUNK_ATTENTION_H

#include "attention.h"
#include "context.h"
#include "pairs.h"

#if defined(__AVX512BF16__)

#define KEYS COLUMNS /* in a block; columns of values too */
#define TILE_ROWS (4 * GROUP_ROWS) /* of one task */
#define BLOCK_PAIRS (KEYS / 2)
#define MAX_DIM 1024      /* of keys and values */

typedef struct {
    const BatonCache *cache;
    const BatonForm *form;
    const int32_t *table; /* block ids of the sequence */
    const char *q;        /* [num_queries, q_heads, k_dim] in q_dtype, queries q_stride apart */
    int64_t q_dtype;
    int64_t q_stride;
    char *out;            /* [num_queries, q_heads, v_dim] */
    int64_t q_heads;
    int64_t num_queries;
    int64_t position;    /* of the first query */
    int64_t first_block; /* of keys, of those that are packed */
    int64_t num_blocks;
    uint32_t *keys;      /* [kv_heads, num_blocks, k_dim / 2, KEYS] pairs */
    uint32_t *values;    /* [kv_heads, num_blocks, columns / KEYS, BLOCK_PAIRS, KEYS] pairs */
    int64_t columns;     /* v_dim, up to whole KEYS */
    float *scratch;
    int64_t scratch_floats; /* of each thread */
} ChunkJob;

/* Find the rows of KEYS keys or values from first on; those behind the last one are zeros. */
static void find_rows(const uint16_t *rows[KEYS], const void *pool, int64_t stride, int64_t dim, const ChunkJob *job,
                      int64_t head, int64_t first, int64_t count) {
    static const uint16_t zeros[MAX_DIM];
    int64_t size = job->cache->block_size;
    for (int64_t key = 0; key < KEYS; key++) {
        int64_t at = first + key;
        rows[key] = key < count ? (const uint16_t *)pool + job->table[at / size] * stride + (head * size + at % size) * dim
                                : zeros;
    }
}

static void pack_values(uint32_t *to, const uint16_t *const rows[KEYS], int64_t dim, int64_t columns) {
    for (int64_t begin = 0; begin < columns; begin += KEYS)
        for (int64_t pair = 0; pair < BLOCK_PAIRS; pair++, to += KEYS) {
            const uint16_t *even = rows[2 * pair] + begin, *odd = rows[2 * pair + 1] + begin;
            int64_t count = dim - begin < KEYS ? dim - begin : KEYS;
            for (int64_t column = 0; column < count; column++) to[column] = even[column] | (uint32_t)odd[column] << 16;
            for (int64_t column = count; column < KEYS; column++) to[column] = 0;
        }
}

static void pack_task(const void *argument, int64_t task, int64_t thread) {
    (void)thread;
    const ChunkJob *job = argument;
    int64_t head = task / job->num_blocks, first = (job->first_block + task % job->num_blocks) * KEYS;
    int64_t left = job->position + job->num_queries - first, count = left < KEYS ? left : KEYS;
    const BatonCache *cache = job->cache;
    const uint16_t *rows[KEYS];
    find_rows(rows, cache->k, cache->k_stride, cache->k_dim, job, head, first, count);
    pack_pairs(job->keys + task * cache->k_dim / 2 * KEYS, rows, cache->k_dim / 2);
    find_rows(rows, cache->v, cache->v_stride, cache->v_dim, job, head, first, count);
    pack_values(job->values + task * job->columns * BLOCK_PAIRS, rows, cache->v_dim, job->columns);
}

/* A few query rows while they are attended. */
typedef struct {
    const char *queries[GROUP_ROWS];
    int64_t low[GROUP_ROWS], high[GROUP_ROWS]; /* the keys that a row sees: low <= key < high */
    float top[GROUP_ROWS];                     /* the highest score */
    Lanes total[GROUP_ROWS];                   /* sums of the weights under it */
    float *sums[GROUP_ROWS];                   /* [columns] weighted values */
    int64_t count;                             /* rows that are real; the others repeat the last and are not written */
} QueryRows;

/* Shrink what a row has so far to a new highest score. */
static void raise_top(QueryRows *rows, int row, float top, int64_t columns) {
    Lanes shrink = exp_lanes(splat(rows->top[row] - top));
    rows->total[row] *= shrink;
    for (int64_t at = 0; at < columns; at += LANES)
        store(rows->sums[row], at, load(rows->sums[row], at, BATON_F32) * shrink, BATON_F32);
    rows->top[row] = top;
}

/* The lanes low <= lane < high. */
INLINE IntLanes lanes_within(int64_t low, int64_t high) {
    const IntLanes lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int32_t from = low < 0 ? 0 : low > LANES ? LANES : (int32_t)low, to = high < 0 ? 0 : high > LANES ? LANES : (int32_t)high;
    return (lanes >= from) & (lanes < to);
}

/* Turn the scores of a row for the keys from first on into weights, and make room for them in what it has so far. */
INLINE void weigh_scores(QueryRows *rows, int row, Lanes scores[VECTORS], int64_t first, float scaling, int64_t columns,
                         uint16_t *weights) {
    int64_t low = rows->low[row] - first, high = rows->high[row] - first;
    int is_cut = low > 0 || high < KEYS;
    Lanes highest = splat(rows->top[row]);
    for (int v = 0; v < VECTORS; v++) {
        scores[v] *= scaling;
        if (is_cut) scores[v] = select_lanes(lanes_within(low - v * LANES, high - v * LANES), scores[v], splat(LOWEST));
        highest = max_lanes(highest, scores[v]);
    }
    if (_mm512_cmp_ps_mask((__m512)highest, (__m512)splat(rows->top[row]), _CMP_GT_OQ))
        raise_top(rows, row, lane_max(highest), columns);
    Lanes top = splat(rows->top[row]), total = {};
    for (int v = 0; v < VECTORS; v++) {
        Lanes weight = exp_lanes(scores[v] - top);
        if (is_cut) weight = select_lanes(scores[v] > LOWEST, weight, (Lanes){});
        total += weight;
        __m256bh half = _mm512_cvtneps_pbh((__m512)weight);
        memcpy(weights + v * LANES, &half, sizeof half);
    }
    rows->total[row] += total;
}

static void attend_block(const ChunkJob *job, QueryRows *rows, int64_t head, int64_t block) {
    int64_t k_pairs = job->cache->k_dim / 2, at = head * job->num_blocks + block;
    const uint32_t *values = job->values + at * job->columns * BLOCK_PAIRS;
    uint16_t weights[GROUP_ROWS][KEYS];
    const char *weight_rows[GROUP_ROWS];
    Lanes scores[GROUP_ROWS][VECTORS];
    multiply_pairs(scores, rows->queries, job->keys + at * k_pairs * KEYS, k_pairs, 1, NULL, 0);
    for (int row = 0; row < GROUP_ROWS; row++) {
        weight_rows[row] = (const char *)weights[row];
        weigh_scores(rows, row, scores[row], (job->first_block + block) * KEYS, (float)job->form->scaling, job->columns,
                     weights[row]);
    }
    for (int64_t column = 0; column < job->columns; column += KEYS) {
        Lanes sums[GROUP_ROWS][VECTORS];
        for (int row = 0; row < GROUP_ROWS; row++)
            for (int v = 0; v < VECTORS; v++) sums[row][v] = load(rows->sums[row], column + v * LANES, BATON_F32);
        multiply_pairs(sums, weight_rows, values + column * BLOCK_PAIRS, BLOCK_PAIRS, 0, NULL, 0);
        for (int row = 0; row < GROUP_ROWS; row++)
            for (int v = 0; v < VECTORS; v++) store(rows->sums[row], column + v * LANES, sums[row][v], BATON_F32);
    }
}

/* The query at an index of q as pairs of bfloat16, in place or converted. */
INLINE const char *query_pairs(const ChunkJob *job, int64_t index, uint16_t *converted) {
    if (job->q_dtype == BATON_BF16) return job->q + index * 2;
    convert(converted, BATON_BF16, (const float *)job->q + index, BATON_F32, job->cache->k_dim);
    return (const char *)converted;
}

/* Take the rows from first on, of those of one kv head: the heads of its group by turns for each query. */
static void begin_rows(QueryRows *rows, const ChunkJob *job, int64_t head, int64_t first, float *scratch) {
    int64_t group = job->q_heads / job->cache->kv_heads, num_rows = job->num_queries * group, dim = job->cache->k_dim;
    uint16_t *converted = (uint16_t *)(scratch + GROUP_ROWS * job->columns);
    rows->count = num_rows - first < GROUP_ROWS ? num_rows - first : GROUP_ROWS;
    for (int64_t row = 0; row < GROUP_ROWS; row++) {
        int64_t real = first + (row < rows->count ? row : rows->count - 1), query = real / group;
        int64_t q_head = head * group + real % group, position = job->position + query;
        rows->queries[row] = query_pairs(job, query * job->q_stride + q_head * job->cache->k_dim, converted + row * dim);
        rows->low[row] = first_key(job->form, position);
        rows->high[row] = position + 1;
        rows->top[row] = job->form->sinks ? job->form->sinks[q_head] : LOWEST;
        rows->total[row] = (Lanes){job->form->sinks ? 1.0f : 0.0f};
        rows->sums[row] = scratch + row * job->columns;
    }
    memset(scratch, 0, (size_t)(GROUP_ROWS * job->columns) * sizeof(float));
}

static void end_rows(const QueryRows *rows, const ChunkJob *job, int64_t head, int64_t first) {
    int64_t group = job->q_heads / job->cache->kv_heads, dim = job->cache->v_dim;
    for (int64_t row = 0; row < rows->count; row++) {
        int64_t query = (first + row) / group, q_head = head * group + (first + row) % group;
        float total = lane_sum(rows->total[row]);
        for (int64_t at = 0; at < dim; at++) rows->sums[row][at] /= total;
        convert(job->out + (query * job->q_heads + q_head) * dim * 2, BATON_BF16, rows->sums[row], BATON_F32, dim);
    }
}

static void chunk_task(const void *argument, int64_t task, int64_t thread) {
    const ChunkJob *job = argument;
    int64_t group = job->q_heads / job->cache->kv_heads, num_rows = job->num_queries * group;
    int64_t tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS, head = task / tiles;
    int64_t begin = (tiles - 1 - task % tiles) * TILE_ROWS; /* the longest first */
    int64_t end = begin + TILE_ROWS < num_rows ? begin + TILE_ROWS : num_rows;
    float *scratch = job->scratch + thread * job->scratch_floats;
    for (int64_t first = begin; first < end; first += GROUP_ROWS) {
        QueryRows rows;
        begin_rows(&rows, job, head, first, scratch);
        int64_t past = (rows.high[GROUP_ROWS - 1] + KEYS - 1) / KEYS - job->first_block;
        for (int64_t block = rows.low[0] / KEYS - job->first_block; block < past; block++)
            attend_block(job, &rows, head, block);
        end_rows(&rows, job, head, first);
    }
}

/* Attend with the queries of job, which names all but what is set here; return 0, or -1 when memory is short. */
static int run_chunk(BatonContext *context, ChunkJob job) {
    const BatonCache *cache = job.cache;
    int64_t group = job.q_heads / cache->kv_heads, end = (job.position + job.num_queries + KEYS - 1) / KEYS;
    job.first_block = first_key(job.form, job.position) / KEYS;
    job.num_blocks = end - job.first_block;
    job.columns = (cache->v_dim + KEYS - 1) / KEYS * KEYS;
    job.scratch_floats = GROUP_ROWS * (job.columns + cache->k_dim / 2);
    int64_t keys = cache->kv_heads * job.num_blocks * cache->k_dim / 2 * KEYS;
    int64_t values = cache->kv_heads * job.num_blocks * job.columns * BLOCK_PAIRS;
    int64_t floats = keys + values + job.scratch_floats * pool_num_threads(context->pool);
    float *scratch = context_scratch(context, OPERATION_SCRATCH, floats);
    if (!scratch) return -1;
    job.keys = (uint32_t *)scratch;
    job.values = job.keys + keys;
    job.scratch = scratch + keys + values;
    pool_run(context->pool, pack_task, &job, cache->kv_heads * job.num_blocks);
    pool_run(context->pool, chunk_task, &job, cache->kv_heads * ((job.num_queries * group + TILE_ROWS - 1) / TILE_ROWS));
    return 0;
}

#endif
#endif
