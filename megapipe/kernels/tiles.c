/* Products of float32 matrices by tiles (tiles.h): C [m, n] = A [m, k] W [n, k]^T. Rows of W are laid out once for all
   rows of A, as many as stay in the cache. */

#include "tiles.h"
#include <sys/syscall.h>
#include <unistd.h>

#define BAND 128        /* rows of A at a time: whole lines of it are read where its columns lie in a row */
#define DEEP 512        /* numbers of a row at a time */
#define PANEL (5 << 18) /* bytes of W at a time, of a cache of 2 MiB */

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
            multiply(band + i / 16 * line, line, panel + j / 16 * line, line, line / 3 / TILE, sums[b % 2], 0, 0);
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
    size deep = up(up(k, up(k, DEEP)), SIDE) * SIDE, wide = up(up(n, up(n, PANEL / 6 / deep)), SIDE) * SIDE;
    uint16_t *panel = aligned_alloc(64, wide * deep * 6);
    for (size k0 = 0; k0 < k; k0 += deep)
        for (size n0 = 0; n0 < n; n0 += wide) {
            size ks = least(deep, k - k0), ns = least(wide, n - n0), line = up(ks, SIDE) * 3 * TILE;
            _Pragma("omp parallel") {
                FOR_EACH for (size j = 0; j < ns; j += 16)
                    pack_rows((matrix){w + (n0 + j) * w_row + k0 * w_step, w_row, w_step}, least(16, ns - j), ks, 1, 0,
                              panel + j / 16 * line, line);
                uint16_t *band = aligned_alloc(64, BAND / 16 * line * 2);
                _tile_loadconfig(&shape);
                FOR_EACH for (size i = 0; i < m; i += BAND) {
                    size ms = least(BAND, m - i);
                    pack_rows((matrix){a + i * a_row + k0 * a_step, a_row, a_step}, ms, ks, 0, 0, band, line);
                    multiply_band(band, panel, line, c + i * stride + n0, stride, ms, ns, bias && !k0 ? bias + n0 : 0,
                                  add || k0);
                }
                _tile_release();
                free(band);
            }
        }
    free(panel);
}
