/* See encoder.c. */
#ifndef PENSTOCK_ENCODER_H
#define PENSTOCK_ENCODER_H

#include "isa.h"
#include "lanes.h"
#include "types.h"

/* Memory of one lane, which grows with what it is asked for. */
typedef struct {
    char *memory;
    long bytes;
} Scratch;

/* Runs a forward; `scratch` holds one entry a lane. Returns 0 where memory is short, and then nothing was written. */
int run_encoder(const Isa *isa, const Encoder *encoder, const Batch *batch, Lanes *lanes, Scratch *scratch);

#endif
