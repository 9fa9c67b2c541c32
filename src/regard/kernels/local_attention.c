/* Local attention on a CPU; the forward and the backward pass are one parallel region each.
 * Reference implementation: the operations of `regard.core.local`.
 *
 * Only the keys and values in a query's window are read, so the other keys and values have no effect, even if they are
 * NaN. Inputs are float32 or bfloat16, with any strides of batch, heads and tokens; everything is computed in float32.
 * A unit of work is a part of the queries of one head (in the backward pass: all queries of one head). For each unit
 * the keys and values are copied once, as rows padded to whole SIMD vectors, unless they have this form already.
 */

#define UNITS 8       /* with fewer units of work than this, the queries of each head are divided into parts */
#define PART 64       /* n queries of a head are divided into at most n / PART parts, rounded up */
#define LOWEST -86.0f /* the exponential of a number <= LOWEST is set to 0 */

/* Shape, strides and options of a call; Python fills an array of `long` in this order. `half` is 1 for bfloat16. */
typedef struct {
    long batch, heads, queries, keys, size, value_size, reach, half, gaussian;
    long query[3], key[3], value[3], centre[3]; /* the strides of batch, head and token of each input */
} shape;

typedef struct {
    const shape *s;
    const char *query, *key, *value, *change; /* `change`, the upstream gradient, the outputs and gradients are dense */
    const float *centre;
    const long *lengths;
    char *output, *weights, *dquery, *dkey, *dvalue;
    float *dcentre, scale;
    long parts;
} call;

/* The window of a query: it attends to the keys lo <= j < hi. The query's first weight belongs to position `first`,
 * which is negative if the window begins before the first key. */
typedef struct { long first, lo, hi; float centre; } window;

static inline long whole(long n) { return (n + LANES - 1) / LANES * LANES; }
static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most_of(long a, long b) { return a > b ? a : b; }
static inline long bytes(const shape *s) { return s->half ? 2 : 4; }

/* Copies `size` numbers to `to` as float32, multiplied by `by` and padded with zeros to `width` numbers. */
static void load(const char *from, long half, long size, float by, float *to, long width) {
    if (half)
        for (long x = 0; x < size; x++) {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[x] << 16;
            float number;
            memcpy(&number, &bits, sizeof number);
            to[x] = number * by;
        }
    else
        for (long x = 0; x < size; x++) to[x] = ((const float *)from)[x] * by;
    for (long x = size; x < width; x++) to[x] = 0.0f;
}

/* Writes `size` numbers, multiplied by `by`, as bfloat16 (rounded to nearest, ties to even) or float32. */
static void save(const float *from, long half, long size, float by, char *to) {
    for (long x = 0; x < size; x++) {
        float number = from[x] * by;
        if (half) {
            uint32_t bits;
            memcpy(&bits, &number, sizeof bits);
            ((uint16_t *)to)[x] = number != number ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        } else
            ((float *)to)[x] = number;
    }
}

static window window_of(const call *c, long b, long h, long i) {
    const shape *s = c->s;
    float centre = c->centre[b * s->centre[0] + h * s->centre[1] + i * s->centre[2]], reach = (float)s->reach;
    long limit = c->lengths ? least(c->lengths[b], s->keys) : s->keys;
    window found = {0, 0, 0, centre};
    /* If the centre is outside this range, the window has no keys, and the conversion of its bounds to long could
     * overflow. */
    if (centre >= -reach && centre <= (float)s->keys + reach) {
        found.first = (long)ceilf(centre - reach);
        found.lo = most_of(found.first, 0);
        found.hi = least(limit, (long)floorf(centre + reach) + 1);
    }
    if (found.lo >= found.hi) found.lo = found.hi = 0;
    return found;
}

/* Writes the dot products of `row` with `count` rows of `width` numbers, padded with zeros to whole vectors. */
static void products(const float *row, const float *rows, long count, long width, float *to) {
    long x = 0;
    for (; x + 4 <= count; x += 4, rows += 4 * width) {
        vec t[4] = {ALL(0.0f), ALL(0.0f), ALL(0.0f), ALL(0.0f)};
        for (long u = 0; u < width; u += LANES)
            for (int m = 0; m < 4; m++) t[m] = FMA(LOAD(row + u), LOAD(rows + m * width + u), t[m]);
        for (int m = 0; m < 4; m++) to[x + m] = sum(t[m]);
    }
    for (; x < count; x++, rows += width) {
        vec t = ALL(0.0f);
        for (long u = 0; u < width; u += LANES) t = FMA(LOAD(row + u), LOAD(rows + u), t);
        to[x] = sum(t);
    }
    for (; x < whole(count); x++) to[x] = 0.0f;
}

/* Writes to `to` the sum of `count` rows, each multiplied by its weight. */
static void combine(const float *weights, const float *rows, long count, long width, float *to) {
    long u = 0;
    for (; u + 4 * LANES <= width; u += 4 * LANES) {
        vec t[4] = {ALL(0.0f), ALL(0.0f), ALL(0.0f), ALL(0.0f)};
        for (long x = 0; x < count; x++)
            for (int m = 0; m < 4; m++) t[m] = FMA(ALL(weights[x]), LOAD(rows + x * width + u + m * LANES), t[m]);
        for (int m = 0; m < 4; m++) STORE(to + u + m * LANES, t[m]);
    }
    for (; u < width; u += LANES) {
        vec t = ALL(0.0f);
        for (long x = 0; x < count; x++) t = FMA(ALL(weights[x]), LOAD(rows + x * width + u), t);
        STORE(to + u, t);
    }
}

/* Adds weights[x] * row to the x-th of `count` rows. */
static void spread(const float *weights, const float *row, long count, long width, float *rows) {
    for (long x = 0; x < count; x++, rows += width) {
        vec weight = ALL(weights[x]);
        for (long u = 0; u < width; u += LANES) STORE(rows + u, FMA(weight, LOAD(row + u), LOAD(rows + u)));
    }
}

static const float STEPS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Replaces `count` scores by their softmax; the padding to whole vectors is zeros before and after. */
static void softmax(float *scores, long count) {
    vec check = ALL(0.0f), high = ALL(0.0f), total = ALL(0.0f), end = ALL((float)count), at = LOAD(STEPS);
    vec first = ALL(-scores[0]); /* subtracting the first score makes 0 a valid score, so padding with 0 is harmless */
    for (long x = 0; x < count; x += LANES, at = ADD(at, ALL((float)LANES))) {
        vec y = ABOVE(end, at, ADD(LOAD(scores + x), first));
        check = FMA(y, ALL(0.0f), check);
        high = MAX(high, y);
    }
    if (ANY_NAN(check)) { /* a score is not finite: MAX and exponential() of vectors would lose a NaN */
        float most = -INFINITY, added = 0.0f;
        for (long x = 0; x < count; x++) most = scores[x] > most ? scores[x] : most;
        for (long x = 0; x < count; x++) added += scores[x] = expf(scores[x] - most);
        for (long x = 0; x < count; x++) scores[x] /= added;
        return;
    }
    vec big = ALL(-largest(high));
    at = LOAD(STEPS);
    for (long x = 0; x < count; x += LANES, at = ADD(at, ALL((float)LANES))) {
        vec y = ADD(ADD(LOAD(scores + x), first), big), p = ABOVE(end, at, ABOVE(y, ALL(LOWEST), exponential(y)));
        STORE(scores + x, p);
        total = ADD(total, p);
    }
    vec by = ALL(1.0f / sum(total));
    for (long x = 0; x < count; x += LANES) STORE(scores + x, MUL(LOAD(scores + x), by));
}

/* Returns the weights of the vector of keys that begins at the x-th key of a window, from their softmax weights p, and
 * writes their distances from the window's centre. If `gaussian`, p is multiplied by exp(-2 distance^2 / reach^2). */
static inline vec weighed(const call *c, const window *w, long x, vec p, vec *distance) {
    float reach = (float)c->s->reach;
    *distance = ADD(LOAD(STEPS), ALL((float)(w->lo + x) - w->centre));
    if (!c->s->gaussian) return p;
    return MUL(p, exponential(MUL(MUL(*distance, *distance), ALL(-2.0f / (reach * reach)))));
}

/* Copies the keys or values first <= j < last of a head to float32 rows padded to whole vectors. */
static void copy(const char *from, const long *strides, const shape *s, long b, long h, long first, long last, long size,
                 float *to) {
    for (long j = first; j < last; j++, to += whole(size))
        load(from + (b * strides[0] + h * strides[1] + j * strides[2]) * bytes(s), s->half, size, 1.0f, to, whole(size));
}

/* Returns the keys or values first <= j < last of a head as float32 rows that are padded to whole vectors: those of the
 * call if they have this form, and else a copy at `room`. */
static const float *rows_of(const char *from, const long *strides, const shape *s, long b, long h, long first,
                            long last, long size, float *room) {
    if (!s->half && size == whole(size) && strides[2] == size)
        return (const float *)from + b * strides[0] + h * strides[1] + first * size;
    copy(from, strides, s, b, h, first, last, size, room);
    return room;
}

/* Writes the smallest range of keys that contains the windows of all queries start <= i < stop. */
static void range_of(const call *c, long b, long h, long start, long stop, long *first, long *last) {
    *first = c->s->keys;
    *last = 0;
    for (long i = start; i < stop; i++) {
        window w = window_of(c, b, h, i);
        if (w.lo == w.hi) continue;
        *first = least(*first, w.lo);
        *last = most_of(*last, w.hi);
    }
    if (*last == 0) *first = 0;
}

static float *reserve(long count) {
    float *found = malloc((size_t)count * sizeof(float));
    if (!found) abort();
    return found;
}

/* Computes outputs and weights of one part of the queries of a head. */
static void forward_unit(const call *c, long unit) {
    const shape *s = c->s;
    long part = unit % c->parts, z = unit / c->parts, b = z / s->heads, h = z % s->heads, first, last;
    long share = (s->queries + c->parts - 1) / c->parts, start = part * share, stop = least(start + share, s->queries);
    long wide = whole(s->size), out_wide = whole(s->value_size), span = 2 * s->reach + 1, room = whole(span);
    if (start >= stop) return;
    range_of(c, b, h, start, stop, &first, &last);
    float *memory = reserve((last - first) * (wide + out_wide) + room + wide + out_wide);
    float *values = memory + (last - first) * wide, *scores = values + (last - first) * out_wide, *q = scores + room;
    float *out = q + wide;
    const float *k = rows_of(c->key, s->key, s, b, h, first, last, s->size, memory);
    const float *v = rows_of(c->value, s->value, s, b, h, first, last, s->value_size, values);
    for (long i = start; i < stop; i++) {
        window w = window_of(c, b, h, i);
        long count = w.hi - w.lo, row = z * s->queries + i, zero = w.lo - w.first;
        char *weights = c->weights + row * span * bytes(s);
        if (count < span) memset(weights, 0, (size_t)(span * bytes(s)));
        vec distance;
        load(c->query + (b * s->query[0] + h * s->query[1] + i * s->query[2]) * bytes(s), s->half, s->size, c->scale, q,
             wide);
        if (count > 0) {
            products(q, k + (w.lo - first) * wide, count, wide, scores);
            softmax(scores, count);
            for (long x = 0; x < count; x += LANES) STORE(scores + x, weighed(c, &w, x, LOAD(scores + x), &distance));
            save(scores, s->half, count, 1.0f, weights + zero * bytes(s));
        }
        combine(scores, v + (w.lo - first) * out_wide, count, out_wide, out);
        save(out, s->half, s->value_size, 1.0f, c->output + row * s->value_size * bytes(s));
    }
    free(memory);
}

/* Computes the gradients of one head with respect to its queries, keys, values and centres. */
static void backward_unit(const call *c, long z) {
    const shape *s = c->s;
    long b = z / s->heads, h = z % s->heads, wide = whole(s->size), out_wide = whole(s->value_size), first, last;
    long room = whole(2 * s->reach + 1), e = s->value_size;
    range_of(c, b, h, 0, s->queries, &first, &last);
    long n = last - first;
    float *memory = reserve(2 * n * (wide + out_wide) + 3 * room + 2 * wide + out_wide);
    float *values = memory + n * wide, *dk = values + n * out_wide, *dv = dk + n * wide, *p = dv + n * out_wide;
    float *dw = p + room, *weights = dw + room, *q = weights + room;
    float *dq = q + wide, *change = dq + wide;
    const float *k = rows_of(c->key, s->key, s, b, h, first, last, s->size, memory);
    const float *v = rows_of(c->value, s->value, s, b, h, first, last, e, values);
    memset(dk, 0, (size_t)(n * (wide + out_wide)) * sizeof(float));
    for (long i = 0; i < s->queries; i++) {
        window w = window_of(c, b, h, i);
        long count = w.hi - w.lo, row = z * s->queries + i;
        vec delta = ALL(0.0f), slope = ALL(0.0f);
        if (count > 0) {
            load(c->query + (b * s->query[0] + h * s->query[1] + i * s->query[2]) * bytes(s), s->half, s->size, c->scale,
                 q, wide);
            load(c->change + row * e * bytes(s), s->half, e, 1.0f, change, out_wide);
            products(q, k + (w.lo - first) * wide, count, wide, p);
            softmax(p, count);
            products(change, v + (w.lo - first) * out_wide, count, out_wide, dw);
            for (long x = 0; x < count; x += LANES) {
                vec distance, weight = weighed(c, &w, x, LOAD(p + x), &distance), part = MUL(weight, LOAD(dw + x));
                STORE(weights + x, weight);
                STORE(dw + x, part);
                delta = ADD(delta, part);
                slope = FMA(part, distance, slope);
            }
            vec all = ALL(sum(delta));
            for (long x = 0; x < count; x += LANES) STORE(dw + x, FNMA(LOAD(p + x), all, LOAD(dw + x)));
            spread(dw, q, count, wide, dk + (w.lo - first) * wide);
            spread(weights, change, count, out_wide, dv + (w.lo - first) * out_wide);
        }
        combine(dw, k + (w.lo - first) * wide, count, wide, dq);
        save(dq, s->half, s->size, c->scale, c->dquery + row * s->size * bytes(s));
        if (c->dcentre) c->dcentre[row] = sum(slope) * 4.0f / ((float)s->reach * (float)s->reach);
    }
    char *to_key = c->dkey + z * s->keys * s->size * bytes(s), *to_value = c->dvalue + z * s->keys * e * bytes(s);
    memset(to_key, 0, (size_t)(s->keys * s->size * bytes(s)));
    memset(to_value, 0, (size_t)(s->keys * e * bytes(s)));
    for (long j = 0; j < n; j++) {
        save(dk + j * wide, s->half, s->size, 1.0f, to_key + (first + j) * s->size * bytes(s));
        save(dv + j * out_wide, s->half, e, 1.0f, to_value + (first + j) * e * bytes(s));
    }
    free(memory);
}

static void run(const call *c, long units, long threads, void (*work)(const call *, long)) {
    if (threads > units) threads = units;
#ifdef _OPENMP
    if (threads > 1) {
        region regions[threads];
        divide(regions, threads, units);
#pragma omp parallel num_threads(threads)
        {
            long first, stop;
            while (take(regions, threads, omp_get_thread_num(), 1, &first, &stop)) work(c, first);
        }
        return;
    }
#endif
    for (long unit = 0; unit < units; unit++) work(c, unit);
}

/* The forward pass. Returns 0, or 1 if a centre is not finite; then nothing is computed. */
int regard_local_attention(const shape *s, const void *query, const void *key, const void *value, const float *centre,
                           const long *lengths, void *output, void *weights, double scale, long threads) {
    call c = {.s = s, .query = query, .key = key, .value = value, .centre = centre, .lengths = lengths, .output = output,
              .weights = weights, .scale = (float)scale, .parts = 1};
    for (long b = 0; b < s->batch; b++)
        for (long h = 0; h < s->heads; h++)
            for (long i = 0; i < s->queries; i++) {
                float at = centre[b * s->centre[0] + h * s->centre[1] + i * s->centre[2]];
                if (!(at - at == 0.0f)) return 1;
            }
    /* The number of parts depends only on the shape, so that results do not depend on the number of threads. */
    while (s->batch * s->heads * c.parts < UNITS && c.parts * PART < s->queries) c.parts++;
    run(&c, s->batch * s->heads * c.parts, threads, forward_unit);
    return 0;
}

void regard_local_gradients(const shape *s, const void *query, const void *key, const void *value, const float *centre,
                            const long *lengths, const void *change, void *dquery, void *dkey, void *dvalue,
                            float *dcentre, double scale, long threads) {
    call c = {.s = s, .query = query, .key = key, .value = value, .centre = centre, .lengths = lengths, .change = change,
              .dquery = dquery, .dkey = dkey, .dvalue = dvalue, .dcentre = dcentre, .scale = (float)scale, .parts = 1};
    run(&c, s->batch * s->heads, threads, backward_unit);
}
