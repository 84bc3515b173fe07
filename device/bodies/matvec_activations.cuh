// matvec's activations on the GPU: a warp's part of one chunk of 64 columns, for ROWS step rows.
//
// X is kF32 or kBf16, ROWS is 1, 8 or 16: the most rows that this variant takes. A chunk of a row
// is 8 (bf16) or 16 (f32) granules; lane (g, c) needs granules c, c + 4, ... of step rows g and g +
// 8, the B operand of four mma after conversion. The packing of W has its columns in the same order
// (graphs/ops/packing.py).
//   8, 16 rows   every lane loads what it needs: a row's four lanes read 64 bytes at a time
//   1 row        the first lanes load one granule each, so that one request brings the chunk; after
//                conversion they pass it on to lanes 0..3. The lines of a payload edge are polled
//                by every SM at once, and requests at their L2 slices are what a hop waits for.
// Loads go to L2 for payload and for ordinary inputs alike, so one path serves both. A trip takes
// longer than a chunk's arithmetic: kAhead chunks are under way at once, as many as registers hold,
// each in a set of its own.
#pragma once
#include "../stream.cuh"
#include "fragments.cuh"

namespace gpurt {

constexpr u32 kMatvecRowTile = 8;  // rows of a step in one mma: its n

template <u32 X, u32 ROWS, bool ALONE = false, u32 SHARE = 1>
struct MatvecActivations {
  static constexpr u32 kTiles = ROWS == 16 ? 2 : 1;
  static constexpr u32 kGranules = X == kBf16 ? 2 : 4;              // that a lane needs of a row
  static constexpr u32 kLoads = ROWS == 1 ? 1 : kGranules / SHARE;  // that it loads itself
  static constexpr u32 kPairs = 8 / kGranules;                      // of bf16, in a granule
  static constexpr u32 kColumnLanes = ROWS == 1 ? 4 * kGranules : 4;
  static constexpr u32 kElementBytes = X == kBf16 ? 2 : 4;
  static constexpr u32 kChunkBytes = 64 * kElementBytes;
  static constexpr u32 kGranuleStride = 64;  // bytes: four lanes' granules
  static constexpr bool kOrdered = kFragments && X == kBf16;
  static constexpr u32 kSets = (X == kBf16 || SHARE > 1 ? 8 : 4) / (kTiles * kLoads);
  static constexpr u32 kAhead = ALONE || kSets < 1 ? 1 : ROWS == 1 ? 2 : kSets;
  // A norm's weights are asked for with their x: at its use each chunk would wait a trip for them.
  static constexpr bool kNormAhead = X == kF32 && ROWS == 1 && !ALONE;
  uint4 raw[kAhead][kTiles][kLoads];  // in flight from load() to wait()
  uint4 scale[kNormAhead ? kAhead : 1];
  u64 at[kTiles];  // this lane's first granule of the current chunk
  u32 offset;      // of that granule in its row, bytes
  u32 row_bytes;   // 0: there is no row to read
  u32 log2;        // bytes of memory for a byte of a row: those of its rows too
  u32 apart;       // bytes of memory from a lane's granule to its next one

  // row(j): the row of x that belongs to row j of the output. Lanes beyond the last row read that
  // one again: it costs no further sector, and their columns of the product are never stored.
  // tiles: of a buffer in fragment order, else 0.
  template <class Row>
  GPURT_FN void start(u64 x, u32 k, u32 chunk, u32 rows, u32 tiles, Row row) {
    const u32 lane = threadIdx.x % 32;
    offset = chunk * kChunkBytes + lane % kColumnLanes * 16;
    if constexpr (SHARE > 1) offset += threadIdx.x / 32 % SHARE * kLoads * kGranuleStride;
    row_bytes = rows == 0 ? 0 : k * kElementBytes;
    log2 = 0, apart = kGranuleStride;
    if (kOrdered && tiles != 0) log2 = tiles == 1 ? 3 : 4, apart = kFragmentBytes;
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
      const u32 j = ROWS == 1 ? 0 : t * kMatvecRowTile + lane / 4;
      const u32 source = rows == 0 ? 0 : row(j < rows ? j : rows - 1);
      at[t] = x + u64{source} * row_bytes + offset;
      if (kOrdered && tiles != 0)
        at[t] = x + fragment_place<kElementBytes>(source, offset / kElementBytes, tiles);
    }
  }

  GPURT_FN void advance(u32 chunks) {
    offset += chunks * kChunkBytes;
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) at[t] += in_memory(chunks * kChunkBytes);
  }

  // Bytes from one place in a row to another as memory has them.
  GPURT_FN u32 in_memory(u32 bytes) const { return kOrdered ? bytes << log2 : bytes; }

  // What lies `ahead` bytes behind the current chunk's granule `i`, into register set `set`. Zeros
  // beyond the row's end, where W is padded with zeros: zero never looks like the sentinel.
  GPURT_FN void load(u32 set, u32 t, u32 i, u32 ahead) {
    raw[set][t][i] = make_uint4(0, 0, 0, 0);
    reload(set, t, i, ahead);
  }
  GPURT_FN void reload(u32 set, u32 t, u32 i, u32 ahead) {
    if (offset + ahead + i * kGranuleStride < row_bytes)
      raw[set][t][i] =
          ld_relaxed_b128(at[t] + in_memory(ahead) + i * (kOrdered ? apart : kGranuleStride));
  }

  // The norm weights of a chunk, as load() has x. norm: their address, 0: none.
  GPURT_FN void load_norm(u32 set, u32 ahead, u64 norm) {
    if (kNormAhead && norm != 0 && offset + ahead < row_bytes)
      scale[set] = ld_relaxed_b128(norm + offset + ahead);
  }

  GPURT_FN void load(u32 set, u32 ahead) {
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) load(set, t, i, ahead);
    }
  }
  GPURT_FN void reload(u32 set, u32 ahead) {
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) reload(set, t, i, ahead);
    }
  }

  GPURT_FN bool missing(u32 set) const {
    bool any = false;
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) any |= is_sentinel(raw[set][t][i]);
    }
    return any;
  }

  // Payload: until all of the current chunk is there, which lies in `set`. Converged. step: bytes
  // from a chunk to the next one of this warp. What was asked for beside a chunk that was late is
  // asked for again at once: one trip for all of it, not one for each.
  GPURT_FN void wait(u32 set, u32 step) {
    u32 polls = 0;
    for (; payload_missing(missing(set), polls);) reload(set, 0);
    if (kAhead == 1 || polls == 0) return;
#pragma unroll
    for (u32 i = 1; i < kAhead; ++i) reload((set + i) % kAhead, i * step);
  }

  // Granule `i` of the current chunk, in `set`, to bf16 pairs. `norm`: address of the norm weights
  // (f32 x only), 0 if there are none; with them, adds the granule's squares to their own sum, so
  // that all variants add them in one order.
  GPURT_FN void convert(u32 set, u32 t, u32 i, u64 norm, u32 (&pair)[kPairs], f32& squares) const {
    const uint4 v = raw[set][t][i];
    if constexpr (X == kBf16) {
      pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
    } else {
      f32 a = __uint_as_float(v.x), b = __uint_as_float(v.y);
      f32 c = __uint_as_float(v.z), d = __uint_as_float(v.w);
      if (norm != 0 && offset + i * kGranuleStride < row_bytes) {
        squares = __fmaf_rn(a, a, squares), squares = __fmaf_rn(b, b, squares);
        squares = __fmaf_rn(c, c, squares), squares = __fmaf_rn(d, d, squares);
        const float4 weight =
            kNormAhead ? float4_of(scale[set])
                       : __ldg(reinterpret_cast<const float4*>(norm + offset + i * kGranuleStride));
        a *= weight.x, b *= weight.y, c *= weight.z, d *= weight.w;
      }
      pair[0] = pack_bf16x2(a, b), pair[1] = pack_bf16x2(c, d);
    }
  }

  // The whole chunk, in mma order: pair[2j], pair[2j + 1] are B of mma j.
  GPURT_FN void convert(u32 set, u32 t, u64 norm, u32 (&pair)[8], f32 (&squares)[kLoads]) const {
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      u32 part[kPairs];
      convert(set, t, i, norm, part, squares[i]);
#pragma unroll
      for (u32 w = 0; w < kPairs; ++w) pair[kPairs * i + w] = part[w];
    }
    if constexpr (ROWS == 1) pass_on(pair);
  }

  // The squares of a chunk's columns of this lane's row, the same in its four lanes (ROWS == 1: in
  // all lanes that loaded).
  GPURT_FN static f32 sum_squares(const f32 (&squares)[kLoads]) {
    f32 sum[kLoads];
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      sum[i] = squares[i] + __shfl_xor_sync(~0u, squares[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
    if constexpr (ROWS == 1) {
#pragma unroll
      for (u32 step = 4; step < 4 * kGranules; step *= 2)
        sum[0] += __shfl_xor_sync(~0u, sum[0], step);
      return sum[0];
    } else if constexpr (kGranules == 2) {
      return sum[0] + sum[1];
    } else {
      return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
  }

 private:
  // One row: lane c + 4i's words become lane c's granule i. Other lanes hold what they like: their
  // columns of the product belong to no row.
  GPURT_FN static void pass_on(u32 (&pair)[8]) {
#pragma unroll
    for (u32 i = 1; i < kGranules; ++i) {
#pragma unroll
      for (u32 w = 0; w < kPairs; ++w) pair[kPairs * i + w] = __shfl_down_sync(~0u, pair[w], 4 * i);
    }
  }
};

}  // namespace gpurt
