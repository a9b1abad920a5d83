// Checks every instruction set of the CPU kernels through their C interface, for machines without Python: on ARM under
// an emulator, or with the compiler's sanitizers. Prints one line for each set; the exit code counts what was wrong.
//
// Expected values are computed here, in double, from the definition: a product is a sum, attention a softmax over keys
// that are found through the block table. Blocks that nobody has are NaN.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "octavo.h"

namespace {

int wrong = 0;

void expect(bool right, const std::string& what) {
    if (right) return;
    ++wrong;
    std::printf("wrong: %s (%s)\n", what.c_str(), octavo_error());
}

std::vector<float> drawn(size_t count, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<float> numbers(count);
    for (float& each : numbers) each = normal(engine);
    return numbers;
}

float as_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// What int8 activations stand for: in groups of 32, whole numbers of steps of which the largest has 127.
std::vector<double> rounded(const std::vector<float>& x) {
    std::vector<double> values;
    for (size_t first = 0; first < x.size(); first += 32) {
        float top = 0;
        for (size_t each = first; each < first + 32; ++each) top = std::max(top, std::fabs(x[each]));
        const float steps = 127 / top;
        for (size_t each = first; each < first + 32; ++each) {
            values.push_back(std::nearbyint(x[each] * steps) * double(top / 127));
        }
    }
    return values;
}

// Each form's products are those of the weights that it says it holds, and a row's result its own affair.
void check_products(const std::string& set, int32_t activations) {
    const int64_t outputs = 70, inputs = 160, most = 130;
    const std::vector<float> weights = drawn(outputs * inputs, 1), x = drawn(most * inputs, 2);
    const double worst[] = {0, 0.01, 0.03, 0.4, 0.02};  // of weights up to 4, after rounding to each form
    for (int32_t form = activations ? 2 : 0; form < 5; ++form) {
        const std::vector<double> taken = activations ? rounded(x) : std::vector<double>(x.begin(), x.end());
        void* matrix = octavo_matrix_new(form, activations, outputs, inputs);
        expect(octavo_matrix_fill(matrix, 0, outputs, weights.data()) == 0, set + " fill");
        std::vector<int64_t> all(outputs);
        for (int64_t each = 0; each < outputs; ++each) all[each] = each;
        std::vector<float> held(outputs * inputs), whole(most * outputs);
        expect(octavo_matrix_rows(matrix, all.data(), outputs, held.data()) == 0, set + " rows");
        for (size_t each = 0; each < held.size(); ++each) {
            if (!(std::fabs(held[each] - weights[each]) <= worst[form])) expect(false, set + " rounding");
        }
        octavo_matrix_multiply(matrix, x.data(), most, whole.data());
        for (int64_t rows : {1, 2, 3, 4, 5, 8, 9, 17, 130}) {
            std::vector<float> y(rows * outputs);
            octavo_matrix_multiply(matrix, x.data(), rows, y.data());
            const std::string what = set + " form " + std::to_string(form) + " activations " + std::to_string(activations) +
                                     " rows " + std::to_string(rows);
            expect(std::memcmp(y.data(), whole.data(), y.size() * sizeof(float)) == 0, what + ": other bits");
            for (int64_t row = 0; row < rows; ++row) {
                for (int64_t output = 0; output < outputs; ++output) {
                    double sum = 0, size = 0;
                    for (int64_t k = 0; k < inputs; ++k) {
                        const double term = taken[row * inputs + k] * held[output * inputs + k];
                        sum += term;
                        size += std::fabs(term);
                    }
                    if (!(std::fabs(y[row * outputs + output] - sum) <= 1e-6 * size)) expect(false, what);
                }
            }
        }
        octavo_matrix_free(matrix);
    }
}

struct Sizes {
    int32_t block_size;
    int64_t head_dim;
    bool is_bf16;
    int64_t window;
};

// Two sequences in shuffled blocks of a poisoned cache.
class World {
public:
    explicit World(const Sizes& sizes) : s_(sizes) {
        for (int64_t length : kLengths) tables_.push_back(take_blocks(length));
        const int64_t width = (kLengths[0] + s_.block_size - 1) / s_.block_size;
        table_.assign(2 * width, -1);
        for (int64_t each = 0; each < 2; ++each) {
            std::copy(tables_[each].begin(), tables_[each].end(), table_.begin() + each * width);
        }
        const size_t numbers = kBlocksMost * kKvHeads * s_.block_size * s_.head_dim;
        const size_t bytes = numbers * (s_.is_bf16 ? 2 : 4);
        keys_.assign(bytes, 0xFF);
        values_.assign(bytes, 0xFF);
        cache_ = {keys_.data(), values_.data(), s_.is_bf16,  s_.block_size,
                  kBlocksMost,  kKvHeads,       s_.head_dim, s_.window};
        const int64_t tokens = kLengths[0] + kLengths[1];
        queries_ = drawn(tokens * kHeads * s_.head_dim, 3);
        new_keys_ = drawn(tokens * kKvHeads * s_.head_dim, 4);
        new_values_ = drawn(tokens * kKvHeads * s_.head_dim, 5);
        if (s_.is_bf16) {
            for (float& each : new_keys_) each = as_bf16(each);
            for (float& each : new_values_) each = as_bf16(each);
        }
    }

    // Each sequence's tokens first..last - 1, in one step; results by token.
    std::vector<float> step(const int64_t (&first)[2], const int64_t (&last)[2]) {
        std::vector<float> queries, keys, values;
        std::vector<int64_t> slots;
        std::vector<int32_t> offsets{0}, lengths;
        for (int64_t each = 0; each < 2; ++each) {
            for (int64_t position = first[each]; position < last[each]; ++position) {
                append(queries, queries_, each, position, kHeads);
                append(keys, new_keys_, each, position, kKvHeads);
                append(values, new_values_, each, position, kKvHeads);
                slots.push_back(int64_t{tables_[each][position / s_.block_size]} * s_.block_size +
                                position % s_.block_size);
            }
            offsets.push_back(static_cast<int32_t>(slots.size()));
            lengths.push_back(static_cast<int32_t>(last[each]));
        }
        octavo_batch batch{};
        batch.sequences = 2;
        batch.query_offsets = offsets.data();
        batch.lengths = lengths.data();
        batch.block_tables = table_.data();
        batch.table_width = static_cast<int64_t>(table_.size()) / 2;
        batch.slots = slots.data();
        std::vector<float> output(queries.size());
        const float scale = 1.0f / std::sqrt(static_cast<float>(s_.head_dim));
        const int done = octavo_attend(&batch, &cache_, 0, kHeads, scale, queries.data(), keys.data(), values.data(),
                                       output.data(), 0);
        expect(done == 0, "attend");
        return output;
    }

    std::vector<double> expected(int64_t sequence, int64_t position, int64_t head) const {
        const int64_t dim = s_.head_dim, kv_head = head / (kHeads / kKvHeads);
        const int64_t start = s_.window && position >= s_.window ? position + 1 - s_.window : 0;
        std::vector<double> sum(dim), scores;
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        const float* query = &queries_[row(sequence, position, kHeads) + head * dim];
        for (int64_t key = start; key <= position; ++key) {
            double score = 0;
            for (int64_t k = 0; k < dim; ++k) {
                score += double(query[k]) * new_keys_[row(sequence, key, kKvHeads) + kv_head * dim + k];
            }
            scores.push_back(score / std::sqrt(double(dim)));
            top = std::max(top, scores.back());
        }
        for (int64_t key = start; key <= position; ++key) {
            const double weight = std::exp(scores[key - start] - top);
            total += weight;
            for (int64_t k = 0; k < dim; ++k) {
                sum[k] += weight * new_values_[row(sequence, key, kKvHeads) + kv_head * dim + k];
            }
        }
        for (double& each : sum) each /= total;
        return sum;
    }

    static constexpr int64_t kHeads = 6, kKvHeads = 2, kLengths[2] = {300, 45}, kBlocksMost = 64;

private:
    std::vector<int32_t> take_blocks(int64_t length) {
        std::vector<int32_t> taken;
        for (int64_t block = 0; block * s_.block_size < length; ++block) {
            next_ = (next_ + 27) % kBlocksMost;  // 27 and 64 have no divisor in common: every block once
            taken.push_back(static_cast<int32_t>(next_));
        }
        return taken;
    }

    int64_t row(int64_t sequence, int64_t position, int64_t heads) const {
        return (sequence * kLengths[0] + position) * heads * s_.head_dim;
    }

    void append(std::vector<float>& to, const std::vector<float>& from, int64_t sequence, int64_t position,
                int64_t heads) const {
        const auto begin = from.begin() + row(sequence, position, heads);
        to.insert(to.end(), begin, begin + heads * s_.head_dim);
    }

    Sizes s_;
    int64_t next_ = 0;
    std::vector<std::vector<int32_t>> tables_;
    std::vector<int32_t> table_;
    std::vector<uint8_t> keys_, values_;
    octavo_cache cache_{};
    std::vector<float> queries_, new_keys_, new_values_;
};

void check_attention(const std::string& set, const Sizes& sizes) {
    const int64_t(&ends)[2] = World::kLengths, width = World::kHeads * sizes.head_dim;
    const std::string what = set + " attention, blocks of " + std::to_string(sizes.block_size) + ", dim " +
                             std::to_string(sizes.head_dim) + (sizes.is_bf16 ? ", bfloat16" : "");
    const std::vector<float> whole = World(sizes).step({0, 0}, {ends[0], ends[1]});
    World parts(sizes);
    parts.step({0, 0}, {ends[0] - 1, ends[1] - 1});
    const std::vector<float> last = parts.step({ends[0] - 1, ends[1] - 1}, {ends[0], ends[1]});
    for (int64_t sequence = 0; sequence < 2; ++sequence) {
        const int64_t end = sequence ? ends[0] + ends[1] : ends[0];
        const bool same = std::memcmp(&whole[(end - 1) * width], &last[sequence * width], width * sizeof(float)) == 0;
        expect(same, what + ": other bits in chunks");
        for (int64_t position = 0; position < ends[sequence]; position += 11) {
            for (int64_t head = 0; head < World::kHeads; ++head) {
                const std::vector<double> right = parts.expected(sequence, position, head);
                const float* got = &whole[(sequence * ends[0] + position) * width + head * sizes.head_dim];
                for (int64_t k = 0; k < sizes.head_dim; ++k) {
                    if (!(std::fabs(got[k] - right[k]) <= 2e-5)) return expect(false, what);
                }
            }
        }
    }
}

// Draws are those of the definition, computed here from powers of e: exact but for tokens whose shares meet within a
// hair of the number drawn, which there are none of. An edited row gives none of the tokens that may not come.
void check_draws(const std::string& set) {
    const int64_t rows = 40, vocabulary = 1203;
    const std::vector<float> logits = drawn(rows * vocabulary, 7);
    std::vector<int64_t> places(rows), top_k(rows, 0), tokens(rows);
    std::vector<double> temperature(rows, 0.9), top_p(rows, 1), min_p(rows, 0.05), uniform(rows);
    for (int64_t row = 0; row < rows; ++row) {
        places[row] = row;
        uniform[row] = (row + 0.5) / rows;
    }
    octavo_draws draws = {rows,         vocabulary,   logits.data(), places.data(),  temperature.data(),
                          top_k.data(), top_p.data(), min_p.data(),  uniform.data(), nullptr};
    expect(octavo_draw(&draws, tokens.data()) == 0, set + " draw");
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = &logits[row * vocabulary];
        const double most = *std::max_element(from, from + vocabulary);
        std::vector<double> sums(vocabulary);
        double sum = 0;
        for (int64_t token = 0; token < vocabulary; ++token) {
            const double weight = std::exp((from[token] - most) / 0.9);
            sums[token] = sum += weight >= 0.05 ? weight : 0;
        }
        const auto right = std::upper_bound(sums.begin(), sums.end(), uniform[row] * sum) - sums.begin();
        expect(tokens[row] == right, set + " draw of row " + std::to_string(row));
    }
    const std::vector<uint32_t> mask((vocabulary + 31) / 32, 1u << 5);
    octavo_edits edits{};
    edits.repetition = 1;
    edits.mask = mask.data();
    const std::vector<const octavo_edits*> all(rows, &edits);
    draws.edits = all.data();
    std::fill(top_p.begin(), top_p.end(), 0.8);
    expect(octavo_draw(&draws, tokens.data()) == 0, set + " masked draw");
    expect(std::all_of(tokens.begin(), tokens.end(), [](int64_t each) { return each % 32 == 5; }), set + " mask");
}

}  // namespace

int main() {
    std::string left = octavo_instruction_sets();
    while (!left.empty()) {
        const size_t comma = std::min(left.find(','), left.size());
        const std::string set = left.substr(0, comma);
        left = left.substr(std::min(comma + 1, left.size()));
        const int before = wrong;
        expect(octavo_use(set.c_str()) == 0, set);
        for (int32_t threads : {1, 2}) {
            octavo_set_threads(threads);
            check_draws(set);
            for (int32_t activations : {0, 1}) check_products(set, activations);
            for (const Sizes& sizes : {Sizes{16, 64, false, 0}, Sizes{16, 64, true, 0}, Sizes{8, 40, false, 20},
                                       Sizes{8, 6, true, 0}, Sizes{128, 128, true, 70}}) {
                check_attention(set, sizes);
            }
        }
        std::printf("%s: %s\n", set.c_str(), wrong == before ? "right" : "wrong");
    }
    octavo_set_threads(1);
    return wrong < 100 ? wrong : 100;
}
