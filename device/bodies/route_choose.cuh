// route for steps of many rows, first half: each row's experts and weights, 16 rows a task.
//
// graphs/ops/route_rows_cuda.py has the contract. Rows choose as in route.cuh, by the same code.
#pragma once
#include "route.cuh"
#include "rows.cuh"

namespace gpurt {

struct route_choose {
  static constexpr u32 kArgChosen = 2;

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
    if (rows.begin >= rows.end) return;  // all threads
    route::Scratch& scratch = *reinterpret_cast<route::Scratch*>(context.scratch);
    const u32 experts = task.param[route::kExperts], top_k = task.param[route::kTopK];
    const u32 count = rows.end - rows.begin, warp = context.thread / 32;
    // As if the step began with the first of them.
    TaskRecord view = task;
    view.addr[0] += u64{rows.begin} * experts * 4;
    BodyContext of_view = context;
    of_view.rows += rows.begin;
    const u32 warps = min(context.team_threads / 32, route::kKeyWords / experts);
#pragma unroll 1
    for (u32 row = warp; warp < warps && row < count; row += warps)
      route::choose(view, of_view, scratch, row, scratch.keys + warp * experts, true);
    context.sync();
    if (route::stops(view, of_view, scratch, count, rows.begin)) return;
    u32* to = arg<u32>(task, kArgChosen) + u64{rows.begin} * top_k * 2;
    for (u32 p = context.thread; p < count * top_k; p += context.team_threads) {
      to[2 * p] = scratch.chosen[p];
      to[2 * p + 1] = __float_as_uint(scratch.weight[p]);
    }
  }
};

}  // namespace gpurt
