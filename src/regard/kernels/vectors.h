/* SIMD vectors of float32 for the C files of this package: `native_library.library` puts this text before them. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Returns a number of bfloat16, given by its bits, as float32. */
static inline float widened_one(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, sizeof(number));
    return number;
}

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
typedef __m512 vec;
#define LOAD(p) _mm512_loadu_ps(p)
#define WIDENED(p) /* loads LANES numbers of bfloat16 */ \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define STORE(p, x) _mm512_storeu_ps(p, x)
#define FIRST(p, n) _mm512_maskz_loadu_ps((__mmask16)((1u << (n)) - 1), p) /* loads n < LANES numbers, then zeros */
#define ALL(x) _mm512_set1_ps(x)
#define ADD(a, b) _mm512_add_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define MIN(a, b) _mm512_min_ps(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)  /* returns a b + c */
#define FNMA(a, b, c) _mm512_fnmadd_ps(a, b, c) /* returns c - a b */
#define GUESS(x) _mm512_rcp14_ps(x)
#define MAX(a, b) _mm512_max_ps(a, b)
#define ROUND(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define SCALE(x, n) _mm512_scalef_ps(x, n) /* returns x 2^n */
#define ABOVE(x, y, p) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), p) /* x > y ? p : 0 in each lane */
#define ROOT(x) _mm512_sqrt_ps(x)
#define ANY_NAN(x) (_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0)
/* Returns m and sets n for normal x > 0 with x = m 2^n and sqrt(1/2) <= m < sqrt(2). */
static inline vec split(vec x, vec *n) {
    __m512i bits = _mm512_castps_si512(x), root = _mm512_set1_epi32(0x3f3504f3);
    __m512i power = _mm512_srai_epi32(_mm512_sub_epi32(bits, root), 23);
    *n = _mm512_cvtepi32_ps(power);
    return _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(power, 23)));
}
static inline float sum(vec x) { return _mm512_reduce_add_ps(x); }
static inline float largest(vec x) { return _mm512_reduce_max_ps(x); }
/* Returns x in the lanes low <= lane < high, and `other` in all other lanes. */
static inline vec between(vec x, long low, long high, float other) {
    unsigned below = high >= 16 ? 0xffff : high <= 0 ? 0 : (1u << high) - 1;
    unsigned above = low <= 0 ? 0xffff : low >= 16 ? 0 : 0xffffu << low;
    return _mm512_mask_blend_ps((__mmask16)(below & above), _mm512_set1_ps(other), x);
}
/* Transposes a matrix of 16 by 16 numbers, given as 16 vectors, in place. */
static inline void turn(vec *r) {
    vec t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#define PAIR(f, a, b) _mm512_castpd_ps(f(_mm512_castps_pd(a), _mm512_castps_pd(b)))
    for (int i = 0; i < 16; i += 4)
        for (int u = 0; u < 2; u++) {
            r[i + 2 * u] = PAIR(_mm512_unpacklo_pd, t[i + u], t[i + u + 2]);
            r[i + 2 * u + 1] = PAIR(_mm512_unpackhi_pd, t[i + u], t[i + u + 2]);
        }
#undef PAIR
    for (int i = 0; i < 4; i++) { /* lanes 4 q to 4 q + 3 of r[4 a + i] hold column 4 q + i of rows 4 a to 4 a + 3 */
        vec a = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        vec c = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88), d = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        t[4 + i] = _mm512_shuffle_f32x4(b, d, 0x88);
        t[8 + i] = _mm512_shuffle_f32x4(a, c, 0xdd);
        t[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
typedef __m256 vec;
#define LOAD(p) _mm256_loadu_ps(p)
#define WIDENED(p) /* loads LANES numbers of bfloat16 */ \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define STORE(p, x) _mm256_storeu_ps(p, x)
#define FIRST(p, n) \
    _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)))
#define ALL(x) _mm256_set1_ps(x)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define MIN(a, b) _mm256_min_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define FNMA(a, b, c) _mm256_fnmadd_ps(a, b, c)
static inline vec inverse_guess(vec x) { /* rcp_ps is accurate to 12 bits, and to 23 after a Newton step */
    vec r = _mm256_rcp_ps(x);
    return _mm256_mul_ps(r, _mm256_fnmadd_ps(x, r, _mm256_set1_ps(2.0f)));
}
#define GUESS(x) inverse_guess(x)
#define MAX(a, b) _mm256_max_ps(a, b)
#define ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define SCALE(x, n) \
    MUL(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)))
#define ABOVE(x, y, p) _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ), p)
#define ROOT(x) _mm256_sqrt_ps(x)
#define ANY_NAN(x) (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0)
static inline vec split(vec x, vec *n) {
    __m256i bits = _mm256_castps_si256(x), root = _mm256_set1_epi32(0x3f3504f3);
    __m256i power = _mm256_srai_epi32(_mm256_sub_epi32(bits, root), 23);
    *n = _mm256_cvtepi32_ps(power);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(power, 23)));
}
static inline float sum(vec x) {
    float part[8], total = 0.0f;
    _mm256_storeu_ps(part, x);
    for (int n = 0; n < 8; n++) total += part[n];
    return total;
}
static inline float largest(vec x) {
    float part[8], most;
    _mm256_storeu_ps(part, x);
    most = part[0];
    for (int n = 1; n < 8; n++) most = part[n] > most ? part[n] : most;
    return most;
}
static inline vec between(vec x, long low, long high, float other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i outside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(low < 8 ? low : 8)), lane);
    __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(high < 8 ? high : 8)), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(_mm256_andnot_si256(outside, inside)));
}
#else
#define LANES 1
typedef float vec;
#define LOAD(p) (*(p))
#define WIDENED(p) widened_one(*(p)) /* loads a number of bfloat16 */
#define STORE(p, x) (*(p) = (x))
#define FIRST(p, n) (*(p))
#define ALL(x) (x)
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define MIN(a, b) ((b) < (a) ? (b) : (a))
#define FMA(a, b, c) ((a) * (b) + (c))
#define FNMA(a, b, c) ((c) - (a) * (b))
#define GUESS(x) (1.0f / (x))
#define MAX(a, b) ((b) > (a) ? (b) : (a))
#define ROUND(x) rintf(x)
#define SCALE(x, n) ldexpf(x, (int)(n))
#define ABOVE(x, y, p) ((x) > (y) ? (p) : 0.0f)
#define ROOT(x) sqrtf(x)
#define ANY_NAN(x) ((x) != (x))
static inline vec split(vec x, vec *n) {
    int power;
    float m = frexpf(x, &power);
    if (m < 0.707106769f) m *= 2.0f, power--;
    *n = (float)power;
    return m;
}
static inline float sum(vec x) { return x; }
static inline float largest(vec x) { return x; }
static inline vec between(vec x, long low, long high, float other) { return low <= 0 && 0 < high ? x : other; }
#endif

/* Writes four numbers to `to`: the sum of the lanes of each of four vectors. */
static inline void sums(const vec *t, float *to) {
#if LANES == 1
    memcpy(to, t, 4 * sizeof(float));
#else
    __m256 y[4];
#if LANES == 16
    for (int u = 0; u < 4; u++) {
        __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(t[u]), 1);
        y[u] = _mm256_add_ps(_mm512_castps512_ps256(t[u]), _mm256_castpd_ps(high));
    }
#else
    memcpy(y, t, sizeof y);
#endif
    __m256 z = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(z), _mm256_extractf128_ps(z, 1)));
#endif
}

/* Returns 1 / x for 1e-37 <= x <= 1e37: the estimate of 1 / x by GUESS, improved by one Newton step. */
static inline vec inverse(vec x) {
    vec r = GUESS(x);
    return MUL(r, FNMA(x, r, ALL(2.0f)));
}

/* Returns e^x for |x| < 87, by the polynomial of the Cephes library; the result for other x is undefined. */
static inline vec moderate_exponential(vec x) {
    vec n = ROUND(MUL(x, ALL(1.44269504f))), r = FNMA(n, ALL(0.693359375f), x), p = ALL(1.9875691500e-4f);
    r = FNMA(n, ALL(-2.12194440e-4f), r);
    p = FMA(p, r, ALL(1.3981999507e-3f));
    p = FMA(p, r, ALL(8.3334519073e-3f));
    p = FMA(p, r, ALL(4.1665795894e-2f));
    p = FMA(p, r, ALL(1.6666665459e-1f));
    p = FMA(p, r, ALL(5.0000001201e-1f));
    return SCALE(ADD(FMA(MUL(p, r), r, r), ALL(1.0f)), n);
}

/* Returns e^x for all x, clamped to -87 <= x <= 87: smaller x give about 1e-38 instead of 0. */
static inline vec exponential(vec x) { return moderate_exponential(MIN(MAX(x, ALL(-87.0f)), ALL(87.0f))); }

/* Returns e^x for x <= 0, and 0 for x <= -86. */
static inline vec exponential_below(vec x) {
    return ABOVE(x, ALL(-86.0f), LANES > 1 ? moderate_exponential(x) : exponential(x));
}

#define LEAST_NORMAL 1.17549435e-38f

/* Returns the natural logarithm of normal x > 0, by the polynomial of the Cephes library. */
static inline vec logarithm(vec x) {
    vec n, r = ADD(split(x, &n), ALL(-1.0f)), square = MUL(r, r), p = ALL(7.0376836292e-2f);
    p = FMA(p, r, ALL(-1.1514610310e-1f));
    p = FMA(p, r, ALL(1.1676998740e-1f));
    p = FMA(p, r, ALL(-1.2420140846e-1f));
    p = FMA(p, r, ALL(1.4249322787e-1f));
    p = FMA(p, r, ALL(-1.6668057665e-1f));
    p = FMA(p, r, ALL(2.0000714765e-1f));
    p = FMA(p, r, ALL(-2.4999993993e-1f));
    p = FMA(p, r, ALL(3.3333331174e-1f));
    p = FMA(n, ALL(-2.12194440e-4f), MUL(MUL(p, r), square));
    p = FNMA(square, ALL(0.5f), p);
    return FMA(n, ALL(0.693359375f), ADD(r, p));
}

/* Returns tanh(x) by the rational function of the Eigen library, accurate to a few units in the last place. */
static inline vec tangent(vec x) {
    x = MIN(MAX(x, ALL(-7.90531110763549805f)), ALL(7.90531110763549805f));
    vec y = MUL(x, x), p = ALL(-2.76076847742355e-16f), q = ALL(1.19825839466702e-06f);
    p = FMA(p, y, ALL(2.00018790482477e-13f));
    p = FMA(p, y, ALL(-8.60467152213735e-11f));
    p = FMA(p, y, ALL(5.12229709037114e-08f));
    p = FMA(p, y, ALL(1.48572235717979e-05f));
    p = FMA(p, y, ALL(6.37261928875436e-04f));
    p = FMA(p, y, ALL(4.89352455891786e-03f));
    q = FMA(q, y, ALL(1.18534705686654e-04f));
    q = FMA(q, y, ALL(2.26843463243900e-03f));
    q = FMA(q, y, ALL(4.89352518554385e-03f));
    return MUL(MUL(p, x), inverse(q));
}
