// Plain C++ for any CPU, in the compiler's own vectors of 4 lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace octavo::scalar {

using Vec = float __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
constexpr int kPanelVecs = 2;
constexpr int kMaxRows = 6;

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

}  // namespace octavo::scalar
