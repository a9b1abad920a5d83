#include "ranking.h"

#include <algorithm>
#include <functional>

#include "numbers.h"

namespace octavo {
namespace {

constexpr uint64_t kTokenMask = 0xFFFFFFFF;
// Tokens that are passed over together when none of them is wanted.
constexpr int64_t kPeek = 64;
// A heap beats selection among all ranks while it is so many times smaller than the row.
constexpr int64_t kHeapShare = 16;

bool likelier(const Candidate& one, const Candidate& other) { return one.rank > other.rank; }

void best_by_heap(const Kernels& kernels, const float* logits, int64_t size, size_t count,
                  std::vector<uint64_t>& ranks) {
    // The least of the best is on top. Later equals have a lower rank, so only larger logits can enter.
    float least = 0;
    for (int64_t start = 0; start < size; start += kPeek) {
        const int64_t end = std::min(start + kPeek, size);
        if (ranks.size() == count && !(kernels.largest_of(logits + start, end - start) > least)) continue;
        for (int64_t token = start; token < end; ++token) {
            if (ranks.size() == count) {
                if (!(logits[token] > least)) continue;
                std::pop_heap(ranks.begin(), ranks.end(), std::greater<>());
                ranks.pop_back();
            }
            ranks.push_back(rank_of(logits[token], token));
            std::push_heap(ranks.begin(), ranks.end(), std::greater<>());
            least = logits[token_of(ranks.front())];
        }
    }
}

// Fills the candidates with the tokens of one bucket.
void gather(const float* logits, const int64_t* weights, int64_t size, int32_t bucket, NucleusRoom& room) {
    room.candidates.clear();
    const int32_t* buckets = room.buckets.data();
    for (int64_t start = 0; start < size; start += kPeek) {
        const int64_t end = std::min(start + kPeek, size);
        int32_t matches = 0;
        for (int64_t token = start; token < end; ++token) matches += buckets[token] == bucket;
        for (int64_t token = start; matches > 0; ++token) {
            if (buckets[token] != bucket) continue;
            room.candidates.push_back({rank_of(logits[token], token), weights[token]});
            --matches;
        }
    }
}

// The rank of the candidate with which the likeliest ones reach `needed`, found by halves.
uint64_t reach(std::vector<Candidate>& candidates, int64_t needed) {
    // What comes before `first` does not reach it; what comes before `last` does.
    auto first = candidates.begin(), last = candidates.end();
    while (last - first > 1) {
        const auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, likelier);
        int64_t weight = 0;
        for (auto each = first; each != middle; ++each) weight += each->weight;
        if (weight >= needed) {
            last = middle;
        } else {
            needed -= weight;
            first = middle;
        }
    }
    return first->rank;
}

}  // namespace

uint64_t rank_of(float logit, int64_t token) {
    // Adding 0 turns -0, whose bits differ, into 0. Negative numbers sort backwards as integers until they are flipped.
    const uint32_t bits = bits_of_float(logit + 0.0f);
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | (kTokenMask - static_cast<uint64_t>(token));
}

int64_t token_of(uint64_t rank) { return static_cast<int64_t>(kTokenMask - (rank & kTokenMask)); }

void best_of(const Kernels& kernels, const float* logits, int64_t size, int64_t count, std::vector<uint64_t>& ranks) {
    ranks.clear();
    if (count < 1) return;
    if (count <= size / kHeapShare) {
        best_by_heap(kernels, logits, size, static_cast<size_t>(count), ranks);
        return;
    }
    for (int64_t token = 0; token < size; ++token) ranks.push_back(rank_of(logits[token], token));
    if (count >= size) return;
    std::nth_element(ranks.begin(), ranks.begin() + count, ranks.end(), std::greater<>());
    ranks.resize(static_cast<size_t>(count));
}

Cut nucleus(const Kernels& kernels, const float* logits, const int64_t* weights, int64_t size, const Weighing& by,
            int64_t needed, NucleusRoom& room) {
    // Two tokens of different buckets are in the order of these, so only the bucket that reaches it is looked into.
    room.buckets.resize(static_cast<size_t>(size));
    kernels.buckets_of(logits, size, by, room.buckets.data());
    int64_t sums[kBuckets] = {};
    for (int64_t token = 0; token < size; ++token) sums[room.buckets[token]] += weights[token];
    int32_t bucket = 0;
    while (sums[bucket] < needed) needed -= sums[bucket++];
    gather(logits, weights, size, bucket, room);
    const int64_t token = token_of(reach(room.candidates, needed));
    return {logits[token], token};
}

}  // namespace octavo
