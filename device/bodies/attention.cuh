// attention on the GPU: q/k norm, rotary embedding, the cache write, then attention, per kv head.
//
// The contract is in graphs/ops/attention.py. A task handles all rows of the step for one kv head
// and its G query heads:
//   1. every group of D/8 lanes takes a (row, key or value) vector: norm, rotate, into the cache
//   2. team barrier: rows of one sequence see the keys that earlier rows of this step wrote
//   3. chunk c of a sequence's positions belongs to virtual warp c % 16, whatever the team's size;
//      each folds its chunks by running softmax into a partial (max, sum, D outputs) a query head
//   4. partials are merged in virtual-warp order
// So the order of sums hangs on positions alone: not on rows, context, team or worker. Every
// multiply-add is written out (fmaf, or NVRTC's --fmad=false), so no instance of the template
// contracts another pair.
//
// A lane holds 8 consecutive dimensions: D/8 lanes read one position (16 bytes a lane in a 16-bit
// cache), 32/(D/8) positions at a time, kBatch times before the first use.
#pragma once
#include "elements.cuh"

namespace gpurt {

constexpr u32 kVirtualWarps = 16;

// CACHE is a DTypeCode. HEADS query heads share one pass over keys and values.
template <u32 D, u32 GROUP, u32 CACHE>
struct attention_of {
  static_assert(D == 64 || D == 128, "head dimensions that fill lanes of 8");
  static constexpr u32 kLanes = D / 8;            // lanes a position
  static constexpr u32 kPositions = 32 / kLanes;  // positions a warp reads at once
  // Such reads in flight, and heads a pass: what 96 registers hold without spills. An odd group's
  // last pass computes its last head twice.
  static constexpr u32 kBatch = CACHE == kF32 ? 2 : 4;
  static constexpr u32 kHeads = GROUP == 1 ? 1 : 2;
  static constexpr u32 kChunk = kBatch * kPositions;  // a page is a multiple of it
  static constexpr u32 kPasses = (GROUP + kHeads - 1) / kHeads;
  static constexpr u32 kPartialFloats = kHeads * (D + 2);  // max, sum, then D outputs a head

  struct Shape {
    u32 heads, kv_heads, kv_head, page, pages_per_slot;
    f32 scale_log2e, eps;
    const f32* rope;
    const f32* qk_norm;  // null: no norm
    u64 k_cache, v_cache;
    const u32* page_table;
    const f32* q;
    const f32* kv;
    f32* out;
    bool q_payload, kv_payload;
  };

  // Running softmax of kHeads heads over one lane's 8 dimensions.
  struct Partial {
    f32 max[kHeads];
    f32 sum[kHeads];
    f32 out[kHeads][8];
  };

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const Shape shape = shape_of(task, context);
    store_keys_values(shape, context);
    context.sync();
    if constexpr (BodyContext::team_threads == 32) {
      one_warp(shape, context);
    } else {
      whole_team(shape, context);
    }
  }

  __device__ static Shape shape_of(const TaskRecord& task, const BodyContext& context) {
    Shape s;
    s.heads = task.param[0];
    s.kv_heads = task.param[1];
    s.kv_head = task.tile[0];
    s.page = task.param[3];
    s.pages_per_slot = task.param[4];
    s.scale_log2e = param_f32(task, 5) * 1.44269504f;
    s.eps = param_f32(task, 6);
    s.q = context.address<const f32>(task, 0);
    s.kv = context.address<const f32>(task, 1);
    s.k_cache = task.addr[2];
    s.v_cache = task.addr[3];
    s.page_table = arg<const u32>(task, 4);
    s.rope = arg<const f32>(task, 5);
    s.qk_norm = arg<const f32>(task, 6);
    s.out = context.address<f32>(task, 7);
    s.q_payload = (task.payload_mask & 1) != 0;
    s.kv_payload = (task.payload_mask & 2) != 0;
    return s;
  }

  // Step 1. Trip counts are equal for a whole warp, since the norm and the rotation shuffle.
  __device__ static void store_keys_values(const Shape& s, const BodyContext& context) {
    const u32 lane = context.thread % 32, sub = lane % kLanes;
    const u32 jobs = 2 * context.step->rows, at_once = context.team_threads / kLanes;
    for (u32 base = context.thread / 32 * kPositions; base < jobs; base += at_once) {
      const u32 job = base + lane / kLanes;
      const bool active = job < jobs;
      const u32 row = active ? job / 2 : 0;
      const bool is_key = job % 2 == 0;
      const RowState& state = context.rows[row];
      const u64 width = u64(s.kv_heads) * D;
      const f32* source = s.kv + row * 2 * width + (is_key ? 0 : width) + s.kv_head * D + sub * 8;
      f32 x[8];
      load8(source, s.kv_payload, context, x);
      f32 key[8];
      for (u32 i = 0; i < 8; ++i) key[i] = x[i];
      prepare(s, key, sub, state.position, 1);
      const u32 page = s.page_table[state.slot * s.pages_per_slot + state.position / s.page];
      const u64 at = element(s, page, state.position % s.page, sub);
      if (active) {
        for (u32 i = 0; i < 8; ++i) x[i] = is_key ? key[i] : x[i];
        Elements<CACHE>::store8(is_key ? s.k_cache : s.v_cache, at, x);
      }
    }
  }

  // Index of a lane's first element of a position in a cache.
  __device__ static u64 element(const Shape& s, u32 page, u32 offset, u32 sub) {
    return ((u64(page) * s.kv_heads + s.kv_head) * s.page + offset) * D + sub * 8;
  }

  // RMSNorm if the model has one, then the rotation of the pairs (i, i + D/2).
  __device__ static void prepare(const Shape& s, f32 (&x)[8], u32 sub, u32 position, u32 which) {
    if (s.qk_norm != nullptr) {
      f32 sum = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
      for (u32 step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const f32 factor = rsqrtf(fmaf(sum, 1.0f / D, s.eps));
#pragma unroll
      for (u32 i = 0; i < 8; ++i) x[i] *= factor * s.qk_norm[which * D + sub * 8 + i];
    }
    const bool low = sub < kLanes / 2;
    const f32* cos = s.rope + u64(position) * D + (sub % (kLanes / 2)) * 8;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const f32 other = __shfl_xor_sync(~0u, x[i], kLanes / 2);
      const f32 turned = other * cos[D / 2 + i];
      x[i] = fmaf(x[i], cos[i], low ? -turned : turned);
    }
  }

  // Step 3: the chunks of one virtual warp for kHeads heads of a row, by one warp.
  // Returns with the same values in every group of kLanes lanes.
  __device__ static void fold_chunks(const Shape& s, const BodyContext& context, u32 row,
                                     u32 virtual_warp, u32 head, Partial& part) {
    const u32 lane = context.thread % 32, sub = lane % kLanes;
    const RowState& state = context.rows[row];
    const u32 count = state.position + 1;
    f32 q[kHeads][8];
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      const u64 column = u64(s.kv_head * GROUP + min(head + h, GROUP - 1)) * D + sub * 8;
      load8(s.q + u64(row) * s.heads * D + column, s.q_payload, context, q[h]);
      prepare(s, q[h], sub, state.position, 0);
      part.max[h] = -3.0e38f;  // finite: a difference of two of them is 0, not NaN
      part.sum[h] = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        q[h][i] *= s.scale_log2e;
        part.out[h][i] = 0;
      }
    }
    const u32 chunks = (count + kChunk - 1) / kChunk;
#pragma unroll 1
    for (u32 c = virtual_warp; c < chunks; c += kVirtualWarps) {
      const u32 begin = c * kChunk;
      const u32 page = s.page_table[state.slot * s.pages_per_slot + begin / s.page];
      const u32 valid = min(kChunk, count - begin);
      fold_chunk(s, page, begin % s.page, lane / kLanes, valid, sub, q, part);
    }
    join_groups(part);
  }

  // One chunk: kBatch positions of this lane's group, from `first` on. Positions from `valid` on
  // weigh nothing, and are not read: what lies there may be NaN.
  __device__ static void fold_chunk(const Shape& s, u32 page, u32 offset, u32 first, u32 valid,
                                    u32 sub, const f32 (&q)[kHeads][8], Partial& part) {
    typename Elements<CACHE>::Eight keys[kBatch], values[kBatch];
    const u64 start = element(s, page, offset + first, sub);
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      const u32 step = b * kPositions;
      keys[b] = Elements<CACHE>::read8(s.k_cache, start + step * D, first + step < valid);
    }
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      const u32 step = b * kPositions;
      values[b] = Elements<CACHE>::read8(s.v_cache, start + step * D, first + step < valid);
    }
    f32 score[kBatch][kHeads];
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      f32 key[8];
      Elements<CACHE>::unpack8(keys[b], key);
#pragma unroll
      for (u32 h = 0; h < kHeads; ++h) {
        f32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum = fmaf(q[h][i], key[i], sum);
#pragma unroll
        for (u32 step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        score[b][h] = sum;
      }
    }
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      f32 top = part.max[h];
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        if (first + b * kPositions < valid) top = fmaxf(top, score[b][h]);
      }
      const f32 shrink = exp2f(part.max[h] - top);
      part.max[h] = top;
      part.sum[h] *= shrink;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) part.out[h][i] *= shrink;
    }
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      f32 value[8];
      Elements<CACHE>::unpack8(values[b], value);
#pragma unroll
      for (u32 h = 0; h < kHeads; ++h) {
        const bool counts = first + b * kPositions < valid;
        const f32 weight = counts ? exp2f(score[b][h] - part.max[h]) : 0.0f;
        part.sum[h] += weight;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) part.out[h][i] = fmaf(weight, value[i], part.out[h][i]);
      }
    }
  }

  // The groups of a warp took different positions: one partial from them, the same in all lanes.
  __device__ static void join_groups(Partial& part) {
#pragma unroll
    for (u32 step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (u32 h = 0; h < kHeads; ++h) {
        const f32 other_max = __shfl_xor_sync(~0u, part.max[h], step);
        const f32 other_sum = __shfl_xor_sync(~0u, part.sum[h], step);
        const f32 top = fmaxf(part.max[h], other_max);
        const f32 mine = exp2f(part.max[h] - top), theirs = exp2f(other_max - top);
        part.max[h] = top;
        // Products and one sum: both sides of a pair must round alike, which fmaf would not.
        part.sum[h] = __fadd_rn(__fmul_rn(part.sum[h], mine), __fmul_rn(other_sum, theirs));
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
          const f32 other = __shfl_xor_sync(~0u, part.out[h][i], step);
          part.out[h][i] = __fadd_rn(__fmul_rn(part.out[h][i], mine), __fmul_rn(other, theirs));
        }
      }
    }
  }

  // (max, sum, out) of what came before, then the next virtual warp's.
  struct Merge {
    f32 max, before, next;
    __device__ Merge(f32 a, f32 b) : max(fmaxf(a, b)) {
      before = exp2f(a - max);
      next = exp2f(b - max);
    }
    __device__ f32 of(f32 a, f32 b) const { return fmaf(a, before, b * next); }
  };

  __device__ static u32 virtual_warps(u32 position) {
    return min(kVirtualWarps, position / kChunk + 1);
  }

  // A team of one warp merges in registers, in the same order and arithmetic as whole_team.
  __device__ static void one_warp(const Shape& s, const BodyContext& context) {
    const u32 rows = context.step->rows;
    for (u32 row = 0; row < rows; ++row) {
      const u32 warps = virtual_warps(context.rows[row].position);
      for (u32 head = 0; head < GROUP; head += kHeads) {
        Partial sum;
        fold_chunks(s, context, row, 0, head, sum);
#pragma unroll 1
        for (u32 w = 1; w < warps; ++w) {
          Partial next;
          fold_chunks(s, context, row, w, head, next);
          for (u32 h = 0; h < kHeads; ++h) {
            const Merge merge(sum.max[h], next.max[h]);
            sum.max[h] = merge.max;
            sum.sum[h] = merge.of(sum.sum[h], next.sum[h]);
            for (u32 i = 0; i < 8; ++i) sum.out[h][i] = merge.of(sum.out[h][i], next.out[h][i]);
          }
        }
        const u32 lane = context.thread % 32;
        for (u32 h = 0; h < kHeads; ++h) {
          for (u32 i = 0; i < 8; ++i) sum.out[h][i] = sum.out[h][i] / sum.sum[h];
          if (lane < kLanes && head + h < GROUP) {
            store8(out_of(s, row, head + h) + lane * 8, sum.out[h]);
          }
        }
      }
    }
  }

  // All warps fold (row, virtual warp, heads) items into scratch; then the team merges them.
  __device__ static void whole_team(const Shape& s, const BodyContext& context) {
    const u32 rows = context.step->rows, warp = context.thread / 32;
    u32 most = 1;
    for (u32 row = 0; row < rows; ++row) {
      most = max(most, virtual_warps(context.rows[row].position));
    }
    static_assert(BodyContext::scratch_bytes >= kVirtualWarps * kPartialFloats * 4);
    f32* partials = reinterpret_cast<f32*>(context.scratch);
    const u32 room = context.scratch_bytes / (kPartialFloats * 4) / most;  // (row, pass) pairs
    const u32 pairs = rows * kPasses;
    for (u32 first = 0; first < pairs; first += room) {
      const u32 here = min(room, pairs - first);
      for (u32 item = warp; item < here * most; item += context.team_threads / 32) {
        const u32 pair = first + item / most, row = pair / kPasses, virtual_warp = item % most;
        if (virtual_warp < virtual_warps(context.rows[row].position)) {
          Partial part;
          fold_chunks(s, context, row, virtual_warp, pair % kPasses * kHeads, part);
          park(partials + item * kPartialFloats, part, context.thread % 32);
        }
      }
      context.sync();
      for (u32 at = context.thread; at < here * kHeads * kLanes; at += context.team_threads) {
        const u32 pair = at / (kHeads * kLanes), h = at / kLanes % kHeads, sub = at % kLanes;
        const u32 row = (first + pair) / kPasses, head = (first + pair) % kPasses * kHeads + h;
        if (head >= GROUP) continue;
        const f32* source = partials + pair * most * kPartialFloats + h * (D + 2);
        merge_partials(source, virtual_warps(context.rows[row].position), sub,
                       out_of(s, row, head));
      }
      context.sync();
    }
  }

  __device__ static f32* out_of(const Shape& s, u32 row, u32 head) {
    return s.out + (u64(row) * s.heads + s.kv_head * GROUP + head) * D;
  }

  __device__ static void park(f32* to, const Partial& part, u32 lane) {
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      if (lane == 0) {
        to[h * (D + 2)] = part.max[h];
        to[h * (D + 2) + 1] = part.sum[h];
      }
      if (lane < kLanes) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) to[h * (D + 2) + 2 + lane * 8 + i] = part.out[h][i];
      }
    }
  }

  // One thread: 8 dimensions of one head, all virtual warps in order.
  __device__ static void merge_partials(const f32* source, u32 warps, u32 sub, f32* out) {
    f32 top = source[0], sum = source[1], o[8];
    for (u32 i = 0; i < 8; ++i) o[i] = source[2 + sub * 8 + i];
    for (u32 w = 1; w < warps; ++w) {
      const f32* next = source + w * kPartialFloats;
      const Merge merge(top, next[0]);
      top = merge.max;
      sum = merge.of(sum, next[1]);
      for (u32 i = 0; i < 8; ++i) o[i] = merge.of(o[i], next[2 + sub * 8 + i]);
    }
    for (u32 i = 0; i < 8; ++i) o[i] = o[i] / sum;
    store8(out + sub * 8, o);
  }
};

}  // namespace gpurt
