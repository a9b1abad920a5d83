// bfloat16 and IEEE half precision, one number at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {
// Each kernel file has its own copies: one compiled for a newer instruction set must not stand in for the others'.
namespace {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bf16(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

// The nearest bfloat16, the even one of two; NaN stays NaN.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_half(uint16_t value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
    const uint32_t rest = value & 0x7FFF;
    if (rest < 0x0400) return float_of_bits(sign | bits_of_float(static_cast<float>(rest) * 0x1p-24f));
    if (rest >= 0x7C00) return float_of_bits(sign | 0x7F800000u | (rest & 0x3FF) << 13);
    return float_of_bits(sign | ((rest << 13) + (112u << 23)));
}

}  // namespace
}  // namespace octavo
