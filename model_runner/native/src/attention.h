// Attention with float32 products. Included into an instruction set's namespace, after spans.h.

// A tile's keys by dimensions, vectors of slots wherever their blocks lie. Each one that is read fetches its like of
// the next tile.
template <class T>
struct PagedKeys {
    static constexpr int64_t kGroup = 0, kStep = kPair<T>;
    const uint32_t* const* slots;
    const uint32_t* const* ahead;
    int64_t stride;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits words[vecs];
        Chunk(const PagedKeys& b, int64_t k) {
            const int64_t offset = k / kStep * b.stride;
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                fetch_far(b.ahead[vec] + offset);
                words[vec] = load_bits(b.slots[vec] + offset);
            }
        }
        template <int index>
        Vec get(const NoScales&, int vec) const {
            if constexpr (kStep == 1) return as_floats(words[vec]);
            return index ? high_bf16(words[vec]) : low_bf16(words[vec]);
        }
    };
    PagedKeys from_column(int64_t column) const { return {slots + column / kLanes, ahead + column / kLanes, stride}; }
};

// A tile's values, rows wherever they lie; as above.
template <class T>
struct PagedValues {
    static constexpr int64_t kGroup = 0, kStep = 1;
    const T* const* rows;
    const T* const* ahead;
    int64_t column;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        const T* row;
        Chunk(const PagedValues& b, int64_t k) : row(b.rows[k] + b.column) {
            constexpr int64_t numbers = kLine / sizeof(T);
            for (int64_t each = 0; each < vecs * kLanes; each += numbers) fetch_far(b.ahead[k] + b.column + each);
        }
        template <int>
        Vec get(const NoScales&, int vec) const { return load_any(row + vec * kLanes); }
    };
    PagedValues from_column(int64_t start) const { return {rows, ahead, column + start}; }
};

// Copies rows as floats, padded with zeros to whole vectors.
template <class T>
inline void copy_rows(const T* const* rows, int64_t count, int64_t head_dim, int64_t width, float* to) {
    for (int64_t key = 0; key < count; ++key, to += width) {
        const T* from = rows[key];
        int64_t column = 0;
        for (; column + kLanes <= head_dim; column += kLanes) store(to + column, load_any(from + column));
        for (; column < width; ++column) to[column] = column < head_dim ? number(from[column]) : 0.0f;
    }
}

template <class T>
struct FloatWork : SpanWork<T, FloatWork<T>> {
    using Base = SpanWork<T, FloatWork<T>>;
    using Base::Base;
    using Base::a, Base::span, Base::width, Base::rows, Base::queries, Base::scores, Base::copied;

    void multiply_keys(const Tile<T>& tile, const Tile<T>& next) {
        const RowsOf<kTile> to{scores};
        if (a.block_size % kLanes == 0) {
            const PagedKeys<T> keys{tile.slots, next.slots, a.block_size};
            return multiply_rows(queries, width, rows, keys, a.head_dim, kTile, to, false);
        }
        copy_keys(tile);
        multiply_rows(queries, width, rows, FloatRows{copied, kTile}, a.head_dim, kTile, to, false);
    }

    // copied[dimension, slot]
    void copy_keys(const Tile<T>& tile) {
        for (int64_t position = tile.first; position < tile.stop; ++position) {
            const T* from = Base::key_at(position);
            float* to = copied + position % kTile;
            for (int64_t k = 0; k < a.head_dim; ++k) {
                to[k * kTile] = number(from[k / kPair<T> * kPair<T> * a.block_size + k % kPair<T>]);
            }
        }
    }

    void multiply_values(const Tile<T>& tile, const Tile<T>& next, float* state) {
        const int64_t lead = tile.lead(), count = tile.count();
        const Rows to{state, state_floats(a.head_dim)};
        const float* weights = scores + lead;
        if (width != a.head_dim) {
            copy_rows(tile.rows + lead, count, a.head_dim, width, copied);
            return multiply_rows(weights, kTile, rows, FloatRows{copied, width}, count, width, to, true);
        }
        const PagedValues<T> values{tile.rows + lead, next.rows + lead, 0};
        multiply_rows(weights, kTile, rows, values, count, width, to, true);
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
