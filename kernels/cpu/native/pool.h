/* A small thread pool whose jobs end when all tiles are done, not when all threads have arrived.

   The caller works on its job too, and tiles are taken in shares. So a helper that gets no processor costs its help
   and nothing more: nobody waits for it to arrive, unlike at a barrier. Helpers look for the next job for some
   microseconds and then sleep.

   Helpers have the priority of the thread that starts them, which is the caller: when another thread calls, it gets
   helpers of its own, and those before end. */

#ifndef BATON_POOL_H
#define BATON_POOL_H

#include <stdint.h>

typedef void (*PoolWork)(const void *job, int64_t tile, int64_t thread);

typedef struct Pool Pool;

/* Start num_threads - 1 helpers; NULL when memory or threads cannot be had. */
Pool *pool_new(int64_t num_threads);

/* End the helpers and free the pool; no job may be running. */
void pool_free(Pool *pool);

int64_t pool_num_threads(const Pool *pool);

/* Call work(job, tile, thread) for every tile below num_tiles; return when all calls have. thread tells the threads
   that may work at the same time apart: 0 is the caller. */
void pool_run(Pool *pool, PoolWork work, const void *job, int64_t num_tiles);

#endif
