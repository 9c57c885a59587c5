/* Operands and products of a processor's tiles (AMX), of bf16, or of float32 in three parts each.

   A float32 number is the sum of three of bf16, a = a1 + a2 + a3, 24 bits in 3 x 8. Of the nine products six are made:
   what is left out is below 2^-24 of the whole (Henry, Tang, Heinecke 2019). Sums are float32. Operands are laid out anew as
   tiles of 1 KiB. */

#if !defined __AMX_BF16__ || !defined __AVX512BF16__
#error "for processors with tiles alone"
#endif
#include "exp.h"
#include <stdlib.h>

#define UNROLL _Pragma("GCC unroll 16")
#define FOR_EACH _Pragma("omp for schedule(static)")
#define TILE 512 /* numbers of a tile: 16 rows of 16 pairs */
#define SIDE 32  /* rows and columns of a block of 2 x 2 tiles */
typedef int64_t size;
typedef __m512i bits;
typedef struct { const void *x; size row, step; } matrix; /* [rows, k]; one of the two strides is 1 */

INLINE size parts(int half) { return half ? 1 : 3; }
INLINE const void *at(const void *x, size i, int half) { return (const char *)x + i * (half ? 2 : 4); }

INLINE size least(size a, size b) { return a < b ? a : b; }
INLINE size up(size n, size d) { return (n + d - 1) / d; }
INLINE uint32_t mask(size n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }
INLINE __m512 wide(__m256i h) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }
INLINE __m256i low(bits x) { return _mm512_castsi512_si256(x); }
INLINE __m256i high(bits x) { return _mm512_extracti64x4_epi64(x, 1); }
INLINE bits pairs(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

/* The 32 numbers of a and b in bf16, and what is left of them */
INLINE bits next_part(__m512 *a, __m512 *b) {
    bits h = (bits)_mm512_cvtne2ps_pbh(*b, *a);
    *a -= wide(low(h)), *b -= wide(high(h));
    return h;
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
/* The tiles of the first n of 16 rows and the first k of 32 numbers of them, zeros behind. A tile of A has a row per row,
   one of W a row per pair of numbers. Rows or columns lie in a row, `stride` from each other. */
INLINE void pack(const void *from, size stride, int by_row, size n, size k, int of_w, int half, uint16_t *out) {
    bits t[3][16];
    for (int v = 0; v < 16; v++) {
        const void *x = at(from, v * (by_row ? stride : 2 * stride), half), *y = at(x, by_row ? 16 : stride, half);
        uint32_t one = by_row ? v < n ? mask(k) : 0 : 2 * v < k ? mask(n) : 0;
        uint32_t two = by_row ? one >> 16 : 2 * v + 1 < k ? mask(n) : 0;
        if (half) {
            t[0][v] = by_row ? _mm512_maskz_loadu_epi16(one, x)
                             : pairs(_mm256_maskz_loadu_epi16(one, x), _mm256_maskz_loadu_epi16(two, y));
            continue;
        }
        __m512 a = _mm512_maskz_loadu_ps(one, x), b = _mm512_maskz_loadu_ps(two, y);
        UNROLL for (int p = 0; p < 3; p++) {
            bits h = next_part(&a, &b);
            t[p][v] = by_row ? h : pairs(low(h), high(h));
        }
    }
    for (int p = 0; p < parts(half); p++) {
        if (by_row == of_w) turn(t[p]);
        for (int v = 0; v < 16; v++) _mm512_store_si512(out + p * TILE + 32 * v, t[p][v]);
    }
}
/* n rows and k numbers of each -> tiles; those of 16 rows lie in a row, `line` numbers long */
static void pack_rows(matrix of, size n, size k, int of_w, int half, uint16_t *out, size line) {
    for (size j = 0; j < k; j += SIDE, out += parts(half) * TILE)
        for (size i = 0; i < n; i += 16) {
            const void *x = at(of.x, i * of.row + j * of.step, half);
            uint16_t *to = out + i / 16 * line;
            if (half && of.step == 1) pack(x, of.row, 1, n - i, k - j, of_w, 1, to);
            else if (half) pack(x, of.step, 0, n - i, k - j, of_w, 1, to);
            else if (of.step == 1) pack(x, of.row, 1, n - i, k - j, of_w, 0, to);
            else pack(x, of.step, 0, n - i, k - j, of_w, 0, to);
        }
}

#define LOAD_A(p) _tile_loadd(4, a + (p) * TILE, 64); _tile_loadd(5, a + a_line + (p) * TILE, 64);
#define LOAD_W(p) _tile_loadd(6, w + (p) * TILE, 64); _tile_loadd(7, w + w_line + (p) * TILE, 64);
#define MULTIPLY \
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
#define MEMORY_IS_AS_WRITTEN __asm__ volatile("" ::: "memory") /* gcc 12 does not see that tiles are read from there */
/* four tiles of sums = or += two rows of tiles of A times two of W, of that many tiles; small products first */
INLINE void multiply(const uint16_t *a, size a_line, const uint16_t *w, size w_line, size tiles, float *sums, int add,
                     int half) {
    size step = parts(half) * TILE;
    MEMORY_IS_AS_WRITTEN;
    if (add) {
        _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (size t = 0; t < tiles; t++, a += step, w += step)
        if (half) {
            LOAD_A(0) LOAD_W(0) MULTIPLY
        } else {
            LOAD_A(2) LOAD_W(0) MULTIPLY
            LOAD_A(1) MULTIPLY
            LOAD_W(1) MULTIPLY
            LOAD_A(0) MULTIPLY
            LOAD_W(2) MULTIPLY
            LOAD_W(0) MULTIPLY
        }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
    MEMORY_IS_AS_WRITTEN;
}

static const struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape =
    {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
