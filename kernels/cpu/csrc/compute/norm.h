/* LayerNorm and RMSNorm of rows. Statistics take two passes over a row, which stays in the L1 cache. */
#ifndef PENSTOCK_NORM_H
#define PENSTOCK_NORM_H

#include <math.h>

#include "../types.h"
#include "vec.h"

/* Normalises float32 rows [R, D]; `y` may be `x`. Copies if the norm has no weights. */
static void run_norm(const Norm *norm, const float *x, long rows, long width, float *y) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        if (!norm->weight) {
            if (y != x) memcpy(y, x, (size_t)width * sizeof(float));
            continue;
        }
        const long whole = width / WIDTH * WIDTH, rest = width - whole; /* the padding of the last vector must not count */
        float mean = 0.0f;
        if (!norm->rms) {
            vf sum = v_zero();
            for (long d = 0; d < whole; d += WIDTH) sum = v_add(sum, v_load(x + d));
            if (rest) sum = v_add(sum, v_load_part(x + whole, rest));
            mean = v_sum(sum) / (float)width;
        }
        vf centre = v_set(mean), squares = v_zero();
        for (long d = 0; d < whole; d += WIDTH) {
            vf off = v_sub(v_load(x + d), centre);
            squares = v_fma(off, off, squares);
        }
        if (rest) {
            vf off = v_only(v_sub(v_load_part(x + whole, rest), centre), 0, rest, v_zero());
            squares = v_fma(off, off, squares);
        }
        vf scale = v_set(1.0f / sqrtf(v_sum(squares) / (float)width + norm->eps));
        for (long d = 0; d < width; d += WIDTH) {
            long left = width - d;
            vf off = v_mul(v_sub(v_load_part(x + d, left), centre), scale);
            vf bias = norm->bias ? v_load_part(norm->bias + d, left) : v_zero();
            v_store_part(y + d, v_fma(off, v_load_part(norm->weight + d, left), bias), left);
        }
    }
}

#endif
