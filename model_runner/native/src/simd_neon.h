// NEON, which every 64-bit ARM has, and its dot products where it is compiled for them: 4 lanes, 32 registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {

using Vec = float32x4_t;
using Bits = uint32x4_t;
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
constexpr int kPanelVecs = 3;
constexpr int kMaxRows = 8;
constexpr int kDotRows = 4;

inline Vec load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, Vec value) { vst1q_f32(to, value); }
inline Vec all(float value) { return vdupq_n_f32(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
// Of a and NaN these give NaN when it is the second.
inline Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float sum(Vec value) { return vaddv_f32(vadd_f32(vget_low_f32(value), vget_high_f32(value))); }
inline float largest(Vec value) { return vmaxvq_f32(value); }
inline Vec round(Vec value) { return vrndnq_f32(value); }
// 2 to the power of whole numbers from -126 to 127.
inline Vec power_of_two(Vec exponent) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(exponent), vdupq_n_s32(127)), 23));
}
// 0 where x < low, else value; NaN is not less.
inline Vec zero_below(Vec value, Vec x, Vec low) { return vbslq_f32(vcltq_f32(x, low), all(0.0f), value); }

inline Bits load_bits(const uint32_t* from) { return vld1q_u32(from); }
inline Vec as_floats(Bits bits) { return vreinterpretq_f32_u32(bits); }
inline Vec low_bf16(Bits pair) { return as_floats(vshlq_n_u32(pair, 16)); }
inline Vec high_bf16(Bits pair) { return as_floats(vandq_u32(pair, vdupq_n_u32(0xFFFF0000u))); }
inline Vec load_bf16(const uint16_t* from) { return as_floats(vshll_n_u16(vld1_u16(from), 16)); }
inline Vec load_half(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
inline Vec load_int8(const int8_t* from) {
    uint32_t four;
    std::memcpy(&four, from, sizeof four);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
// Half byte `index` of each lane as a float.
template <int index>
inline Vec half_byte(Bits bits) {
    if constexpr (index > 0) bits = vshrq_n_u32(bits, 4 * index);
    return vcvtq_f32_u32(vandq_u32(bits, vdupq_n_u32(15)));
}

inline Vec absolute(Vec value) { return vabsq_f32(value); }
// Of whole numbers from -127 to 127.
inline void store_int8(int8_t* to, Vec whole) {
    const int16x4_t shorts = vqmovn_s32(vcvtq_s32_f32(whole));
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(shorts, shorts));
    std::memcpy(to, &bytes, 4);
}
inline void store_bits(uint32_t* to, Bits bits) { vst1q_u32(to, bits); }
inline Vec to_floats(Bits ints) { return vcvtq_f32_s32(vreinterpretq_s32_u32(ints)); }
// The same four bytes in each lane.
inline Bits four_bytes(const int8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return vdupq_n_u32(word);
}
inline Bits low_nibbles(Bits bits) { return vandq_u32(bits, vdupq_n_u32(0x0F0F0F0Fu)); }
inline Bits high_nibbles(Bits bits) { return low_nibbles(vshrq_n_u32(bits, 4)); }

// Bytes of weights in 8 bits are signed: nothing is added to them.
constexpr int32_t kBias = 0;

// Sums of a group's products, four to a lane: w and x from -128 to 127.
#if defined(__ARM_FEATURE_DOTPROD)
template <bool nibbles>
struct Sums {
    int32x4_t sum;
    void start(int32_t) { sum = vdupq_n_s32(0); }
    void add(Bits w, Bits x) { sum = vdotq_s32(sum, vreinterpretq_s8_u32(w), vreinterpretq_s8_u32(x)); }
    Bits total() const { return vreinterpretq_u32_s32(sum); }
};
#else
template <bool nibbles>
struct Sums {
    int32x4_t low, high;  // of lanes 0 and 1, and of 2 and 3, two sums for each
    void start(int32_t) { low = high = vdupq_n_s32(0); }
    void add(Bits w, Bits x) {
        const int8x16_t weights = vreinterpretq_s8_u32(w), numbers = vreinterpretq_s8_u32(x);
        low = vpadalq_s16(low, vmull_s8(vget_low_s8(weights), vget_low_s8(numbers)));
        high = vpadalq_s16(high, vmull_high_s8(weights, numbers));
    }
    Bits total() const { return vreinterpretq_u32_s32(vpaddq_s32(low, high)); }
};
#endif

}  // namespace octavo::OCTAVO_ISA
