/* See pool.h. The ticket holds the number of the running job in its upper half and the next tile in its lower half. A
   helper reads the job, then takes tiles by comparing and swapping the ticket: when that works, the job that it read
   is still the running one.

   A thread takes a share of the tiles that are left, so the shares become smaller and all threads end together (guided
   self-scheduling, Polychronopoulos and Kuck 1987). Few shares also mean long streams of weights, which memory answers
   fastest, and little talk between cores. */

#define _GNU_SOURCE /* sched_getcpu */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SPINS 1000 /* some ten microseconds */
#define TILE_MASK 0xffffffffull

#define OWN_LINE _Alignas(64) /* what one thread writes and others read often does not share a cache line */

struct Pool {
    OWN_LINE _Atomic uint64_t ticket;
    OWN_LINE _Atomic uint64_t done; /* tiles of the running job */
    OWN_LINE _Atomic(PoolWork) work;
    _Atomic(const void *) job;
    _Atomic uint64_t num_tiles;
    _Atomic int caller_core;
    _Atomic int sleepers; /* helpers that wait for wake */
    _Atomic int caller_sleeps;
    _Atomic int ending;
    _Atomic int64_t next_thread;
    int64_t num_threads;
    int64_t started;
    uint64_t caller; /* the thread that the helpers belong to */
    pthread_mutex_t mutex;
    pthread_cond_t wake; /* a job begins, or the end */
    pthread_cond_t finished;
    pthread_t helpers[];
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Work on tiles until none is left to take; return whether there was one. */
static int work_on_tiles(Pool *pool, int64_t thread) {
    int worked = 0;
    for (;;) {
        uint64_t ticket = atomic_load(&pool->ticket);
        uint64_t num_tiles = atomic_load(&pool->num_tiles); /* written last, so read before the rest of the job */
        uint64_t tile = ticket & TILE_MASK;
        if (tile >= num_tiles) return worked;
        uint64_t share = (num_tiles - tile) / (2 * (uint64_t)pool->num_threads);
        uint64_t end = tile + (share ? share : 1);
        PoolWork work = atomic_load(&pool->work);
        const void *job = atomic_load(&pool->job);
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket - tile + end)) continue;
        for (uint64_t next = tile; next < end; next++) work(job, (int64_t)next, thread);
        worked = 1;
        if (atomic_fetch_add(&pool->done, end - tile) + end - tile == num_tiles && atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

/* On a machine that is full, a helper may get the caller's own core; looking for work there would keep the caller from
   making it. */
static int has_the_callers_core(Pool *pool) {
#if defined(__linux__)
    return sched_getcpu() == atomic_load(&pool->caller_core);
#else
    (void)pool;
    return 0;
#endif
}

static int tile_is_left(Pool *pool) {
    uint64_t num_tiles = atomic_load(&pool->num_tiles);
    return (atomic_load(&pool->ticket) & TILE_MASK) < num_tiles;
}

static void sleep_until_work(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!tile_is_left(pool) && !atomic_load(&pool->ending)) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *help(void *argument) {
    Pool *pool = argument;
    int64_t thread = atomic_fetch_add(&pool->next_thread, 1);
    while (!atomic_load(&pool->ending)) {
        int spins = 0;
        while (!work_on_tiles(pool, thread) && spins++ < SPINS && !has_the_callers_core(pool)) relax();
        if (!tile_is_left(pool)) sleep_until_work(pool);
    }
    return NULL;
}

/* Return what tells this thread from all others, also from those that have ended. */
static uint64_t this_thread(void) {
    static _Atomic uint64_t num_threads;
    static _Thread_local uint64_t number;
    if (!number) number = atomic_fetch_add(&num_threads, 1) + 1;
    return number;
}

/* Start the helpers of this thread; return whether all could be started. */
static int start_helpers(Pool *pool) {
    pool->caller = this_thread();
    pool->started = 0;
    atomic_store(&pool->ending, 0);
    atomic_store(&pool->next_thread, 1);
    while (pool->started < pool->num_threads - 1) {
        if (pthread_create(&pool->helpers[pool->started], NULL, help, pool)) return 0;
        pool->started++;
    }
    return 1;
}

static void end_helpers(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->ending, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int64_t i = 0; i < pool->started; i++) pthread_join(pool->helpers[i], NULL);
}

Pool *pool_new(int64_t num_threads) {
    if (num_threads < 1) num_threads = 1;
    size_t bytes = sizeof(Pool) + (size_t)(num_threads - 1) * sizeof(pthread_t);
    Pool *pool = aligned_alloc(_Alignof(Pool), (bytes + _Alignof(Pool) - 1) / _Alignof(Pool) * _Alignof(Pool));
    if (!pool) return NULL;
    memset(pool, 0, bytes);
    pool->num_threads = num_threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->finished, NULL);
    if (start_helpers(pool)) return pool;
    pool_free(pool);
    return NULL;
}

void pool_free(Pool *pool) {
    if (!pool) return;
    end_helpers(pool);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

int64_t pool_num_threads(const Pool *pool) { return pool->num_threads; }

static void wait_for_tiles(Pool *pool, uint64_t num_tiles) {
    for (int spins = 0; spins < SPINS; spins++) {
        if (atomic_load(&pool->done) == num_tiles) return;
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->caller_sleeps, 1);
    while (atomic_load(&pool->done) != num_tiles) pthread_cond_wait(&pool->finished, &pool->mutex);
    atomic_store(&pool->caller_sleeps, 0);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(Pool *pool, PoolWork work, const void *job, int64_t num_tiles) {
    if (pool->num_threads == 1 || num_tiles <= 1) {
        for (int64_t tile = 0; tile < num_tiles; tile++) work(job, tile, 0);
        return;
    }
    if (pool->caller != this_thread()) {
        end_helpers(pool);
        start_helpers(pool); /* fewer than wanted are slower, and nothing worse */
    }
#if defined(__linux__)
    atomic_store(&pool->caller_core, sched_getcpu());
#endif
    uint64_t number = (atomic_load(&pool->ticket) >> 32) + 1;
    atomic_store(&pool->num_tiles, 0); /* the old ticket takes nothing more */
    atomic_store(&pool->ticket, number << 32);
    atomic_store(&pool->done, 0);
    atomic_store(&pool->work, work);
    atomic_store(&pool->job, job);
    atomic_store(&pool->num_tiles, (uint64_t)num_tiles);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    work_on_tiles(pool, 0);
    wait_for_tiles(pool, (uint64_t)num_tiles);
}
