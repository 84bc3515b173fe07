// matvec's outputs on the GPU: from the virtual warps' partial sums to y.
//
// Consecutive lanes hold consecutive rows of W of one step row. Where a lane's output comes from
// and goes to is worked out before the inputs are there, so that between the last mma and the store
// lie only the team barrier, one output's sums and a few shuffles.
#pragma once
#include "matvec_activations.cuh"
#include "matvec_scale.cuh"
#include "matvec_step.cuh"
#include "published.cuh"

namespace gpurt {

struct MatvecTask {
  // A unit of W: for each 8 of its rows, for each mma, two cores of 8 rows x 8 columns.
  static constexpr u32 kCoreBytes = 128, kMmaBytes = 256, kHighBytes = 1024;
  // The row that this lane names when its warp reads an mma's four cores.
  GPURT_FN static u32 place_in_unit() {
    const u32 lane = threadIdx.x % 32;
    return lane / 8 % 2 * kHighBytes + lane / 16 * kCoreBytes + lane % 8 * 16;
  }

  enum Epilogue : u32 { kPlain = 0, kSwiglu = 1 };
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgResidual, kArgY };
  enum Param : u32 {
    kN,
    kK,
    kEpilogue,
    kEps,
    kSampled,
    kWDtype,
    kXDtype,
    kYDtype,
    kYRanks = 11,
    kXFragments = 15,
    kYFragments = 16
  };
  enum Flag : u32 {
    kXPayload = 1 << kArgX,
    kResidualPayload = 1 << kArgResidual,
    kYPayload = 1 << kArgY,
    kHasResidual = 32,
    kPaired = 64,  // swiglu: rows 2i and 2i + 1 of W make one output
    kYBf16 = 128,
    kHasNorm = 256,
    kHasScale = 512,  // or a soft cap
    kPublished = 1024,
    kExtras = kHasResidual | kPaired | kHasNorm | (kMatvecScaled ? kHasScale : 0),
  };
  static constexpr u32 kVirtual = 16;  // virtual warps
  static constexpr u32 kRowTile = kMatvecRowTile;
  static constexpr u32 kGroupStride = 20;  // floats: 16 sums, padded against bank conflicts
  static constexpr u32 kTokenFloats = 16 * kGroupStride;

  // Partial sums of up to ROWS step rows. A row's lie side by side, K group after K group of its
  // row tile, for loads of 16 bytes. Those of 8 rows take half of the room that those of 16 do, so
  // two of them take turns.
  template <u32 ROWS>
  struct alignas(16) Parts {
    f32 part[ROWS][16][kGroupStride];  // [step row][row of W][row tile * groups + group]
    f32 squares[ROWS][kGroupStride];   // [step row][K group]
  };
  using Half = Parts<kRowTile>;
  static_assert(sizeof(Parts<2 * kRowTile>) == 2 * sizeof(Half));
  static_assert(2 * sizeof(Half) <= kScratchBytes);
  // Bytes from the start of Parts to its squares.
  template <u32 ROWS>
  static constexpr u32 kSquares = (ROWS > kRowTile ? ROWS : kRowTile) * kTokenFloats * 4;

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
    u64 residual;  // address of its word; 0: none
    u32 held;      // what was read there: of payload, too, each word tells for itself
    u32 part;      // bytes from the start of Parts to its first partial sum
    u32 bits;      // OutputBit, and its row in Parts << kRowShift
  };
  enum OutputBit : u32 { kWorks = 1, kStores = 2, kRowShift = 2 };

  GPURT_FN static Shape shape_of(const TaskRecord& task) {
    Shape s;
    s.k = task.param[kK];
    s.rows = MatvecStep::count(task, task.param[kSampled] != 0);
    s.tile_log2 = 31 - __clz((task.tile[1] - task.tile[0] + 15) / 16);
    s.chunks = (s.k + 63) / 64;
    s.norm = task.addr[kArgNorm];
    s.flags = task.payload_mask & (kXPayload | kResidualPayload | kYPayload);
    if (task.addr[kArgResidual] != 0) s.flags |= kHasResidual;
    if (task.param[kEpilogue] == kSwiglu) s.flags |= kPaired;
    if (task.param[kYDtype] == kBf16) s.flags |= kYBf16;
    if (s.norm != 0) s.flags |= kHasNorm;
    if constexpr (kMatvecPublished) {
      if (task.param[kYRanks] != 0) s.flags |= kPublished;
    }
    if constexpr (kMatvecScaled) {
      if (param_f32(task, kMatvecScale) != 1 || param_f32(task, kMatvecSoftcap) > 0)
        s.flags |= kHasScale;
    }
    return s;
  }

  // Row of x (and of the residual) that belongs to row `j` of the output.
  GPURT_FN static u32 source_row(const TaskRecord& task, u32 j) {
    return task.param[kSampled] != 0 ? MatvecStep::sample_row(task, j) : j;
  }

  GPURT_FN static Half& half_of(u32 half) {
    return reinterpret_cast<Half*>(shared().scratch)[half];
  }

  // ---- partial sums
  // ------------------------------------------------------------------------------ Bytes from the
  // start of a Half to where virtual warp `v` puts lane (g, c)'s sums: rows g and g + 8 of W, step
  // rows 2c and 2c + 1.
  GPURT_FN static u32 part_offset(const Shape& s, u32 v, u32 lane) {
    const u32 tile = v & ((1u << s.tile_log2) - 1), group = v >> s.tile_log2;
    const u32 slot = tile << (4 - s.tile_log2) | group;
    return (lane % 4 * 2 * kTokenFloats + lane / 4 * kGroupStride + slot) * 4;
  }

  GPURT_FN static void store_part(u32 to, const f32 (&sum)[2][4], u32 rows) {
    const u32 c = threadIdx.x % 4;
    if (2 * c < rows) {
      st_shared_f32(to, sum[0][0] + sum[1][0]);
      st_shared_f32(to + 8 * kGroupStride * 4, sum[0][2] + sum[1][2]);
    }
    if (2 * c + 1 < rows) {
      st_shared_f32(to + kTokenFloats * 4, sum[0][1] + sum[1][1]);
      st_shared_f32(to + (kTokenFloats + 8 * kGroupStride) * 4, sum[0][3] + sum[1][3]);
    }
  }

  // The squares of a K group of 8 step rows, whose place begins at `to`; `squares` is the same in
  // the lanes of a step row.
  GPURT_FN static void store_squares(u32 to, u32 group, f32 squares) {
    if (threadIdx.x % 4 == 0)
      st_shared_f32(to + (threadIdx.x % 32 / 4 * kGroupStride + group) * 4, squares);
  }

  // K groups side by side from shared address `from`, in four chains. GROUPS is a constant so that
  // every address is one register and an offset.
  template <u32 GROUPS>
  GPURT_FN static f32 sum_groups(u32 from) {
    if constexpr (GROUPS == 1) {
      return ld_shared_f32(from);
    } else if constexpr (GROUPS == 2) {
      return ld_shared_f32(from) + ld_shared_f32(from + 4);
    } else {
      f32 chain[4] = {};
#pragma unroll
      for (u32 i = 0; i < GROUPS / 4; ++i) {
        const uint4 v = ld_shared_b128(from + i * 16);
        chain[0] += __uint_as_float(v.x), chain[1] += __uint_as_float(v.y);
        chain[2] += __uint_as_float(v.z), chain[3] += __uint_as_float(v.w);
      }
      return (chain[0] + chain[1]) + (chain[2] + chain[3]);
    }
  }

  GPURT_FN static f32 sum_of(u32 from, u32 tile_log2) {
    if (tile_log2 == 0) return sum_groups<16>(from);
    if (tile_log2 == 1) return sum_groups<8>(from);
    if (tile_log2 == 2) return sum_groups<4>(from);
    if (tile_log2 == 3) return sum_groups<2>(from);
    return sum_groups<1>(from);
  }

  // ---- outputs
  // ----------------------------------------------------------------------------------- Output `at`
  // of `rows` step rows, of which row `first` is the first.
  GPURT_FN static Output output_of(const TaskRecord& task, const Shape& s, u32 at, u32 first,
                                   u32 rows, u64 round) {
    Output o;
    const u32 r = at & ((16u << s.tile_log2) - 1), n = task.tile[0] + r;
    const u32 j = at >> (4 + s.tile_log2);
    const u32 paired = (s.flags & kPaired) != 0 ? 1 : 0, bf16 = (s.flags & kYBf16) != 0 ? 1 : 0;
    const u32 width = task.param[kN] >> paired, column = n >> paired;
    const bool valid = j < rows && n < task.tile[1];
    const u32 slot = (r / 16) << (4 - s.tile_log2);
    // A lane without an output sums some other's partial sums, and stores nothing.
    o.part = valid ? (j * kTokenFloats + r % 16 * kGroupStride + slot) * 4 : 0;
    const u64 y = arg_address(task, kArgY, round, gpurt_program.payload_set_bytes);
    o.y = y + ((u64{first + j} * width + column) << (2 - bf16));
    if constexpr (kMakesFragments) {
      const u32 tiles = task.param[kYFragments];
      if (tiles != 0) o.y = y + fragment_place<2>(first + j, column, tiles);
    }
    if constexpr (kMatvecPublished) {
      if ((s.flags & kPublished) != 0)
        o.y = Copies::first_of(task.param + kYRanks, y, first + j, column);
    }
    // Lanes from one stored value or granule to the next; of what is published each lane stores.
    const bool alone = (s.flags & (kYPayload | kPublished)) == kYPayload;
    const u32 apart = (alone ? 4u << bf16 : 1u) << paired;
    o.bits = valid ? j << kRowShift : 0;
    if (at - at % 32 < rows << (4 + s.tile_log2)) o.bits |= kWorks;
    if (valid && (r & (apart - 1)) == 0) o.bits |= kStores;
    o.held = 0;
    o.residual = 0;
    if ((s.flags & kHasResidual) != 0 && valid) {
      const u64 base = arg_address(task, kArgResidual, round, gpurt_program.payload_set_bytes);
      const u32 row = source_row(task, first + j);
      o.residual = base + (u64{row} * width + column) * 4;
    }
    return o;
  }

  GPURT_FN static void load_residual(Output& o) {
    if (o.residual != 0) o.held = ld_relaxed_u32(o.residual);
  }

  GPURT_FN static f32 residual_of(const Shape& s, Output& o) {
    const bool polls = (s.flags & kResidualPayload) != 0;
    for (u32 count = 0; payload_missing(polls && o.held == kPayloadSentinel, count);)
      load_residual(o);
    return __uint_as_float(o.held);
  }

  // To every rank that gets it: the four lanes of a granule share its copies. All lanes of a warp.
  GPURT_FN static void publish(const Shape& s, u32 turn, const Output& o, f32 value, bool is_dry) {
    const u32 lane = threadIdx.x % 32, first = lane & ~3u;
    u32 word = __float_as_uint(value);
    if ((s.flags & kYPayload) != 0) word = canonical_f32(word);
    uint4 granule;
    granule.x = __shfl_sync(~0u, word, first), granule.y = __shfl_sync(~0u, word, first + 1);
    granule.z = __shfl_sync(~0u, word, first + 2), granule.w = __shfl_sync(~0u, word, first + 3);
    if ((o.bits & kStores) == 0 || is_dry) return;
    const u32* param = slot_of(turn).record.param + kYRanks;
#pragma unroll 1
    for (u32 i = lane % 4, count = Copies::count_of(param); i < count; i += 4)
      st_relaxed_b128((o.y & ~u64{15}) + Copies::offset_of(param, i), granule);
  }

  // All lanes of a warp.
  GPURT_FN static void store(const Shape& s, u32 turn, const Output& o, f32 value, bool is_dry) {
    if constexpr (kMatvecPublished) {
      if ((s.flags & kPublished) != 0) return publish(s, turn, o, value, is_dry);
    }
    const u32 paired = (s.flags & kPaired) != 0 ? 1 : 0;
    if ((s.flags & kYPayload) == 0) {
      if ((o.bits & kStores) == 0 || is_dry) return;
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
    if ((o.bits & kStores) != 0 && !is_dry) st_relaxed_b128(o.y, granule);
  }

  // 1 / sqrt(mean square + eps) of a row from its squares, K group by K group at shared address
  // `squares`.
  GPURT_FN static f32 row_factor(u32 squares, u32 tile_log2, u32 k, f32 eps) {
    const f32 mean = __fdividef(sum_of(squares, tile_log2), static_cast<f32>(k));
    return rsqrtf(__fadd_rn(mean, eps));
  }

  GPURT_FN static f32 swiglu(f32 gate, f32 up) {
    return __fmul_rn(__fdividef(gate, __fadd_rn(1.0f, __expf(-gate))), up);
  }

  // What only some tasks have, in the order of the contract. Intrinsics: no variant may contract
  // what another does not.
  template <u32 ROWS>
  GPURT_FN static f32 add_extras(u32 parts, const Shape& s, u32 turn, Output& o, f32 value) {
    if ((s.flags & kHasNorm) != 0) {
      const TaskRecord& task = slot_of(turn).record;
      const u32 squares = parts + kSquares<ROWS> + (o.bits >> kRowShift) * kGroupStride * 4;
      value =
          __fmul_rn(value, row_factor(squares, s.tile_log2, task.param[kK], param_f32(task, kEps)));
    }
    if constexpr (kMatvecScaled) {
      if ((s.flags & kHasScale) != 0) {
        const TaskRecord& task = slot_of(turn).record;
        value =
            scale_and_cap(value, param_f32(task, kMatvecScale), param_f32(task, kMatvecSoftcap));
      }
    }
    if ((s.flags & kPaired) != 0) {
      value = swiglu(value, __shfl_down_sync(~0u, value, 1));
    }
    if ((s.flags & kHasResidual) != 0) value = __fadd_rn(value, residual_of(s, o));
    return value;
  }

  // All lanes of a warp. `parts`: shared address of the Parts that the team has filled.
  template <u32 ROWS>
  GPURT_FN static void finish(u32 parts, const Shape& s, u32 turn, Output& o, bool is_dry) {
    f32 value = sum_of(parts + o.part, s.tile_log2);
    if ((s.flags & kExtras) != 0) value = add_extras<ROWS>(parts, s, turn, o, value);
    store(s, turn, o, value, is_dry);
  }

  // The outputs of `rows` step rows from row `first` on, a lane each; `o` is this thread's first.
  // is_dry: goes through the code alone.
  template <u32 ROWS>
  GPURT_FN static void finish_rows(u32 parts, const Shape& s, u32 first, u32 rows, u32 turn,
                                   Output& o, bool is_dry = false) {
    for (u32 at = threadIdx.x; (o.bits & kWorks) != 0;) {
      finish<ROWS>(parts, s, turn, o, is_dry);
      if (is_dry) break;
      at += kTeamThreads;
      if (at - at % 32 >= rows << (4 + s.tile_log2)) break;
      const Slot& slot = slot_of(turn);
      o = output_of(slot.record, s, at, first, rows, slot.round);
      load_residual(o);
    }
  }
};

}  // namespace gpurt
