#include "kernels.h"

// Compiled with flags of its own; without them, as on other processors, there is nothing here.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#define OCTAVO_ISA neondot
#include "simd_neon.h"
#include "isa_integers.h"

const octavo::IntegerKernels* octavo::neondot_integers() {
    static constexpr IntegerKernels kernels = neondot::integer_table();
    return &kernels;
}

#else

const octavo::IntegerKernels* octavo::neondot_integers() { return nullptr; }

#endif
