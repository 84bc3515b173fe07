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
// Of a task's first tile 2 and 3 overlap (kOverlaps): positions of earlier steps are read before
// queries are there, and folded before the step's own keys and values are (attention_waits.cuh).
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
#include "attention_mma.cuh"
#include "attention_output.cuh"
#include "attention_span.hpp"
#include "attention_waits.cuh"

namespace gpurt {

// Who folds: by what the cache holds.
template <bool IS_MMA, u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFolder {
  using Type = AttentionFold<D, CACHE, WINDOWED>;
};
template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFolder<true, D, CACHE, WINDOWED> {
  using Type = AttentionMma<D, CACHE, WINDOWED>;
};

// CACHE is a DTypeCode. SPLIT: a task has some of the positions (attention_split.cuh). TILES: of 4
// columns that a chunk of positions is read for; more than one has the weight ring as its scratch
// (attention_rows.cuh).
template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS = false, bool SPLIT = false, u32 TILES = 1>
struct attention_of {
  static_assert(D == 64 || D == 128, "head dimensions that fill lanes of 8");
  static constexpr bool kIsMma = CACHE == kBf16 || CACHE == kE4m3;
  using Fold = typename AttentionFolder<kIsMma, D, CACHE, EXTRAS>::Type;
  using Cache = typename Fold::Cache;
  using Query = typename Fold::Query;
  using Place = PlaceOf<EXTRAS>;
  static constexpr u32 kLanes = D / 8;          // lanes a vector
  static constexpr u32 kVectors = 32 / kLanes;  // vectors a warp prepares at once
  static constexpr u32 kChunk = Fold::kChunk;   // positions; a page is a multiple of it
  static constexpr u32 kRowsMax = 16;
  static constexpr bool kKeysAreThere = TILES != 1;  // another task has made them
  static constexpr bool kOverlaps = kIsMma && !SPLIT && TILES == 1 && kTeamWarps != 1;
  // Of a tile: columns, as many as their partials have room; heads, rows. Sums that stay in
  // registers while some columns are merged take them from what runs meanwhile: of long contexts
  // (kInTurns), where a chunk is read from memory, that pays.
  static constexpr bool kInTurns = SPLIT && kIsMma && TILES == 1 && kTeamWarps == kVirtualWarps;
  static constexpr u32 kParked =
      TILES == 1 ? 20480 / (kVirtualWarps * kPartialFloats<D> * 4) : TILES * kAttentionColumns;
  static constexpr u32 kColumns = kInTurns ? kAttentionColumns : kParked;
  static_assert(kColumns <= TILES * kAttentionColumns);
  static constexpr u32 kHeads = GROUP < kColumns ? GROUP : kColumns;
  static constexpr u32 kRows = kColumns / kHeads;
  static constexpr u32 kQueriesRoom =
      (TILES == 1 || kTeamWarps == 1 ? 8192 : 32768) / (GROUP * D * sizeof(Query));
  static constexpr u32 kQueryRows = kQueriesRoom == 0         ? 1
                                    : kQueriesRoom < kRowsMax ? kQueriesRoom
                                                              : kRowsMax;

  static constexpr u32 kPartials = kParked * kPartialFloats<D>;
  // Whose tiles are a warp's each keep that elsewhere (attention_alone.cuh).
  static constexpr bool kIsAlone = TILES != 1 && kIsMma;
  static constexpr u32 kWarpFloats = kIsAlone ? 4 : kPartials;

  // Where a warp is. What lives over calls lies here: a local variable would lie in local memory,
  // which each acquire on the SM throws out of L1.
  struct Turn {
    u32 row, head;      // the tile's first
    u32 first;          // the first row whose queries are in scratch
    u32 rows;           // of the tile
    u32 owner, owners;  // chunks whose keys are still to be made; none: they are there
  };

  struct Scratch {
    AttentionShape shape;
    Turn turn[kTeamWarps];
    typename Fold::View view[kIsMma && TILES == 1 ? kTeamWarps : 1];
    Place place[kRowsMax];
    alignas(16) Query query[kQueryRows][GROUP][D];  // rotated and scaled, of the rows at hand
    f32 partial[kVirtualWarps][kWarpFloats];  // of each column; more tiles keep their sums there
  };
  static_assert(TILES != 1 || sizeof(Scratch) <= kScratchBytes);

  GPURT_FN static Scratch& scratch() {
    u8* room = shared().scratch;
    if constexpr (TILES != 1) room = shared().ring[0];
    return *reinterpret_cast<Scratch*>(room);
  }
  GPURT_FN static const AttentionShape& shape() { return scratch().shape; }
  GPURT_FN static const Place& place(u32 row) { return scratch().place[row]; }
  GPURT_FN static Turn& turn() { return scratch().turn[threadIdx.x / 32]; }
  GPURT_FN static typename Fold::View& view() { return scratch().view[threadIdx.x / 32]; }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    look_up(task, context, context.step->rows);
    if (EXTRAS && task.addr[0] == 0) {  // keys and values only
      make_vectors(Crew::team(), shape().rows, 0, 0);
    } else {
      attend();
    }
  }

  // The task's rows, as many at a time as there is room for queries; tile by tile, by heads.
  GPURT_FN static void attend() {
    turn().row = turn().first = shape().row_begin;
    turn().head = shape().head_begin;
#pragma unroll 1
    while (turn().row < shape().row_end) {
      if (turn().row == turn().first && turn().head == shape().head_begin) {
        const u32 first = turn().first;
        Crew crew = Crew::team();
        // First by the warp that waits for the newest key in any case.
        if constexpr (kOverlaps) crew = crew.from(place(first).position / kChunk);
        // Keys and values of all rows: other tasks write the same, but when is not known.
        const bool makes_keys = !kOverlaps && !kKeysAreThere && first == shape().row_begin;
        make_vectors(crew, makes_keys ? shape().rows : 0, first, queries_end(first) - first);
        // The others pass it as they fold.
        if (!kOverlaps || makes_queries(turn().first)) team_sync();
      }
      fold_tile();
      if (kOverlaps && turn().owners != 0) {
        // By the warps that do not fold them.
        make_vectors(Crew::team().without(turn().owner, turn().owners), shape().rows, 0, 0);
        team_sync();
      }
      team_sync();
      merge_tile();
      team_sync();
      step_on();
    }
  }

  // To the next tile, behind a barrier.
  GPURT_FN static void step_on() {
    Turn at = turn();
    __syncwarp();
    at.head += kHeads;
    if (at.head >= shape().head_end) {
      at.head = shape().head_begin;
      at.row += at.rows;
      if (at.row == queries_end(at.first)) at.first = at.row;
    }
    turn() = at;
  }

  GPURT_FN static u32 queries_end(u32 first) { return min(first + kQueryRows, shape().row_end); }

  // ---- 1: of `rows` rows that begin with context.rows ------------------------------------------
  GPURT_FN static void look_up(const TaskRecord& task, const BodyContext& context, u32 rows) {
    if (threadIdx.x < rows) scratch().place[threadIdx.x] = Place::of(task, context, threadIdx.x);
    if (threadIdx.x == kTeamThreads - 1)
      AttentionShape::make<EXTRAS, SPLIT>(task, context, GROUP, rows, scratch().shape);
    team_sync();
  }

  // The tile that begins with this row, of rows before `end`; its first heads. A row on a branch of
  // a tree finds positions where others do not, so it has a tile of its own.
  template <u32 ROWS = kRows>
  GPURT_FN static AttentionTile tile_at(u32 row, u32 end) {
    AttentionTile tile{row, 0, 0, kHeads, ~0u, 0};
    const u32 slot = place(row).slot;
#pragma unroll 1
    for (; tile.rows < ROWS && row < end && place(row).slot == slot; ++row, ++tile.rows) {
      const bool is_alone = is_on_branch(place(row).ancestors());
      if (is_alone && tile.rows != 0) break;
      tile.seen = min(tile.seen, seen_from(place(row)));
      tile.end = max(tile.end, place(row).end());
      if (is_alone) end = row + 1;
    }
    return tile;
  }

  GPURT_FN static u32 seen_from(const Place& place) {
    return EXTRAS ? first_seen(shape().window, place.position) : 0;
  }

  // As a row sees it.
  GPURT_FN static Cache cache_at(const Place& place) {
    Cache cache = cache_of(place.slot);
    cache.branch = Branch::of(place.position, place.ancestors());
    return cache;
  }

  GPURT_FN static Cache cache_of(u32 slot) {
    const AttentionShape& s = shape();
    Cache cache;
    const u32 page_bytes = Cache::kRowBytes << s.page_log2;  // of one kv head
    cache.keys = s.k_cache + u64(s.kv_head) * page_bytes;
    cache.values = s.v_cache - s.k_cache;
    cache.pages = s.page_table + u64(slot) * s.pages_per_slot;
    cache.page_bytes = s.kv_heads * page_bytes;
    cache.page_log2 = s.page_log2;
    cache.pages_per_slot = s.pages_per_slot;
    cache.pages_inverse = s.pages_inverse;
    return cache;
  }

  // ---- 2: keys and values of `kv_rows` rows, queries of rows [first, first + here), by a crew
  // ---- Trip counts are equal for a whole warp, since polls, norm and rotation are collective.
  __device__ __noinline__ static void make_vectors(Crew crew, u32 kv_rows, u32 first, u32 here) {
    const AttentionShape& s = shape();
    const u32 lane = threadIdx.x % 32, sub = lane % kLanes, half = kLanes / 2;
    const u32 head_count = s.head_end - s.head_begin;
    const u32 kv_jobs = 2 * kv_rows, jobs = kv_jobs + here * head_count;
    const u64 width = u64(s.kv_heads) * D;
#pragma unroll 1
    for (u32 base = crew.index * kVectors; base < jobs; base += crew.count * kVectors) {
      // A lane without a job repeats the last one, and stores nothing.
      const u32 job = min(base + lane / kLanes, jobs - 1);
      const bool stores = base + lane / kLanes < jobs, is_query = job >= kv_jobs;
      const u32 query = job - kv_jobs, query_row = divided(query, s.heads_inverse);
      const u32 head = s.head_begin + query - query_row * head_count;
      const u32 row = is_query ? first + query_row : job / 2;
      const bool is_value = !is_query && job % 2 == 1;
      const Place& place = scratch().place[row];
      const f32* angles = s.rope + u64(place.position) * D + sub % half * 8;
      f32 cos[8] = {}, sin[8] = {}, norm[8] = {};
      if (!EXTRAS || s.rotates) {
        read8(angles, cos);
        read8(angles + D / 2, sin);
      }
      if (s.qk_norm != nullptr) read8(s.qk_norm + (is_query ? 0 : D) + sub * 8, norm);
      const Cache cache = cache_of(place.slot);
      const u32 at = place_of_row(place.position, place.ancestors());
      const u64 key = cache.key(cache.page(at), at);
      const u64 q_row = EXTRAS && s.gated ? u64(row) * 2 : row;
      const f32* from = is_query ? s.q + (q_row * s.heads + s.kv_head * GROUP + head) * D
                                 : s.kv + row * 2 * width + (is_value ? width : 0) + s.kv_head * D;
      f32 x[8], turned[8];
      load8(from + sub * 8, is_query ? s.q_payload : s.kv_payload, x);
      prepare(s, x, cos, sin, norm, sub < half, turned);
      if (!stores) continue;
      if (SPLIT && !is_query && place.position / kAttentionSpan % s.splits != s.split) continue;
      if (is_query) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) turned[i] *= s.scale_log2e;
        store_query(scratch().query[query_row][head], sub * 8, turned);
      } else {
        const u64 to = is_value ? key + cache.values : key;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) turned[i] = is_value ? x[i] : turned[i];
        Elements<CACHE>::store8(to, sub * 8, turned);
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
  __device__ static void prepare(const AttentionShape& s, const f32 (&x)[8], const f32 (&cos)[8],
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

  // ---- 3: the partials of a tile ----------------------------------------------------------------
  __device__ __noinline__ static void fold_tile() {
    Turn& at = turn();
    AttentionTile tile = tile_at(at.row, queries_end(at.first));
    take_heads(tile, at.head);
    Waits waits = kNoWaits;
    if constexpr (kOverlaps) {
      const bool is_first = at.row == at.first && at.head == shape().head_begin;
      waits.queries = is_first && !makes_queries(at.row);
      if (is_first && at.row == shape().row_begin) waits.fresh = first_fresh(place(at.row).slot);
    }
    at.rows = tile.rows;
    at.owner = waits.fresh / kChunk;
    at.owners = (tile.end - 1) / kChunk + 1 - at.owner;
    fold(tile, at.first, 0, waits);
    waits.for_queries();  // a warp without a chunk
    if (waits.fresh == kAllWritten) turn().owners = 0;
  }

  // Whether this warp has some of the queries that begin with row `first`, where they overlap.
  GPURT_FN static bool makes_queries(u32 first) {
    const u32 heads = shape().head_end - shape().head_begin;
    return Crew::team().from(place(first).position / kChunk).index * kVectors <
           (queries_end(first) - first) * heads;
  }

  GPURT_FN static void take_heads(AttentionTile& tile, u32 head) {
    tile.head = head;
    if constexpr (GROUP % kHeads != 0) tile.heads = min(kHeads, shape().head_end - head);
  }

  // The first position of a slot whose keys and values are this step's.
  GPURT_FN static u32 first_fresh(u32 slot) {
    u32 fresh = kAllWritten;
#pragma unroll 1
    for (u32 row = 0; row < shape().rows; ++row) {
      if (place(row).slot == slot) fresh = min(fresh, place(row).position);
    }
    return fresh;
  }

  // A tile's partials, of positions [from, tile.end). Queries in scratch begin with row `first`.
  GPURT_FN static void fold(const AttentionTile& tile, u32 first, u32 from, Waits& waits) {
    if constexpr (kTeamWarps == kVirtualWarps) {
      fold_warp(threadIdx.x / 32, tile, first, from, waits);
    } else {
#pragma unroll 1
      for (u32 warp = 0; warp < kVirtualWarps; ++warp) fold_warp(warp, tile, first, from, waits);
    }
  }

  // The partial of a virtual warp.
  GPURT_FN static void fold_warp(u32 warp, const AttentionTile& tile, u32 first, u32 from,
                                 Waits& waits) {
    const Cache cache = cache_at(place(tile.row));
    const u32 lane = threadIdx.x % 32, start = tile.template start<kChunk>(warp, from);
    f32* to = scratch().partial[warp];
    if constexpr (kIsMma) {
      const Query* query = scratch().query[tile.row - first][tile.head];
      Fold::fold(cache, tile, bounds_of(tile, 0, lane), query, GROUP, start, lane, view(), to,
                 waits);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < tile.columns(); ++i, to += kPartialFloats<D>) {
        const Place& of_row = place(tile.row_of(i));
        const Query* query = scratch().query[tile.row_of(i) - first][tile.head_of(i)];
        Fold::fold(cache, start, seen_from(of_row), min(of_row.end(), tile.end), query, lane, to);
      }
    }
  }

  // Of this warp, for who parks them in turns.
  GPURT_FN static auto sums_of(const AttentionTile& tile, u32 first, u32 from) {
    const u32 lane = threadIdx.x % 32, start = tile.template start<kChunk>(threadIdx.x / 32, from);
    Waits waits = kNoWaits;
    return Fold::template sum<true>(cache_at(place(tile.row)), tile, bounds_of(tile, 0, lane),
                                    scratch().query[tile.row - first][tile.head], GROUP, start,
                                    lane, view(), scratch().partial[threadIdx.x / 32], waits);
  }
  template <class Sums>
  GPURT_FN static void park(const Sums& sums, u32 first, u32 end) {
    Fold::park(sums, first, end, threadIdx.x % 32, scratch().partial[threadIdx.x / 32]);
  }

  // What this lane's two columns see, of the tile's `number`-th four.
  GPURT_FN static AttentionBounds bounds_of(const AttentionTile& tile, u32 number, u32 lane) {
    AttentionBounds bounds;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u32 column = number * kAttentionColumns + lane % 2 * 2 + i;
      const bool is_one = column < tile.columns();
      const Place& of_row = place(is_one ? tile.row_of(column) : tile.row);
      bounds.seen[i] = seen_from(of_row);
      bounds.end[i] = is_one ? min(of_row.end(), tile.end) : 0;
    }
    return bounds;
  }

  // Four of a column's D outputs, virtual warps in order: sums, and by what to divide them. All
  // lanes of a warp, of which 16 side by side have one column: a lane weighs one virtual warp.
  GPURT_FN static f32 merge_sums(u32 column, u32 four, f32 (&out)[4], f32& top) {
    static_assert(kVirtualWarps == 16 && D / 4 % kVirtualWarps == 0);
    const u32 lane = threadIdx.x % 32;
    const f32* from = scratch().partial[0] + column * kPartialFloats<D>;
    const f32* own = from + lane % kVirtualWarps * kWarpFloats + D;
    const f32 own_top = own[0], own_total = own[1];
    top = own_top;
#pragma unroll
    for (u32 step = 1; step < kVirtualWarps; step *= 2)
      top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const f32 own_weight = ex2_approx_ftz(own_top - top);
    f32 total = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) out[i] = 0;
#pragma unroll 4
    for (u32 w = 0; w < kVirtualWarps; ++w, from += kWarpFloats) {
      const u32 source = lane / kVirtualWarps * kVirtualWarps + w;
      const f32 weight = __shfl_sync(~0u, own_weight, source);
      const float4 x = *reinterpret_cast<const float4*>(from + four * 4);
      total = fmaf(__shfl_sync(~0u, own_total, source), weight, total);
      out[0] = fmaf(x.x, weight, out[0]), out[1] = fmaf(x.y, weight, out[1]);
      out[2] = fmaf(x.z, weight, out[2]), out[3] = fmaf(x.w, weight, out[3]);
    }
    return total;
  }

  // ---- 4: outputs of a tile, whose partials are in scratch --------------------------------------
  // Trip counts are equal for a whole warp, since
  // the norm and polls for the gate are collective; a lane beyond the last output repeats it, and
  // stores nothing.
  __device__ __noinline__ static void merge_tile() {
    const AttentionShape& s = shape();
    AttentionTile tile{turn().row, turn().rows, 0, kHeads, 0, 0};
    take_heads(tile, turn().head);
    constexpr u32 kFours = D / 4;
    static_assert(32 % kFours == 0, "a head's outputs lie in one warp");
    const u32 jobs = tile.columns() * kFours;
#pragma unroll 1
    for (u32 base = threadIdx.x / 32 * 32; base < jobs; base += kTeamThreads) {
      const u32 job = min(base + threadIdx.x % 32, jobs - 1), four = job % kFours;
      const u32 row = tile.row_of(job / kFours);
      const u32 head = s.kv_head * GROUP + tile.head_of(job / kFours);
      const u32 element = head * D + four * 4;
      const u64 gates = gates_of(s, row, element);
      uint4 gate{};
      if constexpr (EXTRAS) {
        if (s.gated) gate = ld_relaxed_b128(gates);  // before it is needed
      }
      f32 out[4], top;
      const f32 total = merge_sums(job / kFours, four, out, top);
      finish_four(s, row, element, gate, gates, total, out, base + threadIdx.x % 32 < jobs);
    }
  }

  // Gates lie behind all query heads of a row.
  GPURT_FN static u64 gates_of(const AttentionShape& s, u32 row, u32 element) {
    return reinterpret_cast<u64>(s.q + (u64(row) * 2 + 1) * s.heads * D + element);
  }

  // Four outputs from their sums and the gate that was read at `gates`. All lanes of a warp.
  GPURT_FN static void finish_four(const AttentionShape& s, u32 row, u32 element, uint4 gate,
                                   u64 gates, f32 total, f32 (&out)[4], bool stores) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) out[i] = __fdividef(out[i], total);
    if constexpr (EXTRAS) {
      if (s.out_eps > 0) norm_head<D>(s.out_eps, out);
      if (s.gated) gate_head(gate, gates, s.q_payload, out);
    }
    if (stores)
      store_granule(reinterpret_cast<u64>(s.out + u64(row) * s.heads * D + element), out[0], out[1],
                    out[2], out[3]);
  }
};

}  // namespace gpurt
