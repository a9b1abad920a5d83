// Sequences of a step whose contexts begin with the same blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_plan.h"

namespace octavo {

// Neighbours first..last - 1 of a step, each with one token, whose first `splits` x kSplitTokens tokens lie in the same
// blocks.
struct SharedRun {
    int64_t first, last;
    int64_t splits;
};

// In the order of the step, none overlapping; each has two sequences at least and one split. A run ends before a sequence
// that shares less with its neighbour than the run's first two do.
std::vector<SharedRun> shared_runs(const Sequences& sequences, int64_t block_size);

}  // namespace octavo
