// As isa.h, for an instruction set that only adds to another one's products of whole numbers.
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
