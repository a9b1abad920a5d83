#include "simd_scalar.h"

#define OCTAVO_ISA OCTAVO_SCALAR
#include "isa.h"

#define OCTAVO_TEXT(name) #name
#define OCTAVO_NAME(name) OCTAVO_TEXT(name)

const octavo::Kernels* octavo::scalar_kernels() {
    static constexpr Kernels kernels = OCTAVO_SCALAR::table(OCTAVO_NAME(OCTAVO_SCALAR));
    return &kernels;
}
