// Operators of a step on x86-64 processors: linear maps of packed weights with the norm before and the residual or the
// gate behind them, and attention. Built twice, see build.sh; loaded by ../step_cpu.py, which says what each one computes.
//
// Rows are bf16, sums are fp32. The inputs of a linear map are rounded, 32 of them by one scale, and multiplied by the
// codes of the weight as integers: fine ones have 15 bits in two parts, coarse ones 8 bits and half of the products. A row
// is computed alike in every step, however many rows and threads there are.
//
// A weight (O, I) is tiles of 16 outputs by groups of 32 inputs, one behind the other. A tile's group holds the codes, then
// 16 fp16 scales and, for 4 bits, 16 fp16 minima:
//   int4  w = code * scale + minimum, codes 0..15. 4 vectors of 64 bytes; byte 4 r + b of vector i holds the codes of output
//         r at the inputs 4 i + b (low half) and 16 + 4 i + b (high half).
//   int8  w = (code - 128) * scale, codes 1..255. 8 vectors; byte 4 r + b of vector i is the code of output r at 4 i + b.

#include <immintrin.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 16
#define GROUP 32
// Numbers of a vector, and rows of x that one reading of a tile serves. Vectors are as wide as registers: of wider ones GCC
// makes scalar code.
#ifdef __AVX512F__
#define LANES 16
#define MAX_ROWS 8
#else
#define LANES 8
#define MAX_ROWS 4
#endif
#define PARTS (TILE / LANES)
// Steps of so few rows have no barrier: each thread prepares all rows for itself, and none waits for another before the end.
#define MAX_OWN_ROWS 8
#define ATTENTION_BLOCK 64
#define MAX_HEAD_DIM 256
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float f32 __attribute__((vector_size(4 * LANES)));
typedef int32_t i32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16 __attribute__((vector_size(2 * LANES)));

int is_supported(void) {
#ifdef __AVX512F__
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#else
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
}

// --- numbers

INLINE f32 load_f32(const float *p) {
    f32 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_f32(float *p, f32 v) { memcpy(p, &v, sizeof v); }

INLINE f32 load_bf16(const uint16_t *p) {
    u16 v;
    memcpy(&v, p, sizeof v);
    return (f32)(__builtin_convertvector(v, u32) << 16);
}

// Takes `a` where the mask is all ones, `b` where it is zero.
INLINE i32 select_i32(i32 mask, i32 a, i32 b) { return (mask & a) | (~mask & b); }

INLINE f32 smaller(f32 x, float bound) {
    f32 y = (f32){} + bound;
    return (f32)select_i32(x > y, (i32)y, (i32)x);
}

INLINE f32 larger(f32 x, float bound) {
    f32 y = (f32){} + bound;
    return (f32)select_i32(x < y, (i32)y, (i32)x);
}

// Rounds to the nearest, of two to the even one; a NaN stays one.
INLINE void store_bf16(uint16_t *p, f32 x) {
    u32 bits = (u32)x;
    u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    i32 v = select_i32(x == x, (i32)rounded, (i32){} + 0x7fc0);
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)v));
#else
    __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
#endif
}

// Stores numbers of -128..127.
INLINE void store_i8(int8_t *p, i32 v) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
    __m128i pairs = _mm_packs_epi32(low, high);
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(pairs, pairs));
#endif
}

INLINE float sum(f32 v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
#endif
}

INLINE int32_t sum_i32(i32 v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
#endif
}

INLINE int32_t largest(i32 v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
#endif
}

// Adding it to a number below 2^22 leaves the nearest integer in the low bits.
#define ROUNDER 12582912.0f

// e^x to 2 units in the last place; 0 below -87, infinity never: x is bounded by 88.
INLINE f32 exponential(f32 x) {
    f32 y = smaller(larger(x, -87.0f), 88.0f);
    f32 n = y * 1.44269504f + ROUNDER;
    i32 power = ((i32)n - 0x4b400000 + 127) << 23;
    n -= ROUNDER;
    f32 r = y - n * 0.693359375f + n * 2.12194440e-4f;
    f32 p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
    f32 e = (p * r * r + r + 1.0f) * (f32)power;
    return (f32)select_i32(x < (f32){} - 87.0f, (i32){}, (i32)e);
}

// --- the inputs of a linear map

struct Rows {
    int8_t *codes;       // fine: (T, I/32, 2, 32), high parts, then low ones: an input is (128 high + low) * scale
                         // coarse: (T, I): it is code * scale
    float *scales;       // (T, I/32)
    float *sums;         // (T, I/32): of inputs
    int32_t *offsets;    // (T, I/32): of inputs in units of the scale, times -128
    long num_inputs;
    int is_fine;
};

// Rounds a row. A group that holds a NaN or an infinity gets a NaN as its scale.
INLINE void quantise(const float *x, const struct Rows *rows, long t) {
    long num_groups = rows->num_inputs / GROUP;
    for (long g = 0; g < num_groups; g++) {
        f32 v[GROUP / LANES];
        i32 sizes = {};
        UNROLL for (int i = 0; i < GROUP / LANES; i++) {
            v[i] = load_f32(x + GROUP * g + LANES * i);
            i32 size = (i32)v[i] & 0x7fffffff;
            sizes = select_i32(size > sizes, size, sizes);
        }
        union {
            int32_t bits;
            float value;
        } most = {.bits = largest(sizes)};
        float most_code = rows->is_fine ? 127 * 128 : 127;
        float scale = most.value / most_code, inverse = most.value > 1e-30f ? most_code / most.value : 0;
        i32 total = {};
        UNROLL for (int i = 0; i < GROUP / LANES; i++) {
            i32 code = (i32)(v[i] * inverse + ROUNDER) - 0x4b400000;
            i32 high = rows->is_fine ? (code + 64) >> 7 : code;
            int8_t *place = rows->codes + (1 + rows->is_fine) * (t * rows->num_inputs + GROUP * g) + LANES * i;
            store_i8(place, high);
            if (rows->is_fine) store_i8(place + GROUP, code - (high << 7));
            total += code;
        }
        int32_t num = sum_i32(total);
        rows->scales[t * num_groups + g] = most.bits < 0x7f800000 ? scale : __builtin_nanf("");
        rows->sums[t * num_groups + g] = scale * (float)num;
        rows->offsets[t * num_groups + g] = -128 * num;
    }
}

// Normalises a row where there is a norm, and rounds it.
static void read_row(const uint16_t *x, const void *norm, int norm_is_fp32, float eps, const struct Rows *rows, long t,
                     float *wide) {
    long n = rows->num_inputs;
    float factor = 1;
    x += t * n;
    if (norm) {
        f32 squares = {};
        for (long i = 0; i < n; i += LANES) {
            f32 v = load_bf16(x + i);
            squares += v * v;
        }
        factor = 1 / __builtin_sqrtf(sum(squares) / (float)n + eps);
    }
    for (long i = 0; i < n; i += LANES) {
        f32 v = load_bf16(x + i);
        if (norm) v *= factor * (norm_is_fp32 ? load_f32((const float *)norm + i) : load_bf16((const uint16_t *)norm + i));
        store_f32(wide + i, v);
    }
    quantise(wide, rows, t);
}

// --- a tile of 16 outputs

#ifdef __AVX512F__
INLINE __m512i dot(__m512i total, __m512i codes, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(total, codes, _mm512_set1_epi32(four));
}

// out[PARTS * t ..] = 16 outputs of row first + t, for `num` rows.
INLINE void tile(const uint8_t *w, const int is_int4, const int is_fine, const struct Rows *x, long first, const int num,
                 f32 *out) {
    long num_groups = x->num_inputs / GROUP;
    const long row_bytes = (1 + is_fine) * x->num_inputs;
    __m512 acc[MAX_ROWS];
    UNROLL for (int t = 0; t < num; t++) acc[t] = _mm512_setzero_ps();
    for (long g = 0; g < num_groups; g++) {
        __m512i high[MAX_ROWS], low[MAX_ROWS];
        const int8_t *codes = x->codes + first * row_bytes + (1 + is_fine) * g * GROUP;
        UNROLL for (int t = 0; t < num; t++) {
            high[t] = _mm512_setzero_si512();
            low[t] = is_int4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x->offsets[(first + t) * num_groups + g]);
        }
        if (is_int4) {
            UNROLL for (int i = 0; i < 4; i++) {
                __m512i both = _mm512_loadu_si512(w + 64 * i), mask = _mm512_set1_epi8(15);
                __m512i first16 = _mm512_and_si512(both, mask), last16 = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
                UNROLL for (int t = 0; t < num; t++) {
                    const int8_t *four = codes + t * row_bytes + 4 * i;
                    high[t] = dot(dot(high[t], first16, four), last16, four + 16);
                    if (is_fine) low[t] = dot(dot(low[t], first16, four + GROUP), last16, four + GROUP + 16);
                }
            }
            w += 256;
        } else {
            UNROLL for (int i = 0; i < 8; i++) {
                __m512i all = _mm512_loadu_si512(w + 64 * i);
                UNROLL for (int t = 0; t < num; t++) {
                    const int8_t *four = codes + t * row_bytes + 4 * i;
                    high[t] = dot(high[t], all, four);
                    low[t] = dot(low[t], all, four + GROUP);
                }
            }
            w += 512;
        }
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
        w += 32;
        UNROLL for (int t = 0; t < num; t++) {
            __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x->scales[(first + t) * num_groups + g]));
            __m512i total = is_fine ? _mm512_add_epi32(_mm512_slli_epi32(high[t], 7), low[t]) : high[t];
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), factor, acc[t]);
        }
        if (is_int4) {
            __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
            w += 32;
            UNROLL for (int t = 0; t < num; t++)
                acc[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x->sums[(first + t) * num_groups + g]), acc[t]);
        }
    }
    UNROLL for (int t = 0; t < num; t++) out[t] = (f32)acc[t];
}
#else
// Sums of products of two pairs each: 16 bits hold them for eight vectors of 4-bit codes, and for one of 8-bit ones.
INLINE __m256i dot(__m256i codes, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_maddubs_epi16(codes, _mm256_set1_epi32(four));
}

// Ends a sum here: GCC would sum up in another order, for which it holds more products than there are registers.
#define KEEP_ORDER(total) __asm__("" : "+x"(total))

INLINE __m256i add(__m256i total, __m256i products) {
    total = _mm256_add_epi16(total, products);
    KEEP_ORDER(total);
    return total;
}

INLINE __m256i signed_dot(__m256i codes, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(four), w));
}

INLINE void tile(const uint8_t *w, const int is_int4, const int is_fine, const struct Rows *x, long first, const int num,
                 f32 *out) {
    long num_groups = x->num_inputs / GROUP;
    const long row_bytes = (1 + is_fine) * x->num_inputs;
    const long group_bytes = is_int4 ? 320 : 544;
    const __m256i ones = _mm256_set1_epi16(1), worths = _mm256_set1_epi16(128), mask = _mm256_set1_epi8(15);
    UNROLL for (int half = 0; half < 2; half++) {
        __m256 acc[MAX_ROWS];
        UNROLL for (int t = 0; t < num; t++) acc[t] = _mm256_setzero_ps();
        for (long g = 0; g < num_groups; g++) {
            const uint8_t *p = w + g * group_bytes + 32 * half;
            // A tile is read twice: both times half of the next one is asked for, so that memory never waits for products.
            const uint8_t *next = w + num_groups * group_bytes + (half * num_groups + g) * (group_bytes / 2);
            UNROLL for (int i = 0; i < group_bytes / 2; i += 64) _mm_prefetch((const char *)next + i, _MM_HINT_T0);
            const int8_t *codes = x->codes + first * row_bytes + (1 + is_fine) * g * GROUP;
            __m256i high[MAX_ROWS], low[MAX_ROWS], total[MAX_ROWS];
            UNROLL for (int t = 0; t < num; t++) high[t] = low[t] = total[t] = _mm256_setzero_si256();
            if (is_int4) {
                UNROLL for (int i = 0; i < 4; i++) {
                    __m256i both = _mm256_loadu_si256((const __m256i *)(p + 64 * i));
                    __m256i first16 = _mm256_and_si256(both, mask), last16 = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
                    UNROLL for (int t = 0; t < num; t++) {
                        const int8_t *four = codes + t * row_bytes + 4 * i;
                        high[t] = add(add(high[t], dot(first16, four)), dot(last16, four + 16));
                        if (is_fine) low[t] = add(add(low[t], dot(first16, four + GROUP)), dot(last16, four + GROUP + 16));
                    }
                }
                UNROLL for (int t = 0; t < num; t++)
                    total[t] = is_fine ? _mm256_add_epi32(_mm256_madd_epi16(high[t], worths), _mm256_madd_epi16(low[t], ones))
                                       : _mm256_madd_epi16(high[t], ones);
            } else {
                UNROLL for (int i = 0; i < 8; i++) {
                    __m256i all = _mm256_loadu_si256((const __m256i *)(p + 64 * i));
                    UNROLL for (int t = 0; t < num; t++) {
                        const int8_t *four = codes + t * row_bytes + 4 * i;
                        total[t] = _mm256_add_epi32(total[t], _mm256_madd_epi16(signed_dot(all, four), worths));
                        total[t] = _mm256_add_epi32(total[t], _mm256_madd_epi16(signed_dot(all, four + GROUP), ones));
                        KEEP_ORDER(total[t]);
                    }
                }
            }
            const uint8_t *scales = w + g * group_bytes + (is_int4 ? 256 : 512) + 16 * half;
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
            UNROLL for (int t = 0; t < num; t++) {
                __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(x->scales[(first + t) * num_groups + g]));
                acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[t]), factor, acc[t]);
            }
            if (is_int4) {
                __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 32)));
                UNROLL for (int t = 0; t < num; t++)
                    acc[t] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x->sums[(first + t) * num_groups + g]), acc[t]);
            }
        }
        UNROLL for (int t = 0; t < num; t++) out[PARTS * t + half] = (f32)acc[t];
    }
}
#endif

// Inputs of 8-bit codes are always fine: coarse ones would lose more than the codes.
#define CASE(n)                                                       \
    case n:                                                           \
        if (!is_int4) tile(w, 0, 1, x, first, n, out);                \
        else if (x->is_fine) tile(w, 1, 1, x, first, n, out);         \
        else tile(w, 1, 0, x, first, n, out);                         \
        return;

static void tile_rows(const uint8_t *w, int is_int4, const struct Rows *x, long first, int num, f32 *out) {
    switch (num) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#ifdef __AVX512F__
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

// --- linear maps

struct Linear {
    const uint16_t *x;           // (T, I) bf16
    const void *norm;            // (I) bf16 or fp32; null: none
    const uint8_t *weight;       // tiles of (O, I)
    const uint16_t *bias;        // (O) bf16; null: none
    const uint16_t *residual;    // (T, O) bf16; null: none
    void *y;                     // (T, O), with a gate (T, O/2): bf16 or fp32
    long num_rows, num_inputs, num_outputs;
    int is_int4, is_fine, norm_is_fp32, out_is_fp32, has_gate, has_limit, num_threads;
    float eps, limit;
};

INLINE f32 finish(const struct Linear *a, f32 v, long t, long at) {
    if (a->bias) v += load_bf16(a->bias + at);
    if (a->residual) v += load_bf16(a->residual + t * a->num_outputs + at);
    return v;
}

INLINE f32 gated(const struct Linear *a, f32 gate, f32 up) {
    f32 y = gate / (1.0f + exponential(-gate));
    if (a->has_limit) {
        y = smaller(y, a->limit);
        up = larger(smaller(up, a->limit), -a->limit);
    }
    return y * up;
}

void linear(const struct Linear *a) {
    long T = a->num_rows, I = a->num_inputs, num_groups = I / GROUP;
    long width = a->has_gate ? a->num_outputs / 2 : a->num_outputs, num_tiles = width / TILE;
    long tile_bytes = num_groups * (a->is_int4 ? 320 : 544);
    size_t row_set_bytes = (size_t)T * (size_t)(2 * I + 12 * num_groups);
    int is_own = T <= MAX_OWN_ROWS;
    char *scratch = malloc(row_set_bytes * (size_t)(is_own ? a->num_threads : 1));
    long next_row = 0, next_tile = 0, step = num_tiles / (8 * a->num_threads);
    if (step < 1) step = 1;
#pragma omp parallel num_threads(a->num_threads)
    {
        float wide[I];
        struct Rows rows = {.num_inputs = I, .is_fine = a->is_fine};
        rows.scales = (float *)(scratch + (is_own ? row_set_bytes * (size_t)omp_get_thread_num() : 0));
        rows.sums = rows.scales + T * num_groups;
        rows.offsets = (int32_t *)(rows.sums + T * num_groups);
        rows.codes = (int8_t *)(rows.offsets + T * num_groups);
        if (is_own) {
            for (long t = 0; t < T; t++) read_row(a->x, a->norm, a->norm_is_fp32, a->eps, &rows, t, wide);
        } else {
            for (long t; (t = __atomic_fetch_add(&next_row, 1, __ATOMIC_RELAXED)) < T;)
                read_row(a->x, a->norm, a->norm_is_fp32, a->eps, &rows, t, wide);
#pragma omp barrier
        }
        for (long start; (start = __atomic_fetch_add(&next_tile, step, __ATOMIC_RELAXED)) < num_tiles;) {
            long end = start + step < num_tiles ? start + step : num_tiles;
            for (long o = start; o < end; o++) {
                const uint8_t *w = a->weight + o * tile_bytes;
                for (long t = 0; t < T; t += MAX_ROWS) {
                    int num = T - t < MAX_ROWS ? (int)(T - t) : MAX_ROWS;
                    f32 out[MAX_ROWS * PARTS], up[MAX_ROWS * PARTS];
                    tile_rows(w, a->is_int4, &rows, t, num, out);
                    if (a->has_gate) tile_rows(w + num_tiles * tile_bytes, a->is_int4, &rows, t, num, up);
                    for (int i = 0; i < num * PARTS; i++) {
                        long row = t + i / PARTS, output = o * TILE + i % PARTS * LANES, at = row * width + output;
                        f32 v = finish(a, out[i], row, output);
                        if (a->has_gate) v = gated(a, v, up[i]);
                        if (a->out_is_fp32) store_f32((float *)a->y + at, v);
                        else store_bf16((uint16_t *)a->y + at, v);
                    }
                }
            }
        }
    }
    free(scratch);
}

// --- attention

struct Attention {
    const uint16_t *qkv;              // (T, H + 2 G, K) bf16
    uint16_t *k_cache, *v_cache;      // (G, S, K) bf16
    const float *cos, *sin;           // (N, K/2)
    const uint16_t *q_norm, *k_norm;  // (K) bf16; null: none
    uint16_t *out;                    // (T, H, K) bf16
    long num_rows, num_heads, num_kv_heads, head_dim, context_len, capacity;
    float eps;
    int num_threads;
};

// Normalises a head where there is a norm, and turns it by the angles of its position.
INLINE void turn(const struct Attention *a, const uint16_t *x, const uint16_t *norm, long position, float *y) {
    long K = a->head_dim;
    f32 squares = {};
    for (long i = 0; i < K; i += LANES) {
        f32 v = load_bf16(x + i);
        squares += v * v;
        store_f32(y + i, v);
    }
    if (norm) {
        float factor = 1 / __builtin_sqrtf(sum(squares) / (float)K + a->eps);
        for (long i = 0; i < K; i += LANES) store_f32(y + i, load_f32(y + i) * factor * load_bf16(norm + i));
    }
    const float *cos = a->cos + position * (K / 2), *sin = a->sin + position * (K / 2);
    for (long i = 0; i < K / 2; i += LANES) {
        f32 p = load_f32(y + i), q = load_f32(y + K / 2 + i), c = load_f32(cos + i), s = load_f32(sin + i);
        store_f32(y + i, p * c - q * s);
        store_f32(y + K / 2 + i, q * c + p * s);
    }
}

// One query against every position up to its own, in blocks whose ends do not depend on the step.
INLINE void attend(const struct Attention *a, long t, long h, const long K) {
    long g = h / (a->num_heads / a->num_kv_heads), num_seen = a->context_len + t + 1;
    const uint16_t *keys = a->k_cache + g * a->capacity * K, *values = a->v_cache + g * a->capacity * K;
    float wide[MAX_HEAD_DIM];
    turn(a, a->qkv + (t * (a->num_heads + 2 * a->num_kv_heads) + h) * K, a->q_norm, a->context_len + t, wide);
    f32 q[MAX_HEAD_DIM / LANES], acc[MAX_HEAD_DIM / LANES];
    float scale = 1 / __builtin_sqrtf((float)K), most = -__builtin_inff(), total = 0;
    UNROLL for (long i = 0; i < K / LANES; i++) {
        q[i] = load_f32(wide + LANES * i) * scale;
        acc[i] = (f32){};
    }
    for (long start = 0; start < num_seen; start += ATTENTION_BLOCK) {
        long num = num_seen - start < ATTENTION_BLOCK ? num_seen - start : ATTENTION_BLOCK;
        float scores[ATTENTION_BLOCK];
        float new_most = most;
        for (long s = 0; s < num; s++) {
            const uint16_t *k = keys + (start + s) * K;
            f32 products = {};
            UNROLL for (long i = 0; i < K / LANES; i++) products += q[i] * load_bf16(k + LANES * i);
            scores[s] = sum(products);
            new_most = scores[s] > new_most ? scores[s] : new_most;
        }
        for (long s = num; s < ATTENTION_BLOCK; s++) scores[s] = -__builtin_inff();
        f32 sums = {};
        for (long s = 0; s < ATTENTION_BLOCK; s += LANES) {
            f32 p = exponential(load_f32(scores + s) - new_most);
            store_f32(scores + s, p);
            sums += p;
        }
        float rescale = start ? exponential((f32){} + (most - new_most))[0] : 0;
        UNROLL for (long i = 0; i < K / LANES; i++) acc[i] *= rescale;
        for (long s = 0; s < num; s++)
            UNROLL for (long i = 0; i < K / LANES; i++) acc[i] += scores[s] * load_bf16(values + (start + s) * K + LANES * i);
        total = total * rescale + sum(sums);
        most = new_most;
    }
    uint16_t *out = a->out + (t * a->num_heads + h) * K;
    UNROLL for (long i = 0; i < K / LANES; i++) store_bf16(out + LANES * i, acc[i] / total);
}

// Puts key and value of a row into the cache.
static void write_row(const struct Attention *a, long t, long g) {
    long H = a->num_heads, G = a->num_kv_heads, K = a->head_dim, position = a->context_len + t;
    const uint16_t *row = a->qkv + t * (H + 2 * G) * K;
    float wide[MAX_HEAD_DIM];
    turn(a, row + (H + g) * K, a->k_norm, position, wide);
    uint16_t *k = a->k_cache + (g * a->capacity + position) * K;
    for (long i = 0; i < K; i += LANES) store_bf16(k + i, load_f32(wide + i));
    memcpy(a->v_cache + (g * a->capacity + position) * K, row + (H + G + g) * K, (size_t)K * 2);
}

void attention(const struct Attention *a) {
    long T = a->num_rows, H = a->num_heads, G = a->num_kv_heads, K = a->head_dim;
    long next_row = 0, next_query = 0;
#pragma omp parallel num_threads(a->num_threads)
    {
        if (T <= MAX_OWN_ROWS) {
            // All threads write the same bytes, and each reads its own.
            for (long i = 0; i < T * G; i++) write_row(a, i / G, i % G);
        } else {
            for (long i; (i = __atomic_fetch_add(&next_row, 1, __ATOMIC_RELAXED)) < T * G;) write_row(a, i / G, i % G);
#pragma omp barrier
        }
        for (long i; (i = __atomic_fetch_add(&next_query, 1, __ATOMIC_RELAXED)) < T * H;) {
            if (K == 64) attend(a, i / H, i % H, 64);
            else if (K == 128) attend(a, i / H, i % H, 128);
            else attend(a, i / H, i % H, K);
        }
    }
}
