/* Products with the tile registers of AMX: up to 32 rows and one panel of weights, in bfloat16 or int8.
 *
 * The panels of FORMAT_DOT and FORMAT_INT8 have the layout of tiles: 64 bytes of an input row match 16 lines of 128
 * bytes, which are two tiles of 16 columns. The end of the last 64 bytes of a row and of the last tile of rows is padded
 * with 0, so that one tile configuration is enough. A sum adds its inputs in blocks of 64 bytes for any number of rows.
 *
 * The tests pass on an Intel Xeon with AMX. On other processors they emulate the instructions in C (AMX_MODEL,
 * amx_model.h). When a model is loaded, the engine checks AMX with has_exact_products (library.py). There is no
 * prefetch of the next panel as in tile.h, because it was slower on the Xeon.
 */
#ifndef PENSTOCK_AMX_H
#define PENSTOCK_AMX_H

#include "vec.h"

/* Rows of one tile, and of two. */
#define TILE 16
#define AMX_ROWS 32

/* Memory layout of LDTILECFG, palette 1. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

#if AMX_MODEL
#include "amx_model.h"
#else
/* Inline assembly: with the intrinsics, gcc 12 does not know that memory is read. */
#define TILE_CONFIG(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(config)) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" : : : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : : : "memory")
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((long)(stride)) : "memory")
/* sums += a b; TILE_DOT: pairs of bfloat16, TILE_INT8: four unsigned bytes of `a` and signed bytes of `b` */
#define TILE_DOT(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : : : "memory")
#define TILE_INT8(sums, a, b) __asm__ volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : : : "memory")
#endif

/* Configures the tiles of the calling thread. */
static void amx_enter(void) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = TILE;
    }
    TILE_CONFIG(&config);
}

/* Releases the tiles: until then, each context switch saves 8 KiB more. */
static void amx_leave(void) { TILE_RELEASE(); }

/* `count` bytes of up to 16 rows: `x` itself if they fill a tile, else a zero-padded copy in `buffer`. */
INLINE const char *whole_tile(const char *x, long *stride, int rows, long count, char *buffer) {
    if (rows == TILE && count == 64) return x;
    for (int r = 0; r < rows; r++) {
        if (count == 64) {
            memcpy(buffer + r * 64, x + r * *stride, 64);
        } else {
            memset(buffer + r * 64, 0, 64);
            memcpy(buffer + r * 64, x + r * *stride, (size_t)count);
        }
    }
    *stride = 64;
    return buffer;
}

#define MULTIPLY(sums, a, b) \
    if (is_int8) \
        TILE_INT8(sums, a, b); \
    else \
        TILE_DOT(sums, a, b)

/* Computes sums[32][PANEL], float32 or int32, for `rows` rows of `bytes` bytes with a stride of `stride` bytes. */
INLINE void amx_sums(int is_int8, int is_tall, int rows, const char *x, long stride, const char *panel, long bytes,
                     void *sums) {
    char upper[TILE * 64] __attribute__((aligned(64))), lower[TILE * 64] __attribute__((aligned(64)));
    char last[TILE * 4 * PANEL] __attribute__((aligned(64)));
    int above = is_tall ? TILE : rows, below = rows - above;
    if (above < TILE) memset(upper, 0, sizeof upper);
    if (is_tall && below < TILE) memset(lower, 0, sizeof lower);
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (is_tall) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (long k = 0; k < bytes; k += 64) {
        long count = bytes - k < 64 ? bytes - k : 64, row_stride = stride;
        const char *weights = panel + k * PANEL;
        if (count < 64) {
            memcpy(last, weights, (size_t)(count * PANEL));
            memset(last + count * PANEL, 0, (size_t)((64 - count) * PANEL));
            weights = last;
        }
        TILE_LOAD(6, weights, 4 * PANEL);
        TILE_LOAD(7, weights + 64, 4 * PANEL);
        const char *inputs = whole_tile(x + k, &row_stride, above, count, upper);
        TILE_LOAD(4, inputs, row_stride);
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 4, 7);
        if (is_tall) {
            row_stride = stride;
            inputs = whole_tile(x + TILE * stride + k, &row_stride, below, count, lower);
            TILE_LOAD(5, inputs, row_stride);
            MULTIPLY(2, 5, 6);
            MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, sums, 4 * PANEL);
    TILE_STORE(1, (char *)sums + 64, 4 * PANEL);
    if (is_tall) {
        TILE_STORE(2, (char *)sums + TILE * 4 * PANEL, 4 * PANEL);
        TILE_STORE(3, (char *)sums + TILE * 4 * PANEL + 64, 4 * PANEL);
    }
}
#undef MULTIPLY

/* See tile.h; up to AMX_ROWS rows. */
static void tile_dot(int rows, const uint16_t *x, long stride, const uint16_t *panel, long num_in, float *out,
                     long out_stride) {
    float sums[AMX_ROWS * PANEL] __attribute__((aligned(64)));
    if (rows > TILE)
        amx_sums(0, 1, rows, (const char *)x, 2 * stride, (const char *)panel, 2 * num_in, sums);
    else
        amx_sums(0, 0, rows, (const char *)x, 2 * stride, (const char *)panel, 2 * num_in, sums);
    for (int r = 0; r < rows; r++) memcpy(out + r * out_stride, sums + r * PANEL, 4 * PANEL);
}

static void tile_int8(int rows, const uint8_t *x, long stride, const int8_t *panel, long num_in,
                      const int32_t *sums_128, float *out, long out_stride) {
    int32_t sums[AMX_ROWS * PANEL] __attribute__((aligned(64)));
    if (rows > TILE)
        amx_sums(1, 1, rows, (const char *)x, stride, (const char *)panel, num_in, sums);
    else
        amx_sums(1, 0, rows, (const char *)x, stride, (const char *)panel, num_in, sums);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PANEL; c += WIDTH)
            v_store(out + r * out_stride + c, vi_difference(vi_load(sums + r * PANEL + c), vi_load(sums_128 + c)));
}

#endif
