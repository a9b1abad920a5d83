#include "kernels.h"

// Compiled with flags of its own; without them, as on other processors, there is nothing here.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)

#define OCTAVO_ISA avx512vnni
#include "simd_avx512.h"
#include "isa_integers.h"

const octavo::IntegerKernels* octavo::avx512vnni_integers() {
    static constexpr IntegerKernels kernels = avx512vnni::integer_table();
    return &kernels;
}

#else

const octavo::IntegerKernels* octavo::avx512vnni_integers() { return nullptr; }

#endif
