// Spans: what one worker did, kept in rings that the host reads afterwards.
//
// Owns: how a span is stored. One ring holds the newest spans of a worker, a second one those of
// every sample_period-th step, so that a long run keeps a sample of its whole life.
// Does not know: what spans mean (gpurt/trace/). Each ring has one writer; its count is released
// after the span, so a reader that acquires the count sees whole spans, except those that a lap of
// the ring is overwriting: it drops them by reading the count again (whole_spans in
// gpurt/executors/base.py).
#pragma once
#include "counter.hpp"

namespace gpurt {

constexpr u32 kSpanCountStride = 64;  // bytes between the counts of two workers
// On the GPU a count may be this far behind: a release for each span would cost as much as a
// signal. A host worker releases each one.
constexpr u32 kSpansUnpublished = 64;

// Span::chosen of a task that runs `expert` for `rows` rows.
GPURT_FN u32 chosen_word(u32 expert, u32 rows) {
  return rows == 0 ? 0 : rows << 16 | expert;
}

GPURT_FN void span_store(u64 ring, u64 counts, u32 capacity, u32 worker, const Span& span) {
  u64* count = at<u64>(counts + u64{worker} * kSpanCountStride);
  const u64 index = load_relaxed(count);  // its own last store: no other thread writes it
  at<Span>(ring)[u64{worker} * capacity + (index & (capacity - 1))] = span;
  store_release(count, index + 1);
}

// On the host. Ticks are of the worker's clock; no body waits for streamed weights.
// `begin` <= `met` <= `end`: claimed, edges met, signalled.
GPURT_FN void span_record(const Program& program, u32 worker, u32 task, u64 step, u64 begin,
                          u64 met, u64 end, u32 chosen) {
  if (program.span_capacity == 0) return;
  Span span;
  span.begin = begin;
  span.task = task;
  span.step = static_cast<u32>(step);
  span.wait = static_cast<u32>(met - begin);
  span.stall = 0;
  span.run = static_cast<u32>(end - met);
  span.chosen = chosen;
  span_store(program.spans, program.span_counts, program.span_capacity, worker, span);
  if (step % program.sample_period == 0)
    span_store(program.sampled_spans, program.sampled_counts, program.span_capacity, worker, span);
}

}  // namespace gpurt
