#include "kernels.h"

#if defined(__aarch64__)

#define OCTAVO_ISA neon
#include "simd_neon.h"
#include "isa.h"

const octavo::Kernels* octavo::neon_kernels() {
    static constexpr Kernels kernels = neon::table("neon");
    return &kernels;
}

#else

const octavo::Kernels* octavo::neon_kernels() { return nullptr; }

#endif
