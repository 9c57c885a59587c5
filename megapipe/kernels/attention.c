/* Causal attention of bf16 by a processor's tiles (AMX): 32 queries of a head at a time with all keys up to theirs, so
   that scores stay in the cache and no copy stands between the products (Dao et al. 2022). Nothing is kept for
   backward. Sums are float32. Operands are laid out anew as tiles of 1 KiB. */

#if !defined __AMX_BF16__ || !defined __AVX512BF16__
#error "for processors with tiles alone"
#endif
#include "exp.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UNROLL _Pragma("GCC unroll 16")
#define FOR_EACH _Pragma("omp for schedule(static)")
#define TILE 512 /* numbers of a tile: 16 rows of 16 pairs */
#define SIDE 32  /* rows and columns of a block of 2 x 2 tiles */
typedef __m512i bits;
typedef uint16_t half; /* the bits of a bf16 number */
typedef struct { const half *x; size row, step; } matrix; /* [rows, k]; one of the two strides is 1 */

INLINE size up(size n, size d) { return (n + d - 1) / d; }
INLINE uint32_t mask(size n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }
INLINE __m256i low(bits x) { return _mm512_castsi512_si256(x); }
INLINE __m256i high(bits x) { return _mm512_extracti64x4_epi64(x, 1); }
INLINE bits pairs(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

/* 16 x 16 numbers of 32 bits transposed: squares of 1, 2, 4, 8 change places */
static __attribute__((noinline)) void turn(bits *t) {
    bits lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    UNROLL for (int s = 1; s < 16; s *= 2) {
        __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
        bits first = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(16 - s));
        bits second = _mm512_add_epi32(lane, _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(s), _mm512_set1_epi32(16)));
        UNROLL for (int i = 0; i < 16; i++)
            if (!(i & s)) {
                bits a = t[i], b = t[i | s];
                t[i] = _mm512_permutex2var_epi32(a, first, b);
                t[i | s] = _mm512_permutex2var_epi32(a, second, b);
            }
    }
}
/* The tile of the first n of 16 rows and the first k of 32 numbers of them, then zeros. A tile of A has a row per row,
   one of W a row per pair of numbers. Rows or columns lie in a row, `stride` from each other. */
INLINE void pack(const half *from, size stride, int by_row, size n, size k, int of_w, half *out) {
    bits t[16];
    for (int v = 0; v < 16; v++) {
        const half *x = from + v * (by_row ? stride : 2 * stride);
        if (by_row) t[v] = _mm512_maskz_loadu_epi16(v < n ? mask(k) : 0, x);
        else
            t[v] = pairs(_mm256_maskz_loadu_epi16(2 * v < k ? mask(n) : 0, x),
                         _mm256_maskz_loadu_epi16(2 * v + 1 < k ? mask(n) : 0, x + stride));
    }
    if (by_row == of_w) turn(t);
    for (int v = 0; v < 16; v++) _mm512_store_si512(out + 32 * v, t[v]);
}
/* n rows and k numbers of each -> tiles; those of 16 rows lie in a row, `line` numbers long */
static void pack_rows(matrix of, size n, size k, int of_w, half *out, size line) {
    for (size j = 0; j < k; j += SIDE, out += TILE)
        for (size i = 0; i < n; i += 16) {
            const half *x = of.x + i * of.row + j * of.step;
            half *to = out + i / 16 * line;
            if (of.step == 1) pack(x, of.row, 1, n - i, k - j, of_w, to);
            else pack(x, of.step, 0, n - i, k - j, of_w, to);
        }
}

#define MEMORY_IS_AS_WRITTEN __asm__ volatile("" ::: "memory") /* gcc 12 does not see that tiles are read from there */
/* four tiles of sums = or += two rows of tiles of A times two of W, of that many tiles */
INLINE void multiply(const half *a, size a_line, const half *w, size w_line, size tiles, float *sums, int add) {
    MEMORY_IS_AS_WRITTEN;
    if (add) {
        _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (size t = 0; t < tiles; t++, a += TILE, w += TILE) {
        _tile_loadd(4, a, 64); _tile_loadd(5, a + a_line, 64);
        _tile_loadd(6, w, 64); _tile_loadd(7, w + w_line, 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
    MEMORY_IS_AS_WRITTEN;
}

static const struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape =
    {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* May this process use tiles? Linux lends them to those that ask. */
int tiles_allowed(void) { return !syscall(SYS_arch_prctl, 0x1023, 18); }

/* Sizes and, as [batch, head, token] with numbers that lie in a row, q, k, v, then out, or its gradient and those of
   the three. */
typedef struct {
    size batch, groups, per_group, tokens, dim;
    struct { half *x; size batch, head, token; } of[7];
    float scale;
} task;
enum { Q, K, V, OUT, DQ, DK, DV };

#define NEW(numbers, type) aligned_alloc(64, up((numbers) * (size)sizeof(type), 64) * 64)
#define ROW(of, r) ((of) + (r) / 16 * 512 + (r) % 16 * 16) /* in a block of four tiles, its first half */
#define EXP(x) ((__m512)exp_((vf)(x)))

INLINE half *find(const task *t, int which, size b, size head, size token) {
    return t->of[which].x + b * t->of[which].batch + head * t->of[which].head + token * t->of[which].token;
}
INLINE void put(half *to, __m512 y, uint32_t lanes) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(y));
}
/* rows [m, 32 of dim] = sums, row r times factors[r] */
INLINE void put_rows(half *to, size stride, size m, size n, const float *sums, const float *factors) {
    for (size r = 0; r < m; r++) {
        __m512 f = _mm512_set1_ps(factors ? factors[r] : 1.0f);
        put(to + r * stride, _mm512_load_ps(ROW(sums, r)) * f, mask(n));
        put(to + r * stride + 16, _mm512_load_ps(ROW(sums, r) + 256) * f, mask(n - 16));
    }
}
/* A row of 32 numbers of a tile of A, or two rows of 16 as a row of one of W. */
INLINE void put_tile(half *to, __m512 a, __m512 b, int of_w) {
    bits h = (bits)_mm512_cvtne2ps_pbh(b, a);
    _mm512_store_si512(to, of_w ? pairs(low(h), high(h)) : h);
}
/* the largest of the first n scores of a row of blocks */
INLINE __m512 largest(const float *x, size n) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 m = none;
    for (size j = 0; j < n; j += SIDE) {
        m = _mm512_max_ps(_mm512_mask_loadu_ps(none, mask(n - j), x + j * SIDE), m);
        m = _mm512_max_ps(_mm512_mask_loadu_ps(none, mask(n - j - 16), x + j * SIDE + 256), m);
    }
    return _mm512_set1_ps(_mm512_reduce_max_ps(m));
}
/* e^(scale (x - max)) of the first n scores of a row of blocks, as a row of tiles of A; returns their sum */
INLINE float probabilities(const float *x, size n, float scale, half *out) {
    const __m512 none = _mm512_set1_ps(-INFINITY), m = largest(x, n);
    __m512 sum = _mm512_setzero_ps();
    for (size j = 0; j < n; j += SIDE, out += TILE) {
        __m512 a = EXP((_mm512_mask_loadu_ps(none, mask(n - j), x + j * SIDE) - m) * scale);
        __m512 b = EXP((_mm512_mask_loadu_ps(none, mask(n - j - 16), x + j * SIDE + 256) - m) * scale);
        sum += a + b;
        put_tile(out, a, b, 0);
    }
    return _mm512_reduce_add_ps(sum);
}
INLINE void forward(const task *t, size b, size group) {
    size d = t->dim, s = t->tokens, wide = up(d, SIDE) * TILE, deep = up(s, SIDE) * TILE;
    half *keys = NEW(up(s, SIDE) * 2 * wide, half), *values = NEW(up(d, SIDE) * 2 * deep, half);
    half *query = NEW(2 * wide, half), *p = NEW(2 * deep, half);
    float *scores = NEW(up(s, SIDE) * 1024, float), factors[SIDE], sums[1024] __attribute__((aligned(64)));
    pack_rows((matrix){find(t, K, b, group, 0), t->of[K].token, 1}, s, d, 1, keys, wide);
    pack_rows((matrix){find(t, V, b, group, 0), 1, t->of[V].token}, d, s, 1, values, deep);
    for (size head = group * t->per_group; head < (group + 1) * t->per_group; head++)
        for (size i = 0; i < s; i += SIDE) {
            size rows = least(SIDE, s - i), blocks = i / SIDE + 1;
            pack_rows((matrix){find(t, Q, b, head, i), t->of[Q].token, 1}, rows, d, 0, query, wide);
            for (size j = 0; j < blocks; j++)
                multiply(query, wide, keys + 2 * j * wide, wide, up(d, SIDE), scores + j * 1024, 0);
            for (size r = 0; r < rows; r++) {
                half *to = p + r / 16 * deep + r % 16 * 32;
                factors[r] = 1.0f / probabilities(ROW(scores, r), i + r + 1, t->scale, to);
            }
            for (size j = 0; j < d; j += SIDE) {
                multiply(p, deep, values + j / 16 * deep, deep, blocks, sums, 0);
                put_rows(find(t, OUT, b, head, i) + j, t->of[OUT].token, rows, d - j, sums, factors);
            }
        }
    free(keys), free(values), free(query), free(p), free(scores);
}
/* Of n scores x and gradients dp of probabilities p in a row of blocks: p in the place of x, p (dp - sum p dp) scale of
   dp, then zeros. */
INLINE void gradients(float *x, float *dp, size n, size all, float scale) {
    __m512 sum = _mm512_setzero_ps(), both = sum, m = largest(x, n);
    for (size j = 0; j < all; j += 16) {
        size to = j / SIDE * 1024 + j % SIDE * 16;
        uint32_t lanes = mask(n - j);
        __m512 p = _mm512_maskz_mov_ps(lanes, EXP((_mm512_load_ps(x + to) - m) * scale));
        _mm512_store_ps(x + to, p);
        sum += p, both += _mm512_maskz_mul_ps(lanes, p, _mm512_load_ps(dp + to));
    }
    sum = _mm512_set1_ps(n ? 1.0f / _mm512_reduce_add_ps(sum) : 0.0f);
    both = _mm512_set1_ps(_mm512_reduce_add_ps(both)) * sum;
    for (size j = 0; j < all; j += 16) {
        size to = j / SIDE * 1024 + j % SIDE * 16;
        __m512 p = _mm512_load_ps(x + to) * sum, ds = p * ((_mm512_load_ps(dp + to) - both) * scale);
        _mm512_store_ps(x + to, p);
        _mm512_store_ps(dp + to, _mm512_maskz_mov_ps(mask(n - j), ds));
    }
}
/* sums of a gradient, [dim, tokens] in blocks of four tiles, turned */
INLINE void put_turned(half *to, size stride, size d, size s, const float *sums) {
    for (size c = 0; c < d; c += 16)
        for (size k = 0; k < s; k += 16) {
            bits t[16];
            const float *from = sums + (c / SIDE * up(s, SIDE) + k / SIDE) * 1024 + c / 16 % 2 * 512 + k / 16 % 2 * 256;
            for (int v = 0; v < 16; v++) t[v] = _mm512_load_si512(from + 16 * v);
            turn(t);
            for (int v = 0; v < 16; v++)
                if (k + v < s) put(to + (k + v) * stride + c, (__m512)t[v], mask(least(16, d - c)));
        }
}
INLINE void backward(const task *t, size b, size group) {
    size d = t->dim, s = t->tokens, wide = up(d, SIDE) * TILE, deep = up(s, SIDE) * TILE;
    size across = up(s, SIDE), all = up(d, SIDE) * across * 1024;
    half *keys = NEW(across * 2 * wide, half), *values = NEW(across * 2 * wide, half);
    half *turned = NEW(up(d, SIDE) * 2 * deep, half), *rows_ds = NEW(2 * deep, half);
    half *p = NEW(2 * deep, half), *ds = NEW(2 * deep, half);
    half *query = NEW(2 * wide, half), *grad = NEW(2 * wide, half);
    half *query_t = NEW(2 * wide, half), *grad_t = NEW(2 * wide, half);
    float *scores = NEW(across * 1024, float), *dp = NEW(across * 1024, float), sums[1024] __attribute__((aligned(64)));
    float *dk = NEW(all, float), *dv = NEW(all, float);
    memset(dk, 0, all * 4), memset(dv, 0, all * 4);
    pack_rows((matrix){find(t, K, b, group, 0), t->of[K].token, 1}, s, d, 1, keys, wide);
    pack_rows((matrix){find(t, K, b, group, 0), 1, t->of[K].token}, d, s, 1, turned, deep);
    pack_rows((matrix){find(t, V, b, group, 0), t->of[V].token, 1}, s, d, 1, values, wide);
    for (size head = group * t->per_group; head < (group + 1) * t->per_group; head++)
        for (size i = 0; i < s; i += SIDE) {
            size rows = least(SIDE, s - i), blocks = i / SIDE + 1;
            pack_rows((matrix){find(t, Q, b, head, i), t->of[Q].token, 1}, rows, d, 0, query, wide);
            pack_rows((matrix){find(t, OUT, b, head, i), t->of[OUT].token, 1}, rows, d, 0, grad, wide);
            pack_rows((matrix){find(t, Q, b, head, i), 1, t->of[Q].token}, d, rows, 0, query_t, TILE);
            pack_rows((matrix){find(t, OUT, b, head, i), 1, t->of[OUT].token}, d, rows, 0, grad_t, TILE);
            for (size j = 0; j < blocks; j++) {
                multiply(query, wide, keys + 2 * j * wide, wide, up(d, SIDE), scores + j * 1024, 0);
                multiply(grad, wide, values + 2 * j * wide, wide, up(d, SIDE), dp + j * 1024, 0);
            }
            for (size r = 0; r < SIDE; r++)
                gradients(ROW(scores, r), ROW(dp, r), r < rows ? i + r + 1 : 0, blocks * SIDE, t->scale);
            for (size r = 0; r < SIDE; r += 2)
                for (size j = 0; j < 2 * blocks; j++) {
                    size to = j / 2 * 1024 + j % 2 * 256;
                    float *x = ROW(scores, r) + to, *y = ROW(dp, r) + to;
                    put_tile(p + j * TILE + r / 2 * 32, _mm512_load_ps(x), _mm512_load_ps(x + 16), 1);
                    put_tile(ds + j * TILE + r / 2 * 32, _mm512_load_ps(y), _mm512_load_ps(y + 16), 1);
                    y = ROW(dp, r + j % 2) + j / 2 * 1024;
                    put_tile(rows_ds + r / 16 * deep + j / 2 * TILE + (r + j % 2) % 16 * 32, _mm512_load_ps(y),
                             _mm512_load_ps(y + 256), 0);
                }
            for (size j = 0; j < d; j += SIDE) {
                multiply(rows_ds, deep, turned + j / 16 * deep, deep, blocks, sums, 0);
                put_rows(find(t, DQ, b, head, i) + j, t->of[DQ].token, rows, d - j, sums, 0);
                for (size k = 0; k < blocks; k++) {
                    size to = (j / SIDE * across + k) * 1024;
                    multiply(grad_t + j / 16 * TILE, TILE, p + 2 * k * TILE, TILE, 1, dv + to, 1);
                    multiply(query_t + j / 16 * TILE, TILE, ds + 2 * k * TILE, TILE, 1, dk + to, 1);
                }
            }
        }
    put_turned(find(t, DK, b, group, 0), t->of[DK].token, d, s, dk);
    put_turned(find(t, DV, b, group, 0), t->of[DV].token, d, s, dv);
    free(keys), free(values), free(turned), free(rows_ds), free(p), free(ds), free(query), free(grad), free(query_t);
    free(grad_t), free(scores), free(dp), free(dk), free(dv);
}
#define ALL_GROUPS(pass) \
    _Pragma("omp parallel") { \
        _tile_loadconfig(&shape); \
        FOR_EACH for (size n = 0; n < t->batch * t->groups; n++) \
            pass(t, n / t->groups, n % t->groups); \
        _tile_release(); \
    }
void attention(const task *t) { ALL_GROUPS(forward) }
void attention_backward(const task *t) { ALL_GROUPS(backward) }
