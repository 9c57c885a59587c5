/* Loops between the products on a CPU, which read and write memory once where torch does it in three to ten passes.

   Elements are bf16 (half is 1) or float32; all between is float32, sixteen numbers at a time, the last ones with zeros
   behind them: a result depends neither on where a row lies nor on the number of threads. */

#ifndef __AVX512F__
#error "measured on processors with vectors of sixteen alone"
#endif
#include "exp.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PARALLEL _Pragma("omp parallel for schedule(static)")
#define BOTH(call, ...) do { if (half) call(__VA_ARGS__, 1); else call(__VA_ARGS__, 0); } while (0)
#define LANES 16
typedef uint16_t vh __attribute__((vector_size(32)));

INLINE const void *at(const void *x, size i, int half) { return (const char *)x + i * (half ? 2 : 4); }
INLINE vf load(const void *x, size i, size n, int half) {
    if (half) {
        vh h = {0};
        if (n - i >= LANES) memcpy(&h, at(x, i, 1), 32);
        else memcpy(&h, at(x, i, 1), 2 * (n - i));
        return (vf)(__builtin_convertvector(h, vu) << 16);
    }
    vf f = {0};
    if (n - i >= LANES) memcpy(&f, at(x, i, 0), 64);
    else memcpy(&f, at(x, i, 0), 4 * (n - i));
    return f;
}
INLINE void store(void *x, size i, size n, vf f, int half) {
    if (half) {
        vu u = (vu)f, even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
        even = (vu)either(f != f, (vf)((vu){0} + 0x7fc0), (vf)even);
        vh h = __builtin_convertvector(even, vh);
        if (n - i >= LANES) memcpy((void *)at(x, i, 1), &h, 32);
        else memcpy((void *)at(x, i, 1), &h, 2 * (n - i));
    } else if (n - i >= LANES) memcpy((void *)at(x, i, 0), &f, 64);
    else memcpy((void *)at(x, i, 0), &f, 4 * (n - i));
}
INLINE float as_float(uint16_t half) {
    uint32_t u = (uint32_t)half << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
INLINE float sum(vf s) {
    for (int w = LANES / 2; w; w /= 2)
        for (int l = 0; l < w; l++) s[l] += s[l + w];
    return s[0];
}
/* y = x sigmoid(x (a + b x^2)) */
#define PART 16384
INLINE vf sigmoid(vf x, float a, float b) { return 1.0f / (1.0f + exp_(-x * (b * x * x + a))); }
INLINE void gelu_(const void *x, void *y, size first, size n, float a, float b, int half) {
    for (size i = first; i < n; i += LANES) {
        vf w = load(x, i, n, half);
        store(y, i, n, w * sigmoid(w, a, b), half);
    }
}
void gelu(size n, const void *x, void *y, float a, float b, size half) {
    PARALLEL for (size i = 0; i < n; i += PART) BOTH(gelu_, x, y, i, least(i + PART, n), a, b);
}
/* dx = dy (s + s (1 - s) x (a + 3 b x^2)) */
INLINE void gelu_backward_(const void *x, const void *dy, void *dx, size first, size n, float a, float b, int half) {
    for (size i = first; i < n; i += LANES) {
        vf w = load(x, i, n, half), s = sigmoid(w, a, b);
        store(dx, i, n, load(dy, i, n, half) * (s * (1.0f - s) * (w * (3 * b * w * w + a)) + s), half);
    }
}
void gelu_backward(size n, const void *x, const void *dy, void *dx, float a, float b, size half) {
    PARALLEL for (size i = 0; i < n; i += PART) BOTH(gelu_backward_, x, dy, dx, i, least(i + PART, n), a, b);
}
/* into += x */
void add_bf16(size n, float *into, const void *x) {
    PARALLEL for (size p = 0; p < n; p += PART)
        for (size i = p; i < least(p + PART, n); i += LANES)
            store(into, i, n, load(into, i, n, 0) + load(x, i, n, 1), 0);
}
/* maximum of a row and `high` */
INLINE float highest(const void *x, size n, float high, int half) {
    vf m = FILL(high);
    size i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = load(x, i, n, half);
        m = either(v > m, v, m); 
    }
    for (; i < n; i++) {
        float v = load(x, i, i + 1, half)[0];
        m[0] = v > m[0] ? v : m[0];
    }
    for (int l = 0; l < LANES; l++) high = m[l] > high || m[l] != m[l] ? m[l] : high;
    return high;
}
/* sum of e^(x - high), and each of them in `kept`, where there is room for so many */
INLINE float sum_exp(const void *x, size n, float high, float *kept, size room, int half) {
    vf s = {0}, zero = {0};
    size i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf e = exp_(load(x, i, n, half) - high);
        if (i + LANES <= room) memcpy(kept + i, &e, 64);
        s += e;
    }
    if (i < n) {
        vf e = exp_(load(x, i, n, half) - high);
        for (int l = 0; l < LANES; l++) if (l >= n - i) e[l] = 0;
        if (i + LANES <= room) memcpy(kept + i, &e, 64);
        s += e;
    }
    return sum(s);
}
INLINE void with_block_(const void *x, size r, size n, float *high, float *total, int half) {
    const void *row = at(x, r * n, half);
    float before = high[r];
    high[r] = highest(row, n, before, half);
    total[r] = total[r] * exp_(FILL(before - high[r]))[0] + sum_exp(row, n, high[r], 0, 0, half);
}
void with_block(const void *x, size rows, size n, float *high, float *total, size half) {
    PARALLEL for (size r = 0; r < rows; r++) BOTH(with_block_, x, r, n, high, total);
}
INLINE void to_gradient_(void *x, size r, size n, const float *lse, const float *scale, const size *label, int half) {
    void *row = (void *)at(x, r * n, half);
    size l = label[r];
    float own = l >= 0 && l < n ? (exp_(load(row, l, n, half) - lse[r])[0] - 1.0f) * scale[r] : 0.0f;
    for (size i = 0; i < n; i += LANES) store(row, i, n, exp_(load(row, i, n, half) - lse[r]) * scale[r], half);
    if (l >= 0 && l < n) store(row, l, l + 1, FILL(own), half);
}
void to_gradient(void *x, size rows, size n, const float *lse, const float *scale, const size *label, size half) {
    PARALLEL for (size r = 0; r < rows; r++) BOTH(to_gradient_, x, r, n, lse, scale, label);
}
#define KEPT 4096
/* a row of scores -> its probabilities, 0 behind the first n */
INLINE void softmax_(void *x, size n, size end, int half) {
    float kept[KEPT];
    float h = highest(x, n, -INFINITY, half), y = 1.0f / sum_exp(x, n, h, kept, KEPT, half);
    size i = 0;
    for (; i < n; i += LANES) {
        vf e;
        if (i + LANES <= KEPT) memcpy(&e, kept + i, 64);
        else e = exp_(load(x, i, n, half) - h);
        store(x, i, n, e * y, half);
    }
    memset((void *)at(x, n, half), 0, (end - n) * (half ? 2 : 4));
}
/* scores [n, tokens g, end]: the tokens are the last of the keys and see those up to their own */
void causal_softmax(void *x, size rows, size tokens, size group, size end, size half) {
    PARALLEL for (size r = 0; r < rows; r++)
        BOTH(softmax_, (void *)at(x, r * end, half), end - tokens + r % (tokens * group) / group + 1, end);
}
INLINE void softmax_backward_(const void *p, void *dp, size n, float scale, int half) {
    vf s = {0};
    for (size i = 0; i < n; i += LANES) s += load(p, i, n, half) * load(dp, i, n, half);
    float all = sum(s);
    for (size i = 0; i < n; i += LANES)
        store(dp, i, n, load(p, i, n, half) * ((load(dp, i, n, half) - all) * scale), half);
}
/* dp -> p (dp - sum p dp) scale */
void softmax_backward(const void *p, void *dp, size rows, size n, float scale, size half) {
    PARALLEL for (size r = 0; r < rows; r++)
        BOTH(softmax_backward_, at(p, r * n, half), (void *)at(dp, r * n, half), n, scale);
}
/* y [columns, rows] = x [rows, columns]^T of 16 bits, by tiles of 8 x 8 */
typedef uint16_t v8 __attribute__((vector_size(16)));
#define LO(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HI(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
INLINE void tile(const uint16_t *x, size xs, uint16_t *y, size ys) {
    v8 a[8], b[8];
    for (int i = 0; i < 8; i++) memcpy(&a[i], x + i * xs, 16);
    for (int i = 0; i < 4; i++) b[2 * i] = LO(a[i], a[i + 4]), b[2 * i + 1] = HI(a[i], a[i + 4]);
    for (int i = 0; i < 4; i++) a[2 * i] = LO(b[i], b[i + 4]), a[2 * i + 1] = HI(b[i], b[i + 4]);
    for (int i = 0; i < 4; i++) b[2 * i] = LO(a[i], a[i + 4]), b[2 * i + 1] = HI(a[i], a[i + 4]);
    for (int i = 0; i < 8; i++) memcpy(y + i * ys, &b[i], 16);
}
#define TILE 32
#define TILES(rows, columns, whole, one) \
    PARALLEL for (size c = 0; c < columns; c += TILE) \
        for (size r = 0; r < rows; r += TILE) \
            for (size i = c; i < c + TILE && i < columns; i += 8) \
                for (size j = r; j < r + TILE && j < rows; j += 8) \
                    if (i + 8 <= columns && j + 8 <= rows) whole; \
                    else \
                        for (size a = i; a < i + 8 && a < columns; a++) \
                            for (size b = j; b < j + 8 && b < rows; b++) one
void transpose16(const uint16_t *x, size rows, size columns, uint16_t *y) {
    TILES(rows, columns, tile(x + j * columns + i, columns, y + i * rows + j, rows), y[a * rows + b] = x[b * columns + a]);
}
/* into [columns, rows] += x [rows, columns]^T */
INLINE void add_tile(const uint16_t *x, size xs, float *y, size ys) {
    uint16_t turned[64];
    tile(x, xs, turned, 8);
    for (int i = 0; i < 8; i++)
        for (int l = 0; l < 8; l++) y[i * ys + l] += as_float(turned[8 * i + l]);
}
void add_transposed(float *into, const uint16_t *x, size rows, size columns) {
    TILES(rows, columns, add_tile(x + j * columns + i, columns, into + i * rows + j, rows),
          into[a * rows + b] += as_float(x[b * columns + a]));
}
/* AdamW as torch's fused one rounds it; the gradient is scaled and shrunk where it lies, and the updated value also
   rounded to `model`, if any. */
typedef struct { float shrink, decay, step, root, towards, beta2, rest2, epsilon; } rates; /* see sweep */
void adamw(size n, float *value, float *grad, float *first, float *second, void *model, const float *scale,
           const rates *of) {
    rates r = *of;
    PARALLEL for (size p = 0; p < n; p += PART)
        for (size i = p, e = least(p + PART, n); i < e; i += LANES) {
            vf g = load(grad, i, e, 0) * *scale * r.shrink, m = load(first, i, e, 0), v = load(second, i, e, 0);
            m = fma_(FILL(r.towards), g - m, m);
            v = fma_(r.rest2 * g, g, v * r.beta2);
            vf x = load(value, i, e, 0) * r.decay + r.step * m / ((vf)_mm512_sqrt_ps((__m512)v) / r.root + r.epsilon);
            store(grad, i, e, g, 0);
            store(first, i, e, m, 0);
            store(second, i, e, v, 0);
            store(value, i, e, x, 0);
            if (model) store(model, i, e, x, 1);
        }
}
