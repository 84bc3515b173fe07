// Slow steps: which they are, and how a worker keeps their spans.
//
//   advance, at the end of step s:     longer than its bound? -> slow_step = s + 1
//   every worker, before step s + 1:   slow_step == s + 1?    -> its spans of s go to the sampled
//   ring
//
// A worker's own ring still has them then. One that comes so late that a further step was slow
// keeps nothing: the host drops steps that are not whole. The GPU's storer keeps none yet: one
// thread that copies a hundred spans would hold up its signals.
#pragma once
#include "ranks.hpp"
#include "trace.hpp"

namespace gpurt {

// A bound falls by 1/256 a step: what was slow long ago does not hide what is slow now.
constexpr u32 kSlowBoundShift = 8;

// Of prefill steps, and of all others: [0] and [1].
GPURT_FN void mark_if_slow(DeviceControl* control, const StepSummary& summary, u64 end_ns) {
  u64* bound_ns = &control->slow_bound_ns[summary.phase == kPhasePrefill ? 0 : 1];
  const u64 length_ns = end_ns - summary.begin_ns;
  if (length_ns < *bound_ns) {
    *bound_ns -= *bound_ns >> kSlowBoundShift;
  } else {
    *bound_ns = length_ns;
    store_relaxed(&control->slow_step, summary.step + 1);  // steps_open releases it
  }
}

// step: the one that this worker is about to begin.
GPURT_FN void keep_if_slow(const Program& program, u32 worker, u64 step) {
  if (program.span_capacity == 0 || step == 0) return;
  if (load_relaxed(&device_control(program)->slow_step) != step) return;
  if ((step - 1) % program.sample_period == 0) return;  // it is in the sampled ring already
  const u32 slow = static_cast<u32>(step - 1), capacity = program.span_capacity;
  const Span* ring = at<const Span>(program.spans) + u64{worker} * capacity;
  const u64 end = load_relaxed(at<u64>(program.span_counts + u64{worker} * kSpanCountStride));
  u64 begin = end;
  while (begin > 0 && end - begin < capacity && ring[(begin - 1) & (capacity - 1)].step == slow)
    --begin;
  for (; begin < end; ++begin)
    span_store(program.sampled_spans, program.sampled_counts, capacity, worker,
               ring[begin & (capacity - 1)]);
}

}  // namespace gpurt
