// attention of tiles by a warp each, all of a tile's virtual warps one after another.
//
// For steps of many rows, which have tiles enough for every warp. The definition weighs a virtual
// warp's partial by the largest score of all (attention.cuh, merge_sums), so the team goes over the
// keys twice: for that score, then for the sums; each partial is added as soon as it is made. So a
// warp needs room for one of them, where a team needs all. Sixteen tiles of a slot see nearly the
// same positions, so the team brings each chunk into shared memory once (attention_chunks.cuh), and
// all warps take it from there. With more than one span (SPLIT) that is done span by span, and what
// a span leaves are its sums, as attention_split.cuh leaves them.
#pragma once
#include "attention_chunks.cuh"
#include "attention_output.cuh"

namespace gpurt {

// Whole: the attention_of whose scratch, places and queries these are.
template <class Whole, u32 D, u32 GROUP, u32 CACHE, bool EXTRAS, bool SPLIT>
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

  static constexpr u32 kParts = D / 16;  // of a lane's sums in registers, 4 of one j
  static_assert(kParts / 2 == kOwn);

  // What a warp has in scratch of its outputs so far. Of what lanes (g, c) and (g, c + 2) have in
  // common the first has the lower half of its dimensions, the other the upper one; in the end they
  // lie by columns.
  struct Room {
    float4 out[kOwn][32];
    f32 top[kAttentionColumns], total[kAttentionColumns];
  };

  struct alignas(128) Scratch {  // behind Whole's
    typename Chunks::Room chunks;
    Cache cache[kTeamWarps];  // as a warp's tile sees it
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
      if constexpr (SPLIT) {
#pragma unroll 1
        for (u32 span = seen / kAttentionSpan; span * kAttentionSpan < until; ++span) {
          AttentionTile part = own;
          part.end = min(own.end, (span + 1) * kAttentionSpan);
          const u32 low = max(seen, span * kAttentionSpan);
          attend_tile(part, first, low / kChunk,
                      (min(until, (span + 1) * kAttentionSpan) + kChunk - 1) / kChunk);
          team_sync();
        }
      } else {
        attend_tile(own, first, seen / kChunk, (until + kChunk - 1) / kChunk);
        team_sync();
      }
    }
  }

 private:
  // What is the same for all chunks of a warp.
  struct Lane {
    AttentionBounds bounds;
    u32 seen, end;        // of the tile
    u32 query;            // shared address of its part of its column's
    u32 keys, values[2];  // places in a half: of position g; of 2c and 2c + 1

    GPURT_FN bool sees(u32 chunk) const { return chunk >= seen / kChunk && chunk * kChunk < end; }
  };

  // Chunks [begin, end) are those of the team's tiles. A warp may have none.
  __device__ __noinline__ static void attend_tile(const AttentionTile& given, u32 first, u32 begin,
                                                  u32 end) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    Scratch& own = scratch();
    Lane w;
    {
      const AttentionTile tile = given;
      const u32 column = min(g % 4, max(tile.columns(), 1u) - 1);
      const Query* query = Whole::scratch().query[tile.row - first][tile.head];
      if (tile.rows != 0) query += (column / tile.heads * GROUP + column % tile.heads) * D;
      w.query = shared_address(query) + (g / 4 * D + c * 8) * 2;
      w.bounds = Whole::bounds_of(tile, 0, lane);
      w.seen = tile.seen, w.end = tile.end;
      w.keys = Chunks::place(g, c * sizeof(Eight));
#pragma unroll
      for (u32 h = 0; h < 2; ++h) w.values[h] = Chunks::place(2 * c + h, g * sizeof(Eight));
      if (lane == 0) own.cache[threadIdx.x / 32] = Whole::cache_at(Whole::place(tile.row));
      __syncwarp();
    }
    Chunks chunks;
    chunks.start(own.chunks, own.cache[threadIdx.x / 32], begin, end);
    f32 top[2] = {kNothingSeen, kNothingSeen};
#pragma unroll 1
    for (u32 chunk = begin; chunk < end; chunk += 2) {
      const u32 at = chunks.take();
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        if (w.sees(chunk + h)) find_tops(w, at + h * Chunks::kHalf, (chunk + h) * kChunk, top);
      }
    }
    join_tops(top);
    Room& room = own.room[threadIdx.x / 32];
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) room.out[i][lane] = make_float4(0, 0, 0, 0);
    f32 total[2] = {};
#pragma unroll 1
    for (u32 v = 0; v < kVirtualWarps; ++v) {
      typename One::Sums sums{{kNothingSeen, kNothingSeen}, {}, {}};
      bool has_some = false;
#pragma unroll 1
      for (u32 chunk = begin + (v - begin) % kVirtualWarps; chunk < end; chunk += kVirtualWarps) {
        const u32 at = chunks.take();
        if (!w.sees(chunk)) continue;
        add_chunk(w, at, chunk * kChunk, sums);
        has_some = true;
      }
      if (has_some) add_partial(sums, top, total, room, lane);
    }
    if (given.rows != 0) {
      by_columns(top, total, room, lane);
      store(given, begin, lane, room);
    }
  }

  // Where a branch has a position elsewhere, if it has: then its elements come from there.
  GPURT_FN static u64 elsewhere(u32 position, bool is_value) {
    if constexpr (GPURT_TREES == 0) return 0;
    const Cache cache = scratch().cache[threadIdx.x / 32];
    if (!cache.branch.is_elsewhere(position)) return 0;
    const u32 place = cache.branch.place(position);
    return cache.key(cache.page(place), place) + (is_value ? cache.values : 0);
  }
  template <u32 STRIDE>
  GPURT_FN static void read(u32 at, u64 there, u32 from, Eight (&eights)[D / STRIDE]) {
    if (GPURT_TREES == 0 || there == 0) {
      Chunks::template read<STRIDE>(at, eights);
      return;
    }
#pragma unroll
    for (u32 b = 0; b < D / STRIDE; ++b)
      eights[b] = Elements<CACHE>::read8(there + from + b * STRIDE * Cache::kElementBytes, 0, true);
  }

  // Of positions that a column does not see any scores come out, NaN too: nobody looks at them.
  GPURT_FN static void score_chunk(const Lane& w, u32 at, u32 begin, f32 (&score)[4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    Eight keys[2][D / 32];
#pragma unroll
    for (u32 h = 0; h < 2; ++h)
      read<32>(at + w.keys + h * 8 * Cache::kRowBytes,
               elsewhere(min(begin + g + 8 * h, w.end - 1), false), c * sizeof(Eight), keys[h]);
    // Anew for each chunk: sums need the registers.
    One::scores(keys, [&](u32 b) { return ld_shared_b128(w.query + b * 64); }, score);
  }

  // The largest score of each column.
  GPURT_FN static void find_tops(const Lane& w, u32 at, u32 begin, f32 (&top)[2]) {
    const u32 g = threadIdx.x % 32 / 4;
    f32 score[4] = {};
    score_chunk(w, at, begin, score);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (w.bounds.template has<EXTRAS>(i, begin + g)) top[i] = fmaxf(top[i], score[i]);
      if (w.bounds.template has<EXTRAS>(i, begin + g + 8)) top[i] = fmaxf(top[i], score[2 + i]);
    }
  }
  GPURT_FN static void join_tops(f32 (&top)[2]) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 step = 4; step < 32; step *= 2)
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
    }
  }

  // As AttentionMma::sum adds it.
  GPURT_FN static void add_chunk(const Lane& w, u32 at, u32 begin, typename One::Sums& sums) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    f32 score[4] = {};
    score_chunk(w, at, begin, score);
    asm volatile("" ::: "memory");  // there are no registers for both at once
    u32 own[2] = {w.values[0], w.values[1]};
    u32 upper = 8 * Cache::kRowBytes;  // from there to those of positions 8 further on
    Eight values[4][D / 64];
    if (begin + kChunk <= w.end && (!EXTRAS || w.seen <= begin)) {
#pragma unroll
      for (u32 h = 0; h < 4; ++h)
        read<64>(at + Chunks::kHalf + own[h % 2] + h / 2 * upper,
                 elsewhere(begin + 2 * c + h % 2 + h / 2 * 8, true), g * sizeof(Eight), values[h]);
    } else {
      // For one that no row sees the next that some row does: it weighs nothing, but zero times NaN
      // is NaN.
#pragma unroll
      for (u32 h = 0; h < 4; ++h) {
        u32 row = min(2 * c + h % 2 + h / 2 * 8, w.end - 1 - begin);
        if (EXTRAS && w.seen > begin) row = max(row, w.seen - begin);
        read<64>(at + Chunks::kHalf + Chunks::place(row, g * sizeof(Eight)),
                 elsewhere(begin + row, true), g * sizeof(Eight), values[h]);
      }
    }
    u32 weights[2];
    One::weigh(w.bounds, begin + g, c >= 2, score, sums, weights);
    One::add(values, movmatrix_trans(weights[0]), movmatrix_trans(weights[1]), sums);
  }

  // Four sums of a lane, (b, j) being number / 4 and number % 4.
  GPURT_FN static f32 (&part(typename One::Sums& sums, u32 number))[4] {
    return sums.out[number / 4][number % 4];
  }

  // As AttentionMma::finish joins a column and its rests, and attention_of::merge_sums adds them.
  GPURT_FN static void add_partial(typename One::Sums& sums, const f32 (&top)[2], f32 (&total)[2],
                                   Room& room, u32 lane) {
    const bool is_upper = lane % 4 >= 2;
    f32 weight[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 step = 4; step < 32; step *= 2)
        sums.total[i] += __shfl_xor_sync(~0u, sums.total[i], step);
      weight[i] = ex2_approx_ftz(sums.max[i] - top[i]);
      total[i] = fmaf(sums.total[i], weight[i], total[i]);
    }
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
      f32 x[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const f32 low = part(sums, n)[i], high = part(sums, kOwn + n)[i];
        x[i] = (is_upper ? high : low) + __shfl_xor_sync(~0u, is_upper ? low : high, 2);
      }
      float4 out = room.out[n][lane];
      out.x = fmaf(x[0], weight[0], out.x), out.y = fmaf(x[1], weight[1], out.y);
      out.z = fmaf(x[2], weight[0], out.z), out.w = fmaf(x[3], weight[1], out.w);
      room.out[n][lane] = out;
    }
  }

  // What lanes have of columns 2c and 2c + 1 to where those lie one after another.
  GPURT_FN static void by_columns(const f32 (&top)[2], const f32 (&total)[2], Room& room,
                                  u32 lane) {
    const u32 g = lane / 4, column = lane % 2 * 2, number = lane % 4 / 2 * kOwn;
    float4 x[kOwn];
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) x[n] = room.out[n][lane];
    __syncwarp();
    float4* to = &room.out[0][0] + column * kFours + number / 4 * 16 + g * 2 + number % 4 / 2;
#pragma unroll
    for (u32 n = 0; n < kOwn; n += 2) {
      to[n / 2] = make_float4(x[n].x, x[n].z, x[n + 1].x, x[n + 1].z);
      to[kFours + n / 2] = make_float4(x[n].y, x[n].w, x[n + 1].y, x[n + 1].w);
    }
    if (g == 0 && lane < 2) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) room.top[column + i] = top[i], room.total[column + i] = total[i];
    }
    __syncwarp();
  }

  GPURT_FN static u32 column_of(const AttentionTile& tile, u32 lane, u32 i) {
    return min((i * 32 + lane) / kFours, tile.columns() - 1);
  }

  // Chunks of a span began with `begin`. A lane beyond the last output repeats one, and stores
  // nothing.
  GPURT_FN static void store(const AttentionTile& tile, u32 begin, u32 lane, const Room& room) {
    const AttentionShape& s = Whole::shape();
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) {
      const u32 column = column_of(tile, lane, i), row = tile.row_of(column);
      const u32 four = (i * 32 + lane) % kFours;
      const bool stores = (i * 32 + lane) / kFours < tile.columns();
      const float4 x = room.out[i][lane];
      if constexpr (SPLIT) {
        const AttentionSpans spans{s.kv_heads, s.spans, GROUP, D};
        const u32 span = begin * kChunk / kAttentionSpan;
        const u32 end = min(Whole::place(row).end(), tile.end);
        if (!stores || end <= span * kAttentionSpan || end <= Whole::seen_from(Whole::place(row)))
          continue;
        f32* to = s.partials + spans.word(row, s.kv_head, span, tile.head_of(column));
        reinterpret_cast<float4*>(to)[four] = x;
        if (four == 0) to[D] = room.top[column], to[D + 1] = room.total[column];
      } else {
        const u32 element = (s.kv_head * GROUP + tile.head_of(column)) * D + four * 4;
        const u64 gates = Whole::gates_of(s, row, element);
        uint4 gate{};
        if constexpr (EXTRAS) {
          if (s.gated) gate = ld_relaxed_b128(gates);
        }
        f32 out[4] = {x.x, x.y, x.z, x.w};
        Whole::finish_four(s, row, element, gate, gates, room.total[column], out, stores);
      }
    }
  }
};

}  // namespace gpurt
