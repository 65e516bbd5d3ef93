/* Runs products on the threads of a context: few rows as linear.h does, many as wide.h does. */

#ifndef BATON_PRODUCT_H
#define BATON_PRODUCT_H

#include "context.h"
#include "wide.h"

#define MOST_JOBS 3
#define MOST_FEW_ROWS 128 /* up to so many a row has the same bits in any company; from then on too, but others */

/* Products of the same rows that run together. */
typedef struct {
    LinearJob jobs[MOST_JOBS];
    int64_t ends[MOST_JOBS]; /* tiles up to and with each job */
    int num_jobs;
    int64_t row_tiles; /* of a wide one */
    char *packed;      /* a thread's PackedWeights are packed_bytes behind those of the one before */
    int64_t packed_bytes;
} Product;

INLINE int job_of(const Product *product, int64_t tile) { return (tile >= product->ends[0]) + (tile >= product->ends[1]); }

INLINE int64_t tile_of_job(const Product *product, int64_t tile, int job) {
    return tile - (job ? product->ends[job - 1] : 0);
}

static void few_rows_task(const void *argument, int64_t tile, int64_t thread) {
    (void)thread;
    const Product *product = argument;
    int job = job_of(product, tile);
    linear_tile(&product->jobs[job], tile_of_job(product, tile, job));
}

/* Count the tiles of each job; those of jobs that are not there are none. */
INLINE int64_t count_tiles(Product *product, int64_t (*num_tiles)(const LinearJob *)) {
    int64_t total = 0;
    for (int job = 0; job < MOST_JOBS; job++)
        product->ends[job] = total += job < product->num_jobs ? num_tiles(&product->jobs[job]) : 0;
    return total;
}

#if defined(__AVX512BF16__)

static void many_rows_task(const void *argument, int64_t tile, int64_t thread) {
    const Product *product = argument;
    int job = job_of(product, tile);
    PackedWeights *packed = (PackedWeights *)(product->packed + thread * product->packed_bytes);
    wide_tile(&product->jobs[job], tile_of_job(product, tile, job), tile / product->row_tiles, packed);
}

INLINE int has_many_rows(const LinearJob *job) {
    return job->dtype == BATON_BF16 && job->rows > MOST_FEW_ROWS && job->linear->inputs % 2 == 0;
}

static int run_many_rows(BatonContext *context, Product *product) {
    const LinearJob *first = &product->jobs[0];
    int64_t threads = pool_num_threads(context->pool);
    product->row_tiles = wide_row_tiles(first);
    product->packed_bytes = packed_bytes(first->linear->inputs);
    product->packed = (char *)context_scratch(context, OPERATION_SCRATCH, threads * product->packed_bytes / 4);
    if (!product->packed) return -1;
    for (int64_t thread = 0; thread < threads; thread++)
        ((PackedWeights *)(product->packed + thread * product->packed_bytes))->panel = -1;
    pool_run(context->pool, many_rows_task, product, count_tiles(product, wide_tiles));
    return 0;
}

#endif

static int run_product(BatonContext *context, Product product) {
#if defined(__AVX512BF16__)
    if (has_many_rows(&product.jobs[0])) return run_many_rows(context, &product);
#endif
    pool_run(context->pool, few_rows_task, &product, count_tiles(&product, linear_tiles));
    return 0;
}

#endif
