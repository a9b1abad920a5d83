// AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo::avx512 {

using Vec = __m512;
using Bits = __m512i;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
constexpr int kPanelVecs = 3;
constexpr int kMaxRows = 8;

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
inline Vec all(float value) { return _mm512_set1_ps(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// Of a and NaN these give NaN when it is the second.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float sum(Vec value) { return _mm512_reduce_add_ps(value); }
inline float largest(Vec value) { return _mm512_reduce_max_ps(value); }
inline Vec round(Vec value) { return _mm512_roundscale_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2 to the power of whole numbers from -126 to 127.
inline Vec power_of_two(Vec exponent) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), exponent); }
// 0 where x < low, else value; NaN is not less.
inline Vec zero_below(Vec value, Vec x, Vec low) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), value);
}

inline Bits load_bits(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline Vec as_floats(Bits bits) { return _mm512_castsi512_ps(bits); }
inline Vec low_bf16(Bits pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }
inline Vec high_bf16(Bits pair) {
    return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline Vec load_bf16(const uint16_t* from) {
    return low_bf16(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline Vec load_half(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Vec load_int8(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
// Half byte `index` of each lane as a float: a lookup, since a permutation reads four bits of its index.
template <int index>
inline Vec half_byte(Bits bits) {
    const Vec table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(bits, 4 * index), table);
}

}  // namespace octavo::avx512
