/* Attention of whole sequences, each to itself: softmax(q k^T + bias) v per head.
 *
 * Both products run through the tiles of tile.h: keys are packed as the weights of q k^T, values as those of the second
 * product. Sums and softmax are float32; FORMAT_DOT rounds q, k, v and the probabilities to bfloat16. A query's result
 * depends on its sequence alone.
 */
#ifndef PENSTOCK_ATTENTION_H
#define PENSTOCK_ATTENTION_H

#include <math.h>

#include "functions.h"
#include "product.h"

INLINE long round_to(long n, long step) { return (n + step - 1) / step * step; }

/* Bytes that a lane needs for sequences of up to `length` tokens. */
static long attention_bytes(long length, long head_size) {
    long keys = round_to(length, PANEL), values = round_to(head_size, PANEL);
    return 4 * (keys * head_size + keys * values + 2 * ROWS * keys + ROWS * round_to(head_size, WIDTH)) + 8 * 64;
}

/* One head of one token as floats, turned by its position where the layer is rotary. */
static void load_head(const AttentionCall *call, long row, long head, long position, float *to) {
    long size = call->head_size, at = (row * (call->heads + 2 * call->kv_heads) + head) * size;
    if (call->is_bf16) {
        for (long d = 0; d < size; d++) {
            uint32_t bits = (uint32_t)((const uint16_t *)call->qkv)[at + d] << 16;
            memcpy(to + d, &bits, 4);
        }
    } else {
        memcpy(to, (const float *)call->qkv + at, (size_t)size * 4);
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

/* Packs keys [L, size] as panels of the product q k^T, and values as panels of the product with the probabilities. */
static void pack_keys_values(const AttentionCall *call, long start, long length, const int32_t *positions, long kv_head,
                             void *keys, void *values) {
    long size = call->head_size, num_keys = round_to(length, PANEL), wide = round_to(size, PANEL);
    float row[size];
    for (long j = 0; j < num_keys; j++) {
        long panel = j / PANEL * PANEL * size, column = j % PANEL;
        if (j < length) load_head(call, start + j, call->heads + kv_head, positions ? positions[j] : j, row);
        else memset(row, 0, (size_t)size * 4);
        if (call->dot) {
            uint32_t *to = (uint32_t *)keys + panel / 2 + column; /* pairs of inputs: [size / 2][PANEL] */
            for (long d = 0; d < size; d += 2) to[d / 2 * PANEL] = to_bf16(row[d]) | (uint32_t)to_bf16(row[d + 1]) << 16;
        } else {
            float *to = (float *)keys + panel + column;
            for (long d = 0; d < size; d++) to[d * PANEL] = row[d];
        }
        if (j < length) load_head(call, start + j, call->heads + call->kv_heads + kv_head, -1, row);
        for (long first = 0; first < wide; first += PANEL) {
            long count = size - first < PANEL ? size - first : PANEL, base = first * num_keys;
            if (call->dot) {
                uint16_t *to = (uint16_t *)values + base + j / 2 * 2 * PANEL + j % 2;
                for (long d = 0; d < PANEL; d++) to[2 * d] = d < count ? to_bf16(row[first + d]) : 0;
            } else {
                float *to = (float *)values + base + j * PANEL;
                for (long d = 0; d < PANEL; d++) to[d] = d < count ? row[first + d] : 0.0f;
            }
        }
    }
}

/* Turns the scores of one query into probabilities that are not yet divided by their sum, which is returned.
 *
 * Keys `low` to `high` are seen; the floats from `begin` to `end`, multiples of PANEL around them, are written.
 */
INLINE float soften(float *scores, long begin, long end, long low, long high, const float *bias) {
    for (long j = begin; j < low; j++) scores[j] = -INFINITY;
    for (long j = high; j < end; j++) scores[j] = -INFINITY;
    if (bias)
        for (long j = low; j < high; j++) scores[j] += bias[j];
    vf most = v_set(-INFINITY), sum = v_zero();
    for (long j = begin; j < end; j += WIDTH) most = v_max(most, v_load(scores + j));
    float largest = v_largest(most);
    vf shift = v_set(largest > -INFINITY ? largest * LOG2_E : largest == largest ? 0.0f : largest);
    for (long j = begin; j < end; j += WIDTH)
        v_store(scores + j, exp2_of(v_sub(v_mul(v_load(scores + j), v_set(LOG2_E)), shift)));
    for (long j = begin; j < low; j++) scores[j] = 0.0f;
    for (long j = high; j < end; j++) scores[j] = 0.0f;
    for (long j = begin; j < end; j += WIDTH) sum = v_add(sum, v_load(scores + j));
    return v_sum(sum);
}

/* All queries of one head against the packed keys and values. */
static void attend_head(const AttentionCall *call, long start, long length, long visible, const int32_t *positions,
                        long head, const void *keys, const void *values, float *scores, uint16_t *rounded,
                        float *queries) {
    const Layer *layer = call->layer;
    long size = call->head_size, stride = round_to(length, PANEL), padded = round_to(size, 2);
    float sums[ROWS * PANEL] __attribute__((aligned(64)));
    for (long first = 0; first < length;) {
        int rows = tile_rows(length - first);
        long low[ROWS], high[ROWS], begin = stride, end = 0;
        for (int r = 0; r < rows; r++) {
            long i = first + r;
            low[r] = layer->left >= 0 && i > layer->left ? i - layer->left : 0;
            high[r] = layer->right >= 0 && i + layer->right + 1 < visible ? i + layer->right + 1 : visible;
            low[r] = low[r] < high[r] ? low[r] : high[r];
            begin = low[r] < begin ? low[r] : begin;
            end = high[r] > end ? high[r] : end;
            float row[size];
            load_head(call, start + i, head, positions ? positions[i] : i, row);
            if (call->dot)
                for (long d = 0; d < size; d++) ((uint16_t *)queries)[r * padded + d] = to_bf16(row[d]);
            else
                memcpy(queries + r * padded, row, (size_t)size * 4);
        }
        begin = begin / PANEL * PANEL;
        end = round_to(end, PANEL);
        for (long j = begin; j < end; j += PANEL) {
#if HAS_DOT
            if (call->dot)
                tile_dot(rows, (const uint16_t *)queries, padded, (const uint16_t *)keys + j * size, size, scores + j,
                         stride);
            else
#endif
                tile_f32(rows, queries, padded, (const float *)keys + j * size, size, scores + j, stride);
        }
        float inverse[ROWS];
        for (int r = 0; r < rows; r++) {
            float *row = scores + r * stride;
            const float *bias = NULL;
            if (layer->bias) bias = layer->bias + head * (2 * layer->bias_reach + 1) + layer->bias_reach - (first + r);
            float sum = soften(row, begin, end, low[r], high[r], bias);
            inverse[r] = sum > 0 ? 1.0f / sum : sum;
            if (call->first_weights && first + r == 0)
                for (long j = 0; j < length; j++)
                    call->first_weights[(start + j) * call->heads + head] = j < end ? row[j] * inverse[r] : 0.0f;
            if (call->dot)
                for (long j = begin; j < end; j += WIDTH) v_to_bf16(rounded + r * stride + j, v_load(row + j));
        }
        for (long column = 0; column < size; column += PANEL) {
            long at = column * stride + begin * PANEL;
#if HAS_DOT
            if (call->dot)
                tile_dot(rows, rounded + begin, stride, (const uint16_t *)values + at, end - begin, sums, PANEL);
            else
#endif
                tile_f32(rows, scores + begin, stride, (const float *)values + at, end - begin, sums, PANEL);
            for (int r = 0; r < rows; r++) {
                long to = ((start + first + r) * call->heads + head) * size + column;
                vf scale = v_set(inverse[r]);
                for (long d = 0; d < PANEL && column + d < size; d += WIDTH) {
                    Target target = {.out = call->out, .out_is_bf16 = call->is_bf16, .width = 0};
                    store_result(&target, 0, to + d, v_mul(v_load(sums + r * PANEL + d), scale), size - column - d);
                }
            }
        }
        first += rows;
    }
}

/* The heads that share keys and values number `kv_head`, of one sequence. */
static void run_attention(const AttentionCall *call, long start, long length, long visible, const int32_t *positions,
                          long kv_head, void *scratch) {
    long size = call->head_size, keys = round_to(length, PANEL), wide = round_to(size, PANEL);
    float *packed_keys = scratch, *packed_values = packed_keys + keys * size, *scores = packed_values + keys * wide;
    float *rounded = scores + ROWS * keys, *queries = rounded + ROWS * keys;
    pack_keys_values(call, start, length, positions, kv_head, packed_keys, packed_values);
    long group = call->heads / call->kv_heads;
    for (long head = kv_head * group; head < (kv_head + 1) * group; head++)
        attend_head(call, start, length, visible, positions, head, packed_keys, packed_values, scores,
                    (uint16_t *)rounded, queries);
}

#endif
