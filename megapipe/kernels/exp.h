/* What loops and tiles share; e^x of sixteen float32 numbers at a time. */

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define FILL(x) ((vf){0} + (x))
typedef int64_t size;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

INLINE size least(size a, size b) { return a < b ? a : b; }
/* a b + c, rounded once; everywhere else products and sums are rounded as they stand */
INLINE vf fma_(vf a, vf b, vf c) {
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE vf either(vi which, vf a, vf b) { return (vf)((which & (vi)a) | (~which & (vi)b)); }
/* e^x as 2^k times a polynomial of what is left (Cephes' expf); 0 below the smallest normal number */
INLINE vf exp_(vf x) {
    vi tiny = x < -87.0f;
    x = either(tiny, FILL(-87.0f), either(x > 88.0f, FILL(88.0f), x));
    vf magic = FILL(12582912.0f), k = fma_(x, FILL(1.44269504f), magic), n = k - magic; /* k ends with the bits of n */
    vf f = fma_(n, FILL(2.12194440e-4f), fma_(n, FILL(-0.693359375f), x));
    vf p = FILL(1.9875691500e-4f);
    p = fma_(p, f, FILL(1.3981999507e-3f));
    p = fma_(p, f, FILL(8.3334519073e-3f));
    p = fma_(p, f, FILL(4.1665795894e-2f));
    p = fma_(p, f, FILL(1.6666665459e-1f));
    p = fma_(p, f, FILL(5.0000001201e-1f));
    p = fma_(p, f * f, f) + 1.0f;
    return (vf)(~tiny & (vi)((vu)p + ((vu)k << 23)));
}
