#include "instruction_sets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace octavo {
namespace {

#if defined(__x86_64__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

// Asked of the CPU itself: compilers learnt the names late.
bool has_feature(unsigned bit) {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> bit & 1);
}

bool has_avx2vnni() { return has_avx2() && has_feature(4); }
bool has_avx512bf16() { return has_avx512vnni() && has_feature(5); }

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512vnni() { return false; }
bool has_avx2vnni() { return false; }
bool has_avx512bf16() { return false; }

#endif

bool has_neondot() {
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
    return false;
#endif
}

// Kernels with other products of whole numbers, under another name.
Kernels with(const Kernels& kernels, const char* name, const IntegerKernels& integers) {
    Kernels all = kernels;
    all.name = name;
    all.integers = integers;
    return all;
}

// The best of AVX-512: with products of bytes and of pairs of bfloat16.
void add_avx512bf16(std::vector<const Kernels*>& usable) {
    const bool is_built = avx512_kernels() && avx512vnni_integers() && avx512bf16_attention();
    if (!is_built || !has_avx512bf16()) return;
    auto* all = new Kernels(with(*avx512_kernels(), "avx512bf16", *avx512vnni_integers()));
    all->bfloat16_attention = avx512bf16_attention();
    usable.push_back(all);
}

void add(std::vector<const Kernels*>& usable, const Kernels* kernels, bool is_usable, const char* more_name,
         const IntegerKernels* more, bool has_more) {
    if (kernels == nullptr || !is_usable) return;
    if (more != nullptr && has_more) usable.push_back(new const Kernels(with(*kernels, more_name, *more)));
    usable.push_back(kernels);
}

}  // namespace

const std::vector<const Kernels*>& usable_kernels() {
    // Never destroyed, like the library that uses them.
    static const auto* const found = [] {
        auto* usable = new std::vector<const Kernels*>;
        add_avx512bf16(*usable);
        add(*usable, avx512_kernels(), has_avx512(), "avx512vnni", avx512vnni_integers(), has_avx512vnni());
        add(*usable, avx2_kernels(), has_avx2(), "avx2vnni", avx2vnni_integers(), has_avx2vnni());
        add(*usable, neon_kernels(), true, "neondot", neondot_integers(), has_neondot());
        usable->push_back(scalar_kernels());
        return usable;
    }();
    return *found;
}

}  // namespace octavo
