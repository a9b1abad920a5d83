// The library's interface: plain C, for ctypes. No call may be made while another one runs, except octavo_error().
//
// Calls that return int give 0, or -1 with a sentence in octavo_error(); calls that return a pointer give null then.
// All arrays are contiguous and in the caller's memory; the library keeps no pointer to them, but to matrices and norms
// of a model, which must outlive it.
#pragma once

#include <cstdint>

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

// The sentence of this thread's last failed call.
OCTAVO_API const char* octavo_error();

// Names of the instruction sets that this CPU has, best first, with commas between.
OCTAVO_API const char* octavo_instruction_sets();
// Which one matrices and models made from now on use.
OCTAVO_API int octavo_use(const char* name);
// How many threads compute, the caller included.
OCTAVO_API int octavo_set_threads(int32_t threads);

// Asks for huge pages for the whole ones in some memory that is not written yet: a page of 4 KiB holds one block of one
// head at most, so that attention would look up an address for each. Where the system has none, nothing happens.
OCTAVO_API void octavo_huge_pages(void* memory, int64_t bytes);

// For benchmarks: on each thread, multiply-adds in registers; returns how many operations that were in all.
OCTAVO_API int64_t octavo_probe_multiply_add(int64_t turns);
// Reads floats from memory, shared out among the threads; size: a multiple of 1 MiB in floats.
OCTAVO_API int octavo_probe_read(const float* from, int64_t size);

// Weights [outputs, inputs] in one of the forms of kernels.h, for one of the kinds of activations there.
OCTAVO_API void* octavo_matrix_new(int32_t form, int32_t activations, int64_t outputs, int64_t inputs);
OCTAVO_API void octavo_matrix_free(void* matrix);
OCTAVO_API int64_t octavo_matrix_bytes(const void* matrix);
// weights: float [count, inputs], for outputs from `first` on.
OCTAVO_API int octavo_matrix_fill(void* matrix, int64_t first, int64_t count, const float* weights);
// numbers: int8 [count, inputs]; scales, offsets: half [count, inputs / 32]; offsets only (and always) for int4.
OCTAVO_API int octavo_matrix_fill_groups(void* matrix, int64_t first, int64_t count, const int8_t* numbers,
                                         const uint16_t* scales, const uint16_t* offsets);
// to: float [count, inputs], the weights of some outputs.
OCTAVO_API int octavo_matrix_rows(const void* matrix, const int64_t* outputs, int64_t count, float* to);
// x: float [rows, inputs]; y: float [rows, outputs].
OCTAVO_API int octavo_matrix_multiply(const void* matrix, const float* x, int64_t rows, float* y);

// A step's sequences, packed: S sequences with T tokens in all.
struct octavo_batch {
    int64_t sequences;            // S
    const int32_t* query_offsets;  // [S + 1], where each sequence's tokens begin
    const int32_t* lengths;        // [S], tokens with K/V once the step has run
    const int32_t* block_tables;   // [S, table_width]
    int64_t table_width;
    const int64_t* slots;      // [T], block * block size + slot
    const int64_t* token_ids;  // [T]
    const float* cos;          // [T, head_dim / 2]
    const float* sin;          // [T, head_dim / 2]
    int64_t num_logits_rows;
    const int64_t* logits_rows;  // rows of T
};

// The physical cache. Keys: [layers, blocks, kv heads, head dim / pair, block size, pair]; values: [layers, blocks,
// kv heads, block size, head dim]. pair is 2 in bfloat16 and else 1, so that a vector of 4-byte words has one dimension
// (or two) of some tokens' keys, which is how scores are computed.
struct octavo_cache {
    void* keys;
    void* values;
    int32_t is_bf16;  // else float32
    int32_t block_size;
    int64_t num_blocks;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t window;  // keys that a query sees, its own included; 0 for all
};

// Writes a step's keys and values [T, kv heads, head dim] to one layer's slots, then attends: output and queries are
// [T, heads, head dim]. Of the batch, what is about sequences and slots is read. activations: as for matrices; int8 lets
// queries and weights be rounded to bfloat16 where the cache is.
OCTAVO_API int octavo_attend(const octavo_batch* batch, const octavo_cache* cache, int64_t layer, int64_t heads,
                             float scale, const float* queries, const float* keys, const float* values, float* output,
                             int32_t activations);

// One layer: matrices by their handles, norms and biases as floats. qkv stacks q, k and v; gate_up has 96 outputs of gate,
// the same ones of up, the next 96 of gate and so on, fewer at the end.
struct octavo_layer {
    const float* input_norm;
    const void* qkv;
    const float* qkv_bias;  // null without
    const float* q_norm;    // null without
    const float* k_norm;
    const void* output;
    const float* mlp_norm;
    const void* gate_up;
    const void* down;
};

struct octavo_model {
    int64_t layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    float epsilon;
    int32_t activations;  // as for matrices, which have their own: of attention
    const void* embedding;
    const float* final_norm;
    const void* head;
    const octavo_layer* layer;  // [layers]
};

OCTAVO_API void* octavo_model_new(const octavo_model* model);
OCTAVO_API void octavo_model_free(void* model);
// A whole step: logits float [num_logits_rows, vocabulary].
OCTAVO_API int octavo_forward(void* model, const octavo_batch* batch, const octavo_cache* cache, float* logits);

// The same step in parts, for attention computed elsewhere: begin, then for each layer its two halves, then end.
OCTAVO_API int octavo_begin(void* model, const octavo_batch* batch);
// qkv: float [T, heads + 2 kv heads, head dim], queries and keys rotated.
OCTAVO_API int octavo_before_attention(void* model, const octavo_batch* batch, int64_t layer, float* qkv);
// attended: float [T, heads, head dim].
OCTAVO_API int octavo_after_attention(void* model, const octavo_batch* batch, int64_t layer, const float* attended);
OCTAVO_API int octavo_end(void* model, const octavo_batch* batch, float* logits);

// What becomes of a row's logits before a draw, in this order. Token ids are below the vocabulary, once each.
struct octavo_edits {
    // For tokens that the text has: a positive logit is divided by `repetition`, another one multiplied. Then
    // `frequency` is taken from it as often as the answer has the token, and `presence` once if it has it at all.
    float repetition;
    float frequency;
    float presence;
    int64_t num_seen;
    const int32_t* seen;
    const int32_t* counts;  // in the answer
    int64_t num_biased;
    const int32_t* biased;
    const float* biases;  // added
    int64_t num_banned;
    const int32_t* banned;
    const uint32_t* mask;  // null, or [(vocabulary + 31) / 32]: token i may come if bit i % 32 of word i / 32 is set
};

// D draws, each from a row of logits; rows may serve several, and stay as they are.
struct octavo_draws {
    int64_t count;        // D
    int64_t vocabulary;   // at most 2^19
    const float* logits;  // [rows, vocabulary]
    const int64_t* rows;  // [D]
    const double* temperature;  // [D]; 0 takes the likeliest
    const int64_t* top_k;       // [D]; 0 for all
    const double* top_p;        // [D]; above 0
    const double* min_p;        // [D]
    const double* uniform;      // [D], in [0, 1)
    const octavo_edits* const* edits;  // null, or [D], each of them null where nothing changes
};

// tokens: [D], by the definition in model_runner/sampling.py, bit by bit; -1 where no logit is above -inf.
OCTAVO_API int octavo_draw(const octavo_draws* draws, int64_t* tokens);

// D positions whose log-probabilities are wanted; natural logarithms, of the logits as they are.
struct octavo_positions {
    int64_t count;        // D
    int64_t vocabulary;   // at most 2^19
    const float* logits;  // [rows, vocabulary]
    const int64_t* rows;  // [D]
    const int64_t* tokens;  // [D], below the vocabulary
    const int64_t* best;    // [D]: how many of the likeliest are wanted beside, at most width and the vocabulary
    int64_t width;
};

// logprobs: [D], of the tokens; best_ids, best_logprobs: [D, width], likeliest first, equals by lower id.
OCTAVO_API int octavo_logprobs(const octavo_positions* positions, double* logprobs, int64_t* best_ids,
                               double* best_logprobs);
