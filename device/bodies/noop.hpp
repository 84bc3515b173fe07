// noop: does nothing. Joins more edges than one record holds, and measures an empty stage.
// Copy me: a body is one struct with a static `run`.
#pragma once
#include "context.hpp"

namespace gpurt {

struct noop {
  static u32 run(const TaskRecord& task, BodyContext& context) {
    (void)task, (void)context;
    return kFaultNone;
  }
};

}  // namespace gpurt
