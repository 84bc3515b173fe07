// What a launch starts from, where host code can reach all of a program's memory.
//
// Counters are never reset while workers run, and only here at all. The host executor and the
// simulation call this; gpurt/executors/cuda.py does the same to device memory with copies.
#pragma once
#include "advance.hpp"

namespace gpurt {

inline void zero_words(u64 address, u64 size_bytes) {
  for (u64 i = 0; i < size_bytes / sizeof(u64); ++i) at<u64>(address)[i] = 0;
}

// By the one thread that launches, while no worker runs. Requests that wait in the ring stay there.
inline void reset_for_launch(const Program& program) {
  const Program& p = program;
  zero_words(p.counters, u64{p.counter_count} * kCounterStride);
  zero_words(p.arrived, u64{p.task_count} * sizeof(u64));
  zero_words(p.ready_slots, u64{p.task_count} * sizeof(u64));
  zero_words(p.cursors, u64{p.segment_count} * sizeof(Cursor));
  zero_words(p.held_tickets, u64{p.worker_count} * p.segment_count * sizeof(u64));
  zero_words(p.slots, u64{p.slot_count} * sizeof(SlotState));
  zero_words(p.device_control, sizeof(DeviceControl));
  zero_words(p.symmetric + p.rank_counters,
             u64{p.rank_counter_count} * p.rank_count * kCounterStride);
  HostControl* host = host_control(p);
  DeviceControl* control = device_control(p);
  control->steps_open = p.first_step;
  control->submit_head = host->submit_head;
  control->idle = 1;
  control->launch = host->launch;
  // What a launch is for begins with a prompt.
  fix_turn(p, p.first_step, p.variant_count - 1);
  host->fault = Fault{};
  host->exit_request = 0;
  host->abort_request = 0;
  host->workers_in = 0;
  host->ranks_in = 0;
  host->heartbeat = 0;
  store_release_system(&host->kernel_state, kKernelAbsent);
}

}  // namespace gpurt
