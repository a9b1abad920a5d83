// The register tile that everything is made of: a few rows of A times a few vectors of columns of B.
// Included into an instruction set's namespace. The shape is BLIS's micro-kernel (Van Zee and van de Geijn, 2015).

#define OCTAVO_UNROLL _Pragma("GCC unroll 8")

constexpr int64_t kLine = 64;  // bytes of a cache line

inline void fetch(const void* line) { __builtin_prefetch(line, 0, 3); }
// To the second cache, for what the first has no room for.
inline void fetch_far(const void* line) { __builtin_prefetch(line, 0, 2); }

// Where results go: rows so many floats apart. A distance that the compiler knows needs no address for each row.
struct Rows {
    float* base;
    int64_t stride;
    float* operator[](int64_t row) const { return base + row * stride; }
};

template <int64_t stride>
struct RowsOf {
    float* base;
    float* operator[](int64_t row) const { return base + row * stride; }
};

// c[row][column] (+)= sum over k of a[row, k] * B[k, column]; continues: go on from what c has.
// B says how many k it decodes at a time (kStep) and how many share scales (kGroup, 0 for none). Every sum is one chain
// in the order of k: which tile shape computes an element does not change it.
// With words of A and B, k counts pairs of bfloat16, and a step of the chain is fma's for pairs.
template <class B, int rows, int vecs, class A, class C, int... step>
inline void tile_steps(const A* a, int64_t a_stride, const B& b, int64_t depth, const C& c, bool continues,
                       std::integer_sequence<int, step...>) {
    Vec acc[rows][vecs];
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; ++vec) {
            acc[row][vec] = continues ? load(c[row] + vec * kLanes) : all(0.0f);
        }
    }
    const int64_t group = B::kGroup ? B::kGroup : depth;
    for (int64_t first = 0; first < depth; first += group) {
        const typename B::template Scales<vecs> scales(b, first);
        for (int64_t k = first; k < first + group; k += B::kStep) {
            const typename B::template Chunk<vecs> chunk(b, k);
            const auto add_one = [&](auto index) {
                decltype(chunk.template get<0>(scales, 0)) w[vecs];
                OCTAVO_UNROLL
                for (int vec = 0; vec < vecs; ++vec) w[vec] = chunk.template get<index()>(scales, vec);
                OCTAVO_UNROLL
                for (int row = 0; row < rows; ++row) {
                    const auto x = all(a[row * a_stride + k + index()]);
                    OCTAVO_UNROLL
                    for (int vec = 0; vec < vecs; ++vec) acc[row][vec] = fma(x, w[vec], acc[row][vec]);
                }
            };
            (add_one(std::integral_constant<int, step>{}), ...);
        }
    }
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < vecs; ++vec) store(c[row] + vec * kLanes, acc[row][vec]);
    }
}

// As above, for a number of rows known only at run time, 1 up to max_rows.
template <class B, int max_rows, int vecs, class A, class C>
inline void tile(int64_t rows, const A* a, int64_t a_stride, const B& b, int64_t depth, const C& c,
                 bool continues) {
    if constexpr (max_rows > 1) {
        if (rows < max_rows) return tile<B, max_rows - 1, vecs>(rows, a, a_stride, b, depth, c, continues);
    }
    tile_steps<B, max_rows, vecs>(a, a_stride, b, depth, c, continues, std::make_integer_sequence<int, B::kStep>{});
}

struct NoScales {
    template <class B>
    NoScales(const B&, int64_t) {}
};

// Floats in rows of `stride`.
struct FloatRows {
    static constexpr int64_t kGroup = 0, kStep = 1;
    const float* base;
    int64_t stride;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        const float* row;
        Chunk(const FloatRows& b, int64_t k) : row(b.base + k * b.stride) {}
        template <int>
        Vec get(const NoScales&, int vec) const { return load(row + vec * kLanes); }
    };
    FloatRows from_column(int64_t column) const { return {base + column, stride}; }
};

inline Vec load_any(const float* from) { return load(from); }
inline Vec load_any(const uint16_t* from) { return load_bf16(from); }
