// What a row's experts score, at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// p: what weighs; scores: what selects. Both have room up to the next kPadLanes; what they hold
/// past the experts is never read.
GPURT_SIMD_FN void score_experts(const RouteTask& task, const f32* logits, f32* p, f32* scores) {
  const u32 count = task.experts;
  const Vf one = splat(1.0F);
  copy_row(logits, scores, count, padded_lanes(count));
  if (task.kind == kRouteSigmoid) {
    for (u32 i = 0; i < count; i += kLanes) {
      const Vf v = div(one, add(one, exp_of(sub(splat(0.0F), load(scores + i)))));
      store(p + i, v);
      store(scores + i, v);
    }
  } else {
    f32 largest = logits[0];
    for (u32 i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    f32 total = 0.0F;
    for (u32 i = 0; i < count; i += kLanes) {
      store(p + i, exp_of(sub(load(scores + i), splat(largest))));
      for (u32 t = i; t < i + kLanes && t < count; ++t) total += p[t];
    }
    for (u32 i = 0; i < count; i += kLanes) store(p + i, div(load(p + i), splat(total)));
  }
  if (!task.bias) return;
  for (u32 i = 0; i < count; ++i) scores[i] += task.bias[i];
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
