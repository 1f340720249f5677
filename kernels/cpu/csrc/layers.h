/* One part of a forward through all layers: see layers.c. */
#ifndef PENSTOCK_LAYERS_H
#define PENSTOCK_LAYERS_H

#include "isa.h"
#include "lanes.h"
#include "types.h"

/* Sequences of a batch that run side by side. */
typedef struct {
    long first, last;
    long start, rows; /* tokens */
} Part;

/* What one part needs between the steps of a layer. */
typedef struct {
    float *hidden;     /* [R, D] */
    float *sums;       /* [R, D] */
    void *input;       /* [R, widest] in the format of a product's inputs */
    float *scales;     /* [R] of `input` */
    void *qkv;         /* [R, (H + 2 Hkv) K] */
    void *attended;    /* [R, H K] */
    void *inner;       /* [R, I] */
} Rows;

/* One lane of those that go through a part. */
typedef struct {
    const Isa *isa;
    const Encoder *encoder;
    const Batch *batch;
    Job *job;           /* whose lanes meet */
    const Part *part;
    Rows rows;
    int member, members;
    char *own;          /* scratch for attention and products */
} Team;

/* Lays the rows of a part out at `at`, or only measures where `at` is NULL. Returns bytes. */
long lay_out(const Encoder *encoder, long rows, char *at, Rows *out);

/* Bytes that a lane needs for itself: packed heads, or a panel in float32. `longest`: tokens of a sequence. */
long own_bytes(const Isa *isa, const Encoder *encoder, long longest);

/* This lane's share of the part: embeddings, layers, final norm, to Batch.hidden. */
void run_part(Team *team);

#endif
