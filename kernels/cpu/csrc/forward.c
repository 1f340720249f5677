/* Forward of a whole encoder or decoder: embeddings, layers, final norm.
 *
 * A batch is divided into parts of whole sequences. A lane takes a part and runs it through all layers. If parts would
 * keep the lanes busy for different times, or if they are so small that each lane would mostly wait for the weights,
 * idle lanes run all layers jointly instead and synchronise after every step. Both ways give the same bits, because no
 * sum is split.
 */
#include "forward.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "layers.h"

/* Tokens per part, few enough for the caches. */
#define MAX_PART_TOKENS 320
/* Lanes run jointly if the largest part has more than this many times the tokens of a lane's share. */
#define JOINT_RATIO 1.25

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
    int is_joint = job->members > 1;
    const Part *part = is_joint ? &forward->whole : forward->parts + unit;
    Rows *rows = is_joint ? &forward->rows : &(Rows){0};
    long lane_scratch = lane_bytes(forward->isa, encoder, forward->longest);
    long bytes = assign_buffers(encoder, part->rows, NULL, &(Rows){0});
    /* A lane keeps the memory of small parts for its next part. Memory of long texts and joint jobs is freed. */
    int is_temporary = is_joint || part->rows > MAX_PART_TOKENS, is_first = !is_joint || unit == 0;
    Scratch temporary = {0};
    if (!grow(scratch, lane_scratch + (is_temporary ? 0 : bytes)) ||
        (is_temporary && is_first && !grow(&temporary, bytes)))
        atomic_store(&forward->lacks_memory, 1);
    else if (is_first)
        assign_buffers(encoder, part->rows, is_temporary ? temporary.memory : scratch->memory + lane_scratch, rows);
    lanes_barrier(job);
    if (!atomic_load(&forward->lacks_memory)) {
        LaneContext context = {.isa = forward->isa, .encoder = encoder, .batch = &forward->batch, .job = job,
                               .part = part, .rows = *rows, .index = is_joint ? unit : 0,
                               .members = job->members, .scratch = scratch->memory};
        enter_isa(forward->isa);
        run_part(&context);
        leave_isa(forward->isa);
    }
    free(temporary.memory); /* safe: the lanes have synchronised after the last step */
}

/* Divides the batch into parts of about `target` tokens. Returns their number. */
static int split_into_parts(const Batch *batch, long target, Part *parts) {
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

/* Order of parts: the largest first, so that the lanes end at almost the same time (longest processing time rule, Graham
 * 1969). Batches are sorted by length, so of two equal parts the later one has longer sequences and needs more time. */
static int compare_parts(const void *left, const void *right) {
    const Part *a = left, *b = right;
    if (a->rows != b->rows) return a->rows > b->rows ? -1 : 1;
    return a->first > b->first ? -1 : 1;
}

/* Maximum joint lanes: each has at least two panels of every product. More would lose the gain to synchronisation. */
static int max_joint_lanes(const Isa *isa, const Encoder *encoder) {
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
    long least = encoder->min_part_tokens;
    if (target > 4 * least) target = (target + 1) / 2;
    target = target > MAX_PART_TOKENS ? MAX_PART_TOKENS : target < least ? least : target;
    *forward = (Forward){.job = {.run = work}, .lanes = lanes, .isa = isa, .encoder = encoder, .batch = *batch,
                         .scratch = scratch, .longest = longest, .parts = parts,
                         .whole = {.last = batch->num_seqs, .rows = total}};
    forward->num_parts = split_into_parts(batch, target, parts);
    qsort(parts, (size_t)forward->num_parts, sizeof(Part), compare_parts);
    long largest = parts->rows > least ? parts->rows : least; /* a smaller part takes as long */
    int joint = max_joint_lanes(isa, encoder) < count ? max_joint_lanes(isa, encoder) : (int)count;
    int runs_jointly = (double)largest * (double)joint > JOINT_RATIO * (double)total;
    lanes_begin(lanes, &forward->job, forward->num_parts, runs_jointly ? joint : 1);
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
