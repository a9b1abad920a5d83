#define OCTAVO_ISA scalar
#include "simd_scalar.h"
#include "isa.h"

const octavo::Kernels* octavo::scalar_kernels() {
    static constexpr Kernels kernels = scalar::table("scalar");
    return &kernels;
}
