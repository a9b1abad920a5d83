// What each instruction set offers: the same sources compiled once for each, chosen when the library is loaded.
#pragma once

#include <cstdint>

namespace octavo {

// How a matrix is held.
enum class Form : int32_t { float32 = 0, bfloat16 = 1, int8 = 2, int4 = 3, int8_channel = 4 };

// What the rows are that matrices of whole numbers are multiplied with: float32 as they come, with products in float32,
// or rounded to 8 bits in groups of kGroup inputs, with products of whole numbers. Others always take float32.
enum class Activations : int32_t { float32 = 0, int8 = 1 };

// Along the inputs, this many weights of an int8 or int4 matrix share a scale (and an offset); of an int8_channel matrix
// all weights of an output do.
constexpr int64_t kGroup = 32;

// A model's gates and ups lie by turns in one matrix, so many of each: twice that is a whole number of panels, and of
// groups.
constexpr int64_t kGatedBlock = 96;

// Weights [outputs, inputs] as panels of Kernels::panel outputs, which are read from front to back. In a panel, for
// each input (of f32), pair (bf16) or group (int8, int4) the weights of all outputs lie together:
//   float32   float[panel] for each input
//   bfloat16  uint32[panel] for each two inputs, the first one in the low half
//   int8      half scale[panel], then int8[panel] for each of 32 inputs; with int8 activations then uint8[panel][4] for
//             each 4 inputs, to which IntegerKernels::bias is added
//   int4      half scale[panel], half offset[panel], then uint32[panel] for each 8 of 32 inputs: the first four in the
//             low halves of its bytes, the others in the high ones
//   int8_channel  float scale[panel], then the numbers of all inputs as in int8
// Outputs beyond the last are 0.
struct Packed {
    Form form;
    Activations activations;
    int64_t outputs;
    int64_t inputs;
    int64_t panel_bytes;
    const uint8_t* data;
};

// One layer's K/V (see octavo_cache for how they lie), and the step's queries and results in rows of tokens.
struct AttentionArgs {
    const void* keys;
    const void* values;
    bool is_bf16;
    Activations activations;  // of queries and weights; int8 lets them be rounded to bfloat16 where K/V are
    int64_t kv_heads;
    int64_t heads_per_kv;
    int64_t head_dim;
    int64_t block_size;
    int64_t window;  // keys that a query sees, its own included; 0 for all
    float scale;
    const float* queries;
    int64_t query_stride;  // floats from one token's queries to the next
    float* output;
    int64_t output_stride;
};

// Some tokens of one sequence, and the KV head whose queries are computed: what one call computes. Or one token each of
// several sequences, over what their block tables have in common: all of it comes before first_position.
struct AttentionSpan {
    const int32_t* table;
    int64_t first_row;
    int64_t first_position;
    int64_t tokens;
    int64_t kv_head;
    int64_t first_key;  // Earlier keys, whole splits of them, are in the state that the call is given; 0: there is none.
};

// The context is cut at multiples of this many tokens; results of the parts are merged in their order. It is part of
// what makes a result the same in any batch: nothing else about the batch goes into a sum's order.
constexpr int64_t kSplitTokens = 256;

// At most this many query rows are computed together (or one token's, if it has more).
constexpr int64_t kSpanRows = 48;

// Probabilities as whole numbers, in units of 2^-kWeightBits of the likeliest token's: model_runner/sampling_weights.py
// has the definition, and these numbers too.
constexpr int kWeightBits = 44;
constexpr double kLog2OfE = 1.4426950408889634;
constexpr double kLeastPower = -64;  // 2 to this power, in those units, is 0
// 2^x for x from -0.5 to 0.5: the Taylor series, its highest power first.
constexpr int kPowerTerms = 12;
constexpr double kPowerSeries[kPowerTerms] = {
    4.4455382718708116e-10, 7.054911620801123e-09, 1.01780860092397e-07,  1.321548679014431e-06,
    1.5252733804059841e-05, 0.0001540353039338161, 0.0013333558146428443, 0.009618129107628477,
    0.05550410866482158,    0.24022650695910072,   0.6931471805599453,    1.0};

// How a row's tokens are weighed: 2 to the power of scale * (logit - most).
struct Weighing {
    double most;
    double scale;
};

// Tokens are sorted by likelihood into so many buckets, the likeliest into the first.
constexpr int32_t kBuckets = 2048;
constexpr double kBucketsPerPower = 32;
// 32 inputs of a row as whole numbers from -127 to 127; x is about scale * number.
struct RoundedGroup {
    int8_t numbers[kGroup];
    float scale;
    float sum;      // scale * the sum of numbers
    int32_t start;  // what a sum of products with weights in 8 bits begins with: -bias * the sum of numbers
};

// Products with rows rounded to 8 bits. These are exact for each group of inputs; groups are added up in their order in
// float32, whatever the number of rows.
struct IntegerKernels {
    int32_t bias;
    int64_t scratch;  // floats

    // The scale is the largest number of a group over 127. A NaN or an infinity makes its group's scale NaN.
    void (*round_row)(const float* x, int64_t inputs, RoundedGroup* to);
    // As Kernels::gemm; x_stride: groups.
    void (*multiply)(const Packed& weights, const RoundedGroup* x, int64_t x_stride, int64_t rows, float* y,
                     int64_t y_stride, int64_t first_panel, int64_t last_panel, float* scratch);
};

// A step's attention, whose products are in float32, or of pairs of bfloat16 that are added up in float32.
struct AttentionKernels {
    // The state of a span's rows over some splits of the context: state[row] for token-major rows (token, query head).
    // Where the span has a first key, the state goes on from what it has.
    // next: what the same thread will attend afterwards, or null; the beginning of its K/V is fetched.
    void (*attend)(const AttentionArgs& args, const AttentionSpan& span, const AttentionSpan* next, int64_t first_split,
                   int64_t last_split, float* state, float* scratch);
    // Merges states of consecutive splits, `distance` floats apart, and writes the results.
    void (*finish)(const AttentionArgs& args, const AttentionSpan& span, float* states, int64_t count,
                   int64_t distance);
};

// A head has a whole number of so many dimensions for products of pairs of bfloat16; otherwise they are float32's.
constexpr int64_t kPairedDimensions = 32;

struct Kernels {
    const char* name;
    int64_t panel;
    int64_t gemm_scratch;  // floats

    // y[row, output] = sum of x[row, input] * weight[output, input] for the outputs of some panels. Each sum is one
    // chain of fused multiply-adds in the order of inputs, whatever the number of rows.
    void (*gemm)(const Packed& weights, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                 int64_t first_panel, int64_t last_panel, float* scratch);

    // Floats of the state of one row (sum of values, maximum, sum of weights), and of a span's scratch.
    int64_t (*state_floats)(int64_t head_dim);
    int64_t (*attention_scratch)(int64_t rows, int64_t head_dim);
    AttentionKernels attention;
    // With queries and weights rounded to bfloat16 too, for K/V in bfloat16 and int8 activations; null without.
    const AttentionKernels* bfloat16_attention;

    void (*rms_norm)(const float* x, const float* weight, int64_t size, float epsilon, float* y);
    void (*add)(float* x, const float* y, int64_t size);                           // x += y
    void (*silu_multiply)(const float* gate, const float* up, int64_t size, float* y);  // y = silu(gate) * up
    void (*rotate)(float* head, const float* cos, const float* sin, int64_t half);  // pairs (i, i + half)

    // For sampling: weights of some tokens and their sum; the sum of those that reach both least values, the others
    // become 0; their buckets; the largest logit, which is no NaN.
    int64_t (*weigh)(const float* logits, int64_t size, const Weighing& by, int64_t* weights);
    int64_t (*keep)(const float* logits, int64_t size, float least_logit, int64_t least_weight, int64_t* weights);
    void (*buckets_of)(const float* logits, int64_t size, const Weighing& by, int32_t* buckets);
    float (*largest_of)(const float* values, int64_t size);

    // For benchmarks: what this CPU can do at most.
    int64_t probe_flops;  // of one turn
    float (*multiply_add_probe)(int64_t turns);
    float (*read_probe)(const float* from, int64_t size);

    IntegerKernels integers;
};

// Each is null on a machine or in a build that cannot have it.
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* neon_kernels();
const Kernels* scalar_kernels();

// For instruction sets that only add products of bytes to one of those: the rest is its kernels'.
const IntegerKernels* avx512vnni_integers();
const IntegerKernels* avx2vnni_integers();
const IntegerKernels* neondot_integers();
// The same for products of pairs of bfloat16, which a CPU has beside those of bytes.
const AttentionKernels* avx512bf16_attention();

}  // namespace octavo
