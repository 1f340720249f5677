/* What the parts of the library say to each other, and what Python fills in: see _abi.py, which mirrors it.
 *
 * Shape letters: R rows, K input width, N output width, D model width, H heads, T packed tokens, S sequences.
 */
#ifndef PENSTOCK_TYPES_H
#define PENSTOCK_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* How the weights of a product are kept, and in what it is computed. */
enum Format {
    FORMAT_F32 = 0,  /* float32 weights, float32 arithmetic */
    FORMAT_BF16 = 1, /* bfloat16 weights, float32 inputs and arithmetic */
    FORMAT_DOT = 2,  /* bfloat16 weights and inputs, pairs of products added up in float32 */
    FORMAT_INT8 = 3, /* int8 weights per column, int8 inputs per row, sums in int32 */
    NUM_FORMATS = 4
};

enum Activation {
    ACT_NONE = 0,
    ACT_GELU = 1,
    ACT_GELU_TANH = 2,
    ACT_QUICK_GELU = 3,
    ACT_RELU = 4,
    ACT_SILU = 5,
    ACT_TANH = 6,
    NUM_ACTIVATIONS = 7
};

/* y = x W^T + bias, with W packed by `pack`. All pointers belong to the caller. */
typedef struct {
    int64_t in;          /* K; a multiple of 2 for FORMAT_DOT, of 4 for FORMAT_INT8 */
    int64_t out;         /* N; of a gated product twice the width of its result */
    int32_t format;      /* enum Format */
    int32_t activation;  /* enum Activation; of a gated product that of the gate */
    int32_t gated;       /* the result is activation(first half) * second half */
    int32_t unused;
    const void *weights; /* panels, 64-byte aligned */
    const float *bias;   /* [N as panels lie], zeros where there is none */
    const float *scales; /* FORMAT_INT8: [N as panels lie] of the columns */
    const int32_t *sums; /* FORMAT_INT8: [N as panels lie] 128 times the sum of each column's weights */
} Product;

/* (x - mean) / sqrt(var + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight where `rms`. */
typedef struct {
    const float *weight; /* [D]; NULL: the norm does nothing */
    const float *bias;   /* [D] or NULL */
    float eps;
    int32_t rms;
} Norm;

/* One layer. A post-norm layer (BERT) is h = norm(x + attention(x)), norm(h + mlp(h)); a pre-norm one (ModernBERT,
 * Llama) h = x + attention(norm(x)), h + mlp(norm(h)). */
typedef struct {
    Norm attention_norm;
    Norm mlp_norm;
    Product qkv;           /* q, k and v side by side, the scale of the scores in q */
    Product attention_out;
    Product mlp_in;
    Product mlp_out;
    int64_t left, right;   /* tokens that a query sees before and after its own; -1: all */
    const float *rotary;   /* [positions, head size]: cosines, then sines; NULL: none */
    const float *bias;     /* [H, 2 * bias_reach + 1] added to the scores by distance; NULL: none */
    int64_t bias_reach;
    /* Of decoders alone: */
    Norm query_norm, key_norm; /* [head size] of every head, before it turns */
    Norm after_attention;      /* of what attention gives, before it is added */
    Norm after_mlp;
    float softcap;             /* scores s become c tanh(s / c); 0: none */
    int32_t unused;
} Layer;

typedef struct {
    int64_t width;         /* D */
    int64_t num_layers;
    int64_t num_heads;     /* H */
    int64_t num_kv_heads;
    int64_t head_size;
    int32_t pre_norm;
    int32_t table_is_bf16; /* of `words` */
    int32_t attention_dot; /* attention computes in FORMAT_DOT, of an even head size; else in float32 */
    int32_t is_decoder;    /* pre-norm, attention block by block (blocks.h); no bias by distance, no hidden tokens */
    const void *words;     /* [V, E] float32 or bfloat16 */
    const float *places;   /* [P, E] float32, or NULL: positions and token types, summed */
    int64_t embedding_width; /* E */
    Norm embedding_norm;
    Product projection;    /* E to D; in = 0: none */
    const Layer *layers;
    Norm final_norm;
} Encoder;

/* Keys and values of tokens, [pages, page size, kv heads, head size] for each layer, in the type that attention
 * computes in, keys as they are after norm and position. */
typedef struct {
    void *const *keys;      /* [layers] */
    void *const *values;    /* [layers] */
    int64_t page_size;      /* tokens */
    const int32_t *pasts;   /* [S] tokens before the chunk */
    const int32_t *tables;  /* [S, table_width] the page of every page_size tokens of them */
    int64_t table_width;
    const int64_t *slots;   /* [T] page * page size + place where a token is kept; -1: it is not */
} Pages;

/* What one forward reads: T packed tokens of S sequences, or of decoders S chunks that go on with one. */
typedef struct {
    const int64_t *ids;       /* [T] */
    const int64_t *places;    /* [T] rows of Encoder.places */
    const int32_t *starts;    /* [S + 1], prefix sums of the lengths */
    const int32_t *visible;   /* [S] tokens that others may attend to; NULL: all */
    int64_t num_seqs;
    const Pages *pages;       /* of decoders; NULL: all sequences are whole, and nothing is kept */
    float *hidden;            /* [T, D] the result */
    float *first_weights;     /* [T, H] how much each sequence's first token attends to each, last layer; or NULL */
} Batch;

/* What becomes of the sums of a product. */
typedef struct {
    const float *add;    /* [R, width] added to the result, or NULL */
    void *out;           /* [R, width], bfloat16 if `out_is_bf16`, else float32 */
    int32_t out_is_bf16;
    int64_t width;       /* columns of the result, and stride of `add` and `out` */
} Target;

/* What the sequences of one forward share in one layer's attention. */
typedef struct {
    const Layer *layer;
    int64_t heads, kv_heads, head_size;
    int32_t dot;           /* compute in FORMAT_DOT */
    int32_t is_bf16;       /* type of `qkv`: bfloat16, else float32 */
    int32_t out_is_bf16;   /* type of `out` */
    const void *qkv;       /* [T, (heads + 2 * kv_heads) * head_size] */
    void *out;             /* [T, heads * head_size] */
    float *first_weights;  /* [T, heads] or NULL */
    char *page_keys;       /* of decoders: [pages, page size, kv_heads, head_size] */
    char *page_values;
    int64_t page_size;
} AttentionCall;

/* Tokens of one sequence in a batch of a decoder. */
typedef struct {
    long start, length;    /* rows */
    long past;             /* tokens before them */
    const int32_t *table;  /* of their pages */
} Chunk;

/* How hidden states become one row. */
enum Pooling { POOL_CLS = 0, POOL_LAST = 1, POOL_MEAN = 2, POOL_MAX = 3, POOL_MEAN_SQRT_LEN = 4, POOL_WEIGHTED_MEAN = 5,
               POOL_WEIGHTED = 6 };

#endif
