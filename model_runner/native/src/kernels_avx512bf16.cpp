#include "kernels.h"

// Compiled with flags of its own; without them, as on other processors, there is nothing here.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__)

#define OCTAVO_ISA avx512bf16
#include "simd_avx512.h"
#include "isa_attention.h"

const octavo::AttentionKernels* octavo::avx512bf16_attention() {
    static constexpr AttentionKernels kernels = avx512bf16::bfloat16_attention_table();
    return &kernels;
}

#else

const octavo::AttentionKernels* octavo::avx512bf16_attention() { return nullptr; }

#endif
