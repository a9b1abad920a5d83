#include "kernels.h"

// Compiled with flags of its own; without them, as on other processors, there is nothing here.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)

#define OCTAVO_ISA avx2vnni
#include "simd_avx2.h"
#include "isa_integers.h"

const octavo::IntegerKernels* octavo::avx2vnni_integers() {
    static constexpr IntegerKernels kernels = avx2vnni::integer_table();
    return &kernels;
}

#else

const octavo::IntegerKernels* octavo::avx2vnni_integers() { return nullptr; }

#endif
