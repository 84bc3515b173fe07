// expert_matvec on the GPU: y = epilogue(W[e] norm(x)) for the rows that chose expert e.
//
// The contract is in graphs/ops/expert_matvec.py, `routes` in route.py, the packing in
// packing_experts.py. A task computes 16 T 16/G rows of the W of its slot's expert (T row tiles of
// 16 rows a virtual warp, G K groups; tile[3] says both), for up to 16 pairs: eight are the columns
// of one mma.
//
//   round     16 units, one a virtual warp: v of 16 has K group v / (16/G), row group v % (16/G)
//   stage     as many rounds as fit 36 KB: 4 of nvfp4 (codes and scales), 1 of bf16
//   chunk q   of K group g: columns 64 (q G + g) .. +63; T rounds of it follow one another, row
//   tile
//             i in the i-th: activations, once converted, serve all T
//
// A virtual warp sums each of its row tiles in one chain over its chunks; then a thread an output
// adds the K groups, two pairs a pass. So a pair's bits hang on K and G, not on who shares the
// expert, the slot, the rows, or the team. x is rounded to bf16, as in matvec; weights are exact.
//
// Floor: the task's packed bytes at the rate of copies, 4.2 TB/s over all SMs: a task of 147 KB in
// 4.6 us; an expert of 3.5 MB (Muse Spark, a rank of 8) in 0.84 us. Issue: of nvfp4, 8 ALU, 4 HMUL2
// and one HMMA for 8 codes a lane, so 72 % of an SM's slots at that rate: nothing to spare for
// more than a step's few rows an expert, which is why PAIRS = 2 has an instance of its own.
// The loader waits for the decider, takes the right expert's weights, leaves its users in the slot.
#pragma once
#include "expert_few.cuh"
#include "expert_sources.cuh"

#ifndef GPURT_MANY_USERS  // whether more than 16 rows may choose one expert
#define GPURT_MANY_USERS 0
#endif

namespace gpurt {

struct expert_matvec : ExpertFew {
  // 0: bf16. 1, 2: nvfp4 of few users, or of more. A team of 1 has one way for both.
  static constexpr u32 kWays = 3;
  static constexpr bool kWayIsChosen = true;
  static constexpr bool kLeavesScratch = true;
  GPURT_FN static u32 way_of(const Slot& slot) {
    if (slot.record.param[kWDtype] != kNvfp4) return 0;
    return kTeamWarps == 1 || is_few(slot) ? 1 : 2;
  }
  GPURT_FN static bool needs_barrier(const TaskRecord&) { return true; }

  template <u32 WAY>
  GPURT_FN static void run_hot(u32 turn, StageCursor& cursor, u32&, Carry& carry) {
    if constexpr (WAY == 0) {
      run_unit<Bf16Unit>(turn, cursor);
    } else if constexpr (kTeamWarps != 1 && WAY == 1) {
      run_few(turn, cursor, carry);
    } else {
      run_unit<Nvfp4Unit>(turn, cursor);
    }
  }

 private:
  // Whose rows a tile is for. Lane j < 16 holds row and pair of user j.
  struct Users {
    u32 expert, count;
    u32 row, pair;
  };

  template <class Unit>
  GPURT_FN static void run_unit(u32 turn, StageCursor& cursor) {
    const u32 count = users_of(turn).count;
    if (count == 0) return;  // all threads: the slot is not live
    if constexpr (kTeamWarps == 1) {
      if (threadIdx.x == 0) choose_sets(slot_of(turn));
      __syncwarp();
#pragma unroll 1
      for (u32 first = 0; first < count; first += 8) run_single<Unit>(turn, first);
    } else {
      if (Unit::kIsWide && count <= 2) {
        run_team<Unit, 2>(turn, cursor);
      } else {
        cursor = count <= 8 ? run_many<Unit, 8>(turn, cursor) : run_many<Unit, 16>(turn, cursor);
      }
      if constexpr (GPURT_MANY_USERS != 0) {
#pragma unroll 1
        for (u32 first = 16; first < count; first += 16) run_more<Unit>(turn, first);
      }
    }
  }

  // A function of its own: its registers are not those of the few-rows loop.
  template <class Unit, u32 PAIRS>
  __device__ __noinline__ static StageCursor run_many(u32 turn, StageCursor cursor) {
    run_team<Unit, PAIRS>(turn, cursor);
    return cursor;
  }

  // Those from number `from` on: their count too.
  GPURT_FN static Users users_of(u32 turn, u32 from = 0) {
    const Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    const u32* words = at<const u32>(task.addr[kAddrExpertId]);
    const u32 lane = threadIdx.x % 32;
    Users users{};
    if constexpr (kTeamWarps == 1) {
      const u32* routes = arg<const u32>(task, kArgRoutes);
      const RoutesLayout layout{step_state(gpurt_program)->rows_capacity, 0, 0};
      words = routes + layout.slot(task.tile[0]);
      users.expert = words[RoutesLayout::kExpert];
      users.count = task.tile[0] < routes[RoutesLayout::kActive] ? words[RoutesLayout::kCount] : 0;
    } else {
      users.expert = slot.chosen[RoutesLayout::kExpert];
      users.count = slot.chosen[RoutesLayout::kCount];
      users.row = slot.chosen[RoutesLayout::kUsers + 2 * (lane % 2)];
      users.pair = slot.chosen[RoutesLayout::kUsers + 2 * (lane % 2) + 1];
    }
    users.count -= min(users.count, from);
    if (lane < users.count && (kTeamWarps == 1 || from != 0 || lane >= 2)) {
      users.row = words[RoutesLayout::kUsers + 2 * (from + lane)];
      users.pair = words[RoutesLayout::kUsers + 2 * (from + lane) + 1];
    }
    return users;
  }
  static_assert(RoutesLayout::kUsers + 4 == kExpertWords);

  // ---- a virtual warp's part
  template <class Unit, u32 PAIRS, class Source>
  GPURT_FN static void multiply(const TaskRecord& task, u32 v, Source& source,
                                ExpertActivations<PAIRS>& x,
                                f32 (&sum)[ExpertActivations<PAIRS>::kTiles][kTilesMax][4]) {
    constexpr u32 kTiles = ExpertActivations<PAIRS>::kTiles;
    const u32 tiles = warp_tiles(task), stride = 1u << groups_log2(task);
    const u32 end = rounds_of(task) << groups_log2(task);
    u32 chunk = v >> (4 - groups_log2(task));
    x.load(task.addr[kArgNorm], chunk, task.param[kK]);
#pragma unroll 1
    while (chunk < end) {
      ExpertPairs pairs[kTiles];
      x.convert(task.addr[kArgNorm], chunk, task.param[kK], pairs);
      chunk += stride;
      x.load(task.addr[kArgNorm], chunk, task.param[kK]);
#pragma unroll
      for (u32 i = 0; i < kTilesMax; ++i) {
        if (i >= tiles) break;
        Unit unit;
        source.take(unit);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const uint4 a = unit.operand(j);
#pragma unroll
          for (u32 t = 0; t < kTiles; ++t)
            mma_m16n8k16_bf16(sum[t][i], a, pairs[t][2 * j], pairs[t][2 * j + 1]);
        }
      }
    }
  }

  template <u32 PAIRS>
  GPURT_FN static void start(const TaskRecord& task, u64 x_rows, const Users& users, u32 first,
                             ExpertActivations<PAIRS>& x) {
    const u32 mine = task.param[kXPerPair] != 0 ? users.pair : users.row, lane = threadIdx.x % 32;
    u64 rows[ExpertActivations<PAIRS>::kTiles];
#pragma unroll
    for (u32 t = 0; t < ExpertActivations<PAIRS>::kTiles; ++t) {
      u32 user = PAIRS == 2 ? lane / 16 : first + t * 8 + lane / 4;
      if (PAIRS == 2 && user >= users.count) user = 0;
      const u32 row = __shfl_sync(~0u, mine, user);
      const u64 at = x_rows + u64{row} * task.param[kK] * 4;
      rows[t] = user < users.count ? at : 0;
    }
    x.start(rows);
  }

  // Sums of pairs 2p and 2p + 1 of a tile of eight: lanes c = p hold them. `squares` is the same in
  // the four lanes of a pair.
  GPURT_FN static void park(const TaskRecord& task, Pass& pass, u32 v, u32 p,
                            const f32 (&sum)[kTilesMax][4], f32 squares) {
    const u32 lane = threadIdx.x % 32, log2 = groups_log2(task);
    const u32 group = v >> (4 - log2), rows = v & ((16u >> log2) - 1);
    if (lane % 4 == p) {
      const u32 to = shared_address(&pass) + (lane / 4 * kGroupStride + (rows << log2) + group) * 4;
      constexpr u32 kTile = 16 * kGroupStride * 4, kPair = kTilesMax * kTile;
#pragma unroll
      for (u32 i = 0; i < kTilesMax; ++i) {
        if (i >= warp_tiles(task)) break;
        st_shared_f32(to + i * kTile, sum[i][0]);
        st_shared_f32(to + i * kTile + kPair, sum[i][1]);
        st_shared_f32(to + i * kTile + kTile / 2, sum[i][2]);
        st_shared_f32(to + i * kTile + kTile / 2 + kPair, sum[i][3]);
      }
    }
    const u32 pair = lane / 4;
    if (task.addr[kArgNorm] != 0 && rows == 0 && lane % 4 == 0 && pair / kPassPairs == p)
      pass.squares[pair % kPassPairs][group] = squares;
  }

  // ---- a team of 16 warps: one virtual warp each
  template <class Unit, u32 PAIRS>
  GPURT_FN static void run_team(u32 turn, StageCursor& cursor) {
    team_sync();  // the task before may still read its sums
    constexpr u32 kTiles = ExpertActivations<PAIRS>::kTiles;
    const TaskRecord& task = slot_of(turn).record;
    const u32 v = threadIdx.x / 32;
    const Users users = users_of(turn);
    const Scales scales = scales_of(task, users.expert, Unit::kFactor);
    ExpertActivations<PAIRS> x;
    start(task, task.addr[kArgX], users, 0, x);
    ExpertRing<Unit> ring{cursor, turn};
    f32 sum[kTiles][kTilesMax][4] = {};
    multiply<Unit, PAIRS>(task, v, ring, x, sum);
    ring.end();
    cursor = ring.cursor;
    finish_all<PAIRS>(task, users, v, x, sum, scales);
  }

  // Of a team of 16: sums of all pairs, two a pass.
  template <u32 PAIRS>
  GPURT_FN static void finish_all(const TaskRecord& task, const Users& users, u32 v,
                                  const ExpertActivations<PAIRS>& x,
                                  const f32 (&sum)[ExpertActivations<PAIRS>::kTiles][kTilesMax][4],
                                  const Scales& scales) {
    constexpr u32 kTiles = ExpertActivations<PAIRS>::kTiles;
    Pass* passes = reinterpret_cast<Pass*>(shared().scratch);
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
      const f32 squares = task.addr[kArgNorm] != 0 ? x.sum_squares(t) : 0;
#pragma unroll 1
      for (u32 p = 0; t * 8 + p * kPassPairs < users.count; ++p) {
        Pass& pass = passes[p % 2];
        park(task, pass, v, p, sum[t], squares);
        team_sync();
        finish(task, users, pass, t * 8 + p * kPassPairs, scales);
        if (PAIRS == 2 || p == 3) break;
      }
    }
  }

  // Users from number `first` on, 16 of them, of an expert that more than 16 rows chose: the task's
  // weights again, from L2, where the ring's copies left them.
  template <class Unit>
  __device__ __noinline__ static void run_more(u32 turn, u32 first) {
    team_sync();  // the sums before may still be read
    const TaskRecord& task = slot_of(turn).record;
    const u32 v = threadIdx.x / 32;
    const Users users = users_of(turn, first);
    ExpertMemory<Unit> memory{weights_of<Unit>(task, users.expert, v)};
    ExpertActivations<16> x;
    start(task, task.addr[kArgX], users, 0, x);
    f32 sum[2][kTilesMax][4] = {};
    multiply<Unit, 16>(task, v, memory, x, sum);
    finish_all<16>(task, users, v, x, sum, scales_of(task, users.expert, Unit::kFactor));
  }

  // Where the first unit of a virtual warp lies.
  template <class Unit>
  GPURT_FN static u64 weights_of(const TaskRecord& task, u32 expert, u32 v) {
    const u32 units = rounds_of(task) * warp_tiles(task) * kVirtual;  // of a task
    const u32 tile_rows = warp_tiles(task) * (256u >> groups_log2(task));
    const u32 tiles = (task.param[kN] + tile_rows - 1) / tile_rows;
    const u64 tile = u64{expert} * tiles + task.tile[1] / tile_rows;
    return task.addr[kArgW] + (tile * units + v) * Unit::kBytes;
  }

  // ---- a team of 1 warp: all virtual warps, one after another
  template <class Unit>
  GPURT_FN static void run_single(u32 turn, u32 first) {
    const TaskRecord& task = slot_of(turn).record;
    const Users users = users_of(turn, first);
    Pass* passes = reinterpret_cast<Pass*>(shared().scratch);
    const u32 count = min((users.count + kPassPairs - 1) / kPassPairs, 4u);
#pragma unroll 1
    for (u32 v = 0; v < kVirtual; ++v) {
      ExpertMemory<Unit> memory{weights_of<Unit>(task, users.expert, v)};
      ExpertActivations<8> x;
      start(task, task.addr[kArgX], users, 0, x);
      f32 sum[1][kTilesMax][4] = {};
      multiply<Unit, 8>(task, v, memory, x, sum);
      const f32 squares = task.addr[kArgNorm] != 0 ? x.sum_squares(0) : 0;
      for (u32 p = 0; p < count; ++p) park(task, passes[p], v, p, sum[0], squares);
    }
    __syncwarp();
    const Scales scales = scales_of(task, users.expert, Unit::kFactor);
    for (u32 p = 0; p < count; ++p) finish(task, users, passes[p], p * kPassPairs, scales);
    __syncwarp();
  }

  // ---- outputs: a thread each, consecutive ones side by side
  // Of users `first` and `first` + 1, by thread `thread` of `threads`. Trip counts are equal for a
  // whole warp.
  GPURT_FN static void finish(const TaskRecord& task, const Users& users, const Pass& pass,
                              u32 first, const Scales& scales, u32 thread = threadIdx.x,
                              u32 threads = kTeamThreads) {
    const bool paired = task.param[kEpilogue] == MatvecTask::kSwiglu;
    const u32 rows_log2 = 8 - groups_log2(task) + (31 - __clz(static_cast<i32>(warp_tiles(task))));
    const u32 log2 = rows_log2 - (paired ? 1 : 0);
    const u32 begin = task.tile[1] >> (paired ? 1 : 0), end = task.tile[2] >> (paired ? 1 : 0);
    const u32 width = task.param[kN] >> (paired ? 1 : 0);
    const u32 left = users.count - first, outputs = (left < kPassPairs ? left : kPassPairs) << log2;
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 base = thread - lane; base < outputs; base += threads) {
      const u32 j = (base + lane) >> log2, i = (base + lane) & ((1u << log2) - 1);
      const u32 pair = __shfl_sync(~0u, users.pair, first + j);
      if (base + lane >= outputs || begin + i >= end) continue;
      f32 norm = 1;
      if (task.addr[kArgNorm] != 0) norm = norm_scale(task, pass, j);
      f32 value;
      if (paired) {
        const f32 gate = z_of(task, pass, j, 2 * i) * norm * scales.even;
        const f32 up = z_of(task, pass, j, 2 * i + 1) * norm * scales.odd;
        value = __fdividef(gate, 1.0f + __expf(-gate)) * up;
      } else {
        value = z_of(task, pass, j, i) * norm * scales.even;
      }
      if (kMatvecPublished && task.param[kYRanks] != 0)
        Copies::put(task.param + kYRanks, task.addr[kArgY], pair, begin + i, value);
      else
        arg<f32>(task, kArgY)[u64{pair} * width + begin + i] = value;
    }
  }

  // The sum of row `r` of the task for user `j` of a pass.
  GPURT_FN static f32 z_of(const TaskRecord& task, const Pass& pass, u32 j, u32 r) {
    const u32 log2 = groups_log2(task), tile = r / 16;
    const u32 i = tile >> (4 - log2), rows = tile & ((16u >> log2) - 1);
    const f32* from = &pass.part[j][i][r % 16][rows << log2];
    return MatvecTask::sum_of(shared_address(from), 4 - log2);
  }
};

}  // namespace gpurt
