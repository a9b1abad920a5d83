// A packed weight matrix that owns its memory.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace octavo {

class Matrix {
public:
    // All weights are 0 until they are filled. It is used by the kernels that it was packed for. Only those of
    // whole numbers take int8 activations; for others they stay float32.
    Matrix(const Kernels& kernels, Form form, Activations activations, int64_t outputs, int64_t inputs);

    // Rows of float weights [count, inputs] for the outputs from `first` on, rounded to the form.
    void fill(Pool& pool, int64_t first, int64_t count, const float* weights);
    // The same from whole numbers in groups of 32 with scales and offsets in half precision, [count, inputs / 32] each:
    // weight = scale * number (+ offset). Numbers are -128..127 for int8 and 0..15 for int4; only int4 has offsets.
    void fill_groups(Pool& pool, int64_t first, int64_t count, const int8_t* numbers, const uint16_t* scales,
                     const uint16_t* offsets);
    // The weights of one output, as the products use them.
    void row(int64_t output, float* to) const;

    // y = x * weights^T for rows of x, rounded first for int8 activations; shared out among the pool's threads.
    void multiply(Pool& pool, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) const;

    // For rows that were rounded before, with what made them: groups() in a row, 0 where the matrix takes floats.
    int64_t groups() const { return packed_.activations == Activations::int8 ? packed_.inputs / kGroup : 0; }
    void round(const float* x, RoundedGroup* to) const { round(x, packed_.inputs, to); }
    void round(const float* x, int64_t inputs, RoundedGroup* to) const { kernels_.integers.round_row(x, inputs, to); }
    void multiply_rounded(Pool& pool, const RoundedGroup* x, int64_t rows, float* y, int64_t y_stride) const;

    // Some outputs of some rows, y[row, output] in rows of `stride`.
    struct Block {
        int64_t row, rows, output, outputs;
        const float* y;
        int64_t stride;
    };
    // Calls use() with blocks of `width` outputs, which are a whole number of panels, where they are made and still in
    // the second cache. x: contiguous rows; rounded: the same where groups() is not 0.
    void multiply_blocks(Pool& pool, const float* x, const RoundedGroup* rounded, int64_t rows, int64_t width,
                         const std::function<void(const Block&)>& use) const;

    int64_t outputs() const { return packed_.outputs; }
    int64_t inputs() const { return packed_.inputs; }
    Form form() const { return packed_.form; }
    size_t bytes() const { return memory_.bytes; }

private:
    // Calls work(first row, rows, first panel, last panel) for every unit of a product, of so many panels.
    template <class Work>
    void for_units(Pool& pool, int64_t rows, int64_t step, const Work& work) const;
    // Panels of a unit: enough units for each thread.
    int64_t unit_panels(const Pool& pool) const;
    // Rows [rows, groups], on this thread's memory.
    const RoundedGroup* rounded(Pool& pool, const float* x, int64_t x_stride, int64_t rows) const;
    int64_t panels() const { return (packed_.outputs + kernels_.panel - 1) / kernels_.panel; }
    uint8_t* panel_of(int64_t output) const;
    // What is added to a weight's number where it lies, and where that is among the numbers of its group or panel.
    int32_t bias() const;
    int64_t byte_of(int64_t k, int64_t lane) const;
    void fill_row(int64_t output, const float* weights);
    void fill_channel(int64_t output, const float* weights);
    void put_group(int64_t output, int64_t group, const int8_t* numbers, uint16_t scale, uint16_t offset);
    // The weights of one group, or of some numbers in 8 bits that share a scale.
    void get_group(int64_t output, int64_t group, float* to) const;
    void get_numbers(const uint8_t* from, int64_t lane, int64_t count, float scale, float* to) const;

    const Kernels& kernels_;
    Packed packed_;
    Slice memory_;
};

// Whether weights are whole numbers with scales, and whether these are for groups of inputs.
bool is_whole(Form form);
bool is_grouped(Form form);

// Whether a matrix with so many inputs can have this form.
bool form_fits(Form form, int64_t inputs);

}  // namespace octavo
