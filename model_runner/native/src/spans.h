// Attention that walks the block table, but for its products. Included into an instruction set's namespace, after tile.h
// and rowwise.h.
//
// Keys come in tiles of 64. Scores and weighted values are two small matrix products: the same code for one query and
// for a prompt, so that both give the same bits. A block's keys lie by dimensions, so the first product reads them as
// they are. The next tile is fetched meanwhile, into the second cache, which has room for more that is on its way: the
// table says where it is, which no hardware can guess. The running maximum and sum are the online softmax of
// FlashAttention (Dao et al., 2022), the splits those of its decode kernel.

constexpr int64_t kTile = 64;
constexpr int64_t kTileVecs = kTile / kLanes;
// With 32 registers 6 rows go with 4 vectors of columns, with 16 registers with 2.
constexpr int kAttentionRows = 6, kAttentionVecs = kRegisters >= 32 ? 4 : 2;

inline int64_t padded(int64_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// c = a * b, or c += a * b, for a whole number of vectors of columns, which come `least` at a time at least.
template <int least = 1, class A, class B, class C>
inline void multiply_rows(const A* a, int64_t a_stride, int64_t rows, const B& b, int64_t depth, int64_t columns,
                          const C& c, bool continues) {
    for_row_blocks(rows, kAttentionRows, [&](int64_t first, int64_t count) {
        const A* a_rows = a + first * a_stride;
        const auto results = [&](int64_t column) {
            C at = c;
            at.base = c[first] + column;
            return at;
        };
        int64_t column = 0;
        for (; column + kAttentionVecs * kLanes <= columns; column += kAttentionVecs * kLanes) {
            tile<B, kAttentionRows, kAttentionVecs>(count, a_rows, a_stride, b.from_column(column), depth,
                                                    results(column), continues);
        }
        for (; column < columns; column += least * kLanes) {
            tile<B, kAttentionRows, least>(count, a_rows, a_stride, b.from_column(column), depth, results(column),
                                           continues);
        }
    });
}

// Numbers of a key that lie together: a word of two bfloat16, the first one in its low half, or one float.
template <class T>
constexpr int64_t kPair = sizeof(uint32_t) / sizeof(T);

// A row's state: [padded(head_dim)] sum of values, then the maximum of its scores and the sum of its weights.
int64_t state_floats(int64_t head_dim) { return padded(head_dim) + kLanes; }

int64_t attention_scratch(int64_t rows, int64_t head_dim) {
    return rows * (padded(head_dim) + kTile) + kTile * padded(head_dim) + rows * state_floats(head_dim);
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

// A tile's weights from its scores, in place, and the state's values scaled to the new maximum.
inline void weigh(float* scores, float* state, int64_t width) {
    const float before = state[width];
    Vec top = all(before);
    for (int64_t key = 0; key < kTile; key += kLanes) top = max(top, load(scores + key));
    const float highest = largest(top);
    const float base = highest == -__builtin_inff() ? 0.0f : highest;
    Vec total = all(0.0f);
    for (int64_t key = 0; key < kTile; key += kLanes) {
        const Vec weight = exponential(sub(load(scores + key), all(base)));
        store(scores + key, weight);
        total = add(total, weight);
    }
    // After some tiles the maximum is mostly an old one, and everything would be multiplied by 1.
    if (before != highest) {
        const float shrink = exponential_of(before - base);
        for (int64_t column = 0; column < width; column += kLanes) {
            store(state + column, mul(all(shrink), load(state + column)));
        }
        state[width] = highest;
        state[width + 1] *= shrink;
    }
    state[width + 1] += sum(total);
}

// Where the K/V of some keys are, which end at a multiple of kTile or before. What is computed for slots of the tile
// that are not among them is thrown away; they have a place in one of the same blocks. `slots` is for blocks of whole
// vectors only.
template <class T>
class Tile {
public:
    int64_t first, stop;
    const uint32_t* slots[kTileVecs];
    const T* rows[kTile];

    int64_t lead() const { return first % kTile; }
    int64_t count() const { return stop - first; }

    void find(const AttentionArgs& a, const AttentionSpan& span, int64_t begin, int64_t last) {
        const int64_t start = begin / kTile * kTile;
        first = begin;
        stop = start + kTile < last ? start + kTile : last;
        const int64_t length = a.block_size < kTile ? a.block_size : kTile;
        for (int64_t slot = 0; slot < kTile; slot += length) find_block(a, span, start, slot, length);
    }

private:
    // Some slots that lie in one block, or in the nearest one that has keys.
    void find_block(const AttentionArgs& a, const AttentionSpan& span, int64_t start, int64_t slot, int64_t length) {
        const int64_t shift = __builtin_ctzll(static_cast<uint64_t>(a.block_size));
        int64_t block = (start + slot) >> shift;
        const int64_t least = first >> shift, most = (stop - 1) >> shift;
        block = block < least ? least : block < most ? block : most;
        const int64_t inside = (start + slot) & (a.block_size - 1);
        const int64_t at = (span.table[block] * a.kv_heads + span.kv_head) * a.block_size * a.head_dim;
        const uint32_t* keys = static_cast<const uint32_t*>(a.keys) + at / kPair<T> + inside;
        const T* values = static_cast<const T*>(a.values) + at + inside * a.head_dim;
        for (int64_t each = 0; each < length; each += kLanes) slots[(slot + each) / kLanes] = keys + each;
        for (int64_t each = 0; each < length; ++each) rows[slot + each] = values + each * a.head_dim;
    }
};

// One span over one split. Products says how scores and weighted values are computed: it has multiply_keys and
// multiply_values.
template <class T, class Products>
struct SpanWork {
    const AttentionArgs& a;
    const AttentionSpan& span;
    int64_t width, rows;
    float *queries, *scores, *copied;

    SpanWork(const AttentionArgs& args, const AttentionSpan& of, float* scratch)
        : a(args), span(of), width(padded(args.head_dim)), rows(of.tokens * args.heads_per_kv) {
        queries = scratch;
        scores = queries + rows * width;
        copied = scores + rows * kTile;
        load_queries();
    }

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

    // The first key that a call for a span reads.
    int64_t first_key_of(const AttentionSpan& of) const {
        const int64_t seen = first_key(of.first_position);
        return seen > of.first_key ? seen : of.first_key;
    }

    // The state of the keys first..last - 1. Meanwhile `next`, if there is one, is fetched, from its first key on.
    void run(int64_t first, int64_t last, const AttentionSpan* next, float* state) {
        const int64_t stride = state_floats(a.head_dim);
        float* part = copied + kTile * width;
        if (span.first_key == 0) clear_state(state, rows, width);
        clear_state(part, rows, width);
        const int64_t seen = first_key_of(span), end = span.first_position + span.tokens;
        first = first > seen ? first : seen;
        last = last < end ? last : end;
        if (first >= last) return;
        Tile<T> tiles[2];
        tiles[0].find(a, span, first, last);
        for (int turn = 0;; turn = 1 - turn) {
            const Tile<T>& tile = tiles[turn];
            Tile<T>& after = tiles[1 - turn];
            const bool is_last = tile.stop >= last;
            if (!is_last) {
                after.find(a, span, tile.stop, last);
            } else if (next != nullptr) {
                after.find(a, *next, first_key_of(*next), next->first_position + next->tokens);
            } else {
                after = tile;
            }
            static_cast<Products*>(this)->multiply_keys(tile, after);
            hide_unseen(tile);
            for (int64_t row = 0; row < rows; ++row) weigh(scores + row * kTile, part + row * stride, width);
            static_cast<Products*>(this)->multiply_values(tile, after, part);
            if (is_last || tile.stop % kSplitTokens == 0) {
                for (int64_t row = 0; row < rows; ++row) merge_state(state + row * stride, part + row * stride, width);
                clear_state(part, rows, width);
            }
            if (is_last) return;
        }
    }

    // scores[row, key % kTile] become -inf where the row does not see the key.
    void hide_unseen(const Tile<T>& tile) {
        const int64_t lead = tile.lead(), shift = lead - tile.first;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = span.first_position + row / a.heads_per_kv;
            hide(scores + row * kTile, first_key(position) + shift, lead, position + 1 + shift, lead + tile.count());
        }
    }

    // Keeps the keys from the later of two slots up to the earlier of two.
    static void hide(float* row, int64_t from, int64_t lead, int64_t to, int64_t end) {
        from = from > lead ? from : lead;
        to = to < end ? to : end;
        for (int64_t slot = 0; slot < (from < kTile ? from : kTile); ++slot) row[slot] = -__builtin_inff();
        for (int64_t slot = to > 0 ? to : 0; slot < kTile; ++slot) row[slot] = -__builtin_inff();
    }

    // Where the first number of a key is, for blocks smaller than a vector.
    const T* key_at(int64_t position) const {
        const int64_t block = span.table[position / a.block_size], inside = position % a.block_size;
        return static_cast<const T*>(a.keys) +
               (block * a.kv_heads + span.kv_head) * a.block_size * a.head_dim + inside * kPair<T>;
    }
};
