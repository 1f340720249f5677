/* Structs shared by the parts of the library and by Python: _abi.py mirrors them.
 *
 * Shape letters: R rows, K input width, N output width, D model width, H heads, T packed tokens, S sequences.
 */
#ifndef PENSTOCK_TYPES_H
#define PENSTOCK_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* Weight type and arithmetic of a product. */
enum Format {
    FORMAT_F32 = 0,  /* float32 weights, float32 arithmetic */
    FORMAT_BF16 = 1, /* bfloat16 weights, float32 inputs and arithmetic */
    FORMAT_DOT = 2,  /* bfloat16 weights and inputs, pairs of products summed in float32 */
    FORMAT_INT8 = 3, /* int8 weights with a scale per column, int8 inputs with a RowScale per row, sums in int32 */
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

/* Values of an int8 input row: x = scale * (byte - 128) + middle. */
typedef struct {
    float scale, middle;
} RowScale;

/* y = x W^T + bias, with W packed by `pack`. All pointers belong to the caller. */
typedef struct {
    int64_t in;          /* K; a multiple of 2 for FORMAT_DOT, of 4 for FORMAT_INT8 */
    int64_t out;         /* N; in a gated product twice the width of the result */
    int32_t format;      /* enum Format */
    int32_t activation;  /* enum Activation; in a gated product applied to the gate */
    int32_t gated;       /* the result is activation(first half) * second half */
    int32_t padding;
    const void *weights; /* panels, 64-byte aligned */
    const float *bias;   /* [N in panel order], zeros without a bias */
    const float *scales; /* FORMAT_INT8: [N in panel order] scale of each column */
    const int32_t *sums; /* FORMAT_INT8: [N in panel order] 128 times the sum of each column's weights */
} Product;

/* The arrays that `pack` reads and writes; the last four become those of the product. */
typedef struct {
    const Product *product;
    const float *weights; /* [N, K] */
    const float *bias;    /* [N] or NULL */
    void *packed;
    float *packed_bias, *scales;
    int32_t *sums;
} Packing;

/* A low-rank term of a product (LoRA): x down^T up^T is added to x W^T. */
typedef struct {
    Product down; /* K to r; in = 0: no term. FORMAT_DOT if the product is, else FORMAT_F32 */
    Product up;   /* r to N, FORMAT_F32, gated if the product is; includes the scale of the adapter */
} LowRank;

/* The low-rank terms of an adapter (Hu et al., arXiv 2106.09685). */
typedef struct {
    const LowRank *terms;         /* [layers, MAPS] */
    const float *embedding_down;  /* [V, embedding_rank], added to the word embeddings; NULL: no term */
    const float *embedding_up;    /* [embedding_rank, E] */
    int64_t embedding_rank;
} Adapter;

/* The products of a layer that may have low-rank terms. */
enum Map { MAP_QKV = 0, MAP_ATTENTION_OUT = 1, MAP_MLP_IN = 2, MAP_MLP_OUT = 3, MAPS = 4 };

/* (x - mean) / sqrt(var + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight if `rms`. */
typedef struct {
    const float *weight; /* [D]; NULL: no norm, rows are copied */
    const float *bias;   /* [D] or NULL */
    float eps;
    int32_t rms;
} Norm;

/* One layer. Post-norm (BERT): h = norm(x + attention(x)), norm(h + mlp(h)). With `after_attention`:
 * h = norm(x + after_attention(x + attention(x))). Pre-norm (ModernBERT, Llama):
 * h = x + attention(norm(x)), h + mlp(norm(h)). */
typedef struct {
    Norm attention_norm;
    Norm mlp_norm;
    Product qkv;           /* q, k and v side by side; q includes the scale of the scores */
    Product attention_out;
    Product mlp_in;
    Product mlp_out;
    int64_t left, right;   /* tokens before and after its own that a query attends to; -1: all */
    const float *rotary;   /* [positions, head size]: cosines, then sines; NULL: none */
    const float *bias;     /* [H, 2 * bias_reach + 1] added to the scores by distance; NULL: none */
    int64_t bias_reach;
    /* Terms of the scores with embeddings of distances (DeBERTa), encoders only. The score of query i and key j gets
     * q_i distance_keys[d] + k_j distance_queries[d] with d = distance_rows[distance_reach + i - j]. */
    const float *distance_keys;    /* [H, num_distances, head size]; NULL: no such term */
    const float *distance_queries; /* the same shape, with the scale of the scores; NULL: no such term */
    const int32_t *distance_rows;  /* [2 * distance_reach + 1], ascending; NULL: no terms */
    int64_t distance_reach, num_distances; /* num_distances is the same in all layers */
    Norm query_norm, key_norm; /* before the rotary embedding; decoders: [head size] of every head, encoders: [width of
                                * all heads] of all heads together */
    Norm after_attention;      /* pre-norm: of the output of attention, before the residual sum */
    /* Decoders only: */
    Norm after_mlp;            /* of the output of the MLP, before the residual sum */
    float softcap;             /* scores s become c tanh(s / c); 0: none */
    int32_t padding;
} Layer;

typedef struct {
    int64_t width;         /* D */
    int64_t num_layers;
    int64_t num_heads;     /* H */
    int64_t num_kv_heads;
    int64_t head_size;
    int32_t pre_norm;
    int32_t table_is_bf16; /* type of `word_embeddings` */
    int32_t attention_dot; /* attention computes in FORMAT_DOT (even head sizes only), else in float32 */
    int32_t is_decoder;    /* pre-norm, attention by tiles of keys (causal.h); no bias by distance, no Batch.visible */
    const void *word_embeddings;      /* [V, E] float32 or bfloat16 */
    const float *position_embeddings; /* [P, E] float32 sums of position and token type embeddings, or NULL */
    int64_t embedding_width; /* E */
    Norm embedding_norm;
    Product projection;    /* E to D; in = 0: none */
    const Layer *layers;
    Norm final_norm;
    const Adapter *adapters;
    int64_t max_rank;      /* largest r of all adapters; 0 without adapters */
    int64_t min_part_tokens; /* fewer tokens take a lane as long, because it reads all weights */
} Encoder;

/* Paged KV cache, [blocks, block size, kv heads, head size] per layer, in the type that attention computes in. Keys are
 * stored after norm and rotary embedding. */
typedef struct {
    void *const *keys;      /* [layers] */
    void *const *values;    /* [layers] */
    int64_t block_size;     /* tokens */
    const int32_t *context_lens; /* [S] tokens before the chunk */
    const int32_t *tables;  /* [S, table_width] blocks of these tokens, block_size tokens per block */
    int64_t table_width;
    const int64_t *slots;   /* [T] block * block size + row for a token's key and value; -1: not stored */
} KvBlocks;

/* Rows of each sequence that the caller needs: all, the first or the last. Others are left out after the attention of
 * the last layer. */
enum Kept { KEEP_ALL = 0, KEEP_FIRST = 1, KEEP_LAST = 2 };

/* Input and output of one forward: T packed tokens of S sequences, or (decoders) of S chunks of sequences. */
typedef struct {
    const int64_t *ids;       /* [T] */
    const float *rows;        /* [T, E] used instead of the word embeddings of `ids`, or NULL */
    const int64_t *positions; /* [T] rows of Encoder.position_embeddings */
    const int32_t *starts;    /* [S + 1], prefix sums of the lengths */
    const int32_t *visible;   /* [S] leading tokens that attention may read; NULL: all */
    int64_t num_seqs;
    const KvBlocks *kv_blocks; /* decoders; NULL: sequences are whole, and nothing is stored */
    float *hidden;            /* [T, D] the result; [S, D] if `kept` is not KEEP_ALL */
    float *first_weights;     /* [T, H] attention weights of each sequence's first token, last layer; or NULL */
    const int32_t *adapters;  /* [S] index in Encoder.adapters, -1: no adapter; NULL: no sequence has one */
    int64_t kept;             /* enum Kept; KEEP_ALL with adapters */
} Batch;

/* The low-rank terms of the rows of one product. */
typedef struct {
    const Product **ups; /* [R] LowRank.up of each row, NULL: no term */
    float *rows;         /* [R, stride] x down^T */
    int64_t stride;
} LowRankRows;

/* Destination of the result of a product. */
typedef struct {
    const float *add;    /* [R, width] added to the result, or NULL */
    void *out;           /* [R, width], bfloat16 if `out_is_bf16`, else float32 */
    int32_t out_is_bf16;
    int64_t width;       /* columns of the result, and stride of `add` and `out` */
} Target;

/* Arguments of one layer's attention, shared by the sequences of a forward. */
typedef struct {
    const Layer *layer;
    int64_t heads, kv_heads, head_size;
    int32_t dot;           /* compute in FORMAT_DOT */
    int32_t is_bf16;       /* type of `qkv`: bfloat16, else float32 */
    int32_t out_is_bf16;   /* type of `out` */
    const void *qkv;       /* [T, (heads + 2 * kv_heads) * head_size] */
    void *out;             /* [T, heads * head_size] */
    float *first_weights;  /* [T, heads] or NULL */
    char *cache_keys;      /* decoders: [blocks, block size, kv_heads, head_size] */
    char *cache_values;
    int64_t block_size;
} AttentionCall;

/* Chunk of one sequence in a batch of a decoder. */
typedef struct {
    long start, length;    /* rows */
    long context_len;      /* tokens before the chunk */
    const int32_t *table;  /* blocks of these tokens */
} Chunk;

/* Pooling of the rows of a sequence to one row. */
enum Pooling { POOL_CLS = 0, POOL_LAST = 1, POOL_MEAN = 2, POOL_MAX = 3, POOL_MEAN_SQRT_LEN = 4, POOL_WEIGHTED_MEAN = 5,
               POOL_WEIGHTED = 6 };

#endif
