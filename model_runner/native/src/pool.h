// Threads that share out the units of one job at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// The caller claims units like everybody else and waits only for units that somebody has claimed. So a thread that the
// kernel has put aside costs nothing unless it was in the middle of a unit, and a pool whose threads are gone (after a
// fork) still works. Who has nothing to do spins for a moment, because the next job of a step comes within
// microseconds, and then sleeps: a barrier that goes on spinning takes the core from whoever has work.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls work(unit) for every unit below `units`, in any order, on any thread; returns when all are done.
    // One job at a time: work must not start another.
    template <class Work>
    void run(int64_t units, const Work& work) {
        run_units(units, [](const void* context, int64_t unit) { (*static_cast<const Work*>(context))(unit); }, &work);
    }

private:
    using Call = void (*)(const void*, int64_t);

    void run_units(int64_t units, Call call, const void* context);
    bool claim_and_work();
    void serve();

    // Job number, units of the job, next unit that nobody has claimed: one word, so that a claim is of one job only.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> ends_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
