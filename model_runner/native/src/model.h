// The decoder: layers of packed matrices, and the step's activations between them.
#pragma once

#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "matrix.h"
#include "octavo.h"
#include "pool.h"

namespace octavo {

class Model {
public:
    Model(const Kernels& kernels, const octavo_model& facts);

    void forward(Pool& pool, const octavo_batch& batch, const octavo_cache& cache, float* logits);

    void begin(Pool& pool, const octavo_batch& batch);
    // The normed hidden states' q, k and v, queries and keys rotated: in qkv(). Keys and values go to the batch's slots
    // of `cache` too, unless it is null.
    void before_attention(Pool& pool, const octavo_batch& batch, int64_t layer, const AttentionArgs* cache);
    // After the last layer's there are hidden states of the rows alone whose logits are wanted, in their order: nobody
    // reads the others.
    void after_attention(Pool& pool, const octavo_batch& batch, int64_t layer, const float* attended);
    void end(Pool& pool, const octavo_batch& batch, float* logits);

    const float* qkv() const { return qkv_.data(); }
    int64_t qkv_width() const { return (facts_.heads + 2 * facts_.kv_heads) * facts_.head_dim; }

private:
    const octavo_layer& layer(int64_t index) const { return layers_[index]; }
    void rotate_token(const octavo_batch& batch, const octavo_layer& layer, int64_t token);
    // Of the hidden states and of what was attended, the wanted rows; returns the latter.
    const float* keep_wanted(const octavo_batch& batch, const float* attended);
    // hidden += added, then normed = the norm of hidden, rounded if `next` takes it so.
    void add_and_norm(Pool& pool, int64_t tokens, const float* norm, const Matrix& next);
    // silu(gate) * up of the normed hidden states, in activated_, or only rounded if `next` takes it so.
    void multiply_gated(Pool& pool, const Matrix& gate_up, int64_t tokens, const Matrix& next);
    // A product's inputs, rounded by what makes them, while they are in the first cache: [rows, groups()]. Room for
    // them, or null where the matrix takes floats.
    using Rounded = std::vector<RoundedGroup>;
    static RoundedGroup* room_for(Rounded& rounded, const Matrix& matrix, int64_t rows);
    // y = x * the matrix, whose inputs are contiguous; from the rounded ones if it takes them so.
    static void multiply(Pool& pool, const Matrix& matrix, const float* x, const Rounded& rounded, int64_t rows,
                         float* y);

    const Kernels& kernels_;
    octavo_model facts_;
    std::vector<octavo_layer> layers_;
    AttentionPlan plan_;
    // Grown to the largest step so far, one row for each token.
    std::vector<float> hidden_, wanted_, normed_, qkv_, attended_, added_, activated_;
    Rounded rounded_normed_, rounded_activated_;
};

Sequences sequences_of(const octavo_batch& batch);

// A layer's K/V; queries and output are still to be set.
AttentionArgs layer_args(const octavo_cache& cache, int64_t layer, int64_t heads, float scale);

// Calls work(token) for each token; on the pool only when there is enough to do for a wake-up to pay.
template <class Work>
void for_tokens(Pool& pool, int64_t tokens, int64_t floats_per_token, const Work& work) {
    constexpr int64_t kLeastFloats = 16384;
    if (tokens * floats_per_token < kLeastFloats) {
        for (int64_t token = 0; token < tokens; ++token) work(token);
        return;
    }
    pool.run(tokens, work);
}

}  // namespace octavo
