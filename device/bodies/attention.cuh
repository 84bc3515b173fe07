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
// With EXTRAS it also knows a window, whose pages are a ring; no rotation; norms without weights; a
// gate; a norm of each head's output; rows that see to their block's end; a call that only writes
// the cache. Instances without it hold no word of that. So the order of sums hangs on positions
// alone: not on rows, context, team or worker. Every multiply-add is written out (fmaf, and NVRTC's
// --fmad=false): no instance fuses other pairs.
//
// Written for latency: a task runs once a layer, between the same SM's matvec tasks.
//   - Code is small and its loops are rolled: 53 KB of straight code cost 9 us of instruction fetch
//     on each call, four times what the work takes.
//   - What a step needs but the vectors themselves is read before they are polled for, since each
//     dependent load is a trip to L2: an acquire anywhere on the SM empties its L1.
//   - A lane holds 8 consecutive dimensions: D/8 lanes read one position (16 bytes a lane in a
//     16-bit cache), 32/(D/8) positions at a time, kBatch times before the first use.
#pragma once
#include "attention_fold.cuh"
#include "attention_output.cuh"
#include "attention_place.cuh"
#include "attention_span.hpp"

namespace gpurt {

// CACHE is a DTypeCode. SPLIT: a task has some of the positions (attention_split.cuh).
template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS = false, bool SPLIT = false>
struct attention_of {
  using Fold = AttentionFold<D, CACHE, EXTRAS>;
  static constexpr u32 kLanes = Fold::kLanes, kPositions = Fold::kPositions;
  static constexpr u32 kChunk = Fold::kChunk, kRowBytes = Fold::kRowBytes;
  static constexpr u32 kHeadFloats = Fold::kHeadFloats;
  static constexpr u32 kRowsMax = 16;
  // Query heads a pass: as many as have room for a row's partials.
  static constexpr u32 kHeadsRoom = 20480 / (kVirtualWarps * kHeadFloats * 4);
  static constexpr u32 kHeads = GROUP < kHeadsRoom ? GROUP : kHeadsRoom;
  static constexpr u32 kTogether = GROUP % 3 == 0 ? 3 : 2;  // heads folded at once: registers
  static constexpr u32 kPartialFloats = kHeads * kHeadFloats;
  static constexpr u32 kQueryRows = 2048 / (GROUP * D) == 0 ? 1 : 2048 / (GROUP * D);

  using Place = PlaceOf<EXTRAS>;
  using Eight = typename Fold::Eight;

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
    u32 heads, kv_heads, kv_head, page_log2, pages_per_slot;
    f32 scale_log2e, eps;
    const f32* rope;
    const f32* qk_norm;  // null: no norm
    u64 k_cache, v_cache;
    const u32* page_table;
    const f32* q;
    const f32* kv;
    f32* out;
    bool q_payload, kv_payload;
    // EXTRAS:
    u32 window;  // 0: all positions
    bool rotates, norms, gated;
    f32 out_eps;  // 0: no norm of the output
  };

  // Each phase is a function of its own, which reads from the record what it needs: the values of
  // one do not take the registers of the next.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = scratch_of(context);
    const u32 rows = context.step->rows;
    if (context.thread < rows) scratch.place[context.thread] = Place::of(task, context);
    context.sync();
    if constexpr (EXTRAS) {
      if (task.addr[0] == 0)
        return make_vectors(task, context, rows, 0, 0);  // keys and values only
    }
    read_first_pages(task, context, rows);
    u32 most_log2 = 0;  // virtual warps of the longest row, rounded up to a power of two
#pragma unroll 1
    for (u32 row = 0; row < rows; ++row) {
      while (1u << most_log2 < virtual_warps(task, scratch.place[row])) ++most_log2;
    }
    const u32 rows_at_once = min(kQueryRows, kItemsMax >> most_log2);
#pragma unroll 1
    for (u32 first = 0; first < rows; first += rows_at_once) {
      const u32 here = min(rows_at_once, rows - first);
      make_vectors(task, context, first == 0 ? rows : 0, first, here);
      context.sync();
#pragma unroll 1
      for (u32 head = 0; head < GROUP; head += kHeads) {
        fold_items(task, context, first, here, head, most_log2);
        context.sync();
        if constexpr (EXTRAS) {
          merge_extras(task, context, first, here, head, most_log2);
        } else {
          merge(task, context, first, here, head, most_log2);
        }
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
    s.page_log2 = 31 - __clz(static_cast<i32>(task.param[3]));  // a power of two
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
    if constexpr (EXTRAS) {
      s.window = task.param[8];
      s.rotates = task.param[9] != 0;
      s.norms = task.param[10] != 0;
      if (task.param[10] != 1) s.qk_norm = nullptr;
      s.gated = task.param[11] != 0;
      s.out_eps = param_f32(task, 12);
    }
    return s;
  }

  // Those that have a chunk; once a window has left position 0, any of them may have one.
  __device__ static u32 virtual_warps(const TaskRecord& task, const Place& place) {
    if constexpr (EXTRAS) {
      if (first_seen(task.param[8], place.position) != 0) return kVirtualWarps;
    }
    return min(kVirtualWarps, (place.end() - 1) / kChunk + 1);
  }

  // First position of a virtual warp's first chunk: chunk c belongs to virtual warp c % 16.
  GPURT_FN static u32 first_of(const Shape& s, const Place& place, u32 warp) {
    if constexpr (!EXTRAS) return warp * kChunk;
    const u32 chunk = first_seen(s.window, place.position) / kChunk;
    return (chunk + (warp - chunk) % kVirtualWarps) * kChunk;
  }

  // Before the polls of make_vectors, after which there is a barrier.
  GPURT_FN static void read_first_pages(const TaskRecord& task, const BodyContext& context,
                                        u32 rows) {
    const Shape s = shape_of(task, context);
    Scratch& scratch = scratch_of(context);
    for (u32 at = context.thread; at < rows * kVirtualWarps; at += context.team_threads) {
      const u32 row = at / kVirtualWarps, warp = at % kVirtualWarps;
      const Place place = scratch.place[row];
      if (warp < virtual_warps(task, place))
        scratch.first_page[row][warp] = page_of(s, place, first_of(s, place, warp));
    }
  }

  __device__ static u32 page_of(const Shape& s, const Place& place, u32 position) {
    if constexpr (EXTRAS) {  // a ring where there is a window
      const u32 page = (position >> s.page_log2) % s.pages_per_slot;
      return s.page_table[place.slot * s.pages_per_slot + page];
    }
    return s.page_table[place.slot * s.pages_per_slot + (position >> s.page_log2)];
  }

  // Index of a lane's first element of a position in a cache.
  __device__ static u64 element(const Shape& s, u32 page, u32 position, u32 sub) {
    const u32 offset = position & ((1u << s.page_log2) - 1);
    return (((u64(page) * s.kv_heads + s.kv_head) << s.page_log2) + offset) * D + sub * 8;
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
#pragma unroll 1
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
      if (!EXTRAS || s.rotates) {
        read8(angles, cos);
        read8(angles + D / 2, sin);
      }
      if (s.qk_norm != nullptr) read8(s.qk_norm + (is_query ? 0 : D) + sub * 8, norm);
      const u32 to = place_of_row(place.position, row_ancestors(context.rows[row]));
      const u64 at = element(s, page_of(s, place, to), to, sub);
      const u64 q_row = EXTRAS && s.gated ? u64(row) * 2 : row;
      const f32* from = is_query ? s.q + (q_row * s.heads + s.kv_head * GROUP + head) * D
                                 : s.kv + row * 2 * width + (is_value ? width : 0) + s.kv_head * D;
      f32 x[8], turned[8];
      load8(from + sub * 8, is_query ? s.q_payload : s.kv_payload, context, x);
      prepare(s, x, cos, sin, norm, sub < half, turned);
      if (!stores) continue;
      if (SPLIT && !is_query && place.position / kAttentionSpan % task.tile[2] != task.tile[1])
        continue;
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
    if (EXTRAS ? s.norms : s.qk_norm != nullptr) {
      f32 sum = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
      for (u32 step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      factor = rsqrtf(fmaf(sum, 1.0f / D, s.eps));
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) y[i] = s.qk_norm != nullptr ? x[i] * (factor * norm[i]) : x[i];
    if constexpr (EXTRAS) {
      if (s.norms && s.qk_norm == nullptr) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) y[i] = x[i] * factor;
      }
      if (!s.rotates) {  // the same for all lanes
#pragma unroll
        for (u32 i = 0; i < 8; ++i) turned[i] = y[i];
        return;
      }
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const f32 other = __shfl_xor_sync(~0u, y[i], kLanes / 2) * sin[i];
      turned[i] = fmaf(y[i], cos[i], is_low ? -other : other);
    }
  }

  // ---- 3: (row, virtual warp) items over the team's warps, heads [head, head + kHeads)
  // -----------
  __device__ __noinline__ static void fold_items(const TaskRecord& task, const BodyContext& context,
                                                 u32 first, u32 here, u32 head, u32 most_log2) {
    const Shape s = shape_of(task, context);
    Scratch& scratch = scratch_of(context);
    const u32 lane = context.thread % 32;
#pragma unroll 1
    for (u32 item = context.thread / 32; item < here << most_log2;
         item += context.team_threads / 32) {
      const u32 row = item >> most_log2, warp = item & ((1u << most_log2) - 1);
      const Place place = scratch.place[first + row];
      if (warp >= virtual_warps(task, place)) continue;
      const u32 seen = EXTRAS ? first_seen(s.window, place.position) : 0;
      const u32 start = first_of(s, place, warp), page = scratch.first_page[first + row][warp];
      const Branch branch = Branch::of(place.position, row_ancestors(context.rows[first + row]));
      fold_heads(sequence_of(s, place, seen, place.end(), lane, branch), start, page,
                 scratch.query[row], head, lane, scratch.partial + item * kPartialFloats);
    }
  }

  // Heads [head, head + kHeads) of a virtual warp's positions, some at a time.
  GPURT_FN static void fold_heads(const typename Fold::Sequence& sequence, u32 start, u32 page,
                                  const f32 (*query)[D], u32 head, u32 lane, f32* to) {
    const u32 end = min(head + kHeads, GROUP);
#pragma unroll 1
    for (u32 h = head; h < end; h += kTogether, to += kTogether * kHeadFloats) {
      Fold::template fold<kTogether>(sequence, start, page, query + h, min(kTogether, end - h),
                                     lane, to);
    }
  }

  GPURT_FN static typename Fold::Sequence sequence_of(const Shape& s, const Place& place, u32 seen,
                                                      u32 end, u32 lane, Branch branch) {
    typename Fold::Sequence sequence;
    const u32 page_bytes = kRowBytes << s.page_log2;  // of one kv head
    sequence.keys = s.k_cache + u64(s.kv_head) * page_bytes + lane * sizeof(Eight);
    sequence.values = s.v_cache - s.k_cache;
    sequence.pages = s.page_table + u64(place.slot) * s.pages_per_slot;
    sequence.page_bytes = s.kv_heads * page_bytes;
    sequence.page_log2 = s.page_log2;
    sequence.ring = s.pages_per_slot;
    sequence.seen = seen;
    sequence.end = end;
    sequence.branch = branch;
    return sequence;
  }

  // ---- 4: four outputs a thread, virtual warps in order -----------------------------------------
  __device__ __noinline__ static void merge(const TaskRecord& task, const BodyContext& context,
                                            u32 first, u32 here, u32 head, u32 most_log2) {
    const Shape s = shape_of(task, context);
    const Scratch& scratch = scratch_of(context);
    constexpr u32 kFours = D / 4;
#pragma unroll 1
    for (u32 at = context.thread; at < here * kHeads * kFours; at += context.team_threads) {
      const u32 row = at / (kHeads * kFours), h = at / kFours % kHeads;
      if (head + h >= GROUP) continue;
      const u32 warps = virtual_warps(task, scratch.place[first + row]);
      const f32* from = scratch.partial + (row << most_log2) * kPartialFloats + h * kHeadFloats;
      f32 top = from[D];
#pragma unroll 4
      for (u32 w = 1; w < warps; ++w) top = fmaxf(top, from[w * kPartialFloats + D]);
      f32 sum = 0, a = 0, b = 0, c = 0, d = 0;
#pragma unroll 2
      for (u32 w = 0; w < warps; ++w, from += kPartialFloats) {
        const f32 weight = ex2_approx_ftz(from[D] - top);
        const float4 x = *reinterpret_cast<const float4*>(from + at % kFours * 4);
        sum = fmaf(from[D + 1], weight, sum);
        a = fmaf(x.x, weight, a);
        b = fmaf(x.y, weight, b);
        c = fmaf(x.z, weight, c);
        d = fmaf(x.w, weight, d);
      }
      const u64 column = u64(first + row) * s.heads + s.kv_head * GROUP + head + h;
      store_granule(reinterpret_cast<u64>(s.out + column * D + at % kFours * 4), __fdividef(a, sum),
                    __fdividef(b, sum), __fdividef(c, sum), __fdividef(d, sum));
    }
  }

  // The same with the norm of the output and its gate. Trip counts are equal for a whole warp,
  // since the norm and polls for the gate are collective; a lane beyond the last output repeats it,
  // and stores nothing.
  __device__ __noinline__ static void merge_extras(const TaskRecord& task,
                                                   const BodyContext& context, u32 first, u32 here,
                                                   u32 head, u32 most_log2) {
    const Shape s = shape_of(task, context);
    const Scratch& scratch = scratch_of(context);
    constexpr u32 kFours = D / 4;
    static_assert(32 % kFours == 0, "a head's outputs lie in one warp");
    const u32 heads = min(kHeads, GROUP - head), jobs = here * heads * kFours;
#pragma unroll 1
    for (u32 base = context.thread / 32 * 32; base < jobs; base += context.team_threads) {
      const u32 at = min(base + context.thread % 32, jobs - 1);
      const u32 row = at / (heads * kFours), h = at / kFours % heads;
      const u32 warps = virtual_warps(task, scratch.place[first + row]);
      const f32* from = scratch.partial + (row << most_log2) * kPartialFloats + h * kHeadFloats;
      f32 top = from[D];
      for (u32 w = 1; w < warps; ++w) top = fmaxf(top, from[w * kPartialFloats + D]);
      f32 sum = 0, out[4] = {};
#pragma unroll 2
      for (u32 w = 0; w < warps; ++w, from += kPartialFloats) {
        const f32 weight = ex2_approx_ftz(from[D] - top);
        const float4 x = *reinterpret_cast<const float4*>(from + at % kFours * 4);
        sum = fmaf(from[D + 1], weight, sum);
        out[0] = fmaf(x.x, weight, out[0]), out[1] = fmaf(x.y, weight, out[1]);
        out[2] = fmaf(x.z, weight, out[2]), out[3] = fmaf(x.w, weight, out[3]);
      }
#pragma unroll
      for (u32 i = 0; i < 4; ++i) out[i] = __fdividef(out[i], sum);
      if (s.out_eps > 0) norm_head<D>(s.out_eps, out);
      const u32 column = (s.kv_head * GROUP + head + h) * D + at % kFours * 4;
      // Gates lie behind all query heads of a row.
      const f32* gates = s.q + (u64(first + row) * 2 + 1) * s.heads * D + column;
      if (s.gated) gate_head(gates, s.q_payload, context, out);
      if (base + context.thread % 32 < jobs)
        store_granule(reinterpret_cast<u64>(s.out + u64(first + row) * s.heads * D + column),
                      out[0], out[1], out[2], out[3]);
    }
  }
};

}  // namespace gpurt
