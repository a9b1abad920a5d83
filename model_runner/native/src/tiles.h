// A tile of keys in the paged cache, and the two products with it: scores and weighted values. Included into an
// instruction set's namespace, after tile.h and panels.h.
//
// Keys come in tiles of 64, and these in runs of 16, each in one block. The same code is for one query and for a prompt,
// so that both give the same bits. A block's keys lie by dimensions, so the first product reads them as they are. The
// second one takes a token of each run in turn, because a core gets more from memory where it reads four blocks at once.
// What comes next is fetched meanwhile, into the second cache, which has room for more that is on its way: the table says
// where it is, which no hardware can guess.

constexpr int64_t kTile = 64;
constexpr int64_t kRun = 16;
constexpr int64_t kTileRuns = kTile / kRun;
constexpr int64_t kSplitTiles = kSplitTokens / kTile;
// With 32 registers 6 rows go with 4 vectors of columns, with 16 registers with 2.
constexpr int kAttentionRows = 6, kAttentionVecs = kRegisters >= 32 ? 4 : 2;

inline int64_t padded(int64_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// Numbers of a key that lie together: a word of two bfloat16, the first one in its low half, or one float.
template <class T>
constexpr int64_t kPair = sizeof(uint32_t) / sizeof(T);

// What is read next: so many lines of each run, `stride` bytes apart.
struct Ahead {
    const uint8_t* runs[kTileRuns];
    int64_t stride;
    int64_t lines;

    void fetch_line(int64_t run, int64_t line) const { fetch_far(runs[run] + line * stride); }
    void fetch_all() const {
        for (int64_t line = 0; line < lines; ++line) {
            for (int64_t run = 0; run < kTileRuns; ++run) fetch_line(run, line);
        }
    }
};

// Where the K/V of some keys are, which end at a multiple of kTile or before. Runs that have none of them have a place
// in one of the same blocks: what is computed for such keys is thrown away.
template <class T>
struct Tile {
    int64_t first, stop;
    const uint32_t* keys[kTileRuns];  // words of the first dimensions; the next ones' are key_stride further on
    int64_t key_stride;
    const T* values[kTileRuns];  // the first token's; the next one's are value_stride further on
    int64_t value_stride;

    int64_t lead() const { return first % kTile; }
    int64_t end() const { return lead() + stop - first; }
    bool is_whole() const { return stop - first == kTile; }
    static bool finds(const AttentionArgs& a) { return a.block_size >= kRun; }

    // The keys begin..last - 1 as far as one tile has them. Where blocks are smaller than a run: which ones, not where.
    void find(const AttentionArgs& a, const AttentionSpan& span, int64_t begin, int64_t last) {
        const int64_t start = begin / kTile * kTile;
        first = begin;
        stop = start + kTile < last ? start + kTile : last;
        if (!finds(a)) return;
        key_stride = a.block_size;
        value_stride = a.head_dim;
        const int64_t shift = __builtin_ctzll(static_cast<uint64_t>(a.block_size));
        const int64_t least = first >> shift, most = (stop - 1) >> shift;
        for (int64_t run = 0; run < kTileRuns; ++run) {
            const int64_t slot = start + run * kRun, inside = slot & (a.block_size - 1);
            int64_t block = slot >> shift;
            block = block < least ? least : block < most ? block : most;
            const int64_t at = (span.table[block] * a.kv_heads + span.kv_head) * a.block_size * a.head_dim;
            keys[run] = static_cast<const uint32_t*>(a.keys) + at / kPair<T> + inside;
            values[run] = static_cast<const T*>(a.values) + at + inside * a.head_dim;
        }
    }

    Ahead ahead_of_keys(const AttentionArgs& a) const { return ahead_of(a, keys, key_stride * 4); }
    Ahead ahead_of_values(const AttentionArgs& a) const { return ahead_of(a, values, kLine); }

private:
    template <class From>
    static Ahead ahead_of(const AttentionArgs& a, const From& from, int64_t stride) {
        Ahead ahead{{}, stride, finds(a) ? a.head_dim / kPair<T> : 0};
        for (int64_t run = 0; ahead.lines && run < kTileRuns; ++run) {
            ahead.runs[run] = reinterpret_cast<const uint8_t*>(from[run]);
        }
        return ahead;
    }
};

// Words of a tile's keys: one dimension (or two) of vectors of slots, wherever their runs lie. What is read fetches its
// like of what comes next.
struct KeyRuns {
    const uint32_t* const* runs;
    int64_t stride;
    const Ahead* ahead;  // or null
    int64_t first_slot;

    KeyRuns from_column(int64_t column) const { return {runs, stride, ahead, first_slot + column}; }

    template <int vecs>
    void read(int64_t k, Bits (&words)[vecs]) const {
        // Where all that is read begins with a run, the compiler knows where vectors are in theirs.
        const int64_t run = first_slot / kRun, inside = vecs * kLanes % kRun ? first_slot % kRun : 0;
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; ++vec) {
            const int64_t slot = inside + vec * kLanes;
            if (ahead && slot % kRun == 0) ahead->fetch_line(run + slot / kRun, k);
            words[vec] = load_bits(runs[run + slot / kRun] + k * stride + slot % kRun);
        }
    }
};

// Scores of a tile: to[row, key] = the sum over k of queries[row, k] * keys[k, key].
template <class A, class Keys>
inline void score_rows(const A* queries, int64_t stride, int64_t rows, Keys keys, int64_t depth, float* to) {
    for_row_blocks(rows, kAttentionRows, [&](int64_t first, int64_t count) {
        for (int64_t column = 0; column < kTile; column += kAttentionVecs * kLanes) {
            const RowsOf<kSplitTokens> scores{to + first * kSplitTokens + column};
            tile<Keys, kAttentionRows, kAttentionVecs>(count, queries + first * stride, stride,
                                                       keys.from_column(column), depth, scores, false);
        }
        keys.at.ahead = nullptr;
    });
}

// Fetches what is as far in its run of what comes next as what a step of the product with values reads in its own.
template <class Values, int vecs>
inline void fetch_like(const Values& values, int64_t run, int64_t step) {
    constexpr int64_t bytes = vecs * kLanes * Values::kTokens * Values::kBytes;
    const int64_t before = values.column * kRun * Values::kBytes / kLine;
    if constexpr (bytes >= kLine) {
        OCTAVO_UNROLL
        for (int64_t each = 0; each < bytes / kLine; ++each) {
            values.ahead->fetch_line(run, before + step * (bytes / kLine) + each);
        }
    } else if (step % (kLine / bytes) == 0) {
        values.ahead->fetch_line(run, before + step / (kLine / bytes));
    }
}

// Some columns of some rows of weighted values: to (+)= weights * values. Step by step through the runs side by side.
template <class Values, int rows, int vecs, class A>
inline void weigh_columns(const A* weights, int64_t stride, const Values& values, const Rows& to, bool continues) {
    constexpr int64_t steps = kRun / Values::kTokens;
    Vec acc[rows][vecs];
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; ++vec) acc[row][vec] = continues ? load(to[row] + vec * kLanes) : all(0.0f);
    }
    for (int64_t step = 0; step < steps; ++step) {
        const int64_t last = (values.last + steps - 1 - step) / steps;
        for (int64_t run = (values.first + steps - 1 - step) / steps; run < last; ++run) {
            if (values.ahead) fetch_like<Values, vecs>(values, run, step);
            typename Values::Number w[vecs];
            values.template read<vecs>(run, step, w);
            OCTAVO_UNROLL
            for (int row = 0; row < rows; ++row) {
                const auto x = all(weights[row * stride + run * steps + step]);
                OCTAVO_UNROLL
                for (int vec = 0; vec < vecs; ++vec) acc[row][vec] = fma(x, w[vec], acc[row][vec]);
            }
        }
    }
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; ++vec) store(to[row] + vec * kLanes, acc[row][vec]);
    }
}

// As above, for a number of rows known only at run time, 1 up to most.
template <class Values, int most, int vecs, class A>
inline void weigh_some_rows(int64_t rows, const A* weights, int64_t stride, const Values& values, const Rows& to,
                            bool continues) {
    if constexpr (most > 1) {
        if (rows < most) {
            return weigh_some_rows<Values, most - 1, vecs>(rows, weights, stride, values, to, continues);
        }
    }
    weigh_columns<Values, most, vecs>(weights, stride, values, to, continues);
}

// Weighted values of a tile, or what they add, for a whole number of vectors, which come `least` at a time at least.
template <int least, class A, class Values>
inline void weigh_rows(const A* weights, int64_t stride, int64_t rows, Values values, int64_t width, const Rows& to,
                       bool continues) {
    for_row_blocks(rows, kAttentionRows, [&](int64_t first, int64_t count) {
        const A* some = weights + first * stride;
        values.column = 0;
        for (; values.column + kAttentionVecs * kLanes <= width; values.column += kAttentionVecs * kLanes) {
            const Rows at{to[first] + values.column, to.stride};
            weigh_some_rows<Values, kAttentionRows, kAttentionVecs>(count, some, stride, values, at, continues);
        }
        for (; values.column < width; values.column += least * kLanes) {
            const Rows at{to[first] + values.column, to.stride};
            weigh_some_rows<Values, kAttentionRows, least>(count, some, stride, values, at, continues);
        }
        values.ahead = nullptr;
    });
}
