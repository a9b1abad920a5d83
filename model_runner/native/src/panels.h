// What all products with packed weights share. Included into an instruction set's namespace, after tile.h.

constexpr int64_t kPanel = kPanelVecs * kLanes;

// Inputs at most that are decoded at a time when many rows share them: few enough that they stay in the first cache.
constexpr int64_t kDecodedInputs = 160;

// Rows at most in a call: the results of a panel are summed up in scratch memory that has room for so many.
constexpr int64_t kGemmRows = 256;

// Weights that few rows use come from memory: what lies this many bytes further on is fetched meanwhile. The hardware
// does so too, but not across pages of 4 KiB.
constexpr int64_t kAhead = 4096;

template <int64_t ahead>
inline void fetch_ahead(const void* from) {
    if constexpr (ahead > 0) fetch(static_cast<const uint8_t*>(from) + ahead);
}

// Calls work(first, count) for blocks of at most `most` rows, about equal ones: a block of one row at the end would
// read the weights again for an eighth of the work.
template <class Work>
inline void for_row_blocks(int64_t rows, int64_t most, const Work& work) {
    const int64_t blocks = (rows + most - 1) / most;
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = rows * block / blocks;
        work(first, rows * (block + 1) / blocks - first);
    }
}

// Calls work(first, count) for parts of some inputs, at most kDecodedInputs each: whole groups, but for what is left over
// at the end, and about equal ones.
template <class Work>
inline void for_parts(int64_t inputs, const Work& work) {
    const int64_t groups = (inputs + kGroup - 1) / kGroup, parts = (inputs + kDecodedInputs - 1) / kDecodedInputs;
    int64_t first = 0;
    for (int64_t part = 1; part <= parts; ++part) {
        const int64_t last = part < parts ? groups * part / parts * kGroup : inputs;
        work(first, last - first);
        first = last;
    }
}

// Of a panel that sticks out beyond the last output, what fits.
inline void copy_outputs(int64_t rows, int64_t columns, const float* from, int64_t from_stride, float* to,
                         int64_t to_stride) {
    for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(to + row * to_stride, from + row * from_stride, columns * sizeof(float));
    }
}
