/* Detects the instruction sets that processor and operating system support. */
#include <string.h>

#include "isa.h"

#ifndef AMX_MODEL
#define AMX_MODEL 0 /* 1: amx_model.h emulates the tile registers; 2: additionally, amx needs no AVX-512 (vec.h) */
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* AMX-BF16, AMX-TILE and AMX-INT8, in EDX of leaf 7. */
#define AMX_FLAGS (1u << 22 | 1u << 24 | 1u << 25)

extern const Isa isa_amx, isa_avx512bf16, isa_avx512vnni, isa_avx512, isa_avx2vnni, isa_avx2, isa_plain;

/* Requests permission to use the tile registers of AMX, which Linux requires. Returns whether it was granted. */
static int may_use_tiles(void) {
#if AMX_MODEL
    return 1;
#else
    const long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#endif
}

static int all_of(unsigned flags, unsigned wanted) { return (flags & wanted) == wanted; }

const Isa *find_isa(const char *name) {
    /* Not __builtin_cpu_supports, which depends on the compiler's runtime library; some compilers lack it. */
    unsigned a, b, c, d, features = 0, more = 0, vnni = 0, latest = 0, tiles = AMX_MODEL, kept = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) features = c;
    /* XCR0: a feature is unusable if the operating system does not save its registers. */
    if (features & bit_OSXSAVE) __asm__ volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        more = b;
        vnni = c & bit_AVX512VNNI;
        tiles |= all_of(d, AMX_FLAGS) && all_of(kept, 0x60000);
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) latest = a;
    }
    int avx2 = all_of(kept, 0x06) && all_of(features, bit_AVX | bit_FMA) && all_of(more, bit_AVX2);
    int avx512 = avx2 && all_of(kept, 0xe6) && all_of(more, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
    int bf16 = avx512 && vnni && latest & bit_AVX512BF16;
    int wants_tiles = !name || !strcmp(name, isa_amx.name);
    const Isa *here[] = {
        (bf16 || AMX_MODEL == 2) && tiles && wants_tiles && may_use_tiles() ? &isa_amx : NULL,
        bf16 ? &isa_avx512bf16 : NULL,
        avx512 && vnni ? &isa_avx512vnni : NULL,
        avx512 ? &isa_avx512 : NULL,
        avx2 && latest & bit_AVXVNNI ? &isa_avx2vnni : NULL,
        avx2 ? &isa_avx2 : NULL,
    };
    for (unsigned i = 0; i < sizeof here / sizeof *here; i++)
        if (here[i] && (!name || !strcmp(name, here[i]->name))) return here[i];
    /* "plain" is never selected by default on x86-64: torch is as fast. Tests select it by name. */
    return name && !strcmp(name, isa_plain.name) ? &isa_plain : NULL;
}
#else
#include <sys/auxv.h>

/* Bits of AT_HWCAP and AT_HWCAP2 in Linux. Old C libraries do not define all names. */
#define HAS_DOTPROD (1ul << 20)
#define HAS_I8MM_AND_BF16 (1ul << 13 | 1ul << 14)

extern const Isa isa_neonmmla, isa_neondot, isa_neon, isa_plain;

const Isa *find_isa(const char *name) {
    int dot = (getauxval(AT_HWCAP) & HAS_DOTPROD) != 0;
    int mmla = dot && (getauxval(AT_HWCAP2) & HAS_I8MM_AND_BF16) == HAS_I8MM_AND_BF16;
    const Isa *here[] = {mmla ? &isa_neonmmla : NULL, dot ? &isa_neondot : NULL, &isa_neon, &isa_plain};
    for (unsigned i = 0; i < sizeof here / sizeof *here; i++)
        if (here[i] && (!name || !strcmp(name, here[i]->name))) return here[i];
    return NULL;
}
#endif
