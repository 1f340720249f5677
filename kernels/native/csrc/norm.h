/* Layer and root-mean-square normalisation of rows, statistics in two passes over a row that lies in the first cache. */
#ifndef PENSTOCK_NORM_H
#define PENSTOCK_NORM_H

#include <math.h>

#include "types.h"
#include "vec.h"

/* Rows [R, D] float32 to rows of the same shape; `y` may be `x`. A norm without weights copies. */
static void run_norm(const Norm *norm, const float *x, long rows, long width, float *y) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        if (!norm->weight) {
            if (y != x) memcpy(y, x, (size_t)width * sizeof(float));
            continue;
        }
        float mean = 0.0f;
        if (!norm->rms) {
            vf sum = v_zero();
            for (long d = 0; d < width; d += WIDTH) sum = v_add(sum, v_load_part(x + d, width - d));
            mean = v_sum(sum) / (float)width;
        }
        vf centre = v_set(mean), squares = v_zero();
        for (long d = 0; d < width; d += WIDTH) {
            vf off = v_sub(v_load_part(x + d, width - d), centre);
            if (width - d < WIDTH) { /* what fills up the last vector must not count */
                float lanes[WIDTH] = {0};
                for (long i = 0; d + i < width; i++) lanes[i] = x[d + i] - mean;
                off = v_load(lanes);
            }
            squares = v_fma(off, off, squares);
        }
        vf scale = v_set(1.0f / sqrtf(v_sum(squares) / (float)width + norm->eps));
        for (long d = 0; d < width; d += WIDTH) {
            long left = width - d;
            vf off = v_mul(v_sub(v_load_part(x + d, left), centre), scale);
            vf weight = v_load_part(norm->weight + d, left);
            vf bias = norm->bias ? v_load_part(norm->bias + d, left) : v_zero();
            v_store_part(y + d, v_fma(off, weight, bias), left);
        }
    }
}

#endif
