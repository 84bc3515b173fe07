// attention on the GPU: q/k norm, rotary embedding, the cache write, then attention, per kv head.
//
// The contract is in graphs/ops/attention.py. A task handles a range of the step's rows, or all,
// for one kv head and a range of its GROUP query heads, or all:
//   1. rows' slots and positions into scratch; team barrier
//   2. every group of D/8 lanes takes a vector, a key, a value or a query: norm, rotate, and into
//      the cache, or into scratch; team barrier: rows see the keys of earlier rows of this step
//   3. tile by tile (attention_tile.cuh), every virtual warp folds its chunks of positions by
//      running softmax into a partial in scratch for each column; team barrier
//   4. partials are merged in virtual-warp order, four outputs a thread
// With EXTRAS it also knows a window, whose pages are a ring; no rotation; norms without weights; a
// gate; a norm of each head's output; rows that see to their block's end; a call that only writes
// the cache. Instances without it hold no word of that. Every multiply-add is written out (fmaf,
// and NVRTC's --fmad=false): no instance fuses other pairs.
//
// Written for latency: a task runs once a layer, between the same SM's matvec tasks.
//   - Code is small and its loops are rolled: 53 KB of straight code cost 9 us of instruction fetch
//     on each call, four times what the work takes.
//   - What a step needs but the vectors themselves is read before they are polled for, since each
//     dependent load is a trip to L2: an acquire anywhere on the SM empties its L1.
//   - A chunk of positions is read once for all columns of a tile.
#pragma once
#include "attention_fold.cuh"
#include "attention_mma_tiles.cuh"
#include "attention_output.cuh"
#include "attention_span.hpp"

namespace gpurt {

template <bool IS_MMA, u32 D, u32 CACHE, bool WINDOWED, u32 TILES>
struct AttentionFolder {
  using Type = AttentionFold<D, CACHE, WINDOWED>;
};
template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFolder<true, D, CACHE, WINDOWED, 1> {
  using Type = AttentionMma<D, CACHE, WINDOWED>;
};
template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFolder<true, D, CACHE, WINDOWED, 2> {
  using Type = AttentionMmaTiles<D, CACHE, WINDOWED, 2>;
};

// CACHE is a DTypeCode. SPLIT: a task has some of the positions (attention_split.cuh). TILES: of 4
// columns that a chunk of positions is read for; more than one has the weight ring as its scratch
// (attention_rows.cuh).
template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS = false, bool SPLIT = false, u32 TILES = 1>
struct attention_of {
  static_assert(D == 64 || D == 128, "head dimensions that fill lanes of 8");
  static constexpr bool kIsMma = CACHE == kBf16 || CACHE == kE4m3;
  using Fold = typename AttentionFolder<kIsMma, D, CACHE, EXTRAS, TILES>::Type;
  using Cache = typename Fold::Cache;
  using Query = typename Fold::Query;
  using Place = PlaceOf<EXTRAS>;
  static constexpr u32 kLanes = D / 8;          // lanes a vector
  static constexpr u32 kVectors = 32 / kLanes;  // vectors a warp prepares at once
  static constexpr u32 kChunk = Fold::kChunk;   // positions; a page is a multiple of it
  static constexpr u32 kRowsMax = 16;
  // Of a tile: columns, as many as their partials have room; heads, rows. Sums that stayed in
  // registers while some columns are merged would take them from every other body.
  static constexpr u32 kColumns =
      TILES == 1 ? 20480 / (kVirtualWarps * kPartialFloats<D> * 4) : TILES * kAttentionColumns;
  static_assert(kColumns <= TILES * kAttentionColumns);
  static constexpr u32 kHeads = GROUP < kColumns ? GROUP : kColumns;
  static constexpr u32 kRows = kColumns / kHeads;
  static constexpr u32 kQueriesRoom =
      (TILES == 1 || kTeamWarps == 1 ? 8192 : 32768) / (GROUP * D * sizeof(Query));
  static constexpr u32 kQueryRows = kQueriesRoom == 0         ? 1
                                    : kQueriesRoom < kRowsMax ? kQueriesRoom
                                                              : kRowsMax;

  static constexpr u32 kPartials = kColumns * kPartialFloats<D>;
  static constexpr u32 kWarpFloats = TILES == 1 || !kIsMma ? kPartials : TILES * kSumsFloats<D>;

  struct Scratch {
    Place place[kRowsMax];
    u32 first_page[kVirtualWarps];      // of each virtual warp's first chunk of the first tile
    Query query[kQueryRows][GROUP][D];  // rotated and scaled, of the rows at hand
    f32 partial[kVirtualWarps][kWarpFloats];  // of each column; more tiles keep their sums there
  };
  static_assert(TILES != 1 || sizeof(Scratch) <= BodyContext::scratch_bytes);

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

  struct Part {
    u32 begin, end;
  };
  // A range in one word of the record; 0: all of `count`.
  GPURT_FN static Part part_of(u32 packed, u32 count) {
    return packed == 0 ? Part{0, count} : Part{packed & 0xFFFF, min(packed >> 16, count)};
  }
  GPURT_FN static Part rows_of(const TaskRecord& task, u32 rows) {
    return part_of(SPLIT ? 0 : task.tile[1], rows);
  }
  GPURT_FN static Part heads_of(const TaskRecord& task) {
    return part_of(SPLIT ? 0 : task.tile[2], GROUP);
  }

  // Each phase is a function of its own, which reads from the record what it needs: the values of
  // one do not take the registers of the next.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = scratch_of(context);
    const u32 rows = context.step->rows;
    const Part own = rows_of(task, rows);
    if (own.begin >= own.end) return;  // all threads
    if (context.thread < rows) scratch.place[context.thread] = Place::of(task, context);
    context.sync();
    if constexpr (EXTRAS) {
      if (task.addr[0] == 0)
        return make_vectors(task, context, rows, 0, 0);  // keys and values only
    }
    read_first_pages(task, context, own.begin, min(own.end, own.begin + kQueryRows));
#pragma unroll 1
    for (u32 first = own.begin; first < own.end; first += kQueryRows) {
      const u32 end = min(first + kQueryRows, own.end);
      // Keys and values of all rows: other tasks write the same, but when is not known.
      make_vectors(task, context, first == own.begin ? rows : 0, first, end - first);
      context.sync();
      u32 next = first;
#pragma unroll 1
      for (u32 row = first; row < end; row = next) {
        next = attend(task, context, row, first, end);
      }
    }
  }

  // The tile that begins with this row, of rows before `end`; its first heads. A row on a branch of
  // a tree finds positions where others do not, so it has a tile of its own.
  GPURT_FN static AttentionTile tile_at(const TaskRecord& task, const BodyContext& context, u32 row,
                                        u32 end) {
    const Scratch& scratch = scratch_of(context);
    AttentionTile tile{row, 0, 0, kHeads, ~0u, 0};
    const u32 slot = scratch.place[row].slot;
#pragma unroll 1
    for (; tile.rows < kRows && row < end && scratch.place[row].slot == slot; ++row, ++tile.rows) {
      const bool is_alone = is_on_branch(row_ancestors(context.rows[row]));
      if (is_alone && tile.rows != 0) break;
      tile.seen = min(tile.seen, seen_from(task, scratch.place[row]));
      tile.end = max(tile.end, scratch.place[row].end());
      if (is_alone) end = row + 1;
    }
    return tile;
  }

  GPURT_FN static u32 seen_from(const TaskRecord& task, const Place& place) {
    return EXTRAS ? first_seen(task.param[8], place.position) : 0;
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

  // Before the polls of make_vectors, after which there is a barrier.
  GPURT_FN static void read_first_pages(const TaskRecord& task, const BodyContext& context, u32 row,
                                        u32 end) {
    if (context.thread >= kVirtualWarps) return;
    Scratch& scratch = scratch_of(context);
    const AttentionTile tile = tile_at(task, context, row, end);
    const u32 start = tile.template start<kChunk>(context.thread, 0);
    if (start < tile.end) {
      const Cache cache = cache_at(task, context, row);
      scratch.first_page[context.thread] = cache.page(start);
    }
  }

  // As a row sees it.
  GPURT_FN static Cache cache_at(const TaskRecord& task, const BodyContext& context, u32 row) {
    const Place& place = scratch_of(context).place[row];
    Cache cache = cache_of(shape_of(task, context), place.slot);
    cache.branch = Branch::of(place.position, row_ancestors(context.rows[row]));
    return cache;
  }

  GPURT_FN static Cache cache_of(const Shape& s, u32 slot) {
    Cache cache;
    const u32 page_bytes = Cache::kRowBytes << s.page_log2;  // of one kv head
    cache.keys = s.k_cache + u64(s.kv_head) * page_bytes;
    cache.values = s.v_cache - s.k_cache;
    cache.pages = s.page_table + u64(slot) * s.pages_per_slot;
    cache.page_bytes = s.kv_heads * page_bytes;
    cache.page_log2 = s.page_log2;
    cache.pages_per_slot = s.pages_per_slot;
    return cache;
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
    const Part heads = heads_of(task);
    const u32 head_count = heads.end - heads.begin;
    const u32 kv_jobs = 2 * kv_rows, jobs = kv_jobs + here * head_count;
    const u64 width = u64(s.kv_heads) * D;
#pragma unroll 1
    for (u32 base = context.thread / 32 * kVectors; base < jobs;
         base += context.team_threads / kLanes) {
      // A lane without a job repeats the last one, and stores nothing.
      const u32 job = min(base + lane / kLanes, jobs - 1);
      const bool stores = base + lane / kLanes < jobs, is_query = job >= kv_jobs;
      const u32 query = job - kv_jobs, head = heads.begin + query % head_count;
      const u32 row = is_query ? first + query / head_count : job / 2;
      const bool is_value = !is_query && job % 2 == 1;
      const Place place = scratch.place[row];
      const f32* angles = s.rope + u64(place.position) * D + sub % half * 8;
      f32 cos[8], sin[8], norm[8];
      if (!EXTRAS || s.rotates) {
        read8(angles, cos);
        read8(angles + D / 2, sin);
      }
      if (s.qk_norm != nullptr) read8(s.qk_norm + (is_query ? 0 : D) + sub * 8, norm);
      const Cache cache = cache_of(s, place.slot);
      const u32 at = place_of_row(place.position, row_ancestors(context.rows[row]));
      const u64 key = cache.key(cache.page(at), at);
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
        for (u32 i = 0; i < 8; ++i) turned[i] *= s.scale_log2e;
        store_query(scratch.query[query / head_count][head], sub * 8, turned);
      } else {
        const u64 to = is_value ? key + cache.values : key;
        Elements<CACHE>::store8(to, sub * 8, is_value ? x : turned);
      }
    }
  }

  // For the tensor cores as bf16 and, D elements on, what that loses.
  GPURT_FN static void store_query(Query* to, u32 first, const f32 (&x)[8]) {
    const u64 at = reinterpret_cast<u64>(to);
    if constexpr (kIsMma) {
      f32 rest[8];
#pragma unroll
      for (u32 i = 0; i < 8; i += 2) {
        const u32 pair = pack_bf16x2(x[i], x[i + 1]);
        rest[i] = x[i] - bf16_low(pair);
        rest[i + 1] = x[i + 1] - bf16_high(pair);
      }
      Elements<kBf16>::store8(at, first, x);
      Elements<kBf16>::store8(at, D + first, rest);
    } else {
      Elements<kF32>::store8(at, first, x);
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

  // ---- 3 and 4: the tile that begins with `row`, all heads; the row behind it -------------------
  // Queries in scratch are of rows [first, end).
  __device__ __noinline__ static u32 attend(const TaskRecord& task, const BodyContext& context,
                                            u32 row, u32 first, u32 end) {
    AttentionTile tile = tile_at(task, context, row, end);
#pragma unroll 1
    for (tile.head = heads_of(task).begin; tile.head < heads_of(task).end; tile.head += kHeads) {
      tile.heads = min(kHeads, heads_of(task).end - tile.head);
      fold(task, context, tile, first, 0);
      context.sync();
      merge(task, context, tile);
      context.sync();
    }
    return row + tile.rows;
  }

  // A tile's partials, of positions [from, tile.end). Queries in scratch begin with row `first`.
  GPURT_FN static void fold(const TaskRecord& task, const BodyContext& context,
                            const AttentionTile& tile, u32 first, u32 from) {
    Scratch& scratch = scratch_of(context);
    const Cache cache = cache_at(task, context, tile.row);
    const u32 lane = context.thread % 32;
    // Its pages are in scratch.
    const bool is_first = !SPLIT && tile.row == rows_of(task, ~0u).begin;
#pragma unroll 1
    for (u32 warp = context.thread / 32; warp < kVirtualWarps; warp += kTeamWarps) {
      const u32 start = tile.template start<kChunk>(warp, from);
      f32* to = scratch.partial[warp];
      if constexpr (kIsMma) {
        u32 page = scratch.first_page[warp];
        if (!is_first && start < tile.end) page = cache.page(start);
        const Query* query = scratch.query[tile.row - first][tile.head];
        if constexpr (TILES == 1) {
          Fold::fold(cache, tile, bounds_of(task, scratch, tile, 0, lane), query, GROUP, start,
                     page, lane, to);
        } else {
          AttentionBounds bounds[TILES];
#pragma unroll
          for (u32 t = 0; t < TILES; ++t) bounds[t] = bounds_of(task, scratch, tile, t, lane);
          Fold::fold(cache, tile, bounds, query, GROUP, start, page, lane, to);
        }
      } else {
#pragma unroll 1
        for (u32 i = 0; i < tile.columns(); ++i, to += kPartialFloats<D>) {
          const Place& place = scratch.place[tile.row_of(i)];
          const Query* query = scratch.query[tile.row_of(i) - first][tile.head_of(i)];
          Fold::fold(cache, start, seen_from(task, place), min(place.end(), tile.end), query, lane,
                     to);
        }
      }
    }
  }

  // What this lane's two columns see, of the tile's `number`-th four.
  GPURT_FN static AttentionBounds bounds_of(const TaskRecord& task, const Scratch& scratch,
                                            const AttentionTile& tile, u32 number, u32 lane) {
    AttentionBounds bounds;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u32 column = number * kAttentionColumns + lane % 2 * 2 + i;
      const bool is_one = column < tile.columns();
      const Place& place = scratch.place[is_one ? tile.row_of(column) : tile.row];
      bounds.seen[i] = seen_from(task, place);
      bounds.end[i] = is_one ? min(place.end(), tile.end) : 0;
    }
    return bounds;
  }

  // Four of a column's D outputs, virtual warps in order: sums, and by what to divide them.
  GPURT_FN static f32 merge_sums(const Scratch& scratch, u32 column, u32 four, f32 (&out)[4],
                                 f32& top) {
    const f32* from = scratch.partial[0] + column * kPartialFloats<D>;
    constexpr u32 kStride = kWarpFloats;
    top = from[D];
#pragma unroll 4
    for (u32 w = 1; w < kVirtualWarps; ++w) top = fmaxf(top, from[w * kStride + D]);
    f32 total = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) out[i] = 0;
#pragma unroll 4
    for (u32 w = 0; w < kVirtualWarps; ++w, from += kStride) {
      const f32 weight = ex2_approx_ftz(from[D] - top);
      const float4 x = *reinterpret_cast<const float4*>(from + four * 4);
      total = fmaf(from[D + 1], weight, total);
      out[0] = fmaf(x.x, weight, out[0]), out[1] = fmaf(x.y, weight, out[1]);
      out[2] = fmaf(x.z, weight, out[2]), out[3] = fmaf(x.w, weight, out[3]);
    }
    return total;
  }

  // Outputs of a tile, whose partials are in scratch. Trip counts are equal for a whole warp, since
  // the norm and polls for the gate are collective; a lane beyond the last output repeats it, and
  // stores nothing.
  GPURT_FN static void merge(const TaskRecord& task, const BodyContext& context,
                             const AttentionTile& tile) {
    const Shape s = shape_of(task, context);
    constexpr u32 kFours = D / 4;
    static_assert(32 % kFours == 0, "a head's outputs lie in one warp");
    const u32 jobs = tile.columns() * kFours;
#pragma unroll 1
    for (u32 base = context.thread / 32 * 32; base < jobs; base += context.team_threads) {
      const u32 job = min(base + context.thread % 32, jobs - 1), four = job % kFours;
      const u32 row = tile.row_of(job / kFours);
      const u32 head = s.kv_head * GROUP + tile.head_of(job / kFours);
      f32 out[4], top;
      const f32 total = merge_sums(scratch_of(context), job / kFours, four, out, top);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) out[i] = __fdividef(out[i], total);
      const u32 element = head * D + four * 4;
      if constexpr (EXTRAS) {
        if (s.out_eps > 0) norm_head<D>(s.out_eps, out);
        // Gates lie behind all query heads of a row.
        const f32* gates = s.q + (u64(row) * 2 + 1) * s.heads * D + element;
        if (s.gated) gate_head(gates, s.q_payload, context, out);
      }
      if (base + context.thread % 32 < jobs)
        store_granule(reinterpret_cast<u64>(s.out + u64(row) * s.heads * D + element), out[0],
                      out[1], out[2], out[3]);
    }
  }
};

}  // namespace gpurt
