// Which rows a matvec on the GPU is about: all of the step or those that want logits, or the same
// of a table that an earlier task made (kTaskOwnRows). Kernels of plans without tables hold no word
// of it.
#pragma once
#include "../stream.cuh"
#include "context.cuh"

namespace gpurt {

struct MatvecStep {
  // How many there are. Edges must be met where the rows are a table's.
  GPURT_FN static u32 count(const TaskRecord& task, bool sampled) {
    if (has_own_rows(task)) {
      const StepState* table = task_step(gpurt_program, task);
      return sampled ? table->sample_count : table->rows;
    }
    return sampled ? shared().sample_count : shared().rows;
  }

  // The most there can be: known before any edge is met.
  GPURT_FN static u32 most(const TaskRecord& task, bool sampled) {
    if (has_own_rows(task)) {
      const u64 bytes = task.addr[kAddrSampleRows] - task.addr[kAddrRows] - sizeof(StepState);
      return static_cast<u32>(bytes / sizeof(RowState));
    }
    return sampled ? shared().sample_count : shared().rows;
  }

  // The row that belongs to sample row `j`.
  GPURT_FN static u32 sample_row(const TaskRecord& task, u32 j) {
    return task_sample_rows(gpurt_program, task)[j];
  }

  // A step that samples nothing makes no table, so no weights are streamed for its rows: the loader
  // (scheduler/loader.cuh) gives the task one stage without bytes. Both decide by the same word.
  GPURT_FN static bool is_void(const TaskRecord& task) {
    return has_own_rows(task) && shared().sample_count == 0;
  }

  GPURT_FN static void pass_void(StageCursor& cursor) {
    wait_stage(cursor);
    release_stage(cursor);
    cursor.advance();
  }
};

}  // namespace gpurt
