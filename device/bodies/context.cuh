// What a task body sees on the GPU besides its record, and how it reads its arguments.
//
// A body is a struct of the same name as its file with
//   __device__ static void run(const TaskRecord& task, const BodyContext& context);
// All threads of the team call it, converged. When it starts, all edges of the task are met and
// the team has passed a barrier; when all threads have returned, the runtime signals. So a body
// needs no barrier of its own but to share data inside the team: context.sync().
//
// A body with `kEntersEarly` starts before its counter edges are met: it fetches weights, and its
// own code, then calls wait_edges() (stream.cuh), once, and only then reads what other tasks wrote.
//
// A body may use context.scratch as it likes; its contents are undefined at the start. It must not
// store a NaN into a payload argument other than through canonical_*() (payload.hpp).
#pragma once
#include "../shared_memory.cuh"

// 1 if a task of the plan is about rows of a table: the generated bodies.gen.cuh says so.
#ifndef GPURT_OWN_ROWS
#define GPURT_OWN_ROWS 0
#endif
#include "context.hpp"

// Uniform for all threads and constant for the life of a launch, so the compiler may read its
// fields as instruction operands. The host writes it before each launch (512 bytes).
extern "C" __constant__ gpurt::Program gpurt_program;

namespace gpurt {

struct BodyContext {
  const Program* program;
  const StepState* step;
  const RowState* rows;    // [step->rows]
  const u32* sample_rows;  // [step->sample_count]: the row of each sampled row
  u32* sampled;            // [step->sample_count]: what `sample` chose
  const SlotState* slots;  // [program->slot_count]
  u8* scratch;             // shared memory of this team, 128-byte aligned
  u32 worker;
  u32 thread;  // of the team, from 0
  u64 step_index;
  u64 round;   // of the step's variant
  Slot* slot;  // the task's own
  static constexpr u32 scratch_bytes = kScratchBytes;
  static constexpr u32 team_threads = kTeamThreads;

  // Argument `i` in this round, null if optional and absent.
  GPURT_FN u64 place(const TaskRecord& task, u32 i) const {
    return arg_address(task, i, round, gpurt_program.payload_set_bytes);
  }
  template <class T>
  GPURT_FN T* address(const TaskRecord& task, u32 i) const {
    return at<T>(place(task, i));
  }

  // Barrier of the team: all of its threads, converged.
  GPURT_FN void sync() const { team_sync(); }
};

// Of an entered slot. Nothing but `scratch` hangs on who asks. Made where it is used: what a body
// does not read costs nothing, and the rest is computed from constants and the slot. Handed over by
// reference, all of it would lie in local memory, whose lines leave L1 with each acquire on the SM.
GPURT_FN BodyContext context_of(Slot& slot, u8* scratch) {
  const Program& program = gpurt_program;
  return {&program,
          task_step(program, slot.record),
          task_rows(program, slot.record),
          task_sample_rows(program, slot.record),
          step_sampled(program),
          at<const SlotState>(program.slots),
          scratch,
          blockIdx.x,
          threadIdx.x,
          slot.step,
          slot.round,
          &slot};
}

// Ends the launch with a Fault of this task. The caller goes on to its end, quickly: data no longer
// matters, barriers do. `waited_ns` is 0 unless it timed out.
__device__ __noinline__ void report_fault(const BodyContext& context, const TaskRecord& task,
                                          u32 kind, u32 detail0, u32 detail1, u32 detail2);

}  // namespace gpurt
