// AVX2 with FMA and F16C, and VNNI where it is compiled for it: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {

using Vec = __m256;
using Bits = __m256i;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr int kPanelVecs = 2;
constexpr int kMaxRows = 6;
constexpr int kDotRows = 3;

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

inline Vec absolute(Vec value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value); }
// Of whole numbers from -127 to 127.
inline void store_int8(int8_t* to, Vec whole) {
    const Bits ints = _mm256_cvtps_epi32(whole);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
}
inline void store_bits(uint32_t* to, Bits bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits); }
inline Bits all_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Bits add_ints(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
inline Vec to_floats(Bits ints) { return _mm256_cvtepi32_ps(ints); }
// The same four bytes in each lane.
inline Bits four_bytes(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return _mm256_set1_epi32(word);
}
inline Bits low_nibbles(Bits bits) { return _mm256_and_si256(bits, _mm256_set1_epi8(15)); }
inline Bits high_nibbles(Bits bits) { return low_nibbles(_mm256_srli_epi16(bits, 4)); }

// Bytes of weights in 8 bits are unsigned: this is added to them.
constexpr int32_t kBias = 128;

#if defined(__AVXVNNI__)
// Sums of a group's products, four to a lane: w from 0 to 15 (nibbles) or to 255, x from -127 to 127.
template <bool nibbles>
struct Sums {
    Bits sum;
    void start(int32_t value) { sum = all_ints(nibbles ? 0 : value); }
    void add(Bits w, Bits x) { sum = _mm256_dpbusd_avx_epi32(sum, w, x); }
    Bits total() const { return sum; }
};
#else
inline Bits add_shorts(Bits a, Bits b) { return _mm256_add_epi16(a, b); }
inline Bits multiply_pairs(Bits w, Bits x) { return _mm256_maddubs_epi16(w, x); }
inline Bits sum_pairs(Bits shorts) { return _mm256_madd_epi16(shorts, _mm256_set1_epi16(1)); }
template <int by>
inline Bits shift_ints(Bits ints) { return _mm256_slli_epi32(ints, by); }
#include "dots_maddubs.h"
#endif

}  // namespace octavo::OCTAVO_ISA
