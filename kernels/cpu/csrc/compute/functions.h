/* exp and the activation functions on float32 vectors.
 *
 * Errors: exp 3e-7 relative; GELU 8e-7 absolute, and 1e-7 relative for values above 5; the other functions have the
 * error of exp. NaN gives NaN.
 */
#ifndef PENSTOCK_FUNCTIONS_H
#define PENSTOCK_FUNCTIONS_H

#include "vec.h"
#include "../types.h"

/* 2^x as 2^n 2^f, x = n + f with 0 <= f < 1; (2^f - 1) / f is a polynomial through Chebyshev nodes. Below x = -126 the
 * result is 2^-126, which is negligible in a sum. From 128 on it is inf: sigmoid is then exactly 0, as -inf * sigmoid
 * requires. */
INLINE vf exp2_of(vf x) {
    vf n, f = v_split(v_min(v_set(128.0f), v_max(v_set(-126.0f), x)), &n);
    vf p = v_set(1.788368798e-3f);
    p = v_fma(p, f, v_set(9.199387394e-3f));
    p = v_fma(p, f, v_set(5.565705523e-2f));
    p = v_fma(p, f, v_set(2.402071953e-1f));
    p = v_fma(p, f, v_set(6.931475401e-1f));
    p = v_fma(p, f, v_set(1.0f));
    return v_scale2(p, n);
}

#define LOG2_E 1.44269504f

INLINE vf exp_of(vf x) { return exp2_of(v_mul(x, v_set(LOG2_E))); }

/* The normal distribution: Phi(x) = 1/2 + x P(x^2) for |x| <= far; 0 and 1 beyond. `p` has the coefficients of P in
 * 2 (x / far)^2 - 1, from Chebyshev nodes. P(far^2) is slightly too large, so that the result reaches exactly 0: -inf
 * times it must be NaN. */
INLINE vf normal_by(const float *p, int count, float far, vf x) {
    vf near = v_min(v_set(far), v_max(v_set(-far), x));
    vf t = v_fma(v_mul(near, near), v_set(2 / (far * far)), v_set(-1.0f)), sum = v_set(p[0]);
    UNROLL for (int i = 1; i < count; i++) sum = v_fma(sum, t, v_set(p[i]));
    return v_max(v_zero(), v_fma(near, sum, v_set(0.5f)));
}

INLINE vf normal_of(vf x) {
    const float p[] = {
        2.33673694e-04f, -5.81640983e-04f, 5.01273724e-04f, -9.20658349e-04f, 2.78549199e-03f, -5.13340067e-03f,
        7.93554820e-03f, -1.23175122e-02f, 1.81567445e-02f, -2.47728061e-02f, 3.19590643e-02f, -3.99243645e-02f,
        5.00262789e-02f, -6.77438378e-02f, 1.35950014e-01f,
    };
    return normal_by(p, 15, 5.2f, x);
}

/* x times the result is within 6e-5, less than the error of bfloat16 and int8. */
INLINE vf rough_normal_of(vf x) {
    const float p[] = {
        2.54519586e-03f, -6.03324501e-03f, 7.51893502e-03f, -1.33539718e-02f, 2.53015421e-02f, -3.90883386e-02f,
        5.57689667e-02f, -8.14689472e-02f, 1.67857498e-01f,
    };
    return normal_by(p, 9, 4.2f, x);
}

INLINE vf sigmoid_of(vf x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), exp_of(v_sub(v_zero(), x)))); }

/* 1 - 2 / (e^2x + 1). Near 0 it loses digits; the series x - x^3/3 + 2x^5/15 - 17x^7/315 is used there. */
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

/* `activation` and `is_rough` are compile-time constants at every call, so there is no branch per element. */
INLINE vf activate(vf x, int activation, int is_rough) {
    switch (activation) {
        case ACT_GELU:
            return v_mul(x, is_rough ? rough_normal_of(x) : normal_of(x));
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
