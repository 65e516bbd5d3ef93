/* Jobs of every size on pools of one to four threads: each tile has to be worked on exactly once, by a thread that the
   pool names, and what the tiles wrote has to be there when pool_run returns; also when the caller is another thread from
   one round to the next. Built with a sanitizer by test_sanitized.py. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define MOST_TILES 97

typedef struct {
    int64_t num_threads;
    int counts[MOST_TILES]; /* not atomic: a race is an error of the pool */
    int64_t threads[MOST_TILES];
} Job;

static void count_tile(const void *argument, int64_t tile, int64_t thread) {
    Job *job = (Job *)argument;
    job->counts[tile]++;
    job->threads[tile] = thread;
}

static void check(const Job *job, int64_t num_tiles) {
    for (int64_t tile = 0; tile < MOST_TILES; tile++) {
        int wanted = tile < num_tiles;
        if (job->counts[tile] == wanted && job->threads[tile] >= 0 && job->threads[tile] < job->num_threads) continue;
        fprintf(stderr, "tile %d of %d was worked on %d times\n", (int)tile, (int)num_tiles, job->counts[tile]);
        exit(1);
    }
}

static void *run_all_sizes(void *argument) {
    Pool *pool = argument;
    for (int64_t num_tiles = 0; num_tiles <= MOST_TILES; num_tiles++) {
        Job job;
        memset(&job, 0, sizeof job);
        job.num_threads = pool_num_threads(pool);
        pool_run(pool, count_tile, &job, num_tiles);
        check(&job, num_tiles);
    }
    return NULL;
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 10;
    for (int64_t num_threads = 1; num_threads <= 4; num_threads++) {
        Pool *pool = pool_new(num_threads);
        if (!pool) return 2;
        for (int round = 0; round < rounds; round++) {
            pthread_t other;
            run_all_sizes(pool);
            if (round % 3) continue;
            if (pthread_create(&other, NULL, run_all_sizes, pool)) return 2;
            pthread_join(other, NULL);
        }
        pool_free(pool);
    }
    return 0;
}
