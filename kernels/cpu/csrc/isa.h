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
    long (*panels)(const Product *);
    long (*packed_bytes)(const Product *);
    void (*pack)(const Product *, const float *, const float *, void *, float *, float *, int32_t *);
    void (*convert_rows)(int, const float *, long, long, void *, RowScale *);
    void (*run_product)(const Product *, const void *, const RowScale *, long, long, long, const Target *, float *);
    void (*run_norm)(const Norm *, const float *, long, long, float *);
    long (*attention_bytes)(long, long, long);
    void (*run_attention)(const AttentionCall *, long, long, long, long, void *);
    void (*prepare_row)(const AttentionCall *, long, long, int64_t);
    long (*blocks_bytes)(long, long, long);
    long (*strip_tokens)(long, long);
    void (*run_strip)(const AttentionCall *, const Chunk *, long, long, long, void *);
    void (*run_pooling)(int, const float *, long, const float *, long, long, long, long, long, int, float *);
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
