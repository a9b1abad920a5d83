// Attention with products of pairs of bfloat16, which are added up in float32: queries and weights are rounded to it
// like the K/V are. Included into an instruction set's namespace, after spans.h, where there is fma for such pairs.
//
// Scores are chains over pairs of dimensions, weighted values chains over pairs of tokens, from an even one on; a pair's
// token that the span does not have counts as zeros. So the order of sums is the context's alone, as in float32.

// A tile's keys by pairs of dimensions, which is how they lie.
struct KeyPairs {
    static constexpr int64_t kGroup = 0, kStep = 1;
    const uint32_t* const* slots;
    const uint32_t* const* ahead;
    int64_t stride;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits words[vecs];
        Chunk(const KeyPairs& b, int64_t k) {
            const int64_t offset = k * b.stride;
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                fetch_far(b.ahead[vec] + offset);
                words[vec] = load_bits(b.slots[vec] + offset);
            }
        }
        template <int>
        Bits get(const NoScales&, int vec) const { return words[vec]; }
    };
    KeyPairs from_column(int64_t column) const { return {slots + column / kLanes, ahead + column / kLanes, stride}; }
};

// A tile's values by pairs of tokens: two rows' numbers one after the other in words. Of 32 dimensions the first vector
// has every other four, and the second one the four between; so the state has them too.
struct ValuePairs {
    static constexpr int64_t kGroup = 0, kStep = 1;
    const uint16_t* const* rows;
    const uint16_t* const* ahead;
    int64_t column;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits words[vecs];
        Chunk(const ValuePairs& b, int64_t k) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; vec += 2) {
                const int64_t at = b.column + vec * kLanes;
                fetch_far(b.ahead[2 * k] + at);
                fetch_far(b.ahead[2 * k + 1] + at);
                const Bits first = load_bits(reinterpret_cast<const uint32_t*>(b.rows[2 * k] + at));
                const Bits second = load_bits(reinterpret_cast<const uint32_t*>(b.rows[2 * k + 1] + at));
                words[vec] = low_pairs(first, second);
                words[vec + 1] = high_pairs(first, second);
            }
        }
        template <int>
        Bits get(const NoScales&, int vec) const { return words[vec]; }
    };
    ValuePairs from_column(int64_t start) const { return {rows, ahead, column + start}; }
};

// Rounds floats, a multiple of 32, to words of two bfloat16 in the same place.
inline void round_to_pairs(float* row, int64_t count) {
    auto* words = reinterpret_cast<uint32_t*>(row);
    for (int64_t index = 0; index < count; index += 2 * kLanes) {
        store_bits(words + index / 2, to_pairs(load(row + index), load(row + index + kLanes)));
    }
}

struct Bfloat16Work : SpanWork<uint16_t, Bfloat16Work> {
    using SpanWork::SpanWork;

    static const uint32_t* words(const float* rows) { return reinterpret_cast<const uint32_t*>(rows); }

    void round_queries() {
        for (int64_t row = 0; row < rows; ++row) round_to_pairs(queries + row * width, width);
    }

    void multiply_keys(const Tile<uint16_t>& tile, const Tile<uint16_t>& next) {
        const RowsOf<kTile> to{scores};
        if (a.block_size % kLanes == 0) {
            const KeyPairs keys{tile.slots, next.slots, a.block_size};
            return multiply_rows(words(queries), width, rows, keys, width / 2, kTile, to, false);
        }
        const uint32_t* slots[kTileVecs];
        for (int64_t vec = 0; vec < kTileVecs; ++vec) slots[vec] = words(copied) + vec * kLanes;
        copy_keys(tile);
        multiply_rows(words(queries), width, rows, KeyPairs{slots, slots, kTile}, width / 2, kTile, to, false);
    }

    // copied[pair of dimensions, slot], as words.
    void copy_keys(const Tile<uint16_t>& tile) {
        for (int64_t position = tile.first; position < tile.stop; ++position) {
            const uint16_t* from = key_at(position);
            for (int64_t k = 0; k < width / 2; ++k) {
                std::memcpy(copied + k * kTile + position % kTile, from + k * 2 * a.block_size, sizeof(uint32_t));
            }
        }
    }

    void multiply_values(const Tile<uint16_t>& tile, const Tile<uint16_t>& next, float* state) {
        for (int64_t row = 0; row < rows; ++row) round_to_pairs(scores + row * kTile, kTile);
        const int64_t first = tile.lead() / 2 * 2, end = tile.lead() + tile.count(), last = (end + 1) / 2 * 2;
        const uint16_t* values[kTile];
        std::memcpy(values + first, tile.rows + first, sizeof(*values) * static_cast<size_t>(last - first));
        if (tile.lead() > first || end < last) {
            // Behind copied keys: a weight there is 0, but what nobody has written may be no number.
            float* zeros = copied + kTile * width / 2;
            for (int64_t column = 0; column < width / 2; column += kLanes) store(zeros + column, all(0.0f));
            if (tile.lead() > first) values[first] = reinterpret_cast<const uint16_t*>(zeros);
            if (end < last) values[end] = reinterpret_cast<const uint16_t*>(zeros);
        }
        const ValuePairs pairs{values + first, next.rows + first, 0};
        multiply_rows<2>(words(scores) + first / 2, kTile, rows, pairs, (last - first) / 2, width,
                         Rows{state, state_floats(width)}, true);
    }
};

void attend_in_pairs(const AttentionArgs& args, const AttentionSpan& span, const AttentionSpan* next,
                     int64_t first_split, int64_t last_split, float* state, float* scratch) {
    Bfloat16Work work(args, span, scratch);
    work.round_queries();
    work.run(first_split * kSplitTokens, last_split * kSplitTokens, next, state);
}

void finish_pairs(const AttentionArgs& args, const AttentionSpan& span, float* states, int64_t count,
                  int64_t distance) {
    const int64_t width = args.head_dim;
    finish_rows(args, span, states, count, distance, [&](const float* state, float* to) {
        const Vec total = all(state[width + 1]);
        for (int64_t column = 0; column < width; column += 2 * kLanes) {
            const Vec first = div(load(state + column), total), second = div(load(state + column + kLanes), total);
            store(to + column, first_in_fours(first, second));
            store(to + column + kLanes, last_in_fours(first, second));
        }
    });
}

constexpr AttentionKernels bfloat16_attention_table() { return {attend_in_pairs, finish_pairs}; }
