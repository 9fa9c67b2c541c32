/* Local attention on a CPU, forward and backward, in one parallel region each. The text of `dot_attention.c` precedes
 * this one, for its products and conversions. Reference: the operations of `regard.core.local`.
 *
 * Queries are ordered by the first key of their window, so that the windows of a block of queries lie beside each other
 * and products of matrices compute its scores, its output and its gradients. Inputs are float32 or bfloat16, with any
 * strides of batch, heads and tokens; everything is computed in float32. A unit of work is a part of the ordered queries
 * of a head (backward: all of them). In blocks with a number that is not finite, sums go over the window of each query
 * alone, because a product of matrices would multiply that number by weights of 0 too.
 */

#define PART 64 /* the smallest number of queries in a part */

/* What calls with one signature have in common; Python fills an array of `long` in this order. */
typedef struct {
    long batch, heads, queries, keys, size, value_size, reach, half, gaussian;
    long query[3], key[3], value[3], centre[3]; /* strides of batch, head and token */
} local_shape;

typedef struct {
    const local_shape *s;
    const char *query, *key, *value, *change; /* outputs, `change` and gradients are contiguous */
    const float *centre;
    const long *lengths;
    char *output, *weights, *dquery, *dkey, *dvalue;
    float *dcentre, scale;
    long parts;
} local_call;

/* The keys lo <= j < hi of query `row`; the first returned weight belongs to position `first`. */
typedef struct { long row, first, lo, hi; float centre; } window;

static window window_of(const local_call *c, long b, long h, long i) {
    const local_shape *s = c->s;
    float centre = c->centre[b * s->centre[0] + h * s->centre[1] + i * s->centre[2]], reach = (float)s->reach;
    long limit = c->lengths ? least(c->lengths[b], s->keys) : s->keys;
    window found = {i, 0, 0, 0, centre};
    if (centre >= -reach && centre <= (float)s->keys + reach) { /* others have no keys, and may be too large for a long */
        found.first = (long)ceilf(centre - reach);
        found.lo = most_of(found.first, 0);
        found.hi = least(limit, (long)floorf(centre + reach) + 1);
    }
    if (found.lo >= found.hi) found.lo = found.hi = 0;
    return found;
}

/* The windows of a head's queries, ordered by their first key; those without keys come first. */
static void ordered(const local_call *c, long b, long h, window *windows) {
    long queries = c->s->queries, keys = c->s->keys;
    long *next = calloc((size_t)keys + 2, sizeof(long));
    if (!next) abort();
    for (long i = 0; i < queries; i++) {
        window w = window_of(c, b, h, i);
        next[w.lo == w.hi ? 1 : w.lo + 2]++;
    }
    for (long j = 1; j < keys + 2; j++) next[j] += next[j - 1];
    for (long i = 0; i < queries; i++) {
        window w = window_of(c, b, h, i);
        windows[next[w.lo == w.hi ? 0 : w.lo + 1]++] = w;
    }
    free(next);
}

/* The keys first <= j < last that some of `count` windows contain. */
static void range_of(const window *windows, long count, long *first, long *last) {
    *first = *last = 0;
    for (long x = 0; x < count; x++)
        if (windows[x].lo < windows[x].hi) {
            *first = *last == 0 ? windows[x].lo : least(*first, windows[x].lo);
            *last = most_of(*last, windows[x].hi);
        }
}

/* The number of queries of a block: their windows together are about twice as long as one. */
static long block_rows(const local_shape *s) {
    long rows = (2 * s->reach + 1) * s->queries / s->keys / 8 * 8;
    return rows < 8 ? 8 : least(rows, BLOCK);
}

static int all_finite(const float *numbers, long rows, long size, long stride) {
    vec check = ALL(0.0f);
    float rest = 0.0f;
    for (long i = 0; i < rows; i++, numbers += stride) {
        long x = 0;
        for (; x + LANES <= size; x += LANES) check = FMA(LOAD(numbers + x), ALL(0.0f), check);
        for (; x < size; x++) rest += numbers[x] * 0.0f;
    }
    return sum(check) + rest == 0.0f;
}

/* to = the sum of `count` rows, each times its weight. */
static void combine(const float *weights, const float *rows, long stride, long count, long width, float *to) {
    memset(to, 0, (size_t)width * sizeof(float));
    for (long x = 0; x < count; x++, rows += stride)
        for (long u = 0; u < width; u += LANES) STORE(to + u, FMA(ALL(weights[x]), LOAD(rows + u), LOAD(to + u)));
}

/* Each of `count` rows += its weight times the given row. */
static void spread(const float *weights, const float *row, long count, long width, float *rows) {
    for (long x = 0; x < count; x++, rows += width)
        for (long u = 0; u < width; u += LANES)
            STORE(rows + u, FMA(ALL(weights[x]), LOAD(row + u), LOAD(rows + u)));
}

static const float STEPS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* From the products of a query with the keys of its window to their softmax, padded with zeros to whole vectors. */
static void window_softmax(const float *products, float scale, long count, float *to) {
    vec check = ALL(0.0f), high = ALL(0.0f), total = ALL(0.0f), end = ALL((float)count), at = LOAD(STEPS);
    vec first = ALL(-products[0] * scale); /* relative to the first score, the padding is a score too */
    for (long x = 0; x < count; x += LANES, at = ADD(at, ALL((float)LANES))) {
        vec y = ABOVE(end, at, FMA(LOAD(products + x), ALL(scale), first));
        check = FMA(y, ALL(0.0f), check);
        high = MAX(high, y);
        STORE(to + x, y);
    }
    if (!(sum(check) == 0.0f)) { /* the maximum and the exponential of vectors would lose a NaN */
        float most = -INFINITY, added = 0.0f;
        for (long x = 0; x < count; x++) most = products[x] * scale > most ? products[x] * scale : most;
        for (long x = 0; x < count; x++) added += to[x] = expf(products[x] * scale - most);
        for (long x = 0; x < whole(count); x++) to[x] = x < count ? to[x] / added : 0.0f;
        return;
    }
    vec big = ALL(-largest(high));
    at = LOAD(STEPS);
    for (long x = 0; x < count; x += LANES, at = ADD(at, ALL((float)LANES))) {
        vec y = ADD(LOAD(to + x), big), p = ABOVE(end, at, ABOVE(y, ALL(LOWEST), exponential(y)));
        STORE(to + x, p);
        total = ADD(total, p);
    }
    vec by = ALL(1.0f / sum(total));
    for (long x = 0; x < count; x += LANES) STORE(to + x, MUL(LOAD(to + x), by));
}

/* The weights of keys from the x-th of a window on, and their distances from its centre; p is their softmax. */
static inline vec weighed(const local_call *c, const window *w, long x, vec p, vec *distance) {
    float reach = (float)c->s->reach;
    *distance = ADD(LOAD(STEPS), ALL((float)(w->lo + x) - w->centre));
    if (!c->s->gaussian) return p;
    return MUL(p, exponential(MUL(MUL(*distance, *distance), ALL(-2.0f / (reach * reach)))));
}

/* A row of a block with zeros outside of a window that begins at column `place`. */
static void clear(float *row, long place, long keys, long columns) {
    for (long x = 0; x < (keys ? place : columns); x++) row[x] = 0.0f;
    for (long x = place + keys; keys && x < columns; x++) row[x] = 0.0f;
}

static const char *token(const char *start, const long *strides, const local_shape *s, long b, long h, long i) {
    return start + (b * strides[0] + h * strides[1] + i * strides[2]) * (s->half ? 2 : 4);
}

/* Outputs and weights of a part of the queries of a head. */
static void local_forward(const call *given, long unit) {
    const local_call *c = (const local_call *)given;
    const local_shape *s = c->s;
    long part = unit % c->parts, z = unit / c->parts, b = z / s->heads, h = z % s->heads, half = s->half, first, last;
    long share = (s->queries + c->parts - 1) / c->parts, start = part * share, stop = least(start + share, s->queries);
    long size = s->size, e = s->value_size, out_wide = whole(e), span = 2 * s->reach + 1, room = whole(span);
    long bytes = half ? 2 : 4, step = block_rows(s);
    if (start >= stop) return;
    window *windows = malloc((size_t)s->queries * sizeof(window));
    if (!windows) abort();
    ordered(c, b, h, windows);
    range_of(windows + start, stop - start, &first, &last);
    /* Rows of scores have room for a vector that begins in the last column. */
    long n = last - first, width = whole(n) + LANES, value_row, key_row;
    float *memory = reserve((size_t)(n * (size + out_wide) + size * width + BLOCK * (width + size + out_wide) + room));
    float *key_copy = memory, *value_copy = key_copy + n * size, *kt = value_copy + n * out_wide;
    float *scores = kt + size * width, *q = scores + BLOCK * width, *out = q + BLOCK * size, *p = out + BLOCK * out_wide;
    const float *k = rows_of(token(c->key, s->key, s, b, h, first), s->key[2], half, n, size, size, key_copy, &key_row);
    const float *v = rows_of(token(c->value, s->value, s, b, h, first), s->value[2], half, n, e, out_wide, value_copy,
                             &value_row);
    transpose(k, key_row, n, size, kt, width);
    int clean = all_finite(v, n, e, value_row);
    for (long at = start; at < stop; at += step) {
        long rows = least(step, stop - at), from, to;
        range_of(windows + at, rows, &from, &to);
        long count = to - from, columns = whole(count), shift = count ? from - first : 0;
        for (long i = 0; i < rows; i++)
            load(token(c->query, s->query, s, b, h, windows[at + i].row), 0, half, 1, size, q + i * size, size);
        multiply(rows, columns, size, q, size, 1, kt + shift, width, scores, width, 0);
        for (long i = 0; i < rows; i++) {
            const window *w = windows + at + i;
            long keys = w->hi - w->lo, place = keys ? w->lo - from : 0;
            char *weights = c->weights + (z * s->queries + w->row) * span * bytes;
            float *row = scores + i * width + place;
            vec distance;
            if (keys < span) memset(weights, 0, (size_t)(span * bytes));
            if (keys > 0) window_softmax(row, c->scale, keys, p);
            for (long x = 0; x < keys; x += LANES) STORE(row + x, weighed(c, w, x, LOAD(p + x), &distance));
            if (keys > 0) save(row, keys, half, 1, keys, weights + (w->lo - w->first) * bytes, keys, 0);
            clear(scores + i * width, place, keys, columns);
            if (!clean) combine(row, v + (shift + place) * value_row, value_row, keys, out_wide, out + i * out_wide);
        }
        if (clean) multiply(rows, out_wide, count, scores, width, 1, v + shift * value_row, value_row, out, out_wide, 0);
        for (long i = 0; i < rows; i++)
            save(out + i * out_wide, e, half, 1, e, c->output + (z * s->queries + windows[at + i].row) * e * bytes, e, 0);
    }
    free(windows);
}

/* All gradients of a head. */
static void local_backward(const call *given, long z) {
    const local_call *c = (const local_call *)given;
    const local_shape *s = c->s;
    long b = z / s->heads, h = z % s->heads, half = s->half, size = s->size, e = s->value_size, first, last;
    long wide = whole(size), out_wide = whole(e), room = whole(2 * s->reach + 1), bytes = half ? 2 : 4, step = block_rows(s);
    window *windows = malloc((size_t)s->queries * sizeof(window));
    if (!windows) abort();
    ordered(c, b, h, windows);
    range_of(windows, s->queries, &first, &last);
    long n = last - first, width = whole(n) + LANES;
    float *memory = reserve((size_t)(n * (2 * wide + 2 * out_wide) + (size + e) * width
                                     + BLOCK * (2 * width + 2 * wide + out_wide) + room));
    float *key_copy = memory, *value_copy = key_copy + n * wide, *dk = value_copy + n * out_wide, *dv = dk + n * wide;
    float *kt = dv + n * out_wide, *vt = kt + size * width, *scores = vt + e * width, *dw = scores + BLOCK * width;
    float *q = dw + BLOCK * width, *dq = q + BLOCK * wide, *change = dq + BLOCK * wide, *p = change + BLOCK * out_wide;
    long key_row, value_row;
    const float *k = rows_of(token(c->key, s->key, s, b, h, first), s->key[2], half, n, size, wide, key_copy, &key_row);
    const float *v = rows_of(token(c->value, s->value, s, b, h, first), s->value[2], half, n, e, e, value_copy, &value_row);
    transpose(k, key_row, n, size, kt, width);
    transpose(v, value_row, n, e, vt, width);
    memset(dk, 0, (size_t)(n * (wide + out_wide)) * sizeof(float));
    int clean = all_finite(k, n, size, key_row);
    for (long at = 0; at < s->queries; at += step) {
        long rows = least(step, s->queries - at), from, to;
        range_of(windows + at, rows, &from, &to);
        long count = to - from, columns = whole(count), shift = count ? from - first : 0;
        for (long i = 0; i < rows; i++) {
            long row = windows[at + i].row;
            load(token(c->query, s->query, s, b, h, row), 0, half, 1, size, q + i * wide, wide);
            load(c->change + (z * s->queries + row) * e * bytes, 0, half, 1, e, change + i * out_wide, out_wide);
        }
        int simple = clean && all_finite(q, rows, size, wide) && all_finite(change, rows, e, out_wide);
        multiply(rows, columns, size, q, wide, 1, kt + shift, width, scores, width, 0);
        multiply(rows, columns, e, change, out_wide, 1, vt + shift, width, dw, width, 0);
        for (long i = 0; i < rows; i++) {
            const window *w = windows + at + i;
            long keys = w->hi - w->lo, place = keys ? w->lo - from : 0, j = shift + place;
            float *row = scores + i * width + place, *ds = dw + i * width + place;
            vec delta = ALL(0.0f), slope = ALL(0.0f), end = ALL((float)keys), step_at = LOAD(STEPS), distance;
            if (keys > 0) window_softmax(row, c->scale, keys, p);
            for (long x = 0; x < keys; x += LANES, step_at = ADD(step_at, ALL((float)LANES))) {
                vec weight = weighed(c, w, x, LOAD(p + x), &distance), both = ABOVE(end, step_at, MUL(weight, LOAD(ds + x)));
                STORE(row + x, weight);
                STORE(ds + x, both);
                delta = ADD(delta, both);
                slope = FMA(both, distance, slope);
            }
            vec all = ALL(sum(delta));
            for (long x = 0; x < keys; x += LANES)
                STORE(ds + x, MUL(FNMA(LOAD(p + x), all, LOAD(ds + x)), ALL(c->scale)));
            clear(scores + i * width, place, keys, columns);
            clear(dw + i * width, place, keys, columns);
            if (c->dcentre)
                c->dcentre[z * s->queries + w->row] = sum(slope) * 4.0f / ((float)s->reach * (float)s->reach);
            if (simple) continue;
            combine(ds, k + j * key_row, key_row, keys, wide, dq + i * wide);
            spread(ds, q + i * wide, keys, wide, dk + j * wide);
            spread(row, change + i * out_wide, keys, out_wide, dv + j * out_wide);
        }
        if (simple) {
            multiply(rows, wide, count, dw, width, 1, k + shift * key_row, key_row, dq, wide, 0);
            multiply(count, wide, rows, dw, 1, width, q, wide, dk + shift * wide, wide, 1);
            multiply(count, out_wide, rows, scores, 1, width, change, out_wide, dv + shift * out_wide, out_wide, 1);
        }
        for (long i = 0; i < rows; i++)
            save(dq + i * wide, size, half, 1, size, c->dquery + (z * s->queries + windows[at + i].row) * size * bytes, size, 0);
    }
    char *to_key = c->dkey + z * s->keys * size * bytes, *to_value = c->dvalue + z * s->keys * e * bytes;
    memset(to_key, 0, (size_t)(s->keys * size * bytes));
    memset(to_value, 0, (size_t)(s->keys * e * bytes));
    save(dk, wide, half, n, size, to_key + first * size * bytes, size, 0);
    save(dv, out_wide, half, n, e, to_value + first * e * bytes, e, 0);
    free(windows);
}

/* Returns 0, or 1 if a centre is not finite. */
int regard_local_attention(const local_shape *s, const void *query, const void *key, const void *value,
                           const float *centre, const long *lengths, void *output, void *weights, double scale,
                           long threads) {
    local_call c = {.s = s, .query = query, .key = key, .value = value, .centre = centre, .lengths = lengths,
                    .output = output, .weights = weights, .scale = (float)scale, .parts = 1};
    for (long b = 0; b < s->batch; b++)
        for (long h = 0; h < s->heads; h++)
            for (long i = 0; i < s->queries; i++) {
                float at = centre[b * s->centre[0] + h * s->centre[1] + i * s->centre[2]];
                if (!(at - at == 0.0f)) return 1;
            }
    /* Only the shape decides, so that the result does not depend on the number of threads. */
    while (s->batch * s->heads * c.parts < UNITS && c.parts * PART < s->queries) c.parts++;
    run((const call *)&c, s->batch * s->heads * c.parts, threads, local_forward);
    return 0;
}

void regard_local_gradients(const local_shape *s, const void *query, const void *key, const void *value,
                            const float *centre, const long *lengths, const void *change, void *dquery, void *dkey,
                            void *dvalue, float *dcentre, double scale, long threads) {
    local_call c = {.s = s, .query = query, .key = key, .value = value, .centre = centre, .lengths = lengths,
                    .change = change, .dquery = dquery, .dkey = dkey, .dvalue = dvalue, .dcentre = dcentre,
                    .scale = (float)scale, .parts = 1};
    run((const call *)&c, s->batch * s->heads, threads, local_backward);
}
