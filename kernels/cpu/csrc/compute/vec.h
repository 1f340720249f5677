/* Float vectors with the same names for every instruction set.
 *
 *   vf          WIDTH floats in one register
 *   ROWS, VECS  size of a tile in registers: ROWS x VECS sums, VECS weights, one input (tile.h)
 *   vi          if HAS_INT8: WIDTH int32 in one register. vi_dot adds to each the products of four unsigned bytes of
 *               `a` and four signed bytes of `b`, without saturation. x86 uses inline assembly, because gcc 12
 *               stores the sums to memory at every call of the intrinsic. If DOT_IS_SIGNED, vi_dot first subtracts
 *               128 from the bytes of `a`
 *
 * bfloat16 is the upper half of a float32, rounded to nearest, ties to even. The conversion instruction flushes numbers
 * below 2^-126 to 0; the other conversions keep them.
 */
#ifndef PENSTOCK_VEC_H
#define PENSTOCK_VEC_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512F__)

#include <immintrin.h>
typedef __m512 vf;
#define WIDTH 16
#define ROWS 12
#define VECS 2

INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* NaN in `b` is kept: if one operand is NaN, x86 returns the second. */
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
/* The larger of a >= 0 and |b|; NaN counts as larger than inf. */
INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, 8); }
/* Returns x - floor(x); `whole` is the argument of v_scale2 for floor(x). */
INLINE vf v_split(vf x, vf *whole) {
    *whole = x;
    return _mm512_reduce_ps(x, 9);
}
INLINE vf v_copysign(vf magnitude, vf sign) {
    const __m512i bit = _mm512_set1_epi32((int)0x80000000u);
    __m512i m = _mm512_castps_si512(magnitude), s = _mm512_castps_si512(sign);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_andnot_si512(bit, m), _mm512_and_si512(bit, s)));
}
/* x * 2^n for integers n in -126..128 and x >= 1 */
INLINE vf v_scale2(vf x, vf n) { return _mm512_scalef_ps(x, n); }
/* Elements `from` to `to` of x; the other elements come from `other`. */
INLINE vf v_only(vf x, long from, long to, vf other) {
    unsigned below = to <= 0 ? 0 : to >= WIDTH ? 0xffffu : (1u << to) - 1;
    unsigned left_out = from <= 0 ? 0 : from >= WIDTH ? 0xffffu : (1u << from) - 1;
    return _mm512_mask_mov_ps(other, (__mmask16)(below & ~left_out), x);
}
INLINE vf v_from_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
INLINE void v_to_bf16(uint16_t *p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(rounded));
#endif
}

/* Converts integers from 0 to 255 to bytes; the result for other values is undefined. */
INLINE void v_to_bytes(uint8_t *p, vf x) {
    _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

#if defined(__AVX512VNNI__)
#define HAS_INT8 1
typedef __m512i vi;
INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vf vi_difference(vi a, vi b) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, b)); }
INLINE vi vi_dot(vi sum, vi a, vi b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#endif

#elif defined(__AVX2__)

#include <immintrin.h>
typedef __m256 vf;
#define WIDTH 8
#define ROWS 6
#define VECS 2

INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_split(vf x, vf *whole) { return _mm256_sub_ps(x, *whole = _mm256_floor_ps(x)); }
INLINE vf v_copysign(vf magnitude, vf sign) {
    const vf bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
INLINE vf v_scale2(vf x, vf n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
INLINE vf v_from_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
INLINE void v_to_bf16(uint16_t *p, vf x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(packed));
}
INLINE void v_to_bytes(uint8_t *p, vf x) {
    __m256i whole = _mm256_cvtps_epi32(x);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((void *)p, _mm_packus_epi16(words, words));
}

#if defined(__AVXVNNI__)
#define HAS_INT8 1
typedef __m256i vi;
INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vi vi_set(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vi vi_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE vf vi_difference(vi a, vi b) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(a, b)); }
INLINE vi vi_dot(vi sum, vi a, vi b) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
#endif

#elif defined(__ARM_NEON) && !PLAIN

#include <arm_neon.h>
typedef float32x4_t vf;
typedef int32x4_t vi;
#define WIDTH 4
#define ROWS 6
#define VECS 4

INLINE vf v_zero(void) { return vdupq_n_f32(0); }
INLINE vf v_set(float x) { return vdupq_n_f32(x); }
INLINE vf v_load(const float *p) { return vld1q_f32(p); }
INLINE void v_store(float *p, vf x) { vst1q_f32(p, x); }
INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf v_max(vf a, vf b) { return vmaxq_f32(a, b); } /* NaN in either operand is kept */
INLINE vf v_min(vf a, vf b) { return vminq_f32(a, b); }
INLINE vf v_abs(vf a) { return vabsq_f32(a); }
INLINE vf v_round(vf a) { return vrndnq_f32(a); }
INLINE vf v_split(vf x, vf *whole) { return vsubq_f32(x, *whole = vrndmq_f32(x)); }
INLINE vf v_copysign(vf magnitude, vf sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
INLINE vf v_scale2(vf x, vf n) {
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
INLINE vf v_from_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INLINE void v_to_bf16(uint16_t *p, vf x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)), 16));
}
INLINE void v_to_bytes(uint8_t *p, vf x) {
    uint16x4_t words = vmovn_u32(vcvtq_u32_f32(x));
    uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    memcpy(p, &bytes, sizeof bytes);
}

#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_INT8 1
#define DOT_IS_SIGNED 1
INLINE vi vi_zero(void) { return vdupq_n_s32(0); }
INLINE vi vi_set(int32_t x) { return vdupq_n_s32(x); }
INLINE vi vi_load(const void *p) { return vld1q_s32(p); }
INLINE vf vi_difference(vi a, vi b) { return vcvtq_f32_s32(vsubq_s32(a, b)); }
INLINE vi vi_dot(vi sum, vi a, vi b) {
    int8x16_t inputs = veorq_s8(vreinterpretq_s8_s32(a), vdupq_n_s8(-128));
    return vdotq_s32(sum, inputs, vreinterpretq_s8_s32(b));
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_DOT 1
#define HAS_MMLA 1
#endif

#else

/* Other machines, with the compiler's vector extension. With HAS_AMX the width is that of AVX-512, which the panels of
 * AMX need: tests run amx_model.h on processors without AVX-512. */
#include <math.h>
#if HAS_AMX
#define WIDTH 16
#define ROWS 12
#define VECS 2
#else
#define WIDTH 4
#define ROWS 3
#define VECS 4
#endif
typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));

INLINE vf v_zero(void) { return (vf){0}; }
INLINE vf v_set(float x) { return x - (vf){0}; }
INLINE vf v_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_sub(vf a, vf b) { return a - b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
INLINE vf v_div(vf a, vf b) { return a / b; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf v_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf v_max(vf a, vf b) { return v_select(a > b, a, b); }
INLINE vf v_min(vf a, vf b) { return v_select(a < b, a, b); }
INLINE vf v_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
INLINE vf v_round(vf a) {
    const vf big = v_set(12582912.0f); /* 1.5 * 2^23: adding it rounds |a| < 2^22 to an integer */
    return (a + big) - big;
}
INLINE vf v_split(vf x, vf *whole) {
    vf n = v_round(x);
    *whole = n - v_select(n > x, v_set(1.0f), v_zero());
    return x - *whole;
}
INLINE vf v_copysign(vf magnitude, vf sign) {
    return (vf)(((vi)magnitude & 0x7fffffff) | ((vi)sign & (int32_t)0x80000000u));
}
INLINE vf v_scale2(vf x, vf n) { return x * (vf)((__builtin_convertvector(n, vi) + 127) << 23); }
INLINE vf v_from_bf16(const uint16_t *p) {
    uint16_t halves __attribute__((vector_size(2 * WIDTH)));
    memcpy(&halves, p, sizeof halves);
    return (vf)(__builtin_convertvector(halves, vi) << 16);
}
INLINE void v_to_bf16(uint16_t *p, vf x) {
    uint32_t bits[WIDTH];
    memcpy(bits, &x, sizeof bits);
    for (int i = 0; i < WIDTH; i++) {
        uint32_t b = bits[i];
        p[i] = (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
    }
}
INLINE void v_to_bytes(uint8_t *p, vf x) {
    float lanes[WIDTH];
    v_store(lanes, x);
    for (int i = 0; i < WIDTH; i++) p[i] = lanes[i] >= 0 && lanes[i] <= 255 ? (uint8_t)lanes[i] : 0;
}

#if HAS_AMX
#define HAS_DOT 1
#define HAS_INT8 1
INLINE vi vi_zero(void) { return (vi){0}; }
INLINE vi vi_set(int32_t x) { return x - (vi){0}; }
INLINE vi vi_load(const void *p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE vf vi_difference(vi a, vi b) { return __builtin_convertvector(a - b, vf); }
INLINE vi vi_dot(vi sum, vi a, vi b) {
    const vi byte = vi_set(0xff);
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & byte) * (b << (24 - shift) >> 24);
    return sum;
}
#endif

#endif

#if !defined(__AVX512F__)
INLINE vf v_only(vf x, long from, long to, vf other) {
    float lanes[WIDTH];
    v_store(lanes, other);
    for (long i = from > 0 ? from : 0; i < to && i < WIDTH; i++) lanes[i] = x[i];
    return v_load(lanes);
}
#endif

#ifndef DOT_IS_SIGNED
#define DOT_IS_SIGNED 0
#endif

/* Columns of a panel of weights, and of a tile. */
#define PANEL (WIDTH * VECS)

/* Loads 32-bit values at `p`, `p + stride`, ... */
INLINE vf v_load_strided(const int32_t *p, long stride) {
#if defined(__AVX512F__)
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_castsi512_ps(_mm512_i32gather_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32((int)stride)), p, 4));
#else
    int32_t lanes[WIDTH];
    for (int i = 0; i < WIDTH; i++) lanes[i] = p[i * stride];
    vf x;
    memcpy(&x, lanes, sizeof x);
    return x;
#endif
}

/* Sum and maximum of the floats of a vector, in a fixed order. */
#if defined(__AVX512F__)
INLINE float v_sum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float v_largest(vf x) { return _mm512_reduce_max_ps(x); }
#else
INLINE float v_sum(vf x) {
    float lanes[WIDTH];
    v_store(lanes, x);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
}
INLINE float v_largest(vf x) {
    float lanes[WIDTH];
    v_store(lanes, x);
    for (int i = 1; i < WIDTH; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}
#endif

/* Loads the first `count` floats at `p`; the other elements are 0. */
INLINE vf v_load_part(const float *p, long count) {
    if (count >= WIDTH) return v_load(p);
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(count > 0 ? (__mmask16)((1u << count) - 1) : 0, p);
#endif
    float lanes[WIDTH] = {0};
    if (count > 0) memcpy(lanes, p, (size_t)count * sizeof(float));
    return v_load(lanes);
}
INLINE void v_store_part(float *p, vf x, long count) {
    if (count >= WIDTH) {
        v_store(p, x);
        return;
    }
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, count > 0 ? (__mmask16)((1u << count) - 1) : 0, x);
    return;
#endif
    float lanes[WIDTH];
    v_store(lanes, x);
    if (count > 0) memcpy(p, lanes, (size_t)count * sizeof(float));
}
INLINE uint16_t to_bf16(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

#endif
