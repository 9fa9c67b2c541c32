/* Linear attention with elu or Performer features on a CPU; forward and backward pass are one parallel region each. This
 * text is compiled after that of dot_attention.c, whose functions it uses (multiply, load, save, transpose).
 * Reference implementation: `regard.core.linear`.
 *
 * With S = sum of phi(k_j) v_j^T and z = sum of phi(k_j) the output is phi(q_i) S / phi(q_i) z. A unit of work is a head
 * of one sequence. If positions are divided into chunks, every pair of a query and a key of the same chunk is computed,
 * and S and z sum over the keys of earlier chunks. Rows of causal attention do not depend on later positions, to the last
 * bit. Everything is computed in float32.
 */

/* No product overflows or underflows if absolute values are less than VALUE and divisors between LEAST and MOST. */
#define VALUE 1e12f
#define LEAST 1e-25f
#define MOST 1e25f
#define EXPONENT 80.0f /* the largest absolute exponent of Performer features */

/* Shape and strides of a call; Python fills an array of `long` in this order. `half` is 1 for bfloat16. */
typedef struct {
    long batch, heads, queries, keys, size, value_size, half, causal;
    long chunk; /* if causal, the number of positions in a chunk; else 1 if all pairs of queries and keys are computed,
                 * and 0 if S sums over all keys */
    long query[3], key[3], value[3]; /* strides of batch, head and token */
    long features, row, column;      /* the number of features, and the row strides of `rows` and `columns` below */
} linear_shape;

typedef struct {
    const linear_shape *s;
    /* `output` and its gradient `change` are (batch, heads, queries, value_size), contiguous. */
    const char *query, *key, *value, *output, *change;
    char *result, *dquery, *dkey, *dvalue;             /* contiguous output and gradients */
    float *divisor;                                    /* phi(q_i) z of each query, (batch, heads, queries) */
    /* Performer's directions divided by size^(1/4), one direction in each row or column; null for elu features. */
    const float *rows, *columns;
    int *bad;
} linear_call;

/* The tensors of the head that a unit computes, their sizes, and working memory. */
typedef struct {
    const char *query, *key, *value, *output, *change;
    long z, size, e, wide, out, half, item;
    float *x; /* working memory for two blocks of vectors */
} head;

static head head_of(const linear_call *c, long z) {
    const linear_shape *s = c->s;
    long b = z / s->heads, h = z % s->heads, item = s->half ? 2 : 4, rows = z * s->queries * s->value_size * item;
    return (head){slice(c->query, s->query, s->half, b, h), slice(c->key, s->key, s->half, b, h),
                  slice(c->value, s->value, s->half, b, h), c->output ? c->output + rows : 0,
                  c->change ? c->change + rows : 0, z, s->size, s->value_size, whole(s->features),
                  whole(s->value_size), s->half, item, 0};
}

static float dot(const float *a, const float *b, long width) {
    vec t = ALL(0.0f);
    for (long x = 0; x < width; x += LANES) t = FMA(LOAD(a + x), LOAD(b + x), t);
    return sum(t);
}

/* Replaces x by elu(x) + 1. Returns whether all numbers were finite. */
static int elu_features(long rows, long count, long width, float *to) {
    vec check = ALL(0.0f);
    for (long i = 0; i < rows; i++, to += width) {
        for (long x = 0; x < width; x += LANES) {
            vec y = LOAD(to + x), high = MAX(y, ALL(0.0f));
            check = FMA(y, ALL(0.0f), check);
            STORE(to + x, ADD(exponential(MIN(y, ALL(0.0f))), high));
        }
        for (long x = count; x < width; x++) to[x] = 0.0f;
    }
    return !ANY_NAN(check);
}

/* Writes the features exp(w x - |x|^2 / (2 sqrt(size))) / sqrt(number of features); a feature is NaN if the absolute value
 * of its exponent exceeds EXPONENT. Returns whether none is. */
static int performer_features(const linear_call *c, const float *from, long rows, long width, float *to) {
    const linear_shape *s = c->s;
    long inner = whole(s->size);
    vec check = ALL(0.0f);
    multiply(rows, width, s->size, from, inner, 1, c->columns, s->column, 0, to, width, 0);
    for (long i = 0; i < rows; i++, to += width) {
        float length = 0.5f * dot(from + i * inner, from + i * inner, inner) / sqrtf((float)s->size);
        vec shift = ALL(-length - 0.5f * logf((float)s->features));
        for (long x = 0; x < width; x += LANES) {
            vec y = ADD(LOAD(to + x), shift);
            vec outside = ADD(ABOVE(y, ALL(EXPONENT), ALL(NAN)), ABOVE(ALL(-EXPONENT), y, ALL(NAN)));
            check = FMA(y, ALL(0.0f), ADD(check, outside));
            STORE(to + x, ADD(exponential(y), outside));
        }
        for (long x = s->features; x < width; x++) to[x] = 0.0f;
    }
    return !ANY_NAN(check);
}

/* Writes the features of rows as float32, padded with zeros. Returns whether all features were within the bounds. */
static int features_of(const linear_call *c, const head *a, const char *from, long stride, long rows, float *to) {
    int fine = 1;
    if (!c->rows) {
        load(from, stride, a->half, rows, a->size, to, a->wide);
        return elu_features(rows, a->size, a->wide, to);
    }
    for (long row = 0; row < rows; row += BLOCK) {
        long n = least(BLOCK, rows - row);
        load(from + row * stride * a->item, stride, a->half, n, a->size, a->x, whole(a->size));
        fine &= performer_features(c, a->x, n, a->wide, to + row * a->wide);
    }
    return fine;
}

/* Copies values as float32, padded with zeros. Returns whether all are finite and their absolute values below VALUE. */
static int values_of(const char *from, long stride, long half, long rows, long size, long width, float *to) {
    vec big = ALL(0.0f), check = ALL(0.0f);
    load(from, stride, half, rows, size, to, width);
    for (long x = 0; x < rows * width; x += LANES) {
        vec y = LOAD(to + x);
        check = FMA(y, ALL(0.0f), check);
        big = MAX(big, MAX(y, MUL(y, ALL(-1.0f))));
    }
    return !ANY_NAN(check) && largest(big) < VALUE;
}

/* Adds to `to` the sum of `rows` rows, row i multiplied by by[i], if `by` is given. */
static void add_rows(const float *from, long width, long rows, const float *by, float *to) {
    for (long i = 0; i < rows; i++)
        for (long x = 0; x < width; x += LANES)
            STORE(to + x, FMA(LOAD(from + i * width + x), ALL(by ? by[i] : 1.0f), LOAD(to + x)));
}

/* Sets the pairs of queries with later keys to 0, in the rows from `row` on of a chunk and in `columns` columns. */
static void triangle(float *pairs, long width, long row, long rows, long columns) {
    for (long i = 0; i < rows; i++)
        for (long x = row + i + 1; x < columns; x++) pairs[i * width + x] = 0.0f;
}

static void linear_forward(const linear_call *c, long z) {
    const linear_shape *s = c->s;
    head a = head_of(c, z);
    long pairs = s->chunk > 0, step = pairs ? (s->causal ? s->chunk : s->keys) : BLOCK, most = least(step, s->keys);
    long width = whole(most), fine = 1, d = s->features;
    float *memory = reserve((size_t)(d * a.out + a.wide + most * (a.wide + a.out) + d * panels(most)
                                     + BLOCK * (width + a.wide + a.out + whole(a.size)) + 4 * LANES));
    float *S = memory, *ones = S + d * a.out, *k = ones + a.wide, *v = k + most * a.wide, *kt = v + most * a.out;
    float *p = kt + d * panels(most), *q = p + BLOCK * width, *out = q + BLOCK * a.wide;
    a.x = out + BLOCK * a.out;
    float by[BLOCK];
    memset(S, 0, (size_t)(d * a.out + a.wide) * sizeof(float));
    for (long first = 0, stop; first < s->queries; first = stop) {
        /* Loads the keys of the chunk. If there are no chunks, adds all keys to S and z before the first row is
         * computed. */
        for (long key = pairs && s->causal ? first : 0; key < s->keys && (first == 0 || pairs); key += step) {
            long rows = least(step, s->keys - key);
            fine &= features_of(c, &a, a.key + key * s->key[2] * a.item, s->key[2], rows, k);
            fine &= values_of(a.value + key * s->value[2] * a.item, s->value[2], a.half, rows, a.e, a.out, v);
            if (pairs) break;
            multiply(d, a.out, rows, k, 1, a.wide, v, a.out, 0, S, a.out, 1);
            add_rows(k, a.wide, rows, 0, ones);
        }
        stop = pairs && s->causal ? least(first + step, s->queries) : s->queries;
        long n = pairs ? least(step, s->keys - (s->causal ? first : 0)) : 0;
        if (pairs) transpose(k, a.wide, n, d, kt);
        for (long row = first; row < stop; row += BLOCK) {
            long rows = least(BLOCK, stop - row), seen = s->causal ? least(n, row - first + rows) : n;
            fine &= features_of(c, &a, a.query + row * s->query[2] * a.item, s->query[2], rows, q);
            for (long i = 0; i < rows; i++) by[i] = dot(q + i * a.wide, ones, a.wide);
            if (pairs) {
                multiply(rows, whole(seen), d, q, a.wide, 1, kt, PANEL, d * PANEL, p, width, 0);
                if (s->causal) triangle(p, width, row - first, rows, whole(seen));
                for (long i = 0; i < rows; i++) {
                    vec t = ALL(0.0f);
                    for (long x = 0; x < whole(seen); x += LANES) t = ADD(t, LOAD(p + i * width + x));
                    by[i] += sum(t);
                }
                multiply(rows, a.out, seen, p, width, 1, v, a.out, 0, out, a.out, 0);
            }
            if (!pairs || (s->causal && first > 0))
                multiply(rows, a.out, d, q, a.wide, 1, S, a.out, 0, out, a.out, pairs > 0);
            for (long i = 0; i < rows; i++) {
                c->divisor[z * s->queries + row + i] = by[i];
                fine &= by[i] > LEAST && by[i] < MOST;
                by[i] = 1.0f / by[i];
            }
            save(out, a.out, a.half, rows, a.e, c->result + (z * s->queries + row) * a.e * a.item, a.e, by);
        }
        if (pairs && s->causal && stop < s->queries) {
            multiply(d, a.out, n, k, 1, a.wide, v, a.out, 0, S, a.out, 1);
            add_rows(k, a.wide, n, 0, ones);
        }
    }
    if (!fine) *c->bad = 1;
}

/* Writes for each row `above`, the gradient of the output divided by the divisor, and `delta`, its dot product with the
 * output. */
static void prepare_rows(const linear_call *c, const head *a, long row, long rows, float *above, float *delta, float *room) {
    long at = row * a->e * a->item;
    load(a->change + at, a->e, a->half, rows, a->e, above, a->out);
    load(a->output + at, a->e, a->half, rows, a->e, room, a->out);
    for (long i = 0; i < rows; i++) {
        float by = 1.0f / c->divisor[a->z * c->s->queries + row + i];
        for (long x = 0; x < a->out; x += LANES) STORE(above + i * a->out + x, MUL(LOAD(above + i * a->out + x), ALL(by)));
        delta[i] = dot(above + i * a->out, room + i * a->out, a->out);
    }
}

/* Computes the gradients of the vectors in the rows `from` from `grad`, the gradients of their features `mapped`, and
 * writes them to `to`. */
static void save_gradient(const linear_call *c, const head *a, const char *from, long stride, long rows,
                          const float *mapped, float *grad, char *to) {
    long width = a->wide, inner = whole(a->size), performer = c->rows != 0;
    for (long x = 0; x < rows * width; x += LANES) {
        vec y = LOAD(mapped + x);
        STORE(grad + x, MUL(LOAD(grad + x), performer ? y : MIN(y, ALL(1.0f))));
    }
    if (!performer) save(grad, width, a->half, rows, a->size, to, a->size, 0);
    for (long row = 0; row < rows && performer; row += BLOCK, grad += BLOCK * width) {
        long n = least(BLOCK, rows - row);
        float *x = a->x, *dx = x + BLOCK * inner;
        load(from + row * stride * a->item, stride, a->half, n, a->size, x, inner);
        multiply(n, inner, c->s->features, grad, width, 1, c->rows, c->s->row, 0, dx, inner, 0);
        for (long i = 0; i < n; i++) {
            vec total = ALL(0.0f);
            for (long y = 0; y < width; y += LANES) total = ADD(total, LOAD(grad + i * width + y));
            total = ALL(sum(total) / sqrtf((float)a->size));
            for (long y = i * inner; y < (i + 1) * inner; y += LANES) STORE(dx + y, FNMA(total, LOAD(x + y), LOAD(dx + y)));
        }
        save(dx, inner, a->half, n, a->size, to + row * a->size * a->item, a->size, 0);
    }
}

/* Writes above_i v_j - delta_i (see `prepare_rows`) to inner (rows, width) for the pairs of a chunk; if `causal`, 0 for
 * pairs of a query with a later key. */
static void inner_pairs(const head *a, long causal, long row, long rows, long seen, const float *above, const float *delta,
                        const float *vt, float *inner, long width) {
    multiply(rows, whole(seen), a->e, above, a->out, 1, vt, PANEL, a->e * PANEL, inner, width, 0);
    for (long i = 0; i < rows; i++) {
        for (long x = 0; x < seen; x += LANES)
            STORE(inner + i * width + x, ADD(LOAD(inner + i * width + x), ALL(-delta[i])));
        for (long x = causal ? row + i + 1 : seen; x < whole(seen); x++) inner[i * width + x] = 0.0f;
    }
}

static void linear_backward(const linear_call *c, long z) {
    const linear_shape *s = c->s;
    head a = head_of(c, z);
    long pairs = s->chunk > 0, causal = s->causal, d = s->features, qs = s->queries, ks = s->keys;
    long step = pairs ? (causal ? s->chunk : most_of(qs, ks)) : BLOCK, most = least(step, most_of(qs, ks));
    long width = whole(most), sums = most_of(d * a.out, a.e * panels(d));
    float *memory = reserve((size_t)(2 * sums + 2 * a.wide + most * (3 * a.wide + 3 * a.out) + (d + a.e) * panels(most)
                                     + BLOCK * (width + most_of(width, a.wide) + 2 * whole(a.size)) + whole(most) + 8 * LANES));
    float *S = memory, *T = S + sums, *ones = T + sums, *rest = ones + a.wide, *k = rest + a.wide, *q = k + most * a.wide;
    float *grad = q + most * a.wide, *v = grad + most * a.wide, *above = v + most * a.out, *room = above + most * a.out;
    float *kt = room + most * a.out, *vt = kt + d * panels(most), *p = vt + a.e * panels(most);
    float *inner = p + BLOCK * most_of(width, a.wide), *delta = inner + BLOCK * width;
    a.x = delta + whole(most);
    char *dquery = c->dquery + z * qs * a.size * a.item, *dkey = c->dkey + z * ks * a.size * a.item;
    char *dvalue = c->dvalue + z * ks * a.e * a.item;
    /* Here S is stored transposed, (e, d). It sums over all keys or, if causal, over the keys of earlier chunks, from which
     * the gradients of the queries are computed in this loop. */
    memset(S, 0, (size_t)sums * sizeof(float));
    memset(ones, 0, (size_t)(2 * a.wide) * sizeof(float));
    for (long first = 0; first < ks && !(pairs && step >= most_of(qs, ks)); first += step) {
        long n = least(step, ks - first);
        features_of(c, &a, a.key + first * s->key[2] * a.item, s->key[2], n, k);
        values_of(a.value + first * s->value[2] * a.item, s->value[2], a.half, n, a.e, a.out, v);
        if (causal) {
            features_of(c, &a, a.query + first * s->query[2] * a.item, s->query[2], n, q);
            prepare_rows(c, &a, first, n, above, delta, room);
            transpose(v, a.out, n, a.e, vt);
            for (long row = 0; row < n; row += BLOCK) {
                long rows = least(BLOCK, n - row), seen = row + rows;
                float *to = grad + row * a.wide;
                inner_pairs(&a, 1, row, rows, seen, above + row * a.out, delta + row, vt, inner, width);
                multiply(rows, a.wide, seen, inner, width, 1, k, a.wide, 0, to, a.wide, 0);
                if (first > 0) multiply(rows, a.wide, a.e, above + row * a.out, a.out, 1, S, a.wide, 0, to, a.wide, 1);
                for (long i = 0; i < rows && first > 0; i++)
                    for (long x = 0; x < a.wide; x += LANES)
                        STORE(to + i * a.wide + x, FNMA(ALL(delta[row + i]), LOAD(ones + x), LOAD(to + i * a.wide + x)));
            }
            save_gradient(c, &a, a.query + first * s->query[2] * a.item, s->query[2], n, q, grad, dquery + first * a.size * a.item);
        }
        multiply(a.e, a.wide, n, v, 1, a.out, k, a.wide, 0, S, a.wide, 1);
        add_rows(k, a.wide, n, 0, ones);
    }
    /* The gradients of the keys and values are computed from T (d, e) = sum of phi(q_i) above_i^T and `rest` = - sum of
     * delta_i phi(q_i), over all queries or, if causal, over the queries of later chunks. */
    memset(T, 0, (size_t)sums * sizeof(float));
    for (long first = 0; first < qs && !pairs; first += step) {
        long n = least(step, qs - first);
        features_of(c, &a, a.query + first * s->query[2] * a.item, s->query[2], n, q);
        prepare_rows(c, &a, first, n, above, delta, room);
        multiply(n, a.wide, a.e, above, a.out, 1, S, a.wide, 0, grad, a.wide, 0);
        for (long i = 0; i < n; i++) {
            delta[i] = -delta[i];
            for (long x = 0; x < a.wide; x += LANES)
                STORE(grad + i * a.wide + x, FMA(ALL(delta[i]), LOAD(ones + x), LOAD(grad + i * a.wide + x)));
        }
        save_gradient(c, &a, a.query + first * s->query[2] * a.item, s->query[2], n, q, grad, dquery + first * a.size * a.item);
        multiply(d, a.out, n, q, 1, a.wide, above, a.out, 0, T, a.out, 1);
        add_rows(q, a.wide, n, delta, rest);
    }
    if (!pairs) transpose(T, a.out, d, a.e, S);
    /* With a single chunk, the gradients of the queries are computed in the following loop too. */
    long alone = pairs && step >= most_of(qs, ks);
    for (long first = (ks - 1) / step * step; first >= 0; first -= step) {
        long n = least(step, ks - first), m = causal ? n : qs;
        features_of(c, &a, a.key + first * s->key[2] * a.item, s->key[2], n, k);
        values_of(a.value + first * s->value[2] * a.item, s->value[2], a.half, n, a.e, a.out, v);
        float *dk = grad, *dv = room;
        if (pairs) {
            features_of(c, &a, a.query + first * s->query[2] * a.item, s->query[2], m, q);
            prepare_rows(c, &a, first, m, above, delta, room);
            transpose(k, a.wide, n, d, kt);
            transpose(v, a.out, n, a.e, vt);
            if (!alone) transpose(T, a.out, d, a.e, S);
        }
        if (!alone) {
            multiply(n, a.out, d, k, a.wide, 1, T, a.out, 0, dv, a.out, 0);
            multiply(n, a.wide, a.e, v, a.out, 1, S, PANEL, a.e * PANEL, dk, a.wide, 0);
            for (long i = 0; i < n; i++)
                for (long x = 0; x < a.wide; x += LANES)
                    STORE(dk + i * a.wide + x, ADD(LOAD(dk + i * a.wide + x), LOAD(rest + x)));
        } else {
            memset(dv, 0, (size_t)(n * a.out) * sizeof(float));
            memset(dk, 0, (size_t)(n * a.wide) * sizeof(float));
        }
        for (long row = 0; row < m && pairs; row += BLOCK) {
            long rows = least(BLOCK, m - row), seen = causal ? least(n, row + rows) : n;
            float *qr = q + row * a.wide, *ar = above + row * a.out;
            multiply(rows, whole(seen), d, qr, a.wide, 1, kt, PANEL, d * PANEL, p, width, 0);
            if (causal) triangle(p, width, row, rows, whole(seen));
            inner_pairs(&a, causal, row, rows, seen, ar, delta + row, vt, inner, width);
            multiply(seen, a.out, rows, p, 1, width, ar, a.out, 0, dv, a.out, 1);
            multiply(seen, a.wide, rows, inner, 1, width, qr, a.wide, 0, dk, a.wide, 1);
            if (alone) {
                multiply(rows, a.wide, seen, inner, width, 1, k, a.wide, 0, p, a.wide, 0);
                save_gradient(c, &a, a.query + row * s->query[2] * a.item, s->query[2], rows, qr, p,
                              dquery + row * a.size * a.item);
            }
        }
        save_gradient(c, &a, a.key + first * s->key[2] * a.item, s->key[2], n, k, dk, dkey + first * a.size * a.item);
        save(dv, a.out, a.half, n, a.e, dvalue + first * a.e * a.item, a.e, 0);
        if (pairs && first > 0) {
            multiply(d, a.out, m, q, 1, a.wide, above, a.out, 0, T, a.out, 1);
            for (long i = 0; i < m; i++) delta[i] = -delta[i];
            add_rows(q, a.wide, m, delta, rest);
        }
    }
}

static void run_linear(const linear_call *c, long threads, void (*work)(const linear_call *, long)) {
    long units = c->s->batch * c->s->heads;
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
    for (long z = 0; z < units; z++) work(c, z);
}

/* The forward pass. Returns 0, or 1 if a number is not finite, or a feature, value or divisor is out of bounds. */
int regard_linear_attention(const linear_shape *s, const void *query, const void *key, const void *value, const float *rows,
                            const float *columns, void *output, float *divisor, long threads) {
    int bad = 0;
    linear_call c = {.s = s, .query = query, .key = key, .value = value, .rows = rows, .columns = columns,
                     .result = output, .divisor = divisor, .bad = &bad};
    run_linear(&c, threads, linear_forward);
    return bad;
}

void regard_linear_gradients(const linear_shape *s, const void *query, const void *key, const void *value,
                             const float *rows, const float *columns, const void *output, float *divisor,
                             const void *change, void *dquery, void *dkey, void *dvalue, long threads) {
    linear_call c = {.s = s, .query = query, .key = key, .value = value, .rows = rows, .columns = columns,
                     .output = output, .divisor = divisor, .change = change, .dquery = dquery, .dkey = dkey,
                     .dvalue = dvalue};
    run_linear(&c, threads, linear_backward);
}
