// A step's attention: the K/V it writes, and how its work is shared out among threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace octavo {

// The sequences of a step; the arrays are the caller's. See octavo.h.
struct Sequences {
    int64_t count;
    const int32_t* query_offsets;  // [count + 1]
    const int32_t* lengths;        // [count], tokens with K/V once the step has run
    const int32_t* block_tables;   // [count, table_width]
    int64_t table_width;
    const int64_t* slots;  // [tokens], block * block size + slot
    int64_t tokens() const { return query_offsets[count]; }
};

class AttentionPlan {
public:
    // The plan is the same for all layers. Raises std::invalid_argument for a table that doesn't fit the cache.
    void make(const Sequences& sequences, int64_t kv_heads, int64_t heads_per_kv, int64_t block_size,
              int64_t num_blocks, int64_t window, int threads);

    // Attends all queries of the step.
    void run(Pool& pool, const Kernels& kernels, const AttentionArgs& args);

private:
    // A span over what several sequences share: for each KV head one or more, before the units.
    struct Shared {
        AttentionSpan span;
        int64_t splits;
        int64_t state;  // Which of the states it makes, one for each of its rows.
    };

    // Spans first_span..last_span - 1 over some splits of their contexts. cost: keys that it reads. state: which of the
    // states it makes, where a span is computed by several units.
    struct Unit {
        int64_t first_span, last_span;
        int64_t first_split, last_split;
        int64_t cost;
        int64_t state;
    };

    // Lets sequences that share blocks attend them together. Their own spans go on from there.
    void share(const Sequences& sequences, int64_t kv_heads, int64_t heads_per_kv, int64_t block_size, int threads);
    // Several spans in a unit, so that a thread knows what to fetch next.
    void make_joint_units(int64_t window, int threads);
    // Several units for a span, so that all threads have work.
    void make_split_units(int64_t heads_per_kv, int64_t window);
    void run_shared(Pool& pool, const Kernels& kernels, const AttentionArgs& args);
    void run_splits(Pool& pool, const Kernels& kernels, const AttentionArgs& args);
    float* state_room(int64_t rows, int64_t floats_per_row);

    std::vector<AttentionSpan> spans_;
    std::vector<Unit> units_;
    bool splits_ = false;          // Whether a span is computed by several units, whose states are merged afterwards.
    std::vector<int64_t> parts_;   // For each span, how many units it has, where there are several.
    std::vector<int64_t> starts_;  // For each span, its first state, where there are several units or something is shared.
    std::vector<Shared> shared_;
    int64_t shared_rows_ = 0;
    std::vector<float> states_;
};

// Writes the keys and values of one token, [kv heads, head dim] each, to a slot of a layer's cache.
void write_kv(const AttentionArgs& cache, int64_t slot, const float* keys, const float* values);

}  // namespace octavo
