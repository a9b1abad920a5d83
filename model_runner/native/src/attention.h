// Attention that walks the block table. Included into an instruction set's namespace, after tile.h and rowwise.h.
//
// Keys come in tiles of 64. A tile's keys are transposed once for all query rows, then scores and weighted values are
// two small matrix products: the same code for one query and for a prompt, so that both give the same bits. The running
// maximum and sum are the online softmax of FlashAttention (Dao et al., 2022), the splits those of its decode kernel.

constexpr int64_t kTile = 64;
// With 32 registers 6 rows go with 4 vectors of columns, with 16 registers with 2.
constexpr int kAttentionRows = 6, kAttentionVecs = kRegisters >= 32 ? 4 : 2;

inline int64_t padded(int64_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// c = a * b, or c += a * b, for a whole number of vectors of columns.
template <class B>
inline void multiply_rows(const float* a, int64_t a_stride, int64_t rows, const B& b, int64_t depth, int64_t columns,
                          float* c, int64_t c_stride, bool continues) {
    for_row_blocks(rows, kAttentionRows, [&](int64_t first, int64_t count) {
        const float* a_rows = a + first * a_stride;
        float* c_rows = c + first * c_stride;
        int64_t column = 0;
        for (; column + kAttentionVecs * kLanes <= columns; column += kAttentionVecs * kLanes) {
            tile<B, kAttentionRows, kAttentionVecs>(count, a_rows, a_stride, b.from_column(column), depth,
                                                    c_rows + column, c_stride, continues);
        }
        for (; column < columns; column += kLanes) {
            tile<B, kAttentionRows, 1>(count, a_rows, a_stride, b.from_column(column), depth, c_rows + column, c_stride,
                                       continues);
        }
    });
}

// Transposed keys in bfloat16, as they lie: a word has two neighbouring dimensions, the first one in its low half.
struct PairRows {
    static constexpr int64_t kGroup = 0, kStep = 2;
    const uint32_t* base;
    int64_t stride;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits pair[vecs];
        Chunk(const PairRows& b, int64_t k) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) pair[vec] = load_bits(b.base + k / 2 * b.stride + vec * kLanes);
        }
        template <int index>
        Vec get(const NoScales&, int vec) const { return index ? high_bf16(pair[vec]) : low_bf16(pair[vec]); }
    };
    PairRows from_column(int64_t column) const { return {base + column, stride}; }
};

// A row's state: [padded(head_dim)] sum of values, then the maximum of its scores and the sum of its weights.
int64_t state_floats(int64_t head_dim) { return padded(head_dim) + kLanes; }

int64_t attention_scratch(int64_t rows, int64_t head_dim) {
    return rows * (padded(head_dim) + kTile) + 2 * kTile * padded(head_dim) + rows * state_floats(head_dim);
}

inline void clear_state(float* state, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) {
        float* each = state + row * state_floats(width);
        for (int64_t column = 0; column < width; ++column) each[column] = 0.0f;
        each[width] = -__builtin_inff();
        each[width + 1] = 0.0f;
    }
}

inline float exponential_of(float x) {
    float lanes[kLanes];
    store(lanes, exponential(all(x)));
    return lanes[0];
}

// into = into merged with part. A part that saw no key leaves it as it is, bit by bit.
inline void merge_state(float* into, const float* part, int64_t width) {
    const float top = into[width] > part[width] ? into[width] : part[width];
    const float base = top == -__builtin_inff() ? 0.0f : top;
    const float mine = exponential_of(into[width] - base), theirs = exponential_of(part[width] - base);
    for (int64_t column = 0; column < width; column += kLanes) {
        const Vec added = mul(all(theirs), load(part + column));
        store(into + column, fma(all(mine), load(into + column), added));
    }
    into[width] = top;
    into[width + 1] = mine * into[width + 1] + theirs * part[width + 1];
}

// A tile's weights from its scores, in place, and the state's values scaled to the new maximum.
inline void weigh(float* scores, float* state, int64_t width) {
    Vec top = all(state[width]);
    for (int64_t key = 0; key < kTile; key += kLanes) top = max(top, load(scores + key));
    const float highest = largest(top);
    const float base = highest == -__builtin_inff() ? 0.0f : highest;
    const float shrink = exponential_of(state[width] - base);
    Vec total = all(0.0f);
    for (int64_t key = 0; key < kTile; key += kLanes) {
        const Vec weight = exponential(sub(load(scores + key), all(base)));
        store(scores + key, weight);
        total = add(total, weight);
    }
    for (int64_t column = 0; column < width; column += kLanes) {
        store(state + column, mul(all(shrink), load(state + column)));
    }
    state[width] = highest;
    state[width + 1] = shrink * state[width + 1] + sum(total);
}

// Where the keys (and values) first..last - 1 of a sequence begin, in elements from the start of the cache.
inline void find_rows(const AttentionArgs& a, const AttentionSpan& span, int64_t first, int64_t last,
                      int64_t* offsets) {
    const int64_t shift = __builtin_ctzll(static_cast<uint64_t>(a.block_size));
    for (int64_t position = first; position < last;) {
        const int64_t slot = position & (a.block_size - 1);
        const int64_t block = span.table[position >> shift];
        int64_t offset = ((block * a.kv_heads + span.kv_head) * a.block_size + slot) * a.head_dim;
        for (int64_t left = a.block_size - slot; left > 0 && position < last; --left, ++position) {
            *offsets++ = offset;
            offset += a.head_dim;
        }
    }
}

// Copies rows as floats, padded with zeros to whole vectors.
template <class T>
inline void copy_rows(const T* base, const int64_t* offsets, int64_t count, int64_t head_dim, int64_t width,
                      float* to) {
    for (int64_t key = 0; key < count; ++key, to += width) {
        const T* from = base + offsets[key];
        int64_t column = 0;
        for (; column + kLanes <= head_dim; column += kLanes) store(to + column, load_any(from + column));
        for (; column < width; ++column) to[column] = column < head_dim ? number(from[column]) : 0.0f;
    }
}

inline void prefetch_rows(const void* base, const int64_t* offsets, int64_t count, int64_t head_dim, int64_t item) {
    for (int64_t key = 0; key < count; ++key) {
        const char* row = static_cast<const char*>(base) + offsets[key] * item;
        for (int64_t byte = 0; byte < head_dim * item; byte += 64) __builtin_prefetch(row + byte);
    }
}

// One span over one split.
template <class T>
struct SpanWork {
    const AttentionArgs& a;
    const AttentionSpan& span;
    int64_t width, rows;
    float *queries, *scores, *transposed, *copied;

    SpanWork(const AttentionArgs& args, const AttentionSpan& of, float* scratch)
        : a(args), span(of), width(padded(args.head_dim)), rows(of.tokens * args.heads_per_kv) {
        queries = scratch;
        scores = queries + rows * width;
        transposed = scores + rows * kTile;
        copied = transposed + kTile * width;
        load_queries();
    }

    float* part() const { return copied + kTile * width; }

    void load_queries() {
        float* to = queries;
        for (int64_t token = 0; token < span.tokens; ++token) {
            const float* from = a.queries + (span.first_row + token) * a.query_stride;
            from += span.kv_head * a.heads_per_kv * a.head_dim;
            for (int64_t head = 0; head < a.heads_per_kv; ++head, from += a.head_dim, to += width) {
                for (int64_t column = 0; column < width; ++column) {
                    to[column] = column < a.head_dim ? from[column] * a.scale : 0.0f;
                }
            }
        }
    }

    // The first key that the span's token at `position` sees.
    int64_t first_key(int64_t position) const {
        return a.window && position >= a.window ? position + 1 - a.window : 0;
    }

    void run(int64_t first, int64_t last, float* state) {
        int64_t offsets[2][kTile];
        const int64_t end = span.first_position + span.tokens;
        first = first > first_key(span.first_position) ? first : first_key(span.first_position);
        last = last < end ? last : end;
        int turn = 0;
        if (first < last) find(first, last, offsets[turn]);
        while (first < last) {
            const int64_t stop = tile_end(first, last);
            score(offsets[turn], first, stop);
            if (stop < last) find(stop, last, offsets[1 - turn]);
            const int64_t num_next = stop < last ? tile_end(stop, last) - stop : 0;
            add_values(offsets[turn], offsets[1 - turn], first, stop, num_next, state);
            first = stop;
            turn = 1 - turn;
        }
    }

    // Tiles end at multiples of kTile.
    static int64_t tile_end(int64_t first, int64_t last) {
        const int64_t next = (first / kTile + 1) * kTile;
        return next < last ? next : last;
    }

    void find(int64_t first, int64_t last, int64_t* offsets) {
        find_rows(a, span, first, tile_end(first, last), offsets);
    }

    // scores[row, key % kTile]; -inf where the row does not see the key.
    void score(const int64_t* offsets, int64_t first, int64_t stop) {
        const T* keys = static_cast<const T*>(a.keys);
        const int64_t count = stop - first, lead = first % kTile;
        const float* lines[kTile];
        // Numbers that are transposed: floats, or words of two bfloat16.
        constexpr bool in_pairs = sizeof(T) != sizeof(float);
        const int64_t words = in_pairs ? a.head_dim / 2 : a.head_dim;
        const bool as_they_lie = a.head_dim % ((in_pairs ? 2 : 1) * kLanes) == 0;
        const int64_t depth = as_they_lie ? words : width;
        if (!as_they_lie) copy_rows(keys, offsets, count, a.head_dim, width, copied);
        for (int64_t slot = 0; slot < kTile; ++slot) {
            // Slots without a key repeat one: their scores are thrown away.
            int64_t key = slot - lead;
            key = key < 0 || key >= count ? 0 : key;
            lines[slot] = as_they_lie ? reinterpret_cast<const float*>(keys + offsets[key]) : copied + key * width;
        }
        for (int64_t slot = 0; slot < kTile; slot += kLanes) {
            const int64_t begin = slot - lead > 0 ? slot - lead : 0;
            const int64_t end = slot + kLanes - lead < count ? slot + kLanes - lead : count;
            prefetch_rows(a.values, offsets + begin, end - begin, a.head_dim, sizeof(T));
            for (int64_t column = 0; column < depth; column += kLanes) {
                transpose(lines + slot, column, transposed + column * kTile + slot, kTile);
            }
        }
        if (in_pairs && as_they_lie) {
            const PairRows pairs{reinterpret_cast<const uint32_t*>(transposed), kTile};
            multiply_rows(queries, width, rows, pairs, a.head_dim, kTile, scores, kTile, false);
        } else {
            multiply_rows(queries, width, rows, FloatRows{transposed, kTile}, width, kTile, scores, kTile, false);
        }
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = span.first_position + row / a.heads_per_kv;
            const int64_t shift = lead - first;
            hide(scores + row * kTile, first_key(position) + shift, lead, position + 1 + shift, lead + count);
        }
    }

    // Keeps the keys from the later of two slots up to the earlier of two.
    static void hide(float* row, int64_t from, int64_t lead, int64_t to, int64_t end) {
        from = from > lead ? from : lead;
        to = to < end ? to : end;
        for (int64_t slot = 0; slot < (from < kTile ? from : kTile); ++slot) row[slot] = -__builtin_inff();
        for (int64_t slot = to > 0 ? to : 0; slot < kTile; ++slot) row[slot] = -__builtin_inff();
    }

    void add_values(const int64_t* offsets, const int64_t* next, int64_t first, int64_t stop, int64_t num_next,
                    float* state) {
        const T* values = static_cast<const T*>(a.values);
        const int64_t count = stop - first, stride = state_floats(a.head_dim);
        for (int64_t row = 0; row < rows; ++row) weigh(scores + row * kTile, state + row * stride, width);
        prefetch_rows(a.keys, next, num_next, a.head_dim, sizeof(T));
        const float* weights = scores + first % kTile;
        if (width != a.head_dim) {
            copy_rows(values, offsets, count, a.head_dim, width, copied);
            return multiply_rows(weights, kTile, rows, FloatRows{copied, width}, count, width, state, stride, true);
        }
        const T* lines[kTile];
        for (int64_t key = 0; key < count; ++key) lines[key] = values + offsets[key];
        multiply_rows(weights, kTile, rows, ScatteredRows<T>{lines, 0}, count, width, state, stride, true);
    }
};

template <class T>
inline void attend_as(const AttentionArgs& args, const AttentionSpan& span, int64_t first_split, int64_t last_split,
                      float* state, float* scratch) {
    SpanWork<T> work(args, span, scratch);
    const int64_t stride = state_floats(args.head_dim);
    clear_state(state, work.rows, work.width);
    for (int64_t split = first_split; split < last_split; ++split) {
        float* part = work.part();
        clear_state(part, work.rows, work.width);
        work.run(split * kSplitTokens, (split + 1) * kSplitTokens, part);
        for (int64_t row = 0; row < work.rows; ++row) {
            merge_state(state + row * stride, part + row * stride, work.width);
        }
    }
}

void attend(const AttentionArgs& args, const AttentionSpan& span, int64_t first_split, int64_t last_split, float* state,
            float* scratch) {
    const auto run = args.is_bf16 ? attend_as<uint16_t> : attend_as<float>;
    run(args, span, first_split, last_split, state, scratch);
}

void finish_attention(const AttentionArgs& args, const AttentionSpan& span, float* states, int64_t count,
                      int64_t distance) {
    const int64_t width = padded(args.head_dim), stride = state_floats(args.head_dim);
    for (int64_t row = 0; row < span.tokens * args.heads_per_kv; ++row) {
        float* state = states + row * stride;
        for (int64_t part = 1; part < count; ++part) merge_state(state, state + part * distance, width);
        const int64_t token = span.first_row + row / args.heads_per_kv;
        const int64_t head = span.kv_head * args.heads_per_kv + row % args.heads_per_kv;
        float* to = args.output + token * args.output_stride + head * args.head_dim;
        for (int64_t column = 0; column < args.head_dim; ++column) to[column] = state[column] / state[width + 1];
    }
}
