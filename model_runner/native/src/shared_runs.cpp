#include "shared_runs.h"

#include <algorithm>

namespace octavo {
namespace {

// Whole splits that a sequence and the next one have in the same blocks; 0 unless both decode.
int64_t shared_with_next(const Sequences& s, int64_t index, int64_t block_size) {
    const int32_t* offsets = s.query_offsets + index;
    if (offsets[1] - offsets[0] != 1 || offsets[2] - offsets[1] != 1) return 0;
    const int64_t most = std::min(s.lengths[index], s.lengths[index + 1]) / kSplitTokens;
    const int32_t* table = s.block_tables + index * s.table_width;
    const int64_t blocks = (most * kSplitTokens + block_size - 1) / block_size;
    const int64_t same = std::mismatch(table, table + blocks, table + s.table_width).first - table;
    return std::min(most, same * block_size / kSplitTokens);
}

}  // namespace

std::vector<SharedRun> shared_runs(const Sequences& sequences, int64_t block_size) {
    std::vector<SharedRun> runs;
    int64_t end = 0;  // of the last run
    for (int64_t index = 0; index + 1 < sequences.count; ++index) {
        const int64_t splits = shared_with_next(sequences, index, block_size);
        if (splits == 0 || (index + 1 == end && splits < runs.back().splits)) continue;
        if (index + 1 != end) runs.push_back({index, index, splits});
        runs.back().last = end = index + 2;
    }
    return runs;
}

}  // namespace octavo
