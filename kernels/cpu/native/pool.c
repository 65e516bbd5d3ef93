/* See pool.h. Each thread has a range of the running job's tiles; it takes half of what is left at its front, and when
   nothing is left, half of what another one has left at its end (work stealing, Blumofe and Leiserson 1999; shares that
   become smaller: guided self-scheduling, Polychronopoulos and Kuck 1987). So a thread goes through its weights as one
   stream, which memory answers fastest, threads seldom meet, and all end together although one may lose its core.

   A range is one word, its first tile in the upper half and the one behind its last in the lower. A job's description is
   written before its ranges and is not touched until all tiles are done; so whoever has taken tiles may read it. */

#define _GNU_SOURCE /* sched_getcpu */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SPINS 1000 /* some ten microseconds */

#define OWN_LINE _Alignas(64) /* what one thread writes and others read often does not share a cache line */

typedef struct {
    OWN_LINE _Atomic uint64_t tiles;
} Range;

struct Pool {
    OWN_LINE _Atomic uint64_t done; /* tiles of the running job */
    OWN_LINE _Atomic(PoolWork) work;
    _Atomic(const void *) job;
    _Atomic uint64_t num_tiles;
    _Atomic int caller_core;
    _Atomic int sleepers; /* helpers that wait for wake */
    _Atomic int caller_sleeps;
    _Atomic int ending;
    _Atomic int64_t next_thread;
    Range *ranges; /* of each thread */
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

static inline uint64_t range_of(uint64_t first, uint64_t end) { return first << 32 | end; }

static inline uint64_t num_left(uint64_t range) { return (uint32_t)range - (range >> 32); }

/* Take tiles of one range, at its front or at its end; return them as a range, empty when there is none. */
static uint64_t take_tiles(Range *range, int at_front) {
    uint64_t tiles = atomic_load(&range->tiles);
    for (;;) {
        uint64_t left = num_left(tiles), share = (left + 1) / 2, first = tiles >> 32, end = (uint32_t)tiles;
        if (!left) return 0;
        uint64_t rest = at_front ? range_of(first + share, end) : range_of(first, end - share);
        if (atomic_compare_exchange_weak(&range->tiles, &tiles, rest))
            return at_front ? range_of(first, first + share) : range_of(end - share, end);
    }
}

static void work_on(Pool *pool, uint64_t tiles, int64_t thread) {
    PoolWork work = atomic_load(&pool->work);
    const void *job = atomic_load(&pool->job);
    uint64_t num_tiles = atomic_load(&pool->num_tiles), count = num_left(tiles);
    for (uint64_t tile = tiles >> 32; tile < (uint32_t)tiles; tile++) work(job, (int64_t)tile, thread);
    if (atomic_fetch_add(&pool->done, count) + count == num_tiles && atomic_load(&pool->caller_sleeps)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_signal(&pool->finished);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* Work on tiles, one's own before others', until none is left to take. */
static void work_on_tiles(Pool *pool, int64_t thread) {
    for (int64_t i = 0; i < pool->num_threads; i++) {
        Range *range = &pool->ranges[(thread + i) % pool->num_threads];
        uint64_t tiles;
        while ((tiles = take_tiles(range, i == 0))) work_on(pool, tiles, thread);
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
    for (int64_t i = 0; i < pool->num_threads; i++)
        if (num_left(atomic_load(&pool->ranges[i].tiles))) return 1;
    return 0;
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
    const Range *own = &pool->ranges[thread];
    while (!atomic_load(&pool->ending)) {
        work_on_tiles(pool, thread);
        int spins = 0; /* on its own range only, so that looking for work does not slow down those who have some */
        while (!num_left(atomic_load(&own->tiles)) && spins++ < SPINS && !has_the_callers_core(pool)) relax();
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
    pool->ranges = aligned_alloc(_Alignof(Range), (size_t)num_threads * sizeof(Range));
    if (!pool->ranges) {
        free(pool);
        return NULL;
    }
    memset(pool->ranges, 0, (size_t)num_threads * sizeof(Range));
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
    free(pool->ranges);
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
    atomic_store(&pool->done, 0);
    atomic_store(&pool->work, work);
    atomic_store(&pool->job, job);
    atomic_store(&pool->num_tiles, (uint64_t)num_tiles);
    for (int64_t i = 0; i < pool->num_threads; i++) {
        int64_t first = num_tiles * i / pool->num_threads, end = num_tiles * (i + 1) / pool->num_threads;
        atomic_store(&pool->ranges[i].tiles, range_of((uint64_t)first, (uint64_t)end));
    }
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    work_on_tiles(pool, 0);
    wait_for_tiles(pool, (uint64_t)num_tiles);
}
