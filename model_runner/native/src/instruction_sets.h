// Which kernels this CPU can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace octavo {

// In the order of preference. There is always one, and what is pointed to is there for good.
const std::vector<const Kernels*>& usable_kernels();

}  // namespace octavo
