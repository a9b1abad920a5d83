// The order of a row's tokens by likelihood, and how far down a filter reaches in it, without sorting the row.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"

namespace octavo {

// Sorts as the logits do and, among equal ones, has the lower token id on top; all distinct.
uint64_t rank_of(float logit, int64_t token);
int64_t token_of(uint64_t rank);

// The ranks of the `count` likeliest tokens (of all, if there are fewer), in no order. The vector is the result.
void best_of(const Kernels& kernels, const float* logits, int64_t size, int64_t count, std::vector<uint64_t>& ranks);

// The least likely token that stays. Of its equals, those with a lower id stay too.
struct Cut {
    float logit = -std::numeric_limits<float>::infinity();
    int64_t token = std::numeric_limits<int64_t>::max();
};

struct Candidate {
    uint64_t rank;
    int64_t weight;
};

// What nucleus() works in, so that nothing is allocated for each row.
struct NucleusRoom {
    std::vector<int32_t> buckets;
    std::vector<Candidate> candidates;
};

// Where the fewest tokens end, the likeliest first, that weigh `needed` together, from 1 to the sum of all weights.
Cut nucleus(const Kernels& kernels, const float* logits, const int64_t* weights, int64_t size, const Weighing& by,
            int64_t needed, NucleusRoom& room);

}  // namespace octavo
