/* Functions that Python calls through ctypes; kernels/cpu/_abi.py declares them. */
#include <stdlib.h>

#include "forward.h"
#include "isa.h"
#include "lanes.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    const Isa *isa;
    Lanes *lanes;
    Scratch *scratch;
} Library;

/* Digest of the sources, set by build.py. Python rejects a library of other sources. */
EXPORT const char *penstock_sources(void) { return SOURCES; }

/* Name of the selected instruction set; "" if `wanted` is not supported. `wanted` NULL: the widest. */
EXPORT const char *penstock_isa(const char *wanted) {
    const Isa *isa = find_isa(wanted);
    return isa ? isa->name : "";
}

/* Starts the threads for forwards; NULL if that fails. With 0 lanes there are no threads: only functions that run on
 * the calling thread may be called, no forwards. */
EXPORT Library *penstock_open(const char *wanted, int num_lanes) {
    Library *library = calloc(1, sizeof *library);
    if (!library) return NULL;
    library->isa = find_isa(wanted);
    if (library->isa && !num_lanes) return library;
    library->lanes = library->isa ? lanes_open(num_lanes) : NULL;
    library->scratch = library->lanes ? calloc((size_t)num_lanes, sizeof(Scratch)) : NULL;
    if (library->scratch) return library;
    if (library->lanes) lanes_close(library->lanes);
    free(library);
    return NULL;
}

EXPORT void penstock_close(Library *library) {
    int count = library->lanes ? lanes_count(library->lanes) : 0;
    if (library->lanes) lanes_close(library->lanes); /* first, as lanes may still use their scratch */
    for (int i = 0; i < count; i++) free(library->scratch[i].memory);
    free(library->scratch);
    free(library);
}

EXPORT int penstock_formats(const Library *library) { return library->isa->formats; }

EXPORT long penstock_panel_columns(const Library *library, const Product *product) {
    return library->isa->panels(product) * library->isa->panel;
}

EXPORT long penstock_packed_bytes(const Library *library, const Product *product) {
    return library->isa->packed_bytes(product);
}

/* Weights from which lanes pack a product. The caller packs smaller ones, such as the queries of a request: it would
 * wait for running forwards. */
#define MIN_SHARED_WEIGHTS (1L << 20)

typedef struct {
    Job job;
    const Isa *isa;
    const Packing *packing;
} PackJob;

static void pack_share(Job *job, int unit, int lane) {
    PackJob *shared = (PackJob *)job;
    long panels = shared->isa->panels(shared->packing->product);
    (void)lane;
    shared->isa->pack(shared->packing, panels * unit / job->units, panels * (unit + 1) / job->units);
}

/* Packs W [N, K] float32 and bias [N] or NULL. `scales` and `sums` are for FORMAT_INT8. Lanes share large products. */
EXPORT void penstock_pack(const Library *library, const Product *product, const float *weights, const float *bias,
                          void *packed, float *packed_bias, float *scales, int32_t *sums) {
    Packing packing = {product, weights, bias, packed, packed_bias, scales, sums};
    PackJob shared = {.job = {.run = pack_share}, .isa = library->isa, .packing = &packing};
    if (!library->lanes || product->in * product->out < MIN_SHARED_WEIGHTS) {
        library->isa->pack(&packing, 0, library->isa->panels(product));
        return;
    }
    lanes_begin(library->lanes, &shared.job, lanes_count(library->lanes), 1);
    lanes_end(library->lanes, &shared.job);
}

/* Number of idle lanes. */
EXPORT int penstock_free_lanes(Library *library) { return lanes_free(library->lanes); }

/* Sets the file descriptor to write to when a forward ends or a lane becomes idle; -1: none. */
EXPORT void penstock_set_wakeup_fd(Library *library, int fd) { lanes_set_wakeup_fd(library->lanes, fd); }

/* Starts a forward; see forward_begin. */
EXPORT Forward *penstock_begin(Library *library, const Encoder *encoder, const Batch *batch) {
    return forward_begin(library->isa, encoder, batch, library->lanes, library->scratch);
}

EXPORT int penstock_is_done(const Forward *forward) { return forward_is_done(forward); }

/* Waits for a forward and frees it. Returns 0 if there was not enough memory. */
EXPORT int penstock_end(Forward *forward) { return forward_end(forward); }

/* y = product of float32 rows, on the calling thread. `input`, `scales` and `scratch` are scratch memory. */
EXPORT void penstock_product(const Library *library, const Product *product, const float *x, const float *add,
                             long rows, float *y, void *input, RowScale *scales, float *scratch) {
    const void *in = x;
    enter_isa(library->isa);
    if (product->format == FORMAT_DOT || product->format == FORMAT_INT8) {
        library->isa->convert_rows(product->format, x, rows, product->in, input, scales);
        in = input;
    }
    Target to = {.add = add, .out = y, .width = product->gated ? product->out / 2 : product->out};
    library->isa->run_product(product, in, scales, NULL, rows, 0, library->isa->panels(product), &to, scratch);
    leave_isa(library->isa);
}

/* Pools sequences [start, start + length) of hidden states [T, stride] to rows [S, width]. */
EXPORT void penstock_pool(const Library *library, int pooling, const float *hidden, long stride, const float *weights,
                          const int32_t *starts, const int32_t *lengths, const int32_t *skips, long num_seqs,
                          long width, const int32_t *dimensions, const uint8_t *normalize, float *out) {
    for (long s = 0; s < num_seqs; s++)
        library->isa->run_pooling(pooling, hidden, stride, weights, starts[s], (long)starts[s] + lengths[s],
                                  skips ? skips[s] : 0, width, dimensions ? dimensions[s] : width,
                                  normalize ? normalize[s] : 0, out + s * width);
}

/* Truncates rows [R, stride] to [R, width] and normalises them, like penstock_pool with sequences of one row. */
EXPORT void penstock_truncate_rows(const Library *library, const float *rows, long stride, long num_rows, long width,
                         int normalize, float *out) {
    for (long r = 0; r < num_rows; r++)
        library->isa->run_pooling(POOL_CLS, rows, stride, NULL, r, r + 1, 0, width, width, normalize, out + r * width);
}
