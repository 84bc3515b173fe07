// What a task body sees besides its record, and how it reads its arguments and parameters.
//
// Host part. Bodies for the device take the same record and helpers; scheduler/persistent.cu has
// their context (team, shared memory).
#pragma once
#include "../counter.hpp"
#include "../payload.hpp"
#include "../task_record.hpp"

// On the GPU 0 for plans without tables: their kernels hold no word of it.
#ifndef GPURT_OWN_ROWS
#define GPURT_OWN_ROWS 1
#endif

namespace gpurt {

// Parameter `i` as a float: the record holds its bit pattern.
GPURT_FN f32 param_f32(const TaskRecord& task, u32 i) {
  union {
    u32 bits;
    f32 value;
  } pun;  // defined by gcc, clang and nvcc; memcpy needs a header that NVRTC lacks
  pun.bits = task.param[i];
  return pun.value;
}

// Argument `i` as a pointer, null if optional and absent. On the host: plans for it have no payload
// edges, and the executor has put the step's set of symmetric buffers into the record.
template <class T>
GPURT_FN T* arg(const TaskRecord& task, u32 i) {
  return at<T>(task.addr[i]);
}

// Where `address`, in this rank's symmetric memory, lies in that of another rank.
template <class T>
GPURT_FN T* on_rank(const Program& program, T* address, u32 rank) {
  return at<T>(reinterpret_cast<u64>(address) - program.symmetric +
               at<const u64>(program.peers)[rank]);
}

// ---- where StepState's tails lie -------------------------------------------------------------
GPURT_FN StepState* step_state(const Program& program) {
  return at<StepState>(program.step_state);
}
GPURT_FN RowState* step_rows(const Program& program) {
  return at<RowState>(program.step_state + sizeof(StepState));
}
GPURT_FN u32* step_sample_rows(const Program& program) {
  return at<u32>(program.step_state + sizeof(StepState) +
                 u64{program.rows_capacity} * sizeof(RowState));
}
GPURT_FN u32* step_sampled(const Program& program) {
  return step_sample_rows(program) + program.rows_capacity;
}

// ---- the rows that a task is about: the step's, or those of a table ---------------------------
constexpr bool kOwnRows = GPURT_OWN_ROWS != 0;

GPURT_FN bool has_own_rows(const TaskRecord& task) {
  return kOwnRows && (task.flags & kTaskOwnRows) != 0;
}
GPURT_FN const StepState* task_step(const Program& program, const TaskRecord& task) {
  return at<const StepState>(has_own_rows(task) ? task.addr[kAddrRows] : program.step_state);
}
GPURT_FN const RowState* task_rows(const Program& program, const TaskRecord& task) {
  return reinterpret_cast<const RowState*>(task_step(program, task) + 1);
}
GPURT_FN const u32* task_sample_rows(const Program& program, const TaskRecord& task) {
  return has_own_rows(task) ? at<const u32>(task.addr[kAddrSampleRows]) : step_sample_rows(program);
}

#if !GPURT_ON_DEVICE

// One per worker, reused for every task. A body returns a FaultKind; kFaultNone is success.
struct BodyContext {
  const Program* program;
  const StepState* step;
  const RowState* rows;    // [step->rows]
  const u32* sample_rows;  // [step->sample_count]: the row of each sampled row
  u32* sampled;            // [step->sample_count]: what `sample` chose
  const SlotState* slots;  // [program->slot_count]
  u8* scratch;             // this worker's own, 64-byte aligned
  u64 scratch_bytes;
  u32 worker;
  u32 chosen;     // Span::chosen, set by a body that runs an expert
  u32 detail[4];  // for the Fault; kFaultNonFinite: row, column, argument index
};

using HostBody = u32 (*)(const TaskRecord&, BodyContext&);

// The rows that a task is about.
inline void choose_rows(const TaskRecord& task, BodyContext& context) {
  context.step = task_step(*context.program, task);
  context.rows = task_rows(*context.program, task);
  context.sample_rows = task_sample_rows(*context.program, task);
}

#endif

}  // namespace gpurt
