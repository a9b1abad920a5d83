#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "matrix.h"
#include "numbers.h"

namespace octavo {
namespace {

// With fewer spans than this for each thread, long contexts are split among threads too.
constexpr int64_t kSpansPerThread = 8;

void check(const Sequences& s, int64_t block_size, int64_t num_blocks) {
    for (int64_t index = 0; index < s.count; ++index) {
        const int64_t blocks = (s.lengths[index] + block_size - 1) / block_size;
        const int32_t* table = s.block_tables + index * s.table_width;
        if (blocks > s.table_width) throw std::invalid_argument("a block table is shorter than its sequence");
        for (int64_t block = 0; block < blocks; ++block) {
            if (table[block] < 0 || table[block] >= num_blocks) {
                throw std::invalid_argument("there is no block " + std::to_string(table[block]));
            }
        }
    }
    for (int64_t token = 0; token < s.tokens(); ++token) {
        if (s.slots[token] < 0 || s.slots[token] >= num_blocks * block_size) {
            throw std::invalid_argument("there is no slot " + std::to_string(s.slots[token]));
        }
    }
}

template <class T>
void write_heads(const AttentionArgs& cache, const void* to, int64_t slot, const float* from, T (*convert)(float)) {
    const int64_t block = slot / cache.block_size, inside = slot % cache.block_size;
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
        T* row = static_cast<T*>(const_cast<void*>(to));
        row += ((block * cache.kv_heads + head) * cache.block_size + inside) * cache.head_dim;
        for (int64_t column = 0; column < cache.head_dim; ++column) row[column] = convert(*from++);
    }
}

float as_it_is(float value) { return value; }

}  // namespace

void write_kv(const AttentionArgs& cache, int64_t slot, const float* keys, const float* values) {
    const void* caches[] = {cache.keys, cache.values};
    const float* news[] = {keys, values};
    for (int which = 0; which < 2; ++which) {
        if (cache.is_bf16) {
            write_heads<uint16_t>(cache, caches[which], slot, news[which], to_bf16);
        } else {
            write_heads<float>(cache, caches[which], slot, news[which], as_it_is);
        }
    }
}

void AttentionPlan::make(const Sequences& sequences, int64_t kv_heads, int64_t heads_per_kv, int64_t block_size,
                         int64_t num_blocks, int64_t window, int threads) {
    check(sequences, block_size, num_blocks);
    spans_.clear();
    units_.clear();
    const int64_t most = std::max<int64_t>(1, kSpanRows / heads_per_kv);
    for (int64_t index = 0; index < sequences.count; ++index) {
        const int64_t begin = sequences.query_offsets[index], end = sequences.query_offsets[index + 1];
        const int64_t before = sequences.lengths[index] - (end - begin);
        for (int64_t row = begin; row < end; row += most) {
            const int64_t tokens = std::min(most, end - row);
            for (int64_t head = 0; head < kv_heads; ++head) {
                const int32_t* table = sequences.block_tables + index * sequences.table_width;
                spans_.push_back({table, row, before + row - begin, tokens, head});
            }
        }
    }
    const int64_t count = static_cast<int64_t>(spans_.size());
    splits_ = threads > 1 && count < threads * kSpansPerThread;
    parts_.assign(spans_.size(), 0);
    starts_.assign(spans_.size(), 0);
    int64_t states = 0;
    for (int64_t index = 0; index < count; ++index) {
        const AttentionSpan& span = spans_[index];
        const int64_t first_key = window ? std::max<int64_t>(0, span.first_position + 1 - window) : 0;
        const int64_t keys = span.first_position + span.tokens;
        const int64_t first = first_key / kSplitTokens, last = (keys + kSplitTokens - 1) / kSplitTokens;
        starts_[index] = states;
        parts_[index] = splits_ ? last - first : 1;
        if (!splits_) units_.push_back({index, first, last, (keys - first_key) * span.tokens, 0});
        for (int64_t split = first; splits_ && split < last; ++split) {
            const int64_t part = std::min(keys, (split + 1) * kSplitTokens) - std::max(first_key, split * kSplitTokens);
            units_.push_back({index, split, split + 1, part * span.tokens, states});
            states += span.tokens * heads_per_kv;
        }
    }
    // The largest first, so that no thread begins with one when the others are done.
    std::stable_sort(units_.begin(), units_.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
}

void AttentionPlan::run(Pool& pool, const Kernels& kernels, const AttentionArgs& args) {
    const int64_t state = kernels.state_floats(args.head_dim);
    if (splits_) {
        int64_t rows = 0;
        for (size_t index = 0; index < spans_.size(); ++index) {
            rows += parts_[index] * spans_[index].tokens * args.heads_per_kv;
        }
        states_.resize(std::max(states_.size(), static_cast<size_t>(rows * state)));
    }
    pool.run(static_cast<int64_t>(units_.size()), [&](int64_t index) {
        const Unit& unit = units_[index];
        const AttentionSpan& span = spans_[unit.span];
        const int64_t rows = span.tokens * args.heads_per_kv;
        const int64_t scratch_floats = kernels.attention_scratch(rows, args.head_dim);
        float* scratch = thread_scratch(scratch_floats + rows * state);
        float* own = splits_ ? states_.data() + unit.state * state : scratch + scratch_floats;
        kernels.attend(args, span, unit.first_split, unit.last_split, own, scratch);
        if (!splits_) kernels.finish_attention(args, span, own, 1, 0);
    });
    for (size_t index = 0; splits_ && index < spans_.size(); ++index) {
        const AttentionSpan& span = spans_[index];
        kernels.finish_attention(args, span, states_.data() + starts_[index] * state, parts_[index],
                                 span.tokens * args.heads_per_kv * state);
    }
}

}  // namespace octavo
