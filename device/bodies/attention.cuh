// attention on the GPU: q/k norm, rotary embedding, the cache write, then attention, per kv head.
//
// The contract is in graphs/ops/attention.py. A task handles all rows of the step for one kv head
// and its GROUP query heads:
//   1. rows' slots and positions into scratch; team barrier
//   2. every group of D/8 lanes takes a vector, a key, a value or a query: norm, rotate, and into
//      the cache, or into scratch; team barrier: rows see the keys of earlier rows of this step
//   3. chunk c of a sequence's positions belongs to virtual warp c % 16, whatever the team's size;
//      each folds its chunks by running softmax into a partial (D outputs, max, sum) a query head;
//      team barrier
//   4. partials are merged in virtual-warp order, four outputs a thread
// So the order of sums hangs on positions alone: not on rows, context, team or worker. Every
// multiply-add is written out (fmaf, and NVRTC's --fmad=false): no instance fuses other pairs.
//
// What a step needs but the vectors themselves is read before they are polled for, since each
// dependent load is a trip to L2: an acquire anywhere on the SM empties its L1.
// A lane holds 8 consecutive dimensions: D/8 lanes read one position (16 bytes a lane in a 16-bit
// cache), 32/(D/8) positions at a time, kBatch times before the first use.
#pragma once
#include "elements.cuh"

namespace gpurt {

constexpr u32 kVirtualWarps = 16;

// CACHE is a DTypeCode.
template <u32 D, u32 GROUP, u32 CACHE>
struct attention_of {
  static_assert(D == 64 || D == 128, "head dimensions that fill lanes of 8");
  static constexpr u32 kLanes = D / 8;            // lanes a position
  static constexpr u32 kPositions = 32 / kLanes;  // positions a warp reads at once
  // Such reads in flight, and query heads a pass: what 96 registers hold. An odd group's last pass
  // computes its last head twice.
  static constexpr u32 kBatch = CACHE == kF32 ? 2 : 4;
  static constexpr u32 kHeads = GROUP <= 3 ? GROUP : GROUP % 2 == 0 ? 2 : 3;
  static constexpr u32 kPasses = (GROUP + kHeads - 1) / kHeads;
  static constexpr u32 kChunk = kBatch * kPositions;  // a page is a multiple of it
  static constexpr u32 kRowsMax = 16;
  static constexpr u32 kHeadFloats = D + 4;  // D outputs, max, sum; aligned to 16 bytes
  static constexpr u32 kPartialFloats = kHeads * kHeadFloats;
  static constexpr u32 kQueryRows = 2048 / (GROUP * D) == 0 ? 1 : 2048 / (GROUP * D);

  struct Place {
    u32 slot, position;
  };

  struct Scratch {
    Place place[kRowsMax];
    u32 first_page[kRowsMax][kVirtualWarps];  // of each virtual warp's first chunk
    f32 query[kQueryRows][GROUP][D];          // rotated and scaled, of the rows at hand
    f32 partial[1];                           // kPartialFloats an item, as many as fit
  };
  static constexpr u32 kFixedBytes =
      (sizeof(Place) + 4 * kVirtualWarps) * kRowsMax + kQueryRows * GROUP * D * 4;
  static constexpr u32 kItemsMax =
      (BodyContext::scratch_bytes - kFixedBytes) / (kPartialFloats * 4);
  static_assert(kItemsMax >= kVirtualWarps, "a row's partials must fit");

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

  // Each phase is a function of its own, which reads from the record what it needs: the values of
  // one do not take the registers of the next.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = scratch_of(context);
    const u32 rows = context.step->rows;
    if (context.thread < rows) {
      const RowState row = context.rows[context.thread];
      scratch.place[context.thread] = {row.slot, row.position};
    }
    context.sync();
    read_first_pages(task, context, rows);
    u32 most = 1;
    for (u32 row = 0; row < rows; ++row) {
      most = max(most, virtual_warps(scratch.place[row].position));
    }
    const u32 rows_at_once = max(1u, min(kQueryRows, kItemsMax / (most * kPasses)));
    for (u32 first = 0; first < rows; first += rows_at_once) {
      const u32 here = min(rows_at_once, rows - first);
      make_vectors(task, context, first == 0 ? rows : 0, first, here);
      context.sync();
      // A row whose passes do not fit together is done pass by pass.
      const u32 pairs = here * kPasses, pairs_at_once = min(pairs, kItemsMax / most);
      for (u32 pair = 0; pair < pairs; pair += pairs_at_once) {
        const u32 count = min(pairs_at_once, pairs - pair);
        fold_items(task, context, first, pair, count, most);
        context.sync();
        merge(task, context, first, pair, count, most);
        context.sync();
      }
    }
  }

  GPURT_FN static Scratch& scratch_of(const BodyContext& context) {
    return *reinterpret_cast<Scratch*>(context.scratch);
  }

  GPURT_FN static Shape shape_of(const TaskRecord& task, const BodyContext& context) {
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

  __device__ static u32 virtual_warps(u32 position) {
    return min(kVirtualWarps, position / kChunk + 1);
  }

  // Before the polls of make_vectors, after which there is a barrier.
  GPURT_FN static void read_first_pages(const TaskRecord& task, const BodyContext& context,
                                        u32 rows) {
    const Shape s = shape_of(task, context);
    Scratch& scratch = scratch_of(context);
    for (u32 at = context.thread; at < rows * kVirtualWarps; at += context.team_threads) {
      const u32 row = at / kVirtualWarps, warp = at % kVirtualWarps;
      const Place place = scratch.place[row];
      if (warp < virtual_warps(place.position))
        scratch.first_page[row][warp] = page_of(s, place, warp * kChunk);
    }
  }

  __device__ static u32 page_of(const Shape& s, const Place& place, u32 position) {
    return s.page_table[place.slot * s.pages_per_slot + position / s.page];
  }

  // Index of a lane's first element of a position in a cache.
  __device__ static u64 element(const Shape& s, u32 page, u32 position, u32 sub) {
    return ((u64(page) * s.kv_heads + s.kv_head) * s.page + position % s.page) * D + sub * 8;
  }

  // ---- 2: keys and values of `kv_rows` rows, queries of rows [first, first + here)
  // --------------- Trip counts are equal for a whole warp, since polls, norm and rotation are
  // collective.
  __device__ __noinline__ static void make_vectors(const TaskRecord& task,
                                                   const BodyContext& context, u32 kv_rows,
                                                   u32 first, u32 here) {
    const Shape s = shape_of(task, context);
    Scratch& scratch = scratch_of(context);
    const u32 lane = context.thread % 32, sub = lane % kLanes, half = kLanes / 2;
    const u32 kv_jobs = 2 * kv_rows, jobs = kv_jobs + here * GROUP;
    const u64 width = u64(s.kv_heads) * D;
    for (u32 base = context.thread / 32 * kPositions; base < jobs;
         base += context.team_threads / kLanes) {
      // A lane without a job repeats the last one, and stores nothing.
      const u32 job = min(base + lane / kLanes, jobs - 1);
      const bool stores = base + lane / kLanes < jobs, is_query = job >= kv_jobs;
      const u32 query = job - kv_jobs, head = query % GROUP;
      const u32 row = is_query ? first + query / GROUP : job / 2;
      const bool is_value = !is_query && job % 2 == 1;
      const Place place = scratch.place[row];
      const f32* angles = s.rope + u64(place.position) * D + sub % half * 8;
      f32 cos[8], sin[8], norm[8];
      read8(angles, cos);
      read8(angles + D / 2, sin);
      if (s.qk_norm != nullptr) read8(s.qk_norm + (is_query ? 0 : D) + sub * 8, norm);
      const u64 at = element(s, page_of(s, place, place.position), place.position, sub);
      const f32* from = is_query ? s.q + (u64(row) * s.heads + s.kv_head * GROUP + head) * D
                                 : s.kv + row * 2 * width + (is_value ? width : 0) + s.kv_head * D;
      f32 x[8], turned[8];
      load8(from + sub * 8, is_query ? s.q_payload : s.kv_payload, context, x);
      prepare(s, x, cos, sin, norm, sub < half, turned);
      if (!stores) continue;
      if (is_query) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
          scratch.query[query / GROUP][head][sub * 8 + i] = turned[i] * s.scale_log2e;
        }
      } else {
        Elements<CACHE>::store8(is_value ? s.v_cache : s.k_cache, at, is_value ? x : turned);
      }
    }
  }

  __device__ static void read8(const f32* from, f32 (&x)[8]) {
    Elements<kF32>::unpack8(Elements<kF32>::read8(reinterpret_cast<u64>(from), 0, true), x);
  }

  // RMSNorm if the model has one, then the rotation of the pairs (i, i + D/2).
  __device__ static void prepare(const Shape& s, const f32 (&x)[8], const f32 (&cos)[8],
                                 const f32 (&sin)[8], const f32 (&norm)[8], bool is_low,
                                 f32 (&turned)[8]) {
    f32 y[8];
    f32 factor = 1;
    if (s.qk_norm != nullptr) {
      f32 sum = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
      for (u32 step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      factor = rsqrtf(fmaf(sum, 1.0f / D, s.eps));
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) y[i] = s.qk_norm != nullptr ? x[i] * (factor * norm[i]) : x[i];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const f32 other = __shfl_xor_sync(~0u, y[i], kLanes / 2) * sin[i];
      turned[i] = fmaf(y[i], cos[i], is_low ? -other : other);
    }
  }

  // ---- 3: pairs (row, pass) [pair, pair + count), times virtual warps, over the team's warps
  // -----
  __device__ __noinline__ static void fold_items(const TaskRecord& task, const BodyContext& context,
                                                 u32 first, u32 pair, u32 count, u32 most) {
    const Shape s = shape_of(task, context);
    Scratch& scratch = scratch_of(context);
    for (u32 item = context.thread / 32; item < count * most; item += context.team_threads / 32) {
      const u32 at = pair + item / most, row = at / kPasses, warp = item % most;
      const Place place = scratch.place[first + row];
      if (warp >= virtual_warps(place.position)) continue;
      Partial part;
      fold_chunks(s, place, scratch.first_page[first + row][warp], scratch.query[row],
                  at % kPasses * kHeads, warp, context.thread % 32, part);
      park(scratch.partial + item * kPartialFloats, part, context.thread % 32);
    }
  }

  // The chunks of one virtual warp. Ends with the same values in every group of kLanes lanes.
  __device__ static void fold_chunks(const Shape& s, const Place& place, u32 page,
                                     const f32 (&query)[GROUP][D], u32 head, u32 warp, u32 lane,
                                     Partial& part) {
    const u32 count = place.position + 1;
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      part.max[h] = -3.0e38f;  // finite: a difference of two of them is 0, not NaN
      part.sum[h] = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) part.out[h][i] = 0;
    }
    u32 begin = warp * kChunk;
#pragma unroll 1
    while (begin < count) {
      const u32 next = begin + kVirtualWarps * kChunk;
      const u32 next_page = page_of(s, place, next < count ? next : begin);
      fold_chunk(s, query, head, page, begin, min(kChunk, count - begin), lane, part);
      begin = next;
      page = next_page;
    }
    join_groups(part);
  }

  GPURT_FN static void read_batch(u64 cache, u64 start, u32 group, u32 valid,
                                  typename Elements<CACHE>::Eight (&batch)[kBatch]) {
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      const u32 step = b * kPositions;
      batch[b] = Elements<CACHE>::read8(cache, start + step * D, group + step < valid);
    }
  }

  // One chunk: kBatch positions of this lane's group. Positions from `valid` on weigh nothing, and
  // are not read: what lies there may be NaN.
  __device__ static void fold_chunk(const Shape& s, const f32 (&query)[GROUP][D], u32 head,
                                    u32 page, u32 begin, u32 valid, u32 lane, Partial& part) {
    typename Elements<CACHE>::Eight keys[kBatch], values[kBatch];
    const u32 group = lane / kLanes, sub = lane % kLanes;
    const u64 start = element(s, page, begin, sub) + group * D;
    read_batch(s.k_cache, start, group, valid, keys);
    // Three heads' sums leave no registers for keys and values at once.
    constexpr bool kValuesLate = kHeads == 3 && CACHE != kF32;
    if constexpr (!kValuesLate) read_batch(s.v_cache, start, group, valid, values);
    f32 score[kBatch][kHeads];
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      f32 q[8];
      read8(query[min(head + h, GROUP - 1)] + sub * 8, q);
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        f32 key[8];
        Elements<CACHE>::unpack8(keys[b], key);
        f32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum = fmaf(q[i], key[i], sum);
        score[b][h] = sum;
      }
    }
    if constexpr (kValuesLate) read_batch(s.v_cache, start, group, valid, values);
#pragma unroll
    for (u32 step = 1; step < kLanes; step *= 2) {
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
#pragma unroll
        for (u32 h = 0; h < kHeads; ++h) score[b][h] += __shfl_xor_sync(~0u, score[b][h], step);
      }
    }
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      f32 top = part.max[h];
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        if (group + b * kPositions < valid) top = fmaxf(top, score[b][h]);
      }
      const f32 shrink = exp2f(part.max[h] - top);
      part.max[h] = top;
      part.sum[h] *= shrink;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) part.out[h][i] *= shrink;
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        score[b][h] = group + b * kPositions < valid ? exp2f(score[b][h] - top) : 0.0f;
        part.sum[h] += score[b][h];
      }
    }
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      f32 value[8];
      Elements<CACHE>::unpack8(values[b], value);
#pragma unroll
      for (u32 h = 0; h < kHeads; ++h) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) part.out[h][i] = fmaf(score[b][h], value[i], part.out[h][i]);
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

  __device__ static void park(f32* to, const Partial& part, u32 lane) {
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      if (lane < kLanes) {
        Elements<kF32>::store8(reinterpret_cast<u64>(to + h * kHeadFloats), lane * 8, part.out[h]);
      }
      if (lane == 0) {
        to[h * kHeadFloats + D] = part.max[h];
        to[h * kHeadFloats + D + 1] = part.sum[h];
      }
    }
  }

  // ---- 4: four outputs a thread, virtual warps in order
  // ------------------------------------------
  __device__ __noinline__ static void merge(const TaskRecord& task, const BodyContext& context,
                                            u32 first, u32 pair, u32 count, u32 most) {
    const Shape s = shape_of(task, context);
    Scratch& scratch = scratch_of(context);
    constexpr u32 kFours = D / 4;
    for (u32 at = context.thread; at < count * kHeads * kFours; at += context.team_threads) {
      const u32 here = pair + at / (kHeads * kFours), h = at / kFours % kHeads;
      const u32 row = first + here / kPasses, head = here % kPasses * kHeads + h;
      if (head >= GROUP) continue;
      const u32 warps = virtual_warps(scratch.place[row].position);
      const f32* from =
          scratch.partial + at / (kHeads * kFours) * most * kPartialFloats + h * kHeadFloats;
      f32 top = from[D];
      for (u32 w = 1; w < warps; ++w) top = fmaxf(top, from[w * kPartialFloats + D]);
      f32 sum = 0, a = 0, b = 0, c = 0, d = 0;
      for (u32 w = 0; w < warps; ++w, from += kPartialFloats) {
        const f32 weight = exp2f(from[D] - top);
        const float4 x = *reinterpret_cast<const float4*>(from + at % kFours * 4);
        sum = fmaf(from[D + 1], weight, sum);
        a = fmaf(x.x, weight, a);
        b = fmaf(x.y, weight, b);
        c = fmaf(x.z, weight, c);
        d = fmaf(x.w, weight, d);
      }
      f32* to = s.out + (u64(row) * s.heads + s.kv_head * GROUP + head) * D + at % kFours * 4;
      store_granule(reinterpret_cast<u64>(to), a / sum, b / sum, c / sum, d / sum);
    }
  }
};

}  // namespace gpurt
