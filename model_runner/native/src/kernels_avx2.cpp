#include "kernels.h"

// Compiled with flags of its own; without them, as on other processors, there is nothing here.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define OCTAVO_ISA avx2
#include "simd_avx2.h"
#include "isa.h"

const octavo::Kernels* octavo::avx2_kernels() {
    static constexpr Kernels kernels = avx2::table("avx2");
    return &kernels;
}

#else

const octavo::Kernels* octavo::avx2_kernels() { return nullptr; }

#endif
