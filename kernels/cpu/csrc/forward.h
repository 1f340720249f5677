/* See forward.c. */
#ifndef PENSTOCK_FORWARD_H
#define PENSTOCK_FORWARD_H

#include "isa.h"
#include "lanes.h"
#include "types.h"

/* Memory of one lane; grows on demand. */
typedef struct {
    char *memory;
    long bytes;
} Scratch;

typedef struct Forward Forward;

/* Starts a forward on the lanes; `scratch` has one entry per lane. The memory that `encoder` and `batch` point to must
 * stay valid until forward_end has returned; `batch` itself is copied. Returns NULL if there is not enough memory. */
Forward *forward_begin(const Isa *isa, const Encoder *encoder, const Batch *batch, Lanes *lanes, Scratch *scratch);

/* Whether forward_end returns without waiting. */
int forward_is_done(const Forward *forward);

/* Waits for a forward and frees it. Returns 0 if there was not enough memory; the output is then undefined. */
int forward_end(Forward *forward);

#endif
