/* Emulation of the AMX instructions in C, after Intel's pseudo code, for tests on processors without AMX (AMX_MODEL).
 *
 * The process aborts if the processor would fault: a tile is not configured, or a configuration is invalid.
 */
#ifndef PENSTOCK_AMX_MODEL_H
#define PENSTOCK_AMX_MODEL_H

#include <stdlib.h>
#include <xmmintrin.h>

typedef struct {
    int rows, row_bytes;
    union {
        uint8_t bytes[64];
        uint16_t halves[32];
        int32_t wholes[16];
        float floats[16];
    } row[16];
} Tile;

static __thread Tile tiles[8];

static Tile *configured(int number) {
    if (!tiles[number].rows) abort();
    return tiles + number;
}

static void model_release(void) { memset(tiles, 0, sizeof tiles); }

static void model_config(const TileConfig *config) {
    int wrong = sizeof *config != 64 || config->palette != 1 || config->start_row;
    for (int i = 0; i < 14; i++) wrong |= config->reserved[i];
    for (int i = 0; i < 16; i++) {
        wrong |= !config->rows[i] != !config->row_bytes[i] || config->rows[i] > 16 || config->row_bytes[i] > 64;
        wrong |= config->row_bytes[i] % 4 || (i >= 8 && config->rows[i]);
    }
    if (wrong) abort();
    model_release();
    for (int i = 0; i < 8; i++) {
        tiles[i].rows = config->rows[i];
        tiles[i].row_bytes = config->row_bytes[i];
    }
}

static void model_zero(int number) { memset(configured(number)->row, 0, sizeof tiles->row); }

static void model_load(int number, const void *from, long stride) {
    Tile *tile = configured(number);
    model_zero(number);
    for (int r = 0; r < tile->rows; r++)
        memcpy(tile->row[r].bytes, (const char *)from + r * stride, (size_t)tile->row_bytes);
}

static void model_store(int number, void *to, long stride) {
    const Tile *tile = configured(number);
    for (int r = 0; r < tile->rows; r++)
        memcpy((char *)to + r * stride, tile->row[r].bytes, (size_t)tile->row_bytes);
}

static void begin_product(const Tile *sums, const Tile *a, const Tile *b) {
    if (a->rows != sums->rows || a->row_bytes != 4 * b->rows || b->row_bytes != sums->row_bytes) abort();
}

static float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* TDPBF16PS: sums even and odd inputs separately, then adds both sums to each other and to the accumulator. */
static __attribute__((noinline)) void add_pairs(Tile *sums, const Tile *a, const Tile *b) {
    for (int m = 0; m < sums->rows; m++) {
        float parts[32] = {0};
        for (int k = 0; k < a->row_bytes / 4; k++)
            for (int n = 0; n < sums->row_bytes / 2; n++)
                parts[n] = __builtin_fmaf(widened(a->row[m].halves[2 * k + n % 2]), widened(b->row[k].halves[n]), parts[n]);
        for (int n = 0; n < sums->row_bytes / 4; n++) sums->row[m].floats[n] += parts[2 * n] + parts[2 * n + 1];
    }
}

static void model_dot(int to, int from, int with) {
    begin_product(configured(to), configured(from), configured(with));
    unsigned state = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* round to nearest; denormal inputs and results are 0 */
    add_pairs(tiles + to, tiles + from, tiles + with);
    _mm_setcsr(state);
}

/* TDPBUSD: without saturation. */
static void model_int8(int to, int from, int with) {
    Tile *sums = configured(to);
    const Tile *a = configured(from), *b = configured(with);
    begin_product(sums, a, b);
    for (int m = 0; m < sums->rows; m++)
        for (int k = 0; k < a->row_bytes / 4; k++)
            for (int n = 0; n < sums->row_bytes / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums->row[m].wholes[n] += a->row[m].bytes[4 * k + i] * (int8_t)b->row[k].bytes[4 * n + i];
}

#define TILE_CONFIG(config) model_config(config)
#define TILE_RELEASE() model_release()
#define TILE_ZERO(tile) model_zero(tile)
#define TILE_LOAD(tile, from, stride) model_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) model_store(tile, to, stride)
#define TILE_DOT(sums, a, b) model_dot(sums, a, b)
#define TILE_INT8(sums, a, b) model_int8(sums, a, b)

#endif
