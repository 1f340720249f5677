/* Products with the matrix instructions of 64-bit ARM, BFMMLA and USMMLA: up to ROWS rows and one panel of weights.
 *
 * An instruction multiplies two rows by two columns, 8 bytes of each, and adds the products to 2 x 2 sums. A line of a
 * panel in FORMAT_DOT or FORMAT_INT8 has 4 bytes of each column; zipping two lines gives 8 bytes of two columns. An odd
 * last row is paired with itself. A sum adds its inputs in the same order for any number of rows.
 */
#ifndef PENSTOCK_MMLA_H
#define PENSTOCK_MMLA_H

#include "vec.h"

#define PAIRS (ROWS / 2)

INLINE vi mmla(int is_int8, vi sums, uint8x16_t rows, uint8x16_t columns) {
    if (is_int8) return vusmmlaq_s32(sums, rows, vreinterpretq_s8_u8(columns));
    return (vi)vbfmmlaq_f32((vf)sums, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
}

/* The next 8 bytes of a row, or 4 bytes and zeros. */
INLINE uint8x8_t load_row(const char *x, int is_half) {
    uint64_t bytes = 0;
    memcpy(&bytes, x, is_half ? 4 : 8);
    return vcreate_u8(bytes);
}

/* Adds the products of 8 bytes of each row, or of 4 bytes if `is_half`, to sums[pair of rows][pair of columns]. */
INLINE void mmla_step(int is_int8, int is_half, int rows, const char *x, long stride, const char *panel,
                      vi sums[PAIRS][2 * VECS]) {
    uint8x16_t inputs[PAIRS];
    UNROLL for (int p = 0; p < (rows + 1) / 2; p++) {
        const char *even = x + 2 * p * stride, *odd = 2 * p + 1 < rows ? even + stride : even;
        inputs[p] = vcombine_u8(load_row(even, is_half), load_row(odd, is_half));
    }
    UNROLL for (int v = 0; v < VECS; v++) {
        vi first = vi_load(panel + v * 16), second = is_half ? vi_zero() : vi_load(panel + 4 * PANEL + v * 16);
        uint8x16_t low = vreinterpretq_u8_s32(vzip1q_s32(first, second));
        uint8x16_t high = vreinterpretq_u8_s32(vzip2q_s32(first, second));
        UNROLL for (int p = 0; p < (rows + 1) / 2; p++) {
            sums[p][2 * v] = mmla(is_int8, sums[p][2 * v], inputs[p], low);
            sums[p][2 * v + 1] = mmla(is_int8, sums[p][2 * v + 1], inputs[p], high);
        }
        __asm__ volatile("" : : : "memory"); /* gcc 12 would load all columns first and spill sums to memory */
    }
}

/* `x`: rows of `bytes` bytes, a multiple of 4, with a stride of `stride` bytes. `sums_128`: see tile_int8_rows. */
INLINE void mmla_rows(int is_int8, int rows, const char *x, long stride, const char *panel, long bytes,
                      const int32_t *sums_128, float *out, long out_stride) {
    vi sums[PAIRS][2 * VECS];
    UNROLL for (int p = 0; p < PAIRS; p++) UNROLL for (int c = 0; c < 2 * VECS; c++) sums[p][c] = vi_zero();
    long k = 0;
    for (; k + 8 <= bytes; k += 8) {
        fetch_line(panel + (bytes + k) * PANEL);
        fetch_line(panel + (bytes + k + 4) * PANEL);
        mmla_step(is_int8, 0, rows, x + k, stride, panel + k * PANEL, sums);
    }
    if (k < bytes) mmla_step(is_int8, 1, rows, x + k, stride, panel + k * PANEL, sums);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECS; v++) {
        int64x2_t low = vreinterpretq_s64_s32(sums[r / 2][2 * v]), high = vreinterpretq_s64_s32(sums[r / 2][2 * v + 1]);
        vi row = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
        v_store(out + r * out_stride + v * WIDTH, is_int8 ? vi_difference(row, vi_load(sums_128 + v * WIDTH)) : (vf)row);
    }
}

/* See tile.h. */
static void tile_dot(int rows, const uint16_t *x, long stride, const uint16_t *panel, long num_in, float *out,
                     long out_stride) {
#define CALL(n) mmla_rows(0, n, (const char *)x, 2 * stride, (const char *)panel, 2 * num_in, NULL, out, out_stride)
    TILE_BY_ROWS(rows, CALL)
#undef CALL
}

static void tile_int8(int rows, const uint8_t *x, long stride, const int8_t *panel, long num_in,
                      const int32_t *sums_128, float *out, long out_stride) {
#define CALL(n) mmla_rows(1, n, (const char *)x, stride, (const char *)panel, num_in, sums_128, out, out_stride)
    TILE_BY_ROWS(rows, CALL)
#undef CALL
}

#endif
