// Attention that walks the block table, but for its products. Included into an instruction set's namespace, after
// tiles.h and rowwise.h.
//
// The context is cut into splits. Of one, the scores of all its keys come first, then their weights, then the weighted
// values: a row's maximum is found once a split. Splits are merged by the online softmax of FlashAttention (Dao et al.,
// 2022); they are those of its decode kernel. Scores are logarithms to base 2, so that weights are powers of 2.

constexpr float kLog2OfEAsFloat = static_cast<float>(kLog2OfE);

// 2 to the power of some x, at most 0; 0 below -126, NaN for NaN. The polynomials were fitted for the least relative
// error from -0.5 to 0.5, with 1 for 0: that of degree 6 gives e to some power within 1 unit in the last place,
// that of degree 4 within 3e-6.
template <int degree, int count>
inline void powers_of_two(Vec (&x)[count]) {
    static_assert(degree == 4 || degree == 6, "there are no others");
    constexpr float sixth[] = {1.53533620e-4f, 1.33988750e-3f, 9.61843692e-3f, 5.55033237e-2f, 2.40226477e-1f,
                               6.93147182e-1f, 1.0f};
    constexpr float fourth[] = {9.58285294e-3f, 5.59064262e-2f, 2.40240991e-1f, 6.93124175e-1f, 1.0f};
    const Vec low = all(-126.0f);
    Vec whole[count], rest[count], power[count];
    OCTAVO_UNROLL
    for (int each = 0; each < count; ++each) whole[each] = round(max(low, x[each]));
    OCTAVO_UNROLL
    for (int each = 0; each < count; ++each) rest[each] = sub(max(low, x[each]), whole[each]);
    OCTAVO_UNROLL
    for (int each = 0; each < count; ++each) power[each] = all(degree == 6 ? sixth[0] : fourth[0]);
    OCTAVO_UNROLL
    for (int term = 1; term <= degree; ++term) {
        OCTAVO_UNROLL
        for (int each = 0; each < count; ++each) {
            power[each] = fma(power[each], rest[each], all(degree == 6 ? sixth[term] : fourth[term < 5 ? term : 4]));
        }
    }
    OCTAVO_UNROLL
    for (int each = 0; each < count; ++each) {
        x[each] = zero_below(mul(power[each], power_of_two(whole[each])), x[each], low);
    }
}

// A row's state: [padded(head_dim)] sum of values, then the maximum of its scores and the sum of its weights.
int64_t state_floats(int64_t head_dim) { return padded(head_dim) + kLanes; }

// A span's queries, the scores of a split, the copies of a tile's keys and values, and the states of a split.
int64_t attention_scratch(int64_t rows, int64_t head_dim) {
    return rows * (padded(head_dim) + kSplitTokens + state_floats(head_dim)) + 2 * kTile * padded(head_dim);
}

inline void clear_state(float* state, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) {
        float* each = state + row * state_floats(width);
        for (int64_t column = 0; column < width; ++column) each[column] = 0.0f;
        each[width] = -__builtin_inff();
        each[width + 1] = 0.0f;
    }
}

inline float first_of(Vec value) {
    float lanes[kLanes];
    store(lanes, value);
    return lanes[0];
}

// What scores are lowered by before they are exponents: the highest one, but for rows that see nothing.
inline float base_of(float highest) { return highest == -__builtin_inff() ? 0.0f : highest; }

// into = into merged with part. A part that saw no key leaves it as it is, bit by bit.
inline void merge_state(float* into, const float* part, int64_t width) {
    const float top = into[width] > part[width] ? into[width] : part[width];
    const Vec base = all(base_of(top));
    Vec shares[2] = {sub(all(into[width]), base), sub(all(part[width]), base)};
    powers_of_two<6>(shares);
    for (int64_t column = 0; column < width; column += kLanes) {
        store(into + column, fma(shares[0], load(into + column), mul(shares[1], load(part + column))));
    }
    into[width] = top;
    into[width + 1] = first_of(add(mul(shares[0], all(into[width + 1])), mul(shares[1], all(part[width + 1]))));
}

// Merges each row's states, of which `count` lie `distance` apart, and has put(state, to) write its weighted values.
template <class Put>
inline void finish_rows(const AttentionArgs& args, const AttentionSpan& span, float* states, int64_t count,
                        int64_t distance, const Put& put) {
    const int64_t width = padded(args.head_dim), stride = state_floats(args.head_dim);
    for (int64_t row = 0; row < span.tokens * args.heads_per_kv; ++row) {
        float* state = states + row * stride;
        for (int64_t part = 1; part < count; ++part) merge_state(state, state + part * distance, width);
        const int64_t token = span.first_row + row / args.heads_per_kv;
        const int64_t head = span.kv_head * args.heads_per_kv + row % args.heads_per_kv;
        put(state, args.output + token * args.output_stride + head * args.head_dim);
    }
}

// One span over some splits. Products says how scores and weighted values are computed: it has
// score(tile, ahead, scores), weigh(tile, weights, ahead, state, continues), put_weights(to, weights), and the degree of its powers of two.
template <class T, class Products>
struct SpanWork {
    static constexpr int kTogether = 4;  // vectors of scores

    const AttentionArgs& a;
    const AttentionSpan& span;
    int64_t width, rows;
    float *queries, *scores, *part, *copied_keys, *copied_values;

    SpanWork(const AttentionArgs& args, const AttentionSpan& of, float* scratch)
        : a(args), span(of), width(padded(args.head_dim)), rows(of.tokens * args.heads_per_kv) {
        queries = scratch;
        scores = queries + rows * width;
        part = scores + rows * kSplitTokens;
        copied_keys = part + rows * state_floats(a.head_dim);
        copied_values = copied_keys + kTile * width;
        load_queries();
    }

    void load_queries() {
        float* to = queries;
        const float scale = a.scale * kLog2OfEAsFloat;
        for (int64_t token = 0; token < span.tokens; ++token) {
            const float* from = a.queries + (span.first_row + token) * a.query_stride;
            from += span.kv_head * a.heads_per_kv * a.head_dim;
            for (int64_t head = 0; head < a.heads_per_kv; ++head, from += a.head_dim, to += width) {
                for (int64_t column = 0; column < width; ++column) {
                    to[column] = column < a.head_dim ? from[column] * scale : 0.0f;
                }
            }
        }
    }

    // The first key that the span's token at `position` sees.
    int64_t first_key(int64_t position) const {
        return a.window && position >= a.window ? position + 1 - a.window : 0;
    }

    // The first key that a call for a span reads.
    int64_t first_key_of(const AttentionSpan& of) const {
        const int64_t seen = first_key(of.first_position);
        return seen > of.first_key ? seen : of.first_key;
    }

    // The state of the keys first..last - 1. Meanwhile the first keys of `next`, if there is one, are fetched.
    void run(int64_t first, int64_t last, const AttentionSpan* next, float* state) {
        const int64_t seen = first_key_of(span), end = span.first_position + span.tokens;
        first = first > seen ? first : seen;
        last = last < end ? last : end;
        bool goes_on = span.first_key > 0;
        if (!goes_on && first >= last) clear_state(state, rows, width);
        while (first < last) {
            const int64_t split_end = (first / kSplitTokens + 1) * kSplitTokens, stop = split_end < last ? split_end : last;
            run_split(first, stop, stop < last ? &span : next, goes_on ? part : state);
            for (int64_t row = 0; goes_on && row < rows; ++row) {
                const int64_t at = row * state_floats(a.head_dim);
                merge_state(state + at, part + at, width);
            }
            goes_on = true;
            first = stop;
        }
    }

    // The state of the keys first..last - 1, all of one split. then: whose keys come next, if any do.
    void run_split(int64_t first, int64_t last, const AttentionSpan* then, float* state) {
        Tile<T> tiles[kSplitTiles + 1];
        int64_t count = 0;
        for (int64_t begin = first; begin < last; begin = tiles[count++].stop) tiles[count].find(a, span, begin, last);
        for (int64_t index = 0; index < count; ++index) {
            const bool is_last = index + 1 == count;
            const Ahead ahead = is_last ? tiles[0].ahead_of_values(a) : tiles[index + 1].ahead_of_keys(a);
            products().score(tiles[index], ahead, scores + index * kTile);
        }
        hide_unseen(first, last, count * kTile);
        for (int64_t row = 0; row < rows; ++row) {
            weigh_scores(scores + row * kSplitTokens, count * kTile, state + row * state_floats(a.head_dim) + width);
        }
        for (int64_t index = 0; index < count; ++index) {
            const bool is_last = index + 1 == count;
            const Ahead ahead = is_last ? ahead_of_next(tiles[count], then, last) : tiles[index + 1].ahead_of_values(a);
            products().weigh(tiles[index], scores + index * kTile, ahead, state, index > 0);
        }
    }

    Products& products() { return static_cast<Products&>(*this); }

    // The keys behind the split of this span, or the first ones of another one.
    Ahead ahead_of_next(Tile<T>& room, const AttentionSpan* then, int64_t last) const {
        if (then == nullptr) return {};
        room.find(a, *then, then == &span ? last : first_key_of(*then), then->first_position + then->tokens);
        return room.ahead_of_keys(a);
    }

    // scores[row, key] of the keys from the beginning of first's tile on become -inf where the row does not see the key.
    void hide_unseen(int64_t first, int64_t last, int64_t count) {
        const int64_t start = first / kTile * kTile;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = span.first_position + row / a.heads_per_kv, seen = first_key(position);
            const int64_t from = (seen > first ? seen : first) - start;
            const int64_t to = (position + 1 < last ? position + 1 : last) - start;
            float* of = scores + row * kSplitTokens;
            for (int64_t key = 0; key < (from < count ? from : count); ++key) of[key] = -__builtin_inff();
            for (int64_t key = to > 0 ? to : 0; key < count; ++key) of[key] = -__builtin_inff();
        }
    }

    // A row's weights from its scores, in place; their sum, and the highest score before it.
    void weigh_scores(float* row, int64_t count, float* highest) {
        Vec tops[kTogether];
        OCTAVO_UNROLL
        for (int each = 0; each < kTogether; ++each) tops[each] = load(row + each * kLanes);
        for (int64_t key = kTogether * kLanes; key < count; key += kTogether * kLanes) {
            OCTAVO_UNROLL
            for (int each = 0; each < kTogether; ++each) tops[each] = max(tops[each], load(row + key + each * kLanes));
        }
        highest[0] = largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
        const Vec base = all(base_of(highest[0]));
        Vec total = all(0.0f);
        for (int64_t key = 0; key < count; key += kTogether * kLanes) {
            Vec weights[kTogether];
            OCTAVO_UNROLL
            for (int each = 0; each < kTogether; ++each) weights[each] = sub(load(row + key + each * kLanes), base);
            powers_of_two<Products::kDegree>(weights);
            total = add(total, add(add(weights[0], weights[1]), add(weights[2], weights[3])));
            Products::put_weights(row, key, weights);
        }
        highest[1] = sum(total);
    }

    // copied_keys[dimensions, slot] of a tile whose blocks are smaller than a run.
    void copy_keys(const Tile<T>& tile) {
        auto* words = reinterpret_cast<uint32_t*>(copied_keys);
        for (int64_t position = tile.first; position < tile.stop; ++position) {
            const T* from = static_cast<const T*>(a.keys) + block_at(position) + position % a.block_size * kPair<T>;
            uint32_t* to = words + position % kTile;
            for (int64_t k = 0; k < a.head_dim / kPair<T>; ++k) {
                std::memcpy(to + k * kTile, from + k * kPair<T> * a.block_size, sizeof(uint32_t));
            }
        }
    }

    // copied_values[slot, dimension] of a tile, with zeros up to whole vectors and in the slots just outside of it.
    void copy_values(const Tile<T>& tile) {
        auto* to = reinterpret_cast<T*>(copied_values);
        for (int64_t position = tile.first; position < tile.stop; ++position) {
            T* row = to + position % kTile * width;
            const T* from = static_cast<const T*>(a.values) + block_at(position) + position % a.block_size * a.head_dim;
            std::memcpy(row, from, static_cast<size_t>(a.head_dim) * sizeof(T));
            for (int64_t column = a.head_dim; column < width; ++column) row[column] = T{};
        }
        const int64_t before = tile.lead() - 1, behind = tile.end();
        if (before >= 0) std::memset(to + before * width, 0, static_cast<size_t>(width) * sizeof(T));
        if (behind < kTile) std::memset(to + behind * width, 0, static_cast<size_t>(width) * sizeof(T));
    }

    // Where the K/V of the block that has a key begin.
    int64_t block_at(int64_t position) const {
        const int64_t block = span.table[position / a.block_size];
        return (block * a.kv_heads + span.kv_head) * a.block_size * a.head_dim;
    }

    // A tile's keys where they lie, or copied together.
    Tile<T> with_keys(Tile<T> tile) {
        if (tile.finds(a)) return tile;
        copy_keys(tile);
        tile.key_stride = kTile;
        for (int64_t run = 0; run < kTileRuns; ++run) {
            tile.keys[run] = reinterpret_cast<const uint32_t*>(copied_keys) + run * kRun;
        }
        return tile;
    }

    // A tile's values copied together.
    Tile<T> with_copied_values(Tile<T> tile) {
        copy_values(tile);
        tile.value_stride = width;
        for (int64_t run = 0; run < kTileRuns; ++run) {
            tile.values[run] = reinterpret_cast<const T*>(copied_values) + run * kRun * width;
        }
        return tile;
    }
};
