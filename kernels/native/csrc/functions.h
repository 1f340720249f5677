/* exp and the activation functions, in float32 vectors.
 *
 * Errors, over the floats that occur: exp 2e-7 relative; erf 2e-7 absolute (Abramowitz and Stegun 7.1.26, which states
 * 1.5e-7); the others follow from them. NaN gives NaN.
 */
#ifndef PENSTOCK_FUNCTIONS_H
#define PENSTOCK_FUNCTIONS_H

#include "vec.h"
#include "types.h"

/* 2^x by x = n + f with |f| <= 1/2; Taylor's series of 2^f. Below -126 the result is 2^-126: nothing in a sum.
 * From 128 on it is inf, so that sigmoid is 0 where it must be: even -inf times it is then right. */
INLINE vf exp2_of(vf x) {
    x = v_max(v_set(-126.0f), x);
    x = v_min(v_set(128.0f), x);
    vf n = v_round(x), f = v_sub(x, n);
    vf p = v_set(1.5403530e-4f);
    p = v_fma(p, f, v_set(1.3333558e-3f));
    p = v_fma(p, f, v_set(9.6181291e-3f));
    p = v_fma(p, f, v_set(5.5504109e-2f));
    p = v_fma(p, f, v_set(2.4022651e-1f));
    p = v_fma(p, f, v_set(6.9314718e-1f));
    p = v_fma(p, f, v_set(1.0f));
    return v_scale2(p, n);
}

#define LOG2_E 1.44269504f

INLINE vf exp_of(vf x) { return exp2_of(v_mul(x, v_set(LOG2_E))); }

INLINE vf erf_of(vf x) {
    vf a = v_abs(x);
    vf t = v_div(v_set(1.0f), v_fma(a, v_set(0.3275911f), v_set(1.0f)));
    vf p = v_set(1.061405429f);
    p = v_fma(p, t, v_set(-1.453152027f));
    p = v_fma(p, t, v_set(1.421413741f));
    p = v_fma(p, t, v_set(-0.284496736f));
    p = v_fma(p, t, v_set(0.254829592f));
    vf tail = v_mul(v_mul(p, t), exp_of(v_sub(v_zero(), v_mul(a, a))));
    return v_copysign(v_sub(v_set(1.0f), tail), x);
}

INLINE vf sigmoid_of(vf x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), exp_of(v_sub(v_zero(), x)))); }

/* 1 - 2 / (e^2x + 1) loses digits near 0, where x - x^3/3 + 2x^5/15 - 17x^7/315 takes its place. */
INLINE vf tanh_of(vf x) {
    vf a = v_abs(x), square = v_mul(x, x);
    vf far = v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(exp_of(v_add(a, a)), v_set(1.0f))));
    vf p = v_fma(square, v_set(-17.0f / 315), v_set(2.0f / 15));
    p = v_fma(p, square, v_set(-1.0f / 3));
    vf near = v_mul(a, v_fma(p, square, v_set(1.0f)));
    float f[WIDTH], n[WIDTH], m[WIDTH];
    v_store(f, far);
    v_store(n, near);
    v_store(m, a);
    for (int i = 0; i < WIDTH; i++) f[i] = m[i] < 0.15f ? n[i] : f[i];
    return v_copysign(v_load(f), x);
}

/* `activation` is known when this is compiled, so that nothing is decided per element. */
INLINE vf activate(vf x, int activation) {
    switch (activation) {
        case ACT_GELU: {
            vf half = v_mul(x, v_set(0.5f));
            return v_fma(half, erf_of(v_mul(x, v_set(0.70710678f))), half);
        }
        case ACT_GELU_TANH: {
            /* x/2 (1 + tanh(u)) = x sigmoid(2u) */
            vf u = v_mul(v_mul(x, v_set(2 * 0.79788456f)), v_fma(v_mul(x, x), v_set(0.044715f), v_set(1.0f)));
            return v_mul(x, sigmoid_of(u));
        }
        case ACT_QUICK_GELU:
            return v_mul(x, sigmoid_of(v_mul(x, v_set(1.702f))));
        case ACT_RELU:
            return v_max(v_zero(), x);
        case ACT_SILU:
            return v_mul(x, sigmoid_of(x));
        case ACT_TANH:
            return tanh_of(x);
        default:
            return x;
    }
}

#endif
