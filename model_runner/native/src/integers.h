// Products of whole numbers: rows rounded to 8 bits in groups of 32, times weights in the same groups.
// Included into an instruction set's namespace, after panels.h.
//
// A group adds scale of the row * scale of the weight * (a sum of whole numbers), which is exact, to its output, and
// with 4-bit weights the row's own sum * offset. Where an output's weights have one scale, the sum is multiplied by it at
// the end. Every output is one chain of these in the order of groups.

constexpr int64_t kQuads = kGroup / 4;  // four inputs at a time, which is what one lane takes

// One group of one panel as it is packed (see Packed).
struct NibbleGroup {
    static constexpr bool kHasScales = true, kHasOffsets = true;
    static constexpr int64_t kScaleBytes = kPanel * 4, kBytes = kScaleBytes + kGroup * kPanel / 2;
    const uint8_t* at;
    const uint16_t* halves(int vec) const { return reinterpret_cast<const uint16_t*>(at) + vec * kLanes; }
    Vec scale(int vec) const { return load_half(halves(vec)); }
    Vec offset(int vec) const { return load_half(halves(vec) + kPanel); }
    template <int quad>
    Bits numbers(int vec) const {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(at + kScaleBytes);
        words += quad / 2 * kPanel + vec * kLanes;
        return quad % 2 ? high_nibbles(load_bits(words)) : low_nibbles(load_bits(words));
    }
};

struct ByteGroup {
    static constexpr bool kHasScales = true, kHasOffsets = false;
    static constexpr int64_t kScaleBytes = kPanel * 2, kBytes = kScaleBytes + kGroup * kPanel;
    const uint8_t* at;
    Vec scale(int vec) const { return load_half(reinterpret_cast<const uint16_t*>(at) + vec * kLanes); }
    Vec offset(int) const { return all(0.0f); }
    template <int quad>
    Bits numbers(int vec) const {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(at + kScaleBytes) + quad * kPanel + vec * kLanes;
        return load_bits(words);
    }
};

// A panel's groups, as they lie.
template <class Group>
struct PackedGroups {
    static constexpr bool kHasScales = Group::kHasScales, kHasOffsets = Group::kHasOffsets;
    const uint8_t* data;
    Group group(int64_t index) const { return {data + index * Group::kBytes}; }
};

// The same where each output has one scale, which lies before the panel's groups.
struct ChannelGroup {
    static constexpr bool kHasScales = false, kHasOffsets = false;
    static constexpr int64_t kBytes = kGroup * kPanel;
    const uint8_t* at;
    template <int quad>
    Bits numbers(int vec) const {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(at) + quad * kPanel + vec * kLanes;
        return load_bits(words);
    }
};

// What one group becomes for many rows: scales and offsets in float32, a byte for each number.
struct DecodedGroup {
    float scales[kPanel], offsets[kPanel];
    uint32_t quads[kQuads][kPanel];
};

// The same as a group like the packed ones.
template <bool has_offsets>
struct KeptGroup {
    static constexpr bool kHasScales = true, kHasOffsets = has_offsets;
    static constexpr int64_t kBytes = sizeof(DecodedGroup);
    const uint8_t* at;
    const DecodedGroup& kept() const { return *reinterpret_cast<const DecodedGroup*>(at); }
    Vec scale(int vec) const { return load(kept().scales + vec * kLanes); }
    Vec offset(int vec) const { return load(kept().offsets + vec * kLanes); }
    template <int quad>
    Bits numbers(int vec) const { return load_bits(kept().quads[quad] + vec * kLanes); }
};

// Groups for some of many rows; each quad that is read fetches some bytes of what is used next.
template <class Kept>
struct FetchingGroups {
    static constexpr bool kHasScales = Kept::kHasScales, kHasOffsets = Kept::kHasOffsets;
    const uint8_t* data;
    const uint8_t* next;
    int64_t bytes;
    struct Group : Kept {
        const uint8_t* next;
        int64_t bytes;
        template <int quad>
        Bits numbers(int vec) const {
            if (vec == 0) fetch_far(next + quad * bytes);
            return Kept::template numbers<quad>(vec);
        }
    };
    Group group(int64_t index) const { return {{data + index * Kept::kBytes}, next + index * kQuads * bytes, bytes}; }
};

// Of the `size` bytes that are used next, blocks of rows fetch their share, a part at each quad of these groups.
template <class Kept>
inline FetchingGroups<Kept> fetching(const void* data, int64_t groups, const uint8_t* next, int64_t size, int64_t row,
                                     int64_t rows, int64_t of_rows) {
    return {static_cast<const uint8_t*>(data), next + size * row / of_rows, size * rows / (of_rows * groups * kQuads)};
}

template <class Group, int... quad>
inline void decode_group(const Group& group, DecodedGroup& to, std::integer_sequence<int, quad...>) {
    OCTAVO_UNROLL
    for (int vec = 0; vec < kPanelVecs; ++vec) {
        store(to.scales + vec * kLanes, group.scale(vec));
        if (Group::kHasOffsets) store(to.offsets + vec * kLanes, group.offset(vec));
        (store_bits(to.quads[quad] + vec * kLanes, group.template numbers<quad>(vec)), ...);
    }
}

// Where a tile's sums come from and go to: y, from 0 on or from what it has.
struct Continued {
    float* y;
    int64_t y_stride;
    bool continues;
    Vec begin(int row, int vec) const { return continues ? load(y + row * y_stride + vec * kLanes) : all(0.0f); }
    void end(int row, int vec, Vec sum) const { store(y + row * y_stride + vec * kLanes, sum); }
};

// The same for all groups at once, whose sums are multiplied by their outputs' scales.
struct Scaled {
    float* y;
    int64_t y_stride;
    const float* scales;
    Vec begin(int, int) const { return all(0.0f); }
    void end(int row, int vec, Vec sum) const {
        store(y + row * y_stride + vec * kLanes, mul(sum, load(scales + vec * kLanes)));
    }
};

// The products of some groups of a panel, added to the target's sums.
template <class Groups, int rows, class Target, int... quad>
inline void dot_tile_steps(const RoundedGroup* x, int64_t x_stride, const Groups& b, int64_t groups,
                           const Target& target, std::integer_sequence<int, quad...>) {
    Vec acc[rows][kPanelVecs];
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < kPanelVecs; ++vec) acc[row][vec] = target.begin(row, vec);
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
            OCTAVO_UNROLL
            for (int row = 0; row < rows; ++row) {
                const RoundedGroup& own = x[row * x_stride + index];
                Vec scale = all(own.scale), &sum = acc[row][vec];
                if constexpr (Groups::kHasScales) scale = mul(group.scale(vec), scale);
                sum = fma(to_floats(sums[row][vec].total()), scale, sum);
                if constexpr (Groups::kHasOffsets) sum = fma(all(own.sum), group.offset(vec), sum);
            }
        }
    }
    OCTAVO_UNROLL
    for (int row = 0; row < rows; ++row) {
        OCTAVO_UNROLL
        for (int vec = 0; vec < kPanelVecs; ++vec) target.end(row, vec, acc[row][vec]);
    }
}

// As above, for a number of rows known only at run time, 1 up to max_rows.
template <int max_rows = kDotRows, class Groups, class Target>
inline void dot_tile(int64_t rows, const RoundedGroup* x, int64_t x_stride, const Groups& b, int64_t groups,
                     const Target& target) {
    if constexpr (max_rows > 1) {
        if (rows < max_rows) return dot_tile<max_rows - 1>(rows, x, x_stride, b, groups, target);
    }
    dot_tile_steps<Groups, max_rows>(x, x_stride, b, groups, target, std::make_integer_sequence<int, kQuads>{});
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

// One panel for a few rows: numbers are unpacked as they are used. They come from memory in their order, and the hardware
// fetches them sooner than it does when it is told to.
template <class Group>
inline void multiply_few(const uint8_t* panel, int64_t groups, const IntegerProduct& p, int64_t column,
                         int64_t columns) {
    const PackedGroups<Group> packed{panel};
    if (columns == kPanel) {
        return dot_tile(p.rows, p.x, p.x_stride, packed, groups, Continued{p.y + column, p.y_stride, false});
    }
    float edge[kDotRows * kPanel];
    dot_tile(p.rows, p.x, p.x_stride, packed, groups, Continued{edge, kPanel, false});
    copy_outputs(p.rows, columns, edge, kPanel, p.y + column, p.y_stride);
}

// One panel for many rows: numbers are unpacked once.
template <class Group>
inline void multiply_many(const uint8_t* panel, int64_t groups, const IntegerProduct& p, int64_t column,
                          int64_t columns, float* scratch) {
    auto* decoded = reinterpret_cast<DecodedGroup*>(scratch);
    float* edge = reinterpret_cast<float*>(decoded + kDecodedGroups);
    const bool fits = columns == kPanel;
    float* y = fits ? p.y + column : edge;
    const int64_t y_stride = fits ? p.y_stride : kPanel;
    for (int64_t first = 0; first < groups; first += kDecodedGroups) {
        const int64_t count = groups - first < kDecodedGroups ? groups - first : kDecodedGroups;
        for (int64_t index = 0; index < count; ++index) {
            const Group packed{panel + (first + index) * Group::kBytes};
            decode_group(packed, decoded[index], std::make_integer_sequence<int, kQuads>{});
        }
        // The next groups, or the next panel's, come meanwhile.
        const uint8_t* next = panel + (first + count) * Group::kBytes;
        for_row_blocks(p.rows, kDotRows, [&](int64_t row, int64_t rows) {
            const auto kept = fetching<KeptGroup<Group::kHasOffsets>>(decoded, count, next, count * Group::kBytes, row,
                                                                       rows, p.rows);
            dot_tile(rows, p.x + row * p.x_stride + first, p.x_stride, kept, count,
                     Continued{y + row * y_stride, y_stride, first > 0});
        });
    }
    if (!fits) copy_outputs(p.rows, columns, edge, kPanel, p.y + column, p.y_stride);
}

// One panel whose outputs have one scale each. There is nothing to unpack, so that a tile takes all inputs: numbers that
// the first cache has no room for come from the second one no slower than they are used.
inline void multiply_channels(const uint8_t* panel, int64_t panel_bytes, const IntegerProduct& p, int64_t groups,
                              int64_t column, int64_t columns, float* scratch) {
    const float* scales = reinterpret_cast<const float*>(panel);
    const uint8_t* data = panel + kPanel * sizeof(float);
    const bool fits = columns == kPanel;
    float* y = fits ? p.y + column : scratch;
    const int64_t y_stride = fits ? p.y_stride : kPanel;
    if (p.rows <= 2 * kDotRows) {
        // As in multiply_few(), the hardware fetches them sooner by itself.
        const PackedGroups<ChannelGroup> packed{data};
        for_row_blocks(p.rows, kDotRows, [&](int64_t row, int64_t rows) {
            dot_tile(rows, p.x + row * p.x_stride, p.x_stride, packed, groups,
                     Scaled{y + row * y_stride, y_stride, scales});
        });
    } else {
        const uint8_t* next = panel + panel_bytes;
        for_row_blocks(p.rows, kDotRows, [&](int64_t row, int64_t rows) {
            const auto packed = fetching<ChannelGroup>(data, groups, next, panel_bytes, row, rows, p.rows);
            dot_tile(rows, p.x + row * p.x_stride, p.x_stride, packed, groups,
                     Scaled{y + row * y_stride, y_stride, scales});
        });
    }
    if (!fits) copy_outputs(p.rows, columns, scratch, kPanel, p.y + column, p.y_stride);
}

// The panels first..last - 1, for kGemmRows rows at most.
void multiply_panels(const Packed& w, const IntegerProduct& p, int64_t first, int64_t last, float* scratch) {
    const int64_t groups = w.inputs / kGroup;
    const bool is_few = p.rows <= kDotRows, is_int4 = w.form == Form::int4;
    for (int64_t panel = first; panel < last; ++panel) {
        const uint8_t* data = w.data + panel * w.panel_bytes;
        const int64_t column = panel * kPanel, left = w.outputs - column, columns = left < kPanel ? left : kPanel;
        if (w.form == Form::int8_channel) {
            multiply_channels(data, w.panel_bytes, p, groups, column, columns, scratch);
        } else if (is_few && is_int4) {
            multiply_few<NibbleGroup>(data, groups, p, column, columns);
        } else if (is_few) {
            multiply_few<ByteGroup>(data, groups, p, column, columns);
        } else if (is_int4) {
            multiply_many<NibbleGroup>(data, groups, p, column, columns, scratch);
        } else {
            multiply_many<ByteGroup>(data, groups, p, column, columns, scratch);
        }
    }
}

void multiply_integers(const Packed& w, const RoundedGroup* x, int64_t x_stride, int64_t rows, float* y,
                       int64_t y_stride, int64_t first, int64_t last, float* scratch) {
    for (int64_t row = 0; row < rows; row += kGemmRows) {
        const int64_t count = rows - row < kGemmRows ? rows - row : kGemmRows;
        multiply_panels(w, {x + row * x_stride, x_stride, count, y + row * y_stride, y_stride}, first, last, scratch);
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
