// expert_matvec's loop for up to two users of an nvfp4 expert, four row tiles a virtual warp.
//
// At 16 rows and top 8 of 256 97 % of the experts have no more. A chunk of 64 columns is then a
// stage: one wait, four units without a branch, one release.
//   x         each half warp loads one row, a lane one granule, two chunks ahead: a trip to L2 is
//             a microsecond while weights stream, as long as a chunk. The last two chunks of a task
//             ask for the first two of the next one (Carry)
//   outputs   of a task are made by four warps, other four in the next task, while the rest goes
//             on: with all at a barrier, a task of 4.6 us of bytes took 6.5 (H200)
#pragma once
#include "expert_task.cuh"
#include "published.cuh"

namespace gpurt {

struct ExpertFew : ExpertTask {
  // What a lane multiplies of a chunk, under way: four columns of x, and the norm's weights.
  struct Granule {
    uint4 x, weights;

    // Past L1: the release of a stage waits for loads through it.
    GPURT_FN void load(u64 row, u64 norm, u32 offset) {
      x = ld_relaxed_b128(row + offset);
      if (norm != 0) weights = ld_relaxed_b128(norm + offset);
    }
  };

  // What a task leaves to the next one of its loop, whose chunks 0 and 1 may be under way; and how
  // many tasks there have been.
  struct Carry {
    Granule ahead[2];  // chunk q in q % 2
    u32 loaded = 0;    // bit q: of the next task
    u32 passes = 0;
    bool is_begun = false;
  };

  // Those of task n: other warps in the next one. Its sums lie in pass n % 2 and are parked by all
  // warps, then made outputs by these: two mbarriers a pass, of which each warp waits for what it
  // needs alone. At a team barrier all would wait for who is last, and that is who made outputs.
  static constexpr u32 kFinishers = kPassMakers;
  GPURT_FN static bool finishes(u32 n) {
    return threadIdx.x / 32 / kFinishers == n % (kVirtual / kFinishers);
  }

  // Until the sums of task n - 2 were read.
  GPURT_FN static void wait_made(u32 n) { wait_pass(shared().pass_made[n % 2], (n / 2 & 1) ^ 1); }

  GPURT_FN static void leave(const Carry& carry, u32) {
    if (!carry.is_begun) return;
    wait_made(carry.passes);
    wait_made(carry.passes + 1);
    if (threadIdx.x == 0) shared().passes = carry.passes;
  }

  static constexpr u32 kFewBytes = kTilesMax * kVirtual * Nvfp4Unit::kBytes;

  // A plan without nvfp4 may have a smaller ring.
  GPURT_FN static bool is_few(const Slot& slot) {
    const TaskRecord& task = slot.record;
    const bool is_whole = (task.param[kK] & ((64u << groups_log2(task)) - 1)) == 0;
    return kTeamWarps != 1 && kFewBytes <= kStageRoom && warp_tiles(task) == kTilesMax &&
           is_whole && slot.chosen[RoutesLayout::kCount] - 1 < 2;
  }

  GPURT_FN static void run_few(u32 turn, StageCursor& cursor, Carry& carry) {
    if (!carry.is_begun) carry.passes = shared().passes, carry.is_begun = true;
    const Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    const u64 row = row_of(slot), norm = task.addr[kArgNorm];
    const u32 stride = 256u << groups_log2(task), first = first_offset(task);
    u32 left = rounds_of(task), offset = first + 2 * stride;
    if ((carry.loaded & 1) == 0) carry.ahead[0].load(row, norm, first);
    if ((carry.loaded & 2) == 0 && left > 1) carry.ahead[1].load(row, norm, first + stride);
    carry.loaded = 0;
    const u32 n = carry.passes++;
    const Factors factors = finishes(n) ? factors_of(slot) : Factors{};
    f32 sum[kTilesMax][4] = {}, squares = 0;
#pragma unroll 1
    for (;;) {
      multiply_chunk<0>(turn, cursor, carry, row, norm, offset, left, sum, squares);
      if (--left == 0) break;
      offset += stride;
      multiply_chunk<1>(turn, cursor, carry, row, norm, offset, left, sum, squares);
      if (--left == 0) break;
      offset += stride;
    }
    Pass& pass = reinterpret_cast<Pass*>(shared().scratch)[n % 2];
    wait_made(n);
    park(task, pass, sum);
    if (norm != 0) park_squares(task, pass, squares);
    end_part(shared().pass_parked[n % 2]);
    if (!finishes(n)) return;
    wait_pass(shared().pass_parked[n % 2], n / 2 & 1);
    finish(slot, pass, factors);
    end_part(shared().pass_made[n % 2]);
  }

 private:
  // ---- x ----------------------------------------------------------------------------------------
  // Of user lane / 16, of user 0 if there is no other.
  GPURT_FN static u64 row_of(const Slot& slot) {
    const TaskRecord& task = slot.record;
    const u32 lane_user = threadIdx.x % 32 / 16;
    const u32 user = lane_user < slot.chosen[RoutesLayout::kCount] ? lane_user : 0;
    const u32 word = RoutesLayout::kUsers + 2 * user + (task.param[kXPerPair] != 0 ? 1 : 0);
    return task.addr[kArgX] + u64{slot.chosen[word]} * (task.param[kK] * 4);
  }

  // Where a lane's granule of its virtual warp's first chunk lies in a row.
  GPURT_FN static u32 first_offset(const TaskRecord& task) {
    return (threadIdx.x / 32 >> (4 - groups_log2(task))) * 256 + threadIdx.x % 16 * 16;
  }

  // Of the task behind `turn`, if it comes here too and its edges are met, chunk `q`.
  GPURT_FN static bool load_next(u32 turn, u32 q, Granule& granule) {
    const Slot& slot = slot_of(turn + 1);
    if (ld_shared_acquire_u32(shared_address(&slot.met_turn)) != turn + 1) return false;
    const TaskRecord& task = slot.record;
    const u32 differs = (slot.kind ^ kSlotTask) | static_cast<u32>(slot.step ^ slot_of(turn).step) |
                        (task.body ^ slot_of(turn).record.body);
    if (differs != 0 || task.param[kWDtype] != kNvfp4 || !is_few(slot) || rounds_of(task) <= q)
      return false;
    const u32 offset = first_offset(task) + q * (256u << groups_log2(task));
    granule.load(row_of(slot), task.addr[kArgNorm], offset);
    return true;
  }

  // Lanes (g, c) get pair g % 2: columns of the product beyond pair 1 belong to nobody.
  GPURT_FN static void convert(const Granule& granule, bool norms, f32& squares,
                               ExpertPairs& pairs) {
    float4 v = float4_of(granule.x);
    if (norms) {
      squares = add_squares(v, squares);
      scale_granule(v, float4_of(granule.weights));
    }
    const u32 low = pack_bf16x2(v.x, v.y), high = pack_bf16x2(v.z, v.w);
    const u32 from = threadIdx.x / 4 % 2 * 16 + threadIdx.x % 4 * 4;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      pairs[2 * i] = __shfl_sync(~0u, low, from + i);
      pairs[2 * i + 1] = __shfl_sync(~0u, high, from + i);
    }
  }

  // ---- a chunk ----------------------------------------------------------------------------------
  // left: chunks of the task with this one. offset: in a row, of the chunk after the next one.
  template <u32 Q>
  GPURT_FN static void multiply_chunk(u32 turn, StageCursor& cursor, Carry& carry, u64 row,
                                      u64 norm, u32 offset, u32 left, f32 (&sum)[kTilesMax][4],
                                      f32& squares) {
    ExpertPairs pairs;
    convert(carry.ahead[Q], norm != 0, squares, pairs);
    if (left > 2) {
      carry.ahead[Q].load(row, norm, offset);
    } else if (load_next(turn, Q, carry.ahead[Q])) {
      carry.loaded |= 1u << Q;
    }
    if (!is_stage_there(cursor)) trace_stall(turn, wait_stage(cursor));
    Nvfp4Unit::Place place;
    place.start(shared_address(shared().ring[cursor.stage]) + threadIdx.x / 32 * Nvfp4Unit::kBytes,
                threadIdx.x % 32);
    Nvfp4Unit unit[2];
    unit[0].load(place);
#pragma unroll
    for (u32 i = 0; i < kTilesMax; ++i) {
      if (i + 1 < kTilesMax) {
        place.advance(kFewBytes / kTilesMax);
        unit[(i + 1) % 2].load(place);
      } else {
        release_stage(cursor);
        cursor.advance();
      }
#pragma unroll
      for (u32 j = 0; j < 4; ++j)
        mma_m16n8k16_bf16(sum[i], unit[i % 2].operand(j), pairs[2 * j], pairs[2 * j + 1]);
    }
  }

  // ---- outputs ----------------------------------------------------------------------------------
  GPURT_FN static void wait_pass(const u64& barrier, u32 parity) {
    while (!mbarrier_try_wait(shared_address(&barrier), parity)) {
    }
  }
  GPURT_FN static void end_part(const u64& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
  }

  // Of both pairs: lanes c = 0 hold them.
  GPURT_FN static void park(const TaskRecord& task, Pass& pass, const f32 (&sum)[kTilesMax][4]) {
    if (threadIdx.x % 4 != 0) return;
    const u32 v = threadIdx.x / 32, log2 = groups_log2(task);
    const u32 slot = (v & ((16u >> log2) - 1)) << log2 | v >> (4 - log2);
    const u32 to = shared_address(&pass) + (threadIdx.x % 32 / 4 * kGroupStride + slot) * 4;
    constexpr u32 kTile = 16 * kGroupStride * 4, kPair = kTilesMax * kTile;
#pragma unroll
    for (u32 i = 0; i < kTilesMax; ++i) {
      st_shared_f32(to + i * kTile, sum[i][0]);
      st_shared_f32(to + i * kTile + kPair, sum[i][1]);
      st_shared_f32(to + i * kTile + kTile / 2, sum[i][2]);
      st_shared_f32(to + i * kTile + kTile / 2 + kPair, sum[i][3]);
    }
  }

  // A granule's squares are a lane's, a chunk's four of the same place lie four lanes apart.
  GPURT_FN static void park_squares(const TaskRecord& task, Pass& pass, f32 squares) {
    f32 s = squares + __shfl_xor_sync(~0u, squares, 4);
    s += __shfl_xor_sync(~0u, s, 8);
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    const u32 v = threadIdx.x / 32, log2 = groups_log2(task);
    if (threadIdx.x % 16 == 0 && (v & ((16u >> log2) - 1)) == 0)
      pass.squares[threadIdx.x % 32 / 16][v >> (4 - log2)] = s;
  }

  struct Factors {
    f32 even, odd;
  };

  // Asked for when a task begins, used at its end. Past L1, as x.
  GPURT_FN static Factors factors_of(const Slot& slot) {
    const TaskRecord& task = slot.record;
    if (task.addr[kArgWScale] == 0) return {1, 1};
    const u64 from = task.addr[kArgWScale] + u64{slot.chosen[RoutesLayout::kExpert]} * 8;
    const u32 odd = task.param[kEpilogue] == MatvecTask::kSwiglu ? 4 : 0;
    return {__uint_as_float(ld_relaxed_u32(from)), __uint_as_float(ld_relaxed_u32(from + odd))};
  }

  // By 128 threads: each has one row of the parked sums, of 16 / G outputs.
  GPURT_FN static void finish(const Slot& slot, const Pass& pass, const Factors& factors) {
    const TaskRecord& task = slot.record;
    const u32 thread = threadIdx.x % (32 * kFinishers), log2 = groups_log2(task);
    const u32 j = thread / 64, i = thread / 16 % 4, r = thread % 16;
    if (j >= slot.chosen[RoutesLayout::kCount]) return;  // whole warps
    const u32 paired = task.param[kEpilogue] == MatvecTask::kSwiglu ? 1 : 0;
    const u32 pair = slot.chosen[RoutesLayout::kUsers + 2 * j + 1];
    const u32 row = (i << (8 - log2)) + r, rows = task.tile[2] - task.tile[1];
    Row of;
    of.from = shared_address(pass.part[j][i][r]);
    of.left = row < rows && (r & paired) == 0 ? rows - row : 0;
    of.paired = paired;
    of.norm = task.addr[kArgNorm] != 0 ? norm_scale(task, pass, j) : 1;
    of.factor = Nvfp4Unit::kFactor * ((r & paired) == 0 ? factors.even : factors.odd);
    const Outputs to = outputs_of(task, pair, (task.tile[1] + row) >> paired, paired);
    if (log2 == 0) finish_row<1>(task, of, to);
    if (log2 == 1) finish_row<2>(task, of, to);
    if (log2 == 2) finish_row<4>(task, of, to);
    if (log2 == 3) finish_row<8>(task, of, to);
    if (log2 == 4) finish_row<16>(task, of, to);
  }

  struct Row {
    u32 from;    // shared address of its sums
    u32 left;    // rows of the task from its first one on, 0: makes no output
    u32 paired;  // 1: the next thread's sums are this one's `up`
    f32 norm, factor;
  };

  // Where a pair's outputs go, and to how many ranks.
  struct Outputs {
    u64 first;
    u32 copies;
  };

  template <u32 GROUPS>
  GPURT_FN static void finish_row(const TaskRecord& task, const Row& row, const Outputs& to) {
#pragma unroll(GROUPS == 2 ? 4 : 1)
    for (u32 t = 0; t < 16 / GROUPS; ++t) {
      const f32 sum = MatvecTask::sum_groups<GROUPS>(row.from + t * GROUPS * 4);
      f32 value = sum * row.norm * row.factor;
      if (row.paired != 0) {
        const f32 gate = value, up = __shfl_down_sync(~0u, gate, 1);
        value = __fdividef(gate, 1.0f + __expf(-gate)) * up;
      }
      if (t * 16 < row.left) put(task, to, t * 64 >> row.paired, value);
    }
  }

  GPURT_FN static Outputs outputs_of(const TaskRecord& task, u32 pair, u32 column, u32 paired) {
    const u64 y = task.addr[kArgY];
    if (kMatvecPublished && task.param[kYRanks] != 0) {
      const u32* param = task.param + kYRanks;
      return {Copies::first_of(param, y, pair, column), Copies::count_of(param)};
    }
    return {y + (u64{pair} * (task.param[kN] >> paired) + column) * 4, 1};
  }

  GPURT_FN static void put(const TaskRecord& task, const Outputs& to, u32 bytes, f32 value) {
    const u32 bits = canonical_f32(__float_as_uint(value));
    st_relaxed_u32(to.first + bytes, bits);
    if constexpr (!kMatvecPublished) return;
#pragma unroll 1
    for (u32 copy = 1; copy < to.copies; ++copy)
      st_relaxed_u32(to.first + bytes + Copies::offset_of(task.param + kYRanks, copy), bits);
  }
};

}  // namespace gpurt
