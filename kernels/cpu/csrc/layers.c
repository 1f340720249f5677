/* The steps of a layer.
 *
 * Joint lanes: all lanes that run one long sequence together. They divide a step by rows, by panels of a product, or by
 * heads of sequences, and synchronise after it. A lane alone runs all of a step.
 */
#include "layers.h"

#include <string.h>

static long inner_width(const Product *product) { return product->gated ? product->out / 2 : product->out; }

static int keeps_bf16(const Product *product) { return product->format == FORMAT_DOT; }

static long round_up(long bytes) { return (bytes + 63) / 64 * 64; }

static int needs_copy(int format) { return format == FORMAT_DOT || format == FORMAT_INT8; }

long assign_buffers(const Encoder *encoder, long rows, char *memory, Rows *out) {
    const Layer *layer = encoder->layers;
    long D = encoder->width, heads = encoder->num_heads * encoder->head_size;
    long qkv = (encoder->num_heads + 2 * encoder->num_kv_heads) * encoder->head_size;
    long widest = D > heads ? D : heads, inner = 0, E = encoder->embedding_width;
    for (long i = 0; i < encoder->num_layers; i++)
        if (inner_width(&layer[i].mlp_in) > inner) inner = inner_width(&layer[i].mlp_in);
    widest = inner > widest ? inner : widest;
    widest = E > widest ? E : widest;
    inner = E > inner ? E : inner;
    long sizes[] = {rows * D * 4, rows * D * 4, rows * widest * 4, rows * (long)sizeof(RowScale), rows * qkv * 4, rows * heads * 4,
                    rows * inner * 4, rows * encoder->max_rank * 4, encoder->max_rank ? rows * (long)sizeof(void *) : 0};
    void **buffers[] = {(void **)&out->hidden, (void **)&out->sums, &out->input, (void **)&out->scales, &out->qkv,
                       &out->attended, &out->inner, (void **)&out->terms.rows, (void **)&out->terms.ups};
    long total = 0;
    out->terms.stride = encoder->max_rank;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (memory) *buffers[i] = memory + total;
        total += round_up(sizes[i]);
    }
    return total;
}

static void barrier(const LaneContext *context) {
    if (context->members > 1) lanes_barrier(context->job);
}

/* This lane's share of `count` items. */
static void share(const LaneContext *context, long count, long *first, long *last) {
    *first = count * context->index / context->members;
    *last = count * (context->index + 1) / context->members;
}

/* Sets this lane's rows of Rows.terms for a product: runs the down products of the adapters. `x`: float32 rows. `ready`:
 * the rows in the format of the product. */
static void step_low_rank(LaneContext *context, const Layer *layer, enum Map map, const float *x, const void *ready) {
    const Encoder *encoder = context->encoder;
    const Batch *batch = context->batch;
    const LowRankRows *terms = &context->rows.terms;
    long index = (layer - encoder->layers) * MAPS + map, first, last, end;
    share(context, context->part->rows, &first, &last);
    for (long s = context->part->first; s < context->part->last; s = end) {
        int adapter = batch->adapters[s];
        for (end = s + 1; end < context->part->last && batch->adapters[end] == adapter;) end++;
        long begin = batch->starts[s] - context->part->start, stop = batch->starts[end] - context->part->start;
        begin = begin < first ? first : begin;
        stop = stop > last ? last : stop;
        if (begin >= stop) continue;
        const LowRank *term = adapter < 0 ? NULL : encoder->adapters[adapter].terms + index;
        if (term && !term->down.in) term = NULL;
        for (long row = begin; row < stop; row++) terms->ups[row] = term ? &term->up : NULL;
        if (!term) continue;
        const Product *down = &term->down;
        const void *rows = down->format == FORMAT_DOT ? (const void *)((const uint16_t *)ready + begin * down->in)
                                                      : (const void *)(x + begin * down->in);
        Target to = {.out = terms->rows + begin * terms->stride, .width = terms->stride};
        context->isa->run_product(down, rows, NULL, NULL, stop - begin, 0, context->isa->panels(down), &to, NULL);
    }
    barrier(context);
}

/* A product over the rows of the part. `x` is float32, or in the product's format if `is_ready`. `layer`: the layer with
 * the low-rank terms of the product, NULL: it has none. */
static void step_product(LaneContext *context, const Product *product, const Layer *layer, enum Map map, const void *x,
                         int is_ready, const Target *to) {
    const Isa *isa = context->isa;
    const void *given = x;
    long rows = context->part->rows, first, last;
    if (needs_copy(product->format) && !is_ready) {
        long bytes = product->format == FORMAT_DOT ? 2 : 1;
        share(context, rows, &first, &last);
        isa->convert_rows(product->format, (const float *)x + first * product->in, last - first, product->in,
                          (char *)context->rows.input + first * product->in * bytes, context->rows.scales + first);
        barrier(context);
        x = context->rows.input;
    }
    int has_terms = layer && context->batch->adapters;
    if (has_terms) step_low_rank(context, layer, map, given, x);
    share(context, isa->panels(product), &first, &last);
    isa->run_product(product, x, context->rows.scales, has_terms ? &context->rows.terms : NULL, rows, first, last, to,
                     (float *)context->scratch);
    barrier(context);
}

static void step_norm(LaneContext *context, const Norm *norm, const float *x, long width, float *y) {
    long first, last;
    share(context, context->part->rows, &first, &last);
    context->isa->run_norm(norm, x + first * width, last - first, width, y + first * width);
    barrier(context);
}

/* Norms of q and of k, all heads of a token together, in place. */
static void step_row_norms(LaneContext *context, const Layer *layer) {
    const Encoder *encoder = context->encoder;
    long q = encoder->num_heads * encoder->head_size, k = encoder->num_kv_heads * encoder->head_size, first, last;
    share(context, context->part->rows, &first, &last);
    for (long i = first; i < last; i++) {
        float *row = (float *)context->rows.qkv + i * (q + 2 * k);
        context->isa->run_norm(&layer->query_norm, row, 1, q, row);
        context->isa->run_norm(&layer->key_norm, row + q, 1, k, row + q);
    }
    barrier(context);
}

/* x += norm(y). Overwrites y. */
static void step_norm_add(LaneContext *context, const Norm *norm, float *y, long width, float *x) {
    long first, last;
    share(context, context->part->rows, &first, &last);
    context->isa->run_norm(norm, y + first * width, last - first, width, y + first * width);
    for (long i = first * width; i < last * width; i++) x[i] += y[i];
    barrier(context);
}

/* Attention of a decoder: prepares the heads of every token, then runs strips of queries over the keys. */
static void step_decoder_attention(LaneContext *context, AttentionCall *call) {
    const Batch *batch = context->batch;
    const KvBlocks *blocks = batch->kv_blocks;
    const Part *part = context->part;
    const Isa *isa = context->isa;
    long index = call->layer - context->encoder->layers, first, last, unit = 0;
    long step = isa->strip_tokens(call->heads, call->kv_heads);
    if (blocks) {
        call->cache_keys = blocks->keys[index];
        call->cache_values = blocks->values[index];
        call->block_size = blocks->block_size;
    }
    share(context, part->rows, &first, &last);
    for (long s = part->first; s < part->last; s++) {
        long start = batch->starts[s] - part->start, context_len = blocks ? blocks->context_lens[s] : 0;
        for (long row = start; row < batch->starts[s + 1] - part->start; row++)
            if (row >= first && row < last)
                isa->prepare_row(call, row, context_len + row - start, blocks ? blocks->slots[part->start + row] : -1);
    }
    barrier(context);
    for (long s = part->first; s < part->last; s++) {
        Chunk chunk = {.start = batch->starts[s] - part->start, .length = batch->starts[s + 1] - batch->starts[s]};
        if (blocks) {
            chunk.context_len = blocks->context_lens[s];
            chunk.table = blocks->tables + s * blocks->table_width;
        }
        for (long i = 0; i < chunk.length; i += step)
            for (long head = 0; head < call->kv_heads; head++, unit++)
                if (unit % context->members == context->index)
                    isa->run_strip(call, &chunk, head, i, chunk.length - i < step ? chunk.length - i : step,
                                   context->scratch);
    }
    barrier(context);
}

static void step_attention(LaneContext *context, const Layer *layer, int dot, int is_bf16, int is_last) {
    const Encoder *encoder = context->encoder;
    const Batch *batch = context->batch;
    const Part *part = context->part;
    AttentionCall call = {.layer = layer, .heads = encoder->num_heads, .kv_heads = encoder->num_kv_heads,
                          .head_size = encoder->head_size,
                          .dot = dot, .is_bf16 = is_bf16, .out_is_bf16 = keeps_bf16(&layer->attention_out),
                          .qkv = context->rows.qkv, .out = context->rows.attended};
    if (encoder->is_decoder) {
        step_decoder_attention(context, &call);
        return;
    }
    if (is_last && batch->first_weights) call.first_weights = batch->first_weights + part->start * encoder->num_heads;
    long unit = 0, units = (part->last - part->first) * encoder->num_kv_heads, first, last;
    share(context, units, &first, &last);
    for (long s = part->first; s < part->last; s++)
        for (long head = 0; head < encoder->num_kv_heads; head++, unit++) {
            if (unit < first || unit >= last) continue;
            long start = batch->starts[s], length = batch->starts[s + 1] - start;
            context->isa->run_attention(&call, start - part->start, length,
                                              batch->visible ? batch->visible[s] : length, head, context->scratch);
        }
    barrier(context);
}

/* Moves the kept row of each sequence to the front of the hidden states and of the attention's output. From here on the
 * part has one row per sequence. */
static void keep_rows(LaneContext *context, const Layer *layer) {
    const Batch *batch = context->batch;
    const Part *part = context->part;
    size_t hidden = (size_t)context->encoder->width * 4;
    size_t attended = (size_t)layer->attention_out.in * (keeps_bf16(&layer->attention_out) ? 2 : 4);
    if (context->index == 0)
        for (long s = part->first; s < part->last; s++) {
            long to = s - part->first;
            long from = (batch->kept == KEEP_FIRST ? batch->starts[s] : batch->starts[s + 1] - 1) - part->start;
            if (from == to) continue;
            memcpy((char *)context->rows.hidden + to * hidden, (char *)context->rows.hidden + from * hidden, hidden);
            memcpy((char *)context->rows.attended + to * attended, (char *)context->rows.attended + from * attended,
                   attended);
        }
    context->kept = *part;
    context->kept.rows = part->last - part->first;
    context->part = &context->kept;
    barrier(context);
}

/* Adds the low-rank terms of the word embeddings to the rows from `first` to `last`. */
static void embed_low_rank(LaneContext *context, float *to, long first, long last) {
    const Encoder *encoder = context->encoder;
    const Batch *batch = context->batch;
    long E = encoder->embedding_width, start = context->part->start;
    for (long s = context->part->first; s < context->part->last; s++) {
        const Adapter *adapter = batch->adapters[s] < 0 ? NULL : encoder->adapters + batch->adapters[s];
        if (!adapter || !adapter->embedding_down) continue;
        for (long row = batch->starts[s] - start; row < batch->starts[s + 1] - start; row++) {
            if (row < first || row >= last) continue;
            const float *down = adapter->embedding_down + batch->ids[start + row] * adapter->embedding_rank;
            for (long r = 0; r < adapter->embedding_rank; r++)
                for (long d = 0; d < E; d++) to[row * E + d] += down[r] * adapter->embedding_up[r * E + d];
        }
    }
}

static void embed(LaneContext *context) {
    const Encoder *encoder = context->encoder;
    const Batch *batch = context->batch;
    long E = encoder->embedding_width, first, last;
    float *to = encoder->projection.in ? (float *)context->rows.inner : context->rows.hidden;
    share(context, context->part->rows, &first, &last);
    for (long r = first; r < last; r++) {
        long token = context->part->start + r;
        float *row = to + r * E;
        if (batch->rows) {
            memcpy(row, batch->rows + token * E, (size_t)E * 4);
        } else if (encoder->table_is_bf16) {
            const uint16_t *word = (const uint16_t *)encoder->word_embeddings + batch->ids[token] * E;
            for (long d = 0; d < E; d++) {
                uint32_t bits = (uint32_t)word[d] << 16;
                memcpy(row + d, &bits, 4);
            }
        } else {
            memcpy(row, (const float *)encoder->word_embeddings + batch->ids[token] * E, (size_t)E * 4);
        }
        if (encoder->position_embeddings) {
            const float *position = encoder->position_embeddings + batch->positions[token] * E;
            for (long d = 0; d < E; d++) row[d] += position[d];
        }
    }
    if (batch->adapters) embed_low_rank(context, to, first, last);
    context->isa->run_norm(&encoder->embedding_norm, to + first * E, last - first, E, to + first * E);
    barrier(context);
    if (encoder->projection.in) {
        Target target = {.out = context->rows.hidden, .width = encoder->width};
        step_product(context, &encoder->projection, NULL, 0, to, 0, &target);
    }
}

static void run_layer(LaneContext *context, const Layer *layer, int is_last) {
    const Encoder *encoder = context->encoder;
    Rows *rows = &context->rows;
    long D = encoder->width;
    const float *x = rows->hidden;
    int dot = encoder->attention_dot, has_row_norms = layer->query_norm.weight && !encoder->is_decoder;
    int bf16 = dot && !layer->rotary && !encoder->is_decoder && !has_row_norms;
    Target qkv = {.out = rows->qkv, .out_is_bf16 = bf16, .width = layer->qkv.out};
    Target attended = {.add = rows->hidden, .out = encoder->pre_norm ? rows->hidden : rows->sums, .width = D};
    Target inner = {.out = rows->inner, .out_is_bf16 = keeps_bf16(&layer->mlp_out), .width = inner_width(&layer->mlp_in)};
    Target out = attended;
    if (layer->after_attention.weight && encoder->pre_norm) attended = (Target){.out = rows->sums, .width = D};
    if (layer->after_mlp.weight) out = (Target){.out = rows->sums, .width = D};

    if (encoder->pre_norm) {
        step_norm(context, &layer->attention_norm, rows->hidden, D, rows->sums);
        x = rows->sums;
    }
    step_product(context, &layer->qkv, layer, MAP_QKV, x, 0, &qkv);
    if (has_row_norms) step_row_norms(context, layer);
    step_attention(context, layer, dot, bf16, is_last);
    if (is_last && context->batch->kept != KEEP_ALL) keep_rows(context, layer);
    step_product(context, &layer->attention_out, layer, MAP_ATTENTION_OUT, rows->attended,
                 keeps_bf16(&layer->attention_out), &attended);
    if (layer->after_attention.weight) step_norm_add(context, &layer->after_attention, rows->sums, D, rows->hidden);
    if (encoder->pre_norm) {
        step_norm(context, &layer->mlp_norm, rows->hidden, D, rows->sums);
        x = rows->sums;
    } else {
        x = layer->after_attention.weight ? rows->hidden : rows->sums;
        step_norm(context, &layer->attention_norm, x, D, rows->hidden);
        x = rows->hidden;
    }
    step_product(context, &layer->mlp_in, layer, MAP_MLP_IN, x, 0, &inner);
    step_product(context, &layer->mlp_out, layer, MAP_MLP_OUT, rows->inner, inner.out_is_bf16, &out);
    if (layer->after_mlp.weight) step_norm_add(context, &layer->after_mlp, rows->sums, D, rows->hidden);
    if (!encoder->pre_norm) step_norm(context, &layer->mlp_norm, rows->sums, D, rows->hidden);
}

void run_part(LaneContext *context) {
    const Encoder *encoder = context->encoder;
    embed(context);
    for (long i = 0; i < encoder->num_layers; i++) run_layer(context, encoder->layers + i, i + 1 == encoder->num_layers);
    long first = context->batch->kept == KEEP_ALL ? context->part->start : context->part->first;
    float *to = context->batch->hidden + first * encoder->width;
    step_norm(context, &encoder->final_norm, context->rows.hidden, encoder->width, to);
}

long lane_bytes(const Isa *isa, const Encoder *encoder, long longest) {
    long heads = encoder->is_decoder
                     ? isa->strip_bytes(encoder->num_heads, encoder->num_kv_heads, encoder->head_size)
                     : isa->attention_bytes(longest, encoder->head_size, encoder->layers->num_distances);
    long widest = encoder->projection.in;
    for (long i = 0; i < encoder->num_layers; i++) {
        const Layer *layer = encoder->layers + i;
        const Product *products[] = {&layer->qkv, &layer->attention_out, &layer->mlp_in, &layer->mlp_out};
        for (int p = 0; p < 4; p++) widest = products[p]->in > widest ? products[p]->in : widest;
    }
    long panel = 4 * isa->panel * widest;
    return round_up(heads > panel ? heads : panel);
}
