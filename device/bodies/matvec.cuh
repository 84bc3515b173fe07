// matvec on the GPU: y = epilogue(W xn) + residual, for the 1 to 16 rows of a step.
//
// The contract is in graphs/ops/matvec.py, the packing in graphs/ops/packing.py, tiles in
// graphs/ops/matvec_cuda.py. A task computes R x 16 rows of W, R in {1, 2, 4, 8, 16}:
//
//   unit      16 rows of W x 64 columns, 2 KB, in the order in which a warp's four
//             mma.m16n8k16 read it: lane (g = lane / 4, c = lane % 4) owns columns 16c .. 16c+15
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
#include "../stream.cuh"

namespace gpurt {

struct matvec {
  static constexpr u32 kVirtual = 16;    // virtual warps
  static constexpr u32 kUnitBytes = 2048;
  static constexpr u32 kRowTile = 8;     // rows of a step in one mma: its n
  static constexpr u32 kTokenStride = 20;  // floats: 16 rows, padded against bank conflicts
  static constexpr u32 kPartFloats = kRowTile * kTokenStride;

  // Partial sums of one tile of 8 step rows. Two of them take turns, so that one team barrier per
  // tile is enough: who writes one again has passed the barrier after its last reading.
  struct Half {
    f32 part[kVirtual][kPartFloats];  // [virtual warp][step row][row of W]
    f32 squares[kVirtual][kRowTile];  // [K group][step row]
  };
  static_assert(2 * sizeof(Half) <= kScratchBytes);
  static_assert(kStageBytes == kVirtual * kUnitBytes);

  enum Epilogue : u32 { kPlain = 0, kSwiglu = 1 };
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgResidual, kArgY };
  enum Param : u32 { kN, kK, kEpilogue, kEps, kSampled, kWDtype, kXDtype, kYDtype };

  // What all lanes share. Read from the slot once, before the team barrier.
  struct Shape {
    u32 k;
    u32 rows;        // of this step, or sampled ones
    u32 tile_log2;   // log2 of R
    u32 chunks;      // of 64 columns
    u64 norm;        // 0: none
    bool x_payload;
    bool y_payload;
    bool residual_payload;
  };

  GPURT_FN static bool payload(const TaskRecord& task, u32 i) {
    return (task.payload_mask >> i & 1) != 0;
  }

  GPURT_FN static Shape shape_of(const TaskRecord& task) {
    Shape s;
    s.k = task.param[kK];
    s.rows = task.param[kSampled] != 0 ? shared().sample_count : shared().rows;
    s.tile_log2 = 31 - __clz((task.tile[1] - task.tile[0] + 15) / 16);
    s.chunks = (s.k + 63) / 64;
    s.norm = task.addr[kArgNorm];
    s.x_payload = payload(task, kArgX);
    s.y_payload = payload(task, kArgY);
    s.residual_payload = payload(task, kArgResidual);
    return s;
  }

  // Row of x (and of the residual) that belongs to row `j` of the output.
  GPURT_FN static u32 source_row(const TaskRecord& task, u32 j) {
    return task.param[kSampled] != 0 ? step_sample_rows(gpurt_program)[j] : j;
  }

  // ---- activations: a lane's 16 columns of one chunk, for TILES tiles of 8 rows ------------------
  // X is kF32 or kBf16. `raw` is in flight from load() to ready().
  template <u32 X, u32 TILES>
  struct Activations {
    static constexpr u32 kGranules = X == kBf16 ? 2 : 4;
    static constexpr u32 kElementBytes = X == kBf16 ? 2 : 4;
    uint4 raw[TILES][kGranules];
    u64 row[TILES];  // address of this lane's row of x, 0 if it has none

    GPURT_FN void start(const TaskRecord& task, const Shape& s, u64 step) {
      const u64 x = arg_address(task, kArgX, step, gpurt_program.payload_set_bytes);
      const u32 lane = threadIdx.x % 32;
#pragma unroll
      for (u32 t = 0; t < TILES; ++t) {
        const u32 j = t * kRowTile + lane / 4;
        row[t] = j < s.rows ? x + (u64{source_row(task, j)} * s.k + lane % 4 * 16) * kElementBytes
                            : 0;
      }
    }

    // Zeros where this lane has no row or no column: zero never looks like the sentinel.
    GPURT_FN void load(const Shape& s, u32 chunk) {
      const bool has = chunk * 64 + threadIdx.x % 4 * 16 < s.k;
#pragma unroll
      for (u32 t = 0; t < TILES; ++t) {
#pragma unroll
        for (u32 i = 0; i < kGranules; ++i) {
          raw[t][i] = make_uint4(0, 0, 0, 0);
          if (has && row[t] != 0)
            raw[t][i] = ld_relaxed_gpu_b128(row[t] + chunk * 64 * kElementBytes + i * 16);
        }
      }
    }

    GPURT_FN bool missing() const {
      bool any = false;
#pragma unroll
      for (u32 t = 0; t < TILES; ++t) {
#pragma unroll
        for (u32 i = 0; i < kGranules; ++i) any |= is_sentinel(raw[t][i]);
      }
      return any;
    }

    // Until all of the chunk is there. Converged.
    GPURT_FN void wait(const Shape& s, u32 chunk, u32 turn) {
      if (!s.x_payload) return;
      u32 polls = 0;
      u64 begin_ns = 0;
      while (__any_sync(~0u, missing())) {
        if (is_look(++polls)) {
          const bool ends = threadIdx.x % 32 == 0 && look(begin_ns, payload_wait_info(turn));
          if (__any_sync(~0u, ends)) return;
        }
        load(s, chunk);
      }
    }

    // To bf16 pairs in mma order: pair[2j], pair[2j + 1] are B of mma j. `norm` is the address of
    // this lane's weights (f32 x only), 0 if there are none; with them, adds this lane's squares.
    GPURT_FN void convert(u32 t, u64 norm, u32 (&pair)[8], f32& squares) const {
#pragma unroll
      for (u32 i = 0; i < kGranules; ++i) {
        const uint4 v = raw[t][i];
        if constexpr (X == kBf16) {
          pair[4 * i] = v.x, pair[4 * i + 1] = v.y, pair[4 * i + 2] = v.z, pair[4 * i + 3] = v.w;
        } else {
          f32 a = __uint_as_float(v.x), b = __uint_as_float(v.y);
          f32 c = __uint_as_float(v.z), d = __uint_as_float(v.w);
          if (norm != 0) {
            squares = __fmaf_rn(a, a, squares), squares = __fmaf_rn(b, b, squares);
            squares = __fmaf_rn(c, c, squares), squares = __fmaf_rn(d, d, squares);
            const float4 weight = __ldg(at<const float4>(norm) + i);
            a *= weight.x, b *= weight.y, c *= weight.z, d *= weight.w;
          }
          pair[2 * i] = pack_bf16x2(a, b), pair[2 * i + 1] = pack_bf16x2(c, d);
        }
      }
    }
  };

  // Of a lane's 16 norm weights of a chunk; 0 where there are none.
  GPURT_FN static u64 norm_address(const Shape& s, u32 chunk) {
    const u32 column = chunk * 64 + threadIdx.x % 4 * 16;
    return s.norm == 0 || column >= s.k ? 0 : s.norm + u64{column} * 4;
  }

  // ---- multiply ---------------------------------------------------------------------------------
  GPURT_FN static void read_unit(u32 unit_address, uint4 (&unit)[4]) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      unit[j] = ld_shared_b128(unit_address + j * 512 + threadIdx.x % 32 * 16);
  }

  // Two chains: a dependent mma costs its whole latency.
  GPURT_FN static void multiply(const uint4 (&unit)[4], const u32 (&pair)[8], f32 (&sum)[2][4]) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) mma_m16n8k16_bf16(sum[j % 2], unit[j], pair[2 * j], pair[2 * j + 1]);
  }

  // ---- reduce -----------------------------------------------------------------------------------
  GPURT_FN static Half& half_of(u32 half) {
    return reinterpret_cast<Half*>(shared().scratch)[half];
  }

  // One virtual warp's partial sums: lane (g, c) holds rows g and g + 8 of W, step rows 2c, 2c + 1.
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

  // Output (step row j of the tile, row r of the task): its K groups, in four chains. GROUPS is a
  // constant so that every address is one register and an offset.
  template <u32 GROUPS>
  GPURT_FN static f32 sum_groups(const Half& half, const Shape& s, u32 j, u32 r, f32 eps) {
    const f32* part = half.part[r / 16] + j * kTokenStride + r % 16;
    f32 chain[4] = {};
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group)
      chain[group % 4] += part[group * (kVirtual / GROUPS) * kPartFloats];
    const f32 value = (chain[0] + chain[1]) + (chain[2] + chain[3]);
    if (s.norm == 0) return value;
    f32 squares = 0;
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) squares += half.squares[group][j];
    // Intrinsics here and below: no variant may contract what another does not.
    return __fmul_rn(value, rsqrtf(__fadd_rn(__fdividef(squares, static_cast<f32>(s.k)), eps)));
  }

  GPURT_FN static f32 output_of(const Half& half, const Shape& s, u32 j, u32 r, f32 eps) {
    switch (s.tile_log2) {
      case 0:
        return sum_groups<16>(half, s, j, r, eps);
      case 1:
        return sum_groups<8>(half, s, j, r, eps);
      case 2:
        return sum_groups<4>(half, s, j, r, eps);
      case 3:
        return sum_groups<2>(half, s, j, r, eps);
      default:
        return sum_groups<1>(half, s, j, r, eps);
    }
  }

  // ---- store ------------------------------------------------------------------------------------
  // Where output `at` of a tile of step rows lies: consecutive lanes hold consecutive rows of W.
  struct Place {
    u32 j;       // step row within the tile
    u32 r;       // row of W within the task
    u32 column;  // of y
    u32 width;   // columns of y
    bool valid;
  };

  GPURT_FN static Place place_of(const TaskRecord& task, const Shape& s, u32 at, u32 rows) {
    Place p;
    p.j = at >> (4 + s.tile_log2);
    p.r = at & ((16u << s.tile_log2) - 1);
    const u32 n = task.tile[0] + p.r;
    const u32 paired = task.param[kEpilogue] == kSwiglu ? 1 : 0;
    p.column = n >> paired;
    p.width = task.param[kN] >> paired;
    p.valid = p.j < rows && n < task.tile[1];
    return p;
  }

  // The residual of an output: its granule if payload, else its word in .x.
  GPURT_FN static uint4 load_residual(const TaskRecord& task, const Shape& s, const Place& p,
                                      u32 tile, u64 step) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (task.addr[kArgResidual] == 0 || !p.valid) return v;
    const u64 base = arg_address(task, kArgResidual, step, gpurt_program.payload_set_bytes);
    const u32 row = source_row(task, tile * kRowTile + p.j);
    const u64 address = base + (u64{row} * p.width + p.column) * 4;
    if (s.residual_payload) return ld_relaxed_gpu_b128(address & ~u64{15});
    v.x = ld_relaxed_gpu_u32(address);
    return v;
  }

  GPURT_FN static f32 residual_value(const TaskRecord& task, const Shape& s, const Place& p,
                                     u32 tile, u64 step, u32 turn, uint4 v) {
    if (!s.residual_payload) return __uint_as_float(v.x);
    u32 polls = 0;
    u64 begin_ns = 0;
    while (payload_missing(is_sentinel(v), polls, begin_ns, turn))
      v = load_residual(task, s, p, tile, step);
    const u32 word = p.column % 4;
    return __uint_as_float(word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w);
  }

  // All lanes of a warp. `apart`: lanes between two neighbours of a row of y, 2 after swiglu.
  GPURT_FN static void store_y(const TaskRecord& task, const Shape& s, const Place& p, u32 tile,
                               u64 step, f32 value, u32 apart) {
    const bool is_bf16 = task.param[kYDtype] == kBf16;
    const u64 base = arg_address(task, kArgY, step, gpurt_program.payload_set_bytes);
    const u64 at_y = u64{tile * kRowTile + p.j} * p.width + p.column;
    const u64 address = base + (is_bf16 ? at_y * 2 : at_y * 4);
    const bool owner = p.valid && p.r % apart == 0;
    if (!s.y_payload) {
      if (!owner) return;
      if (is_bf16) {
        *at<u16>(address) = static_cast<u16>(pack_bf16x2(value, 0.0f));
      } else {
        *at<f32>(address) = value;
      }
      return;
    }
    uint4 granule;
    granule.x = canonical_f32(__float_as_uint(value));
    u32 words_apart = apart;
    if (is_bf16) {
      granule.x = pack_bf16x2(value, __shfl_down_sync(~0u, value, apart));
      words_apart = 2 * apart;
    }
    granule.y = __shfl_down_sync(~0u, granule.x, words_apart);
    granule.z = __shfl_down_sync(~0u, granule.x, 2 * words_apart);
    granule.w = __shfl_down_sync(~0u, granule.x, 3 * words_apart);
    if (p.valid && p.r % (4 * words_apart) == 0) st_relaxed_gpu_b128(address, granule);
  }

  // The outputs of one tile of 8 step rows, a lane each; every warp's lanes stay together.
  GPURT_FN static void finish_tile(const TaskRecord& task, const Shape& s, const Half& half,
                                   u32 tile, u64 step, u32 turn, uint4 residual) {
    const u32 rows = s.rows - tile * kRowTile < kRowTile ? s.rows - tile * kRowTile : kRowTile;
    const u32 outputs = rows << (4 + s.tile_log2);
    const bool paired = task.param[kEpilogue] == kSwiglu;
    for (u32 at = threadIdx.x; at - at % 32 < outputs; at += kTeamThreads) {
      const Place p = place_of(task, s, at, rows);
      if (tile != 0 || at >= kTeamThreads) residual = load_residual(task, s, p, tile, step);
      f32 value = 0;
      if (p.valid) value = output_of(half, s, p.j, p.r, __uint_as_float(task.param[kEps]));
      if (paired) {
        const f32 up = __shfl_down_sync(~0u, value, 1);
        value = __fmul_rn(__fdividef(value, __fadd_rn(1.0f, __expf(-value))), up);
      }
      if (task.addr[kArgResidual] != 0)
        value = __fadd_rn(value, residual_value(task, s, p, tile, step, turn, residual));
      store_y(task, s, p, tile, step, value, paired ? 2 : 1);
    }
  }

  // This warp's unit of the next stage, into registers; the stage is then the loader's again.
  GPURT_FN static void take_unit(u32 turn, StageCursor& cursor, u32 warp, uint4 (&unit)[4],
                                 u32& stall) {
    stall += wait_stage(cursor, turn);
    read_unit(shared_address(shared().ring[cursor.stage]) + warp * kUnitBytes, unit);
    release_stage(cursor);
    cursor.advance();
  }

  // ---- a team of 16 warps: one virtual warp each ---------------------------------------------------
  template <u32 X, u32 TILES>
  GPURT_FN static void run_team(u32 turn, StageCursor& cursor, u32& half) {
    const Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    const u64 step = slot.step;
    const Shape s = shape_of(task);
    const u32 warp = threadIdx.x / 32, stride = kVirtual >> s.tile_log2;
    u32 chunk = warp >> s.tile_log2;
    Activations<X, TILES> x;
    x.start(task, s, step);
    x.load(s, chunk);
    const uint4 residual = load_residual(
        task, s, place_of(task, s, threadIdx.x, s.rows < kRowTile ? s.rows : kRowTile), 0, step);
    f32 sum[TILES][2][4] = {};
    f32 squares[TILES] = {};
    u32 stall = 0;
    for (u32 first = 0; first < s.chunks; first += stride, chunk += stride) {
      uint4 unit[4];
      u32 pair[TILES][8];
      // A stage is released before its task's input is there where registers allow it.
      if constexpr (X == kBf16) take_unit(turn, cursor, warp, unit, stall);
      x.wait(s, chunk, turn);
      if (first == 0 && s.x_payload) trace_met(turn);
#pragma unroll
      for (u32 t = 0; t < TILES; ++t)
        x.convert(t, norm_address(s, chunk), pair[t], squares[t]);
      if constexpr (X != kBf16) take_unit(turn, cursor, warp, unit, stall);
      x.load(s, chunk + stride);
      // What lies behind a short stage is of an earlier copy: any bits, NaN too.
      if (chunk < s.chunks) {
#pragma unroll
        for (u32 t = 0; t < TILES; ++t) multiply(unit, pair[t], sum[t]);
      }
    }
    trace_stall(turn, stall);
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      Half& mine = half_of(half);
      store_part(mine, warp, sum[t], s.rows - t * kRowTile);
      if (s.norm != 0 && warp % (kVirtual / stride) == 0)
        store_squares(mine, warp >> s.tile_log2, squares[t]);
      team_sync();
      finish_tile(task, s, mine, t, step, turn, residual);
      half ^= 1;
    }
  }

  // ---- a team of 1 warp: all virtual warps, their sums in shared memory ------------------------------
  struct Single {
    Half half;
    float4 sum[2][kVirtual][2][32];   // [tile][virtual warp][chain][lane]
    f32 squares[2][kVirtual][32];     // [tile][K group][lane]
  };
  static_assert(kTeamWarps != 1 || sizeof(Single) <= kScratchBytes);

  template <u32 X>
  GPURT_FN static void run_single(u32 turn, StageCursor& cursor) {
    const Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    const Shape s = shape_of(task);
    const u32 lane = threadIdx.x % 32, groups = kVirtual >> s.tile_log2;
    Single& single = *reinterpret_cast<Single*>(shared().scratch);
    for (u32 i = lane; i < 2 * kVirtual * 2 * 32; i += 32)
      (&single.sum[0][0][0][0])[i] = make_float4(0, 0, 0, 0);
    for (u32 i = lane; i < 2 * kVirtual * 32; i += 32) (&single.squares[0][0][0])[i] = 0;
    Activations<X, 2> x;
    x.start(task, s, slot.step);
    u32 stall = 0;
    for (u32 first = 0; first < s.chunks; first += groups) {
      stall += wait_stage(cursor, turn);
      for (u32 group = 0; group < groups && first + group < s.chunks; ++group)
        multiply_group<X>(s, single, x, cursor.stage, group, first + group, turn);
      if (first == 0 && s.x_payload) trace_met(turn);
      release_stage(cursor);
      cursor.advance();
    }
    trace_stall(turn, stall);
    for (u32 t = 0; t * kRowTile < s.rows; ++t) {
      for (u32 v = 0; v < kVirtual; ++v) {
        f32 sum[2][4];
        get_sum(single, t, v, sum);
        store_part(single.half, v, sum, s.rows - t * kRowTile);
      }
      for (u32 group = 0; group < groups; ++group)
        store_squares(single.half, group, single.squares[t][group][lane]);
      __syncwarp();
      const u32 rows = s.rows - t * kRowTile < kRowTile ? s.rows - t * kRowTile : kRowTile;
      finish_tile(task, s, single.half, t, slot.step, turn,
                  load_residual(task, s, place_of(task, s, lane, rows), t, slot.step));
      __syncwarp();
    }
  }

  template <u32 X>
  GPURT_FN static void multiply_group(const Shape& s, Single& single, Activations<X, 2>& x,
                                      u32 stage, u32 group, u32 chunk, u32 turn) {
    const u32 lane = threadIdx.x % 32;
    u32 pair[2][8];
    x.load(s, chunk);
    x.wait(s, chunk, turn);
#pragma unroll
    for (u32 t = 0; t < 2; ++t)
      x.convert(t, norm_address(s, chunk), pair[t], single.squares[t][group][lane]);
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

  // ---- the roles of the hot loop -------------------------------------------------------------------
  // Each way gets a loop of its own, with the registers it needs.
  static constexpr u32 kWays = kTeamWarps == 1 ? 2 : 4;

  // Whether a task without counter edges must follow a team barrier: an ordinary input may be what
  // this team wrote in the task before (an order edge). Payload inputs tell by themselves.
  GPURT_FN static bool needs_barrier(const TaskRecord& task) {
    return !payload(task, kArgX) ||
           (task.addr[kArgResidual] != 0 && !payload(task, kArgResidual));
  }

  GPURT_FN static u32 way_of(const TaskRecord& task) {
    const u32 is_bf16 = task.param[kXDtype] == kBf16 ? 1 : 0;
    if constexpr (kTeamWarps == 1) return is_bf16;
    const u32 rows = task.param[kSampled] != 0 ? shared().sample_count : shared().rows;
    return rows <= kRowTile ? is_bf16 : is_bf16 + 2;
  }

  template <u32 WAY>
  GPURT_FN static void run_hot(u32 turn, StageCursor& cursor, u32& half) {
    constexpr u32 x = WAY % 2 == 1 ? kBf16 : kF32;
    if constexpr (kTeamWarps == 1) {
      run_single<x>(turn, cursor);
    } else {
      run_team<x, WAY / 2 + 1>(turn, cursor, half);
    }
  }
};

}  // namespace gpurt
