// expert_matvec on the GPU: y = epilogue(W[e] norm(x)) for the rows that chose expert e.
//
// The contract is in graphs/ops/expert_matvec.py, `routes` in route.py, the packing in
// packing_experts.py. A task computes R x 16 rows of the W of its slot's expert, R in {1, 2, 4, 8,
// 16}, for up to 16 pairs: eight are the columns of one mma.
//
//   unit (chunk c of 64 columns, row tile t) at (c R + t) units from the tile's first byte
//   virtual warp v of 16: row tile v % R, K group v / R: chunks v / R, v / R + 16/R, ...
//
// As in matvec, whose partial sums and their order this body shares: a virtual warp sums its chunks
// in two chains, then one thread adds an output's K groups. So a pair's bits hang on K and R, not
// on who shares the expert, the slot, the rows, or the team, where a warp may be all virtual warps.
// x is rounded to bf16, as in matvec; weights are exact.
//
// Which expert is known only when the task runs, so its weights come straight from memory: each
// lane has several loads of 16 bytes under way.
#pragma once
#include "expert_units.cuh"
#include "matvec_outputs.cuh"
#include "routes.hpp"

namespace gpurt {

struct expert_matvec {
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgWScale, kArgRoutes, kArgY };
  enum Param : u32 { kN, kK, kEpilogue, kWDtype, kXPerPair, kTopK, kEps };
  static constexpr u32 kRowTile = MatvecTask::kRowTile;
  static constexpr u32 kVirtual = MatvecTask::kVirtual;
  using Half = MatvecTask::Half;

  struct Scratch {
    Half half[2];  // of pairs 0-7 and 8-15 of the slot
  };

  // What a tile computes; `m` has what matvec's helpers read.
  struct Shape {
    MatvecTask::Shape m;
    const u32* users;  // (row, pair) of each
    u64 w;             // the tile's first unit
    u32 expert;
  };

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32* routes = context.address<const u32>(task, kArgRoutes);
    if (task.tile[0] >= routes[RoutesLayout::kActive]) return;  // all threads
    const RoutesLayout layout{context.step->rows_capacity, 0, 0};
    const u32 count = routes[layout.slot(task.tile[0]) + RoutesLayout::kCount];
    if (task.param[kWDtype] == kNvfp4) {
      if (count <= kRowTile) return run_tile<Nvfp4Unit, 1>(task, context);
      return run_tile<Nvfp4Unit, 2>(task, context);
    }
    if (count <= kRowTile) return run_tile<Bf16Unit, 1>(task, context);
    run_tile<Bf16Unit, 2>(task, context);
  }

 private:
  template <class Unit>
  GPURT_FN static Shape shape_of(const TaskRecord& task, const BodyContext& context) {
    const RoutesLayout layout{context.step->rows_capacity, 0, 0};
    const u32* slot = context.address<const u32>(task, kArgRoutes) + layout.slot(task.tile[0]);
    Shape s{};
    s.m.k = task.param[kK];
    s.m.chunks = (s.m.k + 63) / 64;
    s.m.rows = slot[RoutesLayout::kCount];
    s.m.tile_log2 = 31 - __clz(static_cast<i32>((task.tile[2] - task.tile[1]) / 16));
    s.m.norm = task.addr[kArgNorm];
    s.m.eps = task.param[kEps];
    s.users = slot + RoutesLayout::kUsers;
    s.expert = slot[RoutesLayout::kExpert];
    const u64 row = u64{s.expert} * task.param[kN] + task.tile[1];
    s.w = task.addr[kArgW] + row / 16 * s.m.chunks * Unit::kBytes;
    return s;
  }

  template <class Unit, u32 TILES>
  __device__ __noinline__ static void run_tile(const TaskRecord& task, const BodyContext& context) {
    const Shape s = shape_of<Unit>(task, context);
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
#pragma unroll 1
    for (u32 v = context.thread / 32; v < kVirtual; v += context.team_threads / 32)
      multiply<Unit, TILES>(task, context, s, scratch, v);
    context.sync();
    store(task, context, s, Unit::kFactor);
  }

  // ---- one virtual warp
  // -----------------------------------------------------------------------------
  // Columns 16c .. 16c+15 of a chunk of this lane's step row, zeros where there are none: W is
  // padded with zeros there, and what lies behind x may be anything.
  struct Columns {
    float4 x[4];

    GPURT_FN void load(u64 row, u32 chunk, u32 k) {
      const u32 column = chunk * 64 + threadIdx.x % 4 * 16;
      const bool valid = row != 0 && column < k;
      const float4* from = reinterpret_cast<const float4*>(row + u64{column} * 4);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) x[i] = valid ? from[i] : make_float4(0, 0, 0, 0);
    }

    // With a norm: adds the squares, in the order of the columns, and applies its weights.
    GPURT_FN void convert(u64 norm, u32 chunk, u32 k, f32& squares, ExpertPairs& pairs) {
      const u32 column = chunk * 64 + threadIdx.x % 4 * 16;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        float4 v = x[i];
        if (norm != 0 && column < k) {
          squares = fmaf(v.x, v.x, squares), squares = fmaf(v.y, v.y, squares);
          squares = fmaf(v.z, v.z, squares), squares = fmaf(v.w, v.w, squares);
          const float4 by = __ldg(reinterpret_cast<const float4*>(norm + u64{column} * 4) + i);
          v = make_float4(v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w);
        }
        pairs[2 * i] = pack_bf16x2(v.x, v.y);
        pairs[2 * i + 1] = pack_bf16x2(v.z, v.w);
      }
    }
  };

  template <class Unit, u32 TILES>
  GPURT_FN static void multiply(const TaskRecord& task, const BodyContext& context, const Shape& s,
                                Scratch& scratch, u32 v) {
    // Units of weights that are under way at once: 18 to 36 KB an SM. More spill at 96 registers.
    constexpr u32 kUnits = Unit::kBytes == Bf16Unit::kBytes ? 1 : 4 / TILES;
    const u32 lane = context.thread % 32, tiles = 1u << s.m.tile_log2;
    const u32 group = v >> s.m.tile_log2, stride = kVirtual >> s.m.tile_log2;
    u64 row[TILES];
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) row[t] = x_row(task, s, t * kRowTile + lane / 4);
    f32 sum[TILES][2][4] = {};
    f32 squares[TILES] = {};
    const u64 first = s.w + u64{v & (tiles - 1)} * Unit::kBytes;
#pragma unroll 1
    for (u32 begin = group; begin < s.m.chunks; begin += kUnits * stride) {
      Unit unit[kUnits];
#pragma unroll
      for (u32 u = 0; u < kUnits; ++u) {
        const u32 chunk = begin + u * stride;
        if (chunk < s.m.chunks) unit[u].load(first + u64{chunk} * tiles * Unit::kBytes, lane);
      }
#pragma unroll
      for (u32 u = 0; u < kUnits; ++u) {
        const u32 chunk = begin + u * stride;
        if (chunk >= s.m.chunks) break;
        Columns columns[TILES];
#pragma unroll
        for (u32 t = 0; t < TILES; ++t) columns[t].load(row[t], chunk, s.m.k);
        ExpertPairs pairs[TILES];
#pragma unroll
        for (u32 t = 0; t < TILES; ++t)
          columns[t].convert(s.m.norm, chunk, s.m.k, squares[t], pairs[t]);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const uint4 a = unit[u].operand(j);
#pragma unroll
          for (u32 t = 0; t < TILES; ++t)
            mma_m16n8k16_bf16(sum[t][j % 2], a, pairs[t][2 * j], pairs[t][2 * j + 1]);
        }
      }
    }
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      Half& half = scratch.half[t];
      MatvecTask::store_part(shared_address(&half) + MatvecTask::part_offset(s.m, v), sum[t],
                             s.m.rows - t * kRowTile);
      if (s.m.norm == 0) continue;
      f32 all = squares[t] + __shfl_xor_sync(~0u, squares[t], 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if ((v & (tiles - 1)) == 0) MatvecTask::store_squares(half, group, all);
    }
  }

  // Address of user `j`'s row of x, 0 if there is no such user.
  GPURT_FN static u64 x_row(const TaskRecord& task, const Shape& s, u32 j) {
    if (j >= s.m.rows) return 0;
    const u32 row = s.users[2 * j + (task.param[kXPerPair] != 0 ? 1 : 0)];
    return task.addr[kArgX] + u64{row} * s.m.k * 4;
  }

  // ---- outputs: a thread each, consecutive ones side by side
  // -----------------------------------------
  GPURT_FN static void store(const TaskRecord& task, const BodyContext& context, const Shape& s,
                             f32 factor) {
    const bool paired = task.param[kEpilogue] == MatvecTask::kSwiglu;
    const u32 log2 = s.m.tile_log2 + (paired ? 3 : 4);  // of a tile's outputs of one user
    const u32 width = paired ? task.param[kN] / 2 : task.param[kN];
    const u32 first = paired ? task.tile[1] / 2 : task.tile[1];
    f32 scale[2] = {1, 1};
    if (task.addr[kArgWScale] != 0) {
      const f32* of = arg<const f32>(task, kArgWScale) + 2 * s.expert;
      scale[0] = __ldg(of), scale[1] = __ldg(of + (paired ? 1 : 0));
    }
    for (u32 at = context.thread; at < s.m.rows << log2; at += context.team_threads) {
      const u32 j = at >> log2, i = at & ((1u << log2) - 1);
      const u32 half = shared_address(context.scratch) + j / kRowTile * sizeof(Half);
      f32 by = factor;
      if (s.m.norm != 0) by *= norm_scale(s, half, j % kRowTile);
      f32 value;
      if (paired) {
        const f32 gate = z_of(s, half, j % kRowTile, 2 * i) * by * scale[0];
        const f32 up = z_of(s, half, j % kRowTile, 2 * i + 1) * by * scale[1];
        value = __fdividef(gate, 1.0f + __expf(-gate)) * up;
      } else {
        value = z_of(s, half, j % kRowTile, i) * by * scale[0];
      }
      arg<f32>(task, kArgY)[u64{s.users[2 * j + 1]} * width + first + i] = value;
    }
  }

  // The sum of row `r` of the tile for a user of this half.
  GPURT_FN static f32 z_of(const Shape& s, u32 half, u32 user, u32 r) {
    const u32 at = user * MatvecTask::kTokenFloats + r % 16 * MatvecTask::kGroupStride;
    return MatvecTask::sum_of(half + (at + (r / 16 << (4 - s.m.tile_log2))) * 4, s.m.tile_log2);
  }

  GPURT_FN static f32 norm_scale(const Shape& s, u32 half, u32 user) {
    const u32 at = kRowTile * MatvecTask::kTokenFloats + user * MatvecTask::kGroupStride;
    const f32 squares = MatvecTask::sum_of(half + at * 4, s.m.tile_log2);
    return rsqrtf(__fdividef(squares, static_cast<f32>(s.m.k)) + __uint_as_float(s.m.eps));
  }

  static_assert(sizeof(Scratch) <= kScratchBytes);
};

}  // namespace gpurt
