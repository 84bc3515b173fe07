// matvec's outputs on the GPU: from the virtual warps' partial sums to y.
//
// Consecutive lanes hold consecutive rows of W of one step row. Where a lane's output comes from
// and goes to is worked out before the inputs are there, so that between the last mma and the store
// lie only the team barrier, one output's sums and a few shuffles.
#pragma once
#include "matvec_activations.cuh"

namespace gpurt {

struct MatvecTask {
  enum Epilogue : u32 { kPlain = 0, kSwiglu = 1 };
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgResidual, kArgY };
  enum Param : u32 { kN, kK, kEpilogue, kEps, kSampled, kWDtype, kXDtype, kYDtype };
  enum Flag : u32 {
    kXPayload = 1 << kArgX,
    kResidualPayload = 1 << kArgResidual,
    kYPayload = 1 << kArgY,
    kHasResidual = 32,
    kPaired = 64,  // swiglu: rows 2i and 2i + 1 of W make one output
    kYBf16 = 128,
  };
  static constexpr u32 kVirtual = 16;  // virtual warps
  static constexpr u32 kRowTile = kMatvecRowTile;
  static constexpr u32 kTokenStride = 20;  // floats: 16 rows, padded against bank conflicts
  static constexpr u32 kPartFloats = kRowTile * kTokenStride;

  // Partial sums of one tile of 8 step rows. Two of them take turns, so that one team barrier per
  // tile is enough: who writes one again has passed the barrier after its last reading.
  struct Half {
    f32 part[kVirtual][kPartFloats];  // [virtual warp][step row][row of W]
    f32 squares[kVirtual][kRowTile];  // [K group][step row]
  };
  static_assert(2 * sizeof(Half) <= kScratchBytes);

  // What all lanes share, read from the slot once.
  struct Shape {
    u32 k;
    u32 rows;       // of this step, or sampled ones
    u32 tile_log2;  // log2 of R, the row tiles of this task
    u32 chunks;     // of 64 columns
    u32 flags;
    u64 norm;  // 0: none
  };

  // One lane's output.
  struct Output {
    u64 y;         // where its value, or the granule that starts with it, goes
    u64 residual;  // address of its granule (payload) or of its word; 0: none
    uint4 held;    // what was read there
    u32 part;      // bytes from the start of a Half to its first partial sum
    u32 bits;      // OutputBit, and its step row within the tile << kRowShift
  };
  enum OutputBit : u32 { kValid = 1, kStores = 2, kWordShift = 2, kRowShift = 4 };

  GPURT_FN static Shape shape_of(const TaskRecord& task) {
    Shape s;
    s.k = task.param[kK];
    s.rows = task.param[kSampled] != 0 ? shared().sample_count : shared().rows;
    s.tile_log2 = 31 - __clz((task.tile[1] - task.tile[0] + 15) / 16);
    s.chunks = (s.k + 63) / 64;
    s.norm = task.addr[kArgNorm];
    s.flags = task.payload_mask & (kXPayload | kResidualPayload | kYPayload);
    if (task.addr[kArgResidual] != 0) s.flags |= kHasResidual;
    if (task.param[kEpilogue] == kSwiglu) s.flags |= kPaired;
    if (task.param[kYDtype] == kBf16) s.flags |= kYBf16;
    return s;
  }

  // Row of x (and of the residual) that belongs to row `j` of the output.
  GPURT_FN static u32 source_row(const TaskRecord& task, u32 j) {
    return task.param[kSampled] != 0 ? step_sample_rows(gpurt_program)[j] : j;
  }

  GPURT_FN static u32 tile_rows(const Shape& s, u32 tile) {
    const u32 left = s.rows - tile * kRowTile;
    return left < kRowTile ? left : kRowTile;
  }

  GPURT_FN static Half& half_of(u32 half) {
    return reinterpret_cast<Half*>(shared().scratch)[half];
  }

  // ---- partial sums ------------------------------------------------------------------------------
  // One virtual warp's: lane (g, c) holds rows g and g + 8 of W, step rows 2c, 2c + 1.
  GPURT_FN static void store_part(Half& half, u32 v, const f32 (&sum)[2][4], u32 rows) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    f32* to = half.part[v] + 2 * c * kTokenStride + g;
    if (2 * c < rows) {
      to[0] = sum[0][0] + sum[1][0];
      to[8] = sum[0][2] + sum[1][2];
    }
    if (2 * c + 1 < rows) {
      to[kTokenStride] = sum[0][1] + sum[1][1];
      to[kTokenStride + 8] = sum[0][3] + sum[1][3];
    }
  }

  // The squares of a K group: four lanes hold a step row's columns. All row tiles hold the same.
  GPURT_FN static void store_squares(Half& half, u32 group, f32 squares) {
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (threadIdx.x % 4 == 0) half.squares[group][threadIdx.x % 32 / 4] = squares;
  }

  // An output's K groups, in four chains. GROUPS is a constant so that every address is one register
  // and an offset. Intrinsics here and below: no variant may contract what another does not.
  template <u32 GROUPS>
  GPURT_FN static f32 sum_groups(u32 part) {
    constexpr u32 kApart = kVirtual / GROUPS * kPartFloats * 4;
    f32 chain[4] = {};
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group)
      chain[group % 4] += ld_shared_f32(part + group * kApart);
    return (chain[0] + chain[1]) + (chain[2] + chain[3]);
  }

  GPURT_FN static f32 sum_of(u32 part, u32 tile_log2) {
    if (tile_log2 == 0) return sum_groups<16>(part);
    if (tile_log2 == 1) return sum_groups<8>(part);
    if (tile_log2 == 2) return sum_groups<4>(part);
    if (tile_log2 == 3) return sum_groups<2>(part);
    return sum_groups<1>(part);
  }

  GPURT_FN static f32 inverse_rms(const Half& half, const Shape& s, u32 j, f32 eps) {
    f32 squares = 0;
#pragma unroll
    for (u32 group = 0; group < kVirtual; ++group) {
      if (group << s.tile_log2 < kVirtual) squares += half.squares[group][j];
    }
    return rsqrtf(__fadd_rn(__fdividef(squares, static_cast<f32>(s.k)), eps));
  }

  // ---- outputs -----------------------------------------------------------------------------------
  // Output `at` of a tile of step rows; `rows` of them are there.
  GPURT_FN static Output output_of(const TaskRecord& task, const Shape& s, u32 at, u32 tile,
                                   u32 rows, u64 step) {
    Output o;
    const u32 r = at & ((16u << s.tile_log2) - 1), n = task.tile[0] + r;
    const u32 j = at >> (4 + s.tile_log2);
    const u32 paired = (s.flags & kPaired) != 0 ? 1 : 0, bf16 = (s.flags & kYBf16) != 0 ? 1 : 0;
    const u32 width = task.param[kN] >> paired, column = n >> paired;
    const bool valid = j < rows && n < task.tile[1];
    o.part = ((r / 16) * kPartFloats + j * kTokenStride + r % 16) * 4;
    const u64 y = arg_address(task, kArgY, step, gpurt_program.payload_set_bytes);
    o.y = y + ((u64{tile * kRowTile + j} * width + column) << (2 - bf16));
    // Lanes from one stored value or granule to the next.
    const u32 apart = ((s.flags & kYPayload) != 0 ? 4u << bf16 : 1u) << paired;
    o.bits = column % 4 << kWordShift | j << kRowShift;
    if (valid) o.bits |= (r & (apart - 1)) == 0 ? kValid | kStores : kValid;
    o.held = make_uint4(0, 0, 0, 0);
    o.residual = 0;
    if ((s.flags & kHasResidual) != 0 && valid) {
      const u64 base = arg_address(task, kArgResidual, step, gpurt_program.payload_set_bytes);
      const u32 row = source_row(task, tile * kRowTile + j);
      o.residual = base + (u64{row} * width + column) * 4;
      if ((s.flags & kResidualPayload) != 0) o.residual &= ~u64{15};
    }
    return o;
  }

  GPURT_FN static void load_residual(const Shape& s, Output& o) {
    if (o.residual == 0) return;
    if ((s.flags & kResidualPayload) != 0) {
      o.held = ld_relaxed_gpu_b128(o.residual);
    } else {
      o.held.x = ld_relaxed_gpu_u32(o.residual);
    }
  }

  GPURT_FN static f32 residual_of(const Shape& s, Output& o) {
    if ((s.flags & kResidualPayload) == 0) return __uint_as_float(o.held.x);
    for (u32 polls = 0; payload_missing(is_sentinel(o.held), polls);) load_residual(s, o);
    const uint4& v = o.held;
    const u32 word = o.bits >> kWordShift & 3;
    return __uint_as_float(word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w);
  }

  // All lanes of a warp.
  GPURT_FN static void store(const Shape& s, const Output& o, f32 value) {
    const u32 paired = (s.flags & kPaired) != 0 ? 1 : 0;
    if ((s.flags & kYPayload) == 0) {
      if ((o.bits & kStores) == 0) return;
      if ((s.flags & kYBf16) != 0) {
        *at<u16>(o.y) = static_cast<u16>(pack_bf16x2(value, 0.0f));
      } else {
        *at<f32>(o.y) = value;
      }
      return;
    }
    uint4 granule;
    granule.x = canonical_f32(__float_as_uint(value));
    u32 apart = 1u << paired;
    if ((s.flags & kYBf16) != 0) {
      granule.x = pack_bf16x2(value, __shfl_down_sync(~0u, value, apart));
      apart *= 2;
    }
    granule.y = __shfl_down_sync(~0u, granule.x, apart);
    granule.z = __shfl_down_sync(~0u, granule.x, 2 * apart);
    granule.w = __shfl_down_sync(~0u, granule.x, 3 * apart);
    if ((o.bits & kStores) != 0) st_relaxed_gpu_b128(o.y, granule);
  }

  GPURT_FN static void finish(const Half& half, const Shape& s, Output& o, u32 turn) {
    f32 value = 0;
    if ((o.bits & kValid) != 0) value = sum_of(shared_address(&half) + o.part, s.tile_log2);
    if (s.norm != 0) {
      const f32 eps = __uint_as_float(slot_of(turn).record.param[kEps]);
      value = __fmul_rn(value, inverse_rms(half, s, o.bits >> kRowShift & (kRowTile - 1), eps));
    }
    if ((s.flags & kPaired) != 0) {
      const f32 up = __shfl_down_sync(~0u, value, 1);
      value = __fmul_rn(__fdividef(value, __fadd_rn(1.0f, __expf(-value))), up);
    }
    if ((s.flags & kHasResidual) != 0) value = __fadd_rn(value, residual_of(s, o));
    store(s, o, value);
  }

  // The outputs of one tile, a lane each; `first` is this thread's, of tile 0, worked out early.
  GPURT_FN static void finish_tile(const Half& half, const Shape& s, u32 tile, u32 turn,
                                   Output first) {
    const u32 rows = tile_rows(s, tile), outputs = rows << (4 + s.tile_log2);
    for (u32 at = threadIdx.x; at - at % 32 < outputs; at += kTeamThreads) {
      if (tile != 0 || at >= kTeamThreads) {
        const Slot& slot = slot_of(turn);
        first = output_of(slot.record, s, at, tile, rows, slot.step);
        load_residual(s, first);
      }
      finish(half, s, first, turn);
    }
  }
};

}  // namespace gpurt
