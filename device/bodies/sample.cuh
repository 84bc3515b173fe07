// sample on the GPU: one token for every sample row. The definition is in graphs/ops/sample.py.
// A tile is some of them.
//
// No sort. Logits are ordered by (value, then lower index); what is looked for is always the first
// element, in falling order, at which a running sum passes a target: of counts (top_k), or of
// probabilities (top_p, and the draw itself). `find` narrows it digit by digit by histograms.
// Probabilities are integers, exp(x - max) in units of 2^-40: their sums do not depend on the order
// of adding, so any team gives the same token. The sum of a prefix is the same whether or not
// something behind it was cut off; so top_k and top_p only change the total, never the search.
#pragma once
#include "elements.cuh"

namespace gpurt {

struct sample {
  static constexpr u32 kBins = 256;
  static constexpr u32 kLoads = 8;  // 16 bytes each
  // Coarse bins are 1/8 of a logit wide, from the largest down: they spread what a plain digit of
  // the bit pattern would put on one address.
  static constexpr f32 kBinsPerUnit = 8;

  struct Shared {  // in the team's scratch
    u32 low[kBins];
    u32 high[kBins];
    u64 warp_value[32];
    u64 above;  // result of a histogram walk: what lies before the bin, and which bin
    u32 bin;
    u32 index;
  };

  struct Row {
    const f32* logits;
    u32 vocab;
    bool payload;
    f32 max;
    f32 log2e_by_temperature;
  };

  struct Found {
    u32 key;     // of the element
    u32 equals;  // how many of equal key come before it, by index
    u64 above;   // sum over all larger keys
  };

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    static_assert(sizeof(Shared) <= BodyContext::scratch_bytes);
    Shared& shared = *reinterpret_cast<Shared*>(context.scratch);
    Row row;
    row.vocab = task.param[0];
    row.payload = (task.payload_mask & 1) != 0;
    const f32* logits = context.address<const f32>(task, 0);
    const u32 end = min(task.tile[1], context.step->sample_count);
    for (u32 j = task.tile[0]; j < end; ++j) {
      const RowState& state = context.rows[context.sample_rows[j]];
      const SlotState& slot = context.slots[state.slot];
      row.logits = logits + u64(j) * row.vocab;
      const u64 best = largest(row, shared, context);
      const u32 column = ~static_cast<u32>(best);
      if (best >> 32 >= key_of(__uint_as_float(0x7F800000u)) || best >> 32 <= kMinusInfinityKey) {
        if (context.thread == 0) report_fault(context, task, kFaultNonFinite, j, column, 0);
        return;
      }
      u32 token = column;
      if (slot.temperature > 0) {
        row.max = row.logits[column] + 0.0f;
        row.log2e_by_temperature = fminf(1.44269504f / slot.temperature, 1e30f);
        token = draw(row, slot, uniform_24(slot.seed, state.position), shared, context);
      }
      if (context.thread == 0) context.sampled[j] = token;
    }
  }

  static constexpr u32 kMinusInfinityKey = 0x007FFFFFu;

  // Order of floats as unsigned order. NaN sorts above all; -0 equals +0.
  __device__ static u32 key_of(f32 x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0xFFFFFFFFu;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  // splitmix64 of (seed, position), 24 bits: graphs/ops/sample.py has the same.
  __device__ static u32 uniform_24(u64 seed, u32 position) {
    u64 z = seed + (u64(position) + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<u32>((z ^ (z >> 31)) >> 40);
  }

  __device__ static u64 weight_of(const Row& row, f32 x) {
    const f32 p = exp2f((x - row.max) * row.log2e_by_temperature);
    return static_cast<u64>(p * 1099511627776.0f);
  }

  // Calls visit(index, logit) for this thread's share; the same share in every pass.
  template <class Visit>
  GPURT_FN static void each(const Row& row, const BodyContext& context, Visit visit) {
    if (row.vocab % 4 != 0) {  // rows are not aligned to 16 bytes then
      for (u32 i = context.thread; i < row.vocab; i += context.team_threads) {
        visit(i, row.logits[i]);
      }
      return;
    }
    const u32 fours = row.vocab / 4, lane = context.thread % 32;
    for (u32 base = context.thread - lane; base < fours; base += kLoads * context.team_threads) {
      uint4 x[kLoads];
      read<false>(row, context, base, x);
#pragma unroll
      for (u32 k = 0; k < kLoads; ++k) {
        const u32 i = base + lane + k * context.team_threads;
        if (i >= fours) break;
        visit(4 * i, __uint_as_float(x[k].x));
        visit(4 * i + 1, __uint_as_float(x[k].y));
        visit(4 * i + 2, __uint_as_float(x[k].z));
        visit(4 * i + 3, __uint_as_float(x[k].w));
      }
    }
  }

  // Fours base + lane, and each team_threads further, the last one for all behind it: all are in
  // flight before the first is used. POLL: until the logits have arrived, in the first pass over a
  // payload row; its granules are whole, and whole warps poll together.
  template <bool POLL>
  GPURT_FN static void read(const Row& row, const BodyContext& context, u32 base,
                            uint4 (&x)[kLoads]) {
    const u32 last = row.vocab / 4 - 1, first = base + context.thread % 32;
    u32 polls = 0;
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (u32 k = 0; k < kLoads; ++k) {
        const u32 i = min(first + k * context.team_threads, last);
        x[k] = ld_relaxed_b128(reinterpret_cast<u64>(row.logits + 4 * i));
        missing |= is_sentinel(x[k]);
      }
    } while (POLL && payload_missing(missing, polls));
  }

  // Key and inverted index of the largest logit, known to every thread. Every token takes this
  // pass, so four logits are ten instructions; a thread whose share may hold a NaN, which is above
  // all, goes over it once more by keys.
  __device__ __noinline__ static u64 largest(const Row& row, Shared& shared,
                                             const BodyContext& context) {
    u64 best = 0;
    if (row.vocab % 4 != 0 || !largest_of_fours(row, context, best)) {
      best = 0;
      each(row, context, [&](u32 i, f32 x) {
        const u64 here = u64(key_of(x)) << 32 | ~i;
        best = here > best ? here : best;
      });
    }
    return over_team(best, shared, context, [](u64 a, u64 b) { return a > b ? a : b; });
  }

  // Of this thread's share. False: it may hold a NaN.
  GPURT_FN static bool largest_of_fours(const Row& row, const BodyContext& context, u64& best) {
    return row.payload ? largest_of_fours<true>(row, context, best)
                       : largest_of_fours<false>(row, context, best);
  }
  template <bool POLL>
  GPURT_FN static bool largest_of_fours(const Row& row, const BodyContext& context, u64& best) {
    const u32 fours = row.vocab / 4, lane = context.thread % 32;
    f32 top = __uint_as_float(0xFF800000u);
    u32 at = 0;
    bool is_number = true;
    for (u32 base = context.thread - lane; base < fours; base += kLoads * context.team_threads) {
      uint4 x[kLoads];
      read<POLL>(row, context, base, x);
#pragma unroll
      for (u32 k = 0; k < kLoads; ++k) {
        const float4 v = float4_of(x[k]);
        const f32 most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
        const f32 sum = (v.x + v.y) + (v.z + v.w);  // NaN if one is, or if infinities meet
        is_number = is_number && sum == sum;
        if (most > top) top = most, at = base + lane + k * context.team_threads;
      }
    }
    at = 4 * min(at, fours - 1);
    const float4 v = load_piece(reinterpret_cast<const float4*>(row.logits + at));
    at += v.x == top ? 0 : v.y == top ? 1 : v.z == top ? 2 : 3;
    best = u64(key_of(top)) << 32 | ~at;
    return is_number;
  }

  // Sum of probabilities with a key above `key`.
  __device__ __noinline__ static u64 sum_above(const Row& row, u32 key, Shared& shared,
                                               const BodyContext& context) {
    u64 sum = 0;
    each(row, context, [&](u32, f32 x) { sum += key_of(x) > key ? weight_of(row, x) : 0; });
    return over_team(sum, shared, context, [](u64 a, u64 b) { return a + b; });
  }

  template <class Join>
  __device__ static u64 over_team(u64 value, Shared& shared, const BodyContext& context,
                                  Join join) {
    for (u32 step = 1; step < 32; step *= 2) {
      value = join(value, __shfl_xor_sync(~0u, value, step));
    }
    if (context.thread % 32 == 0) shared.warp_value[context.thread / 32] = value;
    context.sync();
    value = shared.warp_value[0];
    for (u32 w = 1; w < context.team_threads / 32; ++w) value = join(value, shared.warp_value[w]);
    context.sync();
    return value;
  }

  __device__ __noinline__ static u32 draw(const Row& row, const SlotState& slot, u32 uniform,
                                          Shared& shared, const BodyContext& context) {
    u64 total;
    if (slot.top_k > 0 && slot.top_k < row.vocab) {
      const Found cut = find<true>(row, slot.top_k - 1, shared, context);
      total = sum_above(row, cut.key, shared, context) +
              u64(cut.equals + 1) * weight_of(row, float_of(cut.key));
    } else {
      total = sum_above(row, 0, shared, context);
    }
    if (slot.top_p < 1.0f) {
      const double wanted = ceil(static_cast<double>(total) * static_cast<double>(slot.top_p));
      const u64 target = wanted < 1 ? 0 : static_cast<u64>(wanted) - 1;
      const Found cut = find<false>(row, target, shared, context);
      const u64 kept = cut.above + u64(cut.equals + 1) * weight_of(row, float_of(cut.key));
      total = kept < total ? kept : total;
    }
    const Found drawn = find<false>(row, __umul64hi(total, u64(uniform) << 40), shared, context);
    return index_of(row, drawn, shared, context);
  }

  __device__ static f32 float_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
  }

  // First element, in falling order, at which the running sum exceeds `target`. COUNT: every
  // element weighs 1, else its probability. The sum of all must exceed `target`.
  template <bool COUNT>
  __device__ __noinline__ static Found find(const Row& row, u64 target, Shared& shared,
                                            const BodyContext& context) {
    Found found{0, 0, 0};
    const f32 max = float_of(key_of(COUNT ? row.max : row.max));
    u32 coarse = 0;
    for (u32 round = 0; round < 5; ++round) {  // coarse bin, then the key's bytes from the top
      clear(shared, context);
      const u32 shift = 32 - 8 * round;
      each(row, context, [&](u32, f32 x) {
        const u32 key = key_of(x), bin = coarse_bin(max, x);
        if (round > 0 && bin != coarse) return;
        if (round > 1 && (key ^ found.key) >> (shift + 8) != 0) return;
        const u64 weight = COUNT ? 1 : weight_of(row, x);
        if (weight != 0) add(shared, round == 0 ? bin : key >> shift & 255, weight);
      });
      context.sync();
      if (context.thread < 32) walk(shared, target - found.above, context.thread);
      context.sync();
      found.above += shared.above;
      if (round == 0) {
        coarse = shared.bin;
      } else {
        found.key |= shared.bin << shift;
      }
      context.sync();
    }
    const u64 weight = COUNT ? 1 : weight_of(row, float_of(found.key));
    found.equals = static_cast<u32>((target - found.above) / (weight == 0 ? 1 : weight));
    return found;
  }

  // 255 holds the largest: bins fall as the keys do.
  __device__ static u32 coarse_bin(f32 max, f32 x) {
    const f32 distance = fminf((max - x) * kBinsPerUnit, 255.0f);
    return 255 - static_cast<u32>(distance);
  }

  __device__ static void clear(Shared& shared, const BodyContext& context) {
    for (u32 b = context.thread; b < kBins; b += context.team_threads) {
      shared.low[b] = 0;
      shared.high[b] = 0;
    }
    context.sync();
  }

  // 64-bit sums from 32-bit atomics, which shared memory has natively: who overflows, carries.
  __device__ static void add(Shared& shared, u32 bin, u64 weight) {
    const u32 low = static_cast<u32>(weight);
    const u32 before = atomicAdd(&shared.low[bin], low);
    const u32 high = static_cast<u32>(weight >> 32) + (before + low < before ? 1 : 0);
    if (high != 0) atomicAdd(&shared.high[bin], high);
  }

  // One warp: the first bin, from 255 down, where the running sum exceeds `target`.
  __device__ static void walk(Shared& shared, u64 target, u32 lane) {
    u64 sum = 0;
    for (u32 i = 0; i < 8; ++i) sum += bin_sum(shared, 255 - (lane * 8 + i));
    u64 through = sum;
    for (u32 step = 1; step < 32; step *= 2) {
      const u64 lower = __shfl_up_sync(~0u, through, step);
      through += lane >= step ? lower : 0;
    }
    const u32 passed = __ballot_sync(~0u, through > target);
    // Nothing passes only if the target was not below the sum of all: take the last bin then.
    const u32 chosen = passed == 0 ? 31 : __ffs(static_cast<i32>(passed)) - 1;
    if (lane != chosen) return;
    u64 running = through - sum;
    u32 bin = 255 - lane * 8;
    for (u32 i = 0; i < 7; ++i, --bin) {
      const u64 here = bin_sum(shared, bin);
      if (running + here > target) break;
      running += here;
    }
    shared.above = running;
    shared.bin = bin;
  }

  __device__ static u64 bin_sum(const Shared& shared, u32 bin) {
    return u64(shared.high[bin]) << 32 | shared.low[bin];
  }

  // Index of the element: number `equals` among those of the same key.
  __device__ static u32 index_of(const Row& row, const Found& found, Shared& shared,
                                 const BodyContext& context) {
    if (found.equals == 0) {
      u64 first = ~u64(0);
      each(row, context, [&](u32 i, f32 x) {
        if (key_of(x) == found.key && i < first) first = i;
      });
      return static_cast<u32>(
          over_team(first, shared, context, [](u64 a, u64 b) { return a < b ? a : b; }));
    }
    u32 index = 0;
    u64 before = 0;
    for (u32 round = 0; round < 3; ++round) {  // bytes of the index; 255 - byte: ascending
      clear(shared, context);
      const u32 shift = 16 - 8 * round;
      each(row, context, [&](u32 i, f32 x) {
        if (key_of(x) != found.key || (round > 0 && (i ^ index) >> (shift + 8) != 0)) return;
        add(shared, 255 - (i >> shift & 255), 1);
      });
      context.sync();
      if (context.thread < 32) walk(shared, found.equals - before, context.thread);
      context.sync();
      before += shared.above;
      index |= (255 - shared.bin) << shift;
      context.sync();
    }
    return index;
  }
};

}  // namespace gpurt
