/* Which instruction sets this processor has, and this operating system keeps the registers of. */
#include <string.h>

#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>

extern const Isa isa_avx512bf16, isa_avx512vnni, isa_avx512, isa_avx2vnni, isa_avx2, isa_plain;

static int all_of(unsigned flags, unsigned wanted) { return (flags & wanted) == wanted; }

const Isa *find_isa(const char *name) {
    /* Asked for here: what __builtin_cpu_supports says depends on the compiler's own library, and some have none. */
    unsigned a, b, c, d, features = 0, more = 0, vnni = 0, latest = 0, kept = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) features = c;
    /* XCR0: a feature whose registers the operating system does not keep is as good as missing. */
    if (features & bit_OSXSAVE) __asm__ volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        more = b;
        vnni = c & bit_AVX512VNNI;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) latest = a;
    }
    int avx2 = all_of(kept, 0x06) && all_of(features, bit_AVX | bit_FMA) && all_of(more, bit_AVX2);
    int avx512 = avx2 && all_of(kept, 0xe6) && all_of(more, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
    const Isa *here[] = {
        avx512 && vnni && latest & bit_AVX512BF16 ? &isa_avx512bf16 : NULL,
        avx512 && vnni ? &isa_avx512vnni : NULL,
        avx512 ? &isa_avx512 : NULL,
        avx2 && latest & bit_AVXVNNI ? &isa_avx2vnni : NULL,
        avx2 ? &isa_avx2 : NULL,
    };
    for (unsigned i = 0; i < sizeof here / sizeof *here; i++)
        if (here[i] && (!name || !strcmp(name, here[i]->name))) return here[i];
    /* Older processors do as well with torch; by its name the code for other machines can be tested here. */
    return name && !strcmp(name, isa_plain.name) ? &isa_plain : NULL;
}
#else
extern const Isa isa_plain;

const Isa *find_isa(const char *name) { return !name || !strcmp(name, isa_plain.name) ? &isa_plain : NULL; }
#endif
