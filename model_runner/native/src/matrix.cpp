#include "matrix.h"

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace octavo {
namespace {

// Rows that one thread packs at a time.
constexpr int64_t kFillRows = 16;
// Rows that are multiplied together by one thread: their inputs stay in its second cache.
constexpr int64_t kUnitRows = 256;
// Rows that one thread rounds at a time; waking another does not pay for fewer.
constexpr int64_t kRoundedRows = 8;
// Units for each thread: enough that none waits long for the last one.
constexpr int64_t kUnitsPerThread = 8;

int64_t bytes_per_panel(Form form, int64_t panel, int64_t inputs) {
    switch (form) {
        case Form::float32: return panel * inputs * 4;
        case Form::bfloat16: return panel * inputs * 2;
        case Form::int8: return inputs / kGroup * (panel * 2 + panel * kGroup);
        case Form::int4: return inputs / kGroup * (panel * 4 + panel * kGroup / 2);
        case Form::int8_channel: return panel * 4 + panel * inputs;
    }
    return 0;
}

// The nearest number in half precision, the even one of two; too large ones become infinite.
uint16_t to_half(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (magnitude < 0x38800000) {
        const float scaled = std::nearbyint(float_of_bits(magnitude) * 0x1p24f);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(scaled));
    }
    return static_cast<uint16_t>(sign | (((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - (112 << 10)));
}

// Where one of 8 numbers of 4 bits is in their word.
int64_t nibble_shift(int64_t index) { return 8 * (index % 4) + 4 * (index / 4); }

struct Group {
    int8_t numbers[kGroup];
    uint16_t scale;
    uint16_t offset;
};

int8_t nearest(float value, float low, float high) {
    return static_cast<int8_t>(std::nearbyint(std::min(high, std::max(low, value))));
}

// 32 weights as whole numbers: symmetric in 8 bits, between their least and greatest in 4 bits.
Group quantize(const float* weights, Form form) {
    Group group{};
    const auto [least, greatest] = std::minmax_element(weights, weights + kGroup);
    const bool is_int4 = form == Form::int4;
    const float span = is_int4 ? (*greatest - *least) / 15 : std::max(-*least, *greatest) / 127;
    group.scale = to_half(span);
    group.offset = is_int4 ? to_half(*least) : 0;
    const float scale = from_half(group.scale), offset = from_half(group.offset);
    for (int64_t index = 0; index < kGroup; ++index) {
        const float steps = scale == 0 ? 0 : (weights[index] - offset) / scale;
        group.numbers[index] = is_int4 ? nearest(steps, 0, 15) : nearest(steps, -127, 127);
    }
    return group;
}

}  // namespace

bool is_grouped(Form form) { return form == Form::int8 || form == Form::int4; }

bool is_whole(Form form) { return is_grouped(form) || form == Form::int8_channel; }

bool form_fits(Form form, int64_t inputs) {
    return form == Form::float32 || inputs % (form == Form::bfloat16 ? 2 : kGroup) == 0;
}

Matrix::Matrix(const Kernels& kernels, Form form, Activations activations, int64_t outputs, int64_t inputs)
    : kernels_(kernels),
      packed_{form,   is_whole(form) ? activations : Activations::float32,  outputs,
              inputs, bytes_per_panel(form, kernels.panel, inputs), nullptr},
      memory_(weight_memory(static_cast<size_t>(packed_.panel_bytes * panels()))) {
    packed_.data = memory_.data;
}

uint8_t* Matrix::panel_of(int64_t output) const {
    return memory_.data + output / kernels_.panel * packed_.panel_bytes;
}

void Matrix::fill(Pool& pool, int64_t first, int64_t count, const float* weights) {
    pool.run((count + kFillRows - 1) / kFillRows, [&](int64_t unit) {
        for (int64_t row = unit * kFillRows; row < std::min(count, (unit + 1) * kFillRows); ++row) {
            fill_row(first + row, weights + row * packed_.inputs);
        }
    });
}

void Matrix::fill_row(int64_t output, const float* weights) {
    const int64_t width = kernels_.panel, lane = output % width;
    uint8_t* panel = panel_of(output);
    switch (packed_.form) {
        case Form::float32:
            for (int64_t k = 0; k < packed_.inputs; ++k) reinterpret_cast<float*>(panel)[k * width + lane] = weights[k];
            break;
        case Form::bfloat16:
            for (int64_t k = 0; k < packed_.inputs; k += 2) {
                const uint32_t pair = to_bf16(weights[k]) | static_cast<uint32_t>(to_bf16(weights[k + 1])) << 16;
                reinterpret_cast<uint32_t*>(panel)[k / 2 * width + lane] = pair;
            }
            break;
        case Form::int8:
        case Form::int4:
            for (int64_t group = 0; group < packed_.inputs / kGroup; ++group) {
                const Group rounded_group = quantize(weights + group * kGroup, packed_.form);
                put_group(output, group, rounded_group.numbers, rounded_group.scale, rounded_group.offset);
            }
            break;
        case Form::int8_channel: fill_channel(output, weights); break;
    }
}

void Matrix::fill_channel(int64_t output, const float* weights) {
    const int64_t width = kernels_.panel, lane = output % width;
    uint8_t* panel = panel_of(output);
    const auto [least, greatest] = std::minmax_element(weights, weights + packed_.inputs);
    const float scale = std::max(-*least, *greatest) / 127;
    reinterpret_cast<float*>(panel)[lane] = scale;
    uint8_t* numbers = panel + width * sizeof(float);
    for (int64_t k = 0; k < packed_.inputs; ++k) {
        const int32_t number = nearest(scale == 0 ? 0 : weights[k] / scale, -127, 127);
        numbers[byte_of(k, lane)] = static_cast<uint8_t>(number + bias());
    }
}

void Matrix::fill_groups(Pool& pool, int64_t first, int64_t count, const int8_t* numbers, const uint16_t* scales,
                         const uint16_t* offsets) {
    const int64_t groups = packed_.inputs / kGroup;
    pool.run((count + kFillRows - 1) / kFillRows, [&](int64_t unit) {
        for (int64_t row = unit * kFillRows; row < std::min(count, (unit + 1) * kFillRows); ++row) {
            for (int64_t group = row * groups; group < (row + 1) * groups; ++group) {
                const uint16_t offset = offsets == nullptr ? 0 : offsets[group];
                put_group(first + row, group - row * groups, numbers + group * kGroup, scales[group], offset);
            }
        }
    });
}

void Matrix::put_group(int64_t output, int64_t group, const int8_t* numbers, uint16_t scale, uint16_t offset) {
    const int64_t width = kernels_.panel, lane = output % width;
    uint8_t* at = panel_of(output) + packed_.panel_bytes / (packed_.inputs / kGroup) * group;
    reinterpret_cast<uint16_t*>(at)[lane] = scale;
    if (packed_.form == Form::int8) {
        uint8_t* to = at + width * sizeof(uint16_t);
        for (int64_t k = 0; k < kGroup; ++k) to[byte_of(k, lane)] = static_cast<uint8_t>(numbers[k] + bias());
        return;
    }
    reinterpret_cast<uint16_t*>(at)[width + lane] = offset;
    for (int64_t k = 0; k < kGroup; k += 8) {
        uint32_t word = 0;
        for (int64_t index = 0; index < 8; ++index) {
            word |= static_cast<uint32_t>(numbers[k + index] & 15) << nibble_shift(index);
        }
        reinterpret_cast<uint32_t*>(at + width * 4)[k / 8 * width + lane] = word;
    }
}

int32_t Matrix::bias() const { return packed_.activations == Activations::int8 ? kernels_.integers.bias : 0; }

int64_t Matrix::byte_of(int64_t k, int64_t lane) const {
    const int64_t width = kernels_.panel;
    if (packed_.activations == Activations::int8) return (k / 4 * width + lane) * 4 + k % 4;
    return k * width + lane;
}

void Matrix::row(int64_t output, float* to) const {
    const int64_t width = kernels_.panel, lane = output % width;
    const uint8_t* panel = panel_of(output);
    switch (packed_.form) {
        case Form::float32:
            for (int64_t k = 0; k < packed_.inputs; ++k) to[k] = reinterpret_cast<const float*>(panel)[k * width + lane];
            break;
        case Form::bfloat16:
            for (int64_t k = 0; k < packed_.inputs; ++k) {
                const uint32_t pair = reinterpret_cast<const uint32_t*>(panel)[k / 2 * width + lane];
                to[k] = from_bf16(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair));
            }
            break;
        case Form::int8:
        case Form::int4:
            for (int64_t k = 0; k < packed_.inputs; k += kGroup) get_group(output, k / kGroup, to + k);
            break;
        case Form::int8_channel: {
            const float scale = reinterpret_cast<const float*>(panel)[lane];
            get_numbers(panel + width * sizeof(float), lane, packed_.inputs, scale, to);
            break;
        }
    }
}

void Matrix::get_numbers(const uint8_t* from, int64_t lane, int64_t count, float scale, float* to) const {
    for (int64_t k = 0; k < count; ++k) {
        to[k] = scale * static_cast<float>(static_cast<int8_t>(from[byte_of(k, lane)] - bias()));
    }
}

void Matrix::get_group(int64_t output, int64_t group, float* to) const {
    const int64_t width = kernels_.panel, lane = output % width;
    const uint8_t* at = panel_of(output) + packed_.panel_bytes / (packed_.inputs / kGroup) * group;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
    const float scale = from_half(halves[lane]);
    if (packed_.form == Form::int8) return get_numbers(at + width * sizeof(uint16_t), lane, kGroup, scale, to);
    const float offset = from_half(halves[width + lane]);
    for (int64_t k = 0; k < kGroup; ++k) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(at + width * 4)[k / 8 * width + lane];
        to[k] = std::fma(scale, static_cast<float>(word >> nibble_shift(k % 8) & 15), offset);
    }
}

int64_t Matrix::unit_panels(const Pool& pool) const {
    // An even number, since two panels go together when there are few rows.
    return std::max<int64_t>(2, panels() / (pool.threads() * kUnitsPerThread) / 2 * 2);
}

template <class Work>
void Matrix::for_units(Pool& pool, int64_t rows, int64_t step, const Work& work) const {
    const int64_t across = (panels() + step - 1) / step, down = (rows + kUnitRows - 1) / kUnitRows;
    pool.run(across * down, [&](int64_t unit) {
        const int64_t first = unit % across * step, row = unit / across * kUnitRows;
        work(row, std::min(kUnitRows, rows - row), first, std::min(panels(), first + step));
    });
}

void Matrix::multiply(Pool& pool, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) const {
    if (packed_.activations == Activations::int8) {
        return multiply_rounded(pool, rounded(pool, x, x_stride, rows), rows, y, y_stride);
    }
    for_units(pool, rows, unit_panels(pool), [&](int64_t row, int64_t count, int64_t first, int64_t last) {
        kernels_.gemm(packed_, x + row * x_stride, x_stride, count, y + row * y_stride, y_stride, first, last,
                      thread_scratch(kernels_.gemm_scratch));
    });
}

void Matrix::multiply_rounded(Pool& pool, const RoundedGroup* x, int64_t rows, float* y, int64_t y_stride) const {
    const int64_t stride = groups();
    for_units(pool, rows, unit_panels(pool), [&](int64_t row, int64_t count, int64_t first, int64_t last) {
        kernels_.integers.multiply(packed_, x + row * stride, stride, count, y + row * y_stride, y_stride, first,
                                   last, thread_scratch(kernels_.integers.scratch));
    });
}

void Matrix::multiply_blocks(Pool& pool, const float* x, const RoundedGroup* rounded, int64_t rows, int64_t width,
                             const std::function<void(const Block&)>& use) const {
    const int64_t inputs = packed_.inputs;
    for_units(pool, rows, width / kernels_.panel, [&](int64_t row, int64_t count, int64_t first, int64_t last) {
        thread_local Scratch scratch;
        auto* y = static_cast<float*>(scratch.room(static_cast<size_t>(kUnitRows * width) * sizeof(float)));
        // The unit's panels as a matrix of their own.
        Packed part = packed_;
        part.data += first * packed_.panel_bytes;
        part.outputs = std::min(width, packed_.outputs - first * kernels_.panel);
        if (groups() > 0) {
            kernels_.integers.multiply(part, rounded + row * groups(), groups(), count, y, width, 0, last - first,
                                       thread_scratch(kernels_.integers.scratch));
        } else {
            kernels_.gemm(part, x + row * inputs, inputs, count, y, width, 0, last - first,
                          thread_scratch(kernels_.gemm_scratch));
        }
        use({row, count, first * kernels_.panel, part.outputs, y, width});
    });
}

const RoundedGroup* Matrix::rounded(Pool& pool, const float* x, int64_t x_stride, int64_t rows) const {
    thread_local Scratch scratch;
    const int64_t stride = groups();
    auto* to = static_cast<RoundedGroup*>(scratch.room(static_cast<size_t>(rows * stride) * sizeof(RoundedGroup)));
    const auto round_rows = [&](int64_t unit) {
        for (int64_t row = unit * kRoundedRows; row < std::min(rows, (unit + 1) * kRoundedRows); ++row) {
            round(x + row * x_stride, to + row * stride);
        }
    };
    const int64_t units = (rows + kRoundedRows - 1) / kRoundedRows;
    if (units > 1) {
        pool.run(units, round_rows);
    } else {
        round_rows(0);
    }
    return to;
}

}  // namespace octavo
