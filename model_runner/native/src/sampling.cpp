#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "ranking.h"

namespace octavo {
namespace {

constexpr int64_t kMaxVocabulary = int64_t{1} << 19;  // sums of weights must fit 63 bits
constexpr double kWeightUnit = static_cast<double>(int64_t{1} << kWeightBits);
constexpr double kLargestScale = 1e300;  // where the temperature is so low that 1 / temperature is infinite
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Tokens whose weights are added up together, on the way to the one that is drawn.
constexpr int64_t kStretch = 512;

// A thread's memory, which it keeps.
struct Room {
    std::vector<float> edited;
    std::vector<float> best_logits;
    std::vector<uint64_t> ranks;
    std::vector<int64_t> weights;
    NucleusRoom nucleus;
};

Room& room() {
    static thread_local Room own;
    return own;
}

void check_tokens(const int32_t* tokens, int64_t count, int64_t vocabulary) {
    const auto is_known = [&](int32_t each) { return 0 <= each && each < vocabulary; };
    if (!std::all_of(tokens, tokens + count, is_known)) throw std::invalid_argument("a token is not in the vocabulary");
}

void check_vocabulary(int64_t vocabulary) {
    if (vocabulary < 1 || vocabulary > kMaxVocabulary) {
        throw std::invalid_argument("a vocabulary of " + std::to_string(vocabulary) + " tokens cannot be drawn from");
    }
}

void mask_out(const uint32_t* mask, float* logits, int64_t vocabulary) {
    for (int64_t start = 0; start < vocabulary; start += 32) {
        const uint32_t word = mask[start / 32];
        const int64_t end = std::min(start + 32, vocabulary);
        // Most words of a form's mask allow nothing.
        if (word == 0) std::fill(logits + start, logits + end, kNever);
        for (int64_t token = start; word != 0 && token < end; ++token) {
            if ((word >> (token - start) & 1) == 0) logits[token] = kNever;
        }
    }
}

void edit(const octavo_edits& edits, float* logits, int64_t vocabulary) {
    for (int64_t each = 0; each < edits.num_seen; ++each) {
        float& logit = logits[edits.seen[each]];
        logit = logit > 0 ? logit / edits.repetition : logit * edits.repetition;
        logit -= edits.frequency * static_cast<float>(edits.counts[each]);
        if (edits.counts[each] > 0) logit -= edits.presence;
    }
    for (int64_t each = 0; each < edits.num_biased; ++each) logits[edits.biased[each]] += edits.biases[each];
    for (int64_t each = 0; each < edits.num_banned; ++each) logits[edits.banned[each]] = kNever;
    if (edits.mask != nullptr) mask_out(edits.mask, logits, vocabulary);
}

int64_t first_of(const Kernels& kernels, const float* logits, int64_t size, float most) {
    int64_t start = 0;
    while (kernels.largest_of(logits + start, std::min(kStretch, size - start)) < most) start += kStretch;
    return std::find(logits + start, logits + size, most) - logits;
}

// The weights of a row, and their sum over each stretch of it.
class Weights {
public:
    Weights(const Kernels& kernels, const float* logits, int64_t size, const Weighing& by)
        : kernels_(kernels), logits_(logits), size_(size), by_(by) {
        room().weights.resize(static_cast<size_t>(size));
        weights_ = room().weights.data();
        for_stretches([&](int64_t start, int64_t end) {
            return kernels_.weigh(logits_ + start, end - start, by_, weights_ + start);
        });
    }

    // Leaves the tokens that make up top_p of all weights and weigh as much as least_weight.
    void filter(double top_p, int64_t least_weight) {
        Cut cut;
        if (top_p < 1) {
            const auto needed = static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total_)));
            cut = nucleus(kernels_, logits_, weights_, size_, by_, std::min(needed, total_), room().nucleus);
        }
        const float above = std::nextafter(cut.logit, std::numeric_limits<float>::infinity());
        for_stretches([&](int64_t start, int64_t end) {
            // Of the cut's equals, those beyond it don't stay.
            const int64_t beyond = std::clamp(cut.token, start - 1, end - 1) + 1;
            return kernels_.keep(logits_ + start, beyond - start, cut.logit, least_weight, weights_ + start) +
                   kernels_.keep(logits_ + beyond, end - beyond, above, least_weight, weights_ + beyond);
        });
    }

    // The first token at which the sum of weights exceeds the share `uniform` of the whole sum, which is not 0.
    int64_t invert(double uniform) const {
        // The product may round up to the total itself, which lies beyond the last token.
        int64_t target = std::min(static_cast<int64_t>(uniform * static_cast<double>(total_)), total_ - 1);
        int64_t stretch = 0;
        while (target >= sums_[stretch]) target -= sums_[stretch++];
        int64_t token = stretch * kStretch;
        while (target >= weights_[token]) target -= weights_[token++];
        return token;
    }

private:
    template <class Sum>
    void for_stretches(const Sum& sum) {
        total_ = 0;
        for (int64_t start = 0; start < size_; start += kStretch) {
            sums_[start / kStretch] = sum(start, std::min(start + kStretch, size_));
            total_ += sums_[start / kStretch];
        }
    }

    const Kernels& kernels_;
    const float* logits_;
    int64_t size_;
    Weighing by_;
    int64_t* weights_;
    int64_t total_ = 0;
    int64_t sums_[kMaxVocabulary / kStretch];
};

// The edited logits, or as they are.
const float* logits_of(const octavo_draws& draws, int64_t index) {
    const float* logits = draws.logits + draws.rows[index] * draws.vocabulary;
    if (draws.edits == nullptr || draws.edits[index] == nullptr) return logits;
    std::vector<float>& edited = room().edited;
    edited.assign(logits, logits + draws.vocabulary);
    edit(*draws.edits[index], edited.data(), draws.vocabulary);
    return edited.data();
}

// Leaves the top_k likeliest tokens in the room, by their ids: a small vocabulary.
const float* leave_best(const Kernels& kernels, const float* logits, int64_t size, int64_t top_k) {
    std::vector<uint64_t>& ranks = room().ranks;
    best_of(kernels, logits, size, top_k, ranks);
    std::sort(ranks.begin(), ranks.end(), [](uint64_t a, uint64_t b) { return token_of(a) < token_of(b); });
    std::vector<float>& best = room().best_logits;
    best.resize(ranks.size());
    std::transform(ranks.begin(), ranks.end(), best.begin(), [&](uint64_t rank) { return logits[token_of(rank)]; });
    return best.data();
}

int64_t draw_one(const Kernels& kernels, const octavo_draws& draws, int64_t index) {
    int64_t size = draws.vocabulary;
    const float* logits = logits_of(draws, index);
    const float most = kernels.largest_of(logits, size);
    if (!(most > kNever)) return -1;
    const double temperature = draws.temperature[index];
    if (!(temperature > 0) || std::isinf(most)) return first_of(kernels, logits, size, most);
    const bool is_best = 0 < draws.top_k[index] && draws.top_k[index] < size;
    if (is_best) {
        size = draws.top_k[index];
        logits = leave_best(kernels, logits, draws.vocabulary, size);
    }
    Weights weights(kernels, logits, size, {most, std::min(kLog2OfE / temperature, kLargestScale)});
    if (draws.top_p[index] < 1 || draws.min_p[index] > 0) {
        weights.filter(draws.top_p[index], static_cast<int64_t>(std::ceil(draws.min_p[index] * kWeightUnit)));
    }
    const int64_t drawn = weights.invert(draws.uniform[index]);
    return is_best ? token_of(room().ranks[drawn]) : drawn;
}

// ln of the sum of e^logit.
double log_sum_exp(const Kernels& kernels, const float* logits, int64_t size) {
    const Weighing by = {kernels.largest_of(logits, size), kLog2OfE};
    int64_t total = 0, weights[kStretch];
    for (int64_t start = 0; start < size; start += kStretch) {
        total += kernels.weigh(logits + start, std::min(kStretch, size - start), by, weights);
    }
    return by.most + std::log(static_cast<double>(total) / kWeightUnit);
}

}  // namespace

void draw(Pool& pool, const Kernels& kernels, const octavo_draws& draws, int64_t* tokens) {
    check_vocabulary(draws.vocabulary);
    for (int64_t index = 0; draws.edits != nullptr && index < draws.count; ++index) {
        const octavo_edits* edits = draws.edits[index];
        if (edits == nullptr) continue;
        check_tokens(edits->seen, edits->num_seen, draws.vocabulary);
        check_tokens(edits->biased, edits->num_biased, draws.vocabulary);
        check_tokens(edits->banned, edits->num_banned, draws.vocabulary);
    }
    pool.run(draws.count, [&](int64_t index) { tokens[index] = draw_one(kernels, draws, index); });
}

void log_probabilities(Pool& pool, const Kernels& kernels, const octavo_positions& positions, double* logprobs,
                       int64_t* best_ids, double* best_logprobs) {
    const int64_t size = positions.vocabulary, width = positions.width;
    check_vocabulary(size);
    for (int64_t index = 0; index < positions.count; ++index) {
        if (positions.tokens[index] < 0 || positions.tokens[index] >= size || positions.best[index] > width) {
            throw std::invalid_argument("a token is not in the vocabulary, or more are wanted than there is room for");
        }
    }
    pool.run(positions.count, [&](int64_t index) {
        const float* logits = positions.logits + positions.rows[index] * size;
        const double norm = log_sum_exp(kernels, logits, size);
        logprobs[index] = logits[positions.tokens[index]] - norm;
        std::vector<uint64_t>& ranks = room().ranks;
        best_of(kernels, logits, size, positions.best[index], ranks);
        std::sort(ranks.begin(), ranks.end(), std::greater<>());
        for (size_t place = 0; place < ranks.size(); ++place) {
            best_ids[index * width + place] = token_of(ranks[place]);
            best_logprobs[index * width + place] = logits[token_of(ranks[place])] - norm;
        }
    });
}

}  // namespace octavo
