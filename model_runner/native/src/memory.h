// Memory for weights and scratch: on a cache line's boundary, in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace octavo {

// Asks the system for huge pages where whole ones fit; to be called before the memory is written.
void want_huge_pages(void* memory, size_t bytes);

// Memory that is zero at first.
class Buffer {
public:
    explicit Buffer(size_t bytes);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    uint8_t* data_;
    size_t bytes_;
    void* mapped_ = nullptr;  // What the system gave, where it is not from the heap.
};

// A part of a buffer, which lives as long as one of its parts.
struct Slice {
    std::shared_ptr<Buffer> buffer;
    uint8_t* data;
    size_t bytes;
};

// Memory for a matrix, zero at first. Small ones lie one behind the other in large buffers: alone, most matrices of a
// small model have no huge page, and looking up the addresses of small ones takes as long as reading what is there.
Slice weight_memory(size_t bytes);

// Memory that grows to the most that was wanted; what was in it is gone then.
class Scratch {
public:
    void* room(size_t bytes);

private:
    std::unique_ptr<Buffer> buffer_;
};

// This thread's scratch memory, at least so many floats; what was in it is gone.
float* thread_scratch(int64_t floats);

}  // namespace octavo
