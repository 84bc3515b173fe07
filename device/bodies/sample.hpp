// sample: one token for every sample row, from its logits and its request's sampling values.
//
// The definition, which sample.cuh and graphs/ops/sample.py follow too:
//   temperature 0    the largest logit, the lowest index among equals
//   else             w = exp((logit - largest) / temperature); candidates by falling logit, equal
//                    ones by index; the first top_k of them (0: all); then the fewest of those
//                    whose sum reaches top_p of the sum of those; then the first whose running sum
//                    exceeds u times the sum of what is left
//   u                (splitmix64(seed + (position + 1) * 0x9e3779b97f4a7c15) >> 40) / 2^24 with
//                    the finaliser below; position is the sampled row's: a counter, no state, so a
//                    token depends on its request alone and not on what else the step carries
//   NaN, +infinity   a Fault with the logits' row and column; also if all are -infinity
//
// Sorting 49,152 candidates would cost more than the model's last layer, and the wanted token is
// nearly always among the first few: candidates are sorted lazily, a growing prefix at a time.
#pragma once
#include <algorithm>
#include <functional>

#include "context.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "workspace.hpp"

namespace gpurt::host {

constexpr u32 kNoColumn = 0xffffffffU;

struct LogitScan {
  f32 largest;
  u32 index;       // its first place
  u32 bad_column;  // the first NaN or infinity that makes a fault, or kNoColumn
};

/// The number in [0, 1) of a request's seed and a row's position.
inline f64 sample_uniform(u64 seed, u32 position) {
  u64 z = seed + (u64{position} + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return static_cast<f64>((z ^ (z >> 31)) >> 40) * 0x1p-24;
}

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "sample_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt::host {

/// Maps floats to integers so that larger floats come first. -0 and 0 are equal.
inline u32 falling_key(f32 value) {
  const u32 bits = std::bit_cast<u32>(value + 0.0F);
  return (bits & 0x80000000U) ? bits : 0x7fffffffU - bits;
}

/// Candidates in the order of the definition, sorted as far as somebody asked.
class Candidates {
 public:
  /// Keeps tokens whose weight is not 0: the others can never be picked.
  Candidates(const f32* logits, const f32* weights, u32 count, u64* keys)
      : weights_(weights), keys_(keys) {
    for (u32 i = 0; i < count; ++i) {
      if (weights[i] == 0.0F) continue;
      total_ += static_cast<f64>(weights[i]);
      keys_[size_++] = (u64{falling_key(logits[i])} << 32) | i;
    }
  }

  u32 size() const { return size_; }
  f64 total() const { return total_; }
  u32 token(u32 rank) { return static_cast<u32>(key(rank)); }
  f64 weight(u32 rank) { return static_cast<f64>(weights_[token(rank)]); }

 private:
  u64 key(u32 rank) {
    while (rank >= sorted_) {
      const u32 step = std::min(std::max(sorted_, 64U), size_ - sorted_);
      u64* const begin = keys_ + sorted_;
      if (sorted_ + step < size_) std::nth_element(begin, begin + step, keys_ + size_);
      std::sort(begin, begin + step);
      sorted_ += step;
    }
    return keys_[rank];
  }

  const f32* weights_;
  u64* keys_;
  u32 size_ = 0;
  u32 sorted_ = 0;
  f64 total_ = 0.0;
};

/// The token at `uniform` of the distribution that `slot` asks for.
inline u32 pick_token(Candidates& candidates, const SlotState& slot, f64 uniform) {
  u32 kept = candidates.size();
  f64 total = candidates.total();
  if (slot.top_k != 0 && slot.top_k < kept) {
    kept = slot.top_k;
    total = 0.0;
    for (u32 i = 0; i < kept; ++i) total += candidates.weight(i);
  }
  if (slot.top_p < 1.0F) {
    const f64 enough = static_cast<f64>(slot.top_p) * total;
    f64 running = 0.0;
    u32 count = 0;
    while (count < kept) {
      running += candidates.weight(count++);
      if (running >= enough) break;
    }
    kept = count;
    total = running;
  }
  const f64 target = uniform * total;
  f64 running = 0.0;
  for (u32 i = 0; i < kept; ++i) {
    running += candidates.weight(i);
    if (running > target) return candidates.token(i);
  }
  return candidates.token(kept - 1);  // rounding left the running sum short of the total
}

}  // namespace gpurt::host

namespace gpurt {

struct sample {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    using W = host::Workspace;
    const f32* const logits = arg<const f32>(record, 0);
    u32* const sampled = arg<u32>(record, 1);
    const u32 vocab = record.param[0];
    for (u32 j = 0; j < context.step->sample_count; ++j) {
      const f32* const row = logits + j * u64{vocab};
      const host::LogitScan scan = GPURT_AT_LEVEL(scan_logits, row, vocab);
      if (scan.bad_column != host::kNoColumn) {
        context.detail[0] = j;
        context.detail[1] = scan.bad_column;
        context.detail[2] = 0;  // argument index of `logits`
        return kFaultNonFinite;
      }
      const RowState& state = context.rows[context.sample_rows[j]];
      const SlotState& slot = context.slots[state.slot];
      if (slot.temperature == 0.0F) {
        sampled[j] = scan.index;
        continue;
      }
      const u64 padded = host::padded_lanes(vocab);
      W workspace(context, W::padded<f32>(padded) + W::padded<u64>(vocab));
      f32* const weights = workspace.take<f32>(padded);
      GPURT_AT_LEVEL(weigh_logits, row, vocab, scan.largest, slot.temperature, weights);
      host::Candidates candidates(row, weights, vocab, workspace.take<u64>(vocab));
      const host::f64 uniform = host::sample_uniform(slot.seed, state.position);
      sampled[j] = host::pick_token(candidates, slot, uniform);
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
