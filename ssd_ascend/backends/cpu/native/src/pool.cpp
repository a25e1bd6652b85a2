// See pool.h. One job at a time; a second caller that finds the pool busy works alone.
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace ssd {
namespace {

constexpr auto kAwake = std::chrono::microseconds(100);  // outlasts the interpreter's work between two kernels
constexpr int kPauses = 64;                              // between looks at the clock
constexpr int kPatience = 4096;                          // pauses before a caller offers its core to a late thread

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

class Pool {
  public:
    void run(int64_t pieces, int64_t threads, void (*work)(const void*, int64_t), const void* context) {
        std::unique_lock<std::mutex> turn(busy_, std::try_to_lock);
        if (!turn.owns_lock()) {
            for (int64_t i = 0; i < pieces; ++i) work(context, i);
            return;
        }
        for (; workers_ < threads - 1; ++workers_) std::thread(&Pool::serve, this, workers_).detach();
        work_.store(work, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        pieces_.store(pieces, std::memory_order_relaxed);
        helpers_.store(threads - 1, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(job << 32 | uint64_t(pieces));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> guard(sleep_);
            wake_.notify_all();
        }
        while (take()) {
        }
        for (int i = 0; done_.load(std::memory_order_acquire) != pieces; ++i)
            i < kPatience ? pause_briefly() : void(sched_yield());
    }

  private:
    // Takes and runs one piece; false when none is left. The ticket holds (job, pieces left) in one word: a successful
    // exchange proves that the job read in between was the one whose piece was taken.
    bool take(int64_t helper = -1) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            const int64_t left = int64_t(ticket & 0xffffffffu);
            if (left == 0) return false;
            const auto work = work_.load(std::memory_order_relaxed);
            const void* context = context_.load(std::memory_order_relaxed);
            const int64_t piece = pieces_.load(std::memory_order_relaxed) - left;
            if (helper >= helpers_.load(std::memory_order_relaxed)) return false;
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                               std::memory_order_acquire))
                continue;
            work(context, piece);
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }

    void serve(int64_t helper) {
        for (;;) {
            const uint64_t seen = ticket_.load(std::memory_order_acquire) >> 32;
            while (take(helper)) {
            }
            if (!stay_awake(seen)) {
                std::unique_lock<std::mutex> guard(sleep_);
                sleepers_.fetch_add(1);
                wake_.wait(guard, [&] { return ticket_.load() >> 32 != seen; });
                sleepers_.fetch_sub(1);
            }
        }
    }

    // Waits a little for a job after `seen`; false when none came.
    bool stay_awake(uint64_t seen) const {
        const auto until = std::chrono::steady_clock::now() + kAwake;
        do {
            for (int i = 0; i < kPauses; ++i) {
                if (ticket_.load(std::memory_order_acquire) >> 32 != seen) return true;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < until);
        return false;
    }

    std::mutex busy_, sleep_;
    std::condition_variable wake_;
    int64_t workers_ = 0;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> done_{0}, pieces_{0}, helpers_{0}, sleepers_{0};
    std::atomic<void (*)(const void*, int64_t)> work_{nullptr};
    std::atomic<const void*> context_{nullptr};
};

// Never destroyed: its threads may outlive static destruction. A forked child, which has none of them, makes its own.
std::atomic<Pool*> current{nullptr};

void forget_after_fork() { current.store(nullptr); }

struct ForkGuard {
    ForkGuard() { pthread_atfork(nullptr, nullptr, forget_after_fork); }
} fork_guard;

Pool& pool() {
    Pool* found = current.load(std::memory_order_acquire);
    if (found) return *found;
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;  // another thread was first; nobody has seen this one
    return *found;
}

}  // namespace

void run_pieces(int64_t pieces, int64_t threads, void (*work)(const void*, int64_t), const void* context) {
    pool().run(pieces, threads, work, context);
}

}  // namespace ssd
