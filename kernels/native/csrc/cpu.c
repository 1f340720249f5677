/* Which instruction sets this processor has, and this operating system keeps the registers of. */
#include <string.h>

#include "isa.h"

#if defined(__x86_64__)
extern const Isa isa_avx512bf16, isa_avx512, isa_avx2, isa_plain;

const Isa *find_isa(const char *name) {
    __builtin_cpu_init(); /* reads XCR0 too: a feature whose registers are not kept is reported as missing */
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    const Isa *here[] = {bf16 ? &isa_avx512bf16 : NULL, avx512 ? &isa_avx512 : NULL, avx2 ? &isa_avx2 : NULL};
    for (unsigned i = 0; i < sizeof here / sizeof *here; i++)
        if (here[i] && (!name || !strcmp(name, here[i]->name))) return here[i];
    /* Older processors do as well with torch; by its name the code for other machines can be tested here. */
    return name && !strcmp(name, isa_plain.name) ? &isa_plain : NULL;
}
#else
extern const Isa isa_plain;

const Isa *find_isa(const char *name) { return !name || !strcmp(name, isa_plain.name) ? &isa_plain : NULL; }
#endif
