// As isa.h, for an instruction set that only adds products of pairs of bfloat16 to another one's attention.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "numbers.h"

namespace octavo::OCTAVO_ISA {

#include "tile.h"

#include "panels.h"

#include "rowwise.h"

#include "tiles.h"

#include "spans.h"

#include "attention_bf16.h"

}  // namespace octavo::OCTAVO_ISA
