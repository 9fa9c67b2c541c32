/* Dot-product attention on a CPU. The forward pass is one parallel region; so is the backward pass, which has a second
 * one if heads are divided. The reference implementation is `regard.core.backends.reference`.
 *
 * Inputs are float32 or bfloat16, with any strides of batch, heads and tokens; all sums are in float32. A "row" is a
 * query of one head, with its scores for all keys. A unit of work is one head of one sequence (in the backward pass:
 * one key head), or a part of the rows of that head. The gradients of keys and values from the parts of a head are
 * added in the order of the parts, so that the result does not depend on the number of threads. A unit reads the keys
 * from the first to the last key that any of its rows attends, and no others. A masked pair of a query and a key within
 * this range gets the score -inf, whatever its product is. The forward pass returns 1 if an attended number is not
 * finite; it may also return 1 if a masked number that is read is not finite. Another backend then computes the call.
 */

#define BLOCK 32             /* number of rows whose scores are stored at a time */
#define TILE (LANES == 16 ? 8 : 4) /* number of rows of a matrix product computed at a time in registers */
#define PANEL (2 * LANES)     /* number of columns in a panel of the right operand of a product (see `pack_columns`) */
#define GRAIN (PANEL > STEP ? PANEL : STEP) /* transposed keys are padded to a multiple of this number */
#define STEP (LANES > 4 ? LANES : 4) /* row lengths are padded to multiples of this number */
#define FEW 8                /* up to this number of queries, the keys are not transposed: the copy costs too much */
#define UNITS 8              /* the rows of each head are divided into parts until there are this many units of work */
#define LEAST 2              /* the smallest number of blocks of rows in a part of a head in the backward pass */
#define DEEP 128             /* matrix products are computed for at most this many terms of each sum at a time */
#define PART 512             /* the limit used instead of DEEP if the left operand of a product has at most 4 rows */
#define CHUNK 128            /* number of keys whose gradients are computed at a time by `backward_few` */
#define CHUNKS 32            /* each thread processes its share of the units of work in about this many chunks */
#define AHEAD 32             /* rows that are not adjacent in memory are loaded into the cache this many rows ahead */
#define LARGE (1 << 22)      /* numbers up to which the working memory of a thread is kept for later calls */
#define LOWEST -86.0f        /* sigmoid(x) and exp(x) are set to 0 for x <= LOWEST */

/* Normalisers of the scores. ENTMAX is entmax with alpha = 1.5, and POWER is entmax with any 1 < alpha <= 2. HARD
 * gives the key with the largest score the weight 1; it has no backward pass. */
enum { SOFTMAX, SIGMOID, SPARSEMAX, ENTMAX, HARD, POWER };
/* What a call returns beside the output, in this order: nothing, all attention weights w, the sums of the weights over
 * the queries, the entropy -sum w ln w of each query, the weights of some queries, or ln sum exp(score) of each query
 * (with SOFTMAX only). */
enum { NOTHING, ALL_WEIGHTS, RECEIVED, ENTROPY, SOME_ROWS, LOG_SUM_EXP };

/* Sizes, strides and options that all calls with one signature share. Python passes them as an array of numbers of
 * eight bytes in the order of these fields. */
typedef struct {
    long batch, heads, kv_heads, queries, keys, size, value_size, half, normalizer;
    long banded_low, low, banded_high, high; /* query i attends only to keys j with low <= j - i <= high */
    long query[3], key[3], value[3], output[3]; /* strides of the axes batch, head and token */
    long bias[4], allowed[4];                   /* strides of the axes batch, head, query and key */
    long query_ids, key_ids;                    /* strides of the segment ids along the batch axis */
    long offset;                                /* `slopes` multiply the distances |i + offset - j| */
    long request, rows; /* what a call returns beside the output (NOTHING, ...); for SOME_ROWS, the number of rows */
    double scale, softcap, shift, alpha;
    double dropout; /* the probability with which a weight is replaced by 0 in the sum of the values */
    long checked;   /* whether the forward pass checks the numbers that only the backward pass reads */
} shape;

/* What changes from call to call: the inputs (null where a call has none), the seed of dropout and the number of
 * threads. It is the first field of the structs `outputs` and `gradients`. Python packs the fields in this order. */
typedef struct {
    const char *query, *key, *value;
    const long *lengths, *query_ids, *key_ids;
    const float *bias, *slopes;
    const unsigned char *allowed;
    const long *place_of;
    uint64_t seed;
    long threads;
} inputs;

typedef struct {
    inputs in;
    char *output;
    float *requested, *log_prob;
    long *index;
} outputs;

typedef struct {
    inputs in;
    const char *change;
    long change_strides[3];
    const float *drequested;
    char *dquery, *dkey, *dvalue;
    float *dscores;
} gradients;

typedef struct {
    const shape *s;
    const char *query, *key, *value, *change; /* `change`: gradient of the output */
    const long *change_strides;               /* strides of the axes batch, head and token */
    const long *lengths, *query_ids, *key_ids;
    long *ranges; /* (batch or 1, queries, 2): the range of keys with the segment id of each query, or null */
    const float *bias, *slopes;
    const unsigned char *allowed;
    char *output, *dquery, *dkey, *dvalue; /* gradients of query, key, value: contiguous */
    float *dscores; /* (batch, heads, queries, keys): gradient of the scores, if the bias has a gradient, or null */
    float *requested; /* ALL_WEIGHTS (batch, heads, queries, keys), RECEIVED (batch, heads, keys),
                         ENTROPY and LOG_SUM_EXP (batch, heads, queries), SOME_ROWS (batch, heads, rows, keys) */
    const float *drequested; /* gradient of `requested`, or null */
    const long *place_of;    /* for SOME_ROWS: the index of each query among the requested rows, or -1 */
    float *log_prob; /* HARD: (batch, heads, queries), the log-probability of the best key of each query */
    long *index;     /* HARD: (batch, heads, queries), the index of the best key of each query */
    float scale, softcap, shift, alpha;
    double dropout;  /* the probability with which a weight is replaced by 0 in the sum of the values */
    uint64_t seed;  /* seed of the random numbers for dropout */
    long parts; /* number of parts of the rows of a head. The last part is computed first: under a causal mask it takes
                   the longest. */
    float *sums; /* results of each part of a head, if there are several: in the forward pass the sums of RECEIVED,
                    in the backward pass the gradients of keys and values */
    int *bad;
} call;

typedef struct { float *start; size_t size; } memory;
static _Thread_local memory room, results; /* scratch memory of one unit; results of all units of a call */

/* Returns memory of this thread for `count` numbers. Later calls reuse it. */
static float *extend(memory *given, size_t count) {
    if (count > given->size) {
        free(given->start);
        given->size = (count + 15) / 16 * 16;
        given->start = aligned_alloc(64, given->size * sizeof(float)); /* aligned: no vector spans two cache lines */
        if (!given->start) abort();
    }
    return given->start;
}

static float *reserve(size_t count) { return extend(&room, count); }

/* Frees working memory of more than LARGE numbers, which would otherwise be held for each of many threads. */
static void trim(memory *given) {
    if (given->size <= LARGE) return;
    free(given->start);
    *given = (memory){0, 0};
}

static inline long whole(long n) { return (n + STEP - 1) / STEP * STEP; }
/* Returns the distance between consecutive rows of n numbers in memory. For long rows it is an odd number of STEPs, so
 * that the numbers of one column do not all map to the same few sets of the cache. */
static inline long spread(long n) { return n > 8 * STEP ? (whole(n) / STEP | 1) * STEP : whole(n); }
static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most_of(long a, long b) { return a > b ? a : b; }

/* Copies rows of float32 or bfloat16 to float32 rows of `width` numbers, padded with zeros. */
static void load(const char *from, long stride, long half, long rows, long size, float *to, long width) {
    for (long i = 0; i < rows; i++, to += width) {
        if (half) {
            const uint16_t *given = (const uint16_t *)from + i * stride;
            uint32_t *bits = (uint32_t *)to;
            for (long x = 0; x < size; x++) bits[x] = (uint32_t)given[x] << 16;
        } else
            memcpy(to, (const float *)from + i * stride, (size_t)size * sizeof(float));
        for (long x = size; x < width; x++) to[x] = 0.0f;
    }
}

/* Copies float32 rows to rows of float32 or bfloat16 (rounded to nearest, ties to even), without the padding of `load`.
 * Row i is multiplied by by[i], unless `by` is null. */
static void save(const float *from, long width, long half, long rows, long size, char *to, long stride,
                 const float *by) {
    for (long i = 0; i < rows; i++, from += width) {
        float scale = by ? by[i] : 1.0f;
        if (half) {
            uint16_t *target = (uint16_t *)to + i * stride;
            for (long x = 0; x < size; x++) {
                float number = from[x] * scale;
                uint32_t bits;
                memcpy(&bits, &number, sizeof bits);
                target[x] = number != number ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
        } else {
            float *target = (float *)to + i * stride;
            for (long x = 0; x < size; x++) target[x] = from[x] * scale;
        }
    }
}

static inline long panels(long n) { return (n + GRAIN - 1) / GRAIN * GRAIN; }

/* Writes the transpose of a matrix (rows, size), stored as consecutive panels (size, PANEL) of PANEL columns each.
 * Columns beyond `rows` are zeros. */
static void transpose(const float *from, long stride, long rows, long size, float *to) {
    long i = 0, width = panels(rows);
#define PLACE(i, x) (to + (i) / PANEL * PANEL * size + (x) * PANEL + (i) % PANEL)
#if LANES == 16
    for (; i < width; i += 16)
        for (long x = 0; x < size; x += 16) {
            vec square[16];
            __mmask16 inside = (__mmask16)(size - x < 16 ? (1u << (size - x)) - 1 : 0xffff);
            for (long u = 0; u < 16; u++)
                square[u] = i + u < rows ? _mm512_maskz_loadu_ps(inside, from + (i + u) * stride + x) : ALL(0.0f);
            turn(square);
            for (long u = 0; u < least(16, size - x); u++) STORE(PLACE(i, x + u), square[u]);
        }
#elif LANES > 1
    for (; i + 4 <= rows; i += 4) {
        const float *at = from + i * stride;
        long x = 0;
        for (; x + 4 <= size; x += 4) {
            __m128 a = _mm_loadu_ps(at + x), b = _mm_loadu_ps(at + stride + x), c = _mm_loadu_ps(at + 2 * stride + x);
            __m128 d = _mm_loadu_ps(at + 3 * stride + x);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(PLACE(i, x), a);
            _mm_storeu_ps(PLACE(i, x + 1), b);
            _mm_storeu_ps(PLACE(i, x + 2), c);
            _mm_storeu_ps(PLACE(i, x + 3), d);
        }
        for (; x < size; x++)
            for (long u = 0; u < 4; u++) *PLACE(i + u, x) = at[u * stride + x];
    }
#endif
    for (; i < width; i++)
        for (long x = 0; x < size; x++) *PLACE(i, x) = i < rows ? from[i * stride + x] : 0.0f;
#undef PLACE
}

/* Copies a matrix (rows, size) to consecutive panels (rows, PANEL) of PANEL columns each, padded with zeros to
 * panels(size) columns. */
static void pack_columns(const float *from, long stride, long rows, long size, float *to) {
    for (long x = 0; x < panels(size); x += PANEL)
        for (long i = 0; i < rows; i++, to += PANEL) {
            long count = most_of(0, least(PANEL, size - x));
            memcpy(to, from + i * stride + x, (size_t)count * sizeof(float));
            for (long u = count; u < PANEL; u++) to[u] = 0.0f;
        }
}

/* Computes the matrix product c = a b, or c += a b if `more`, for m rows and v vectors of columns: row i of c is the
 * sum over p < depth of a[i a_row + p a_step] times row p of b. The sum is computed separately and then added to c,
 * which reduces the rounding errors of a long sum that is computed in several calls. */
static inline __attribute__((always_inline)) void tile(
    const int m, const int v, long depth, const float *a, long a_row, long a_step, const float *b, long b_row, float *c,
    long c_row, int more) {
    vec t[8][8];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int u = 0; u < v; u++) t[i][u] = ALL(0.0f);
    for (long p = 0; p < depth; p++) {
        vec right[8];
#pragma GCC unroll 8
        for (int u = 0; u < v; u++) right[u] = LOAD(b + p * b_row + u * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            vec left = ALL(a[i * a_row + p * a_step]);
#pragma GCC unroll 8
            for (int u = 0; u < v; u++) t[i][u] = FMA(left, right[u], t[i][u]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
        for (int u = 0; u < v; u++) {
            float *to = c + i * c_row + u * LANES;
            STORE(to, more ? ADD(LOAD(to), t[i][u]) : t[i][u]);
        }
}

static void rows_of_tile(long m, int v, long depth, const float *a, long a_row, long a_step, const float *b, long b_row,
                         float *c, long c_row, int more) {
#define CASE(M) case M: v == 2 ? tile(M, 2, depth, a, a_row, a_step, b, b_row, c, c_row, more) \
                               : tile(M, 1, depth, a, a_row, a_step, b, b_row, c, c_row, more); break;
    switch (m) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

/* Computes the matrix product c = a b, or c += a b if `more`, where c is (m, n) and n is a multiple of LANES. `a_row`
 * and `a_step` are the strides of both axes of a, which may be a transposed matrix. `b_panel` is the distance between
 * two panels of b (see `pack_columns`), or 0 if b is stored in rows. */
static void multiply(long m, long n, long depth, const float *a, long a_row, long a_step, const float *b, long b_row,
                     long b_panel, float *c, long c_row, int more) {
    long x = 0;
    /* If `a` has few rows, more columns are computed at a time, so that each row of `b` is read in few long pieces. */
#define WIDE(M, V) \
    if (m == M && !b_panel) \
        for (; x + V * LANES <= n; x += V * LANES) \
            for (long p = 0; p < depth || p == 0; p += PART) \
                tile(M, V, least(PART, depth - p), a + p * a_step, a_row, a_step, b + p * b_row + x, b_row, c + x, \
                     c_row, more || p > 0);
    WIDE(1, 8) WIDE(2, 8) WIDE(2, 4) WIDE(3, 4) WIDE(4, 4)
#undef WIDE
    /* DEEP rows of `b` are used at a time: a panel of these rows stays in the cache for all rows of `a`. */
    for (long p = 0, begin = x; begin < n && (p < depth || p == 0); p += DEEP)
        for (x = begin; x < n; x += PANEL) {
            const float *right = (b_panel ? b + x / PANEL * b_panel : b + x) + p * b_row;
            for (long i = 0; i < m; i += TILE)
                rows_of_tile(least(TILE, m - i), n - x >= PANEL ? 2 : 1, least(DEEP, depth - p),
                             a + i * a_row + p * a_step, a_row, a_step, right, b_row, c + i * c_row + x, c_row,
                             more || p > 0);
        }
}

/* Begins to load `size` numbers into the cache. */
static inline void ahead(const float *from, long size) {
    for (long x = 0; x < size; x += 16) __builtin_prefetch(from + x);
    __builtin_prefetch(from + size - 1);
}

/* Writes the dot products of m rows with keys (count, size), without a transposed copy of the keys. Each key is read
 * from memory once. */
static void score_rows(long m, const float *rows, long row, const float *keys, long stride, long count, long size,
                       float *scores, long width) {
    int apart = stride > size; /* the processor itself loads rows ahead if they are adjacent in memory */
    for (long j = 0; j < count; j += 4) {
        const float *k[4];
        for (int u = 0; u < 4; u++) k[u] = keys + least(j + u, count - 1) * stride;
        for (int u = 0; apart && u < 4; u++) ahead(keys + least(j + u + AHEAD, count - 1) * stride, size);
        for (long i = 0; i < m; i++) {
            const float *q = rows + i * row;
            vec t[4] = {ALL(0.0f), ALL(0.0f), ALL(0.0f), ALL(0.0f)};
            long x = 0;
            for (; x + LANES <= size; x += LANES)
                for (int u = 0; u < 4; u++) t[u] = FMA(LOAD(q + x), LOAD(k[u] + x), t[u]);
            if (x < size)
                for (int u = 0; u < 4; u++) t[u] = FMA(FIRST(q + x, size - x), FIRST(k[u] + x, size - x), t[u]);
            sums(t, scores + i * width + j); /* `weigh` overwrites the columns beyond `count` */
        }
    }
}

/* Sets the range first <= j < last of the keys that query i of sequence b may attend, from the lengths, the band and
 * the ids. If there are none, first = last = 0. */
static inline void attended(const call *c, long b, long i, long *first, long *last) {
    const shape *s = c->s;
    *first = s->banded_low ? most_of(0, i + s->low) : 0;
    *last = c->lengths ? least(c->lengths[b], s->keys) : s->keys; /* the caller may have changed the lengths */
    if (s->banded_high) *last = least(*last, i + s->high + 1);
    if (c->ranges) {
        const long *range = c->ranges + 2 * ((s->query_ids || s->key_ids ? b * s->queries : 0) + i);
        *first = most_of(*first, range[0]);
        *last = least(*last, range[1]);
    }
    if (*first >= *last) *first = *last = 0;
}

/* Computes, for each query, the range from the first to the last key with the segment id of the query. If no range
 * contains a key with another segment id, the ids are removed from the call, because the ranges describe the mask
 * completely. */
static void find_ranges(call *c) {
    const shape *s = c->s;
    long batch = s->query_ids || s->key_ids ? s->batch : 1, alone = 1;
    c->ranges = 0;
    if (!c->query_ids) return;
    c->ranges = malloc((size_t)(2 * batch * s->queries) * sizeof(long));
    if (!c->ranges) abort();
    for (long b = 0; b < batch; b++) {
        const long *own = c->query_ids + b * s->query_ids, *ids = c->key_ids + b * s->key_ids;
        long *range = c->ranges + 2 * b * s->queries;
        for (long i = 0; i < s->queries; i++, range += 2) {
            if (i && own[i] == own[i - 1]) {
                range[0] = range[-2], range[1] = range[-1];
                continue;
            }
            long first = 0, last = s->keys;
            while (first < last && ids[first] != own[i]) first++;
            while (last > first && ids[last - 1] != own[i]) last--;
            range[0] = first, range[1] = last;
            for (long j = first; alone && j < last; j++) alone = ids[j] == own[i];
        }
    }
    if (alone) c->query_ids = c->key_ids = 0;
}

/* A block of scores: `rows` queries from `row` on, of head h of sequence b, with the keys first <= j < last. */
typedef struct { long b, h, row, rows, first, last; } block;

/* Returns the block of the given rows, with the keys from the first to the last that any of these rows attends. If they
 * attend to no key, the block is empty and its first key is `origin`. */
static block block_of(const call *c, long b, long h, long row, long rows, long origin) {
    block found = {b, h, row, rows, c->s->keys, 0};
    for (long i = row; i < row + rows; i++) {
        long first, last;
        attended(c, b, i, &first, &last);
        if (first == last) continue;
        found.first = least(found.first, first);
        found.last = most_of(found.last, last);
    }
    if (found.last == 0) found.first = found.last = origin;
    return found;
}

/* Returns y^power for y > 0, and 0 for y <= 0. */
static inline vec power_of(vec y, float power) {
    return ABOVE(y, ALL(0.0f), exponential_below(MUL(logarithm(MAX(y, ALL(LEAST_NORMAL))), ALL(power))));
}

/* Computes sparsemax or entmax of a row of scores s, in place, where `big` is the largest score. With r = 1 / (alpha -
 * 1), a weight is max((alpha - 1) (s - big) - t, 0)^r, and the threshold t is such that the weights sum to 1. Newton's
 * method, started below the root, increases t in each step, because the sum is convex in t. */
static void project(float *scores, long width, float big, long normalizer, float alpha) {
    float factor = normalizer == SPARSEMAX ? 1.0f : normalizer == ENTMAX ? 0.5f : alpha - 1.0f, r = 1.0f / factor;
    float t = -1.0f; /* the threshold is at least -1, because the largest weight, (-t)^r, is at most 1 */
    for (int step = 0; step < 50; step++) {
        vec total = ALL(0.0f), slope = ALL(0.0f), at = ALL(-t);
        for (long x = 0; x < width; x += LANES) {
            vec y = FMA(ADD(LOAD(scores + x), ALL(-big)), ALL(factor), at), p = MAX(y, ALL(0.0f));
            if (normalizer == SPARSEMAX) {
                total = ADD(total, p);
                slope = ADD(slope, ABOVE(y, ALL(0.0f), ALL(1.0f)));
            } else if (normalizer == ENTMAX) {
                total = FMA(p, p, total);
                slope = ADD(slope, ADD(p, p));
            } else {
                vec below = power_of(y, r - 1.0f);
                total = FMA(p, below, total);
                slope = FMA(below, ALL(r), slope);
            }
        }
        float move = (sum(total) - 1.0f) / sum(slope);
        t += move;
        if (!(move > 1e-7f)) break;
    }
    for (long x = 0; x < width; x += LANES) {
        vec y = FMA(ADD(LOAD(scores + x), ALL(-big)), ALL(factor), ALL(-t)), p = MAX(y, ALL(0.0f));
        STORE(scores + x, normalizer == SPARSEMAX ? p : normalizer == ENTMAX ? MUL(p, p) : power_of(y, r));
    }
}

/* Returns a pseudo-random number of 64 bits for a seed and a counter (the generator SplitMix64). */
static inline uint64_t random_of(uint64_t seed, uint64_t counter) {
    uint64_t x = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A bijective hash of numbers of 32 bits, in which each bit of the result depends on all bits of x. */
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Applies dropout to the row of query i, in place: sets each number to 0 with probability `dropout`, and divides the
 * others by 1 - dropout. Which numbers are dropped depends only on the seed, the row and the key. */
static void drop(const call *c, const block *at, long i, long width, float *numbers) {
    uint64_t row = random_of(c->seed, (uint64_t)((at->b * c->s->heads + at->h) * c->s->queries + i));
    uint32_t low = (uint32_t)row, high = (uint32_t)(row >> 32), key = (uint32_t)at->first;
    uint32_t threshold = (uint32_t)(c->dropout * 4294967296.0);
    float by = (float)(1.0 / (1.0 - c->dropout));
    for (long x = 0; x < width; x++) {
        uint32_t number = mixed(mixed((key + (uint32_t)x) ^ low) + high);
        numbers[x] = number >= threshold ? numbers[x] * by : 0.0f;
    }
}

/* LOG_SUM_EXP: writes ln sum exp(score) of query i in the forward pass, given the largest score and the sum of
 * exp(score - largest). */
static void give_log_sum(const call *c, const block *at, long i, float big, float total) {
    if (c->s->request == LOG_SUM_EXP && c->requested)
        c->requested[(at->b * c->s->heads + at->h) * c->s->queries + i] = big + logf(total);
}

/* Sets the weights of a row that attends to no key to 0. Returns whether the n products of its query with keys were
 * finite: a NaN or infinity in the query would make the gradients of these keys NaN. */
static int clear(float *scores, long n, long width) {
    float check = 0.0f;
    for (long x = 0; x < n; x++) check += scores[x] * 0.0f;
    memset(scores, 0, (size_t)width * sizeof(float));
    return check == 0.0f;
}

/* Computes the attention weights of query i from its products with the keys of a block, in place; the row is padded to
 * `width` numbers. If `slope` is given (in the backward pass), the derivative of each score with respect to its product
 * is written there, and 0 for a masked pair. Returns whether all products and scores were finite (a masked score may be
 * -inf). */
static int weigh(const call *c, const block *at, long i, long width, float *scores, float *slope) {
    const shape *s = c->s;
    long from, to, n = at->last - at->first;
    float big = -INFINITY;
    vec check = ALL(0.0f);
    int wrong = 0;
    attended(c, at->b, i, &from, &to);
    if (from == to) {
        give_log_sum(c, at, i, -INFINITY, 1.0f);
        if (slope) memset(slope, 0, (size_t)width * sizeof(float));
        return clear(scores, n, width);
    }
    for (long x = 0; x < width; x += LANES) {
        vec y = LOAD(scores + x);
        if (x + LANES > n) y = between(y, 0, n - x, 0.0f);
        check = FMA(y, ALL(0.0f), check);
        y = MUL(y, ALL(c->scale));
        if (c->softcap > 0.0f) {
            vec t = tangent(MUL(y, ALL(1.0f / c->softcap)));
            y = MUL(t, ALL(c->softcap));
            if (slope) STORE(slope + x, MUL(FNMA(t, t, ALL(1.0f)), ALL(c->scale)));
        } else if (slope)
            STORE(slope + x, ALL(c->scale));
        STORE(scores + x, y);
    }
    if (c->bias) {
        const float *bias = c->bias + at->b * s->bias[0] + at->h * s->bias[1] + i * s->bias[2] + at->first * s->bias[3];
        if (s->bias[3] == 1) /* a separate loop, which the compiler can vectorise */
            for (long x = 0; x < n; x++) scores[x] += bias[x];
        else
            for (long x = 0; x < n; x++) scores[x] += bias[x * s->bias[3]];
    }
    if (c->slopes)
        for (long x = 0; x < n; x++) scores[x] -= c->slopes[at->h] * (float)labs(i + s->offset - at->first - x);
    if (c->shift != 0.0f)
        for (long x = 0; x < n; x++) scores[x] += c->shift;
    if (c->allowed) {
        const unsigned char *open = c->allowed + at->b * s->allowed[0] + at->h * s->allowed[1] + i * s->allowed[2];
        open += at->first * s->allowed[3];
        if (s->allowed[3] == 1)
            for (long x = 0; x < n; x++) scores[x] = open[x] ? scores[x] : -INFINITY;
        else
            for (long x = 0; x < n; x++)
                if (!open[x * s->allowed[3]]) scores[x] = -INFINITY;
    }
    if (c->query_ids) {
        long own = c->query_ids[at->b * s->query_ids + i];
        const long *ids = c->key_ids + at->b * s->key_ids + at->first;
        for (long x = 0; x < n; x++)
            if (ids[x] != own) scores[x] = -INFINITY;
    }
    vec high = ALL(-INFINITY), total = ALL(0.0f);
    for (long x = 0; x < width; x += LANES) {
        vec y = LOAD(scores + x);
        if (x < from - at->first || x + LANES > to - at->first) {
            y = between(y, from - at->first - x, to - at->first - x, -INFINITY);
            STORE(scores + x, y);
        }
        wrong |= ANY_NAN(y);
        high = MAX(high, y);
        if (slope) STORE(slope + x, ABOVE(y, ALL(-INFINITY), LOAD(slope + x)));
    }
    big = largest(high);
    wrong |= ANY_NAN(check) || !(big < INFINITY);
    if (s->normalizer == SIGMOID) { /* 1 / (1 + e^-x) = e^min(x, 0) / (1 + e^-|x|) */
        for (long x = 0; x < width; x += LANES) {
            vec y = LOAD(scores + x), size = MAX(y, MUL(y, ALL(-1.0f)));
            vec p = MUL(exponential(MIN(y, ALL(0.0f))), inverse(ADD(exponential(MUL(size, ALL(-1.0f))), ALL(1.0f))));
            STORE(scores + x, ABOVE(y, ALL(LOWEST), p));
        }
        return !wrong;
    }
    if (big == -INFINITY) {
        give_log_sum(c, at, i, -INFINITY, 1.0f);
        memset(scores, 0, (size_t)width * sizeof(float));
        return !wrong;
    }
    if (s->normalizer == HARD) {
        long best = 0, place = (at->b * s->heads + at->h) * s->queries + i;
        while (best < n - 1 && scores[best] != big) best++;
        for (long x = 0; x < width; x += LANES) {
            vec y = ADD(LOAD(scores + x), ALL(-big));
            total = ADD(total, ABOVE(y, ALL(LOWEST), exponential(y)));
        }
        memset(scores, 0, (size_t)width * sizeof(float));
        scores[best] = 1.0f;
        c->log_prob[place] = -logf(sum(total));
        c->index[place] = at->first + best;
        return !wrong;
    }
    if (s->normalizer != SOFTMAX) {
        project(scores, width, big, s->normalizer, c->alpha);
        return !wrong;
    }
    for (long x = 0; x < width; x += LANES) {
        vec p = exponential_below(ADD(LOAD(scores + x), ALL(-big)));
        STORE(scores + x, p);
        total = ADD(total, p);
    }
    give_log_sum(c, at, i, big, sum(total));
    vec by = ALL(1.0f / sum(total));
    for (long x = 0; x < width; x += LANES) STORE(scores + x, MUL(LOAD(scores + x), by));
    return !wrong;
}

/* Returns whether the weights are the softmax of products multiplied by a positive scale, and ranges of keys are the
 * only masks. */
static int is_simple(const call *c) {
    return c->scale > 0.0f && !(c->softcap > 0.0f || c->bias || c->slopes || c->shift != 0.0f || c->allowed
                                || c->query_ids || c->s->normalizer != SOFTMAX);
}

/* A faster `weigh` for calls that satisfy `is_simple`. It writes the exponentials of each row without dividing them by
 * their sum, and stores the inverse of the sum in `*by`. */
static int weigh_simply(const call *c, const block *at, long i, long width, float *scores, float *by) {
    long from, to;
    vec check = ALL(0.0f), high = ALL(-INFINITY), total = ALL(0.0f), scale = ALL(c->scale);
    attended(c, at->b, i, &from, &to);
    from -= at->first, to -= at->first;
    *by = 0.0f;
    if (from == to) {
        give_log_sum(c, at, i, -INFINITY, 1.0f);
        return clear(scores, at->last - at->first, width);
    }
    long start = from / LANES * LANES, stop = least(width, whole(to));
    if (c->ranges) /* a key that no query attends may lie in the block: if it is not finite, gradients would be NaN */
        for (long x = 0, n = at->last - at->first; x < n; x += LANES)
            if (x < from || x + LANES > to)
                check = FMA(between(LOAD(scores + x), 0, n - x, 0.0f), ALL(0.0f), check);
    for (long x = 0; x < start; x += LANES) STORE(scores + x, ALL(0.0f));
    for (long x = stop; x < width; x += LANES) STORE(scores + x, ALL(0.0f));
    for (long x = start; x < stop; x += LANES) {
        vec y = LOAD(scores + x), finite = y;
        if (x < from || x + LANES > to) {
            finite = between(y, from - x, to - x, 0.0f);
            y = between(y, from - x, to - x, -INFINITY);
            STORE(scores + x, y);
        }
        check = FMA(finite, ALL(0.0f), check);
        high = MAX(high, y);
    }
    float big = largest(high) * c->scale;
    for (long x = start; x < stop; x += LANES) {
        vec p = exponential_below(FMA(LOAD(scores + x), scale, ALL(-big)));
        STORE(scores + x, p);
        total = ADD(total, p);
    }
    give_log_sum(c, at, i, big, sum(total));
    *by = 1.0f / sum(total);
    return !ANY_NAN(check) && big < INFINITY;
}

static const char *slice(const char *start, const long *strides, long half, long b, long h) {
    return start + (b * strides[0] + h * strides[1]) * (half ? 2 : 4);
}

/* Returns rows in float32 with at least `width` numbers each, and sets `row` to their distance: the given rows if they
 * are already float32 and wide enough, or else a padded copy, which is written to `copy`. */
static const float *rows_of(const char *from, long stride, long half, long rows, long size, long width, float *copy,
                            long *row) {
    if (!half && size >= width) {
        *row = stride;
        return (const float *)from;
    }
    load(from, stride, half, rows, size, copy, width);
    *row = width;
    return copy;
}

static long bytes(const shape *s) { return s->half ? 2 : 4; }

/* Returns the gradient of the output of a query. */
static const char *change_of(const call *c, long b, long h, long row) {
    return slice(c->change, c->change_strides, c->s->half, b, h) + row * c->change_strides[2] * bytes(c->s);
}

/* Returns whether `rows` rows of `size` numbers are finite. */
static int finite_rows(const char *from, long stride, long half, long rows, long size) {
    vec check = ALL(0.0f);
    int wrong = 0;
    for (long i = 0; i < rows; i++) {
        if (half) {
            const uint16_t *row = (const uint16_t *)from + i * stride;
            for (long x = 0; x < size; x++) wrong |= (row[x] & 0x7f80) == 0x7f80;
            continue;
        }
        const float *row = (const float *)from + i * stride;
        long x = 0;
        for (; x + LANES <= size; x += LANES) check = FMA(LOAD(row + x), ALL(0.0f), check);
        if (x < size) check = FMA(FIRST(row + x, size - x), ALL(0.0f), check);
    }
    return !wrong && !ANY_NAN(check);
}

/* Returns whether the queries start <= i < stop of a head are finite and, in the unit with the first query of the first
 * head of a key head, all keys between the first and the last that is attended. The backward pass multiplies some of
 * them with zeros although no query attends to the key, or the query attends to no key: 0 * NaN would be NaN. */
static int all_finite(const call *c, long b, long h, long start, long stop) {
    const shape *s = c->s;
    long group = s->heads / s->kv_heads, half = s->half;
    const char *queries = slice(c->query, s->query, half, b, h) + start * s->query[2] * bytes(s);
    if (!finite_rows(queries, s->query[2], half, stop - start, s->size)) return 0;
    if (start > 0 || h % group) return 1;
    block all = block_of(c, b, h, 0, s->queries, 0);
    const char *keys = slice(c->key, s->key, half, b, h / group) + all.first * s->key[2] * bytes(s);
    return finite_rows(keys, s->key[2], half, all.last - all.first, s->size);
}

/* HARD: writes, for each row of a block, the value of its best key, or zeros if the row attends to no key. The weights in
 * `scores` are one-hot. */
static void pick(const call *c, const block *at, const float *scores, long width, const float *values, long stride,
                 float *out, long out_width) {
    const long *index = c->index + (at->b * c->s->heads + at->h) * c->s->queries + at->row;
    for (long i = 0; i < at->rows; i++) {
        long best = index[i] - at->first;
        if (best >= 0 && best < at->last - at->first && scores[i * width + best] != 0.0f)
            memcpy(out + i * out_width, values + best * stride, (size_t)out_width * sizeof(float));
        else
            memset(out + i * out_width, 0, (size_t)out_width * sizeof(float));
    }
}

/* Returns whether the right operand of a product is copied to panels of columns (see `pack_columns`): each panel stays
 * in the cache for all rows of the left operand. */
static int packed(long half, int few, long rows, long size) {
    return !half && !few && (rows > BLOCK || size < whole(size));
}

/* RECEIVED: returns where a unit writes its sums of the weights over the queries. A unit that has all rows of a head
 * writes them to the result of the call. */
static float *received_of(const call *c, long unit) {
    return (c->parts > 1 ? c->sums : c->requested) + unit * c->s->keys;
}

/* Writes the requested result (RECEIVED, ENTROPY, SOME_ROWS or ALL_WEIGHTS) of a block. The weights of row i are
 * by[i] times row i of `scores`, for `count` keys from at->first on. */
static void give(const call *c, long unit, const block *at, long count, const float *scores, long width,
                 const float *by) {
    const shape *s = c->s;
    long z = at->b * s->heads + at->h, keys = s->keys, columns = whole(count);
    if (s->request == LOG_SUM_EXP) return; /* `give_log_sum` has written it */
    if (s->request == RECEIVED) {
        float *to = received_of(c, unit) + at->first;
        for (long x = 0; x < columns; x += LANES) {
            vec total = ALL(0.0f);
            for (long i = 0; i < at->rows; i++) total = FMA(LOAD(scores + i * width + x), ALL(by[i]), total);
            float part[LANES];
            STORE(part, total);
            for (long u = 0; u < least(LANES, count - x); u++) to[x + u] += part[u];
        }
        return;
    }
    for (long i = 0; i < at->rows; i++, scores += width) {
        long query = z * s->queries + at->row + i, place = query;
        if (s->request == ENTROPY) {
            vec total = ALL(0.0f), least_weight = ALL(LEAST_NORMAL);
            for (long x = 0; x < columns; x += LANES) {
                vec w = MUL(LOAD(scores + x), ALL(by[i]));
                total = ADD(total, ABOVE(w, least_weight, MUL(w, logarithm(MAX(w, least_weight)))));
            }
            c->requested[query] = 0.0f - sum(total);
            continue;
        }
        if (s->request == SOME_ROWS) {
            if (c->place_of[at->row + i] < 0) continue;
            place = z * s->rows + c->place_of[at->row + i];
        }
        float *to = c->requested + place * keys;
        memset(to, 0, (size_t)keys * sizeof(float));
        for (long x = 0; x < count; x++) to[at->first + x] = scores[x] * by[i];
    }
}

/* RECEIVED: adds the sums of the weights from all parts of a head, in the order of the parts. */
static void combine_received(const call *c, long z) {
    long keys = c->s->keys;
    for (long j = 0; j < keys; j++) {
        float total = 0.0f;
        for (long part = 0; part < c->parts; part++) total += c->sums[(z * c->parts + part) * keys + j];
        c->requested[z * keys + j] = total;
    }
}

/* Adds the contribution of the requested result (weights, their sums or the entropy) to the gradients `changes` of the
 * weights w of query i, for `count` keys from at->first on. Returns the gradient of ln sum exp(score), or 0;
 * `differentiate` multiplies it by w and adds it to the gradients of the scores. */
static float add_requested(const call *c, const block *at, long i, long count, const float *w, float *changes) {
    const shape *s = c->s;
    long z = at->b * s->heads + at->h, place = z * s->queries + i;
    if (s->request == LOG_SUM_EXP) return c->drequested[place];
    if (s->request == ENTROPY) {
        vec by = ALL(-c->drequested[place]), least_weight = ALL(LEAST_NORMAL);
        for (long x = 0; x < whole(count); x += LANES) {
            vec y = LOAD(w + x), slope = ADD(logarithm(MAX(y, least_weight)), ALL(1.0f));
            STORE(changes + x, ADD(LOAD(changes + x), ABOVE(y, ALL(0.0f), MUL(by, slope))));
        }
        return 0.0f;
    }
    if (s->request == RECEIVED) place = z;
    if (s->request == SOME_ROWS) {
        if (c->place_of[i] < 0) return 0.0f;
        place = z * s->rows + c->place_of[i];
    }
    const float *given = c->drequested + place * s->keys + at->first;
    for (long x = 0; x < count; x++) changes[x] += given[x];
    return 0.0f;
}

/* Computes the output, and the requested result, of one unit of the forward pass: of all or a part of the rows of a
 * head. */
static void forward_unit(const call *c, long unit) {
    const shape *s = c->s;
    long part = c->parts - 1 - unit % c->parts, z = unit / c->parts, b = z / s->heads, h = z % s->heads, half = s->half;
    long share = (s->queries + c->parts - 1) / c->parts, start = part * share, stop = least(start + share, s->queries);
    if (s->request == RECEIVED) memset(received_of(c, unit), 0, (size_t)s->keys * sizeof(float));
    if (start >= stop) return;
    if (s->checked && !all_finite(c, b, h, start, stop)) {
        *c->bad = 1;
        return;
    }
    block all = block_of(c, b, h, start, stop - start, 0);
    long n = all.last - all.first, width = spread(n), out_width = whole(s->value_size), size = s->size;
    int few = stop - start <= FEW, simple = is_simple(c);
    int packs = s->normalizer != HARD && packed(half, few, stop - start, s->value_size);
    long key_room = half ? n * size : 0, turned = few ? 0 : size * panels(n), e = s->value_size;
    /* For few rows the values are not copied. If their size is not a multiple of LANES, the last vector of a value
     * overlaps the vector before it. */
    int as_given = few && !half && e >= LANES && s->normalizer != HARD;
    long value_room = packs ? n * panels(e) : half || (e < out_width && !as_given) ? n * out_width : 0;
    float *memory = reserve((size_t)(key_room + value_room + turned + BLOCK * (width + size + out_width) + LANES));
    float *key_copy = memory, *value_copy = key_copy + key_room, *kt = value_copy + value_room, *scores = kt + turned;
    float *query_copy = scores + BLOCK * width, *out = query_copy + BLOCK * size;
    long key_row, value_row, query_row, g = h / (s->heads / s->kv_heads);
    const char *keys = slice(c->key, s->key, half, b, g) + all.first * s->key[2] * bytes(s);
    const char *values = slice(c->value, s->value, half, b, g) + all.first * s->value[2] * bytes(s);
    const float *k = rows_of(keys, s->key[2], half, n, size, size, key_copy, &key_row);
    const float *v = rows_of(values, s->value[2], half, n, e, packs || as_given ? e : out_width, value_copy,
                             &value_row);
    if (!few) transpose(k, key_row, n, size, kt);
    vec seen = ALL(0.0f); /* `seen` becomes NaN if any value is NaN or infinite, even a value with weight 0 */
    for (long i = 0; s->normalizer == HARD && i < n; i++)
        for (long x = 0; x < out_width; x += LANES) seen = FMA(LOAD(v + i * value_row + x), ALL(0.0f), seen);
    if (!(sum(seen) == 0.0f)) {
        *c->bad = 1;
        return;
    }
    if (packs) pack_columns(v, value_row, n, e, value_copy), v = value_copy, value_row = PANEL;
    if (as_given) memset(out, 0, (size_t)((stop - start) * out_width) * sizeof(float));
    for (long row = start; row < stop; row += BLOCK) {
        block at = block_of(c, b, h, row, least(BLOCK, stop - row), all.first);
        long shift = (at.first - all.first) / GRAIN * GRAIN; /* `shift` is rounded down to a multiple of GRAIN keys */
        at.first = all.first + shift;
        long count = at.last - at.first, columns = whole(count);
        const char *given = slice(c->query, s->query, half, b, h) + row * s->query[2] * bytes(s);
        const float *q = rows_of(given, s->query[2], half, at.rows, size, size, query_copy, &query_row);
        if (few) {
            score_rows(at.rows, q, query_row, k + shift * key_row, key_row, count, size, scores, width);
            for (long j = 0; value_row > out_width && j < count; j++) ahead(v + (shift + j) * value_row, e);
        }
        else
            multiply(at.rows, columns, size, q, query_row, 1, kt + shift * size, PANEL, size * PANEL, scores, width, 0);
        vec check = ALL(0.0f);
        float by[BLOCK];
        for (long i = 0; i < at.rows; i++) {
            by[i] = 1.0f;
            if (simple ? !weigh_simply(c, &at, row + i, columns, scores + i * width, by + i)
                       : !weigh(c, &at, row + i, columns, scores + i * width, 0))
                *c->bad = 1;
        }
        if (*c->bad) return;
        if (s->request != NOTHING) give(c, unit, &at, count, scores, width, by);
        for (long i = 0; c->dropout > 0.0 && i < at.rows; i++) drop(c, &at, row + i, columns, scores + i * width);
        if (s->normalizer == HARD)
            pick(c, &at, scores, width, v + shift * value_row, value_row, out, out_width);
        else if (as_given) {
            const float *rows = v + shift * value_row;
            multiply(at.rows, e / LANES * LANES, count, scores, width, 1, rows, value_row, 0, out, out_width, 0);
            if (e % LANES)
                multiply(at.rows, LANES, count, scores, width, 1, rows + e - LANES, value_row, 0, out + e - LANES,
                         out_width, 0);
        } else
            multiply(at.rows, out_width, count, scores, width, 1, v + shift * value_row, value_row,
                     packs ? n * PANEL : 0, out, out_width, 0);
        for (long x = 0; x < at.rows * out_width; x += LANES) check = FMA(LOAD(out + x), ALL(0.0f), check);
        if (!(sum(check) == 0.0f)) {
            *c->bad = 1;
            return;
        }
        char *to = (char *)slice(c->output, s->output, half, b, h) + row * s->output[2] * bytes(s);
        save(out, out_width, half, at.rows, s->value_size, to, s->output[2], by);
    }
}

/* Returns the derivative of a weight w with respect to its score, with the threshold or the sum of the row held
 * constant: w^(2 - alpha), where alpha is 1 for softmax and 2 for sparsemax; w (1 - w) for sigmoid. */
static inline vec slope_of(const call *c, vec w) {
    switch (c->s->normalizer) {
    case SIGMOID: return FNMA(w, w, w);
    case SPARSEMAX: return ABOVE(w, ALL(0.0f), ALL(1.0f));
    case ENTMAX: return ROOT(w);
    case POWER: return power_of(w, 2.0f - c->alpha);
    default: return w;
    }
}

/* Replaces the gradients of a row's weights, in `changes`, by the gradients of its scores; `log_sum` is the gradient of
 * ln sum exp(score). A masked pair has weight 0, and the gradient of its score is 0 even if the gradient of the weight
 * is NaN. */
static void differentiate(const call *c, const float *weights, float *changes, long width, float log_sum) {
    long normalizer = c->s->normalizer;
    vec delta = ALL(0.0f), count = ALL(0.0f);
    for (long x = 0; x < width && normalizer != SIGMOID; x += LANES) {
        vec w = slope_of(c, LOAD(weights + x));
        delta = ADD(delta, ABOVE(w, ALL(0.0f), MUL(w, LOAD(changes + x))));
        count = ADD(count, w);
    }
    float total = sum(count);
    if (normalizer != SIGMOID) delta = ALL(total > 0.0f ? sum(delta) / (normalizer == SOFTMAX ? 1.0f : total) : 0.0f);
    delta = ADD(delta, ALL(-log_sum));
    for (long x = 0; x < width; x += LANES) {
        vec w = LOAD(weights + x), y = ADD(LOAD(changes + x), MUL(delta, ALL(-1.0f)));
        STORE(changes + x, ABOVE(w, ALL(0.0f), MUL(slope_of(c, w), y)));
    }
}

/* Multiplies `width` numbers by a factor, in place. */
static void multiply_row(float *numbers, long width, float by) {
    for (long x = 0; x < width; x += LANES) STORE(numbers + x, MUL(LOAD(numbers + x), ALL(by)));
}

/* Multiplies the exponentials from `weigh_simply` by their inverse sum `by`, which gives the weights, and replaces the
 * gradients of the weights, in `changes`, by the gradients of the products. `factor` is the scale of the scores, and
 * `log_sum` the gradient of ln sum exp(score). */
static void differentiate_simply(float *weights, float *changes, long width, float by, float factor, float log_sum) {
    vec delta = ALL(0.0f), scale = ALL(by);
    for (long x = 0; x < width; x += LANES) {
        vec w = LOAD(weights + x);
        delta = ADD(delta, ABOVE(w, ALL(0.0f), MUL(w, LOAD(changes + x))));
    }
    delta = ALL(sum(delta) * by - log_sum);
    for (long x = 0; x < width; x += LANES) {
        vec w = MUL(LOAD(weights + x), scale), y = FNMA(delta, ALL(1.0f), LOAD(changes + x));
        STORE(weights + x, w);
        STORE(changes + x, ABOVE(w, ALL(0.0f), MUL(MUL(w, ALL(factor)), y)));
    }
}

/* Computes in place, for query i: in `weights`, the weights from the products of the query with the keys (with dropout,
 * the dropped and rescaled weights); in `changes`, the gradients of these products from the gradients of the weights.
 * */
static void gradients_of_row(const call *c, const block *at, long i, long columns, int simple, float *weights,
                             float *changes, float *slope) {
    const shape *s = c->s;
    long count = at->last - at->first;
    float log_sum = 0.0f;
    if (c->dropout > 0.0) drop(c, at, i, columns, changes);
    if (simple) {
        float by;
        weigh_simply(c, at, i, columns, weights, &by);
        if (c->drequested) {
            multiply_row(weights, columns, by);
            log_sum = add_requested(c, at, i, count, weights, changes);
            by = 1.0f;
        }
        differentiate_simply(weights, changes, columns, by, c->scale, log_sum);
        if (c->dropout > 0.0) drop(c, at, i, columns, weights);
        return;
    }
    weigh(c, at, i, columns, weights, slope);
    if (c->drequested) log_sum = add_requested(c, at, i, count, weights, changes);
    differentiate(c, weights, changes, columns, log_sum);
    if (c->dropout > 0.0) drop(c, at, i, columns, weights);
    if (c->dscores) {
        long place = ((at->b * s->heads + at->h) * s->queries + i) * s->keys;
        memset(c->dscores + place, 0, (size_t)s->keys * sizeof(float));
        memcpy(c->dscores + place + at->first, changes, (size_t)count * sizeof(float));
    }
    for (long x = 0; x < columns; x += LANES) STORE(changes + x, MUL(LOAD(changes + x), LOAD(slope + x)));
}

/* The blocks of rows that a unit of the backward pass processes: from <= t < to, where t counts the blocks of all query
 * heads that share key head g of sequence b, head after head; each query head has `blocks` of them. z is the index of
 * the key head in the batch, and `all` has a range of keys that contains all keys that these rows attend. */
typedef struct { long z, b, g, blocks, from, to; block all; } portion;

static portion portion_of(const call *c, long unit) {
    const shape *s = c->s;
    long z = unit / c->parts, part = c->parts - 1 - unit % c->parts, group = s->heads / s->kv_heads;
    long blocks = (s->queries + BLOCK - 1) / BLOCK, share = (group * blocks + c->parts - 1) / c->parts;
    portion found = {z, z / s->kv_heads, z % s->kv_heads, blocks, part * share, least((part + 1) * share, group * blocks)};
    long row = found.from % blocks * BLOCK, rows = (found.to - found.from) * BLOCK;
    if (row + rows > blocks * BLOCK) row = 0, rows = s->queries; /* the unit has blocks of several query heads */
    found.all = block_of(c, found.b, found.g * group, row, least(rows, s->queries - row), 0);
    return found;
}

/* Returns how many numbers a unit of the backward pass stores in `sums`: the range of its keys, and the gradients of at
 * most all keys and values. */
static size_t sums_of_unit(const shape *s) { return (size_t)(16 + s->keys * (s->size + s->value_size)); }

/* Sets the addresses to which a unit of the backward pass writes the gradients of its keys and values: the result, or
 * `sums` if a head has several parts. Returns whether these gradients are written in bfloat16. */
static long targets(const call *c, long unit, const portion *own, char **to_key, char **to_value) {
    const shape *s = c->s;
    long first = own->all.first, last = own->all.last, width[2] = {s->size, s->value_size};
    if (c->parts > 1) {
        float *sums = c->sums + unit * sums_of_unit(s);
        memcpy(sums, (long[]){first, last}, 2 * sizeof(long));
        *to_key = (char *)(sums + 16), *to_value = (char *)(sums + 16 + (last - first) * s->size);
        return 0;
    }
    for (int u = 0; u < 2; u++) {
        char *start = (u ? c->dvalue : c->dkey) + own->z * s->keys * width[u] * bytes(s);
        memset(start, 0, (size_t)(s->keys * width[u] * bytes(s)));
        *(u ? to_value : to_key) = start + first * width[u] * bytes(s);
    }
    return s->half;
}

/* Adds up the gradients of keys and values that the units of one key head have stored in `sums`. The keys of the head
 * are divided among as many calls of this function as the head has units. */
static void combine(const call *c, long unit) {
    const shape *s = c->s;
    long z = unit / c->parts, share = (s->keys + c->parts - 1) / c->parts, start = unit % c->parts * share;
    long size = s->size, e = s->value_size, range[2];
    float *total = reserve((size_t)(size + e));
    for (long j = start; j < least(start + share, s->keys); j++) {
        memset(total, 0, (size_t)(size + e) * sizeof(float));
        for (long part = 0; part < c->parts; part++) {
            const float *sums = c->sums + (z * c->parts + part) * sums_of_unit(s);
            memcpy(range, sums, sizeof range);
            if (j < range[0] || j >= range[1]) continue;
            const float *dk = sums + 16 + (j - range[0]) * size;
            const float *dv = sums + 16 + (range[1] - range[0]) * size + (j - range[0]) * e;
            for (long x = 0; x < size; x++) total[x] += dk[x];
            for (long x = 0; x < e; x++) total[size + x] += dv[x];
        }
        save(total, size, s->half, 1, size, c->dkey + (z * s->keys + j) * size * bytes(s), size, 0);
        save(total + size, e, s->half, 1, e, c->dvalue + (z * s->keys + j) * e * bytes(s), e, 0);
    }
}

/* Computes the gradients of one unit of the backward pass: of a key head, its values and the query heads that share it,
 * or the contribution of a part of the rows of these query heads. */
static void backward_unit(const call *c, long unit) {
    const shape *s = c->s;
    portion own = portion_of(c, unit);
    block all = own.all;
    long b = own.b, g = own.g, group = s->heads / s->kv_heads, half = s->half;
    int simple = is_simple(c);
    long n = all.last - all.first, width = spread(n), size = s->size, wide = whole(size), e = s->value_size;
    long out = whole(e);
    int packs = packed(half, 0, s->queries, size);
    float *memory = reserve((size_t)(n * (panels(size) + wide + 2 * out) + (size + e) * panels(n)
                                     + BLOCK * (2 * width + 2 * wide + out) + width + LANES));
    float *key_copy = memory, *value_copy = key_copy + n * panels(size), *dk = value_copy + n * out;
    float *dv = dk + n * wide;
    float *kt = dv + n * out, *vt = kt + size * panels(n), *p = vt + e * panels(n), *slope = p + BLOCK * width;
    float *ds = slope + width, *query_copy = ds + BLOCK * width, *change_copy = query_copy + BLOCK * wide;
    float *dq = change_copy + BLOCK * out;
    long key_row, value_row, query_row, change_row;
    const char *keys = slice(c->key, s->key, half, b, g) + all.first * s->key[2] * bytes(s);
    const char *values = slice(c->value, s->value, half, b, g) + all.first * s->value[2] * bytes(s);
    const float *k = rows_of(keys, s->key[2], half, n, size, packs ? size : wide, key_copy, &key_row);
    const float *v = rows_of(values, s->value[2], half, n, e, e, value_copy, &value_row);
    transpose(k, key_row, n, size, kt);
    transpose(v, value_row, n, e, vt);
    if (packs) pack_columns(k, key_row, n, size, key_copy), k = key_copy, key_row = PANEL;
    memset(dk, 0, (size_t)(n * wide) * sizeof(float));
    memset(dv, 0, (size_t)(n * out) * sizeof(float));
    for (long t = own.from; t < own.to; t++) {
        long h = g * group + t / own.blocks, row = t % own.blocks * BLOCK;
        block at = block_of(c, b, h, row, least(BLOCK, s->queries - row), all.first);
        long shift = (at.first - all.first) / GRAIN * GRAIN;
        at.first = all.first + shift;
        long count = at.last - at.first, columns = whole(count), z = b * s->heads + h;
        const char *given = slice(c->query, s->query, half, b, h) + row * s->query[2] * bytes(s);
        const float *q = rows_of(given, s->query[2], half, at.rows, size, wide, query_copy, &query_row);
        const float *d = rows_of(change_of(c, b, h, row), c->change_strides[2], half, at.rows, e, out, change_copy,
                                 &change_row);
        multiply(at.rows, columns, size, q, query_row, 1, kt + shift * size, PANEL, size * PANEL, p, width, 0);
        multiply(at.rows, columns, e, d, change_row, 1, vt + shift * e, PANEL, e * PANEL, ds, width, 0);
        for (long i = 0; i < at.rows; i++)
            gradients_of_row(c, &at, row + i, columns, simple, p + i * width, ds + i * width, slope);
        multiply(at.rows, wide, count, ds, width, 1, k + shift * key_row, key_row, packs ? n * PANEL : 0, dq, wide,
                 0);
        multiply(count, wide, at.rows, ds, 1, width, q, query_row, 0, dk + shift * wide, wide, 1);
        multiply(count, out, at.rows, p, 1, width, d, change_row, 0, dv + shift * out, out, 1);
        save(dq, wide, half, at.rows, size, c->dquery + (z * s->queries + row) * size * bytes(s), size, 0);
    }
    char *to_key, *to_value;
    half = targets(c, unit, &own, &to_key, &to_value);
    save(dk, wide, half, n, size, to_key, size, 0);
    save(dv, out, half, n, e, to_value, e, 0);
}

/* A `backward_unit` for at most FEW rows per key head. No operand is transposed, because the copy would take longer
 * than it saves. */
static void backward_few(const call *c, long unit) {
    const shape *s = c->s;
    portion own = portion_of(c, unit);
    long b = own.b, group = s->heads / s->kv_heads, half = s->half, size = s->size, e = s->value_size;
    long wide = whole(size), out = whole(e), queries = s->queries, rows = (own.to - own.from) * queries;
    long first = own.all.first, n = own.all.last - first, width = whole(n);
    int simple = is_simple(c);
    float *memory = reserve((size_t)(n * (wide + out) + rows * (2 * width + 2 * wide + out) + width + CHUNK * (wide + out)
                                     + LANES));
    float *key_copy = memory, *value_copy = key_copy + n * wide, *p = value_copy + n * out, *ds = p + rows * width;
    float *q = ds + rows * width, *dq = q + rows * wide, *change = dq + rows * wide, *slope = change + rows * out;
    float *chunk = slope + width;
    long key_row, value_row;
    const char *keys = slice(c->key, s->key, half, b, own.g) + first * s->key[2] * bytes(s);
    const char *values = slice(c->value, s->value, half, b, own.g) + first * s->value[2] * bytes(s);
    const float *k = rows_of(keys, s->key[2], half, n, size, wide, key_copy, &key_row);
    const float *v = rows_of(values, s->value[2], half, n, e, e, value_copy, &value_row);
    for (long t = own.from; t < own.to; t++) {
        long h = own.g * group + t, r = (t - own.from) * queries;
        block at = block_of(c, b, h, 0, queries, first);
        load(slice(c->query, s->query, half, b, h), s->query[2], half, queries, size, q + r * wide, wide);
        load(change_of(c, b, h, 0), c->change_strides[2], half, queries, e, change + r * out, out);
        score_rows(queries, q + r * wide, wide, k, key_row, n, size, p + r * width, width);
        score_rows(queries, change + r * out, out, v, value_row, n, e, ds + r * width, width);
        for (long i = 0; i < queries; i++)
            gradients_of_row(c, &at, i, width, simple, p + (r + i) * width, ds + (r + i) * width, slope);
    }
    multiply(rows, wide, n, ds, width, 1, k, key_row, 0, dq, wide, 0);
    save(dq, wide, half, rows, size, c->dquery + (b * s->heads + own.g * group + own.from) * queries * size * bytes(s),
         size, 0);
    char *to[2];
    half = targets(c, unit, &own, to, to + 1);
    for (long x = 0; x < n; x += CHUNK)
        for (int w = 0; w < 2; w++) {
            const float *left = w ? p : ds, *right = w ? change : q;
            long row = w ? out : wide, columns = w ? e : size, count = least(CHUNK, n - x);
            multiply(count, row, rows, left + x, 1, width, right, row, 0, chunk, row, 0);
            save(chunk, row, half, count, columns, to[w] + x * columns * (half ? 2 : 4), columns, 0);
        }
}

#ifdef BFLOAT16_PRODUCTS
/* In the backward pass, a product sums over the rows of up to TOGETHER blocks, whose scores are at most MOST_TOGETHER
 * numbers (but over one block at least). */
#define TOGETHER 8
#define MOST_TOGETHER 131072

/* Returns the distance between consecutive rows of n numbers in memory, where a cache line holds `line` numbers. It is
 * an odd number of cache lines, so that the numbers of one column do not all map to the same few sets of the cache. */
static inline long odd_lines(long n, long line) { return (in_tiles(n, line) | 1) * line; }

/* A `forward_unit` for bfloat16. Unless there are few rows, the weights are rounded to bfloat16 before they are
 * multiplied by the values. */
static void forward_half(const call *c, long unit) {
    const shape *s = c->s;
    long part = c->parts - 1 - unit % c->parts, z = unit / c->parts, b = z / s->heads, h = z % s->heads;
    long g = h / (s->heads / s->kv_heads);
    long share = (s->queries + c->parts - 1) / c->parts, start = part * share, stop = least(start + share, s->queries);
    if (s->request == RECEIVED) memset(received_of(c, unit), 0, (size_t)s->keys * sizeof(float));
    if (start >= stop) return;
    if (s->checked && !all_finite(c, b, h, start, stop)) {
        *c->bad = 1;
        return;
    }
    block all = block_of(c, b, h, start, stop - start, 0);
    long n = all.last - all.first, width = in_tiles(n, 32) * 32, size = s->size, deep = in_tiles(size, 32) * 32;
    long e = s->value_size, out_width = in_tiles(e, 32) * 32;
    int few = stop - start <= FEW / 2, simple = is_simple(c);
    long packed = few ? 0 : width * (deep + in_tiles(e, 16) * 16) / 2, line = odd_lines(width, 16);
    long half_line = odd_lines(width, 32);
    float *scores = reserve((size_t)(packed + BLOCK * (line + half_line / 2 + deep / 2 + out_width)));
    float *out = scores + BLOCK * line;
    uint16_t *p = (uint16_t *)(out + BLOCK * out_width), *q = p + BLOCK * half_line;
    uint32_t *kt = (uint32_t *)(q + BLOCK * deep), *vt = kt + width * deep / 2;
    const uint16_t *k = (const uint16_t *)slice(c->key, s->key, 1, b, g) + all.first * s->key[2];
    const uint16_t *v = (const uint16_t *)slice(c->value, s->value, 1, b, g) + all.first * s->value[2];
    if (!few) {
        pack_rows(k, s->key[2], n, size, kt, width);
        pack(v, s->value[2], n, e, vt, width);
    }
    for (long row = start; row < stop; row += BLOCK) {
        block at = block_of(c, b, h, row, least(BLOCK, stop - row), all.first);
        long shift = (at.first - all.first) / 32 * 32, m = in_tiles(at.rows, 16);
        at.first = all.first + shift;
        long count = at.last - at.first, columns = in_tiles(count, 32) * 32;
        const uint16_t *given = (const uint16_t *)slice(c->query, s->query, 1, b, h) + row * s->query[2];
        copy_rows(given, s->query[2], at.rows, size, q, deep);
        if (few)
            score_few(at.rows, q, deep, k + shift * s->key[2], s->key[2], count, size, scores, line);
        else
            multiply_tiles(m, columns / 16, deep / 32, q, deep, kt + shift * deep / 2, deep / 32, scores, line, 0);
        float by[BLOCK];
        for (long i = 0; i < at.rows; i++) {
            float *weights = scores + i * line;
            by[i] = 1.0f;
            if (simple ? !weigh_simply(c, &at, row + i, columns, weights, by + i)
                       : !weigh(c, &at, row + i, columns, weights, 0)) {
                *c->bad = 1;
                return;
            }
        }
        if (s->request != NOTHING) give(c, unit, &at, count, scores, line, by);
        for (long i = 0; i < at.rows; i++) {
            if (c->dropout > 0.0) drop(c, &at, row + i, columns, scores + i * line);
            if (!few) narrow(scores + i * line, columns, p + i * half_line);
        }
        if (few)
            sum_few(at.rows, scores, line, count, v + shift * s->value[2], s->value[2], e, out, out_width);
        else
            multiply_tiles(m, in_tiles(e, 16), columns / 32, p, half_line, vt + shift * 8, width / 32, out, out_width,
                           0);
        uint16_t *to = (uint16_t *)slice(c->output, s->output, 1, b, h) + row * s->output[2];
        for (long i = 0; i < at.rows; i++) {
            vec check = ALL(0.0f);
            for (long x = 0; x < e; x += LANES) check = FMA(LOAD(out + i * out_width + x), ALL(0.0f), check);
            if (!(sum(check) == 0.0f)) {
                *c->bad = 1;
                return;
            }
            save_row(out + i * out_width, e, by[i], to + i * s->output[2]);
        }
    }
}

/* A `backward_unit` for bfloat16. The gradients of keys and values are computed as transposed matrices: the left
 * operands of their products are then the transposed queries and the transposed gradient of the output. One product
 * sums over the rows of several blocks of a head, because each product reads and writes the gradients of all keys or
 * values. */
static void backward_half(const call *c, long unit) {
    const shape *s = c->s;
    portion own = portion_of(c, unit);
    block all = own.all;
    long b = own.b, g = own.g, group = s->heads / s->kv_heads, size = s->size, e = s->value_size;
    int simple = is_simple(c);
    long n = all.last - all.first, width = in_tiles(n, 32) * 32, wide = in_tiles(size, 16) * 16;
    long out = in_tiles(e, 16) * 16, deep = in_tiles(size, 32) * 32, deep_out = in_tiles(e, 32) * 32;
    long line = odd_lines(width, 16), half_line = odd_lines(width, 32);
    long most = most_of(1, least(TOGETHER, MOST_TOGETHER / (BLOCK * most_of(width, 1)))), turned = most * BLOCK;
    size_t floats = (size_t)(line * (wide + out) + BLOCK * (2 * line + wide) + width);
    size_t halves = (size_t)(width * (deep + deep_out + wide + 2 * turned) + BLOCK * (half_line + deep + deep_out)
                             + turned * (wide + out));
    float *p = reserve(floats + halves / 2), *ds = p + BLOCK * line, *slope = ds + BLOCK * line;
    float *dk = slope + width, *dv = dk + line * wide, *dq = dv + line * out;
    uint32_t *kt = (uint32_t *)(dq + BLOCK * wide), *vt = kt + width * deep / 2, *kp = vt + width * deep_out / 2;
    uint32_t *pp = kp + width * wide / 2, *dsp = pp + turned * width / 2;
    uint16_t *ds_rows = (uint16_t *)(dsp + turned * width / 2), *q = ds_rows + BLOCK * half_line;
    uint16_t *change = q + BLOCK * deep, *qt = change + BLOCK * deep_out, *change_t = qt + turned * wide;
    const uint16_t *k = (const uint16_t *)slice(c->key, s->key, 1, b, g) + all.first * s->key[2];
    const uint16_t *v = (const uint16_t *)slice(c->value, s->value, 1, b, g) + all.first * s->value[2];
    pack_rows(k, s->key[2], n, size, kt, width);
    pack(k, s->key[2], n, size, kp, width);
    pack_rows(v, s->value[2], n, e, vt, width);
    memset(dk, 0, (size_t)(line * (wide + out)) * sizeof(float));
    for (long t = own.from, together; t < own.to; t += together) {
        long h = g * group + t / own.blocks, begin = t % own.blocks * BLOCK, z = b * s->heads + h;
        together = least(least(most, own.to - t), own.blocks - t % own.blocks);
        block span = block_of(c, b, h, begin, least(together * BLOCK, s->queries - begin), all.first);
        long origin = (span.first - all.first) / 32 * 32;
        long span_columns = in_tiles(span.last - all.first - origin, 32) * 32;
        for (long u = 0; u < together; u++) {
            long row = begin + u * BLOCK;
            block at = block_of(c, b, h, row, least(BLOCK, s->queries - row), span.first);
            long shift = (at.first - all.first) / 32 * 32, m = in_tiles(at.rows, 16);
            at.first = all.first + shift;
            long count = at.last - at.first, columns = in_tiles(count, 32) * 32;
            const uint16_t *rows = (const uint16_t *)slice(c->query, s->query, 1, b, h) + row * s->query[2];
            const uint16_t *given = (const uint16_t *)change_of(c, b, h, row);
            copy_rows(rows, s->query[2], at.rows, size, q, deep);
            turn_block(rows, s->query[2], at.rows, size, qt + u * BLOCK, turned);
            copy_rows(given, c->change_strides[2], at.rows, e, change, deep_out);
            turn_block(given, c->change_strides[2], at.rows, e, change_t + u * BLOCK, turned);
            multiply_tiles(m, columns / 16, deep / 32, q, deep, kt + shift * deep / 2, deep / 32, p, line, 0);
            multiply_tiles(m, columns / 16, deep_out / 32, change, deep_out, vt + shift * deep_out / 2, deep_out / 32,
                           ds, line, 0);
            for (long i = 0; i < BLOCK; i++) {
                float *weights = p + i * line, *changes = ds + i * line;
                if (i < at.rows)
                    gradients_of_row(c, &at, row + i, columns, simple, weights, changes, slope);
                else {
                    memset(weights, 0, (size_t)columns * sizeof(float));
                    memset(changes, 0, (size_t)columns * sizeof(float));
                }
                narrow(changes, columns, ds_rows + i * half_line);
            }
            long before = shift - origin, after = span_columns - before - columns, tile = TILE_SIZE / 16 * together;
            for (int w = 0; w < 2; w++) {
                uint32_t *to = (w ? dsp : pp) + u * TILE_SIZE;
                clear_block(before, to, together);
                pack_block(w ? ds : p, line, columns, to + before * tile, together);
                clear_block(after, to + (before + columns) * tile, together);
            }
            multiply_tiles(m, wide / 16, columns / 32, ds_rows, half_line, kp + shift * 8, width / 32, dq, wide, 0);
            for (long i = 0; i < at.rows; i++)
                save_row(dq + i * wide, size, 1.0f, (uint16_t *)c->dquery + (z * s->queries + row + i) * size);
        }
        multiply_tiles(wide / 16, span_columns / 16, together, qt, turned, dsp, together, dk + origin, line, 1);
        multiply_tiles(out / 16, span_columns / 16, together, change_t, turned, pp, together, dv + origin, line, 1);
    }
    char *to_key, *to_value;
    long half = targets(c, unit, &own, &to_key, &to_value);
    save_turned(dk, line, n, size, half, to_key);
    save_turned(dv, line, n, e, half, to_value);
}
#else
#define forward_half forward_unit
#define backward_half backward_unit
static void begin_tiles(char *saved) {}
static void end_tiles(const char *saved) {}
#endif

static void run(const call *c, long units, long threads, void (*work)(const call *, long)) {
    char saved[64];
    if (threads > units) threads = units;
#ifdef _OPENMP
    if (threads > 1) {
        long chunk = most_of(1, units / (threads * CHUNKS));
        region regions[threads];
        divide(regions, threads, units);
#pragma omp parallel num_threads(threads) private(saved)
        {
            if (c->s->half) begin_tiles(saved);
            long first, stop;
            while (take(regions, threads, omp_get_thread_num(), chunk, &first, &stop))
                for (long unit = first; unit < stop; unit++) work(c, unit);
            if (c->s->half) end_tiles(saved);
            trim(&room);
        }
        return;
    }
#endif
    if (c->s->half) begin_tiles(saved);
    for (long unit = 0; unit < units; unit++) work(c, unit);
    if (c->s->half) end_tiles(saved);
    trim(&room);
}

/* Returns whether products of bfloat16 use AMX, which makes them many times as fast as those of float32. */
int regard_dot_amx(void) {
#ifdef BFLOAT16_PRODUCTS
    return with_amx();
#else
    return 0;
#endif
}

/* Returns whether the matrix products of this file are faster than those of torch: on processors with AVX-512 that are
 * not by Intel, because the libraries that torch uses make good use of AVX-512 only on Intel's processors. */
int regard_dot_outruns_torch(void) {
#if LANES == 16
    __builtin_cpu_init();
    return !__builtin_cpu_is("intel");
#else
    return 0;
#endif
}

/* Returns the `call` with these sizes and inputs; the caller sets the fields of its results. */
static call call_of(const shape *s, const inputs *in, int *bad) {
    call c = {.s = s, .query = in->query, .key = in->key, .value = in->value, .lengths = in->lengths,
              .query_ids = in->query_ids, .key_ids = in->key_ids, .bias = in->bias, .slopes = in->slopes,
              .allowed = in->allowed, .place_of = in->place_of, .scale = (float)s->scale,
              .softcap = (float)s->softcap, .shift = (float)s->shift, .alpha = (float)s->alpha, .dropout = s->dropout,
              .seed = in->seed, .parts = 1, .bad = bad};
    return c;
}

/* The forward pass. Returns 1 if a number was not finite or a length is out of range, and else 0. */
int regard_dot_attention(const shape *s, const outputs *to) {
    int bad = 0;
    call c = call_of(s, &to->in, &bad);
    c.output = to->output, c.requested = to->requested, c.log_prob = to->log_prob, c.index = to->index;
    for (long b = 0; c.lengths && b < s->batch; b++)
        if (c.lengths[b] < 0 || c.lengths[b] > s->keys) return 1;
    find_ranges(&c);
    long slices = s->batch * s->heads;
    /* The number of parts depends only on the shape, so that the result does not depend on the number of threads. */
    while (slices * c.parts < UNITS && c.parts * BLOCK < s->queries) c.parts++;
    int combined = s->request == RECEIVED && c.parts > 1;
    if (combined) c.sums = extend(&results, (size_t)(slices * c.parts * s->keys));
    run(&c, slices * c.parts, to->in.threads, s->half ? forward_half : forward_unit);
    for (long z = 0; combined && z < slices; z++) combine_received(&c, z);
    trim(&results);
    free(c.ranges);
    return bad;
}

void regard_dot_gradients(const shape *s, const gradients *to) {
    int bad = 0;
    call c = call_of(s, &to->in, &bad);
    c.change = to->change, c.change_strides = to->change_strides, c.drequested = to->drequested;
    c.dquery = to->dquery, c.dkey = to->dkey, c.dvalue = to->dvalue, c.dscores = to->dscores;
    find_ranges(&c);
    long slices = s->batch * s->kv_heads, blocks = s->heads / s->kv_heads * ((s->queries + BLOCK - 1) / BLOCK);
    while (slices * c.parts < UNITS && (c.parts + 1) * LEAST <= blocks) c.parts++;
    if (c.parts > 1) c.sums = extend(&results, (size_t)(slices * c.parts) * sums_of_unit(s));
    int few = s->heads / s->kv_heads * s->queries <= FEW;
    run(&c, slices * c.parts, to->in.threads, few ? backward_few : s->half ? backward_half : backward_unit);
    if (c.parts > 1) run(&c, slices * c.parts, to->in.threads, combine);
    trim(&results);
    free(c.ranges);
}
