// rearm on the GPU: fills bytes of the payload set that the next round writes with the sentinel.
//
// Plain stores are enough: the planner orders this task after the last reader of that set (a round
// ago) and before its next writer through `advance`, whose opening of the next step is a release.
#pragma once
#include "context.cuh"

namespace gpurt {

struct rearm {
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u64 set = (context.round + 1) & 1;
    const u64 begin = u64(task.tile[1]) << 32 | task.tile[0];
    const u64 size_bytes = u64(task.param[1]) << 32 | task.param[0];
    const u64 base = task.addr[0] + set * gpurt_program.payload_set_bytes + begin;
    uint4* to = reinterpret_cast<uint4*>(base);
    const uint4 sentinel =
        make_uint4(kPayloadSentinel, kPayloadSentinel, kPayloadSentinel, kPayloadSentinel);
    for (u64 at = context.thread; at < size_bytes / 16; at += context.team_threads) {
      to[at] = sentinel;
    }
  }
};

}  // namespace gpurt
