// Products of whole numbers: rows rounded to 8 bits in groups of 32, times weights in the same groups.
// Included into an instruction set's namespace, after panels.h.
//
// A group adds scale of the row * scale of the weight * (a sum of whole numbers), which is exact, to its output, and
// with 4-bit weights the row's own sum * offset. Every output is one chain of these in the order of groups.

constexpr int64_t kQuads = kGroup / 4;  // four inputs at a time, which is what one lane takes

// One group of one panel as it is packed (see Packed); what is read fetches what is `ahead` bytes away.
template <int64_t ahead>
struct NibbleGroup {
    static constexpr bool kHasOffsets = true;
    static constexpr int64_t kScaleBytes = kPanel * 4, kBytes = kScaleBytes + kGroup * kPanel / 2;
    const uint8_t* at;
    const uint16_t* halves(int vec) const { return reinterpret_cast<const uint16_t*>(at) + vec * kLanes; }
    Vec scale(int vec) const { return load_half(halves(vec)); }
    Vec offset(int vec) const { return load_half(halves(vec) + kPanel); }
    template <int quad>
    Bits numbers(int vec) const {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(at + kScaleBytes);
        words += quad / 2 * kPanel + vec * kLanes;
        if (quad % 2) return high_nibbles(load_bits(words));
        fetch_ahead<ahead>(words);
        return low_nibbles(load_bits(words));
    }
};

template <int64_t ahead>
struct ByteGroup {
    static constexpr bool kHasOffsets = false;
    static constexpr int64_t kScaleBytes = kPanel * 2, kBytes = kScaleBytes + kGroup * kPanel;
    const uint8_t* at;
    Vec scale(int vec) const { return load_half(reinterpret_cast<const uint16_t*>(at) + vec * kLanes); }
    Vec offset(int) const { return all(0.0f); }
    template <int quad>
    Bits numbers(int vec) const {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(at + kScaleBytes) + quad * kPanel + vec * kLanes;
        fetch_ahead<ahead>(words);
        return load_bits(words);
    }
};

// A panel's groups, as they lie.
template <class Group>
struct PackedGroups {
    static constexpr bool kHasOffsets = Group::kHasOffsets;
    const uint8_t* data;
    Group group(int64_t index) const { return {data + index * Group::kBytes}; }
};

// What one group becomes for many rows: scales and offsets in float32, a byte for each number.
struct DecodedGroup {
    float scales[kPanel], offsets[kPanel];
    uint32_t quads[kQuads][kPanel];
};

// Some decoded groups; each quad that is read fetches some bytes of what is decoded next.
template <bool has_offsets>
struct DecodedGroups {
    static constexpr bool kHasOffsets = has_offsets;
    const DecodedGroup* groups;
    const uint8_t* next;
    int64_t bytes;
    struct Group {
        const DecodedGroup& of;
        const uint8_t* next;
        int64_t bytes;
        Vec scale(int vec) const { return load(of.scales + vec * kLanes); }
        Vec offset(int vec) const { return load(of.offsets + vec * kLanes); }
        template <int quad>
        Bits numbers(int vec) const {
            if (vec == 0) fetch_far(next + quad * bytes);
            return load_bits(of.quads[quad] + vec * kLanes);
        }
    };
    Group group(int64_t index) const { return {groups[index], next + index * kQuads * bytes, bytes}; }
};

template <class Group, int... quad>
inline void decode_group(const Group& group, DecodedGroup& to, std::integer_sequence<int, quad...>) {
    OCTAVO_UNROLL
    for (int vec = 0; vec < kPanelVecs; ++vec) {
        store(to.scales + vec * kLanes, group.scale(vec));
        if (Group::kHasOffsets) store(to.offsets + vec * kLanes, group.offset(vec));
        (store_bits(to.quads[quad] + vec * kLanes, group.template numbers<quad>(vec)), ...);
    }
}

// y[row, output] (+)= the products of some groups of a panel; continues: go on from what y has.
template <class Groups, int rows, int... quad>
inline void dot_tile_steps(const RoundedGroup* x, int64_t x_stride, const Groups& b, int64_t groups, float* y,
                           int64_t y_stride, bool continues, std::integer_sequence<int, quad...>) {
    Vec acc[rows][kPanelVecs];
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < kPanelVecs; ++vec) {
            acc[row][vec] = continues ? load(y + row * y_stride + vec * kLanes) : all(0.0f);
        }
    }
    for (int64_t index = 0; index < groups; ++index) {
        const auto group = b.group(index);
        Sums<Groups::kHasOffsets> sums[rows][kPanelVecs];
        OCTAVO_UNROLL
        for (int row = 0; row < rows; ++row) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < kPanelVecs; ++vec) sums[row][vec].start(x[row * x_stride + index].start);
        }
        const auto add_quad = [&](auto which) {
            Bits w[kPanelVecs];
            OCTAVO_UNROLL
            for (int vec = 0; vec < kPanelVecs; ++vec) w[vec] = group.template numbers<which()>(vec);
            OCTAVO_UNROLL
            for (int row = 0; row < rows; ++row) {
                const Bits four = four_bytes(x[row * x_stride + index].numbers + 4 * which());
                OCTAVO_UNROLL
                for (int vec = 0; vec < kPanelVecs; ++vec) sums[row][vec].add(w[vec], four);
            }
        };
        (add_quad(std::integral_constant<int, quad>{}), ...);
        OCTAVO_UNROLL
        for (int vec = 0; vec < kPanelVecs; ++vec) {
            const Vec scale = group.scale(vec), offset = group.offset(vec);
            OCTAVO_UNROLL
            for (int row = 0; row < rows; ++row) {
                const RoundedGroup& own = x[row * x_stride + index];
                Vec& sum = acc[row][vec];
                sum = fma(to_floats(sums[row][vec].total()), mul(scale, all(own.scale)), sum);
                if (Groups::kHasOffsets) sum = fma(all(own.sum), offset, sum);
            }
        }
    }
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < kPanelVecs; ++vec) store(y + row * y_stride + vec * kLanes, acc[row][vec]);
    }
}

// As above, for a number of rows known only at run time, 1 up to max_rows.
template <class Groups, int max_rows = kDotRows>
inline void dot_tile(int64_t rows, const RoundedGroup* x, int64_t x_stride, const Groups& b, int64_t groups, float* y,
                     int64_t y_stride, bool continues) {
    if constexpr (max_rows > 1) {
        if (rows < max_rows) {
            return dot_tile<Groups, max_rows - 1>(rows, x, x_stride, b, groups, y, y_stride, continues);
        }
    }
    dot_tile_steps<Groups, max_rows>(x, x_stride, b, groups, y, y_stride, continues,
                                     std::make_integer_sequence<int, kQuads>{});
}

struct IntegerProduct {
    const RoundedGroup* x;
    int64_t x_stride;
    int64_t rows;
    float* y;
    int64_t y_stride;
};

// Groups that are decoded at a time, and rows at most in a call.
constexpr int64_t kDecodedGroups = kDecodedInputs / kGroup;
constexpr int64_t kDotScratch = sizeof(DecodedGroup) / sizeof(float) * kDecodedGroups + kGemmRows * kPanel;

// One panel for a few rows: numbers are unpacked as they are used.
template <template <int64_t> class Group>
inline void multiply_few(const uint8_t* panel, int64_t groups, const IntegerProduct& p, int64_t column,
                         int64_t columns) {
    const PackedGroups<Group<kAhead>> packed{panel};
    if (columns == kPanel) return dot_tile(p.rows, p.x, p.x_stride, packed, groups, p.y + column, p.y_stride, false);
    float edge[kDotRows * kPanel];
    dot_tile(p.rows, p.x, p.x_stride, packed, groups, edge, kPanel, false);
    copy_outputs(p.rows, columns, edge, kPanel, p.y + column, p.y_stride);
}

// One panel for many rows: numbers are unpacked once.
template <template <int64_t> class Group>
inline void multiply_many(const uint8_t* panel, int64_t groups, const IntegerProduct& p, int64_t column,
                          int64_t columns, float* scratch) {
    using Kept = Group<0>;
    auto* decoded = reinterpret_cast<DecodedGroup*>(scratch);
    float* edge = reinterpret_cast<float*>(decoded + kDecodedGroups);
    const bool fits = columns == kPanel;
    float* y = fits ? p.y + column : edge;
    const int64_t y_stride = fits ? p.y_stride : kPanel;
    for (int64_t first = 0; first < groups; first += kDecodedGroups) {
        const int64_t count = groups - first < kDecodedGroups ? groups - first : kDecodedGroups;
        for (int64_t index = 0; index < count; ++index) {
            const Kept packed{panel + (first + index) * Kept::kBytes};
            decode_group(packed, decoded[index], std::make_integer_sequence<int, kQuads>{});
        }
        // The next groups, or the next panel's, come meanwhile: each block of rows fetches its share.
        const uint8_t* next = panel + (first + count) * Kept::kBytes;
        const int64_t bytes = count * Kept::kBytes;
        for_row_blocks(p.rows, kDotRows, [&](int64_t row, int64_t rows) {
            const DecodedGroups<Kept::kHasOffsets> weights{decoded, next + bytes * row / p.rows,
                                                            bytes * rows / (p.rows * count * kQuads)};
            dot_tile(rows, p.x + row * p.x_stride + first, p.x_stride, weights, count, y + row * y_stride, y_stride,
                     first > 0);
        });
    }
    if (!fits) copy_outputs(p.rows, columns, edge, kPanel, p.y + column, p.y_stride);
}

template <template <int64_t> class Group>
inline void multiply_groups(const Packed& w, const IntegerProduct& p, int64_t first, int64_t last, float* scratch) {
    const int64_t groups = w.inputs / kGroup;
    for (int64_t panel = first; panel < last; ++panel) {
        const uint8_t* data = w.data + panel * w.panel_bytes;
        const int64_t column = panel * kPanel, left = w.outputs - column, columns = left < kPanel ? left : kPanel;
        if (p.rows <= kDotRows) {
            multiply_few<Group>(data, groups, p, column, columns);
        } else {
            multiply_many<Group>(data, groups, p, column, columns, scratch);
        }
    }
}

void multiply_integers(const Packed& w, const RoundedGroup* x, int64_t x_stride, int64_t rows, float* y,
                       int64_t y_stride, int64_t first, int64_t last, float* scratch) {
    for (int64_t row = 0; row < rows; row += kGemmRows) {
        const int64_t count = rows - row < kGemmRows ? rows - row : kGemmRows;
        const IntegerProduct p{x + row * x_stride, x_stride, count, y + row * y_stride, y_stride};
        if (w.form == Form::int4) {
            multiply_groups<NibbleGroup>(w, p, first, last, scratch);
        } else {
            multiply_groups<ByteGroup>(w, p, first, last, scratch);
        }
    }
}

// Below this, 127 over a group's largest number is not finite, or not precise: such groups are 0.
constexpr float kLeastRounded = 1e-30f;

void round_row(const float* x, int64_t inputs, RoundedGroup* to) {
    constexpr int kVecs = kGroup / kLanes;
    for (; inputs > 0; inputs -= kGroup, x += kGroup, ++to) {
        Vec values[kVecs], most = all(0.0f), total = all(0.0f);
        OCTAVO_UNROLL
        for (int vec = 0; vec < kVecs; ++vec) {
            values[vec] = load(x + vec * kLanes);
            most = max(most, absolute(values[vec]));
        }
        const float top = largest(most);
        const Vec steps = all(top < kLeastRounded ? 0.0f : 127.0f / top);
        OCTAVO_UNROLL
        for (int vec = 0; vec < kVecs; ++vec) {
            const Vec number = round(mul(values[vec], steps));
            store_int8(to->numbers + vec * kLanes, number);
            total = add(total, number);
        }
        // Whole numbers, whose sum is exact in any order; NaN where an input is NaN or infinite, and then so is all.
        const float numbers = sum(total);
        to->scale = top / 127.0f + 0.0f * numbers;
        to->sum = to->scale * numbers;
        to->start = numbers == numbers ? -kBias * static_cast<int32_t>(numbers) : 0;
    }
}

constexpr IntegerKernels integer_table() { return {kBias, kDotScratch, round_row, multiply_integers}; }
