// Attention with float32 products. Included into an instruction set's namespace, after spans.h.

// A tile's keys as floats.
template <class T>
struct PagedKeys {
    static constexpr int64_t kGroup = 0, kStep = kPair<T>;
    KeyRuns at;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits words[vecs];
        Chunk(const PagedKeys& b, int64_t k) { b.at.read(k / kStep, words); }
        template <int index>
        Vec get(const NoScales&, int vec) const {
            if constexpr (kStep == 1) return as_floats(words[vec]);
            return index ? high_bf16(words[vec]) : low_bf16(words[vec]);
        }
    };
    PagedKeys from_column(int64_t column) const { return {at.from_column(column)}; }
};

// A tile's values as floats, token by token.
template <class T>
struct PagedValues {
    using Number = Vec;
    static constexpr int64_t kTokens = 1, kBytes = sizeof(T);
    const T* const* runs;
    int64_t stride;
    int64_t first, last;
    const Ahead* ahead;  // or null
    int64_t column;

    template <int vecs>
    void read(int64_t run, int64_t token, Vec (&w)[vecs]) const {
        const T* row = runs[run] + token * stride + column;
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; ++vec) w[vec] = load_any(row + vec * kLanes);
    }
};

template <class T>
struct FloatWork : SpanWork<T, FloatWork<T>> {
    using Base = SpanWork<T, FloatWork<T>>;
    using Base::Base;
    using Base::a, Base::width, Base::rows, Base::queries;
    static constexpr int kDegree = 6;

    void score(const Tile<T>& found, const Ahead& ahead, float* to) {
        const Tile<T> tile = Base::with_keys(found);
        const PagedKeys<T> keys{{tile.keys, tile.key_stride, ahead.lines ? &ahead : nullptr, 0}};
        score_rows(queries, width, rows, keys, a.head_dim, to);
    }

    static void put_weights(float* row, int64_t key, const Vec (&weights)[Base::kTogether]) {
        OCTAVO_UNROLL
        for (int each = 0; each < Base::kTogether; ++each) store(row + key + each * kLanes, weights[each]);
    }

    void weigh(const Tile<T>& found, const float* weights, const Ahead& ahead, float* state, bool continues) {
        const bool copies = !found.finds(a) || width != a.head_dim;
        const Tile<T> tile = copies ? Base::with_copied_values(found) : found;
        const bool fetches = ahead.lines && tile.is_whole() && !copies;
        if (!fetches) ahead.fetch_all();
        const PagedValues<T> values{tile.values, tile.value_stride,          tile.lead(),
                                    tile.end(),  fetches ? &ahead : nullptr, 0};
        weigh_rows<1>(weights, kSplitTokens, rows, values, width, Rows{state, state_floats(width)}, continues);
    }
};

void attend(const AttentionArgs& args, const AttentionSpan& span, const AttentionSpan* next, int64_t first_split,
            int64_t last_split, float* state, float* scratch) {
    const int64_t first = first_split * kSplitTokens, last = last_split * kSplitTokens;
    if (args.is_bf16) {
        FloatWork<uint16_t>(args, span, scratch).run(first, last, next, state);
    } else {
        FloatWork<float>(args, span, scratch).run(first, last, next, state);
    }
}

void finish_attention(const AttentionArgs& args, const AttentionSpan& span, float* states, int64_t count,
                      int64_t distance) {
    const int64_t width = padded(args.head_dim);
    finish_rows(args, span, states, count, distance, [&](const float* state, float* to) {
        for (int64_t column = 0; column < args.head_dim; ++column) to[column] = state[column] / state[width + 1];
    });
}

constexpr AttentionKernels attention_table() { return {attend, finish_attention}; }
