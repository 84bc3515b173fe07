// Threads as workers: how they wait, how a launch begins and ends, and body dispatch.
#include "host_executor.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace gpurt {
namespace {

// A wait polls, then gives its core away, then sleeps. With a core for each worker an edge is met
// within microseconds; with 132 workers on two cores whoever spins keeps the producer from running.
constexpr u32 kSpinPollsOwnCore = 2000;
constexpr u32 kSpinPollsShared = 20;
constexpr u32 kYieldPolls = 100;
constexpr u64 kEdgeNapNs = 50'000;
// A parked worker is woken; the time only bounds how late the controller sees linger and residency.
constexpr u64 kParkNs = 100'000'000;
constexpr u64 kControllerParkNs = 2'000'000;
// Who must look for orders itself naps like at an edge for about as long as a step may take.
constexpr u32 kOrderNaps = 200;
constexpr std::size_t kScratchAlignBytes = 64;

struct Free {
  void operator()(u8* p) const { std::free(p); }  // NOLINT(cppcoreguidelines-no-malloc)
};

}  // namespace

// One per worker thread.
class HostPlatform {
 public:
  HostPlatform(HostExecutor& executor, u32 worker)
      : executor_(executor),
        // Not touched here: pages that no body uses are never made.
        scratch_(
            static_cast<u8*>(std::aligned_alloc(kScratchAlignBytes, executor.scratch_bytes_))) {
    const Program& program = executor.program_;
    if (!scratch_) throw std::bad_alloc();
    context_.program = &program;
    context_.sampled = step_sampled(program);
    context_.slots = at<const SlotState>(program.slots);
    context_.scratch = scratch_.get();
    context_.scratch_bytes = executor.scratch_bytes_;
    context_.worker = worker;
  }

  static u64 ticks() { return clock_ns(); }

  u32 run_body(const TaskRecord& record, u64) {
    choose_rows(record, context_);
    context_.chosen = 0;
    const HostBody body = executor_.bodies_[record.body];
    if (body == nullptr) return executor_.callback_(record.task_index, context_.worker);
    if (record.payload_mask == 0) return body(record, context_);
    TaskRecord placed = record;  // in this step's set of the symmetric buffers
    for (u32 i = 0; i < kAddrsPerTask; ++i)
      placed.addr[i] =
          arg_address(record, i, context_.step->round, context_.program->payload_set_bytes);
    return body(placed, context_);
  }

  u32 chosen() const { return context_.chosen; }

  u32 nap_polls() const { return executor_.spin_polls_ + kYieldPolls; }

  const u32* fault_detail() const { return context_.detail; }

  void edge_pause(u32 polls) {
    if (polls < executor_.spin_polls_) {
      spin_pause();
    } else if (polls < nap_polls()) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kEdgeNapNs));
    }
  }

  void step_pause(u64 step, u32 polls, bool controls) {
    if (polls < executor_.spin_polls_) {
      spin_pause();
    } else if (polls < nap_polls()) {
      sched_yield();
    } else {
      const DeviceControl* control = device_control(executor_.program_);
      const Program& program = executor_.program_;
      const bool follows = controls && program.rank != 0;
      const bool looks = follows && !executor_.parking_->hears_all();
      const bool soon = looks && polls < nap_polls() + kOrderNaps;
      const u64 controller_ns = soon ? kEdgeNapNs : kControllerParkNs;
      executor_.parking_->park(controls ? controller_ns : kParkNs, [&] {
        return load_acquire(&control->steps_open) > step || load_relaxed(&control->abort) != 0 ||
               load_acquire(&control->exit) != 0 || (follows && has_order(program));
      });
    }
  }

  void step_opened() { executor_.parking_->wake(); }

 private:
  HostExecutor& executor_;
  std::unique_ptr<u8, Free> scratch_;
  BodyContext context_ = {};
};

HostExecutor::HostExecutor(const Program& program, std::vector<HostBody> bodies, Callback callback,
                           u64 scratch_bytes, std::shared_ptr<Parking> parking)
    : program_(program),
      bodies_(std::move(bodies)),
      callback_(std::move(callback)),
      scratch_bytes_((scratch_bytes + kScratchAlignBytes) / kScratchAlignBytes *
                     kScratchAlignBytes),
      parking_(std::move(parking)) {
  // The host's own thread is mostly asleep while requests run, so it needs no core.
  const u32 cores = std::max(1U, std::thread::hardware_concurrency());
  const u32 workers = program.worker_count * program.rank_count;
  spin_polls_ = workers <= cores ? kSpinPollsOwnCore : kSpinPollsShared;
}

HostExecutor::~HostExecutor() {
  abort();
  join_threads();
}

void HostExecutor::abort() {
  exchange_acq_rel(&device_control(program_)->abort, 1);
  wake();
}

bool HostExecutor::launch() {
  if (running()) return false;
  join_threads();
  reset_for_launch(program_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    alive_ = program_.worker_count;
  }
  threads_.reserve(program_.worker_count);
  try {
    for (u32 i = 0; i < program_.worker_count; ++i)
      threads_.emplace_back([this, i] { run_worker(i); });
  } catch (...) {  // no more threads: those that started must not wait for the others
    abort();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      alive_ -= program_.worker_count - static_cast<u32>(threads_.size());
    }
    join_threads();
    throw;
  }
  return true;
}

bool HostExecutor::running() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return alive_ != 0;
}

bool HostExecutor::join(u64 timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return alive_ == 0; });
}

void HostExecutor::run_worker(u32 index) {
  try {
    HostPlatform platform(*this, index);
    Worker<HostPlatform>(program_, index, platform).run();
  } catch (const std::bad_alloc&) {  // no scratch: the others report that it never checked in
    wake();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--alive_ == 0) ended_.notify_all();
}

void HostExecutor::join_threads() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace gpurt
