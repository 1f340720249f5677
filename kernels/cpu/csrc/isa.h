/* The functions of one instruction set, and its selection. */
#ifndef PENSTOCK_ISA_H
#define PENSTOCK_ISA_H

#include "types.h"

typedef struct {
    const char *name;
    long panel;    /* columns per panel of packed weights */
    int formats;   /* bit mask of the supported enum Format */
    void (*enter)(void); /* each thread calls `enter` before and `leave` after computing; NULL: no call */
    void (*leave)(void);
    long (*panels)(const Product *product);
    long (*packed_bytes)(const Product *product);
    void (*pack)(const Packing *packing, long first_panel, long last_panel);
    void (*convert_rows)(int format, const float *x, long rows, long width, void *out, RowScale *scales);
    void (*run_product)(const Product *product, const void *x, const RowScale *row_scales, const LowRankRows *terms,
                        long rows, long first_panel, long last_panel, const Target *to, float *scratch);
    void (*run_norm)(const Norm *norm, const float *x, long rows, long width, float *y);
    long (*attention_bytes)(long length, long head_size, long distances);
    void (*run_attention)(const AttentionCall *call, long start, long length, long visible, long kv_head,
                          void *scratch);
    void (*prepare_row)(const AttentionCall *call, long row, long position, int64_t slot);
    long (*strip_bytes)(long heads, long kv_heads, long head_size);
    long (*strip_tokens)(long heads, long kv_heads);
    void (*run_strip)(const AttentionCall *call, const Chunk *chunk, long kv_head, long first, long count,
                      void *scratch);
    void (*run_pooling)(int pooling, const float *hidden, long stride, const float *weights, long start, long end,
                        long skip, long width, long dimensions, int normalize, float *out);
} Isa;

static inline void enter_isa(const Isa *isa) {
    if (isa->enter) isa->enter();
}
static inline void leave_isa(const Isa *isa) {
    if (isa->leave) isa->leave();
}

/* Returns the instruction set of that name (NULL: the widest) that processor and operating system support, else NULL. */
const Isa *find_isa(const char *name);

#endif
