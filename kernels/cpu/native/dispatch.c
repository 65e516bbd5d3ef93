/* What Python calls: contexts, and each operation at the highest level that the processor has. */

#include "context.h"

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define EXPORT __attribute__((visibility("default")))

extern const BatonLevel baton_level_portable;
#if defined(__x86_64__)
extern const BatonLevel baton_level_avx2, baton_level_avx512, baton_level_avx512_bf16;

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

static const BatonLevel *level = &baton_level_portable;

/* Take the highest level, or the one called wanted; return its name, or NULL when the processor does not have it. */
EXPORT const char *baton_choose_level(const char *wanted) {
    const BatonLevel *found[4];
    int count = 0;
#if defined(__x86_64__)
    if (has_avx512() && __builtin_cpu_supports("avx512bf16")) found[count++] = &baton_level_avx512_bf16;
    if (has_avx512()) found[count++] = &baton_level_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = &baton_level_avx2;
#endif
    found[count++] = &baton_level_portable;
    for (int i = 0; i < count; i++) {
        if (wanted && strcmp(wanted, found[i]->name)) continue;
        level = found[i];
        return level->name;
    }
    return NULL;
}

/* Whether the processor multiplies tiles of bfloat16 (Intel's AMX), which torch uses and nothing in here does. */
EXPORT int baton_has_tile_products(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1;
#else
    return 0;
#endif
}

EXPORT int64_t baton_abi(void) { return BATON_ABI; }

EXPORT BatonContext *baton_context_new(int64_t num_threads) {
    BatonContext *context = calloc(1, sizeof *context);
    if (!context) return NULL;
    context->pool = pool_new(num_threads);
    if (context->pool) return context;
    free(context);
    return NULL;
}

EXPORT void baton_context_free(BatonContext *context) {
    if (!context) return;
    pool_free(context->pool);
    free(context->scratch[LAYER_SCRATCH]);
    free(context->scratch[OPERATION_SCRATCH]);
    free(context);
}

float *context_scratch(BatonContext *context, int which, int64_t num_floats) {
    if (num_floats <= context->scratch_floats[which]) return context->scratch[which];
    int64_t wanted = (num_floats + num_floats / 4 + 15) / 16 * 16; /* a context grows token by token */
    float *scratch = aligned_alloc(64, (size_t)wanted * sizeof(float));
    if (!scratch) return NULL;
    free(context->scratch[which]);
    context->scratch[which] = scratch;
    context->scratch_floats[which] = wanted;
    return scratch;
}

EXPORT int baton_linear(BatonContext *context, const BatonLinear *linear, int64_t dtype, const void *x,
                        int64_t x_stride, void *out, int64_t rows) {
    return level->linear(context, linear, dtype, x, x_stride, out, rows);
}

EXPORT int baton_norm(BatonContext *context, const void *x, const float *weight, void *out, int64_t rows,
                      int64_t width, double epsilon, int64_t dtype) {
    return level->norm(context, x, weight, out, rows, width, epsilon, dtype);
}

EXPORT int baton_silu_mul(BatonContext *context, const void *gate, const void *up, int64_t stride, void *out,
                          int64_t rows, int64_t width, int64_t dtype) {
    return level->silu_mul(context, gate, up, stride, out, rows, width, dtype);
}

EXPORT int baton_rotate(BatonContext *context, void *x, int64_t row_stride, int64_t heads, int64_t head_dim,
                        const void *cos, const void *sin, int64_t width, int64_t rows, int64_t dtype) {
    return level->rotate(context, x, row_stride, heads, head_dim, cos, sin, width, rows, dtype);
}

EXPORT int baton_attend(BatonContext *context, const BatonCache *cache, const BatonRows *rows, const BatonForm *form,
                        const void *q, int64_t q_stride, int64_t q_heads, void *out, int64_t dtype) {
    return level->attend(context, cache, rows, form, q, q_stride, q_heads, out, dtype);
}

/* Attend with num_queries rows of one sequence, q and out [num_queries, q_heads, dim] in bfloat16, contiguous, the first
   at position. Only at the level avx512_bf16, without softcap, with an even k_dim; keys and values are bfloat16. */
EXPORT int baton_attend_chunk(BatonContext *context, const BatonCache *cache, const BatonForm *form,
                              const int32_t *table, const void *q, int64_t q_heads, void *out, int64_t num_queries,
                              int64_t position) {
    return level->attend_chunk(context, cache, form, table, q, q_heads, out, num_queries, position);
}

/* Layer after layer on hidden, in place; one call, so that helpers need not sleep between layers. */
EXPORT int baton_layers(BatonContext *context, const BatonLayer *layers, const BatonCache *caches, int64_t num_layers,
                        const BatonRows *rows, void *hidden, const void *cos, const void *sin, int64_t rotary_width) {
    for (int64_t i = 0; i < num_layers; i++)
        if (level->layer(context, &layers[i], &caches[i], rows, hidden, cos, sin, rotary_width)) return -1;
    return 0;
}

/* Store the keys and values that a layer makes of hidden, and compute nothing else of it. */
EXPORT int baton_layer_kv(BatonContext *context, const BatonLayer *layer, const BatonCache *cache, const BatonRows *rows,
                          const void *hidden, const void *cos, const void *sin, int64_t rotary_width) {
    return level->layer_kv(context, layer, cache, rows, hidden, cos, sin, rotary_width);
}

/* The index of the token that is drawn with probability weight / sum of weights; ids may be NULL: 0 to count - 1. */
EXPORT int64_t baton_race(const double *weights, const int64_t *ids, int64_t count, uint64_t key) {
    return level->race(weights, ids, count, key);
}
