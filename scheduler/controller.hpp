// Controller: the one thread that looks at host memory. It mirrors what the host wrote into device
// memory, admits requests while nothing runs, and decides when the kernel ends.
//
//   host:  submit_tail = n; fence; read kernel_state      not RUNNING: wait for its end, launch
//   here:  kernel_state = ENDING; fence; read submit_tail  grew: RUNNING again, else exit = 1
//
// Both fences are sequentially consistent, so at least one side sees the other: no request is left
// to a kernel that is going away. The kernel ends only while idle: no step is open, no task runs.
// On the GPU a warp of block 0 plays it; on the host worker 0 does while it waits for a step.
// With several ranks, rank 0's does all that; another's opens the steps that rank 0 orders.
#pragma once
#include "advance.hpp"

namespace gpurt {

// Private to the thread that plays the controller.
struct Controller {
  u64 begin_ns;  // launch; later, when the kernel began to run
  u64 idle_ns;   // when it was first seen idle
  u32 is_running;
  u32 is_idle;
  u32 is_yielding;   // its residency is over: it ends at the next request boundary
  u32 is_over;       // exit is set, which is final: a step opened now would find no workers
  u32 is_announced;  // all peers know that this rank is in
};

GPURT_FN void controller_start(Controller& controller) {
  controller.begin_ns = clock_ns();
  controller.idle_ns = 0;
  controller.is_running = 0;
  controller.is_idle = 0;
  controller.is_yielding = 0;
  controller.is_over = 0;
  controller.is_announced = 0;
}

// The first to give up writes the Fault and raises abort; all others only leave. Out of the hot
// path, and its arguments are values: an address taken there costs a spill in every wait.
GPURT_FN void raise_fault(const Program& program, const Fault& fault) {
  if (exchange_acq_rel(&device_control(program)->abort, 1) != 0) return;
  Fault* out = &host_control(program)->fault;
  out->worker = fault.worker;
  out->task = fault.task;
  out->counter = fault.counter;
  out->step = fault.step;
  out->seen = fault.seen;
  out->needed = fault.needed;
  out->waited_ns = fault.waited_ns;
  for (u32 i = 0; i < 4; ++i) out->detail[i] = fault.detail[i];
  store_release_system(&out->kind, fault.kind);
  if (fault.kind != kFaultPeer) tell_abort(program);
}

// Follows a rank that gave up: this one's report names it.
GPURT_COLD void follow_abort(const Program& program) {
  const u32 rank = rank_that_aborted(program);
  if (rank == program.rank_count) return;
  Fault fault = {};
  fault.kind = kFaultPeer;
  fault.detail[0] = rank;
  raise_fault(program, fault);
}

// What advance needs of the host's words. Stateless, so any thread may call it: all four words only
// grow, and a late store of an older value costs one more look. Returns the tail.
GPURT_FN u64 controller_mirror(const Program& program) {
  const HostControl* host = host_control(program);
  DeviceControl* control = device_control(program);
  const u64 tail = load_acquire_system(&host->submit_tail);
  const u32 cancel_count = load_acquire_system(&host->cancel_count);
  if (load_relaxed(&control->mirror_submit_tail) != tail)
    store_release(&control->mirror_submit_tail, tail);
  if (load_relaxed(&control->mirror_cancel) != cancel_count)
    store_release(&control->mirror_cancel, cancel_count);
  if (load_relaxed_system(&host->exit_request) != 0) store_relaxed(&control->mirror_exit, 1);
  if (load_relaxed_system(&host->abort_request) != 0 && exchange_acq_rel(&control->abort, 1) == 0)
    tell_abort(program);
  if (program.rank_count > 1) follow_abort(program);
  return tail;
}

// Waits until all workers are there: only then may a request count on the kernel. Then for the
// other ranks, which may come minutes later: no time-out runs before all are in.
GPURT_FN void controller_check_in(const Program& program, Controller& controller, u64 now_ns) {
  const u32 in = load_acquire(&device_control(program)->workers_in);
  store_relaxed_system(&host_control(program)->workers_in, in);
  if (in == program.worker_count) {
    if (controller.is_announced == 0) announce(program);
    controller.is_announced = 1;
    if (!all_ranks_in(program)) return;
    controller.is_running = 1;
    controller.begin_ns = now_ns;
    store_release_system(&host_control(program)->kernel_state, kKernelRunning);
    return;
  }
  if (now_ns - controller.begin_ns < program.wait_timeout_ns) return;
  Fault fault = {};
  fault.kind = kFaultCheckIn;
  fault.seen = in;
  fault.needed = program.worker_count;
  fault.waited_ns = now_ns - controller.begin_ns;
  raise_fault(program, fault);
}

// Idle and no reason to stay: ends the kernel, unless a request came in between.
GPURT_FN void controller_end(const Program& program, Controller& controller) {
  HostControl* host = host_control(program);
  DeviceControl* control = device_control(program);
  store_release_system(&host->kernel_state, kKernelEnding);
  fence_seq_cst_system();
  const bool refuses = load_relaxed(&control->mirror_exit) != 0 || controller.is_yielding != 0;
  if (!refuses && load_acquire_system(&host->submit_tail) > control->submit_head) {
    store_release_system(&host->kernel_state, kKernelRunning);
    return;
  }
  controller.is_over = 1;
  give_order(program, kOrderExit, nullptr, 0);
  store_release(&control->exit, 1);
}

// A rank other than 0 is done with its step: takes the next order, if it is there.
GPURT_COLD void controller_follow(const Program& program, Controller& controller, u64 now_ns) {
  DeviceControl* control = device_control(program);
  if (load_acquire(&control->idle) == 0 || !has_order(program)) return;
  StepOrder* order = next_order(program);
  if (order->checks != 0) {
    const u64 sampled = sampled_check(program);
    if (sampled != order->check) {
      Fault fault = {};
      fault.kind = kFaultRanksDiffer;
      fault.step = load_relaxed(&control->steps_open) - 1;
      fault.seen = sampled;
      fault.needed = order->check;
      raise_fault(program, fault);
      return;
    }
  }
  const u32 kind = order->kind, next_variant = order->next_variant;
  if (kind == kOrderStep) copy_step(program, own_parts(program), order_parts(program, order));
  ++control->order_count;
  if (kind == kOrderExit) {
    controller.is_over = 1;
    store_release_system(&host_control(program)->kernel_state, kKernelEnding);
    store_release(&control->exit, 1);
  } else if (kind == kOrderStep) {
    store_relaxed(&control->idle, 0);
    open_step(program, *step_state(program), next_variant, now_ns);
  }
}

// One look. Called again and again by one thread until it sees abort or exit set.
GPURT_FN void controller_poll(const Program& program, Controller& controller) {
  if (controller.is_over != 0) return;
  DeviceControl* control = device_control(program);
  const u64 tail = controller_mirror(program);
  const u64 now_ns = clock_ns();
  if (controller.is_running == 0) {
    controller_check_in(program, controller, now_ns);
    return;
  }
  if (program.rank != 0) {
    controller_follow(program, controller, now_ns);
    return;
  }
  if (program.residency_ns != 0 && now_ns - controller.begin_ns >= program.residency_ns) {
    controller.is_yielding = 1;
    store_relaxed(&control->mirror_exit, 1);  // advance admits no more, so the kernel drains
  }
  // The acquire hands over admission, with all that the last advance wrote.
  if (load_acquire(&control->idle) == 0) return;
  if (controller.is_idle == 0) {
    controller.is_idle = 1;
    controller.idle_ns = now_ns;
  }
  const bool leaves = load_relaxed(&control->mirror_exit) != 0;
  if (!leaves && tail > control->submit_head) {
    controller.is_idle = 0;
    store_relaxed(&control->idle, 0);
    store_relaxed_system(&host_control(program)->idle_since_ns, 0);
    const u64 step = load_relaxed(&control->steps_open);
    start_next_step(program, step, look_at(control), now_ns);
    return;
  }
  const bool lingered = program.linger_ns != 0 && now_ns - controller.idle_ns >= program.linger_ns;
  if (leaves || lingered) controller_end(program, controller);
}

}  // namespace gpurt
