/* Attention within whole sequences: softmax(q k^T + bias) v per head.
 *
 * Both products use the tiles of tile.h: keys are packed as the weights of q k^T, values as the weights of the second
 * product. Sums and softmax are float32; FORMAT_DOT rounds q, k, v and the probabilities to bfloat16. The result of a
 * query depends on its sequence only.
 */
#ifndef PENSTOCK_ATTENTION_H
#define PENSTOCK_ATTENTION_H

#include <math.h>

#include "functions.h"
#include "product.h"

INLINE long round_to(long n, long step) { return (n + step - 1) / step * step; }

/* Terms of the scores of one head of one sequence with embeddings of distances. A distance is the position of the query
 * minus that of the key. */
typedef struct {
    const int32_t *row_of; /* row of each distance, from 0 in both directions */
    long first, end;       /* rows that the sequence needs, rounded to panels */
    long stride;           /* all rows, rounded to panels */
    void *packed;          /* distance_keys as weights */
    float *of_keys;        /* [L, stride] products of keys with distance_queries */
    float *of_queries;     /* [MAX_ROWS, stride] products of queries with distance_keys */
} Terms;

/* Bytes of scratch per lane for sequences of up to `length` tokens; `distances`: rows of distance embeddings. */
static long attention_bytes(long length, long head_size, long distances) {
    long columns = round_to(distances, PANEL), terms = columns * (head_size + length + MAX_ROWS);
    long keys = round_to(length, PANEL), values = round_to(head_size, PANEL);
    long row = 2 * keys + round_to(head_size, WIDTH); /* scores, rounded scores, query */
    return 4 * (keys * head_size + keys * values + MAX_ROWS * row + terms) + 8 * 64;
}

/* Copies one head of one token as floats, with the rotary embedding if the layer has one. */
static void load_head(const AttentionCall *call, long row, long head, long position, float *to) {
    long size = call->head_size, offset = (row * (call->heads + 2 * call->kv_heads) + head) * size;
    if (call->is_bf16) {
        for (long d = 0; d < size; d++) {
            uint32_t bits = (uint32_t)((const uint16_t *)call->qkv)[offset + d] << 16;
            memcpy(to + d, &bits, 4);
        }
    } else {
        memcpy(to, (const float *)call->qkv + offset, (size_t)size * 4);
    }
    if (call->layer->rotary && position >= 0) {
        const float *cosines = call->layer->rotary + position * size, *sines = cosines + size / 2;
        for (long d = 0; d < size / 2; d++) {
            float a = to[d], b = to[d + size / 2];
            to[d] = a * cosines[d] - b * sines[d];
            to[d + size / 2] = b * cosines[d] + a * sines[d];
        }
    }
}

/* One head of one token in the type of the products: in place if possible, else a copy in `row`. */
INLINE const void *take_head(const AttentionCall *call, long token, long head, long position, void *row) {
    long size = call->head_size, offset = (token * (call->heads + 2 * call->kv_heads) + head) * size;
    if (call->is_bf16 == call->dot && (!call->layer->rotary || position < 0))
        return (const char *)call->qkv + offset * (call->dot ? 2 : 4);
    float rotated[size];
    load_head(call, token, head, position, rotated);
    if (!call->dot) return memcpy(row, rotated, (size_t)size * 4);
    for (long d = 0; d < size; d++) ((uint16_t *)row)[d] = to_bf16(rotated[d]);
    return row;
}

/* Packs WIDTH keys, rows of `words` 32-bit values, from key number `first` on, as weights of q k^T. */
INLINE void pack_vector(const int32_t *rows, long words, long first, void *keys) {
    float *to = (float *)keys + first / PANEL * PANEL * words + first % PANEL;
    for (long d = 0; d < words; d++) v_store(to + d * PANEL, v_load_strided(rows + d, words));
}

/* Packs keys [L, size] as the weights of q k^T, WIDTH keys at a time, by input (in FORMAT_DOT by pair of inputs).
 * Columns past the last key are not written, because their sums are not read. */
static void pack_keys(const AttentionCall *call, long start, long length, long kv_head, void *keys) {
    long size = call->head_size, words = call->dot ? size / 2 : size; /* 32-bit values per key */
    int32_t rows[WIDTH][words];
    for (long first = 0; first < length; first += WIDTH) {
        long count = length - first < WIDTH ? length - first : WIDTH;
        for (long j = first; j < first + count; j++) {
            int32_t *row = rows[j - first];
            const void *key = take_head(call, start + j, call->heads + kv_head, j, row);
            if (key != row) memcpy(row, key, (size_t)words * 4);
        }
        pack_vector(rows[0], words, first, keys);
    }
}

/* Packs value number `j` of `stride` as weights of the product with the probabilities. In FORMAT_DOT `j` is even and
 * value j + 1 is packed with it; `odd` NULL: zeros. */
INLINE void pack_value(int dot, const void *even, const void *odd, long j, long size, long stride, void *values) {
    for (long first = 0; first < size; first += PANEL) {
        long count = size - first < PANEL ? size - first : PANEL;
        if (dot) {
            uint32_t *to = (uint32_t *)values + (first * stride + j * PANEL) / 2;
            const uint16_t *low = (const uint16_t *)even + first, *high = odd ? (const uint16_t *)odd + first : NULL;
            if (high)
                for (long d = 0; d < count; d++) to[d] = low[d] | (uint32_t)high[d] << 16;
            else
                for (long d = 0; d < count; d++) to[d] = low[d];
            for (long d = count; d < PANEL; d++) to[d] = 0;
        } else {
            float *to = (float *)values + first * stride + j * PANEL;
            memcpy(to, (const float *)even + first, (size_t)count * 4);
            for (long d = count; d < PANEL; d++) to[d] = 0.0f;
        }
    }
}

/* Packs values [L, size]. */
static void pack_values(const AttentionCall *call, long start, long length, long kv_head, void *values) {
    long size = call->head_size, stride = round_to(length, PANEL);
    float even_row[size], odd_row[size];
    long head = call->heads + call->kv_heads + kv_head;
    for (long j = 0; j < length; j += call->dot ? 2 : 1) {
        const void *even = take_head(call, start + j, head, -1, even_row), *odd = NULL;
        if (call->dot && j + 1 < length) odd = take_head(call, start + j + 1, head, -1, odd_row);
        pack_value(call->dot, even, odd, j, size, stride, values);
    }
}

/* Largest score of keys `low` to `high`. `begin` <= `low` is a multiple of WIDTH. */
INLINE float largest_score(const float *scores, long begin, long low, long high) {
    const vf nothing = v_set(-INFINITY);
    vf max_scores = nothing;
    for (long j = begin; j < high; j += WIDTH) {
        vf s = v_load(scores + j);
        if (j < low || j + WIDTH > high) s = v_only(s, low - j, high - j, nothing);
        max_scores = v_max(max_scores, s);
    }
    return v_largest(max_scores);
}

/* Computes 2^(score * log2 e + shift) for keys `low` to `high`, and 0 for the other keys from `begin` to `end`. Writes
 * bfloat16 to `rounded`, or overwrites the scores if it is NULL. Returns the sum. */
INLINE float exponentiate(float *scores, long begin, long end, long low, long high, vf shift, uint16_t *rounded) {
    long last = round_to(high, WIDTH);
    vf sum = v_zero();
    for (long j = begin; j < last; j += WIDTH) {
        vf p = exp2_of(v_fma(v_load(scores + j), v_set(LOG2_E), shift));
        if (j < low || j + WIDTH > high) p = v_only(p, low - j, high - j, v_zero());
        sum = v_add(sum, p);
        if (rounded)
            v_to_bf16(rounded + j, p);
        else
            v_store(scores + j, p);
    }
    for (long j = last; j < end; j++) {
        if (rounded)
            rounded[j] = 0;
        else
            scores[j] = 0.0f;
    }
    return v_sum(sum);
}

/* Softmax of the scores of one query without the division by the sum, which is returned.
 *
 * Keys `low` to `high` are visible. The other keys from `begin`, a multiple of WIDTH, to `end` get 0. Writes bfloat16 to
 * `rounded`, or overwrites the scores if it is NULL.
 */
INLINE float softmax(float *scores, long begin, long end, long low, long high, const float *bias, uint16_t *rounded) {
    if (bias)
        for (long j = low; j < high; j++) scores[j] += bias[j];
    float largest = largest_score(scores, begin, low, high);
    /* NaN if all visible scores are -inf; 0 if no key is visible. */
    vf shift = v_set(largest > -INFINITY ? -largest * LOG2_E : low < high ? NAN : 0.0f);
    return exponentiate(scores, begin, end, low, high, shift, rounded);
}

/* Packs rows `first` to `end` of a table of distances [R, size] as weights, like keys. */
static void pack_distances(const AttentionCall *call, const float *table, long first, long end, void *to) {
    long size = call->head_size, words = call->dot ? size / 2 : size;
    int32_t rows[WIDTH][words];
    for (long c = first; c < end; c += WIDTH) {
        for (long r = 0; r < WIDTH && c + r < call->layer->num_distances; r++) {
            const float *from = table + (c + r) * size;
            if (call->dot)
                for (long d = 0; d < size; d++) ((uint16_t *)rows[r])[d] = to_bf16(from[d]);
            else
                memcpy(rows[r], from, (size_t)size * 4);
        }
        pack_vector(rows[0], words, c, to);
    }
}

/* A tile of products in the type that attention computes in. `offset`: first element of `weights`. */
INLINE void multiply_tile(int dot, int rows, const void *x, long x_stride, const void *weights, long offset,
                          long num_in, float *out, long out_stride) {
#if HAS_DOT
    if (dot) {
        tile_dot(rows, x, x_stride, (const uint16_t *)weights + offset, num_in, out, out_stride);
        return;
    }
#endif
    (void)dot;
    tile_f32(rows, x, x_stride, (const float *)weights + offset, num_in, out, out_stride);
}

/* Products of up to MAX_ROWS rows of q or k with the packed distances of a sequence. */
static void multiply_distances(const AttentionCall *call, const Terms *terms, int rows, const void *x, long x_stride,
                               float *out) {
    long size = call->head_size;
    for (long c = terms->first; c < terms->end; c += PANEL)
        multiply_tile(call->dot, rows, x, x_stride, terms->packed, c * size, size, out + c, terms->stride);
}

/* Computes the products of all keys of one head, then packs distance_keys. `row` holds MAX_ROWS keys. */
static void prepare_terms(const AttentionCall *call, Terms *terms, long start, long length, long head, long kv_head,
                          float *row) {
    const Layer *layer = call->layer;
    long size = call->head_size, width = (call->heads + 2 * call->kv_heads) * size;
    long table = head * layer->num_distances * size;
    int in_place = call->is_bf16 == call->dot && !layer->rotary;
    terms->row_of = layer->distance_rows + layer->distance_reach;
    terms->first = terms->row_of[1 - length] / PANEL * PANEL;
    terms->end = round_to(terms->row_of[length - 1] + 1, PANEL);
    if (layer->distance_queries) {
        pack_distances(call, layer->distance_queries + table, terms->first, terms->end, terms->packed);
        for (long j = 0; j < length;) {
            int rows = product_rows(call->dot ? FORMAT_DOT : FORMAT_F32, length - j);
            const void *keys = row;
            if (in_place)
                keys = (const char *)call->qkv
                       + ((start + j) * width + (call->heads + kv_head) * size) * (call->dot ? 2 : 4);
            for (int r = 0; r < rows && !in_place; r++)
                take_head(call, start + j + r, call->heads + kv_head, j + r,
                          call->dot ? (void *)((uint16_t *)row + r * size) : row + r * size);
            multiply_distances(call, terms, rows, keys, in_place ? width : size, terms->of_keys + j * terms->stride);
            j += rows;
        }
    }
    if (layer->distance_keys)
        pack_distances(call, layer->distance_keys + table, terms->first, terms->end, terms->packed);
}

/* Adds the terms of `rows` queries from `first` on to their scores [rows, stride] of keys `begin` to `end`. Queries are
 * in the inner loop because neighbours read the same cache lines of a key. */
static void add_terms(const Layer *layer, const Terms *terms, int rows, long first, long begin, long end,
                      float *scores, long stride) {
    for (long j = begin; j < end; j++) {
        const int32_t *row_of = terms->row_of + first - j;
        const float *of_key = terms->of_keys + j * terms->stride;
        if (layer->distance_keys)
            for (int r = 0; r < rows; r++) scores[r * stride + j] += terms->of_queries[r * terms->stride + row_of[r]];
        if (layer->distance_queries)
            for (int r = 0; r < rows; r++) scores[r * stride + j] += of_key[row_of[r]];
    }
}

/* Attention of one head of one sequence. */
typedef struct {
    const AttentionCall *call;
    long start, length, visible; /* row of the first token, tokens, leading tokens that queries attend to */
    long head;
    const void *keys, *values;   /* packed */
    const Terms *terms;
    long stride;                 /* `length`, rounded to panels */
    float *scores;               /* [MAX_ROWS, stride] */
    uint16_t *rounded;           /* [MAX_ROWS, stride] probabilities in bfloat16 */
    float *rotated;              /* [MAX_ROWS, head size] queries that are not read in place */
} HeadAttention;

/* Queries `first` to `first + rows` of a sequence. */
typedef struct {
    long first;
    int rows;
    long low[MAX_ROWS], high[MAX_ROWS]; /* keys that each query attends to */
    long begin, end;                    /* range with these keys of all queries; `begin` is a multiple of PANEL */
    float inverse[MAX_ROWS];            /* 1 / sum of the exponentials of each query */
} QueryTile;

/* Sets the key ranges of a tile. */
static void set_key_ranges(const HeadAttention *head, QueryTile *tile) {
    const Layer *layer = head->call->layer;
    tile->begin = head->stride, tile->end = 0;
    for (int r = 0; r < tile->rows; r++) {
        long i = tile->first + r, low = layer->left >= 0 && i > layer->left ? i - layer->left : 0;
        long high = layer->right >= 0 && i + layer->right + 1 < head->visible ? i + layer->right + 1 : head->visible;
        low = low < high ? low : high;
        tile->low[r] = low, tile->high[r] = high;
        tile->begin = low < tile->begin ? low : tile->begin;
        tile->end = high > tile->end ? high : tile->end;
    }
    tile->begin = tile->begin / PANEL * PANEL;
}

/* Returns the queries of a tile in the type of the products and sets their stride. */
static const void *load_queries(const HeadAttention *head, const QueryTile *tile, long *stride) {
    const AttentionCall *call = head->call;
    long size = call->head_size, width = (call->heads + 2 * call->kv_heads) * size;
    if (call->is_bf16 == call->dot && !call->layer->rotary) {
        *stride = width;
        return (const char *)call->qkv
               + ((head->start + tile->first) * width + head->head * size) * (call->dot ? 2 : 4);
    }
    *stride = size;
    for (int r = 0; r < tile->rows; r++)
        take_head(call, head->start + tile->first + r, head->head, tile->first + r,
                  call->dot ? (void *)((uint16_t *)head->rotated + r * size) : head->rotated + r * size);
    return head->rotated;
}

/* Computes the scores of a tile of queries, without the bias by distance. */
static void compute_scores(const HeadAttention *head, const QueryTile *tile) {
    const AttentionCall *call = head->call;
    const Layer *layer = call->layer;
    long query_stride;
    const void *queries = load_queries(head, tile, &query_stride);
    for (long j = tile->begin; j < tile->end; j += PANEL)
        multiply_tile(call->dot, tile->rows, queries, query_stride, head->keys, j * call->head_size, call->head_size,
                      head->scores + j, head->stride);
    if (layer->distance_keys)
        multiply_distances(call, head->terms, tile->rows, queries, query_stride, head->terms->of_queries);
    if (layer->distance_rows)
        add_terms(layer, head->terms, tile->rows, tile->first, tile->begin, tile->end, head->scores, head->stride);
}

/* Replaces the scores of a tile by their exponentials, and sets `inverse`. */
static void compute_probabilities(const HeadAttention *head, QueryTile *tile) {
    const AttentionCall *call = head->call;
    const Layer *layer = call->layer;
    /* The product with the values needs whole pairs; an odd last value is paired with 0. */
    if (call->dot) tile->end = round_to(tile->end, 2);
    for (int r = 0; r < tile->rows; r++) {
        float *row = head->scores + r * head->stride;
        const float *bias = NULL;
        if (layer->bias)
            bias = layer->bias + head->head * (2 * layer->bias_reach + 1) + layer->bias_reach - (tile->first + r);
        int returns_weights = call->first_weights && tile->first + r == 0;
        uint16_t *rounded = call->dot && !returns_weights ? head->rounded + r * head->stride : NULL;
        float sum = softmax(row, tile->begin, tile->end, tile->low[r], tile->high[r], bias, rounded);
        tile->inverse[r] = sum > 0 ? 1.0f / sum : sum;
        if (!returns_weights) continue;
        for (long j = 0; j < head->length; j++)
            call->first_weights[(head->start + j) * call->heads + head->head] =
                j < tile->high[r] ? row[j] * tile->inverse[r] : 0.0f;
        if (call->dot)
            for (long j = tile->begin; j < tile->end; j++) head->rounded[j] = to_bf16(row[j]);
    }
}

/* Stores the product of the probabilities of a tile with the values. */
static void multiply_values(const HeadAttention *head, const QueryTile *tile) {
    const AttentionCall *call = head->call;
    long size = call->head_size;
    float sums[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    Target target = {.out = call->out, .out_is_bf16 = call->out_is_bf16, .width = call->heads * size};
    const void *probabilities = call->dot ? (const void *)(head->rounded + tile->begin) : head->scores + tile->begin;
    for (long column = 0; column < size; column += PANEL) {
        multiply_tile(call->dot, tile->rows, probabilities, head->stride, head->values,
                      column * head->stride + tile->begin * PANEL, tile->end - tile->begin, sums, PANEL);
        for (int r = 0; r < tile->rows; r++)
            for (long d = 0; d < PANEL && column + d < size; d += WIDTH)
                store_result(&target,
                             (head->start + tile->first + r) * target.width + head->head * size + column + d,
                             v_mul(v_load(sums + r * PANEL + d), v_set(tile->inverse[r])), size - column - d);
    }
}

/* Attention of all queries of one head over the packed keys and values. */
static void attend_head(const HeadAttention *head) {
    int format = head->call->dot ? FORMAT_DOT : FORMAT_F32;
    QueryTile tile;
    for (tile.first = 0; tile.first < head->length; tile.first += tile.rows) {
        tile.rows = product_rows(format, head->length - tile.first);
        set_key_ranges(head, &tile);
        compute_scores(head, &tile);
        compute_probabilities(head, &tile);
        multiply_values(head, &tile);
    }
}

/* Attention of the query heads that share key head `kv_head`, for one sequence. */
static void run_attention(const AttentionCall *call, long start, long length, long visible, long kv_head,
                          void *scratch) {
    long size = call->head_size, keys = round_to(length, PANEL), wide = round_to(size, PANEL);
    float *packed_keys = scratch, *packed_values = packed_keys + keys * size, *scores = packed_values + keys * wide;
    float *rounded = scores + MAX_ROWS * keys, *queries = rounded + MAX_ROWS * keys;
    Terms terms = {.stride = round_to(call->layer->num_distances, PANEL)};
    terms.packed = queries + MAX_ROWS * round_to(size, WIDTH);
    terms.of_queries = (float *)terms.packed + terms.stride * size;
    terms.of_keys = terms.of_queries + MAX_ROWS * terms.stride;
    pack_keys(call, start, length, kv_head, packed_keys);
    pack_values(call, start, length, kv_head, packed_values);
    long group = call->heads / call->kv_heads;
    for (long head = kv_head * group; head < (kv_head + 1) * group; head++) {
        if (call->layer->distance_rows) prepare_terms(call, &terms, start, length, head, kv_head, queries);
        attend_head(&(HeadAttention){.call = call, .start = start, .length = length, .visible = visible, .head = head,
                                     .keys = packed_keys, .values = packed_values, .terms = &terms, .stride = keys,
                                     .scores = scores, .rounded = (uint16_t *)rounded, .rotated = queries});
    }
}

#endif
