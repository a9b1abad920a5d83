// AVX-512 (F, BW, DQ, VL), and VNNI or BF16 where it is compiled for them: 16 lanes, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {

using Vec = __m512;
using Bits = __m512i;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
constexpr int kPanelVecs = 3;
constexpr int kMaxRows = 8;
constexpr int kDotRows = 4;

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

inline Vec absolute(Vec value) { return _mm512_abs_ps(value); }
// Of whole numbers from -127 to 127.
inline void store_int8(int8_t* to, Vec whole) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}
inline void store_bits(uint32_t* to, Bits bits) { _mm512_storeu_si512(to, bits); }
inline Bits all_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Bits add_ints(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
inline Vec to_floats(Bits ints) { return _mm512_cvtepi32_ps(ints); }
// The same four bytes in each lane.
inline Bits four_bytes(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}
inline Bits low_nibbles(Bits bits) { return _mm512_and_si512(bits, _mm512_set1_epi8(15)); }
inline Bits high_nibbles(Bits bits) { return low_nibbles(_mm512_srli_epi16(bits, 4)); }

// Bytes of weights in 8 bits are unsigned: this is added to them.
constexpr int32_t kBias = 128;

#if defined(__AVX512VNNI__)
// Sums of a group's products, four to a lane: w from 0 to 15 (nibbles) or to 255, x from -127 to 127.
template <bool nibbles>
struct Sums {
    Bits sum;
    void start(int32_t value) { sum = all_ints(nibbles ? 0 : value); }
    void add(Bits w, Bits x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
    Bits total() const { return sum; }
};
#else
inline Bits add_shorts(Bits a, Bits b) { return _mm512_add_epi16(a, b); }
inline Bits multiply_pairs(Bits w, Bits x) { return _mm512_maddubs_epi16(w, x); }
inline Bits sum_pairs(Bits shorts) { return _mm512_madd_epi16(shorts, _mm512_set1_epi16(1)); }
template <int by>
inline Bits shift_ints(Bits ints) { return _mm512_slli_epi32(ints, by); }
#include "dots_maddubs.h"
#endif

#if defined(__AVX512BF16__)
// Words of two bfloat16: the same one in each lane, and the sums of products, c + the high ones' + the low ones'.
inline Bits all(uint32_t pair) { return all_ints(static_cast<int32_t>(pair)); }
inline Vec fma(Bits a, Bits b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
// The nearest bfloat16 of 32 numbers, as they come.
inline Bits to_pairs(Vec first, Vec second) { return (Bits)_mm512_cvtne2ps_pbh(second, first); }
// Of 32 bfloat16 each, those of the same place in one word, for every other four, and for those between.
inline Bits low_pairs(Bits a, Bits b) { return _mm512_unpacklo_epi16(a, b); }
inline Bits high_pairs(Bits a, Bits b) { return _mm512_unpackhi_epi16(a, b); }
// Every other four of 32 numbers, and those between: the first 16 and the last.
inline Vec first_in_fours(Vec low, Vec high) {
    return _mm512_permutex2var_ps(low, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), high);
}
inline Vec last_in_fours(Vec low, Vec high) {
    return _mm512_permutex2var_ps(
        low, _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), high);
}
#endif

}  // namespace octavo::OCTAVO_ISA
