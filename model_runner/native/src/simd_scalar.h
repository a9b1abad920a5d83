// Plain C++ for any CPU, in the compiler's own vectors of 4 lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace octavo::OCTAVO_ISA {

using Vec = float __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
constexpr int kPanelVecs = 2;
constexpr int kMaxRows = 6;
constexpr int kDotRows = 2;

inline Vec load(const float* from) {
    Vec value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }
inline Vec all(float value) { return Vec{value, value, value, value}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec choose(Bits mask, Vec yes, Vec no) { return (Vec)((mask & (Bits)yes) | (~mask & (Bits)no)); }
// Of a and NaN these give NaN when it is the second.
inline Vec max(Vec a, Vec b) { return choose((Bits)(a > b), a, b); }
inline Vec min(Vec a, Vec b) { return choose((Bits)(a < b), a, b); }
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float largest(Vec v) {
    const float even = v[0] > v[2] ? v[0] : v[2], odd = v[1] > v[3] ? v[1] : v[3];
    return even > odd ? even : odd;
}
// For numbers below 2^22: what this constant is added to has no bits left after the point.
inline Vec round(Vec value) {
    const Vec magic = all(12582912.0f);
    return value + magic - magic;
}
// 2 to the power of whole numbers from -126 to 127.
inline Vec power_of_two(Vec exponent) {
    Bits bits;
    for (int lane = 0; lane < kLanes; ++lane) {
        // A NaN must not become an integer; it is NaN in the other factor already.
        bits[lane] = exponent[lane] == exponent[lane] ? static_cast<uint32_t>(int(exponent[lane]) + 127) << 23 : 0;
    }
    return (Vec)bits;
}
// 0 where x < low, else value; NaN is not less.
inline Vec zero_below(Vec value, Vec x, Vec low) { return choose((Bits)(x < low), all(0.0f), value); }

inline Bits load_bits(const uint32_t* from) {
    Bits bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}
inline Vec as_floats(Bits bits) { return (Vec)bits; }
inline Vec low_bf16(Bits pair) { return (Vec)(pair << 16); }
inline Vec high_bf16(Bits pair) { return (Vec)(pair & 0xFFFF0000u); }
inline Vec load_bf16(const uint16_t* from) { return low_bf16(Bits{from[0], from[1], from[2], from[3]}); }
inline Vec load_half(const uint16_t* from) {
    return Vec{from_half(from[0]), from_half(from[1]), from_half(from[2]), from_half(from[3])};
}
inline Vec load_int8(const int8_t* from) {
    return Vec{float(from[0]), float(from[1]), float(from[2]), float(from[3])};
}
// Half byte `index` of each lane as a float.
template <int index>
inline Vec half_byte(Bits bits) {
    const Bits part = (bits >> (4 * index)) & 15;
    return Vec{float(part[0]), float(part[1]), float(part[2]), float(part[3])};
}

inline Vec absolute(Vec value) { return (Vec)((Bits)value & 0x7FFFFFFFu); }
// Of whole numbers from -127 to 127; NaN must not become one.
inline void store_int8(int8_t* to, Vec whole) {
    for (int lane = 0; lane < kLanes; ++lane) {
        to[lane] = static_cast<int8_t>(whole[lane] == whole[lane] ? whole[lane] : 0.0f);
    }
}
inline void store_bits(uint32_t* to, Bits bits) { std::memcpy(to, &bits, sizeof bits); }
inline Vec to_floats(Bits ints) {
    return Vec{float(int32_t(ints[0])), float(int32_t(ints[1])), float(int32_t(ints[2])), float(int32_t(ints[3]))};
}
// The same four bytes in each lane.
inline Bits four_bytes(const int8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return Bits{word, word, word, word};
}
inline Bits low_nibbles(Bits bits) { return bits & 0x0F0F0F0Fu; }
inline Bits high_nibbles(Bits bits) { return low_nibbles(bits >> 4); }

// Bytes of weights in 8 bits are signed: nothing is added to them.
constexpr int32_t kBias = 0;

// Sums of a group's products, four to a lane: w and x from -128 to 127.
template <bool nibbles>
struct Sums {
    Bits sum;
    void start(int32_t) { sum = Bits{}; }
    void add(Bits w, Bits x) {
        int8_t weights[sizeof w], numbers[sizeof x];
        std::memcpy(weights, &w, sizeof w);
        std::memcpy(numbers, &x, sizeof x);
        for (int byte = 0; byte < 4 * kLanes; ++byte) sum[byte / 4] += uint32_t(weights[byte] * numbers[byte]);
    }
    Bits total() const { return sum; }
};

}  // namespace octavo::OCTAVO_ISA
