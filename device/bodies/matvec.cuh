// matvec on the GPU: y = epilogue(W xn) + residual, for the 1 to 16 rows of a step.
//
// The contract is in graphs/ops/matvec.py, the packing in graphs/ops/packing.py, tiles in
// graphs/ops/matvec_cuda.py. A task computes R x 16 rows of W, R in {1, 2, 4, 8, 16}:
//
//   unit      16 rows of W x 64 columns, 2 KB, in cores of 8 x 8 of a warp's four
//             mma.m16n8k16 (ldmatrix): lane (g = lane / 4, c = lane % 4) owns columns 16c .. 16c+15
//   stage     16 units = R row tiles x 16/R column chunks; unit v belongs to virtual warp v
//   v         row tile v % R, K group v / R: chunks v / R, v / R + 16/R, ... of 64 columns
//
// Each virtual warp sums its chunks in order in two chains (even and odd mma), each lane's part of
// the squares likewise; then one thread adds an output's K groups in a fixed order. So the order of
// sums hangs on K and R alone, which the plan fixes: not on rows, team, worker or policy. A team of
// 16 keeps a virtual warp's sums in registers; a team of 1 keeps all of them in shared memory.
//
// Payload inputs are polled where they are used, after the stage has been read into registers and
// released: the weight stream never waits for an activation.
#pragma once
#include "matvec_outputs.cuh"

// 1 if a task of the plan may go by the way of `use_shared_chunk`: the generated bodies.gen.cuh
// says so. Other kernels hold no word of it.
#ifndef GPURT_MATVEC_SHARES
#define GPURT_MATVEC_SHARES 0
#endif

namespace gpurt {

constexpr bool kMatvecShares = GPURT_MATVEC_SHARES != 0;

struct matvec : MatvecTask {
  static constexpr u32 kUnitBytes = 2048;
  static_assert(kStageBytes == kVirtual * kUnitBytes);

  // ---- multiply
  // ----------------------------------------------------------------------------------
  GPURT_FN static void read_unit(u32 unit_address, uint4 (&unit)[4]) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      unit[j] = ld_shared_matrices(unit_address + place_in_unit() + j * kMmaBytes);
  }

  // Two chains: a dependent mma costs its whole latency.
  GPURT_FN static void multiply(const uint4 (&unit)[4], const u32 (&pair)[8], f32 (&sum)[2][4]) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      mma_m16n8k16_bf16(sum[j % 2], unit[j], pair[2 * j], pair[2 * j + 1]);
  }

  template <class Activations>
  GPURT_FN static void start(Activations& x, const Slot& slot, const Shape& s, u32 chunk) {
    const TaskRecord& task = slot.record;
    x.start(arg_address(task, kArgX, slot.round, gpurt_program.payload_set_bytes), s.k, chunk,
            s.rows, task.param[kXFragments], [&](u32 j) { return source_row(task, j); });
  }

  // ---- a team of 16 warps: one virtual warp each
  // ------------------------------------------------- This warp's unit of the next stage, into
  // registers; the stage is then the loader's again.
  GPURT_FN static void take_unit(StageCursor& cursor, uint4 (&unit)[4], u32& stall) {
    stall += wait_stage(cursor);
    read_unit(shared_address(shared().ring[cursor.stage]) + threadIdx.x / 32 * kUnitBytes, unit);
    // A fence would also wait for the next chunks' x, which is under way.
    release_stage_behind(cursor, unit[3].x);
    cursor.advance();
  }

  // What a warp holds over the chunks of a task.
  template <u32 X, u32 ROWS, u32 SHARE = 1>
  struct Sums {
    using Activations = MatvecActivations<X, ROWS, false, SHARE>;
    static constexpr u32 kTiles = Activations::kTiles;
    Activations x;
    u32 chunk;  // the current one
    u32 step;   // bytes of x from it to the next
    f32 sum[kTiles][2][4];
    f32 squares[kTiles][Activations::kLoads];
    u32 stall;
  };

  // The current chunk, whose activations lie in register set `set`; the loads of the one kAhead
  // chunks on go into the registers that it leaves: a copy of a register whose load is in flight
  // would wait for it.
  template <u32 X, u32 ROWS>
  GPURT_FN static void use_chunk(Sums<X, ROWS>& w, const Shape& s, u64 norm, StageCursor& cursor,
                                 u32 set) {
    using Activations = MatvecActivations<X, ROWS>;
    constexpr u32 kTiles = Activations::kTiles, kAhead = Activations::kAhead;
    // What lies behind a short stage is of an earlier copy: any bits, NaN too.
    const bool valid = w.chunk < s.chunks;
    if constexpr (ROWS == 1) {
      // A stage is released before its task's input is there.
      uint4 unit[4];
      u32 pair[8];
      take_unit(cursor, unit, w.stall);
      if ((s.flags & kXPayload) != 0) w.x.wait(set, w.step);
      w.x.convert(set, 0, norm, pair, w.squares[0]);
      if (valid) multiply(unit, pair, w.sum[0]);
      w.x.load(set, kAhead * w.step);
      w.x.load_norm(set, kAhead * w.step, norm);
    } else {
      constexpr u32 kEach = 4 / Activations::kLoads;  // mma of a granule
      if ((s.flags & kXPayload) != 0) w.x.wait(set, w.step);
      w.stall += wait_stage(cursor);
      const u32 unit = shared_address(shared().ring[cursor.stage]) + threadIdx.x / 32 * kUnitBytes +
                       place_in_unit();
      u32 read = 0;
#pragma unroll
      for (u32 i = 0; i < Activations::kLoads; ++i) {
        u32 pair[kTiles][2 * kEach];
#pragma unroll
        for (u32 t = 0; t < kTiles; ++t) w.x.convert(set, t, i, norm, pair[t], w.squares[t][i]);
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) {
          const u32 at = i * kEach + j;
          const uint4 part = ld_shared_matrices(unit + at * kMmaBytes);
          read = part.x;  // loads of shared memory come back in order
#pragma unroll
          for (u32 t = 0; t < kTiles; ++t) {
            if (valid)
              mma_m16n8k16_bf16(w.sum[t][at % 2], part, pair[t][2 * j], pair[t][2 * j + 1]);
          }
        }
#pragma unroll
        for (u32 t = 0; t < kTiles; ++t) w.x.load(set, t, i, kAhead * w.step);
      }
      release_stage_behind(cursor, read);
      cursor.advance();
    }
  }

  // A chunk of 16 rows of floats without a norm for a task of kShare row tiles: each of its K
  // group's warps loads and converts one granule in kShare, and they exchange them in the scratch,
  // which holds two chunks of every group. With each warp reading all of x for itself an SM reads
  // it kShare times: 256 KB where K is 1024, 4 us of L2.
  static constexpr u32 kShare = 4;
  static constexpr u32 kSharedBytes = kVirtual * 512;  // a chunk of each group, as bf16
  static_assert(kTeamWarps == 1 || 2 * kSharedBytes <= kScratchBytes);

  GPURT_FN static void use_shared_chunk(Sums<kF32, 16, kShare>& w, const Shape& s,
                                        StageCursor& cursor, u32 set, u32 room) {
    const u32 warp = threadIdx.x / 32, own = threadIdx.x % 32 * 16;
    if ((s.flags & kXPayload) != 0) w.x.wait(set, w.step);
    u32 pair[2][2];
#pragma unroll
    for (u32 t = 0; t < 2; ++t) w.x.convert(set, t, 0, 0, pair[t], w.squares[t][0]);
#pragma unroll
    for (u32 t = 0; t < 2; ++t) w.x.load(set, t, 0, w.x.kAhead * w.step);
    st_shared_b128(room + warp * 512 + own,
                   make_uint4(pair[0][0], pair[0][1], pair[1][0], pair[1][1]));
    bar_sync(kBodyBarrier + warp / kShare, kShare * 32);
    w.stall += wait_stage(cursor);
    const u32 unit =
        shared_address(shared().ring[cursor.stage]) + warp * kUnitBytes + place_in_unit();
    const bool valid = w.chunk < s.chunks;
    u32 read = 0;
#pragma unroll
    for (u32 j = 0; j < kShare; ++j) {
      const uint4 x = ld_shared_b128(room + (warp / kShare * kShare + j) * 512 + own);
      const uint4 part = ld_shared_matrices(unit + j * kMmaBytes);
      read = part.x;
      if (valid) {
        mma_m16n8k16_bf16(w.sum[0][j % 2], part, x.x, x.y);
        mma_m16n8k16_bf16(w.sum[1][j % 2], part, x.z, x.w);
      }
    }
    release_stage_behind(cursor, read);
    cursor.advance();
  }

  // The chunks of this warp, kAhead of them in flight.
  template <u32 X, u32 ROWS, u32 SHARE>
  GPURT_FN static void sum_chunks(Sums<X, ROWS, SHARE>& w, const Shape& s, u64 norm,
                                  StageCursor& cursor, u32 turn) {
    const u32 stride = kVirtual >> s.tile_log2;
    u32 left = (s.chunks + stride - 1) >> (4 - s.tile_log2);
    for (bool is_first = true;; is_first = false) {
#pragma unroll
      for (u32 set = 0; set < w.x.kAhead; ++set) {
        if constexpr (SHARE > 1) {
          use_shared_chunk(w, s, cursor, set,
                           shared_address(shared().scratch) + set % 2 * kSharedBytes);
        } else {
          use_chunk<X, ROWS>(w, s, norm, cursor, set);
        }
        if (set == 0 && is_first && (s.flags & kXPayload) != 0) trace_met(turn);
        if (--left == 0) return;
        w.chunk += stride;
        w.x.advance(stride);
      }
    }
  }

  // All that the end of the task needs is worked out before its inputs are there, and pinned.
  template <u32 X, u32 ROWS, u32 SHARE>
  GPURT_FN static void run_team(u32 turn, StageCursor& cursor, u32& half) {
    const Shape s = shape_of(slot_of(turn).record);
    Sums<X, ROWS, SHARE> w{};
    start_sums(w, slot_of(turn), s);
    if constexpr (w.kTiles == 2) half = 0;
    Output o = first_output(s, 0, s.rows, turn);
    pin(o.y), pin(o.part), pin(o.bits);
    if (X == kBf16) {
      sum_chunks(w, s, 0, cursor, turn);
    } else if (SHARE > 1) {
      sum_chunks(w, s, 0, cursor, turn);
      team_sync();             // the sums take the room of what the warps exchanged
    } else if (s.norm == 0) {  // a loop of its own: the other's registers do not suffice
      sum_chunks(w, s, 0, cursor, turn);
    } else {
      sum_chunks(w, s, s.norm, cursor, turn);
    }
    // Worked out here: over the loop these words would lie in local memory, and the fence of its
    // first stage would wait until they are in L2.
    u32 thread = threadIdx.x;
    pin(thread);
    const u32 base = shared_address(&half_of(half));
    store_sums(w, s, base, part_offset(s, thread / 32, thread % 32));
    team_sync();
    finish_rows<ROWS>(base, s, 0, s.rows, turn, o);
    end_half(half);
    trace_stall(turn, w.stall);
  }

  // One row of bf16: it begins before its counter edges are met. Until then who makes outputs goes
  // once through their code, and stores nothing: it is in the instruction cache then when the sums
  // are there. A residual that is polled would be waited for. Where there are no edges x is asked
  // for first: of a head's tasks, one behind the other, it took 1 us each (H200).
  template <u32 X>
  GPURT_FN static bool run_early(u32 turn, StageCursor& cursor, u32& half) {
    const Shape s = shape_of(slot_of(turn).record);
    const bool waits = has_edges(slot_of(turn));
    Sums<X, 1> w{};
    if (!waits) start_sums(w, slot_of(turn), s);
    u32 base = shared_address(&half_of(half)),
        part = part_offset(s, threadIdx.x / 32, threadIdx.x % 32);
    Output o = output_of(slot_of(turn).record, s, threadIdx.x, 0, s.rows, slot_of(turn).round);
    pin(o.y), pin(o.part), pin(o.bits), pin(part), pin(base);
    bool is_dry = waits && (s.flags & kResidualPayload) == 0;
#pragma unroll 1
    for (;; is_dry = false) {
      if (!is_dry) {
        if (waits) {
          if (!wait_edges(slot_of(turn))) return false;
          start_sums(w, slot_of(turn), s);
        }
        load_residual(o);
        sum_chunks(w, s, 0, cursor, turn);
        store_sums(w, s, base, part);
        trace_stall(turn, w.stall);
        team_sync();
      }
      finish_rows<1>(base, s, 0, s.rows, turn, o, is_dry);
      if (!is_dry) break;
    }
    end_half(half);
    return true;
  }

  template <u32 X, u32 ROWS, u32 SHARE>
  GPURT_FN static void start_sums(Sums<X, ROWS, SHARE>& w, const Slot& slot, const Shape& s) {
    w.chunk = threadIdx.x / 32 >> s.tile_log2;
    w.step = w.x.kChunkBytes << (4 - s.tile_log2);
    start(w.x, slot, s, w.chunk);
#pragma unroll
    for (u32 i = 0; i < w.x.kAhead; ++i) {
      w.x.load(i, i * w.step);
      w.x.load_norm(i, i * w.step, s.norm);
    }
  }

  template <u32 X, u32 ROWS, u32 SHARE>
  GPURT_FN static void store_sums(const Sums<X, ROWS, SHARE>& w, const Shape& s, u32 base,
                                  u32 part) {
    const u32 warp = threadIdx.x / 32;
#pragma unroll
    for (u32 t = 0; t < w.kTiles; ++t) {
      store_part(base + part + t * kRowTile * kTokenFloats * 4, w.sum[t], s.rows - t * kRowTile);
      if ((s.flags & kHasNorm) != 0) {
        const f32 all = w.x.sum_squares(w.squares[t]);
        if ((warp & ((1u << s.tile_log2) - 1)) == 0)
          store_squares(base + kSquares<ROWS> + t * kRowTile * kGroupStride * 4,
                        warp >> s.tile_log2, all);
      }
    }
  }

  // With one half at a time not needed for safety: the halves take turns. But what the other warps
  // do next, fetching other code and polling, slows the one warp that all SMs wait for (1.45
  // -> 1.34 us a hop).
  GPURT_FN static void end_half(u32& half) {
    team_sync();
    half ^= 1;
  }

  // This thread's first output of `rows` step rows from row `first` on, its residual under way.
  GPURT_FN static Output first_output(const Shape& s, u32 first, u32 rows, u32 turn) {
    const Slot& slot = slot_of(turn);
    Output o = output_of(slot.record, s, threadIdx.x, first, rows, slot.round);
    load_residual(o);
    return o;
  }

  // Whether a way's tasks begin before their counter edges are met. Of floats, and of more rows,
  // registers do not suffice; a table's rows are counted behind them.
  GPURT_FN static constexpr bool is_early(u32 x, u32 rows) {
    return kTeamWarps != 1 && x == kBf16 && rows == 1 && !kOwnRows;
  }

  // ---- a team of 1 warp: all virtual warps, their sums in shared memory
  // ----------------------------
  struct Single {
    Half half;
    float4 sum[2][kVirtual][2][32];   // [tile][virtual warp][chain][lane]
    f32 squares[2][kVirtual][4][32];  // [tile][K group][granule][lane]
  };
  static_assert(kTeamWarps != 1 || sizeof(Single) <= kScratchBytes);

  template <u32 X>
  GPURT_FN static void run_single(u32 turn, StageCursor& cursor) {
    const Shape s = shape_of(slot_of(turn).record);
    const u32 lane = threadIdx.x % 32, groups = kVirtual >> s.tile_log2;
    Single& single = *reinterpret_cast<Single*>(shared().scratch);
    for (u32 i = lane; i < 2 * kVirtual * 2 * 32; i += 32)
      (&single.sum[0][0][0][0])[i] = make_float4(0, 0, 0, 0);
    for (u32 i = lane; i < 2 * kVirtual * 4 * 32; i += 32) (&single.squares[0][0][0][0])[i] = 0;
    MatvecActivations<X, 16, true> x;
    start(x, slot_of(turn), s, 0);
    u32 stall = 0;
    for (u32 begin = 0; begin < s.chunks; begin += groups) {
      stall += wait_stage(cursor);
      for (u32 group = 0; group < groups && begin + group < s.chunks; ++group) {
        multiply_group<X>(s, single, x, cursor.stage, group);
        x.advance(1);
      }
      if (begin == 0 && (s.flags & kXPayload) != 0) trace_met(turn);
      release_stage(cursor);
      cursor.advance();
    }
    trace_stall(turn, stall);
    for (u32 t = 0; t * kRowTile < s.rows; ++t) finish_single<X>(s, single, t, turn);
  }

  template <u32 X>
  GPURT_FN static void multiply_group(const Shape& s, Single& single,
                                      MatvecActivations<X, 16, true>& x, u32 stage, u32 group) {
    constexpr u32 kLoads = MatvecActivations<X, 16, true>::kLoads;
    const u32 lane = threadIdx.x % 32;
    u32 pair[2][8];
    x.load(0, 0);
    if ((s.flags & kXPayload) != 0) x.wait(0, 0);
#pragma unroll
    for (u32 t = 0; t < 2; ++t) {
      f32 squares[kLoads];
      for (u32 i = 0; i < kLoads; ++i) squares[i] = single.squares[t][group][i][lane];
      x.convert(0, t, s.norm, pair[t], squares);
      for (u32 i = 0; i < kLoads; ++i) single.squares[t][group][i][lane] = squares[i];
    }
    for (u32 tile = 0; tile < 1u << s.tile_log2; ++tile) {
      const u32 v = (group << s.tile_log2) + tile;
      uint4 unit[4];
      read_unit(shared_address(shared().ring[stage]) + v * kUnitBytes, unit);
#pragma unroll
      for (u32 t = 0; t < 2; ++t) {
        f32 sum[2][4];
        get_sum(single, t, v, sum);
        multiply(unit, pair[t], sum);
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
          single.sum[t][v][i][lane] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
      }
    }
  }

  GPURT_FN static void get_sum(const Single& single, u32 t, u32 v, f32 (&sum)[2][4]) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float4 f = single.sum[t][v][i][threadIdx.x % 32];
      sum[i][0] = f.x, sum[i][1] = f.y, sum[i][2] = f.z, sum[i][3] = f.w;
    }
  }

  template <u32 X>
  GPURT_FN static void finish_single(const Shape& s, Single& single, u32 t, u32 turn) {
    constexpr u32 kLoads = MatvecActivations<X, 16>::kLoads;
    const u32 base = shared_address(&single.half);
    for (u32 v = 0; v < kVirtual; ++v) {
      f32 sum[2][4];
      get_sum(single, t, v, sum);
      store_part(base + part_offset(s, v, threadIdx.x % 32), sum, s.rows - t * kRowTile);
    }
    for (u32 group = 0; group < kVirtual >> s.tile_log2; ++group) {
      f32 squares[kLoads];
      for (u32 i = 0; i < kLoads; ++i) squares[i] = single.squares[t][group][i][threadIdx.x % 32];
      store_squares(base + kSquares<kRowTile>, group,
                    MatvecActivations<X, 16>::sum_squares(squares));
    }
    __syncwarp();
    const u32 first = t * kRowTile, rows = min(s.rows - first, kRowTile);
    Output o = first_output(s, first, rows, turn);
    finish_rows<kRowTile>(base, s, first, rows, turn, o);
    __syncwarp();
  }

  // ---- the roles of the hot loop
  // ----------------------------------------------------------------- Each way gets a loop of its
  // own, with the registers it needs.
  static constexpr u32 kWays = kTeamWarps == 1 ? 2 : kMatvecShares ? 7 : 6;
  static constexpr bool kLeavesScratch = false;
  static constexpr bool kWayIsChosen = false;
  static constexpr bool kEntersEarly = true;
  struct Carry {};

  // Whether a task without counter edges must follow a team barrier: an ordinary input may be what
  // this team wrote in the task before (an order edge). Payload inputs tell by themselves.
  GPURT_FN static bool needs_barrier(const TaskRecord& task) {
    const u32 ordinary = ~u32{task.payload_mask};
    return (ordinary & kXPayload) != 0 ||
           (task.addr[kArgResidual] != 0 && (ordinary & kResidualPayload) != 0);
  }

  GPURT_FN static u32 way_of(const Slot& slot) {
    const TaskRecord& task = slot.record;
    const u32 is_bf16 = task.param[kXDtype] == kBf16 ? 1 : 0;
    if constexpr (kTeamWarps == 1) return is_bf16;
    const u32 rows = MatvecStep::most(task, task.param[kSampled] != 0);
    if (kMatvecShares && rows > kRowTile && is_bf16 == 0 && task.addr[kArgNorm] == 0 &&
        (task.tile[1] - task.tile[0] + 15) / 16 == kShare)
      return 6;
    return rows == 1 ? is_bf16 : rows <= kRowTile ? is_bf16 + 2 : is_bf16 + 4;
  }

  template <u32 WAY>
  GPURT_FN static bool run_hot(u32 turn, StageCursor& cursor, u32& half, Carry&) {
    constexpr u32 x = WAY % 2 == 1 ? kBf16 : kF32, rows = WAY < 2 ? 1 : WAY < 4 ? 8 : 16;
    if constexpr (!is_early(x, rows)) {
      if (!wait_edges(slot_of(turn))) return false;
    }
    if constexpr (kOwnRows) {
      if (MatvecStep::is_void(slot_of(turn).record)) {
        MatvecStep::pass_void(cursor);
        return true;
      }
    }
    if constexpr (kTeamWarps == 1) {
      run_single<x>(turn, cursor);
    } else if constexpr (is_early(x, rows)) {
      return run_early<x>(turn, cursor, half);
    } else {
      run_team<x, rows, (WAY == 6 ? kShare : 1)>(turn, cursor, half);
    }
    return true;
  }
};

}  // namespace gpurt
