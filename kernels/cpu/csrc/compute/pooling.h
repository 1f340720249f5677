/* Pools the rows of a sequence to one row, truncates and normalises it. kernels/pooling has the formulas. */
#ifndef PENSTOCK_POOLING_H
#define PENSTOCK_POOLING_H

#include <math.h>

#include "../types.h"
#include "vec.h"

/* Rows per partial sum, which keeps float32 accurate for long sequences. */
#define SUM_BLOCK 64

INLINE float row_weight(int pooling, const float *weights, long row, long position) {
    return pooling == POOL_WEIGHTED ? weights[row] : pooling == POOL_WEIGHTED_MEAN ? (float)(position + 1) : 1.0f;
}

/* Pools rows `start` to `end` of [T, D], without the first `skip` rows, to `width` floats. */
static void run_pooling(int pooling, const float *hidden, long stride, const float *weights, long start, long end,
                        long skip, long width, long dimensions, int normalize, float *out) {
    long first = start + (skip > 0 ? skip : 0);
    memset(out, 0, (size_t)width * sizeof(float));
    if (first >= end) return;
    if (dimensions > width) dimensions = width;
    double total = 0.0;
    for (long r = first; r < end; r++) total += row_weight(pooling, weights, r, r - start);
    if (total < 1e-9) total = 1e-9;
    vf divisor = v_set((float)(pooling == POOL_MEAN_SQRT_LEN ? sqrt(total) : total));
    vf squares = v_zero();
    for (long d = 0; d < dimensions; d += WIDTH) {
        long left = dimensions - d;
        vf y;
        if (pooling == POOL_CLS) {
            y = v_load_part(hidden + first * stride + d, left);
        } else if (pooling == POOL_LAST) {
            y = v_load_part(hidden + (end - 1) * stride + d, left);
        } else if (pooling == POOL_MAX) {
            y = v_load_part(hidden + first * stride + d, left);
            vf wrong = v_sub(y, y); /* NaN in columns with NaN or inf, else 0 */
            for (long r = first + 1; r < end; r++) {
                vf x = v_load_part(hidden + r * stride + d, left);
                wrong = v_add(wrong, v_sub(x, x));
                y = v_max(y, x);
            }
            float good[WIDTH], bad[WIDTH];
            v_store(good, y);
            v_store(bad, wrong);
            for (int i = 0; i < WIDTH; i++)
                if (bad[i] != 0) {
                    good[i] = -INFINITY;
                    for (long r = first; i < left && r < end; r++) {
                        float x = hidden[r * stride + d + i];
                        good[i] = x != x || good[i] != good[i] ? NAN : x > good[i] ? x : good[i];
                    }
                    if (i >= left) good[i] = 0;
                }
            y = v_load(good);
        } else {
            y = v_zero();
            for (long block = first; block < end; block += SUM_BLOCK) {
                vf part = v_zero();
                for (long r = block; r < end && r < block + SUM_BLOCK; r++)
                    part = v_fma(v_set(row_weight(pooling, weights, r, r - start)),
                                 v_load_part(hidden + r * stride + d, left), part);
                y = v_add(y, part);
            }
            y = v_div(y, divisor);
        }
        v_store_part(out + d, y, left);
        squares = v_fma(y, y, squares);
    }
    if (!normalize) return;
    float norm = sqrtf(v_sum(squares));
    vf scale = v_set(norm == norm && norm < 1e-12f ? 1e-12f : norm);
    for (long d = 0; d < dimensions; d += WIDTH)
        v_store_part(out + d, v_div(v_load_part(out + d, dimensions - d), scale), dimensions - d);
}

#endif
