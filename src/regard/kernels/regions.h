/* How threads divide units of work: `native_library.library` puts this text before its C files.
 *
 * Each thread has a region of consecutive units, and takes units of other regions when its own are done. The threads
 * then write to memory far apart: where they write to adjacent pages of new memory, the operating system, which clears
 * each page when it is first written, makes one thread wait for the other. */

#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    _Alignas(64) atomic_long next; /* the first unit that no thread has taken; regions do not share a cache line */
    long stop;
} region;

/* Divides `units` units among `count` regions. */
static inline void divide(region *regions, long count, long units) {
    for (long r = 0; r < count; r++) {
        atomic_init(&regions[r].next, units * r / count);
        regions[r].stop = units * (r + 1) / count;
    }
}

/* Takes up to `chunk` units for the thread of region `own`: those from *first to *stop - 1. Returns 0 if none are left. */
static inline int take(region *regions, long count, long own, long chunk, long *first, long *stop) {
    for (long turn = 0; turn < count; turn++) {
        region *r = regions + (own + turn) % count;
        *first = atomic_fetch_add_explicit(&r->next, chunk, memory_order_relaxed);
        *stop = *first + chunk < r->stop ? *first + chunk : r->stop;
        if (*first < r->stop) return 1;
    }
    return 0;
}
