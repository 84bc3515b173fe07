// candidates: the best of each chunk of a row. graphs/ops/candidates.py has the contract.
//
// A row's chunk is read once; what is kept stays sorted, and hardly any value gets past its last.
#pragma once
#include "context.hpp"

namespace gpurt {

struct candidates {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32 n = record.param[0], count = record.param[1], chunk = record.param[2];
    const u32 first = record.param[3];
    const u64 width = u64{(n + chunk - 1) / chunk} * count;
    const u32 begin = record.tile[0], end = record.tile[1];
    for (u32 row = 0; row < context.step->sample_count; ++row) {
      const u64 at = row * width + u64{record.tile[2]} * count;
      u32* const ids = arg<u32>(record, 2) + at;
      choose(arg<const f32>(record, 0) + u64{row} * n, begin, end, count, arg<f32>(record, 1) + at,
             ids);
      for (u32 i = 0; i < count; ++i) ids[i] += first;
    }
    return kFaultNone;
  }

 private:
  static void choose(const f32* x, u32 begin, u32 end, u32 count, f32* scores, u32* ids) {
    for (u32 i = 0; i < count; ++i) {
      scores[i] = -__builtin_inff();
      ids[i] = 0;
    }
    for (u32 i = begin; i < end; ++i) {
      if (!(x[i] > scores[count - 1])) continue;  // NaN is not above anything
      u32 to = count - 1;
      for (; to > 0 && x[i] > scores[to - 1]; --to) {
        scores[to] = scores[to - 1];
        ids[to] = ids[to - 1];
      }
      scores[to] = x[i];
      ids[to] = i;
    }
  }
};

}  // namespace gpurt
