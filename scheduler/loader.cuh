// Loader: the warp that runs ahead of its team. It takes tasks, brings their records into the slots
// and their weights into the ring, and ends the team's loop.
//
//   take (TaskSource) -> record copy -> slot_full        up to kSlotCount tasks ahead if static
//   its stages, in order: wait stage_empty -> bulk copy -> stage_full
//
// One lane does it all: a bulk copy takes one thread about 115 ns to issue, a 32 KB stage takes
// the memory a microsecond. Nothing in here blocks but the ends of rings: a queue that is still
// empty never holds up the stream of a task already taken.
// Does not know: edges. Weights depend on nothing, so they are fetched before any edge is met. But a
// `ready` slot that nobody fills is waited for here alone, so here it times out.
#pragma once
#include "controller.hpp"
#include "stream.cuh"
#include "task_source.hpp"

namespace gpurt {

// A task taken from a shared queue must not lie behind another in one worker's hands while others
// are idle: one runs, the next one's record and weights are under way.
constexpr u32 kQueueAhead = 2;

struct Loader {
  TaskSource source;
  u32 fetched;   // slots filled
  u32 freed;     // slots given back by the storer
  u32 streamed;  // slots whose weights are all under way
  u32 left;      // bytes of slot `streamed` still to copy
  bool is_open;  // slot `streamed`'s record was read
  u64 from;
  u32 issued;  // stages filled
  StageCursor cursor;

  __device__ void start() {
    source.start(gpurt_program, blockIdx.x);
    fetched = freed = streamed = left = issued = 0;
    from = 0;
    is_open = false;
    cursor = {0, 0};
  }

  // ---- records ----------------------------------------------------------------------------------
  __device__ bool fetch() {
    while (freed != fetched &&
           mbarrier_test_wait(shared_address(&shared().slot_empty[freed % kSlotCount]),
                              slot_parity(freed)))
      ++freed;
    if (fetched - freed >= slots_ahead()) return false;
    u32 task = 0;
    u64 step = 0;
    if (source.next(task, step) != Next::kTask) return false;
    Slot& slot = slot_of(fetched);
    slot.step = step;
    slot.kind = kSlotTask;
    const u64 record = gpurt_program.records + u64{task} * sizeof(TaskRecord);
#pragma unroll
    for (u32 i = 0; i < sizeof(TaskRecord) / 16; ++i)
      copy16_to_shared(shared_address(&slot.record) + i * 16, record + i * 16);
    const u32 full = shared_address(&shared().slot_full[fetched % kSlotCount]);
    mbarrier_arrive_after_copies(full);
    mbarrier_arrive(full);  // a release: step and kind are visible with the record
    ++fetched;
    return true;
  }

  // ---- weights ----------------------------------------------------------------------------------
  __device__ bool stream() {
    if (!is_open) {
      if (streamed == fetched) return false;
      const u32 full = shared_address(&shared().slot_full[streamed % kSlotCount]);
      if (!mbarrier_test_wait(full, slot_parity(streamed))) return false;
      from = slot_of(streamed).record.stream_base;
      left = slot_of(streamed).record.stream_bytes;
      is_open = true;
    }
    if (left == 0) {
      is_open = false;
      ++streamed;
      return true;
    }
    // The phase before a barrier's first counts as complete, so a fresh stage is empty.
    const u32 empty = shared_address(&shared().stage_empty[cursor.stage]);
    if (!mbarrier_test_wait(empty, cursor.parity ^ 1)) return false;
    const u32 bytes = left < kStageBytes ? left : kStageBytes;
    const u32 full = shared_address(&shared().stage_full[cursor.stage]);
    mbarrier_arrive_expect(full, bytes);
    bulk_copy_to_shared(shared_address(shared().ring[cursor.stage]), from, bytes, full);
    from += bytes;
    left -= bytes;
    ++issued;
    cursor.advance();
    return true;
  }

  // Nothing could be done: let the hardware wait for what the loader needs next. A spin would take
  // issue slots from the team; a queue in global memory has nothing to wait on but polls.
  __device__ void rest() {
    constexpr u32 kRestNs = 1000;  // abort and exit are looked at on each 64th rest
    if (is_open) {
      mbarrier_try_wait_for(shared_address(&shared().stage_empty[cursor.stage]), cursor.parity ^ 1,
                            kRestNs);
    } else if (streamed != fetched) {
      mbarrier_try_wait_for(shared_address(&shared().slot_full[streamed % kSlotCount]),
                            slot_parity(streamed), kRestNs);
    } else if (fetched - freed >= slots_ahead()) {
      mbarrier_try_wait_for(shared_address(&shared().slot_empty[freed % kSlotCount]),
                            slot_parity(freed), kRestNs);
    }
  }

  __device__ u32 slots_ahead() const {
    return source.policy == kPolicyStatic ? kSlotCount : kQueueAhead;
  }

  // ---- the end ----------------------------------------------------------------------------------
  __device__ static bool must_leave() {
    const DeviceControl* control = at<const DeviceControl>(gpurt_program.device_control);
    return load_relaxed(&control->abort) != 0 || load_relaxed(&control->exit) != 0;
  }

  // What a wait of this block noted (spin.cuh), for the host.
  __device__ static void pass_on_fault() {
    const FaultNote& note = shared().fault;
    if (*const_cast<const volatile u32*>(&note.kind) == kFaultNone) return;
    __threadfence_block();  // pairs with the note's: its kind is written last
    const Slot& slot = slot_of(note.turn);
    Fault fault = {};
    fault.kind = note.kind;
    fault.worker = blockIdx.x;
    fault.task = slot.record.task_index;
    fault.counter = note.counter;
    fault.step = slot.step;
    fault.seen = note.seen;
    fault.needed = note.needed;
    fault.waited_ns = note.waited_ns;
    for (u32 i = 0; i < 3; ++i) fault.detail[i] = note.detail[i];
    raise_fault(gpurt_program, fault);
  }

  // The team drains its slots, then finds the last one. Copies under way land before the block
  // may end.
  __device__ void leave() {
    pass_on_fault();
    set_leaving();
    const u32 empty = shared_address(&shared().slot_empty[fetched % kSlotCount]);
    while (!mbarrier_try_wait(empty, slot_parity(fetched) ^ 1)) {
    }
    slot_of(fetched).kind = kSlotLeave;
    const u32 full = shared_address(&shared().slot_full[fetched % kSlotCount]);
    mbarrier_arrive(full);
    mbarrier_arrive(full);
    const u32 last = issued < kStageCount ? issued : kStageCount;
    for (u32 i = 0; i < last; ++i) {
      // Stage of the i-th newest copy, and the parity of the phase that it completes.
      const u32 index = issued - 1 - i;
      const u32 stage_full = shared_address(&shared().stage_full[index % kStageCount]);
      while (!mbarrier_try_wait(stage_full, index / kStageCount & 1)) {
      }
    }
  }
};

// Names the first task of the segment that lacks an edge: a slot belongs to no task yet.
__device__ __noinline__ void report_empty_slot(const TaskSource& source, u64 waited_ns) {
  const Program& program = gpurt_program;
  Fault fault = {};
  fault.kind = kFaultQueueTimeout;
  fault.worker = blockIdx.x;
  fault.task = source.begin;
  fault.step = source.step;
  fault.waited_ns = waited_ns;
  bool found = false;
  for (u32 task = source.begin; task < source.end && !found; ++task) {
    const TaskRecord& record = at<const TaskRecord>(program.records)[task];
    for (u32 i = 0; i < record.wait_count && !found; ++i) {
      fault.seen = load_acquire(counter_address(program, record.wait[i].counter));
      fault.needed = counter_target(program, record.wait[i], source.step);
      found = fault.seen < fault.needed;
      fault.task = task;
      fault.counter = record.wait[i].counter;
    }
  }
  raise_fault(program, fault);
}

// Whether this block has waited too long for a `ready` slot of an open step, with nothing else in
// its hands. `begin_ns` is 0 after any progress.
__device__ inline bool is_starved(const Loader& loader, u64& begin_ns) {
  const DeviceControl* control = at<const DeviceControl>(gpurt_program.device_control);
  const TaskSource& source = loader.source;
  const u64 now = clock_ns();
  if (source.policy != kPolicyReady || loader.freed != loader.fetched ||
      load_acquire(&control->steps_open) <= source.step || begin_ns == 0) {
    begin_ns = now;
    return false;
  }
  if (now - begin_ns <= gpurt_program.wait_timeout_ns) return false;
  report_empty_slot(source, now - begin_ns);
  return true;
}

__device__ __noinline__ void run_loader() {
  if (threadIdx.x % 32 != 0) return;
  add_acq_rel(&at<DeviceControl>(gpurt_program.device_control)->workers_in, 1);
  Loader loader;
  loader.start();
  u64 begin_ns = 0;
  for (u32 polls = 1; !is_leaving();) {
    const bool fetched = loader.fetch();
    if (loader.stream() || fetched) {
      begin_ns = 0;
      continue;
    }
    loader.rest();
    if (is_look(polls++) && (Loader::must_leave() || is_starved(loader, begin_ns))) break;
  }
  loader.leave();
}

}  // namespace gpurt
