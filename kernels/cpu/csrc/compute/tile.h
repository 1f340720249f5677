/* The innermost loop of every product: a few rows times one panel of weights, with all sums in registers.
 *
 * A panel has PANEL columns of the weights for all K inputs, ordered by input:
 *
 *   FORMAT_F32, _BF16   [K][PANEL]
 *   FORMAT_DOT          [K / 2][PANEL][2]
 *   FORMAT_INT8         [K / 4][PANEL][4]
 *
 * The loops prefetch the next panel (not with AMX): with few rows a panel is read once, and reading takes as long as
 * computing.
 *
 * A sum adds its inputs in order for any number of rows, so a row has the same bits in every batch. Loops over `rows` are
 * unrolled, because each number of rows is compiled separately (TILE_BY_ROWS).
 */
#ifndef PENSTOCK_TILE_H
#define PENSTOCK_TILE_H

#include "../types.h"
#include "vec.h"

/* Prefetches a cache line to the L2 cache. An invalid address is no error. */
INLINE void fetch(const void *address) { __builtin_prefetch(address, 0, 2); }

/* Prefetches 4 bytes of each column. */
INLINE void fetch_line(const void *line) {
    UNROLL for (int i = 0; i < 4 * PANEL; i += 64) fetch((const char *)line + i);
}

/* out[r][c] = sum_k x[r][k] panel[k][c]; strides in elements. */
INLINE void tile_f32_rows(int rows, const float *x, long stride, const float *panel, long num_in, float *out,
                          long out_stride) {
    vf sums[ROWS][VECS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = v_zero();
    for (long k = 0; k < num_in; k++) {
        vf w[VECS];
        UNROLL for (int v = 0; v < VECS; v++) w[v] = v_load(panel + k * PANEL + v * WIDTH);
        fetch_line(panel + (num_in + k) * PANEL);
        UNROLL for (int r = 0; r < rows; r++) {
            vf input = v_set(x[r * stride + k]);
            UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = v_fma(input, w[v], sums[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++)
        v_store(out + r * out_stride + v * WIDTH, sums[r][v]);
}

INLINE void tile_bf16_rows(int rows, const float *x, long stride, const uint16_t *panel, long num_in, float *out,
                           long out_stride) {
    vf sums[ROWS][VECS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = v_zero();
    for (long k = 0; k < num_in; k++) {
        vf w[VECS];
        UNROLL for (int v = 0; v < VECS; v++) w[v] = v_from_bf16(panel + k * PANEL + v * WIDTH);
        fetch(panel + (num_in + k) * PANEL);
        UNROLL for (int r = 0; r < rows; r++) {
            vf input = v_set(x[r * stride + k]);
            UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = v_fma(input, w[v], sums[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++)
        v_store(out + r * out_stride + v * WIDTH, sums[r][v]);
}

#if defined(__AVX512BF16__)
#define HAS_DOT 1
INLINE void tile_dot_rows(int rows, const uint16_t *x, long stride, const uint16_t *panel, long num_in, float *out,
                          long out_stride) {
    vf sums[ROWS][VECS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = v_zero();
    for (long k = 0; k < num_in; k += 2) {
        __m512bh w[VECS];
        UNROLL for (int v = 0; v < VECS; v++)
            w[v] = (__m512bh)_mm512_loadu_si512((const void *)(panel + k * PANEL + v * 2 * WIDTH));
        fetch_line(panel + (num_in + k) * PANEL);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + k, sizeof pair);
            __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], input, w[v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++)
        v_store(out + r * out_stride + v * WIDTH, sums[r][v]);
}
#endif

#if HAS_INT8
/* Inputs are unsigned, with an offset of 128. Subtracting `sums_128` removes the offset, unless vi_dot has removed it. */
INLINE void tile_int8_rows(int rows, const uint8_t *x, long stride, const int8_t *panel, long num_in,
                           const int32_t *sums_128, float *out, long out_stride) {
    vi sums[ROWS][VECS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = vi_zero();
    for (long k = 0; k < num_in; k += 4) {
        vi w[VECS];
        UNROLL for (int v = 0; v < VECS; v++) w[v] = vi_load(panel + k * PANEL + v * 4 * WIDTH);
        fetch_line(panel + (num_in + k) * PANEL);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + k, sizeof four);
            vi input = vi_set(four);
            UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = vi_dot(sums[r][v], input, w[v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++)
        v_store(out + r * out_stride + v * WIDTH,
                vi_difference(sums[r][v], DOT_IS_SIGNED ? vi_zero() : vi_load(sums_128 + v * WIDTH)));
}
#endif

#define TILE_CASE(rows, call) \
    case rows: \
        call(rows); \
        break;
#if ROWS == 12
#define TILE_BY_ROWS(rows, call) \
    switch (rows) { \
        TILE_CASE(1, call) TILE_CASE(2, call) TILE_CASE(3, call) TILE_CASE(4, call) TILE_CASE(5, call) \
        TILE_CASE(6, call) TILE_CASE(7, call) TILE_CASE(8, call) TILE_CASE(9, call) TILE_CASE(10, call) \
        TILE_CASE(11, call) TILE_CASE(12, call) \
    }
#elif ROWS == 6
#define TILE_BY_ROWS(rows, call) \
    switch (rows) { \
        TILE_CASE(1, call) TILE_CASE(2, call) TILE_CASE(3, call) TILE_CASE(4, call) TILE_CASE(5, call) \
        TILE_CASE(6, call) \
    }
#else
#define TILE_BY_ROWS(rows, call) \
    switch (rows) { TILE_CASE(1, call) TILE_CASE(2, call) TILE_CASE(3, call) }
#endif

static void tile_f32(int rows, const float *x, long stride, const float *panel, long num_in, float *out,
                     long out_stride) {
#define CALL(n) tile_f32_rows(n, x, stride, panel, num_in, out, out_stride)
    TILE_BY_ROWS(rows, CALL)
#undef CALL
}

static void tile_bf16(int rows, const float *x, long stride, const uint16_t *panel, long num_in, float *out,
                      long out_stride) {
#define CALL(n) tile_bf16_rows(n, x, stride, panel, num_in, out, out_stride)
    TILE_BY_ROWS(rows, CALL)
#undef CALL
}

#if HAS_AMX
#include "amx.h"
#elif HAS_MMLA
#include "mmla.h"
#else
#if HAS_DOT
static void tile_dot(int rows, const uint16_t *x, long stride, const uint16_t *panel, long num_in, float *out,
                     long out_stride) {
#define CALL(n) tile_dot_rows(n, x, stride, panel, num_in, out, out_stride)
    TILE_BY_ROWS(rows, CALL)
#undef CALL
}
#endif

#if HAS_INT8
static void tile_int8(int rows, const uint8_t *x, long stride, const int8_t *panel, long num_in,
                      const int32_t *sums_128, float *out, long out_stride) {
#define CALL(n) tile_int8_rows(n, x, stride, panel, num_in, sums_128, out, out_stride)
    TILE_BY_ROWS(rows, CALL)
#undef CALL
}
#endif
#endif

/* Rows of the next tile if `left` rows are left: ROWS, or half of the rest if a full tile would leave a small one. */
INLINE int tile_rows(long left) {
    if (left <= ROWS) return (int)left;
    if (left < 2 * ROWS) return (int)((left + 1) / 2);
    return ROWS;
}

/* The same for a product in the given format; at most MAX_ROWS. */
#if HAS_AMX
#define MAX_ROWS AMX_ROWS
INLINE int product_rows(int format, long left) {
    if (format != FORMAT_DOT && format != FORMAT_INT8) return tile_rows(left);
    return left < AMX_ROWS ? (int)left : AMX_ROWS;
}
#else
#define MAX_ROWS ROWS
INLINE int product_rows(int format, long left) {
    (void)format;
    return tile_rows(left);
}
#endif

#endif
