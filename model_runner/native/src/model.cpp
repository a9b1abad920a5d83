#include "model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {
namespace {

const Matrix& matrix_of(const void* handle) { return *static_cast<const Matrix*>(handle); }

void check(const void* handle, int64_t outputs, int64_t inputs, const char* name) {
    if (handle == nullptr) throw std::invalid_argument(std::string(name) + " is missing");
    const Matrix& matrix = matrix_of(handle);
    if (matrix.outputs() != outputs || matrix.inputs() != inputs) {
        throw std::invalid_argument(std::string(name) + " has another shape than the model says");
    }
}

float* room(std::vector<float>& buffer, int64_t rows, int64_t width) {
    if (static_cast<int64_t>(buffer.size()) < rows * width) buffer.resize(static_cast<size_t>(rows * width));
    return buffer.data();
}

}  // namespace

Sequences sequences_of(const octavo_batch& batch) {
    return {batch.sequences, batch.query_offsets, batch.lengths, batch.block_tables, batch.table_width, batch.slots};
}

AttentionArgs layer_args(const octavo_cache& cache, int64_t layer, int64_t heads, float scale) {
    const int64_t elements = cache.num_blocks * cache.kv_heads * cache.block_size * cache.head_dim;
    const int64_t offset = layer * elements * (cache.is_bf16 ? 2 : 4);
    AttentionArgs args{};
    args.keys = static_cast<char*>(cache.keys) + offset;
    args.values = static_cast<char*>(cache.values) + offset;
    args.is_bf16 = cache.is_bf16 != 0;
    args.kv_heads = cache.kv_heads;
    args.heads_per_kv = heads / cache.kv_heads;
    args.head_dim = cache.head_dim;
    args.block_size = cache.block_size;
    args.window = cache.window;
    args.scale = scale;
    return args;
}

Model::Model(const Kernels& kernels, const octavo_model& facts)
    : kernels_(kernels), facts_(facts), layers_(facts.layer, facts.layer + facts.layers) {
    facts_.layer = nullptr;
    const int64_t hidden = facts.hidden_size, inner = facts.intermediate_size, all_heads = facts.heads * facts.head_dim;
    check(facts.embedding, matrix_of(facts.embedding).outputs(), hidden, "embedding");
    check(facts.head, matrix_of(facts.embedding).outputs(), hidden, "head");
    for (const octavo_layer& each : layers_) {
        check(each.qkv, qkv_width(), hidden, "qkv");
        check(each.output, hidden, all_heads, "output");
        check(each.gate_up, 2 * inner, hidden, "gate_up");
        check(each.down, hidden, inner, "down");
    }
}

void Model::forward(Pool& pool, const octavo_batch& batch, const octavo_cache& cache, float* logits) {
    if (cache.kv_heads != facts_.kv_heads || cache.head_dim != facts_.head_dim) {
        throw std::invalid_argument("the cache was made for another model");
    }
    const Sequences sequences = sequences_of(batch);
    const int64_t tokens = sequences.tokens(), group = facts_.heads / facts_.kv_heads;
    plan_.make(sequences, cache.kv_heads, group, cache.block_size, cache.num_blocks, cache.window, pool.threads());
    begin(pool, batch);
    float* attended = room(attended_, tokens, facts_.heads * facts_.head_dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(facts_.head_dim));
    for (int64_t index = 0; index < facts_.layers; ++index) {
        AttentionArgs args = layer_args(cache, index, facts_.heads, scale);
        args.activations = static_cast<Activations>(facts_.activations);
        before_attention(pool, batch, index, &args);
        args.queries = qkv_.data();
        args.query_stride = qkv_width();
        args.output = attended;
        args.output_stride = facts_.heads * facts_.head_dim;
        plan_.run(pool, kernels_, args);
        after_attention(pool, batch, index, attended);
    }
    end(pool, batch, logits);
}

void Model::begin(Pool& pool, const octavo_batch& batch) {
    const int64_t tokens = sequences_of(batch).tokens(), hidden = facts_.hidden_size;
    const Matrix& embedding = matrix_of(facts_.embedding);
    for (int64_t token = 0; token < tokens; ++token) {
        if (batch.token_ids[token] < 0 || batch.token_ids[token] >= embedding.outputs()) {
            throw std::invalid_argument("there is no token " + std::to_string(batch.token_ids[token]));
        }
    }
    float* rows = room(hidden_, tokens, hidden);
    float* normed = room(normed_, tokens, hidden);
    const Matrix& qkv = matrix_of(layer(0).qkv);
    RoundedGroup* rounded = room_for(rounded_normed_, qkv, tokens);
    for_tokens(pool, tokens, 8 * hidden, [&](int64_t token) {
        embedding.row(batch.token_ids[token], rows + token * hidden);
        float* to = normed + token * hidden;
        kernels_.rms_norm(rows + token * hidden, layer(0).input_norm, hidden, facts_.epsilon, to);
        if (rounded != nullptr) qkv.round(to, rounded + token * qkv.groups());
    });
}

RoundedGroup* Model::room_for(Rounded& rounded, const Matrix& matrix, int64_t rows) {
    if (matrix.groups() == 0) return nullptr;
    rounded.resize(std::max(rounded.size(), static_cast<size_t>(rows * matrix.groups())));
    return rounded.data();
}

void Model::multiply(Pool& pool, const Matrix& matrix, const float* x, const Rounded& rounded, int64_t rows,
                     float* y) {
    if (matrix.groups() > 0) return matrix.multiply_rounded(pool, rounded.data(), rows, y, matrix.outputs());
    matrix.multiply(pool, x, matrix.inputs(), rows, y, matrix.outputs());
}

void Model::before_attention(Pool& pool, const octavo_batch& batch, int64_t index, const AttentionArgs* cache) {
    const int64_t tokens = sequences_of(batch).tokens(), kv_width = facts_.kv_heads * facts_.head_dim;
    float* qkv = room(qkv_, tokens, qkv_width());
    multiply(pool, matrix_of(layer(index).qkv), normed_.data(), rounded_normed_, tokens, qkv);
    for_tokens(pool, tokens, 3 * qkv_width(), [&](int64_t token) {
        rotate_token(batch, layer(index), token);
        if (cache == nullptr) return;
        const float* keys = qkv + token * qkv_width() + facts_.heads * facts_.head_dim;
        write_kv(*cache, batch.slots[token], keys, keys + kv_width);
    });
}

void Model::rotate_token(const octavo_batch& batch, const octavo_layer& layer, int64_t token) {
    const int64_t dim = facts_.head_dim, half = dim / 2;
    float* row = qkv_.data() + token * qkv_width();
    if (layer.qkv_bias != nullptr) kernels_.add(row, layer.qkv_bias, qkv_width());
    for (int64_t head = 0; head < facts_.heads + facts_.kv_heads; ++head) {
        float* values = row + head * dim;
        const float* norm = head < facts_.heads ? layer.q_norm : layer.k_norm;
        if (norm != nullptr) kernels_.rms_norm(values, norm, dim, facts_.epsilon, values);
        kernels_.rotate(values, batch.cos + token * half, batch.sin + token * half, half);
    }
}

void Model::after_attention(Pool& pool, const octavo_batch& batch, int64_t index, const float* attended) {
    const bool is_last = index + 1 == facts_.layers;
    const int64_t tokens = is_last ? batch.num_logits_rows : sequences_of(batch).tokens();
    const int64_t hidden = facts_.hidden_size, all_heads = facts_.heads * facts_.head_dim;
    if (is_last) attended = keep_wanted(batch, attended);
    float* added = room(added_, tokens, hidden);
    matrix_of(layer(index).output).multiply(pool, attended, all_heads, tokens, added, hidden);
    add_and_norm(pool, tokens, layer(index).mlp_norm, matrix_of(layer(index).gate_up));
    const Matrix& down = matrix_of(layer(index).down);
    multiply_gated(pool, matrix_of(layer(index).gate_up), tokens, down);
    multiply(pool, down, activated_.data(), rounded_activated_, tokens, added);
    if (is_last) {
        add_and_norm(pool, tokens, facts_.final_norm, matrix_of(facts_.head));
    } else {
        add_and_norm(pool, tokens, layer(index + 1).input_norm, matrix_of(layer(index + 1).qkv));
    }
}

void Model::multiply_gated(Pool& pool, const Matrix& gate_up, int64_t tokens, const Matrix& next) {
    const int64_t inner = facts_.intermediate_size;
    RoundedGroup* rounded = room_for(rounded_activated_, next, tokens);
    float* activated = rounded == nullptr ? room(activated_, tokens, inner) : nullptr;
    const auto activate = [&](const Matrix::Block& block) {
        const int64_t first = block.output / 2, count = block.outputs / 2;
        for (int64_t row = 0; row < block.rows; ++row) {
            const float* gate = block.y + row * block.stride;
            const int64_t token = block.row + row;
            if (rounded == nullptr) {
                kernels_.silu_multiply(gate, gate + count, count, activated + token * inner + first);
                continue;
            }
            float part[kGatedBlock];
            kernels_.silu_multiply(gate, gate + count, count, part);
            next.round(part, count, rounded + token * next.groups() + first / kGroup);
        }
    };
    gate_up.multiply_blocks(pool, normed_.data(), rounded_normed_.data(), tokens, 2 * kGatedBlock, activate);
}

const float* Model::keep_wanted(const octavo_batch& batch, const float* attended) {
    const int64_t hidden = facts_.hidden_size, all_heads = facts_.heads * facts_.head_dim;
    float* states = room(wanted_, batch.num_logits_rows, hidden);
    // q, k and v are done with: there is room.
    float* kept = room(qkv_, batch.num_logits_rows, all_heads);
    for (int64_t row = 0; row < batch.num_logits_rows; ++row) {
        const int64_t token = batch.logits_rows[row];
        std::copy_n(hidden_.data() + token * hidden, hidden, states + row * hidden);
        std::copy_n(attended + token * all_heads, all_heads, kept + row * all_heads);
    }
    std::swap(hidden_, wanted_);
    return kept;
}

void Model::add_and_norm(Pool& pool, int64_t tokens, const float* norm, const Matrix& next) {
    const int64_t hidden = facts_.hidden_size;
    RoundedGroup* rounded = room_for(rounded_normed_, next, tokens);
    for_tokens(pool, tokens, 2 * hidden, [&](int64_t token) {
        float *row = hidden_.data() + token * hidden, *normed = normed_.data() + token * hidden;
        kernels_.add(row, added_.data() + token * hidden, hidden);
        kernels_.rms_norm(row, norm, hidden, facts_.epsilon, normed);
        if (rounded != nullptr) next.round(normed, rounded + token * next.groups());
    });
}

void Model::end(Pool& pool, const octavo_batch& batch, float* logits) {
    multiply(pool, matrix_of(facts_.head), normed_.data(), rounded_normed_, batch.num_logits_rows, logits);
}

}  // namespace octavo
