/* Products of float32 matrices by a processor's tiles (AMX), which multiply bf16: C [m, n] = A [m, k] W [n, k]^T.

   A number is the sum of three of bf16, a = a1 + a2 + a3, 24 bits in 3 x 8. Of the nine products six are made: what is
   left out is below 2^-24 of the whole (Henry, Tang, Heinecke 2019). Sums are float32. Operands are laid out anew as tiles
   of 1 KiB: rows of W once for all rows of A, as many as stay in the cache. */

#if !defined __AMX_BF16__ || !defined __AVX512BF16__
#error "for processors with tiles alone"
#endif
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define FOR_EACH _Pragma("omp for schedule(static)")
#define TILE 512        /* numbers of a tile: 16 rows of 16 pairs */
#define TILES (3 * TILE) /* of the parts of the same numbers */
#define SIDE 32         /* rows and columns of a block of 2 x 2 tiles */
#define BAND 128        /* rows of A at a time: whole lines of it are read where its columns lie in a row */
#define DEEP 512        /* numbers of a row at a time */
#define PANEL (5 << 18) /* bytes of W at a time, of a cache of 2 MiB */
typedef int64_t size;
typedef __m512i vi;
typedef struct { const float *x; size row, step; } matrix; /* [rows, k]; one of the two strides is 1 */

INLINE size least(size a, size b) { return a < b ? a : b; }
INLINE size up(size n, size d) { return (n + d - 1) / d; }
INLINE uint32_t mask(size n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }
INLINE __m512 wide(__m256i h) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }
INLINE __m256i low(vi x) { return _mm512_castsi512_si256(x); }
INLINE __m256i high(vi x) { return _mm512_extracti64x4_epi64(x, 1); }
INLINE vi pairs(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

/* 16 x 16 numbers of 32 bits transposed: squares of 1, 2, 4, 8 change places */
INLINE void turn(vi *t) {
    vi lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    UNROLL for (int s = 1; s < 16; s *= 2) {
        __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
        vi first = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(16 - s));
        vi second = _mm512_add_epi32(lane, _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(s), _mm512_set1_epi32(16)));
        UNROLL for (int i = 0; i < 16; i++)
            if (!(i & s)) {
                vi a = t[i], b = t[i | s];
                t[i] = _mm512_permutex2var_epi32(a, first, b);
                t[i | s] = _mm512_permutex2var_epi32(a, second, b);
            }
    }
}
/* Three tiles of the first n of 16 rows and the first k of 32 numbers of them, zeros behind. A tile of A has a row per
   row, one of W a row per pair of numbers. Rows or columns lie in a row, `stride` from each other. */
INLINE void pack(const float *from, size stride, int by_row, size n, size k, int of_w, uint16_t *out) {
    vi t[3][16];
    UNROLL for (int v = 0; v < 16; v++) {
        const float *x = from + v * (by_row ? stride : 2 * stride);
        uint32_t one = by_row ? v < n ? mask(k) : 0 : 2 * v < k ? mask(n) : 0;
        uint32_t two = by_row ? one >> 16 : 2 * v + 1 < k ? mask(n) : 0;
        __m512 a = _mm512_maskz_loadu_ps(one, x), b = _mm512_maskz_loadu_ps(two, x + (by_row ? 16 : stride));
        UNROLL for (int p = 0; p < 3; p++) {
            vi h = (vi)_mm512_cvtne2ps_pbh(b, a);
            a -= wide(low(h)), b -= wide(high(h));
            t[p][v] = by_row ? h : pairs(low(h), high(h));
        }
    }
    for (int p = 0; p < 3; p++) {
        if (by_row == of_w) turn(t[p]);
        UNROLL for (int v = 0; v < 16; v++) _mm512_store_si512(out + p * TILE + 32 * v, t[p][v]);
    }
}
/* n rows and k numbers of each -> tiles; those of 16 rows lie in a row, `line` numbers long */
static void pack_rows(matrix of, size n, size k, int of_w, uint16_t *out, size line) {
    for (size j = 0; j < k; j += SIDE, out += TILES)
        for (size i = 0; i < n; i += 16) {
            const float *x = of.x + i * of.row + j * of.step;
            if (of.step == 1) pack(x, of.row, 1, n - i, k - j, of_w, out + i / 16 * line);
            else pack(x, of.step, 0, n - i, k - j, of_w, out + i / 16 * line);
        }
}

#define LOAD_A(p) _tile_loadd(4, a + (p) * TILE, 64); _tile_loadd(5, a + line + (p) * TILE, 64);
#define LOAD_W(p) _tile_loadd(6, w + (p) * TILE, 64); _tile_loadd(7, w + line + (p) * TILE, 64);
#define MULTIPLY \
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
#define MEMORY_IS_AS_WRITTEN __asm__ volatile("" ::: "memory") /* gcc 12 does not see that tiles are read from there */
/* four tiles of sums = two rows of tiles of A times two of W, small products first */
static void multiply(const uint16_t *a, const uint16_t *w, size line, float *sums) {
    MEMORY_IS_AS_WRITTEN;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (size t = 0; t < line; t += TILES, a += TILES, w += TILES) {
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
/* c [m, n] of at most 32 x 32 = or += sums + bias */
INLINE void finish(float *c, size stride, size m, size n, const float *sums, const float *bias, int add) {
    uint32_t lanes = mask(n), more = lanes >> 16;
    for (size r = 0; r < m; r++, c += stride, sums += r == 16 ? 272 : 16) {
        __m512 y = _mm512_load_ps(sums), z = _mm512_load_ps(sums + 256);
        if (add) y += _mm512_maskz_loadu_ps(lanes, c), z += _mm512_maskz_loadu_ps(more, c + 16);
        if (bias) y += _mm512_maskz_loadu_ps(lanes, bias), z += _mm512_maskz_loadu_ps(more, bias + 16);
        _mm512_mask_storeu_ps(c, lanes, y), _mm512_mask_storeu_ps(c + 16, more, z);
    }
}
/* c [m, n] of one band and panel; a block's sums leave for memory while the tiles make the next one's */
static void multiply_band(const uint16_t *band, const uint16_t *panel, size line, float *c, size stride, size m, size n,
                          const float *bias, int add) {
    float sums[2][SIDE * SIDE] __attribute__((aligned(64))), *before = 0;
    size across = up(n, SIDE), blocks = up(m, SIDE) * across, i0 = 0, j0 = 0;
    for (size b = 0; b <= blocks; b++) {
        size i = b / across * SIDE, j = b % across * SIDE;
        float *to = c + i * stride + j;
        if (b < blocks) {
            for (size r = 0; r < least(SIDE, m - i); r++)
                _m_prefetchw(to + r * stride), _m_prefetchw(to + r * stride + least(16, n - j - 1));
            multiply(band + i / 16 * line, panel + j / 16 * line, line, sums[b % 2]);
        }
        if (before)
            finish(before, stride, least(SIDE, m - i0), least(SIDE, n - j0), sums[(b + 1) % 2], bias ? bias + j0 : 0,
                   add);
        before = to, i0 = i, j0 = j;
    }
}

/* May this process use tiles? Linux lends them to those that ask. */
int tiles_allowed(void) { return !syscall(SYS_arch_prctl, 0x1023, 18); }

/* c [m, n], a row of it `stride` long, = a w^T + bias, or += that */
void product(const float *a, size a_row, size a_step, const float *w, size w_row, size w_step, float *c, size stride,
             size m, size n, size k, const float *bias, size add) {
    const struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape =
        {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    size deep = up(up(k, up(k, DEEP)), SIDE) * SIDE, wide = up(up(n, up(n, PANEL / 6 / deep)), SIDE) * SIDE;
    uint16_t *panel = aligned_alloc(64, wide * deep * 6);
    for (size k0 = 0; k0 < k; k0 += deep)
        for (size n0 = 0; n0 < n; n0 += wide) {
            size ks = least(deep, k - k0), ns = least(wide, n - n0), line = up(ks, SIDE) * TILES;
            _Pragma("omp parallel") {
                FOR_EACH for (size j = 0; j < ns; j += 16)
                    pack_rows((matrix){w + (n0 + j) * w_row + k0 * w_step, w_row, w_step}, least(16, ns - j), ks, 1,
                              panel + j / 16 * line, line);
                uint16_t *band = aligned_alloc(64, BAND / 16 * line * 2);
                _tile_loadconfig(&shape);
                FOR_EACH for (size i = 0; i < m; i += BAND) {
                    size ms = least(BAND, m - i);
                    pack_rows((matrix){a + i * a_row + k0 * a_step, a_row, a_step}, ms, ks, 0, band, line);
                    multiply_band(band, panel, line, c + i * stride + n0, stride, ms, ns, bias && !k0 ? bias + n0 : 0,
                                  add || k0);
                }
                _tile_release();
                free(band);
            }
        }
    free(panel);
}
