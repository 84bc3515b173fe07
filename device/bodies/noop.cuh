// noop on the GPU: does nothing. Joins more edges than one record holds; measures an empty stage.
// Copy me: a body is one struct of its file's name with a static `run`; context.cuh is its
// contract.
#pragma once
#include "context.cuh"

namespace gpurt {

struct noop {
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    (void)task, (void)context;
  }
};

}  // namespace gpurt
