#include "pool.h"

#include <chrono>

#include <sched.h>

namespace octavo {
namespace {

// A ticket's fields from the lowest bit on: next unit, units, job number. Beyond the last unit, threads add one each.
constexpr int kUnitBits = 22;
constexpr uint64_t kUnitMask = (uint64_t{1} << kUnitBits) - 1;
constexpr int64_t kMaxUnits = kUnitMask / 2;

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kSpinBeforeYield = std::chrono::microseconds(20);

uint64_t next_of(uint64_t ticket) { return ticket & kUnitMask; }
uint64_t units_of(uint64_t ticket) { return (ticket >> kUnitBits) & kUnitMask; }
uint64_t job_of(uint64_t ticket) { return ticket >> (2 * kUnitBits); }

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until `ready` says so or `span` is over; false when it is over.
template <class Ready>
bool spin(std::chrono::microseconds span, const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + span;
    do {
        for (int turn = 0; turn < 16; ++turn) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace

Pool::Pool(int threads) {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
    ends_.store(true);
    {
        std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run_units(int64_t units, Call call, const void* context) {
    // A job of more units than a ticket can count comes in parts.
    for (; units > kMaxUnits; --units) call(context, units - 1);
    if (units <= 1 || workers_.empty()) {
        for (int64_t unit = 0; unit < units; ++unit) call(context, unit);
        return;
    }
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = job_of(ticket_.load(std::memory_order_relaxed)) + 1;
    ticket_.store(job << (2 * kUnitBits) | static_cast<uint64_t>(units) << kUnitBits);
    if (sleeping_.load() > 0) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
    }
    while (claim_and_work()) {
    }
    const auto all_done = [&] { return done_.load(std::memory_order_acquire) == units; };
    if (spin(kSpinBeforeYield, all_done)) return;
    // A thread is late with a unit: perhaps it needs this core to go on.
    while (!all_done()) sched_yield();
}

bool Pool::claim_and_work() {
    const uint64_t seen = ticket_.load(std::memory_order_acquire);
    if (next_of(seen) >= units_of(seen)) return false;
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (next_of(ticket) >= units_of(ticket)) return false;
    // The job cannot end before this unit is done, so what is read here belongs to it.
    const Call call = call_.load(std::memory_order_relaxed);
    call(context_.load(std::memory_order_relaxed), static_cast<int64_t>(next_of(ticket)));
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Pool::serve() {
    const auto wanted = [this] {
        const uint64_t ticket = ticket_.load();
        return next_of(ticket) < units_of(ticket) || ends_.load(std::memory_order_relaxed);
    };
    while (!ends_.load(std::memory_order_relaxed)) {
        if (claim_and_work() || spin(kSpin, wanted)) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, wanted);
        sleeping_.fetch_sub(1);
    }
}

}  // namespace octavo
