// The worker loop: take a task, wait for its edges, run its body, signal. Portable: host threads,
// the one-thread simulation and the ThreadSanitizer build run this very code, and differ in their
// Platform only. The GPU's loop (persistent.cu) splits the same calls between its warps.
//
//   wait for steps_open > step -> TaskSource.next -> edges -> body -> signals -> span -> again
//
// A Platform gives:
//   u64  ticks()                                   clock of spans
//   u32  run_body(const TaskRecord&, u64 step)     a FaultKind; kFaultNone if all went well
//   u32  chosen()                                  Span::chosen of the body that ran last
//   const u32* fault_detail()                      4 words about the body's last fault
//   u32  nap_polls()                               from this poll on a pause may sleep
//   void edge_pause(u32 polls)                     after each unmet poll of an edge or slot
//   void step_pause(u64 step, u32 polls, bool controls)   the same, while no step is open
//   void step_opened()                             a step was opened, or abort or exit was set
#pragma once
#include "controller.hpp"
#include "dynamic.hpp"
#include "queue.hpp"
#include "slow_steps.hpp"
#include "trace.hpp"

namespace gpurt {

enum class Waited : u32 { kMet, kAborted, kTimedOut };

// Polls between two looks at the abort flag and the clock; where a poll may be a nap, every one.
constexpr u32 kPollsPerLook = 64;
constexpr u32 kPollsPerControl = 16;

// The give-up part of a wait: begins when its first poll failed, so a met edge pays nothing.
struct WaitClock {
  u32 polls = 0;
  u64 begin_ns = 0;

  template <class Platform>
  Waited missed(const Program& program, Platform& platform, bool controls) {
    ++polls;
    if (polls % kPollsPerLook == 0 || polls >= platform.nap_polls()) {
      if (controls) controller_mirror(program);  // else nobody sees the host's abort
      if (load_relaxed(&device_control(program)->abort) != 0) return Waited::kAborted;
      const u64 now_ns = clock_ns();
      if (begin_ns == 0) begin_ns = now_ns;
      if (now_ns - begin_ns >= program.wait_timeout_ns) return Waited::kTimedOut;
    }
    platform.edge_pause(polls);
    return Waited::kMet;
  }
};

// One worker's state; lives on its stack.
template <class Platform>
class Worker {
 public:
  Worker(const Program& program, u32 index, Platform& platform)
      : program_(program), index_(index), platform_(platform) {}

  // Until the kernel ends. Worker 0 also plays the controller.
  void run() {
    controller_start(controller_);
    add_acq_rel(&device_control(program_)->workers_in, 1);
    source_.start(program_, index_);
    while (wait_for_step(source_.step)) {
      source_.step_limit = source_.step + 1;
      if (!run_step()) break;
    }
    // Also after an abort, so that the host counts on no kernel that is leaving.
    if (controls()) store_release_system(&host_control(program_)->kernel_state, kKernelEnding);
    platform_.step_opened();  // others may sleep, and have to see why this one left
  }

 private:
  bool controls() const { return index_ == 0; }

  // No time-out: the time between two steps is the host's. Leaves on abort and exit.
  bool wait_for_step(u64 step) {
    const DeviceControl* control = device_control(program_);
    if (controls()) control_step(step);  // also when the step is open: residency, and what to admit
    for (u32 polls = 0;; ++polls) {
      if (load_acquire(&control->steps_open) > step) return true;
      const bool naps = polls >= platform_.nap_polls();
      if (naps || polls % kPollsPerLook == 0) {
        if (load_relaxed(&control->abort) != 0 || load_acquire(&control->exit) != 0) return false;
      }
      if (controls() && (naps || polls % kPollsPerControl == 0)) control_step(step);
      platform_.step_pause(step, polls, controls());
    }
  }

  void control_step(u64 step) {
    controller_poll(program_, controller_);
    if (load_relaxed(&device_control(program_)->steps_open) > step) platform_.step_opened();
  }

  // All this worker's tasks of the step that the source stands in. False: leave.
  bool run_step() {
    const u64 step = source_.step;
    keep_if_slow(program_, index_, step);
    ticks_ = platform_.ticks();
    WaitClock clock;
    while (source_.step == step) {
      u32 task = 0;
      u64 task_step = 0;
      if (source_.next(task, task_step) == Next::kTask) {
        round_ = source_.round;
        if (!run_task(task, task_step, source_.policy != kPolicyReady)) return false;
        while (kept_ != kSlotTaken) {
          const u32 kept = kept_;
          kept_ = kSlotTaken;
          if (!run_task(kept, task_step, false)) return false;
        }
        clock = WaitClock();
      } else if (source_.step == step) {
        const Waited waited = clock.missed(program_, platform_, controls());
        if (waited == Waited::kTimedOut) report_empty_slot(step, clock);
        if (waited != Waited::kMet) return false;
      }
    }
    return true;
  }

  bool run_task(u32 task, u64 step, bool has_edges) {
    const TaskRecord& record = at<const TaskRecord>(program_.records)[task];
    const u64 begin = ticks_;
    u64 met = begin;
    // A `ready` task was pushed by who met its last edge; its slot's acquire covers them all.
    if (has_edges) {
      for (u32 i = 0; i < record.wait_count; ++i)
        if (!wait_for_edge(record, record.wait[i], step, met)) return false;
    }
    u32 chosen = 0;
    if ((record.flags & kTaskAdvance) != 0) {
      controller_mirror(program_);
      advance(program_, record, step);
      platform_.step_opened();
    } else if (const u32 kind = platform_.run_body(record, step); kind != kFaultNone) {
      report_body(record, step, kind);
      return false;
    } else {
      chosen = platform_.chosen();
    }
    if ((record.flags & kTaskDecides) != 0 && !decide(record, step)) return false;
    for (u32 i = 0; i < record.signal_count; ++i)
      signal_and_push(program_, record.signal[i], round_, &kept_);
    ticks_ = platform_.ticks();
    span_record(program_, index_, task, step, begin, met, ticks_, chosen);
    return true;
  }

  bool decide(const TaskRecord& record, u64 step) {
    const Decision& decision = decision_of(program_, record);
    const u32 live = live_slots(decision);
    if (live > decision.slots) {
      Fault fault = blank(kFaultCapacity, record.task_index, step);
      fault.seen = live;
      fault.needed = decision.slots;
      raise_fault(program_, fault);
      return false;
    }
    publish_live(program_, decision, round_, live);
    compensate(program_, decision, round_, live, &kept_);
    return true;
  }

  bool wait_for_edge(const TaskRecord& record, const Wait& wait, u64 step, u64& met) {
    const u64 target = counter_target(wait, round_);
    if (seen_of(program_, wait.counter, target).value >= target) return true;
    WaitClock clock;
    do {
      const Waited waited = clock.missed(program_, platform_, controls());
      if (waited == Waited::kTimedOut) report_edge(record, wait, step, clock);
      if (waited != Waited::kMet) return false;
    } while (seen_of(program_, wait.counter, target).value < target);
    met = platform_.ticks();
    return true;
  }

  // ---- giving up: cold ---------------------------------------------------------------------
  Fault blank(u32 kind, u32 task, u64 step) const {
    Fault fault = {};
    fault.kind = kind;
    fault.worker = index_;
    fault.task = task;
    fault.step = step;
    return fault;
  }

  void name_edge(const Wait& wait, u64 round, Fault& fault) const {
    fault.counter = wait.counter;
    fault.needed = counter_target(wait, round);
    const Seen seen = seen_of(program_, wait.counter, fault.needed);
    fault.seen = seen.value;
    fault.detail[0] = seen.rank;
  }

  void report_edge(const TaskRecord& record, const Wait& wait, u64 step, const WaitClock& clock) {
    Fault fault = blank(kFaultEdgeTimeout, record.task_index, step);
    name_edge(wait, round_, fault);
    fault.waited_ns = clock_ns() - clock.begin_ns;
    raise_fault(program_, fault);
  }

  void report_body(const TaskRecord& record, u64 step, u32 kind) {
    Fault fault = blank(kind, record.task_index, step);
    for (u32 i = 0; i < 4; ++i) fault.detail[i] = platform_.fault_detail()[i];
    raise_fault(program_, fault);
  }

  // A slot that nobody fills belongs to no task yet: names the first one that lacks an edge.
  void report_empty_slot(u64 step, const WaitClock& clock) {
    Fault fault = blank(kFaultQueueTimeout, source_.begin, step);
    fault.waited_ns = clock_ns() - clock.begin_ns;
    for (u32 task = source_.begin; task < source_.end; ++task) {
      const TaskRecord& record = at<const TaskRecord>(program_.records)[task];
      for (u32 i = 0; i < record.wait_count; ++i) {
        Fault edge = fault;
        name_edge(record.wait[i], source_.round, edge);
        if (edge.seen >= edge.needed) continue;
        edge.kind = kFaultEdgeTimeout;
        edge.task = task;
        raise_fault(program_, edge);
        return;
      }
    }
    raise_fault(program_, fault);
  }

  const Program& program_;
  const u32 index_;
  Platform& platform_;
  TaskSource source_;
  Controller controller_;
  u64 round_ = 0;          // of the task at hand
  u32 kept_ = kSlotTaken;  // a task that this worker made ready and keeps: it runs next
  u64 ticks_ = 0;          // end of the last task, so a task without a wait reads the clock once
};

}  // namespace gpurt
