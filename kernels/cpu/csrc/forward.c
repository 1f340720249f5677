/* Forward of a whole encoder or decoder: embeddings, layers, final norm.
 *
 * A batch is divided into parts of whole sequences. A lane takes a part and runs it through all layers. If one sequence
 * is much longer than the others, idle lanes run all layers jointly instead and synchronise after every step. Both ways
 * give the same bits, because no sum is split.
 */
#include "forward.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "layers.h"

/* Tokens per part: enough to amortise reading the weights, and few enough for the caches. */
#define LEAST_TOKENS 24
#define MOST_TOKENS 320
/* Lanes run jointly if the longest sequence has more than this many times the tokens of a lane's share. */
#define HEAVY 1.25

struct Forward {
    Job job;
    Lanes *lanes;
    const Isa *isa;
    const Encoder *encoder;
    Batch batch;
    Scratch *scratch;  /* one per lane */
    long longest;      /* tokens of the longest sequence */
    Part whole;        /* the whole batch, for joint lanes */
    Rows rows;         /* memory of `whole` */
    int num_parts;
    Part *parts;
    atomic_int lacks_memory;
};

static int grow(Scratch *scratch, long bytes) {
    if (scratch->bytes >= bytes) return 1;
    free(scratch->memory);
    scratch->memory = NULL;
    scratch->bytes = 0;
    if (posix_memalign((void **)&scratch->memory, 64, (size_t)bytes)) return 0;
    scratch->bytes = bytes;
    return 1;
}

/* Unit of a job: a part for one lane, or one lane's share of the whole batch. */
static void work(Job *job, int unit, int lane) {
    Forward *forward = (Forward *)job;
    const Encoder *encoder = forward->encoder;
    Scratch *scratch = &forward->scratch[lane];
    int together = job->members > 1;
    /* Batches are sorted by length: run the last parts, with the longest sequences, first. */
    const Part *part = together ? &forward->whole : forward->parts + (forward->num_parts - 1 - unit);
    Rows *rows = together ? &forward->rows : &(Rows){0};
    long own = own_bytes(forward->isa, encoder, forward->longest), bytes = lay_out(encoder, part->rows, NULL, &(Rows){0});
    /* A lane keeps the memory of small parts for its next part. Memory of long texts and joint jobs is freed. */
    int is_lent = together || part->rows > MOST_TOKENS, is_first = !together || unit == 0;
    Scratch lent = {0};
    if (!grow(scratch, own + (is_lent ? 0 : bytes)) || (is_lent && is_first && !grow(&lent, bytes)))
        atomic_store(&forward->lacks_memory, 1);
    else if (is_first)
        lay_out(encoder, part->rows, is_lent ? lent.memory : scratch->memory + own, rows);
    lanes_barrier(job);
    if (!atomic_load(&forward->lacks_memory)) {
        Team team = {.isa = forward->isa, .encoder = encoder, .batch = &forward->batch, .job = job, .part = part,
                     .rows = *rows, .member = together ? unit : 0, .members = job->members, .own = scratch->memory};
        enter_isa(forward->isa);
        run_part(&team);
        leave_isa(forward->isa);
    }
    free(lent.memory); /* safe: the lanes have synchronised after the last step */
}

/* Divides the batch into parts of about `target` tokens. Returns their number. */
static int cut(const Batch *batch, long target, Part *parts) {
    int count = 0;
    Part part = {0};
    for (long s = 0; s < batch->num_seqs; s++) {
        long start = batch->starts[s], length = batch->starts[s + 1] - start;
        if (part.rows && part.rows + length > target) {
            parts[count++] = part;
            part = (Part){.first = s, .start = start};
        }
        part.last = s + 1;
        part.rows += length;
    }
    parts[count++] = part;
    return count;
}

/* Maximum joint lanes: each has at least two panels of every product. More would lose the gain to synchronisation. */
static int most_together(const Isa *isa, const Encoder *encoder) {
    long narrowest = isa->panels(&encoder->layers->attention_out);
    return narrowest < 4 ? 2 : (int)(narrowest / 2);
}

Forward *forward_begin(const Isa *isa, const Encoder *encoder, const Batch *batch, Lanes *lanes, Scratch *scratch) {
    Forward *forward = malloc(sizeof *forward);
    Part *parts = malloc((size_t)batch->num_seqs * sizeof(Part));
    if (!forward || !parts) {
        free(forward);
        free(parts);
        return NULL;
    }
    long total = batch->starts[batch->num_seqs], longest = 0, count = lanes_count(lanes);
    for (long s = 0; s < batch->num_seqs; s++) {
        long length = batch->starts[s + 1] - batch->starts[s];
        longest = length > longest ? length : longest;
    }
    long target = total / count + total % count;
    if (target > 2 * LEAST_TOKENS) target = (target + 1) / 2;
    target = target > MOST_TOKENS ? MOST_TOKENS : target < LEAST_TOKENS ? LEAST_TOKENS : target;
    *forward = (Forward){.job = {.run = work}, .lanes = lanes, .isa = isa, .encoder = encoder, .batch = *batch,
                         .scratch = scratch, .longest = longest, .parts = parts,
                         .whole = {.last = batch->num_seqs, .rows = total}};
    forward->num_parts = cut(batch, target, parts);
    int is_heavy = (double)longest * (double)count > HEAVY * (double)total;
    lanes_begin(lanes, &forward->job, forward->num_parts, is_heavy ? most_together(isa, encoder) : 1);
    return forward;
}

int forward_is_done(const Forward *forward) { return lanes_is_done(&forward->job); }

int forward_end(Forward *forward) {
    lanes_end(forward->lanes, &forward->job);
    int done = !atomic_load(&forward->lacks_memory);
    free(forward->parts);
    free(forward);
    return done;
}
