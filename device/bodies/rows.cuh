// Which rows of the step a tile covers: [tile[2], tile[3]), up to the step's; tile[3] = 0: all.
#pragma once
#include "context.cuh"

namespace gpurt {

struct TileRows {
  u32 begin, end;  // none if begin >= end

  GPURT_FN static TileRows of(const TaskRecord& task, const BodyContext& context) {
    const u32 rows = context.step->rows;
    const u32 end = task.tile[3];
    return {task.tile[2], end == 0 || end > rows ? rows : end};
  }
};

}  // namespace gpurt
