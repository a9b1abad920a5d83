#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "memory.h"
#include "numbers.h"
#include "shared_runs.h"

namespace octavo {
namespace {

// With fewer spans than this for each thread, long contexts are split among threads too; with more, some go together.
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
void write_as(const AttentionArgs& cache, int64_t slot, const float* keys, const float* values, T (*convert)(float)) {
    constexpr int64_t pair = sizeof(uint32_t) / sizeof(T);
    const int64_t block = slot / cache.block_size, inside = slot % cache.block_size;
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
        const int64_t at = (block * cache.kv_heads + head) * cache.block_size * cache.head_dim;
        T* key = static_cast<T*>(const_cast<void*>(cache.keys)) + at + inside * pair;
        T* value = static_cast<T*>(const_cast<void*>(cache.values)) + at + inside * cache.head_dim;
        for (int64_t k = 0; k < cache.head_dim; ++k) {
            key[k / pair * pair * cache.block_size + k % pair] = convert(*keys++);
            value[k] = convert(*values++);
        }
    }
}

// The kernels of a layer.
const AttentionKernels& kernels_for(const Kernels& kernels, const AttentionArgs& args) {
    const bool rounds = kernels.bfloat16_attention != nullptr && args.activations == Activations::int8 && args.is_bf16;
    return rounds && args.head_dim % kPairedDimensions == 0 ? *kernels.bfloat16_attention : kernels.attention;
}

float as_it_is(float value) { return value; }

// The keys that a span's tokens see and that it reads itself: from the first one on, and those before which the last one
// is.
int64_t first_key(const AttentionSpan& span, int64_t window) {
    return window ? std::max<int64_t>(0, span.first_position + 1 - window) : span.first_key;
}

int64_t keys_of(const AttentionSpan& span) { return span.first_position + span.tokens; }

int64_t splits_of(const AttentionSpan& span) { return (keys_of(span) + kSplitTokens - 1) / kSplitTokens; }

}  // namespace

void write_kv(const AttentionArgs& cache, int64_t slot, const float* keys, const float* values) {
    if (cache.is_bf16) {
        write_as<uint16_t>(cache, slot, keys, values, to_bf16);
    } else {
        write_as<float>(cache, slot, keys, values, as_it_is);
    }
}

void AttentionPlan::make(const Sequences& sequences, int64_t kv_heads, int64_t heads_per_kv, int64_t block_size,
                         int64_t num_blocks, int64_t window, int threads) {
    check(sequences, block_size, num_blocks);
    spans_.clear();
    units_.clear();
    starts_.clear();
    shared_.clear();
    const int64_t most = std::max<int64_t>(1, kSpanRows / heads_per_kv);
    for (int64_t index = 0; index < sequences.count; ++index) {
        const int64_t begin = sequences.query_offsets[index], end = sequences.query_offsets[index + 1];
        const int64_t before = sequences.lengths[index] - (end - begin);
        for (int64_t row = begin; row < end; row += most) {
            const int64_t tokens = std::min(most, end - row);
            for (int64_t head = 0; head < kv_heads; ++head) {
                const int32_t* table = sequences.block_tables + index * sequences.table_width;
                spans_.push_back({table, row, before + row - begin, tokens, head, 0});
            }
        }
    }
    splits_ = threads > 1 && static_cast<int64_t>(spans_.size()) < threads * kSpansPerThread;
    if (splits_) {
        make_split_units(heads_per_kv, window);
    } else {
        // Under a window, those at different positions see different keys.
        if (window == 0) share(sequences, kv_heads, heads_per_kv, block_size, threads);
        make_joint_units(window, threads);
    }
    // The largest first, so that no thread begins with one when the others are done.
    std::stable_sort(units_.begin(), units_.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
}

void AttentionPlan::share(const Sequences& sequences, int64_t kv_heads, int64_t heads_per_kv, int64_t block_size,
                          int threads) {
    const std::vector<SharedRun> runs = shared_runs(sequences, block_size);
    if (runs.empty()) return;
    starts_.resize(spans_.size());
    shared_rows_ = 0;
    // Spans come by tokens: the first of each sequence's that has a span for each head is where its row says.
    std::vector<int64_t> span_of(static_cast<size_t>(sequences.tokens()));
    for (int64_t index = 0; index < static_cast<int64_t>(spans_.size()); index += kv_heads) {
        span_of[spans_[index].first_row] = index;
    }
    for (const SharedRun& run : runs) {
        // As many sequences in a span as it may have rows, unless that leaves threads without work.
        const int64_t count = run.last - run.first, full = std::max<int64_t>(1, kSpanRows / heads_per_kv);
        const int64_t even = (count * kv_heads + threads - 1) / threads;
        const int64_t together = std::max<int64_t>(2, std::min(full, even));
        for (int64_t first = run.first; first < run.last; first += together) {
            const int64_t tokens = std::min(together, run.last - first), keys = run.splits * kSplitTokens;
            const int64_t row = sequences.query_offsets[first];
            const int32_t* table = sequences.block_tables + first * sequences.table_width;
            for (int64_t head = 0; head < kv_heads; ++head) {
                shared_.push_back({{table, row, keys, tokens, head, 0}, run.splits, shared_rows_});
                for (int64_t token = 0; token < tokens; ++token, shared_rows_ += heads_per_kv) {
                    const int64_t own = span_of[row + token] + head;
                    spans_[own].first_key = keys;
                    starts_[own] = shared_rows_;
                }
            }
        }
    }
}

void AttentionPlan::make_joint_units(int64_t window, int threads) {
    const int64_t count = static_cast<int64_t>(spans_.size());
    const int64_t together = std::max<int64_t>(1, count / (threads * kSpansPerThread));
    for (int64_t first = 0; first < count; first += together) {
        Unit unit{first, std::min(count, first + together), 0, 0, 0, 0};
        for (int64_t index = unit.first_span; index < unit.last_span; ++index) {
            const AttentionSpan& span = spans_[index];
            unit.cost += (keys_of(span) - first_key(span, window)) * span.tokens;
            unit.last_split = std::max(unit.last_split, splits_of(span));
        }
        units_.push_back(unit);
    }
}

void AttentionPlan::make_split_units(int64_t heads_per_kv, int64_t window) {
    parts_.clear();
    int64_t states = 0;
    for (int64_t index = 0; index < static_cast<int64_t>(spans_.size()); ++index) {
        const AttentionSpan& span = spans_[index];
        const int64_t first_split = first_key(span, window) / kSplitTokens, last_split = splits_of(span);
        starts_.push_back(states);
        parts_.push_back(last_split - first_split);
        for (int64_t split = first_split; split < last_split; ++split) {
            const int64_t last = std::min(keys_of(span), (split + 1) * kSplitTokens);
            const int64_t keys = last - std::max(first_key(span, window), split * kSplitTokens);
            units_.push_back({index, index + 1, split, split + 1, keys * span.tokens, states});
            states += span.tokens * heads_per_kv;
        }
    }
}

void AttentionPlan::run(Pool& pool, const Kernels& kernels, const AttentionArgs& args) {
    if (splits_) {
        run_splits(pool, kernels, args);
        return;
    }
    if (!shared_.empty()) run_shared(pool, kernels, args);
    const AttentionKernels& attention = kernels_for(kernels, args);
    const int64_t state_floats = kernels.state_floats(args.head_dim);
    pool.run(static_cast<int64_t>(units_.size()), [&](int64_t index) {
        const Unit& unit = units_[index];
        for (int64_t each = unit.first_span; each < unit.last_span; ++each) {
            const AttentionSpan* next = each + 1 < unit.last_span ? &spans_[each + 1] : nullptr;
            const int64_t rows = spans_[each].tokens * args.heads_per_kv;
            const int64_t scratch_floats = kernels.attention_scratch(rows, args.head_dim);
            float* scratch = thread_scratch(scratch_floats + rows * state_floats);
            const bool goes_on = spans_[each].first_key > 0;
            float* state = goes_on ? states_.data() + starts_[each] * state_floats : scratch + scratch_floats;
            attention.attend(args, spans_[each], next, 0, unit.last_split, state, scratch);
            attention.finish(args, spans_[each], state, 1, 0);
        }
    });
}

void AttentionPlan::run_shared(Pool& pool, const Kernels& kernels, const AttentionArgs& args) {
    const int64_t state = kernels.state_floats(args.head_dim);
    float* states = state_room(shared_rows_, state);
    const AttentionKernels& attention = kernels_for(kernels, args);
    pool.run(static_cast<int64_t>(shared_.size()), [&](int64_t index) {
        const Shared& each = shared_[index];
        const int64_t rows = each.span.tokens * args.heads_per_kv;
        attention.attend(args, each.span, nullptr, 0, each.splits, states + each.state * state,
                       thread_scratch(kernels.attention_scratch(rows, args.head_dim)));
    });
}

float* AttentionPlan::state_room(int64_t rows, int64_t floats_per_row) {
    states_.resize(std::max(states_.size(), static_cast<size_t>(rows * floats_per_row)));
    return states_.data();
}

void AttentionPlan::run_splits(Pool& pool, const Kernels& kernels, const AttentionArgs& args) {
    const int64_t state = kernels.state_floats(args.head_dim);
    int64_t rows = 0;
    for (size_t index = 0; index < spans_.size(); ++index) {
        rows += parts_[index] * spans_[index].tokens * args.heads_per_kv;
    }
    state_room(rows, state);
    const AttentionKernels& attention = kernels_for(kernels, args);
    pool.run(static_cast<int64_t>(units_.size()), [&](int64_t index) {
        const Unit& unit = units_[index];
        const AttentionSpan& span = spans_[unit.first_span];
        float* scratch = thread_scratch(kernels.attention_scratch(span.tokens * args.heads_per_kv, args.head_dim));
        attention.attend(args, span, nullptr, unit.first_split, unit.last_split, states_.data() + unit.state * state,
                       scratch);
    });
    for (size_t index = 0; index < spans_.size(); ++index) {
        const AttentionSpan& span = spans_[index];
        attention.finish(args, span, states_.data() + starts_[index] * state, parts_[index],
                                 span.tokens * args.heads_per_kv * state);
    }
}

}  // namespace octavo
