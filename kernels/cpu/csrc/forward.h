/* See forward.c. */
#ifndef PENSTOCK_FORWARD_H
#define PENSTOCK_FORWARD_H

#include "isa.h"
#include "lanes.h"
#include "types.h"

/* Memory of one lane, which grows with what it is asked for. */
typedef struct {
    char *memory;
    long bytes;
} Scratch;

typedef struct Forward Forward;

/* Begins a forward on the lanes; `scratch` holds one entry a lane. What `encoder` and `batch` point to lives until
 * forward_end has returned; `batch` itself is copied. NULL where memory is short. */
Forward *forward_begin(const Isa *isa, const Encoder *encoder, const Batch *batch, Lanes *lanes, Scratch *scratch);

/* Whether forward_end will not wait. */
int forward_is_done(const Forward *forward);

/* Waits for a forward and forgets it. Returns 0 where memory was short, and then what was written is of no use. */
int forward_end(Forward *forward);

#endif
