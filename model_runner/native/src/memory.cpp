#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include <sys/mman.h>

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLine = 64;

// What matrices share; one that would take a quarter of it has memory of its own.
constexpr size_t kShared = size_t{32} << 20;

// The buffer that the next matrix is put into, and how much of it is taken.
struct Shared {
    std::mutex mutex;
    std::weak_ptr<Buffer> buffer;
    size_t taken = 0;
};

}  // namespace

void want_huge_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    // Both ends stay in small pages: a huge one that is mostly empty would be memory taken for nothing.
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

Buffer::Buffer(size_t bytes) : data_(nullptr), bytes_(bytes) {
    if (bytes < kHugePage) {
        void* memory = nullptr;
        if (posix_memalign(&memory, kLine, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(std::memset(memory, 0, bytes));
        return;
    }
    // Not from the heap, where what is freed between large pieces that stay is never given back. One huge page more
    // than is wanted has room for it on a huge page's boundary; what is not written takes no memory.
    void* memory = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapped_ = memory;
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage);
    want_huge_pages(data_, bytes);
}

Buffer::~Buffer() {
    if (mapped_ != nullptr) {
        munmap(mapped_, bytes_ + kHugePage);
    } else {
        std::free(data_);
    }
}

Slice weight_memory(size_t bytes) {
    const size_t room = (bytes + kLine - 1) / kLine * kLine;
    if (room > kShared / 4) {
        auto own = std::make_shared<Buffer>(bytes);
        return {own, own->data(), bytes};
    }
    // Never destroyed, like the library that uses it.
    static Shared& shared = *new Shared;
    std::lock_guard<std::mutex> lock(shared.mutex);
    std::shared_ptr<Buffer> buffer = shared.buffer.lock();
    if (!buffer || shared.taken + room > kShared) {
        shared.buffer = buffer = std::make_shared<Buffer>(kShared);
        shared.taken = 0;
    }
    uint8_t* data = buffer->data() + shared.taken;
    shared.taken += room;
    return {std::move(buffer), data, bytes};
}

void* Scratch::room(size_t bytes) {
    if (!buffer_ || buffer_->bytes() < bytes) buffer_ = std::make_unique<Buffer>(bytes);
    return buffer_->data();
}

float* thread_scratch(int64_t floats) {
    thread_local Scratch scratch;
    return static_cast<float*>(scratch.room(static_cast<size_t>(floats) * sizeof(float)));
}

}  // namespace octavo
