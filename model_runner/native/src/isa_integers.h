// Fills an instruction set's namespace with products of whole numbers alone, for those that only add to these; see isa.h.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "numbers.h"

namespace octavo::OCTAVO_ISA {

#include "tile.h"

#include "panels.h"

#include "integers.h"

}  // namespace octavo::OCTAVO_ISA
