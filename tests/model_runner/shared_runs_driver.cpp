// Reads a step from standard input and writes its shared runs: for test_shared_runs.py.
//
// In: the block size, the number of sequences, the width of their tables, then for each its tokens in the step, its length
// and its table. Out: a line for each run, its first sequence, the one behind its last, and its splits.
#include <cstdio>
#include <iostream>
#include <vector>

#include "shared_runs.h"

int main() {
    int64_t block_size = 0, count = 0, width = 0;
    std::cin >> block_size >> count >> width;
    std::vector<int32_t> offsets{0}, lengths, tables;
    for (int64_t index = 0; index < count; ++index) {
        int32_t tokens = 0, number = 0;
        std::cin >> tokens >> number;
        offsets.push_back(offsets.back() + tokens);
        lengths.push_back(number);
        for (int64_t block = 0; block < width; ++block) {
            std::cin >> number;
            tables.push_back(number);
        }
    }
    const octavo::Sequences step{count, offsets.data(), lengths.data(), tables.data(), width, nullptr};
    for (const octavo::SharedRun& run : octavo::shared_runs(step, block_size)) {
        std::printf("%d %d %d\n", int(run.first), int(run.last), int(run.splits));
    }
}
