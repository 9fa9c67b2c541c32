/* Products of bfloat16 matrices with sums in float32, by AMX or AVX-512. `native_library.library` puts this
 * text after `vectors.h` before the C files of a library.
 *
 * The depth of a product is the axis that it sums over. The left operand is stored as rows of bfloat16. The right
 * operand is packed in tiles, each of a depth of 32 and of 16 columns: a row of a tile holds, for each column, a pair
 * of numbers that are adjacent along the depth. All tiles of the first 16 columns precede the tiles of the next 16
 * columns. */

#if defined(__AVX512BF16__) && LANES == 16
#define BFLOAT16_PRODUCTS 1
#define DEPTH 32
#define TILE_SIZE 256 /* the number of pairs of bfloat16 in a tile of the right operand */

static inline long in_tiles(long n, long size) { return (n + size - 1) / size; }

/* Returns the mask that selects the first n of 32 numbers. */
static inline __mmask32 first(long n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }
static inline __m512i load_first(const uint16_t *from, long n) { return _mm512_maskz_loadu_epi16(first(n), from); }
static inline __m512bh as_pairs(__m512i x) { return (__m512bh)x; }

/* Returns the 16 pairs (even[n], odd[n]), each number rounded to bfloat16. */
static inline __m512i pairs_of(vec even, vec odd) {
    const __m512i order = _mm512_set_epi32(
        0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008, 0x170007, 0x160006, 0x150005,
        0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* Multiplies `size` float32 numbers by `by`, and writes the products rounded to bfloat16. */
static void save_row(const float *from, long size, float by, uint16_t *to) {
    for (long x = 0; x < size; x += 16)
        _mm256_mask_storeu_epi16(to + x, (__mmask16)first(size - x),
                                 (__m256i)_mm512_cvtneps_pbh(MUL(LOAD(from + x), ALL(by))));
}

/* Writes `size` float32 numbers rounded to bfloat16; `size` is a multiple of 32. */
static void narrow(const float *from, long size, uint16_t *to) {
    for (long x = 0; x < size; x += 32)
        _mm512_storeu_si512(to + x, (__m512i)_mm512_cvtne2ps_pbh(LOAD(from + x + 16), LOAD(from + x)));
}

/* Copies a matrix (rows, size) as the left operand of a product: it is padded with zeros to a multiple of 16 rows, each
 * of `width` numbers, a multiple of 32. */
static void copy_rows(const uint16_t *from, long stride, long rows, long size, uint16_t *to, long width) {
    for (long i = 0; i < in_tiles(rows, 16) * 16; i++, to += width)
        for (long x = 0; x < width; x += 32)
            _mm512_storeu_si512(to + x, i < rows ? load_first(from + i * stride + x, size - x) : _mm512_setzero_si512());
}

/* Loads 32 rows of 16 columns as 16 vectors of pairs: for each column, vector i holds the pair of the numbers in rows
 * 2 i and 2 i + 1. Numbers beyond `rows` and `size` are 0. */
static inline void load_pairs(const uint16_t *from, long stride, long rows, long size, vec *pairs) {
    __mmask16 inside = (__mmask16)first(size);
    for (long i = 0; i < 16; i++) {
        __m256i even = _mm256_setzero_si256(), odd = even;
        if (2 * i < rows) even = _mm256_maskz_loadu_epi16(inside, from + 2 * i * stride);
        if (2 * i + 1 < rows) odd = _mm256_maskz_loadu_epi16(inside, from + (2 * i + 1) * stride);
        __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
        pairs[i] = (vec)_mm512_or_si512(_mm512_cvtepu16_epi32(even), high);
    }
}

/* Packs the transpose of a matrix (rows, size) as the right operand of a product: the rows of the matrix become
 * columns, padded with zeros to `width` columns. */
static void pack_rows(const uint16_t *from, long stride, long rows, long size, uint32_t *to, long width) {
    for (long i = 0; i < width; i += 16)
        for (long x = 0; x < size; x += DEPTH, to += TILE_SIZE) {
            vec square[16];
            for (long u = 0; u < 16; u++)
                square[u] = i + u < rows ? (vec)load_first(from + (i + u) * stride + x, size - x) : ALL(0.0f);
            turn(square);
            for (long u = 0; u < 16; u++) _mm512_store_si512(to + u * 16, (__m512i)square[u]);
        }
}

/* Packs a matrix (rows, size) as the right operand of a product: the axis of its rows is the depth of the product,
 * padded with zeros to `width` rows. */
static void pack(const uint16_t *from, long stride, long rows, long size, uint32_t *to, long width) {
    for (long x = 0; x < size; x += 16)
        for (long i = 0; i < width; i += DEPTH, to += TILE_SIZE) {
            vec square[16];
            load_pairs(from + i * stride + x, stride, rows - i, size - x, square);
            for (long u = 0; u < 16; u++) _mm512_store_si512(to + u * 16, (__m512i)square[u]);
        }
}

/* Rounds 32 rows of float32 to bfloat16, and packs them as 32 rows of the right operand of a product, whose depth is
 * `depth` tiles. */
static void pack_block(const float *from, long stride, long columns, uint32_t *to, long depth) {
    for (long x = 0; x < columns; x += 16, to += depth * TILE_SIZE)
        for (long i = 0; i < 16; i++)
            _mm512_store_si512(to + i * 16,
                               pairs_of(LOAD(from + 2 * i * stride + x), LOAD(from + (2 * i + 1) * stride + x)));
}

/* Sets 32 rows of the right operand of a product to 0; the depth of the product is `depth` tiles. */
static void clear_block(long columns, uint32_t *to, long depth) {
    for (long x = 0; x < columns; x += 16, to += depth * TILE_SIZE) memset(to, 0, TILE_SIZE * sizeof(uint32_t));
}

/* Writes the transpose of up to 32 rows as 32 columns of the left operand (size, to_row) of a product. */
static void turn_block(const uint16_t *from, long stride, long rows, long size, uint16_t *to, long to_row) {
    for (long x = 0; x < size; x += 16) {
        vec square[16];
        load_pairs(from + x, stride, rows, size - x, square);
        turn(square);
        for (long u = 0; u < 16; u++, to += to_row) _mm512_store_si512(to, (__m512i)square[u]);
    }
}

/* Writes the transpose (rows, size) of a float32 matrix (size, rows), rounded to bfloat16 if `half`. */
static void save_turned(const float *from, long stride, long rows, long size, long half, void *to) {
    for (long i = 0; i < rows; i += 16)
        for (long x = 0; x < size; x += 16) {
            vec square[16];
            for (long u = 0; u < 16; u++) square[u] = LOAD(from + (x + u) * stride + i);
            turn(square);
            for (long u = 0; u < 16 && i + u < rows; u++)
                if (half)
                    _mm256_mask_storeu_epi16((uint16_t *)to + (i + u) * size + x, (__mmask16)first(size - x),
                                             (__m256i)_mm512_cvtneps_pbh(square[u]));
                else
                    _mm512_mask_storeu_ps((float *)to + (i + u) * size + x, (__mmask16)first(size - x), square[u]);
        }
}

/* Writes the dot products of m queries with keys (count, size), which are not packed in tiles. Each query is padded to
 * a multiple of 32 numbers. */
static void score_few(long m, const uint16_t *rows, long row, const uint16_t *keys, long stride, long count, long size,
                      float *scores, long width) {
    for (long j = 0; j < count; j += 4) {
        const uint16_t *k[4];
        for (int u = 0; u < 4; u++) k[u] = keys + (j + u < count ? j + u : count - 1) * stride;
        for (long i = 0; i < m; i++) {
            vec t[4] = {ALL(0.0f), ALL(0.0f), ALL(0.0f), ALL(0.0f)};
            for (long x = 0; x < size; x += 32) {
                __m512bh q = as_pairs(_mm512_loadu_si512(rows + i * row + x));
                for (int u = 0; u < 4; u++) t[u] = _mm512_dpbf16_ps(t[u], q, as_pairs(load_first(k[u] + x, size - x)));
            }
            sums(t, scores + i * width + j);
        }
    }
}

/* Writes, for each of m rows of weights, the first 32 v columns of the weighted sum of `count` rows of bfloat16. The
 * rows of bfloat16 have `left` columns; numbers beyond these columns are treated as 0. */
static inline __attribute__((always_inline)) void sum_tile(
    const int m, const int v, const float *weights, long width, long count, const uint16_t *rows, long stride, long left,
    float *out, long out_row) {
    vec even[4][4], odd[4][4];
    for (int i = 0; i < m; i++)
        for (int u = 0; u < v; u++) even[i][u] = odd[i][u] = ALL(0.0f);
    for (long j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int u = 0; u < v; u++) {
            __m512i x = load_first(rows + j * stride + 32 * u, left - 32 * u);
            vec low = (vec)_mm512_slli_epi32(x, 16), high = (vec)_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000));
#pragma GCC unroll 4
            for (int i = 0; i < m; i++) {
                even[i][u] = FMA(ALL(weights[i * width + j]), low, even[i][u]);
                odd[i][u] = FMA(ALL(weights[i * width + j]), high, odd[i][u]);
            }
        }
    const __m512i order = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i rest = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    for (int i = 0; i < m; i++)
        for (int u = 0; u < v && 32 * u < left; u++) {
            STORE(out + i * out_row + 32 * u, _mm512_permutex2var_ps(even[i][u], order, odd[i][u]));
            STORE(out + i * out_row + 32 * u + 16, _mm512_permutex2var_ps(even[i][u], rest, odd[i][u]));
        }
}

/* Writes, for each of m <= 4 rows of weights, the weighted sum of the rows of a bfloat16 matrix (count, size).
 * `out_row`, the number of columns in a row of the result, is a multiple of 32. */
static void sum_few(long m, const float *weights, long width, long count, const uint16_t *rows, long stride, long size,
                    float *out, long out_row) {
    for (long x = 0; x < size;) {
        long v = m <= 2 && size - x > 64 ? 4 : 2;
#define CASE(M, V) \
    if (m == M && v == V) sum_tile(M, V, weights, width, count, rows + x, stride, size - x, out + x, out_row);
        CASE(1, 4) CASE(1, 2) CASE(2, 4) CASE(2, 2) CASE(3, 2) CASE(4, 2)
#undef CASE
        x += 32 * v;
    }
}

/* Returns whether AMX may be used. AMX (the matrix instructions of Intel's processors) needs a permission from Linux
 * once per process, and a configuration of its tile registers in each thread. `end_tiles` restores the configuration
 * that the thread had before, because other libraries do not set their own configuration in every call. */
static int with_amx(void) {
#ifdef __AMX_BF16__
    long syscall(long, ...);
    static _Atomic int state; /* 0: permission not requested yet, 1: granted, 2: refused */
    if (!state) state = syscall(158, 0x1023, 18) == 0 ? 1 : 2; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) */
    return state == 1;
#else
    return 0;
#endif
}

static void begin_tiles(char *saved) {
#ifdef __AMX_BF16__
    if (!with_amx()) return;
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } of = {.palette = 1};
    for (int i = 0; i < 8; i++) of.bytes[i] = 64, of.rows[i] = 16;
    _tile_storeconfig(saved);
    _tile_loadconfig(&of);
#endif
}

static void end_tiles(const char *saved) {
#ifdef __AMX_BF16__
    if (with_amx()) {
        if (saved[0]) _tile_loadconfig(saved);
        else _tile_release();
    }
#endif
}

/* Computes 8 rows and 16 v columns of the matrix product c = a b, or c += a b if `more`; the depth is 2 * `pairs`. The
 * sums are held in registers: each pair loaded from a is used for v vectors, and each vector loaded from b for 8 rows.
 * */
static inline __attribute__((always_inline)) void multiply_eight(
    const int v, long pairs, const uint16_t *a, long a_row, const uint32_t *b, long b_column, float *c, long c_row,
    int more) {
    vec t[8][2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
        for (int u = 0; u < v; u++) t[i][u] = ALL(0.0f);
    for (long p = 0; p < pairs; p++) {
        __m512bh right[2];
#pragma GCC unroll 2
        for (int u = 0; u < v; u++) right[u] = as_pairs(_mm512_load_si512(b + u * b_column + p * 16));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            int pair;
            memcpy(&pair, a + i * a_row + p * 2, sizeof pair);
            __m512bh left = as_pairs(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
            for (int u = 0; u < v; u++) t[i][u] = _mm512_dpbf16_ps(t[i][u], left, right[u]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 2
        for (int u = 0; u < v; u++) {
            float *to = c + i * c_row + u * 16;
            STORE(to, more ? ADD(LOAD(to), t[i][u]) : t[i][u]);
        }
}

/* Computes the matrix product c = a b, or c += a b if `more`, for 16 m rows, 16 * `columns` columns and a depth of
 * 32 * `depth`. `b_column` is the number of tiles of b that hold 16 of its columns. */
static void multiply_tiles(long m, long columns, long depth, const uint16_t *a, long a_row, const uint32_t *b,
                           long b_column, float *c, long c_row, int more) {
    b_column *= TILE_SIZE;
#ifdef __AMX_BF16__
    if (with_amx()) {
        for (long x = 0; x < columns; x += 2)
            for (long i = 0; i < m; i += 2) {
                const uint16_t *left = a + i * 16 * a_row;
                const uint32_t *right = b + x * b_column;
                float *to = c + i * 16 * c_row + x * 16;
                int below = i + 1 < m, beside = x + 1 < columns;
                if (more) {
                    _tile_loadd(0, to, c_row * 4);
                    if (beside) _tile_loadd(1, to + 16, c_row * 4);
                    if (below) _tile_loadd(2, to + 16 * c_row, c_row * 4);
                    if (below && beside) _tile_loadd(3, to + 16 * c_row + 16, c_row * 4);
                } else {
                    _tile_zero(0);
                    _tile_zero(1);
                    _tile_zero(2);
                    _tile_zero(3);
                }
                for (long p = 0; p < depth; p++, left += DEPTH, right += TILE_SIZE) {
                    _tile_loadd(4, left, a_row * 2);
                    _tile_loadd(6, right, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    if (beside) {
                        _tile_loadd(7, right + b_column, 64);
                        _tile_dpbf16ps(1, 4, 7);
                    }
                    if (below) {
                        _tile_loadd(5, left + 16 * a_row, a_row * 2);
                        _tile_dpbf16ps(2, 5, 6);
                        if (beside) _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, to, c_row * 4);
                if (beside) _tile_stored(1, to + 16, c_row * 4);
                if (below) _tile_stored(2, to + 16 * c_row, c_row * 4);
                if (below && beside) _tile_stored(3, to + 16 * c_row + 16, c_row * 4);
            }
        return;
    }
#endif
    for (long x = 0; x < columns; x += 2)
        for (long i = 0; i < m * 16; i += 8) {
            const uint16_t *left = a + i * a_row;
            const uint32_t *right = b + x * b_column;
            float *to = c + i * c_row + x * 16;
            if (x + 1 < columns) multiply_eight(2, depth * 16, left, a_row, right, b_column, to, c_row, more);
            else multiply_eight(1, depth * 16, left, a_row, right, b_column, to, c_row, more);
        }
}
#endif
