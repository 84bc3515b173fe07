// BodyList: the bodies of one compiled kernel by index, as TaskRecord::body counts them.
//
// The generated bodies.gen.cuh names the list; scheduler/persistent.cu documents that file. A body
// with `kWays` runs inside the hot loops; all others are called from outside it, each a function
// of its own, so that its registers and spills stay its own.
#pragma once
#include "context.cuh"

namespace gpurt {

constexpr u32 kNoBody = 0xFFFFFFFFu;

template <class Body>
concept HotBody = requires { Body::kWays; };

template <class Body>
__device__ __noinline__ void call_body(const TaskRecord& task, const BodyContext& context) {
  Body::run(task, context);
}

template <class... Bodies>
struct BodyList {
  // Of the hot body, kNoBody if there is none.
  GPURT_FN static constexpr u32 hot_index() {
    u32 index = 0, found = kNoBody;
    ((HotBody<Bodies> ? (found = index, ++index) : ++index), ...);
    return found;
  }

  GPURT_FN static void run_cold(const TaskRecord& task, const BodyContext& context) {
    u32 index = 0;
    (run_if<Bodies>(task.body == index++, task, context), ...);
  }

 private:
  template <class Body>
  GPURT_FN static void run_if(bool chosen, const TaskRecord& task, const BodyContext& context) {
    if constexpr (!HotBody<Body>) {
      if (chosen) call_body<Body>(task, context);
    }
  }
};

}  // namespace gpurt
