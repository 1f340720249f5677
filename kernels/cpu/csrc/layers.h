/* One part of a forward through all layers: see layers.c. */
#ifndef PENSTOCK_LAYERS_H
#define PENSTOCK_LAYERS_H

#include "isa.h"
#include "lanes.h"
#include "types.h"

/* A range of sequences of a batch, and their rows. */
typedef struct {
    long first, last;
    long start, rows; /* tokens */
} Part;

/* Intermediate results of one part. */
typedef struct {
    float *hidden;     /* [R, D] */
    float *sums;       /* [R, D] */
    void *input;       /* [R, widest] inputs of a product in its format */
    RowScale *scales;  /* [R] of `input` */
    void *qkv;         /* [R, (H + 2 Hkv) K] */
    void *attended;    /* [R, H K] */
    void *inner;       /* [R, I] */
    LowRankRows terms; /* of one product at a time */
} Rows;

/* One lane's context for run_part: a part for the lane alone, or the whole batch for joint lanes (see layers.c). */
typedef struct {
    const Isa *isa;
    const Encoder *encoder;
    const Batch *batch;
    Job *job;           /* the joint job */
    const Part *part;
    Rows rows;
    Part kept;             /* the rows of the part that are kept after the attention of the last layer */
    int index, members; /* of this lane in the joint job; 0 and 1 for a lane alone */
    char *scratch;         /* this lane's scratch for attention and products */
} LaneContext;

/* Sets the pointers of `out` to `memory`. Returns the size in bytes. NULL: returns only the size. */
long assign_buffers(const Encoder *encoder, long rows, char *memory, Rows *out);

/* Bytes of scratch per lane: packed heads, or a panel in float32. `longest`: tokens of the longest sequence. */
long lane_bytes(const Isa *isa, const Encoder *encoder, long longest);

/* Runs this lane's share of the part: embeddings, layers and final norm, written to Batch.hidden. */
void run_part(LaneContext *context);

#endif
