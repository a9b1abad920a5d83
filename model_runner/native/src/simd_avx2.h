// AVX2 with FMA and F16C: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo::avx2 {

using Vec = __m256;
using Bits = __m256i;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr int kPanelVecs = 2;
constexpr int kMaxRows = 6;

inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
inline Vec all(float value) { return _mm256_set1_ps(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
// Of a and NaN these give NaN when it is the second.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline float sum(Vec value) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vec value) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec round(Vec value) { return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2 to the power of whole numbers from -126 to 127.
inline Vec power_of_two(Vec exponent) {
    const Bits biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// 0 where x < low, else value; NaN is not less.
inline Vec zero_below(Vec value, Vec x, Vec low) { return _mm256_and_ps(value, _mm256_cmp_ps(x, low, _CMP_NLT_UQ)); }

inline Bits load_bits(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Vec as_floats(Bits bits) { return _mm256_castsi256_ps(bits); }
inline Vec low_bf16(Bits pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
inline Vec high_bf16(Bits pair) {
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline Vec load_bf16(const uint16_t* from) {
    return low_bf16(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Vec load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Vec load_int8(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
// Half byte `index` of each lane as a float.
template <int index>
inline Vec half_byte(Bits bits) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bits, 4 * index), _mm256_set1_epi32(15)));
}

}  // namespace octavo::avx2
