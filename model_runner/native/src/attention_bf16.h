// Attention with products of pairs of bfloat16, which are added up in float32: queries and weights are rounded to it
// like the K/V are. Included into an instruction set's namespace, after spans.h, where there is fma for such pairs.
//
// Scores are chains over pairs of dimensions, weighted values chains over pairs of tokens, from an even one on; a pair's
// token that the span does not have counts as zeros. So the order of sums is the context's alone, as in float32.

// A tile's keys by pairs of dimensions, which is how they lie.
struct KeyPairs {
    static constexpr int64_t kGroup = 0, kStep = 1;
    KeyRuns at;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits words[vecs];
        Chunk(const KeyPairs& b, int64_t k) { b.at.read(k, words); }
        template <int>
        Bits get(const NoScales&, int vec) const { return words[vec]; }
    };
    KeyPairs from_column(int64_t column) const { return {at.from_column(column)}; }
};

// A tile's values by pairs of tokens: two rows' numbers one after the other in words. Of 32 dimensions the first vector
// has every other four, and the second one the four between; so the state has them too.
struct ValuePairs {
    using Number = Bits;
    static constexpr int64_t kTokens = 2, kBytes = sizeof(uint16_t);
    const uint16_t* const* runs;
    int64_t stride;
    int64_t first, last;
    const Ahead* ahead;  // or null
    int64_t column;

    template <int vecs>
    void read(int64_t run, int64_t pair, Bits (&words)[vecs]) const {
        const uint16_t* row = runs[run] + 2 * pair * stride + column;
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; vec += 2) {
            const uint16_t* at = row + vec * kLanes;
            const Bits first_row = load_bits(reinterpret_cast<const uint32_t*>(at));
            const Bits second_row = load_bits(reinterpret_cast<const uint32_t*>(at + stride));
            words[vec] = low_pairs(first_row, second_row);
            words[vec + 1] = high_pairs(first_row, second_row);
        }
    }
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
    static constexpr int kDegree = 4;  // Weights are rounded to 8 bits.

    static const uint32_t* words(const float* rows) { return reinterpret_cast<const uint32_t*>(rows); }

    void round_queries() {
        for (int64_t row = 0; row < rows; ++row) round_to_pairs(queries + row * width, width);
    }

    void score(const Tile<uint16_t>& found, const Ahead& ahead, float* to) {
        const Tile<uint16_t> tile = with_keys(found);
        const KeyPairs keys{{tile.keys, tile.key_stride, ahead.lines ? &ahead : nullptr, 0}};
        score_rows(words(queries), width, rows, keys, width / 2, to);
    }

    // As pairs in the first half of the weights' places. Nothing is there any more when they come.
    static void put_weights(float* row, int64_t key, const Vec (&weights)[kTogether]) {
        auto* to = reinterpret_cast<uint32_t*>(row) + key / 2;
        store_bits(to, to_pairs(weights[0], weights[1]));
        store_bits(to + kLanes, to_pairs(weights[2], weights[3]));
    }

    // weights: those of the tile, were they not in pairs.
    void weigh(const Tile<uint16_t>& found, const float* weights, const Ahead& ahead, float* state, bool continues) {
        const bool copies = !found.finds(a) || found.first % 2 || found.stop % 2;
        const Tile<uint16_t> tile = copies ? with_copied_values(found) : found;
        const bool fetches = ahead.lines && tile.is_whole() && !copies;
        if (!fetches) ahead.fetch_all();
        const ValuePairs values{tile.values,          tile.value_stride, tile.lead() / 2, (tile.end() + 1) / 2,
                                fetches ? &ahead : nullptr, 0};
        const uint32_t* pairs = words(scores) + (weights - scores) / 2;
        weigh_rows<2>(pairs, kSplitTokens, rows, values, width, Rows{state, state_floats(width)}, continues);
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
