// Drawing tokens and reading log-probabilities, a row of logits on one thread at a time.
//
// Weights are whole numbers, which add up to the same sum in any order, and what decides between tokens is compared
// exactly: a draw depends on its own row and numbers alone, and is that of model_runner/sampling_cpu.py.
#pragma once

#include "kernels.h"
#include "octavo.h"
#include "pool.h"

namespace octavo {

// Both throw std::invalid_argument for a vocabulary that is too large, or a token that it does not have.
void draw(Pool& pool, const Kernels& kernels, const octavo_draws& draws, int64_t* tokens);
void log_probabilities(Pool& pool, const Kernels& kernels, const octavo_positions& positions, double* logprobs,
                       int64_t* best_ids, double* best_logprobs);

}  // namespace octavo
