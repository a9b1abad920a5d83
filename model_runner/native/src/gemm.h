// Products with packed weights in float32. Included into an instruction set's namespace, after panels.h.

// One panel, or two neighbours, of each form; each read fetches what is `ahead` bytes away. See Packed for the layout.
template <int64_t ahead>
struct Float32Panels {
    static constexpr int64_t kGroup = 0, kStep = 1;
    const uint8_t* data;
    int64_t panel_bytes;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        const float* part[(vecs + kPanelVecs - 1) / kPanelVecs];
        Chunk(const Float32Panels& b, int64_t k) {
            int index = 0;
            for (const float*& each : part) {
                each = reinterpret_cast<const float*>(b.data + index++ * b.panel_bytes) + k * kPanel;
                for (int64_t line = 0; line < kPanel; line += kLine / 4) fetch_ahead<ahead>(each + line);
            }
        }
        template <int>
        Vec get(const NoScales&, int vec) const { return load(part[vec / kPanelVecs] + vec % kPanelVecs * kLanes); }
    };
};

template <int64_t ahead>
struct Bfloat16Panels {
    static constexpr int64_t kGroup = 0, kStep = 2;
    const uint8_t* data;
    int64_t panel_bytes;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        Bits pair[vecs];
        Chunk(const Bfloat16Panels& b, int64_t k) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                const auto* panel = reinterpret_cast<const uint32_t*>(b.data + vec / kPanelVecs * b.panel_bytes);
                const uint32_t* words = panel + k / 2 * kPanel + vec % kPanelVecs * kLanes;
                fetch_ahead<ahead>(words);
                pair[vec] = load_bits(words);
            }
        }
        template <int index>
        Vec get(const NoScales&, int vec) const { return index ? high_bf16(pair[vec]) : low_bf16(pair[vec]); }
    };
};

// A byte for each weight of some inputs, of one panel or two.
template <int64_t ahead, int64_t step, int vecs>
struct Int8Chunk {
    static constexpr int kPanels = (vecs + kPanelVecs - 1) / kPanelVecs;
    const int8_t* part[kPanels];
    void begin(int panel, const uint8_t* at) {
        part[panel] = reinterpret_cast<const int8_t*>(at);
        for (int64_t line = 0; line < step * kPanel; line += kLine) fetch_ahead<ahead>(at + line);
    }
    template <int index, class Scales>
    Vec get(const Scales& scales, int vec) const {
        const int8_t* weights = part[vec / kPanelVecs] + index * kPanel + vec % kPanelVecs * kLanes;
        return mul(scales.scale[vec], load_int8(weights));
    }
};

template <int64_t ahead>
struct Int8Panels {
    static constexpr int64_t kGroup = octavo::kGroup, kStep = 4;
    static constexpr int64_t kScaleBytes = kPanel * 2, kGroupBytes = kScaleBytes + kGroup * kPanel;
    const uint8_t* data;
    int64_t panel_bytes;
    const uint8_t* at(int64_t k, int vec) const {
        return data + vec / kPanelVecs * panel_bytes + k / kGroup * kGroupBytes;
    }
    template <int vecs>
    struct Scales {
        Vec scale[vecs];
        Scales(const Int8Panels& b, int64_t k) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                scale[vec] = load_half(reinterpret_cast<const uint16_t*>(b.at(k, vec)) + vec % kPanelVecs * kLanes);
            }
        }
    };
    template <int vecs>
    struct Chunk : Int8Chunk<ahead, kStep, vecs> {
        Chunk(const Int8Panels& b, int64_t k) {
            for (int panel = 0; panel < this->kPanels; ++panel) {
                this->begin(panel, b.at(k, panel * kPanelVecs) + kScaleBytes + k % kGroup * kPanel);
            }
        }
    };
};

template <int64_t ahead>
struct Int4Panels {
    static constexpr int64_t kGroup = octavo::kGroup, kStep = 8;
    static constexpr int64_t kScaleBytes = kPanel * 4, kGroupBytes = kScaleBytes + kGroup / 8 * kPanel * 4;
    const uint8_t* data;
    int64_t panel_bytes;
    const uint8_t* at(int64_t k, int vec) const {
        return data + vec / kPanelVecs * panel_bytes + k / kGroup * kGroupBytes;
    }
    template <int vecs>
    struct Scales {
        Vec scale[vecs], offset[vecs];
        Scales(const Int4Panels& b, int64_t k) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                const uint16_t* halves = reinterpret_cast<const uint16_t*>(b.at(k, vec)) + vec % kPanelVecs * kLanes;
                scale[vec] = load_half(halves);
                offset[vec] = load_half(halves + kPanel);
            }
        }
    };
    template <int vecs>
    struct Chunk {
        Bits bits[vecs];
        Chunk(const Int4Panels& b, int64_t k) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                const uint32_t* words = reinterpret_cast<const uint32_t*>(b.at(k, vec) + kScaleBytes);
                words += k % kGroup / 8 * kPanel + vec % kPanelVecs * kLanes;
                fetch_ahead<ahead>(words);
                bits[vec] = load_bits(words);
            }
        }
        template <int index>
        Vec get(const Scales<vecs>& scales, int vec) const {
            return fma(half_byte<index % 4 * 2 + index / 4>(bits[vec]), scales.scale[vec], scales.offset[vec]);
        }
    };
};

template <int64_t ahead>
struct Int8ChannelPanels {
    static constexpr int64_t kGroup = 0, kStep = 4, kScaleBytes = kPanel * 4;
    const uint8_t* data;
    int64_t panel_bytes;
    const uint8_t* panel_of(int vec) const { return data + vec / kPanelVecs * panel_bytes; }
    template <int vecs>
    struct Scales {
        Vec scale[vecs];
        Scales(const Int8ChannelPanels& b, int64_t) {
            OCTAVO_UNROLL
            for (int vec = 0; vec < vecs; ++vec) {
                scale[vec] = load(reinterpret_cast<const float*>(b.panel_of(vec)) + vec % kPanelVecs * kLanes);
            }
        }
    };
    template <int vecs>
    struct Chunk : Int8Chunk<ahead, kStep, vecs> {
        Chunk(const Int8ChannelPanels& b, int64_t k) {
            for (int panel = 0; panel < this->kPanels; ++panel) {
                this->begin(panel, b.panel_of(panel * kPanelVecs) + kScaleBytes + k * kPanel);
            }
        }
    };
};

// to[input - first, output] for some inputs of one panel.
template <class Panels, int... step>
inline void decode(const Panels& panel, int64_t first, int64_t last, float* to, std::integer_sequence<int, step...>) {
    const int64_t group = Panels::kGroup ? Panels::kGroup : last - first;
    for (int64_t begin = first; begin < last; begin += group) {
        const typename Panels::template Scales<kPanelVecs> scales(panel, begin);
        for (int64_t k = begin; k < begin + group; k += Panels::kStep) {
            const typename Panels::template Chunk<kPanelVecs> chunk(panel, k);
            const auto put = [&](auto index) {
                float* row = to + (k - first + index()) * kPanel;
                OCTAVO_UNROLL
                for (int vec = 0; vec < kPanelVecs; ++vec) {
                    store(row + vec * kLanes, chunk.template get<index()>(scales, vec));
                }
            };
            (put(std::integral_constant<int, step>{}), ...);
        }
    }
}

struct Product {
    const float* x;
    int64_t x_stride;
    int64_t rows;
    float* y;
    int64_t y_stride;
};

// Results of panels that stick out beyond the last output go here first.
struct Overhang {
    float values[kMaxRows * 2 * kPanel];
};

// Weights decoded as they are used. `panels` neighbours at once: one panel's chains are too few to keep the units busy
// with a row or two.
template <class Panels, int panels, int max_rows>
inline void multiply(const Panels& b, int64_t depth, const Product& p, int64_t column, int64_t columns) {
    for_row_blocks(p.rows, max_rows, [&](int64_t first, int64_t rows) {
        const float* x = p.x + first * p.x_stride;
        if (columns == panels * kPanel) {
            float* y = p.y + first * p.y_stride + column;
            return tile<Panels, max_rows, panels * kPanelVecs>(rows, x, p.x_stride, b, depth, Rows{y, p.y_stride}, false);
        }
        Overhang out;
        constexpr int64_t stride = panels * kPanel;
        tile<Panels, max_rows, panels * kPanelVecs>(rows, x, p.x_stride, b, depth, RowsOf<stride>{out.values}, false);
        copy_outputs(rows, columns, out.values, stride, p.y + first * p.y_stride + column, p.y_stride);
    });
}

// Decoded weights of one panel; each row that is read fetches some bytes of what is decoded next. All at once they
// would hold up the loads behind them.
struct FetchingRows {
    static constexpr int64_t kGroup = 0, kStep = 1;
    const float* base;
    const uint8_t* next;
    int64_t bytes;
    template <int vecs>
    using Scales = NoScales;
    template <int vecs>
    struct Chunk {
        const float* row;
        Chunk(const FetchingRows& b, int64_t k) : row(b.base + k * kPanel) { fetch_far(b.next + k * b.bytes); }
        template <int>
        Vec get(const NoScales&, int vec) const { return load(row + vec * kLanes); }
    };
};

// Weights decoded once for all rows, some inputs after the others. Sums go on in rows of the panel's own width: in those
// of y, whose distance is often a large power of two, a tile's rows would drive each other out of the first cache.
template <class Panels>
inline void multiply_decoded(const Panels& b, int64_t depth, const Product& p, int64_t column, int64_t columns,
                             float* scratch) {
    const RowsOf<kPanel> sums{scratch + kDecodedInputs * kPanel};
    for_parts(depth, [&](int64_t k, int64_t inputs) {
        decode(b, k, k + inputs, scratch, std::make_integer_sequence<int, Panels::kStep>{});
        // The next inputs' weights, or the next panel's, come meanwhile: each block of rows fetches its share.
        const int64_t bytes = b.panel_bytes * inputs / depth;
        const uint8_t* next = b.data + b.panel_bytes * (k + inputs) / depth;
        for_row_blocks(p.rows, kMaxRows, [&](int64_t first, int64_t rows) {
            const FetchingRows weights{scratch, next + bytes * first / p.rows, bytes * rows / (p.rows * inputs)};
            const float* x = p.x + first * p.x_stride + k;
            tile<FetchingRows, kMaxRows, kPanelVecs>(rows, x, p.x_stride, weights, inputs, RowsOf<kPanel>{sums[first]},
                                                     k > 0);
        });
    });
    copy_outputs(p.rows, columns, sums.base, kPanel, p.y + column, p.y_stride);
}

// decode_rows: from this many rows on, decoding once for all is faster than for each block of rows. In float32 that is
// a copy, after which the weights come from the first cache.
template <template <int64_t> class Panels, int pair_rows, int max_rows>
inline void multiply_panels(const Packed& w, const Product& p, int64_t first, int64_t last, float* scratch,
                            int64_t decode_rows) {
    int64_t panel = first;
    while (panel < last) {
        const Panels<0> kept{w.data + panel * w.panel_bytes, w.panel_bytes};
        const Panels<kAhead> b{kept.data, kept.panel_bytes};
        const int64_t column = panel * kPanel, left = w.outputs - column;
        if (p.rows >= decode_rows) {
            multiply_decoded(kept, w.inputs, p, column, left < kPanel ? left : kPanel, scratch);
            ++panel;
        } else if (pair_rows > 0 && p.rows <= pair_rows && panel + 1 < last) {
            const int64_t columns = left < 2 * kPanel ? left : 2 * kPanel;
            multiply<Panels<kAhead>, 2, pair_rows ? pair_rows : 1>(b, w.inputs, p, column, columns);
            panel += 2;
        } else {
            multiply<Panels<kAhead>, 1, max_rows>(b, w.inputs, p, column, left < kPanel ? left : kPanel);
            ++panel;
        }
    }
}

constexpr int64_t kGemmScratch = (kDecodedInputs + kGemmRows) * kPanel;
// With 32 registers two panels go with up to 4 rows, with 16 registers up to 2; scales take more of them.
constexpr bool kManyRegisters = kRegisters >= 32;
constexpr int kPairRows = kManyRegisters ? 4 : 2, kPairRowsScaled = kManyRegisters ? 2 : 1;

void gemm(const Packed& w, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride, int64_t first,
          int64_t last, float* scratch) {
    for (int64_t row = 0; row < rows; row += kGemmRows) {
        const int64_t count = rows - row < kGemmRows ? rows - row : kGemmRows;
        const Product p{x + row * x_stride, x_stride, count, y + row * y_stride, y_stride};
        switch (w.form) {
            case Form::float32:
                multiply_panels<Float32Panels, kPairRows, kMaxRows>(w, p, first, last, scratch, 2 * kMaxRows + 1);
                break;
            case Form::bfloat16:
                multiply_panels<Bfloat16Panels, kPairRows, kMaxRows>(w, p, first, last, scratch, 2 * kMaxRows + 1);
                break;
            case Form::int8:
                multiply_panels<Int8Panels, kPairRowsScaled, 4>(w, p, first, last, scratch, 5);
                break;
            case Form::int4:
                multiply_panels<Int4Panels, kPairRowsScaled, 4>(w, p, first, last, scratch, 5);
                break;
            case Form::int8_channel:
                multiply_panels<Int8ChannelPanels, kPairRowsScaled, 4>(w, p, first, last, scratch, 5);
                break;
        }
    }
}
