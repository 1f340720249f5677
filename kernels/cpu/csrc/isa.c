/* Compiled once per instruction set (see build.py); ISA is its name and the suffix of the table. */
#include "compute/attention.h"
#include "compute/causal.h"
#include "isa.h"
#include "compute/norm.h"
#include "compute/pooling.h"
#include "compute/product.h"

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

static long panels(const Product *product) { return panels_of(product); }
static long bytes(const Product *product) { return packed_bytes(product); }

const Isa JOIN(isa_, ISA) = {
    .name = TEXT(ISA),
    .panel = PANEL,
    .formats = 1 << FORMAT_F32 | 1 << FORMAT_BF16
#if HAS_DOT
               | 1 << FORMAT_DOT
#endif
#if HAS_INT8
               | 1 << FORMAT_INT8
#endif
    ,
#if HAS_AMX
    .enter = amx_enter,
    .leave = amx_leave,
#endif
    .panels = panels,
    .packed_bytes = bytes,
    .pack = pack,
    .convert_rows = convert_rows,
    .run_product = run_product,
    .run_norm = run_norm,
    .attention_bytes = attention_bytes,
    .run_attention = run_attention,
    .prepare_row = prepare_row,
    .strip_bytes = strip_bytes,
    .strip_tokens = strip_tokens,
    .run_strip = run_strip,
    .run_pooling = run_pooling,
};
