// HostExecutor: threads as workers over one Program. Knows nothing of Python.
//
// Thread-safe: running(), join(), abort() and wake() from any thread; launch() from one thread at a
// time.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "bodies/context.hpp"
#include "launch.hpp"
#include "worker.hpp"

namespace gpurt {

// Between two polls of a spin: lets the other thread of the core run, keeps the core itself. The
// pause() of atomics.hpp gives the core away, which costs a system call: half of every hop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#else
  pause();
#endif
}

// Where workers without an open step sleep, so that an idle kernel burns no core.
//
// Lost wake-ups: the opener adds 0 to `sleepers` after its store, the sleeper adds 1 before it
// looks again. Both are read-modify-writes of one word, hence ordered: the later one sees the other
// side.
class Parking {
 public:
  // hears_all: whoever opens a step for these workers calls wake() here. False of ranks in other
  // processes: theirs is the order of a rank that knows no sleeper.
  explicit Parking(bool hears_all = true) : hears_all_(hears_all) {}

  bool hears_all() const { return hears_all_; }

  // Until `is_over` or a wake() or the time is up.
  template <class IsOver>
  void park(u64 timeout_ns, IsOver is_over) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_acq_rel);
    const u64 before = wakes_;
    if (!is_over())
      wakeup_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                       [&] { return wakes_ != before || is_over(); });
    sleepers_.fetch_sub(1, std::memory_order_acq_rel);
  }

  void wake() {
    if (sleepers_.fetch_add(0, std::memory_order_acq_rel) == 0) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++wakes_;
    }
    wakeup_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wakeup_;
  std::atomic<u32> sleepers_{0};
  u64 wakes_ = 0;
  const bool hears_all_;
};

class HostExecutor {
 public:
  // Runs task `task` on worker `worker`; returns a FaultKind. For bodies that are not built in.
  using Callback = std::function<u32(u32 task, u32 worker)>;

  // bodies[i] runs records whose `body` is i; null: `callback` does. `program` and all it points to
  // must live longer than this object. parking: one for all ranks of a group, since what one of
  // them says wakes the others.
  HostExecutor(const Program& program, std::vector<HostBody> bodies, Callback callback,
               u64 scratch_bytes, std::shared_ptr<Parking> parking);
  HostExecutor(const HostExecutor&) = delete;
  HostExecutor& operator=(const HostExecutor&) = delete;
  ~HostExecutor();  // aborts and joins

  // Zeroes all counters and starts the workers. False: the last ones still run.
  bool launch();
  bool running() const;
  bool join(u64 timeout_ns);
  // Workers leave at their next wait, or after the body they are in.
  void abort();
  // After the host changed a word that the controller reads.
  void wake() { parking_->wake(); }

 private:
  friend class HostPlatform;

  void run_worker(u32 index);
  void join_threads();

  const Program& program_;
  const std::vector<HostBody> bodies_;
  const Callback callback_;
  const u64 scratch_bytes_;
  u32 spin_polls_;
  const std::shared_ptr<Parking> parking_;
  std::vector<std::thread> threads_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  u32 alive_ = 0;
};

}  // namespace gpurt
