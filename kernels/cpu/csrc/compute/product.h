/* Products with packed weights: y = epilogue(x W^T + bias).
 *
 * Inputs are float32 rows. For FORMAT_DOT and FORMAT_INT8 `convert_rows` converts them to bfloat16, or to int8 with a
 * scale and a middle per row (RowScale): asymmetric rows, as after GELU, use all 8 bits. The caller passes a range of panels, so that several cores can share a product.
 */
#ifndef PENSTOCK_PRODUCT_H
#define PENSTOCK_PRODUCT_H

#include <math.h>

#include "functions.h"
#include "tile.h"
#include "../types.h"

/* Rows per pass over a panel; their inputs stay in the L2 cache. */
#define ROW_BLOCK 192

INLINE long weight_bytes(int format) { return format == FORMAT_F32 ? 4 : format == FORMAT_INT8 ? 1 : 2; }

INLINE long num_panels(long out) { return (out + PANEL - 1) / PANEL; }

/* Column of W at an index of the panels; -1 for padding. A gated panel has PANEL / 2 columns of the gate, then PANEL / 2
 * of the values. */
INLINE long column_of(const Product *product, long index) {
    if (!product->gated) return index < product->out ? index : -1;
    long half = PANEL / 2, width = product->out / 2, column = index / PANEL * half + index % half;
    if (column >= width) return -1;
    return index % PANEL < half ? column : width + column;
}

/* Number of panels of a product. */
INLINE long panels_of(const Product *product) {
    return product->gated ? num_panels(2 * (((product->out / 2) + PANEL / 2 - 1) / (PANEL / 2)) * (PANEL / 2))
                          : num_panels(product->out);
}

/* Bytes of the packed weights. */
INLINE long packed_bytes(const Product *product) {
    return panels_of(product) * PANEL * product->in * weight_bytes(product->format);
}

/* Largest |x| of a row; NaN for a row with NaN or inf. */
static float largest_of(const float *row, long width) {
    vf largest = v_zero(), bad = v_zero(); /* `bad`: NaN for NaN and inf, else 0 */
    for (long k = 0; k < width; k += WIDTH) {
        vf v = v_load_part(row + k, width - k);
        largest = v_max(largest, v_abs(v));
        bad = v_add(bad, v_sub(v, v));
    }
    return v_sum(bad) == 0 ? v_largest(largest) : NAN;
}

/* Packs a row [K] (NULL: zeros) as int8 into column `c` of a panel. Halves are rounded away from zero. Returns the scale,
 * which is NaN for a row with NaN or inf. `sum`: 128 times the sum of the int8 weights. */
static float pack_int8(const float *row, long width, int8_t *panel, long c, int32_t *sum) {
    float largest = row ? largest_of(row, width) : 0.0f;
    *sum = 0;
    for (long k = 0; k < width; k += WIDTH) {
        uint8_t bytes[WIDTH];
        vf whole = v_zero();
        if (largest > 0) {
            vf q = v_mul(v_div(v_load_part(row + k, width - k), v_set(largest)), v_set(127.0f)), unused;
            vf size = v_add(v_abs(q), v_set(0.5f));
            whole = v_copysign(v_sub(size, v_split(size, &unused)), q);
        }
        v_to_bytes(bytes, v_add(whole, v_set(128.0f)));
        for (long i = 0; i < WIDTH && k + i < width; i += 4) {
            int8_t *to = panel + (k + i) * PANEL + 4 * c;
            for (long j = 0; j < 4; j++) *sum += 128 * (to[j] = (int8_t)(bytes[i + j] - 128));
        }
    }
    return largest / 127.0f;
}

/* Packs panels first <= p < last. */
static void pack(const Packing *packing, long first, long last) {
    const Product *product = packing->product;
    long num_in = product->in;
    for (long index = first * PANEL; index < last * PANEL; index++) {
        long column = column_of(product, index), c = index % PANEL;
        const float *row = column < 0 ? NULL : packing->weights + column * num_in;
        char *panel = (char *)packing->packed + index / PANEL * PANEL * num_in * weight_bytes(product->format);
        packing->packed_bias[index] = row && packing->bias ? packing->bias[column] : 0.0f;
        if (product->format == FORMAT_INT8) {
            packing->scales[index] = pack_int8(row, num_in, (int8_t *)panel, c, packing->sums + index);
            continue;
        }
        for (long k = 0; k < num_in; k++) {
            float value = row ? row[k] : 0.0f;
            switch (product->format) {
                case FORMAT_F32:
                    ((float *)panel)[k * PANEL + c] = value;
                    break;
                case FORMAT_BF16:
                    ((uint16_t *)panel)[k * PANEL + c] = to_bf16(value);
                    break;
                case FORMAT_DOT:
                    ((uint16_t *)panel)[k / 2 * 2 * PANEL + 2 * c + k % 2] = to_bf16(value);
                    break;
            }
        }
    }
}

/* Converts float32 rows [R, K] to inputs of a format; scales [R] for FORMAT_INT8. A row with NaN has the scale NaN. */
static void convert_rows(int format, const float *x, long rows, long width, void *out, RowScale *scales) {
    for (long r = 0; r < rows; r++, x += width) {
        if (format == FORMAT_DOT) {
            uint16_t *to = (uint16_t *)out + r * width;
            long d = 0;
            for (; d + WIDTH <= width; d += WIDTH) v_to_bf16(to + d, v_load(x + d));
            for (; d < width; d++) to[d] = to_bf16(x[d]);
        } else if (format == FORMAT_INT8) {
            uint8_t *to = (uint8_t *)out + r * width;
            vf max_values = v_set(x[0]), min_values = max_values, bad = v_zero(); /* `bad`: NaN for NaN and inf, else 0 */
            long d = 0;
            for (; d + WIDTH <= width; d += WIDTH) {
                vf v = v_load(x + d);
                max_values = v_max(max_values, v);
                min_values = v_min(min_values, v);
                bad = v_add(bad, v_sub(v, v));
            }
            float high = v_largest(max_values), low = -v_largest(v_sub(v_zero(), min_values)), wrong = v_sum(bad);
            for (; d < width; d++) {
                high = x[d] > high ? x[d] : high;
                low = x[d] < low ? x[d] : low;
                wrong += x[d] - x[d];
            }
            /* Halves, because the difference could overflow; 127 / spread could overflow for smaller values. */
            float spread = 0.5f * high - 0.5f * low, middle = 0.5f * high + 0.5f * low;
            float inverse = spread > 1e-36f ? 127.0f / spread : 0.0f;
            scales[r] = wrong == 0 ? (RowScale){spread / 127.0f, middle} : (RowScale){wrong, wrong};
            if (wrong != 0) inverse = middle = 0.0f;
            vf scale = v_set(inverse), shift = v_set(middle);
            for (d = 0; d < width; d += WIDTH) {
                vf away = v_sub(v_load_part(x + d, width - d), shift);
                vf whole = v_add(v_round(v_mul(away, scale)), v_set(128.0f));
                uint8_t bytes[WIDTH];
                v_to_bytes(d + WIDTH <= width ? to + d : bytes, whole);
                if (d + WIDTH > width) memcpy(to + d, bytes, (size_t)(width - d));
            }
        }
    }
}

/* Stores the first `count` floats of y from element `offset` of the result. */
INLINE void store_result(const Target *to, long offset, vf y, long count) {
    if (to->add) y = v_add(y, v_load_part(to->add + offset, count));
    if (!to->out_is_bf16) {
        v_store_part((float *)to->out + offset, y, count);
    } else if (count >= WIDTH) {
        v_to_bf16((uint16_t *)to->out + offset, y);
    } else {
        float lanes[WIDTH];
        v_store(lanes, y);
        for (long i = 0; i < count; i++) ((uint16_t *)to->out)[offset + i] = to_bf16(lanes[i]);
    }
}

/* Sums of the weights of WIDTH columns, from `sums`, which are 128 times the sums of the int8 weights. */
INLINE vf column_sum(const Product *product, vf scales, long index) {
#if HAS_INT8
    return v_mul(vi_difference(vi_load(product->sums + index), vi_zero()), v_mul(scales, v_set(1.0f / 128.0f)));
#else
    (void)product, (void)index;
    return scales;
#endif
}

/* Epilogue of a tile's sums [rows, PANEL] for one activation: low-rank terms [rows, PANEL] or NULL, bias, activation,
 * gate, residual, rounding. Full panels are
 * stored from registers; a narrower last panel is stored vector by vector. */
INLINE void finish_as(const Product *product, int activation, int is_gated, int is_rough, const float *sums,
                      const float *terms, int rows, long panel, long first_row, const RowScale *row_scales,
                      const Target *to) {
    const int vecs = is_gated ? VECS / 2 : VECS, is_bf16 = to->out_is_bf16;
    const long column = panel * vecs * WIDTH, width = to->width, left = width - column;
    const float *add = to->add ? to->add + first_row * width + column : NULL;
    vf bias[VECS], scales[VECS], column_sums[VECS]; /* sums of the columns of W, times the middle of a row */
    UNROLL for (int v = 0; v < VECS; v++) {
        bias[v] = v_load(product->bias + panel * PANEL + v * WIDTH);
        scales[v] = row_scales ? v_load(product->scales + panel * PANEL + v * WIDTH) : v_zero();
        column_sums[v] = row_scales ? column_sum(product, scales[v], panel * PANEL + v * WIDTH) : v_zero();
    }
    for (int r = 0; r < rows; r++, sums += PANEL) {
        const long offset = (first_row + r) * width + column;
        vf y[VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            vf x = v_load(sums + v * WIDTH);
            if (row_scales)
                y[v] = v_fma(v_mul(x, v_set(row_scales[r].scale)), scales[v],
                             v_fma(v_set(row_scales[r].middle), column_sums[v], bias[v]));
            else
                y[v] = v_add(x, bias[v]);
            if (terms) y[v] = v_add(y[v], v_load(terms + r * PANEL + v * WIDTH));
        }
        UNROLL for (int v = 0; v < vecs; v++) {
            y[v] = activate(y[v], activation, is_rough);
            if (is_gated) y[v] = v_mul(y[v], y[v + VECS / 2]);
        }
        if (left >= vecs * WIDTH) {
            UNROLL for (int v = 0; v < vecs; v++) {
                vf sum = add ? v_add(y[v], v_load(add + r * width + v * WIDTH)) : y[v];
                if (is_bf16)
                    v_to_bf16((uint16_t *)to->out + offset + v * WIDTH, sum);
                else
                    v_store((float *)to->out + offset + v * WIDTH, sum);
            }
        } else {
            for (int v = 0; v < vecs && v * WIDTH < left; v++) store_result(to, offset + v * WIDTH, y[v], left - v * WIDTH);
        }
    }
}

static void finish(const Product *product, const float *sums, const float *terms, int rows, long panel, long first_row,
                   const RowScale *row_scales, const Target *to) {
    /* The error of bfloat16 and int8 inputs is larger than that of a rough function. */
    const int is_rough = product->format == FORMAT_DOT || product->format == FORMAT_INT8;
#define FINISH(activation, is_gated, is_rough) \
    finish_as(product, activation, is_gated, is_rough, sums, terms, rows, panel, first_row, row_scales, to)
#define CASE(activation) \
    case activation: \
        if (product->gated && is_rough) \
            FINISH(activation, 1, 1); \
        else if (product->gated) \
            FINISH(activation, 1, 0); \
        else if (is_rough) \
            FINISH(activation, 0, 1); \
        else \
            FINISH(activation, 0, 0); \
        break;
    switch (product->activation) {
        CASE(ACT_NONE)
        CASE(ACT_GELU)
        CASE(ACT_GELU_TANH)
        CASE(ACT_QUICK_GELU)
        CASE(ACT_RELU)
        CASE(ACT_SILU)
        CASE(ACT_TANH)
    }
#undef CASE
#undef FINISH
}

/* Computes the low-rank terms [count, PANEL] of some rows and one panel. Returns `out`, or NULL if no row has a term. */
static const float *low_rank_tile(const LowRankRows *terms, long row, int count, long panel, float *out) {
    int has_term = 0;
    for (int i = 0, end; i < count; i = end) {
        const Product *up = terms->ups[row + i];
        for (end = i + 1; end < count && end - i < ROWS && terms->ups[row + end] == up;) end++;
        if (up)
            tile_f32(end - i, terms->rows + (row + i) * terms->stride, terms->stride,
                     (const float *)up->weights + panel * PANEL * up->in, up->in, out + i * PANEL, PANEL);
        else
            memset(out + i * PANEL, 0, (size_t)(end - i) * PANEL * sizeof(float));
        has_term |= up != NULL;
    }
    return has_term ? out : NULL;
}

/* Multiplies rows [R, K], in the format of the product, by panels `first` to `last`.
 *
 * `scratch`: PANEL * K floats for FORMAT_BF16, 64-byte aligned. `row_scales` [R] for FORMAT_INT8. `terms`: NULL if no
 * row has a low-rank term.
 */
static void run_product(const Product *product, const void *x, const RowScale *row_scales, const LowRankRows *terms,
                        long rows, long first, long last, const Target *to, float *scratch) {
    long num_in = product->in;
    int is_scaled = product->format == FORMAT_INT8;
    float sums[MAX_ROWS * PANEL] __attribute__((aligned(64))), added[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    for (long begin = 0; begin < rows; begin += ROW_BLOCK) {
        long end = begin + ROW_BLOCK < rows ? begin + ROW_BLOCK : rows;
        for (long panel = first; panel < last; panel++) {
            long panel_start = panel * PANEL * num_in;
            int widen = product->format == FORMAT_BF16 && end - begin > ROWS;
            if (widen) {
                const uint16_t *from = (const uint16_t *)product->weights + panel_start;
                for (long i = 0; i < PANEL * num_in; i += WIDTH) v_store(scratch + i, v_from_bf16(from + i));
            }
            for (long row = begin; row < end;) {
                int n = product_rows(product->format, end - row);
                switch (product->format) {
                    case FORMAT_F32:
                        tile_f32(n, (const float *)x + row * num_in, num_in,
                                 (const float *)product->weights + panel_start, num_in, sums, PANEL);
                        break;
                    case FORMAT_BF16:
                        if (widen)
                            tile_f32(n, (const float *)x + row * num_in, num_in, scratch, num_in, sums, PANEL);
                        else
                            tile_bf16(n, (const float *)x + row * num_in, num_in,
                                      (const uint16_t *)product->weights + panel_start, num_in, sums, PANEL);
                        break;
#if HAS_DOT
                    case FORMAT_DOT:
                        tile_dot(n, (const uint16_t *)x + row * num_in, num_in,
                                 (const uint16_t *)product->weights + panel_start, num_in, sums, PANEL);
                        break;
#endif
#if HAS_INT8
                    case FORMAT_INT8:
                        tile_int8(n, (const uint8_t *)x + row * num_in, num_in,
                                  (const int8_t *)product->weights + panel_start, num_in, product->sums + panel * PANEL, sums, PANEL);
                        break;
#endif
                }
                const float *tile_terms = terms ? low_rank_tile(terms, row, n, panel, added) : NULL;
                finish(product, sums, tile_terms, n, panel, row, is_scaled ? row_scales + row : NULL, to);
                row += n;
            }
        }
    }
}

#endif
