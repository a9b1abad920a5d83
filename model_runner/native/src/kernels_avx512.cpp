#include "kernels.h"

// Compiled with flags of its own; without them, as on other processors, there is nothing here.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#define OCTAVO_ISA avx512
#include "simd_avx512.h"
#include "isa.h"

const octavo::Kernels* octavo::avx512_kernels() {
    static constexpr Kernels kernels = avx512::table("avx512");
    return &kernels;
}

#else

const octavo::Kernels* octavo::avx512_kernels() { return nullptr; }

#endif
