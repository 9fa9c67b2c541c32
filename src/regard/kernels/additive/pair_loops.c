/* The loops over all pairs of additive attention on a CPU, in float32. A row is a query, a column is a key.
 * Reference implementation: `_eager_*` in exponential.py.
 *
 * There are three formulas for tanh(q + k); the names of functions begin with that of their formula:
 * far   A = e^{2q}, B = e^{2k}:          tanh(q + k) = 1 - 2 r with r = 1 / (1 + A B), derivative 4 r (1 - r)
 * near  A = e^{2q} - 1, B = e^{2k} - 1:  tanh(q + k) = p / (p + 2) with p = A + B (1 + A), derivative 1 - tanh^2
 * plain A = q, B = k:                    tanh by a rational function, for so few pairs that exponentials take longer
 *
 * Features are padded with zeros to a multiple of LANES by the caller. A call is one parallel region: its threads take
 * blocks of rows from a common counter, so that a thread that waits for a core delays only one block. Each row is
 * computed by one thread in a fixed order, so the result does not depend on the number of threads.
 */

#define COLUMNS 4 /* columns computed together, so that a row is loaded once for all of them */
#define TOGETHER 4 /* number of SIMD vectors of features that are summed at once */
#define HUGE_ONE 1e37f /* limits x in `inverse`, whose Newton step gives NaN for inf; 1 / HUGE_ONE is negligible */

int regard_lanes(void) { return LANES; }

static inline vec far_r(vec a, vec b) { return inverse(MIN(FMA(a, b, ALL(1.0f)), ALL(HUGE_ONE))); }

static inline vec near_tanh(vec a, vec b) {
    vec p = FMA(b, ADD(a, ALL(1.0f)), a);
    return MUL(p, inverse(ADD(p, ALL(2.0f))));
}

static inline vec plain_tanh(vec a, vec b) { return tangent(ADD(a, b)); }

typedef struct {
    const float *rows, *columns, *third; /* third: the weights (z, f) to compute scores, or the scores' gradients
                                          * (z, q, k) to compute sums */
    float *first, *second, *fourth;
    long slices, n_rows, n_columns, features, block;
    /* The threads share the work: each slice is divided into `units` units of work; the size of a unit, its pairs times
     * their features, is `unit_pairs`. */
    long segments, units, unit_pairs;
    void (*work)(const void *, long, long);
    atomic_long next;
    /* The following fields are for attention: `values` (z, k, e), `change` (z, q, e), the gradients of the outputs,
     * `totals` (z, q, 2), the largest score and the inverse sum of exponentials of each row, `lengths` (z) or null;
     * if `banded`, i + high is the last column of row i. In the forward pass `second` receives the weights, if
     * requested; in the backward pass `fourth` holds their gradients, or is null. */
    const float *values, *change, *result;
    const uint16_t *half_values; /* the values in bfloat16, in the forward pass only; then `values` is null */
    const long *lengths;
    float *totals; /* in the backward pass, the function for sums writes the gradients of the values here */
    long size, high, banded, sum_units, weight_rows; /* slice z uses row z % weight_rows of the weights */
    int *bad; /* set to 1 if a result is not finite */
} job;

/* Returns the number of columns that row i of slice z attends to. */
static inline long visible(const job *j, long z, long i) {
    long count = j->lengths ? j->lengths[z] : j->n_columns;
    if (j->banded && i + j->high + 1 < count) count = i + j->high + 1;
    return count > 0 ? count : 0;
}

#define SCORES(NAME, TERM, RESULT)                                                                  \
    static inline void NAME##_into(const float *a, const float *b, const float *w, long f, long k, float *out) { \
        vec all = ALL(0.0f);                                                                        \
        for (long x = 0; x < f; x += LANES) all = ADD(all, LOAD(w + x));                            \
        float whole = sum(all);                                                                     \
        (void)whole;                                                                                \
        long c = 0;                                                                                 \
        for (; c + COLUMNS <= k; c += COLUMNS) {                                                    \
            vec t[COLUMNS];                                                                         \
            for (int u = 0; u < COLUMNS; u++) t[u] = ALL(0.0f);                                     \
            for (long x = 0; x < f; x += LANES) {                                                   \
                vec left = LOAD(a + x), by = LOAD(w + x);                                           \
                for (int u = 0; u < COLUMNS; u++) t[u] = FMA(by, TERM(left, LOAD(b + (c + u) * f + x)), t[u]); \
            }                                                                                       \
            for (int u = 0; u < COLUMNS; u++) out[c + u] = RESULT(whole, sum(t[u]));                \
        }                                                                                           \
        for (; c < k; c++) {                                                                        \
            vec t = ALL(0.0f);                                                                      \
            for (long x = 0; x < f; x += LANES) t = FMA(LOAD(w + x), TERM(LOAD(a + x), LOAD(b + c * f + x)), t); \
            out[c] = RESULT(whole, sum(t));                                                         \
        }                                                                                           \
    }                                                                                               \
    static void NAME(const void *given, long z, long i) {                                           \
        const job *j = given;                                                                       \
        long f = j->features, k = j->n_columns, row = z * j->n_rows + i;                            \
        NAME##_into(j->rows + row * f, j->columns + z * k * f, j->third + z % j->weight_rows * f, f, k, j->first + row * k); \
    }                                                                                               \
    static void NAME##_attended(const void *given, long z, long i) {                                \
        const job *j = given;                                                                       \
        long f = j->features, k = j->n_columns, row = z * j->n_rows + i, count = visible(j, z, i);  \
        float *scores = malloc((size_t)(count + LANES) * sizeof(float));                            \
        if (!scores) abort();                                                                       \
        NAME##_into(j->rows + row * f, j->columns + z * k * f, j->third + z % j->weight_rows * f, f, count, scores); \
        weigh(j, z, row, count, scores);                                                            \
        free(scores);                                                                               \
    }                                                                                               \
    static void NAME##_changed(const void *given, long z, long i) {                                 \
        const job *j = given;                                                                       \
        long f = j->features, k = j->n_columns, row = z * j->n_rows + i, count = visible(j, z, i);  \
        float *weights = j->second + row * k, *changes = j->first + row * k;                        \
        NAME##_into(j->rows + row * f, j->columns + z * k * f, j->third + z % j->weight_rows * f, f, count, weights); \
        change(j, z, row, count, weights, changes);                                                 \
    }

/* Writes `by` times the sum of the `count` rows of e values, weighted by the numbers in `weights`, to out. The values
 * are `half`, in bfloat16, or else `values`, in float32. */
static inline __attribute__((always_inline)) void weighted_sum(const float *values, const uint16_t *half, long count,
                                                               long e, const float *weights, float by, float *out) {
    long x = 0;
    for (; x + LANES <= e;) {
        vec t[TOGETHER];
        long many = (e - x) / LANES < TOGETHER ? (e - x) / LANES : TOGETHER;
        for (int u = 0; u < TOGETHER; u++) t[u] = ALL(0.0f);
#define ADD_ROW(c, u) t[u] = FMA(ALL(weights[c]), half ? WIDENED(half + (c) * e + x + (u) * LANES) \
                                                       : LOAD(values + (c) * e + x + (u) * LANES), t[u])
        if (many == TOGETHER)
            for (long c = 0; c < count; c++)
                for (int u = 0; u < TOGETHER; u++) ADD_ROW(c, u);
        else
            for (long c = 0; c < count; c++)
                for (int u = 0; u < many; u++) ADD_ROW(c, u);
#undef ADD_ROW
        for (int u = 0; u < many; u++, x += LANES) STORE(out + x, MUL(t[u], ALL(by)));
    }
    for (; x < e; x++) {
        float t = 0.0f;
        for (long c = 0; c < count; c++) t += weights[c] * (half ? widened_one(half[c * e + x]) : values[c * e + x]);
        out[x] = t * by;
    }
}

/* Computes the softmax of the `count` scores of a row and the weighted sum of the values; `scores` has room for LANES
 * more numbers. */
static void weigh(const job *j, long z, long row, long count, float *scores) {
    long e = j->size;
    float *out = j->first + row * e, most = -INFINITY;
    for (long c = 0; c < count; c++) most = scores[c] > most ? scores[c] : most;
    /* The exponential of this padding is about 1e-38, which does not change a sum of at least 1. */
    for (int n = 0; n < LANES; n++) scores[count + n] = -INFINITY;
    vec total = ALL(0.0f);
    for (long c = 0; c < count; c += LANES) {
        vec p = exponential(ADD(LOAD(scores + c), ALL(-most)));
        STORE(scores + c, p);
        total = ADD(total, p);
    }
    float whole = sum(total), check = 0.0f, inverted;
    inverted = count > 0 ? 1.0f / whole : 0.0f;
    if (j->half_values)
        weighted_sum(0, j->half_values + z * j->n_columns * e, count, e, scores, inverted, out);
    else
        weighted_sum(j->values + z * j->n_columns * e, 0, count, e, scores, inverted, out);
    for (long x = 0; x < e; x++) check += out[x] * 0.0f;
    if (!(check == 0.0f) || !(whole < INFINITY)) *j->bad = 1;
    if (j->second) {
        float *weights = j->second + row * j->n_columns;
        for (long c = 0; c < j->n_columns; c++) weights[c] = c < count ? scores[c] * inverted : 0.0f;
    }
    j->totals[2 * row] = most;
    j->totals[2 * row + 1] = inverted;
}

/* Replaces the scores of a row (in `weights`) by the softmax weights p, and writes the gradients of the scores,
 * p (dp - delta), to `changes`. delta is computed as the sum of p dp, so that the gradient is exactly 0 in a row with a
 * single key. */
static void change(const job *j, long z, long row, long count, float *weights, float *changes) {
    long e = j->size, k = j->n_columns, whole_e = e / LANES * LANES, whole = count / LANES * LANES, c = 0;
    const float *values = j->values + z * k * e, *by = j->change + row * e;
    float delta, most = j->totals[2 * row], inverted = j->totals[2 * row + 1];
    vec total = ALL(0.0f);
    for (; c < count; c++) {
        vec t = ALL(0.0f);
        for (long x = 0; x < whole_e; x += LANES) t = FMA(LOAD(by + x), LOAD(values + c * e + x), t);
        float s = sum(t);
        for (long x = whole_e; x < e; x++) s += by[x] * values[c * e + x];
        changes[c] = j->fourth ? s + j->fourth[row * k + c] : s;
    }
    for (c = 0; c < whole; c += LANES) {
        vec p = MUL(exponential(ADD(LOAD(weights + c), ALL(-most))), ALL(inverted));
        STORE(weights + c, p);
        total = FMA(p, LOAD(changes + c), total);
    }
    delta = sum(total);
    for (; c < count; c++) {
        weights[c] = expf(weights[c] - most) * inverted;
        delta += weights[c] * changes[c];
    }
    for (c = 0; c < count; c++) changes[c] = weights[c] * (changes[c] - delta);
    for (; c < k; c++) weights[c] = changes[c] = 0.0f;
}

#define FAR_SCORE(whole, total) ((whole) - 2.0f * (total))
#define NEAR_SCORE(whole, total) (total)
SCORES(far_score_row, far_r, FAR_SCORE)
SCORES(near_score_row, near_tanh, NEAR_SCORE)
SCORES(plain_score_row, plain_tanh, NEAR_SCORE)

/* Defines a function that computes, for a block of features and a segment of the rows of a slice, first = sum over
 * columns of ds tanh' and second = sum over columns of ds tanh for each row, and fourth (segment, z, k, f) = sum over
 * rows of ds tanh' for each column. tanh of each pair and feature is computed once for these three sums.
 *
 * TERMS(a, b, ds, slope, plain, column) adds one pair to the sums. Several vectors of features are summed at once, so
 * that an addition need not wait for the previous one. The columns' features of the block and the sums are copied to
 * contiguous memory: if the length of a column is a multiple of 2 KiB, the cache lines of the block would otherwise
 * compete for a few sets of the processor's cache. */
#define WIDTH (TOGETHER * LANES)
#define SUMS(NAME, TERMS, SLOPE, PLAIN)                                                             \
    static void NAME(const void *given, long z, long unit) {                                        \
        const job *j = given;                                                                       \
        long f = j->features, k = j->n_columns, x = unit / j->segments * WIDTH;                     \
        long segment = unit % j->segments, share = (j->n_rows + j->segments - 1) / j->segments;     \
        long last = (segment + 1) * share < j->n_rows ? (segment + 1) * share : j->n_rows;          \
        float *column_sums = j->fourth + (segment * j->slices + z) * k * f;                         \
        long width = f - x < WIDTH ? f - x : WIDTH;                                                 \
        float *packed = calloc(2 * (size_t)k + 1, WIDTH * sizeof(float)), *sums = packed + k * WIDTH; \
        if (!packed) abort();                                                                       \
        for (long c = 0; c < k; c++)                                                                \
            for (long n = 0; n < width; n++) packed[c * WIDTH + n] = j->columns[(z * k + c) * f + x + n]; \
        for (long i = segment * share; i < last; i++) {                                             \
            long at = (z * j->n_rows + i) * f + x;                                                  \
            const float *ds = j->third + (z * j->n_rows + i) * k;                                   \
            vec left[TOGETHER], sloped[TOGETHER], direct[TOGETHER];                                 \
            float whole = 0.0f;                                                                     \
            for (long c = 0; c < k; c++) whole += ds[c];                                            \
            (void)whole;                                                                            \
            for (int u = 0; u < TOGETHER; u++) {                                                    \
                left[u] = u * LANES < width ? LOAD(j->rows + at + u * LANES) : ALL(0.0f);           \
                sloped[u] = direct[u] = ALL(0.0f);                                                  \
            }                                                                                       \
            for (long c = 0; c < k; c++) {                                                          \
                vec by = ALL(ds[c]);                                                                \
                const float *right = packed + c * WIDTH;                                            \
                float *column = sums + c * WIDTH;                                                   \
                for (int u = 0; u < TOGETHER; u++)                                                  \
                    TERMS(left[u], LOAD(right + u * LANES), by, sloped[u], direct[u], column + u * LANES) \
            }                                                                                       \
            for (int u = 0; u * LANES < width; u++) {                                               \
                STORE(j->first + at + u * LANES, SLOPE(sloped[u]));                                 \
                STORE(j->second + at + u * LANES, PLAIN(whole, direct[u]));                         \
            }                                                                                       \
        }                                                                                           \
        for (long c = 0; c < k; c++)                                                                \
            for (long n = 0; n < width; n += LANES)                                                 \
                STORE(column_sums + c * f + x + n, SLOPE(LOAD(sums + c * WIDTH + n)));              \
        free(packed);                                                                               \
    }

#define FAR_TERMS(a, b, ds, slope, plain, column)                                                   \
    {                                                                                               \
        vec r = far_r(a, b), weighted = MUL(ds, r), change = FNMA(weighted, r, weighted);           \
        plain = ADD(plain, weighted);                                                               \
        slope = ADD(slope, change);                                                                 \
        STORE(column, ADD(LOAD(column), change));                                                   \
    }
#define NEAR_TERMS(a, b, ds, slope, plain, column)                                                  \
    {                                                                                               \
        vec hidden = near_tanh(a, b), weighted = MUL(ds, hidden), change = FNMA(weighted, hidden, ds); \
        plain = ADD(plain, weighted);                                                               \
        slope = ADD(slope, change);                                                                 \
        STORE(column, ADD(LOAD(column), change));                                                   \
    }
#define PLAIN_TERMS(a, b, ds, slope, plain, column)                                                  \
    {                                                                                               \
        vec hidden = plain_tanh(a, b), weighted = MUL(ds, hidden), change = FNMA(weighted, hidden, ds); \
        plain = ADD(plain, weighted);                                                               \
        slope = ADD(slope, change);                                                                 \
        STORE(column, ADD(LOAD(column), change));                                                   \
    }
#define FAR_SLOPE(sum) MUL(ALL(4.0f), sum)
#define FAR_PLAIN(whole, sum) FNMA(ALL(2.0f), sum, ALL(whole))
#define NEAR_SLOPE(sum) (sum)
#define NEAR_PLAIN(whole, sum) (sum)
SUMS(far_sum_block, FAR_TERMS, FAR_SLOPE, FAR_PLAIN)
SUMS(near_sum_block, NEAR_TERMS, NEAR_SLOPE, NEAR_PLAIN)
SUMS(plain_sum_block, PLAIN_TERMS, NEAR_SLOPE, NEAR_PLAIN)

/* Computes the gradients of WIDTH numbers of each value of a slice: the sum over rows of weight times `change`. */
static void value_block(const job *j, long z, long unit) {
    long e = j->size, k = j->n_columns, x = unit * WIDTH, width = e - x < WIDTH ? e - x : WIDTH;
    float *sums = calloc((size_t)k, WIDTH * sizeof(float));
    if (!sums) abort();
    for (long i = 0; i < j->n_rows; i++) {
        const float *weights = j->result + (z * j->n_rows + i) * k;
        float row[WIDTH] = {0};
        vec by[TOGETHER];
        for (long n = 0; n < width; n++) row[n] = j->change[(z * j->n_rows + i) * e + x + n];
        for (int u = 0; u < TOGETHER; u++) by[u] = LOAD(row + u * LANES);
        long count = visible(j, z, i);
        for (long c = 0; c < count; c++) {
            vec p = ALL(weights[c]);
            float *to = sums + c * WIDTH;
            for (int u = 0; u < TOGETHER; u++) STORE(to + u * LANES, FMA(p, by[u], LOAD(to + u * LANES)));
        }
    }
    for (long c = 0; c < k; c++)
        for (long n = 0; n < width; n++) j->totals[(z * k + c) * e + x + n] = sums[c * WIDTH + n];
    free(sums);
}

static void far_gradients(const void *given, long z, long unit) {
    const job *j = given;
    if (unit < j->sum_units) far_sum_block(given, z, unit);
    else value_block(j, z, unit - j->sum_units);
}

static void near_gradients(const void *given, long z, long unit) {
    const job *j = given;
    if (unit < j->sum_units) near_sum_block(given, z, unit);
    else value_block(j, z, unit - j->sum_units);
}

static void plain_gradients(const void *given, long z, long unit) {
    const job *j = given;
    if (unit < j->sum_units) plain_sum_block(given, z, unit);
    else value_block(j, z, unit - j->sum_units);
}

#ifndef _OPENMP
static void *take_blocks(void *given) {
    job *j = given;
    long count = j->slices * j->units;
    for (;;) {
        long at = atomic_fetch_add(&j->next, j->block);
        if (at >= count) return 0;
        long stop = at + j->block < count ? at + j->block : count;
        for (; at < stop; at++) j->work(j, at / j->units, at % j->units);
    }
}
#endif

static void run(job *j, long threads) {
    long count = j->slices * j->units;
    /* A block of units takes about 0.1 ms; each thread has at least four blocks, if there are enough units. */
    long pairs = j->unit_pairs > 0 ? j->unit_pairs : 1;
    long most = count / (4 * threads) > 1 ? count / (4 * threads) : 1;
    j->block = (1 << 19) / pairs > 1 ? (1 << 19) / pairs : 1;
    if (j->block > most) j->block = most;
    if (threads > (count + j->block - 1) / j->block) threads = (count + j->block - 1) / j->block;
    if (threads == 1) {
        for (long at = 0; at < count; at++) j->work(j, at / j->units, at % j->units);
        return;
    }
#ifdef _OPENMP /* uses torch's threads, which spin after each of torch's loops: new threads would compete with them */
#pragma omp parallel for schedule(dynamic, j->block) num_threads(threads)
    for (long at = 0; at < count; at++) j->work(j, at / j->units, at % j->units);
#else
    enum { MOST = 256 };
    pthread_t others[MOST];
    long started = 0;
    atomic_init(&j->next, 0);
    if (threads > MOST) threads = MOST;
    while (started < threads - 1 && pthread_create(&others[started], 0, take_blocks, j) == 0) started++;
    take_blocks(j);
    while (started > 0) pthread_join(others[--started], 0);
#endif
}

#define SCORES_CALL(NAME, ROW)                                                                       \
    void NAME(const float *rows, const float *columns, const float *weight, float *scores, long slices, long n_rows, \
              long n_columns, long features, long threads) {                                         \
        job j = {rows, columns, weight, scores, 0, 0, slices, n_rows, n_columns, features, 1,        \
                 1, n_rows, n_columns * features, ROW, 0, .weight_rows = slices};                    \
        run(&j, threads);                                                                            \
    }
#define SUMS_CALL(NAME, BLOCK)                                                                       \
    void NAME(const float *rows, const float *columns, const float *ds, float *row_slope, float *row_plain, \
              float *column_slope, long slices, long n_rows, long n_columns, long features, long segments, \
              long threads) {                                                                        \
        job j = {rows, columns, ds, row_slope, row_plain, column_slope, slices, n_rows, n_columns, features, 1, \
                 segments, (features + WIDTH - 1) / WIDTH * segments, n_rows / segments * n_columns * WIDTH, \
                 BLOCK, 0};                                                                          \
        run(&j, threads);                                                                            \
    }

SCORES_CALL(regard_far_scores, far_score_row)
SCORES_CALL(regard_near_scores, near_score_row)
SUMS_CALL(regard_far_sums, far_sum_block)
SUMS_CALL(regard_near_sums, near_sum_block)

/* Returns the largest |x| of `count` numbers; NaN if one of them is NaN or inf. */
float regard_largest(const float *given, long count) {
    vec most = ALL(0.0f), bad = ALL(0.0f);
    long n = 0;
    for (; n + LANES <= count; n += LANES) {
        vec x = LOAD(given + n);
        most = MAX(most, MAX(x, MUL(x, ALL(-1.0f))));
        bad = FMA(x, ALL(0.0f), bad); /* NaN if x is NaN or inf */
    }
    float part[LANES], result = 0.0f, wrong = sum(bad);
    STORE(part, most);
    for (int u = 0; u < LANES; u++) result = part[u] > result ? part[u] : result;
    for (; n < count; n++) {
        result = fabsf(given[n]) > result ? fabsf(given[n]) : result;
        wrong += given[n] * 0.0f;
    }
    return wrong == 0.0f ? result : NAN;
}

/* Returns e^x for |x| < 700 in double precision, accurate to nine digits. */
static inline double precise_exponential(double x) {
    double n = rint(x * 1.4426950408889634), r = x - n * 0.6931471805599453, p = 1.0 / 40320;
    int64_t bits = ((int64_t)n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * power;
}

/* Writes e^{2x}, or with `near` e^{2x} - 1, of rows with `features` numbers to rows with `padded` numbers, which are
 * padded with zeros. */
void regard_exponentials(const float *given, float *target, long rows, long features, long padded, long near) {
    for (long i = 0; i < rows; i++) {
        const float *from = given + i * features;
        float *to = target + i * padded;
        if (near)
            for (long x = 0; x < features; x++) to[x] = expm1f(2.0f * from[x]);
        else
            for (long x = 0; x < features; x++) to[x] = (float)precise_exponential(2.0 * (double)from[x]);
        for (long x = features; x < padded; x++) to[x] = 0.0f;
    }
}

#define ATTEND_CALL(NAME, ROW)                                                                       \
    static int NAME##_attention(const float *rows, const float *columns, const float *weight, const void *values, \
                                  long half, const long *lengths, float *output, float *totals, float *weights, \
                                  long slices, long n_rows, long n_columns, long features, long size, long high, \
                                  long banded, long weight_rows, long threads) {                     \
        int bad = 0;                                                                                 \
        job j = {.rows = rows, .columns = columns, .third = weight, .first = output, .second = weights, .slices = slices, \
                 .n_rows = n_rows, .n_columns = n_columns, .features = features, .segments = 1, .units = n_rows, \
                 .unit_pairs = n_columns * (features + size / 4), .work = ROW##_attended, \
                 .values = half ? 0 : values, .half_values = half ? values : 0, \
                 .lengths = lengths, .totals = totals, .size = size, .high = high, .banded = banded, .bad = &bad, \
                 .weight_rows = weight_rows};                                                        \
        run(&j, threads);                                                                            \
        return bad;                                                                                  \
    }                                                                                                \
    static void NAME##_changes(const float *rows, const float *columns, const float *weight, const float *values, \
                                 const long *lengths, const float *change, float *dweights, float *totals, \
                                 float *changes, float *weights, long slices, long n_rows, long n_columns, \
                                 long features, long size, long high, long banded, long weight_rows, long threads) { \
        job j = {.rows = rows, .columns = columns, .third = weight, .first = changes, .second = weights, \
                 .fourth = dweights, .slices = slices, .n_rows = n_rows, .n_columns = n_columns,     \
                 .features = features, .segments = 1, .units = n_rows, .unit_pairs = n_columns * (features + size / 4), .work = ROW##_changed, \
                 .values = values, .change = change, .lengths = lengths, .totals = totals, \
                 .size = size, .high = high, .banded = banded, .weight_rows = weight_rows};          \
        run(&j, threads);                                                                            \
    }
ATTEND_CALL(far, far_score_row)
ATTEND_CALL(near, near_score_row)
ATTEND_CALL(plain, plain_score_row)

/* Defines a function that computes the gradients of rows (z, q, size_f), columns (z, k, size_f), weights (z, size_f)
 * and values (z, k, e), from the attention weights and the scores' gradients (`changes`) of all pairs. `slope`, `plain`
 * (z, q, f) and `parts` (segments, z, k, f) are working memory. */
#define GRADIENTS_CALL(NAME)                                                                         \
    static void NAME##_backward(                                                                  \
        const float *rows, const float *columns, const float *weight, const float *changes, const float *weights, \
        const float *change, const long *lengths, float *slope, float *plain, float *parts, float *drows, \
        float *dcolumns, float *dweight, float *dvalues, long slices, long n_rows, long n_columns, long features, \
        long size, long high, long banded, long weight_rows, long segments, long size_f, long threads) {               \
        long units = (features + WIDTH - 1) / WIDTH * segments;                                      \
        job j = {.rows = rows, .columns = columns, .third = changes, .first = slope, .second = plain, .fourth = parts, \
                 .slices = slices, .n_rows = n_rows, .n_columns = n_columns, .features = features,   \
                 .segments = segments, .units = units + (size + WIDTH - 1) / WIDTH,                  \
                 .unit_pairs = n_rows / segments * n_columns * WIDTH, .work = NAME##_gradients,      \
                 .change = change, .result = weights, .lengths = lengths, .totals = dvalues, .size = size, \
                 .high = high, .banded = banded, .sum_units = units};                                \
        run(&j, threads);                                                                            \
        for (long z = 0; z < slices; z++) {                                                          \
            const float *w = weight + z % weight_rows * features;                                                  \
            float *dw = dweight + z * size_f;                                                        \
            for (long x = 0; x < size_f; x++) dw[x] = 0.0f;                                          \
            for (long i = z * n_rows; i < (z + 1) * n_rows; i++)                                     \
                for (long x = 0; x < size_f; x++) {                                                  \
                    drows[i * size_f + x] = w[x] * slope[i * features + x];                          \
                    dw[x] += plain[i * features + x];                                                \
                }                                                                                    \
            for (long c = z * n_columns; c < (z + 1) * n_columns; c++)                               \
                for (long x = 0; x < size_f; x++) {                                                  \
                    float total = 0.0f;                                                              \
                    for (long s = 0; s < segments; s++)                                              \
                        total += parts[(s * slices * n_columns + c) * features + x];                 \
                    dcolumns[c * size_f + x] = w[x] * total;                                         \
                }                                                                                    \
        }                                                                                            \
    }
GRADIENTS_CALL(far)
GRADIENTS_CALL(near)
GRADIENTS_CALL(plain)

/* Rows, columns and weights prepared for the formula of a call and padded with zeros; the caller frees `memory`. */
typedef struct {
    const float *rows, *columns, *weight;
    float *memory;
    int near;
} prepared;

static const float *padded_rows(const float *given, long rows, long size, long padded, float *room) {
    if (size == padded) return given;
    for (long i = 0; i < rows; i++) {
        memcpy(room + i * padded, given + i * size, (size_t)size * sizeof(float));
        for (long x = size; x < padded; x++) room[i * padded + x] = 0.0f;
    }
    return room;
}

/* Prepares rows, columns and weights in `made`. Returns 0, and prepares nothing, if a number is not finite or, unless
 * `plain`, the absolute value of a query or key exceeds `reach`. */
static int prepare(const float *query, const float *key, const float *weight, long n_query, long n_key, long weight_rows,
                   long size, long padded, long plain, double reach, double near, prepared *made) {
    float of_query = regard_largest(query, n_query * size), of_key = regard_largest(key, n_key * size);
    made->memory = 0;
    if (!(regard_largest(weight, weight_rows * size) < INFINITY)) return 0;
    if (plain ? !(of_query < INFINITY && of_key < INFINITY) : !(of_query <= reach && of_key <= reach)) return 0;
    made->near = of_query + of_key <= near;
    made->memory = malloc((size_t)((n_query + n_key + weight_rows) * padded) * sizeof(float));
    if (!made->memory) abort();
    float *rows = made->memory, *columns = rows + n_query * padded;
    made->weight = padded_rows(weight, weight_rows, size, padded, columns + n_key * padded);
    if (plain) {
        made->rows = padded_rows(query, n_query, size, padded, rows);
        made->columns = padded_rows(key, n_key, size, padded, columns);
        return 1;
    }
    regard_exponentials(query, rows, n_query, size, padded, made->near);
    regard_exponentials(key, columns, n_key, size, padded, made->near);
    made->rows = rows;
    made->columns = columns;
    return 1;
}

/* Writes scores (z, q, k) for query (z, q, size), key (z, k, size) and weight (weight_rows, size). Returns 1 if a number
 * is too large or not finite, else 0. */
int regard_additive_scores(const float *query, const float *key, const float *weight, float *scores, long slices,
                           long n_rows, long n_columns, long size, long weight_rows, long plain, double reach,
                           double near, long threads) {
    prepared made;
    long padded = (size + LANES - 1) / LANES * LANES;
    if (!prepare(query, key, weight, slices * n_rows, slices * n_columns, weight_rows, size, padded, plain, reach, near,
                 &made))
        return 1;
    job j = {.rows = made.rows, .columns = made.columns, .third = made.weight, .first = scores, .slices = slices,
             .n_rows = n_rows, .n_columns = n_columns, .features = padded, .segments = 1, .units = n_rows,
             .unit_pairs = n_columns * padded, .weight_rows = weight_rows,
             .work = plain ? plain_score_row : made.near ? near_score_row : far_score_row};
    run(&j, threads);
    free(made.memory);
    return 0;
}

/* The forward pass: writes output (z, q, e), totals (z, q, 2) and, if requested, weights (z, q, k) for query
 * (z, q, size), key (z, k, size), value (z, k, e; in bfloat16 if `half`) and weight (weight_rows, size). Returns 1 if a number is too large or
 * not finite, or a length is out of range, else 0. */
int regard_additive_attention(const float *query, const float *key, const float *weight, const void *value,
                              const long *lengths, float *output, float *totals, float *weights, long slices,
                              long n_rows, long n_columns, long size, long value_size, long high, long banded,
                              long weight_rows, long plain, long half, double reach, double near, long threads) {
    prepared made;
    long padded = (size + LANES - 1) / LANES * LANES;
    for (long z = 0; lengths && z < slices; z++)
        if (lengths[z] < 0 || lengths[z] > n_columns) return 1;
    if (!prepare(query, key, weight, slices * n_rows, slices * n_columns, weight_rows, size, padded, plain, reach, near,
                 &made))
        return 1;
    int bad = (plain ? plain_attention : made.near ? near_attention : far_attention)(
        made.rows, made.columns, made.weight, value, half, lengths, output, totals, weights, slices, n_rows, n_columns,
        padded, value_size, high, banded, weight_rows, threads);
    free(made.memory);
    return bad;
}

/* The backward pass: writes the gradients of query, key, weight (`dweight`, (z, size)) and value from `change`, the
 * gradients of the output, and `dweights`, the gradients of the weights, or null. */
void regard_additive_gradients(const float *query, const float *key, const float *weight, const float *value,
                               const long *lengths, const float *change, float *dweights, float *totals,
                               float *dquery, float *dkey, float *dweight, float *dvalue, long slices, long n_rows,
                               long n_columns, long size, long value_size, long high, long banded, long weight_rows,
                               long plain, long segments, double reach, double near, long threads) {
    prepared made;
    long padded = (size + LANES - 1) / LANES * LANES, pairs = slices * n_rows * n_columns, rows = slices * n_rows * padded;
    if (!prepare(query, key, weight, slices * n_rows, slices * n_columns, weight_rows, size, padded, plain, reach, near,
                 &made))
        return; /* not reached: the forward pass returned 1 for the same inputs */
    float *room = malloc((size_t)(2 * pairs + 2 * rows + segments * slices * n_columns * padded) * sizeof(float));
    if (!room) abort();
    float *changes = room, *weights = changes + pairs, *slope = weights + pairs, *sums = slope + rows;
    (plain ? plain_changes : made.near ? near_changes : far_changes)(
        made.rows, made.columns, made.weight, value, lengths, change, dweights, totals, changes, weights, slices,
        n_rows, n_columns, padded, value_size, high, banded, weight_rows, threads);
    (plain ? plain_backward : made.near ? near_backward : far_backward)(
        made.rows, made.columns, made.weight, changes, weights, change, lengths, slope, sums, sums + rows, dquery, dkey,
        dweight, dvalue, slices, n_rows, n_columns, padded, value_size, high, banded, weight_rows, segments, size, threads);
    free(room);
    free(made.memory);
}
