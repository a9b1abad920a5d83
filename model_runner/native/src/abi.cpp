// The C interface: turns exceptions into sentences, and picks the instruction set.
#include "octavo.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "attention_plan.h"
#include "instruction_sets.h"
#include "kernels.h"
#include "matrix.h"
#include "memory.h"
#include "model.h"
#include "pool.h"
#include "sampling.h"

namespace {

using namespace octavo;

thread_local std::string last_error;

// What all calls share. One call at a time: the pool runs one job at a time.
struct Library {
    std::mutex mutex;
    const Kernels* kernels = usable_kernels().front();
    std::unique_ptr<Pool> pool = std::make_unique<Pool>(1);
    AttentionPlan plan;
};

Library& library() {
    // Never destroyed: at the process's end, threads may still wait on it.
    static Library* const shared = new Library;
    return *shared;
}

template <class Work>
auto guarded(decltype(std::declval<Work>()(library())) on_error, const Work& work) {
    Library& shared = library();
    std::lock_guard<std::mutex> lock(shared.mutex);
    try {
        return work(shared);
    } catch (const std::exception& error) {
        last_error = error.what();
        return on_error;
    }
}

void check_range(const Matrix& matrix, int64_t first, int64_t count) {
    if (first < 0 || count < 0 || first + count > matrix.outputs()) {
        throw std::invalid_argument("there are no such outputs");
    }
}

}  // namespace

const char* octavo_error() { return last_error.c_str(); }

const char* octavo_instruction_sets() {
    static const std::string names = [] {
        std::string joined;
        for (const Kernels* each : usable_kernels()) joined += (joined.empty() ? "" : ",") + std::string(each->name);
        return joined;
    }();
    return names.c_str();
}

int octavo_use(const char* name) {
    return guarded(-1, [&](Library& shared) {
        for (const Kernels* each : usable_kernels()) {
            if (std::strcmp(each->name, name) == 0) {
                shared.kernels = each;
                return 0;
            }
        }
        throw std::invalid_argument("this CPU has no instruction set '" + std::string(name) + "'; it has " +
                                    octavo_instruction_sets());
    });
}

int octavo_set_threads(int32_t threads) {
    return guarded(-1, [&](Library& shared) {
        if (threads < 1) throw std::invalid_argument("there must be a thread");
        if (threads != shared.pool->threads()) shared.pool = std::make_unique<Pool>(threads);
        return 0;
    });
}

void octavo_huge_pages(void* memory, int64_t bytes) { want_huge_pages(memory, static_cast<size_t>(bytes)); }

int64_t octavo_probe_multiply_add(int64_t turns) {
    return guarded(int64_t{-1}, [&](Library& shared) -> int64_t {
        const int64_t threads = shared.pool->threads();
        std::vector<float> results(threads);
        shared.pool->run(threads, [&](int64_t unit) { results[unit] = shared.kernels->multiply_add_probe(turns); });
        return threads * turns * shared.kernels->probe_flops;
    });
}

int octavo_probe_read(const float* from, int64_t size) {
    return guarded(-1, [&](Library& shared) {
        constexpr int64_t kUnit = 1 << 18;
        std::vector<float> results(size / kUnit);
        shared.pool->run(size / kUnit, [&](int64_t unit) {
            results[unit] = shared.kernels->read_probe(from + unit * kUnit, kUnit);
        });
        return 0;
    });
}

void* octavo_matrix_new(int32_t form, int32_t activations, int64_t outputs, int64_t inputs) {
    return guarded(nullptr, [&](Library& shared) -> void* {
        const auto known = static_cast<Form>(form);
        const bool is_known = form >= 0 && form <= static_cast<int32_t>(Form::int8_channel) &&
                              (activations == 0 || activations == static_cast<int32_t>(Activations::int8));
        if (!is_known || outputs < 1 || inputs < 1 || !form_fits(known, inputs)) {
            throw std::invalid_argument("a matrix of form " + std::to_string(form) + " cannot have " +
                                        std::to_string(inputs) + " inputs");
        }
        return new Matrix(*shared.kernels, known, static_cast<Activations>(activations), outputs, inputs);
    });
}

void octavo_matrix_free(void* matrix) { delete static_cast<Matrix*>(matrix); }

int64_t octavo_matrix_bytes(const void* matrix) { return static_cast<const Matrix*>(matrix)->bytes(); }

int octavo_matrix_fill(void* matrix, int64_t first, int64_t count, const float* weights) {
    return guarded(-1, [&](Library& shared) {
        check_range(*static_cast<Matrix*>(matrix), first, count);
        static_cast<Matrix*>(matrix)->fill(*shared.pool, first, count, weights);
        return 0;
    });
}

int octavo_matrix_fill_groups(void* matrix, int64_t first, int64_t count, const int8_t* numbers, const uint16_t* scales,
                              const uint16_t* offsets) {
    return guarded(-1, [&](Library& shared) {
        Matrix& into = *static_cast<Matrix*>(matrix);
        check_range(into, first, count);
        const bool is_int4 = into.form() == Form::int4;
        if (!is_grouped(into.form()) || is_int4 != (offsets != nullptr)) {
            throw std::invalid_argument("int8 matrices have scales, int4 ones scales and offsets, others neither");
        }
        into.fill_groups(*shared.pool, first, count, numbers, scales, offsets);
        return 0;
    });
}

int octavo_matrix_rows(const void* matrix, const int64_t* outputs, int64_t count, float* to) {
    return guarded(-1, [&](Library&) {
        const Matrix& from = *static_cast<const Matrix*>(matrix);
        for (int64_t row = 0; row < count; ++row) {
            check_range(from, outputs[row], 1);
            from.row(outputs[row], to + row * from.inputs());
        }
        return 0;
    });
}

int octavo_matrix_multiply(const void* matrix, const float* x, int64_t rows, float* y) {
    return guarded(-1, [&](Library& shared) {
        const Matrix& by = *static_cast<const Matrix*>(matrix);
        by.multiply(*shared.pool, x, by.inputs(), rows, y, by.outputs());
        return 0;
    });
}

int octavo_attend(const octavo_batch* batch, const octavo_cache* cache, int64_t layer, int64_t heads, float scale,
                  const float* queries, const float* keys, const float* values, float* output, int32_t activations) {
    return guarded(-1, [&](Library& shared) {
        const Sequences sequences = sequences_of(*batch);
        const int64_t kv_width = cache->kv_heads * cache->head_dim;
        AttentionArgs args = layer_args(*cache, layer, heads, scale);
        args.activations = static_cast<Activations>(activations);
        args.queries = queries;
        args.output = output;
        args.query_stride = args.output_stride = heads * cache->head_dim;
        shared.plan.make(sequences, cache->kv_heads, args.heads_per_kv, cache->block_size, cache->num_blocks,
                         cache->window, shared.pool->threads());
        for_tokens(*shared.pool, sequences.tokens(), 2 * kv_width, [&](int64_t token) {
            write_kv(args, batch->slots[token], keys + token * kv_width, values + token * kv_width);
        });
        shared.plan.run(*shared.pool, *shared.kernels, args);
        return 0;
    });
}

void* octavo_model_new(const octavo_model* model) {
    return guarded(nullptr, [&](Library& shared) -> void* {
#if defined(__GLIBC__)
        // What was read and converted on the way is free by now, and would stay in the heap.
        malloc_trim(0);
#endif
        return new Model(*shared.kernels, *model);
    });
}

void octavo_model_free(void* model) { delete static_cast<Model*>(model); }

int octavo_forward(void* model, const octavo_batch* batch, const octavo_cache* cache, float* logits) {
    return guarded(-1, [&](Library& shared) {
        static_cast<Model*>(model)->forward(*shared.pool, *batch, *cache, logits);
        return 0;
    });
}

int octavo_begin(void* model, const octavo_batch* batch) {
    return guarded(-1, [&](Library& shared) {
        static_cast<Model*>(model)->begin(*shared.pool, *batch);
        return 0;
    });
}

int octavo_before_attention(void* model, const octavo_batch* batch, int64_t layer, float* qkv) {
    return guarded(-1, [&](Library& shared) {
        Model& own = *static_cast<Model*>(model);
        own.before_attention(*shared.pool, *batch, layer, nullptr);
        std::copy(own.qkv(), own.qkv() + sequences_of(*batch).tokens() * own.qkv_width(), qkv);
        return 0;
    });
}

int octavo_after_attention(void* model, const octavo_batch* batch, int64_t layer, const float* attended) {
    return guarded(-1, [&](Library& shared) {
        static_cast<Model*>(model)->after_attention(*shared.pool, *batch, layer, attended);
        return 0;
    });
}

int octavo_end(void* model, const octavo_batch* batch, float* logits) {
    return guarded(-1, [&](Library& shared) {
        static_cast<Model*>(model)->end(*shared.pool, *batch, logits);
        return 0;
    });
}

int octavo_draw(const octavo_draws* draws, int64_t* tokens) {
    return guarded(-1, [&](Library& shared) {
        draw(*shared.pool, *shared.kernels, *draws, tokens);
        return 0;
    });
}

int octavo_logprobs(const octavo_positions* positions, double* logprobs, int64_t* best_ids, double* best_logprobs) {
    return guarded(-1, [&](Library& shared) {
        log_probabilities(*shared.pool, *shared.kernels, *positions, logprobs, best_ids, best_logprobs);
        return 0;
    });
}
