// Fills an instruction set's namespace with all kernels: the file that includes this defines OCTAVO_ISA, the namespace,
// and has included its vectors.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "numbers.h"

namespace octavo::OCTAVO_ISA {

inline float number(float value) { return value; }
inline float number(uint16_t value) { return from_bf16(value); }

#include "tile.h"

#include "panels.h"

#include "gemm.h"

#include "integers.h"

#include "rowwise.h"

#include "tiles.h"

#include "spans.h"

#include "attention.h"

#include "likelihood.h"

#include "probe.h"

constexpr Kernels table(const char* name) {
    return {name,       kPanel,       kGemmScratch,      gemm,    state_floats,  attention_scratch, attention_table(),
            nullptr,    rms_norm,     add_to,            silu_multiply, rotate,  weigh,             keep,
            buckets_of, largest_of,   2 * kLanes * kProbeChains, multiply_add_probe, read_probe,    integer_table()};
}

}  // namespace octavo::OCTAVO_ISA
