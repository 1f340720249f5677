/* Causal attention of decoders: softmax(q k^T) v of the tokens of a chunk over earlier tokens and themselves.
 *
 * Keys of earlier chunks are in KV blocks, keys of the chunk in the rows of the batch. They are read in tiles of KEYS keys,
 * which start at multiples of KEYS in the whole sequence. Each tile is packed once per strip of queries, which keep a
 * running maximum and sum (Dao et al., FlashAttention, arXiv 2205.14135). Memory therefore does not grow with these
 * tokens, and the result of a query has the same bits for all chunk sizes. Products use tile.h, as in attention.h.
 */
#ifndef PENSTOCK_CAUSAL_H
#define PENSTOCK_CAUSAL_H

#include "attention.h"
#include "norm.h"

/* Keys per tile, a multiple of every PANEL. The panels of its keys and values fit in the L2 cache. */
#define KEYS 256
/* Rows of a strip over all heads that share keys: enough to amortise packing the keys. */
#define STRIP_ROWS 1024

/* Scratch memory of one strip. */
typedef struct {
    void *keys;        /* [KEYS / PANEL][size][PANEL], packed as weights of q k^T */
    void *values;      /* [size / PANEL][KEYS][PANEL], packed as weights of the product with the probabilities */
    float *scores;     /* [MAX_ROWS, KEYS] */
    uint16_t *rounded; /* [MAX_ROWS, KEYS] probabilities in bfloat16 */
    float *sums;       /* [rows, wide] weighted sums of values, not divided by `totals` */
    float *largest;    /* [rows] largest score so far */
    float *totals;     /* [rows] sum of probabilities so far */
} Strip;

/* Tokens per strip. */
static long strip_tokens(long heads, long kv_heads) {
    long tokens = STRIP_ROWS / (heads / kv_heads);
    return tokens > 0 ? tokens : 1;
}

/* Sets the pointers of `strip` to `memory`. Returns the size in bytes. NULL: returns only the size. */
static long assign_strip_buffers(long heads, long kv_heads, long size, char *memory, Strip *strip) {
    long wide = round_to(size, PANEL), rows = strip_tokens(heads, kv_heads) * (heads / kv_heads);
    long sizes[] = {KEYS * size * 4, KEYS * wide * 4, MAX_ROWS * KEYS * 4, MAX_ROWS * KEYS * 2, rows * wide * 4,
                    rows * 4, rows * 4};
    void **buffers[] = {&strip->keys, &strip->values, (void **)&strip->scores, (void **)&strip->rounded,
                       (void **)&strip->sums, (void **)&strip->largest, (void **)&strip->totals};
    long total = 0;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (memory) *buffers[i] = memory + total;
        total += round_to(sizes[i], 64);
    }
    return total;
}

/* Bytes of scratch per lane. */
static long strip_bytes(long heads, long kv_heads, long size) {
    Strip strip;
    return assign_strip_buffers(heads, kv_heads, size, NULL, &strip);
}

static void rotate(float *head, long size, const float *cosines) {
    const float *sines = cosines + size / 2;
    for (long d = 0, half = size / 2; d < half; d += WIDTH) {
        long left = half - d;
        vf a = v_load_part(head + d, left), b = v_load_part(head + half + d, left);
        vf c = v_load_part(cosines + d, left), s = v_load_part(sines + d, left);
        v_store_part(head + d, v_sub(v_mul(a, c), v_mul(b, s)), left);
        v_store_part(head + half + d, v_fma(b, c, v_mul(a, s)), left);
    }
}

/* Prepares q, k and v of one token for attention, in place: norm, rotary embedding and, if attention computes in
 * bfloat16, rounding (written to the first half of the row). Then copies k and v to the KV block of the token.
 *
 * `slot`: block * block size + row in the block; -1: not stored.
 */
static void prepare_row(const AttentionCall *call, long row, long position, int64_t slot) {
    const Layer *layer = call->layer;
    long size = call->head_size, queries = call->heads * size, keys = call->kv_heads * size;
    long width = queries + 2 * keys, bytes = call->dot ? 2 : 4;
    float *q = (float *)call->qkv + row * width, *k = q + queries;
    run_norm(&layer->query_norm, q, call->heads, size, q);
    run_norm(&layer->key_norm, k, call->kv_heads, size, k);
    if (layer->rotary)
        for (float *head = q; head < k + keys; head += size) rotate(head, size, layer->rotary + position * size);
    if (call->dot) convert_rows(FORMAT_DOT, q, 1, width, q, NULL);
    if (slot < 0) return;
    const char *kept = (const char *)q + queries * bytes;
    memcpy((char *)call->cache_keys + slot * keys * bytes, kept, (size_t)(keys * bytes));
    memcpy((char *)call->cache_values + slot * keys * bytes, kept + keys * bytes, (size_t)(keys * bytes));
}

/* Address of the key (or value: `is_value`) of a position, in a KV block before the chunk, else in the batch. */
INLINE const void *find_head(const AttentionCall *call, const Chunk *chunk, long position, long kv_head, int is_value) {
    long size = call->head_size, bytes = call->dot ? 2 : 4;
    if (position < chunk->context_len) {
        const char *cache = is_value ? call->cache_values : call->cache_keys;
        long slot = (long)chunk->table[position / call->block_size] * call->block_size + position % call->block_size;
        return cache + (slot * call->kv_heads + kv_head) * size * bytes;
    }
    long row = chunk->start + position - chunk->context_len, width = (call->heads + 2 * call->kv_heads) * size;
    long head = call->heads + (is_value ? call->kv_heads : 0) + kv_head;
    return (const char *)call->qkv + row * width * 4 + head * size * bytes;
}

/* Keys of the positions `base` to `base + count`. */
typedef struct {
    long base, count;
} KeyTile;

/* Packs the keys and values of a tile. */
static void pack_key_tile(const AttentionCall *call, const Chunk *chunk, const KeyTile *keys, long kv_head,
                          const Strip *strip) {
    const long base = keys->base, count = keys->count;
    long size = call->head_size, words = call->dot ? size / 2 : size; /* 32-bit values per key */
    int32_t rows[WIDTH][words];
    for (long first = 0; first < count; first += WIDTH) {
        for (long j = first; j < first + WIDTH && j < count; j++)
            memcpy(rows[j - first], find_head(call, chunk, base + j, kv_head, 0), (size_t)words * 4);
        pack_vector(rows[0], words, first, strip->keys);
    }
    for (long j = 0; j < count; j += call->dot ? 2 : 1) {
        const void *even = find_head(call, chunk, base + j, kv_head, 1), *odd = NULL;
        if (call->dot && j + 1 < count) odd = find_head(call, chunk, base + j + 1, kv_head, 1);
        pack_value(call->dot, even, odd, j, size, KEYS, strip->values);
    }
}

INLINE vf cap_of(vf score, float cap) {
    return v_mul(v_set(cap), tanh_of(v_mul(score, v_set(1.0f / cap))));
}

/* Like softmax, for the keys `low` to `high` of a tile: updates the running largest score and total. Returns the
 * factor for the sums of earlier tiles. */
INLINE float softmax_key_tile(float *scores, long begin, long end, long low, long high, float cap, float *largest,
                             float *total, uint16_t *rounded) {
    long last = round_to(high, WIDTH);
    if (cap > 0)
        for (long j = begin; j < last; j += WIDTH) v_store(scores + j, cap_of(v_load(scores + j), cap));
    float before = *largest, now = largest_score(scores, begin, low, high);
    *largest = now > before ? now : before;
    /* NaN if no score is greater than -inf. */
    vf shift = v_set(*largest > -INFINITY ? -*largest * LOG2_E : NAN);
    float sum = exponentiate(scores, begin, end, low, high, shift, rounded);
    float factor[WIDTH];
    v_store(factor, exp2_of(v_set((before - *largest) * LOG2_E)));
    *total = *total * factor[0] + sum;
    return factor[0];
}

/* Queries of one head: tokens `first` to `first + rows` of the chunk. */
typedef struct {
    long head, first;
    int rows;
    long strip_row; /* row of the first query in the strip */
} StripTile;

/* Attention of a tile of queries over a packed tile of keys. */
static void attend_tile(const AttentionCall *call, const Chunk *chunk, const Strip *strip, const KeyTile *keys,
                        const StripTile *tile) {
    const Layer *layer = call->layer;
    const int rows = tile->rows;
    long size = call->head_size, wide = round_to(size, PANEL), width = (call->heads + 2 * call->kv_heads) * size;
    long low[MAX_ROWS], high[MAX_ROWS], begin = KEYS, end = 0, total = chunk->context_len + chunk->length;
    float products[MAX_ROWS * PANEL] __attribute__((aligned(64))), factors[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        long i = chunk->context_len + tile->first + r;
        long from = layer->left >= 0 && i > layer->left ? i - layer->left : 0;
        long to = layer->right >= 0 && i + layer->right + 1 < total ? i + layer->right + 1 : total;
        low[r] = from > keys->base ? from - keys->base : 0;
        high[r] = to < keys->base + keys->count ? to - keys->base : keys->count;
        if (low[r] >= high[r]) continue;
        begin = low[r] < begin ? low[r] : begin;
        end = high[r] > end ? high[r] : end;
    }
    if (begin >= end) return;
    begin = begin / PANEL * PANEL;
    /* Rows of the batch have the byte stride of float32 in bfloat16, too. */
    long stride = call->dot ? 2 * width : width;
    const char *queries = (const char *)call->qkv + (chunk->start + tile->first) * width * 4
                          + tile->head * size * (call->dot ? 2 : 4);
    for (long j = begin; j < end; j += PANEL)
        multiply_tile(call->dot, rows, queries, stride, strip->keys, j * size, size, strip->scores + j, KEYS);
    end = call->dot ? round_to(end, 2) : end;
    for (int r = 0; r < rows; r++) {
        float *scores = strip->scores + r * KEYS;
        uint16_t *rounded = call->dot ? strip->rounded + r * KEYS : NULL;
        if (low[r] < high[r])
            factors[r] = softmax_key_tile(scores, begin, end, low[r], high[r], layer->softcap,
                                          strip->largest + tile->strip_row + r,
                                          strip->totals + tile->strip_row + r, rounded);
        else if (rounded) /* the row of the product is discarded */
            memset(rounded + begin, 0, (size_t)(end - begin) * 2);
        else
            memset(scores + begin, 0, (size_t)(end - begin) * 4);
    }
    const void *probabilities = call->dot ? (const void *)(strip->rounded + begin) : strip->scores + begin;
    for (long column = 0; column < size; column += PANEL) {
        multiply_tile(call->dot, rows, probabilities, KEYS, strip->values, column * KEYS + begin * PANEL, end - begin,
                      products, PANEL);
        for (int r = 0; r < rows; r++) {
            float *sums = strip->sums + (tile->strip_row + r) * wide + column;
            if (low[r] < high[r])
                for (long d = 0; d < PANEL; d += WIDTH)
                    v_store(sums + d, v_fma(v_load(sums + d), v_set(factors[r]), v_load(products + r * PANEL + d)));
        }
    }
}

/* Attention of the query heads that share key head `kv_head`, for tokens `first` to `first + count` of a chunk. */
static void run_strip(const AttentionCall *call, const Chunk *chunk, long kv_head, long first, long count,
                      void *scratch) {
    const Layer *layer = call->layer;
    long size = call->head_size, wide = round_to(size, PANEL), group = call->heads / call->kv_heads;
    long total = chunk->context_len + chunk->length, from = 0, to = total;
    if (layer->left >= 0 && chunk->context_len + first > layer->left) from = chunk->context_len + first - layer->left;
    if (layer->right >= 0 && chunk->context_len + first + count + layer->right < total)
        to = chunk->context_len + first + count + layer->right;
    Strip strip;
    assign_strip_buffers(call->heads, call->kv_heads, size, scratch, &strip);
    memset(strip.sums, 0, (size_t)(count * group * wide) * sizeof(float));
    memset(strip.totals, 0, (size_t)(count * group) * sizeof(float));
    for (long row = 0; row < count * group; row++) strip.largest[row] = -INFINITY;
    for (long base = from / KEYS * KEYS; base < to; base += KEYS) {
        KeyTile keys = {.base = base, .count = to - base < KEYS ? to - base : KEYS};
        pack_key_tile(call, chunk, &keys, kv_head, &strip);
        for (long member = 0; member < group; member++)
            for (long i = 0, rows; i < count; i += rows) {
                rows = product_rows(call->dot ? FORMAT_DOT : FORMAT_F32, count - i);
                StripTile tile = {.head = kv_head * group + member, .first = first + i, .rows = (int)rows,
                                  .strip_row = member * count + i};
                attend_tile(call, chunk, &strip, &keys, &tile);
            }
    }
    Target target = {.out = call->out, .out_is_bf16 = call->out_is_bf16, .width = call->heads * size};
    for (long row = 0; row < count * group; row++)
        for (long d = 0; d < size; d += WIDTH)
            store_result(&target, (chunk->start + first + row % count) * target.width
                                      + (kv_head * group + row / count) * size + d,
                         v_mul(v_load(strip.sums + row * wide + d), v_set(1.0f / strip.totals[row])), size - d);
}

#endif
