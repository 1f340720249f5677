/* The steps of a layer. Joint lanes divide a step by rows, by panels of a product, or by heads of sequences. */
#include "layers.h"

#include <string.h>

static long inner_width(const Product *product) { return product->gated ? product->out / 2 : product->out; }

static int keeps_bf16(const Product *product) { return product->format == FORMAT_DOT; }

static long round_up(long bytes) { return (bytes + 63) / 64 * 64; }

static int needs_copy(int format) { return format == FORMAT_DOT || format == FORMAT_INT8; }

long assign_buffers(const Encoder *encoder, long rows, char *at, Rows *out) {
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
                    rows * inner * 4};
    void **buffers[] = {(void **)&out->hidden, (void **)&out->sums, &out->input, (void **)&out->scales, &out->qkv,
                       &out->attended, &out->inner};
    long total = 0;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (at) *buffers[i] = at + total;
        total += round_up(sizes[i]);
    }
    return total;
}

static void barrier(const Team *team) {
    if (team->members > 1) lanes_barrier(team->job);
}

/* This lane's share of `count` items. */
static void share(const Team *team, long count, long *first, long *last) {
    *first = count * team->member / team->members;
    *last = count * (team->member + 1) / team->members;
}

/* A product over the rows of the part. `x` is float32, or in the product's format if `is_ready`. */
static void step_product(Team *team, const Product *product, const void *x, int is_ready, const Target *to) {
    const Isa *isa = team->isa;
    long rows = team->part->rows, first, last;
    if (needs_copy(product->format) && !is_ready) {
        long bytes = product->format == FORMAT_DOT ? 2 : 1;
        share(team, rows, &first, &last);
        isa->convert_rows(product->format, (const float *)x + first * product->in, last - first, product->in,
                          (char *)team->rows.input + first * product->in * bytes, team->rows.scales + first);
        barrier(team);
        x = team->rows.input;
    }
    share(team, isa->panels(product), &first, &last);
    isa->run_product(product, x, team->rows.scales, rows, first, last, to, (float *)team->scratch);
    barrier(team);
}

static void step_norm(Team *team, const Norm *norm, const float *x, long width, float *y) {
    long first, last;
    share(team, team->part->rows, &first, &last);
    team->isa->run_norm(norm, x + first * width, last - first, width, y + first * width);
    barrier(team);
}

/* Norms of q and of k, all heads of a token together, in place. */
static void step_row_norms(Team *team, const Layer *layer) {
    const Encoder *encoder = team->encoder;
    long q = encoder->num_heads * encoder->head_size, k = encoder->num_kv_heads * encoder->head_size, first, last;
    share(team, team->part->rows, &first, &last);
    for (long i = first; i < last; i++) {
        float *row = (float *)team->rows.qkv + i * (q + 2 * k);
        team->isa->run_norm(&layer->query_norm, row, 1, q, row);
        team->isa->run_norm(&layer->key_norm, row + q, 1, k, row + q);
    }
    barrier(team);
}

/* x += norm(y). Overwrites y. */
static void step_norm_add(Team *team, const Norm *norm, float *y, long width, float *x) {
    long first, last;
    share(team, team->part->rows, &first, &last);
    team->isa->run_norm(norm, y + first * width, last - first, width, y + first * width);
    for (long i = first * width; i < last * width; i++) x[i] += y[i];
    barrier(team);
}

/* Attention of a decoder: prepares the heads of every token, then runs strips of queries over the keys. */
static void step_decoder_attention(Team *team, AttentionCall *call) {
    const Batch *batch = team->batch;
    const Pages *pages = batch->pages;
    const Part *part = team->part;
    const Isa *isa = team->isa;
    long index = call->layer - team->encoder->layers, first, last, unit = 0;
    long step = isa->strip_tokens(call->heads, call->kv_heads);
    if (pages) {
        call->page_keys = pages->keys[index];
        call->page_values = pages->values[index];
        call->page_size = pages->page_size;
    }
    share(team, part->rows, &first, &last);
    for (long s = part->first; s < part->last; s++) {
        long start = batch->starts[s] - part->start, past = pages ? pages->pasts[s] : 0;
        for (long row = start; row < batch->starts[s + 1] - part->start; row++)
            if (row >= first && row < last)
                isa->prepare_row(call, row, past + row - start, pages ? pages->slots[part->start + row] : -1);
    }
    barrier(team);
    for (long s = part->first; s < part->last; s++) {
        Chunk chunk = {.start = batch->starts[s] - part->start, .length = batch->starts[s + 1] - batch->starts[s]};
        if (pages) {
            chunk.past = pages->pasts[s];
            chunk.table = pages->tables + s * pages->table_width;
        }
        for (long i = 0; i < chunk.length; i += step)
            for (long head = 0; head < call->kv_heads; head++, unit++)
                if (unit % team->members == team->member)
                    isa->run_strip(call, &chunk, head, i, chunk.length - i < step ? chunk.length - i : step,
                                   team->scratch);
    }
    barrier(team);
}

static void step_attention(Team *team, const Layer *layer, int dot, int is_bf16, int is_last) {
    const Encoder *encoder = team->encoder;
    const Batch *batch = team->batch;
    const Part *part = team->part;
    AttentionCall call = {.layer = layer, .heads = encoder->num_heads, .kv_heads = encoder->num_kv_heads,
                          .head_size = encoder->head_size,
                          .dot = dot, .is_bf16 = is_bf16, .out_is_bf16 = keeps_bf16(&layer->attention_out),
                          .qkv = team->rows.qkv, .out = team->rows.attended};
    if (encoder->is_decoder) {
        step_decoder_attention(team, &call);
        return;
    }
    if (is_last && batch->first_weights) call.first_weights = batch->first_weights + part->start * encoder->num_heads;
    long unit = 0, units = (part->last - part->first) * encoder->num_kv_heads, first, last;
    share(team, units, &first, &last);
    for (long s = part->first; s < part->last; s++)
        for (long head = 0; head < encoder->num_kv_heads; head++, unit++) {
            if (unit < first || unit >= last) continue;
            long start = batch->starts[s], length = batch->starts[s + 1] - start;
            team->isa->run_attention(&call, start - part->start, length,
                                              batch->visible ? batch->visible[s] : length, head, team->scratch);
        }
    barrier(team);
}

static void embed(Team *team) {
    const Encoder *encoder = team->encoder;
    const Batch *batch = team->batch;
    long E = encoder->embedding_width, first, last;
    float *to = encoder->projection.in ? (float *)team->rows.inner : team->rows.hidden;
    share(team, team->part->rows, &first, &last);
    for (long r = first; r < last; r++) {
        long token = team->part->start + r;
        float *row = to + r * E;
        if (encoder->table_is_bf16) {
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
    team->isa->run_norm(&encoder->embedding_norm, to + first * E, last - first, E, to + first * E);
    barrier(team);
    if (encoder->projection.in) {
        Target target = {.out = team->rows.hidden, .width = encoder->width};
        step_product(team, &encoder->projection, to, 0, &target);
    }
}

static void run_layer(Team *team, const Layer *layer, int is_last) {
    const Encoder *encoder = team->encoder;
    Rows *rows = &team->rows;
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
        step_norm(team, &layer->attention_norm, rows->hidden, D, rows->sums);
        x = rows->sums;
    }
    step_product(team, &layer->qkv, x, 0, &qkv);
    if (has_row_norms) step_row_norms(team, layer);
    step_attention(team, layer, dot, bf16, is_last);
    step_product(team, &layer->attention_out, rows->attended, keeps_bf16(&layer->attention_out), &attended);
    if (layer->after_attention.weight) step_norm_add(team, &layer->after_attention, rows->sums, D, rows->hidden);
    if (encoder->pre_norm) {
        step_norm(team, &layer->mlp_norm, rows->hidden, D, rows->sums);
        x = rows->sums;
    } else {
        x = layer->after_attention.weight ? rows->hidden : rows->sums;
        step_norm(team, &layer->attention_norm, x, D, rows->hidden);
        x = rows->hidden;
    }
    step_product(team, &layer->mlp_in, x, 0, &inner);
    step_product(team, &layer->mlp_out, rows->inner, inner.out_is_bf16, &out);
    if (layer->after_mlp.weight) step_norm_add(team, &layer->after_mlp, rows->sums, D, rows->hidden);
    if (!encoder->pre_norm) step_norm(team, &layer->mlp_norm, rows->sums, D, rows->hidden);
}

void run_part(Team *team) {
    const Encoder *encoder = team->encoder;
    embed(team);
    for (long i = 0; i < encoder->num_layers; i++) run_layer(team, encoder->layers + i, i + 1 == encoder->num_layers);
    float *to = team->batch->hidden + team->part->start * encoder->width;
    step_norm(team, &encoder->final_norm, team->rows.hidden, encoder->width, to);
}

long lane_bytes(const Isa *isa, const Encoder *encoder, long longest) {
    long heads = encoder->is_decoder
                     ? isa->blocks_bytes(encoder->num_heads, encoder->num_kv_heads, encoder->head_size)
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
