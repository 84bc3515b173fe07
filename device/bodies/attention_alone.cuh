// attention of tiles by a warp each, all of a tile's virtual warps one after another.
//
// For steps of many rows, which have tiles enough for every warp. The definition weighs a virtual
// warp's partial by the largest score of all (attention.cuh, merge_sums), so the team goes over the
// keys twice: for that score, then for the sums; each partial is added as soon as it is made. So a
// warp needs room for one of them, where a team needs all. Sixteen tiles of a slot see nearly the
// same positions, so the team brings each chunk into shared memory once (attention_chunks.cuh), and
// all warps take it from there.
#pragma once
#include "attention_chunks.cuh"
#include "attention_output.cuh"

namespace gpurt {

// Whole: the attention_of whose scratch, places and queries these are.
template <class Whole, u32 D, u32 GROUP, u32 CACHE, bool EXTRAS>
struct AttentionAlone {
  using One = AttentionMma<D, CACHE, EXTRAS>;
  using Chunks = AttentionChunks<D, CACHE, EXTRAS>;
  using Cache = typename One::Cache;
  using Eight = typename One::Eight;
  using Query = typename One::Query;
  static constexpr u32 kChunk = One::kChunk;
  static constexpr u32 kHeads = GROUP < kAttentionColumns ? GROUP : kAttentionColumns;
  static constexpr u32 kRows = kAttentionColumns / kHeads;
  static constexpr u32 kFours = D / 4;                          // of a column's outputs
  static constexpr u32 kOwn = kAttentionColumns * kFours / 32;  // of them, a lane's

  // What a warp has in scratch: a partial and the largest score of each column; outputs so far, of
  // each lane its fours `lane`, `lane` + 32, ... of the tile's columns.
  struct Room {
    f32 partial[kAttentionColumns * kPartialFloats<D>];
    f32 tops[kAttentionColumns];
    float4 out[kOwn][32];
    f32 total[kOwn][32];
  };

  struct alignas(128) Scratch {  // behind Whole's
    u8 chunks[Chunks::kRoom];
    Room room[kTeamWarps];
  };
  GPURT_FN static Scratch& scratch() {
    return *reinterpret_cast<Scratch*>(shared().ring[0] + kOwnScratch);
  }
  static constexpr u32 kOwnScratch = (sizeof(typename Whole::Scratch) + 127) / 128 * 128;
  static constexpr u32 kScratch = kOwnScratch + sizeof(Scratch);

  // Rows [first, end) of the step's part at hand, whose queries begin with row `first`: a warp a
  // tile of one slot at a time.
  GPURT_FN static void attend(u32 first, u32 end) {
    const AttentionShape& s = Whole::shape();
    u32 row = first, head = s.head_begin;
#pragma unroll 1
    while (row < end) {
      AttentionTile own{row, 0, head, 0, 0, 0};
      const u32 slot = Whole::place(row).slot;
      u32 seen = ~0u, until = 0;
#pragma unroll 1
      for (u32 warp = 0; warp < kTeamWarps && row < end && Whole::place(row).slot == slot; ++warp) {
        AttentionTile tile = Whole::template tile_at<kRows>(row, end);
        tile.head = head, tile.heads = min(kHeads, s.head_end - head);
        seen = min(seen, tile.seen), until = max(until, tile.end);
        if (warp == threadIdx.x / 32) own = tile;
        head += kHeads;
        if (head >= s.head_end) head = s.head_begin, row += tile.rows;
      }
      attend_tile(own, first, seen / kChunk, (until + kChunk - 1) / kChunk);
      team_sync();
    }
  }

 private:
  // Chunks [begin, end) are those of the team's tiles. A warp may have none.
  __device__ __noinline__ static void attend_tile(const AttentionTile& given, u32 first, u32 begin,
                                                  u32 end) {
    const AttentionTile tile = given;
    const u32 lane = threadIdx.x % 32, column = min(lane / 4 % 4, max(tile.columns(), 1u) - 1);
    const Query* query = Whole::scratch().query[tile.row - first][tile.head];
    if (tile.rows != 0) query += (column / tile.heads * GROUP + column % tile.heads) * D;
    Room& room = scratch().room[threadIdx.x / 32];
    const AttentionBounds bounds = Whole::bounds_of(tile, 0, lane);
    Chunks chunks;
    chunks.cache = Whole::cache_at(Whole::place(tile.row));
    chunks.room = shared_address(scratch().chunks);
    chunks.start(begin, end);
    f32 top[2] = {kNothingSeen, kNothingSeen};
#pragma unroll 1
    for (u32 chunk = begin; chunk < end; ++chunk) {
      const u32 at = chunks.take();
      if (sees(tile, chunk)) find_tops(chunks.cache, tile, bounds, query, at, chunk * kChunk, top);
    }
    store_tops(lane, top, room.tops);
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i)
      room.out[i][lane] = make_float4(0, 0, 0, 0), room.total[i][lane] = 0;
#pragma unroll 1
    for (u32 v = 0; v < kVirtualWarps; ++v) {
      typename One::Sums sums{{kNothingSeen, kNothingSeen}, {}, {}};
#pragma unroll 1
      for (u32 chunk = chunks.first_of(v); chunk < end; chunk += kVirtualWarps) {
        const u32 at = chunks.take();
        if (sees(tile, chunk))
          add_chunk(chunks.cache, tile, bounds, query, at, chunk * kChunk, sums);
      }
      if (tile.rows == 0) continue;
      One::finish(sums);
      One::park(sums, 0, tile.columns(), lane, room.partial);
      __syncwarp();
      add_partial(tile, lane, room);
      __syncwarp();
    }
    if (tile.rows != 0) store(tile, lane, room);
  }

  GPURT_FN static bool sees(const AttentionTile& tile, u32 chunk) {
    return chunk >= tile.seen / kChunk && chunk * kChunk < tile.end;
  }

  // A position's elements, as AttentionMma::read has them. What a branch has elsewhere comes from
  // there. from: the first byte; values: from keys to values in a chunk, or 0.
  template <u32 STRIDE>
  GPURT_FN static void read(const Cache& cache, const AttentionTile& tile, u32 at, u32 offset,
                            u32 from, u32 begin, bool is_value, Eight (&eights)[D / STRIDE]) {
    offset = min(offset, tile.end - 1 - begin);
    if (EXTRAS && tile.seen > begin) offset = max(offset, tile.seen - begin);
    if (!cache.branch.is_elsewhere(begin + offset)) {
      Chunks::template read<STRIDE>(at + (is_value ? Chunks::kHalf : 0), offset, from, eights);
      return;
    }
    const u32 place = cache.branch.place(begin + offset);
    const u64 there = cache.key(cache.page(place), place) + (is_value ? cache.values : 0) + from;
#pragma unroll
    for (u32 b = 0; b < D / STRIDE; ++b)
      eights[b] = Elements<CACHE>::read8(there + b * STRIDE * Cache::kElementBytes, 0, true);
  }

  GPURT_FN static void score_chunk(const Cache& cache, const AttentionTile& tile,
                                   const Query* query, u32 at, u32 begin, f32 (&score)[4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    Eight keys[2][D / 32];
#pragma unroll
    for (u32 h = 0; h < 2; ++h)
      read<32>(cache, tile, at, g + 8 * h, c * sizeof(Eight), begin, false, keys[h]);
    const u32 own = shared_address(query) + (g / 4 * D + c * 8) * 2;
    // Anew for each chunk: sums need the registers.
    One::scores(keys, [&](u32 b) { return ld_shared_b128(own + b * 64); }, score);
  }

  // The largest score of each column.
  GPURT_FN static void find_tops(const Cache& cache, const AttentionTile& tile,
                                 const AttentionBounds& bounds, const Query* query, u32 at,
                                 u32 begin, f32 (&top)[2]) {
    const u32 g = threadIdx.x % 32 / 4;
    f32 score[4] = {};
    score_chunk(cache, tile, query, at, begin, score);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (bounds.template has<EXTRAS>(i, begin + g)) top[i] = fmaxf(top[i], score[i]);
      if (bounds.template has<EXTRAS>(i, begin + g + 8)) top[i] = fmaxf(top[i], score[2 + i]);
    }
  }
  GPURT_FN static void store_tops(u32 lane, f32 (&top)[2], f32* to) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 step = 4; step < 32; step *= 2)
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
      if (lane < 2) to[lane * 2 + i] = top[i];
    }
  }

  // As AttentionMma::sum adds it.
  GPURT_FN static void add_chunk(const Cache& cache, const AttentionTile& tile,
                                 const AttentionBounds& bounds, const Query* query, u32 at,
                                 u32 begin, typename One::Sums& sums) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    f32 score[4] = {};
    score_chunk(cache, tile, query, at, begin, score);
    asm volatile("" ::: "memory");  // there are no registers for both at once
    Eight values[4][D / 64];
#pragma unroll
    for (u32 h = 0; h < 4; ++h)
      read<64>(cache, tile, at, 2 * c + h % 2 + h / 2 * 8, g * sizeof(Eight), begin, true,
               values[h]);
    u32 weights[2];
    One::weigh(bounds, begin + g, c >= 2, score, sums, weights);
    One::add(values, movmatrix_trans(weights[0]), movmatrix_trans(weights[1]), sums);
  }

  GPURT_FN static u32 column_of(const AttentionTile& tile, u32 lane, u32 i) {
    return min((i * 32 + lane) / kFours, tile.columns() - 1);
  }

  // As attention_of::merge_sums adds them.
  GPURT_FN static void add_partial(const AttentionTile& tile, u32 lane, Room& room) {
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) {
      const u32 column = column_of(tile, lane, i);
      const f32* from = room.partial + column * kPartialFloats<D>;
      const f32 weight = ex2_approx_ftz(from[D] - room.tops[column]);
      const float4 x = *reinterpret_cast<const float4*>(from + (i * 32 + lane) % kFours * 4);
      float4 out = room.out[i][lane];
      out.x = fmaf(x.x, weight, out.x), out.y = fmaf(x.y, weight, out.y);
      out.z = fmaf(x.z, weight, out.z), out.w = fmaf(x.w, weight, out.w);
      room.out[i][lane] = out;
      room.total[i][lane] = fmaf(from[D + 1], weight, room.total[i][lane]);
    }
  }

  // A lane beyond the last output repeats one, and stores nothing.
  GPURT_FN static void store(const AttentionTile& tile, u32 lane, const Room& room) {
    const AttentionShape& s = Whole::shape();
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) {
      const u32 column = column_of(tile, lane, i), row = tile.row_of(column);
      const u32 head = s.kv_head * GROUP + tile.head_of(column);
      const u32 element = head * D + (i * 32 + lane) % kFours * 4;
      const bool stores = (i * 32 + lane) / kFours < tile.columns();
      const u64 gates = Whole::gates_of(s, row, element);
      uint4 gate{};
      if constexpr (EXTRAS) {
        if (s.gated) gate = ld_relaxed_b128(gates);
      }
      const float4 x = room.out[i][lane];
      f32 out[4] = {x.x, x.y, x.z, x.w};
      Whole::finish_four(s, row, element, gate, gates, room.total[i][lane], out, stores);
    }
  }
};

}  // namespace gpurt
