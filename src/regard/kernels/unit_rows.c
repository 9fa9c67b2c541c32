/* Rows divided by their Euclidean norm, and the gradient of this: one pass over the rows each. */

#define LARGEST 1024 /* the largest number of entries of a row */

typedef struct {
    int64_t batch, heads, rows, size, half;
    int64_t x[3], change[3]; /* strides of the axes batch, head and row, in numbers */
} shape;

static float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Copies a row to float32, followed by zeros up to a whole number of vectors. */
static void load(const void *from, long place, const shape *s, float *to) {
    if (s->half)
        for (long i = 0; i < s->size; i++) to[i] = widened(((const uint16_t *)from)[place + i]);
    else
        memcpy(to, (const float *)from + place, (size_t)s->size * sizeof(float));
    for (long i = s->size; i % LANES; i++) to[i] = 0.0f;
}

static void save(const float *from, const shape *s, long row, void *to) {
    if (s->half)
        for (long i = 0; i < s->size; i++) ((uint16_t *)to)[row * s->size + i] = narrowed(from[i]);
    else
        memcpy((float *)to + row * s->size, from, (size_t)s->size * sizeof(float));
}

static float product(const float *x, const float *y, long size) {
    vec total = ALL(0.0f);
    for (long i = 0; i < size; i += LANES) total = FMA(LOAD(x + i), LOAD(y + i), total);
    return sum(total);
}

static void multiply(float *x, float by, long size) {
    for (long i = 0; i < size; i += LANES) STORE(x + i, MUL(LOAD(x + i), ALL(by)));
}

/* Divides a row by its norm in place, and returns 1 / norm multiplied by `most`, which is the largest entry if the
 * squares of the entries could overflow or lose digits, and else 1. A row of zeros stays as it is, and the result is 0;
 * a row with NaN or infinity becomes NaN. */
static float normalize(float *x, long size, float *most) {
    float square = product(x, x, size), large = 0.0f;
    *most = 1.0f;
    if (!(square > 1e-30f && square < 1e30f)) {
        for (long i = 0; i < size; i++) {
            if (x[i] - x[i] != 0.0f) {
                for (long j = 0; j < size; j++) x[j] = NAN;
                return NAN;
            }
            large = fabsf(x[i]) > large ? fabsf(x[i]) : large;
        }
        if (large == 0.0f) return 0.0f;
        for (long i = 0; i < size; i++) x[i] /= large;
        square = product(x, x, size), *most = large;
    }
    float inverse = 1.0f / sqrtf(square);
    multiply(x, inverse, size);
    return inverse;
}

static long place_of(const shape *s, const int64_t *strides, long row) {
    long z = row / s->rows;
    return z / s->heads * strides[0] + z % s->heads * strides[1] + row % s->rows * strides[2];
}

/* Writes x / |x| for each row of x; the result is contiguous. */
void regard_unit_rows(const shape *s, const void *x, void *out, long threads) {
    long rows = s->batch * s->heads * s->rows;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (long row = 0; row < rows; row++) {
        float unit[LARGEST + LANES], most;
        load(x, place_of(s, s->x, row), s, unit);
        normalize(unit, s->size, &most);
        save(unit, s, row, out);
    }
}

/* Writes the gradient of each row of x, (g - u <u, g>) / |x| with u = x / |x| and the gradient g of u. */
void regard_unit_rows_gradient(const shape *s, const void *x, const void *change, void *out, long threads) {
    long rows = s->batch * s->heads * s->rows;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (long row = 0; row < rows; row++) {
        float unit[LARGEST + LANES], g[LARGEST + LANES], most;
        load(x, place_of(s, s->x, row), s, unit);
        load(change, place_of(s, s->change, row), s, g);
        float inverse = normalize(unit, s->size, &most), along = product(unit, g, s->size);
        for (long i = 0; i < s->size; i += LANES)
            STORE(g + i, MUL(FNMA(LOAD(unit + i), ALL(along), LOAD(g + i)), ALL(inverse)));
        for (long i = 0; most != 1.0f && i < s->size; i++) g[i] /= most;
        save(g, s, row, out);
    }
}
