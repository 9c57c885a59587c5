/* Causal attention by tiles (tiles.h): 32 queries of a head at a time with all keys up to theirs, so that scores stay
   in the cache and no copy stands between the products (Dao et al. 2022). Nothing is kept for backward. */

#include "tiles.h"
#include <math.h>
#include <string.h>

/* Sizes and, as [batch, head, token] with numbers that lie in a row, q, k, v, then out, or its gradient and those of
   the three. */
typedef struct {
    size batch, groups, per_group, tokens, dim;
    struct { void *x; size batch, head, token; } of[7];
    float scale;
} task;
enum { Q, K, V, OUT, DQ, DK, DV };

#define NEW(numbers, type) aligned_alloc(64, up((numbers) * (size)sizeof(type), 64) * 64)
#define ROW(of, r) ((of) + (r) / 16 * 512 + (r) % 16 * 16) /* in a block of four tiles, its first half */
#define EXP(x) ((__m512)exp_((vf)(x)))

INLINE void *find(const task *t, int which, size b, size head, size token, int half) {
    return (void *)at(t->of[which].x,
                      b * t->of[which].batch + head * t->of[which].head + token * t->of[which].token, half);
}
INLINE void put(void *to, __m512 y, uint32_t lanes, int half) {
    if (half) _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(y));
    else _mm512_mask_storeu_ps(to, lanes, y);
}
/* rows [m, 32 of dim] = sums, row r times factors[r] */
INLINE void put_rows(void *to, size stride, size m, size n, const float *sums, const float *factors, int half) {
    for (size r = 0; r < m; r++) {
        __m512 f = _mm512_set1_ps(factors ? factors[r] : 1.0f);
        put((void *)at(to, r * stride, half), _mm512_load_ps(ROW(sums, r)) * f, mask(n), half);
        put((void *)at(to, r * stride + 16, half), _mm512_load_ps(ROW(sums, r) + 256) * f, mask(n - 16), half);
    }
}
/* A row of 32 numbers of tiles of A, or two rows of 16 as a row of one of W. */
INLINE void put_tile(uint16_t *to, __m512 a, __m512 b, int of_w, int half) {
    for (int p = 0; p < parts(half); p++) {
        bits h = next_part(&a, &b);
        _mm512_store_si512(to + p * TILE, of_w ? pairs(low(h), high(h)) : h);
    }
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
INLINE float probabilities(const float *x, size n, float scale, uint16_t *out, int half) {
    const __m512 none = _mm512_set1_ps(-INFINITY), m = largest(x, n);
    __m512 sum = _mm512_setzero_ps();
    for (size j = 0; j < n; j += SIDE, out += parts(half) * TILE) {
        __m512 a = EXP((_mm512_mask_loadu_ps(none, mask(n - j), x + j * SIDE) - m) * scale);
        __m512 b = EXP((_mm512_mask_loadu_ps(none, mask(n - j - 16), x + j * SIDE + 256) - m) * scale);
        sum += a + b;
        put_tile(out, a, b, 0, half);
    }
    return _mm512_reduce_add_ps(sum);
}
INLINE void forward(const task *t, size b, size group, int half) {
    size d = t->dim, s = t->tokens, one = parts(half) * TILE, wide = up(d, SIDE) * one, deep = up(s, SIDE) * one;
    uint16_t *keys = NEW(up(s, SIDE) * 2 * wide, uint16_t), *values = NEW(up(d, SIDE) * 2 * deep, uint16_t);
    uint16_t *query = NEW(2 * wide, uint16_t), *p = NEW(2 * deep, uint16_t);
    float *scores = NEW(up(s, SIDE) * 1024, float), factors[SIDE], sums[1024] __attribute__((aligned(64)));
    pack_rows((matrix){find(t, K, b, group, 0, half), t->of[K].token, 1}, s, d, 1, half, keys, wide);
    pack_rows((matrix){find(t, V, b, group, 0, half), 1, t->of[V].token}, d, s, 1, half, values, deep);
    for (size head = group * t->per_group; head < (group + 1) * t->per_group; head++)
        for (size i = 0; i < s; i += SIDE) {
            size rows = least(SIDE, s - i), blocks = i / SIDE + 1;
            pack_rows((matrix){find(t, Q, b, head, i, half), t->of[Q].token, 1}, rows, d, 0, half, query, wide);
            for (size j = 0; j < blocks; j++)
                multiply(query, wide, keys + 2 * j * wide, wide, up(d, SIDE), scores + j * 1024, 0, half);
            for (size r = 0; r < rows; r++) {
                uint16_t *to = p + r / 16 * deep + r % 16 * 32;
                factors[r] = 1.0f / probabilities(ROW(scores, r), i + r + 1, t->scale, to, half);
            }
            for (size j = 0; j < d; j += SIDE) {
                multiply(p, deep, values + j / 16 * deep, deep, blocks, sums, 0, half);
                put_rows((void *)at(find(t, OUT, b, head, i, half), j, half), t->of[OUT].token, rows, d - j, sums,
                         factors, half);
            }
        }
    free(keys), free(values), free(query), free(p), free(scores);
}
/* Of n scores x and gradients dp of probabilities p in a row of blocks: p in the place of x, p (dp - sum p dp) scale of
   dp, zeros behind. */
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
INLINE void put_turned(void *to, size stride, size d, size s, const float *sums, int half) {
    for (size c = 0; c < d; c += 16)
        for (size k = 0; k < s; k += 16) {
            bits t[16];
            const float *from = sums + (c / SIDE * up(s, SIDE) + k / SIDE) * 1024 + c / 16 % 2 * 512 + k / 16 % 2 * 256;
            for (int v = 0; v < 16; v++) t[v] = _mm512_load_si512(from + 16 * v);
            turn(t);
            for (int v = 0; v < 16; v++)
                if (k + v < s) put((void *)at(to, (k + v) * stride + c, half), (__m512)t[v], mask(least(16, d - c)),
                                   half);
        }
}
INLINE void backward(const task *t, size b, size group, int half) {
    size d = t->dim, s = t->tokens, one = parts(half) * TILE, wide = up(d, SIDE) * one, deep = up(s, SIDE) * one;
    size across = up(s, SIDE), all = up(d, SIDE) * across * 1024;
    uint16_t *keys = NEW(across * 2 * wide, uint16_t), *values = NEW(across * 2 * wide, uint16_t);
    uint16_t *turned = NEW(up(d, SIDE) * 2 * deep, uint16_t), *rows_ds = NEW(2 * deep, uint16_t);
    uint16_t *p = NEW(2 * deep, uint16_t), *ds = NEW(2 * deep, uint16_t);
    uint16_t *query = NEW(2 * wide, uint16_t), *grad = NEW(2 * wide, uint16_t);
    uint16_t *query_t = NEW(2 * wide, uint16_t), *grad_t = NEW(2 * wide, uint16_t);
    float *scores = NEW(across * 1024, float), *dp = NEW(across * 1024, float), sums[1024] __attribute__((aligned(64)));
    float *dk = NEW(all, float), *dv = NEW(all, float);
    memset(dk, 0, all * 4), memset(dv, 0, all * 4);
    pack_rows((matrix){find(t, K, b, group, 0, half), t->of[K].token, 1}, s, d, 1, half, keys, wide);
    pack_rows((matrix){find(t, K, b, group, 0, half), 1, t->of[K].token}, d, s, 1, half, turned, deep);
    pack_rows((matrix){find(t, V, b, group, 0, half), t->of[V].token, 1}, s, d, 1, half, values, wide);
    for (size head = group * t->per_group; head < (group + 1) * t->per_group; head++)
        for (size i = 0; i < s; i += SIDE) {
            size rows = least(SIDE, s - i), blocks = i / SIDE + 1;
            pack_rows((matrix){find(t, Q, b, head, i, half), t->of[Q].token, 1}, rows, d, 0, half, query, wide);
            pack_rows((matrix){find(t, OUT, b, head, i, half), t->of[OUT].token, 1}, rows, d, 0, half, grad, wide);
            pack_rows((matrix){find(t, Q, b, head, i, half), 1, t->of[Q].token}, d, rows, 0, half, query_t, one);
            pack_rows((matrix){find(t, OUT, b, head, i, half), 1, t->of[OUT].token}, d, rows, 0, half, grad_t, one);
            for (size j = 0; j < blocks; j++) {
                multiply(query, wide, keys + 2 * j * wide, wide, up(d, SIDE), scores + j * 1024, 0, half);
                multiply(grad, wide, values + 2 * j * wide, wide, up(d, SIDE), dp + j * 1024, 0, half);
            }
            for (size r = 0; r < SIDE; r++)
                gradients(ROW(scores, r), ROW(dp, r), r < rows ? i + r + 1 : 0, blocks * SIDE, t->scale);
            for (size r = 0; r < SIDE; r += 2)
                for (size j = 0; j < 2 * blocks; j++) {
                    size to = j / 2 * 1024 + j % 2 * 256;
                    float *x = ROW(scores, r) + to, *y = ROW(dp, r) + to;
                    put_tile(p + j * one + r / 2 * 32, _mm512_load_ps(x), _mm512_load_ps(x + 16), 1, half);
                    put_tile(ds + j * one + r / 2 * 32, _mm512_load_ps(y), _mm512_load_ps(y + 16), 1, half);
                    y = ROW(dp, r + j % 2) + j / 2 * 1024;
                    put_tile(rows_ds + r / 16 * deep + j / 2 * one + (r + j % 2) % 16 * 32, _mm512_load_ps(y),
                             _mm512_load_ps(y + 256), 0, half);
                }
            for (size j = 0; j < d; j += SIDE) {
                multiply(rows_ds, deep, turned + j / 16 * deep, deep, blocks, sums, 0, half);
                put_rows((void *)at(find(t, DQ, b, head, i, half), j, half), t->of[DQ].token, rows, d - j, sums, 0,
                         half);
                for (size k = 0; k < blocks; k++) {
                    size to = (j / SIDE * across + k) * 1024;
                    multiply(grad_t + j / 16 * one, one, p + 2 * k * one, one, 1, dv + to, 1, half);
                    multiply(query_t + j / 16 * one, one, ds + 2 * k * one, one, 1, dk + to, 1, half);
                }
            }
        }
    put_turned(find(t, DK, b, group, 0, half), t->of[DK].token, d, s, dk, half);
    put_turned(find(t, DV, b, group, 0, half), t->of[DV].token, d, s, dv, half);
    free(keys), free(values), free(turned), free(rows_ds), free(p), free(ds), free(query), free(grad), free(query_t);
    free(grad_t), free(scores), free(dp), free(dk), free(dv);
}
#define ALL_GROUPS(pass) \
    _Pragma("omp parallel") { \
        _tile_loadconfig(&shape); \
        FOR_EACH for (size n = 0; n < t->batch * t->groups; n++) \
            if (half) pass(t, n / t->groups, n % t->groups, 1); \
            else pass(t, n / t->groups, n % t->groups, 0); \
        _tile_release(); \
    }
void attention(const task *t, size half) { ALL_GROUPS(forward) }
void attention_backward(const task *t, size half) { ALL_GROUPS(backward) }
