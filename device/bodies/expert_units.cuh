// Units of an expert's packed weights: 16 rows x 64 columns, as one warp reads and multiplies them.
//
// Packings `expert_bf16kGwT` and `expert_nvfp4kGwT` of graphs/ops/packing_experts.py. Lane (g =
// lane / 4, c = lane % 4) owns columns 16c .. 16c+15 of rows g and g + 8: one block of nvfp4 a row.
// So mma j of four takes the lane's columns 4j .. 4j+3, two as its low k and two as its high k.
//   bf16    2048 bytes: for each mma, for each lane its 16 bytes of A
//   nvfp4   64 bytes of scales: for each lane those of rows g and g + 8; then 16 bytes of codes a
//           lane: row g columns 0-7 and 8-15, row g + 8 the same
// They lie in a stage of the ring. A team of 1 takes them from memory, past L1: it goes through
// them once for each of its virtual warps.
#pragma once
#include "../ptx.cuh"

namespace gpurt {

// B of the four mma: pairs of columns 2i, 2i + 1 of this lane's step row.
using ExpertPairs = u32[8];

struct Bf16Unit {
  static constexpr u32 kBytes = 2048;
  static constexpr bool kIsWide = true;
  static constexpr f32 kFactor = 1;  // of the sums
  uint4 a[4];

  GPURT_FN void load(u64 unit, u32 lane) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) a[j] = ld_weight_b128(unit + j * 512 + lane * 16);
  }
  // A lane's part of a unit in shared memory.
  struct Place {
    u32 at;
    GPURT_FN void start(u32 unit, u32 lane) { at = unit + lane * 16; }
    GPURT_FN void advance(u32 bytes) { at += bytes; }
  };
  GPURT_FN void load(const Place& place) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) a[j] = ld_shared_b128(place.at + j * 512);
  }

  GPURT_FN uint4 operand(u32 j) const { return a[j]; }
};

// A code becomes the bf16 of its value times 2^-126: its three bits lie where bf16 has the last two
// of its exponent and the first of its mantissa, denormal exactly where e2m1 is. A scale byte (five
// bits of exponent, bias 9, three of mantissa) becomes the bf16 of its value times 2^118. Their
// product, one rounding that never rounds, is the element times 2^-8: at most six significant bits.
struct Nvfp4Unit {
  static constexpr u32 kBytes = 576;
  static constexpr bool kIsWide = false;  // its task of few users has a loop of its own
  static constexpr u32 kScaleBytes = 64;
  static constexpr f32 kFactor = 256;
  uint4 codes;
  u32 scales[2];  // of row g, of row g + 8

  GPURT_FN void load(u64 unit, u32 lane) {
    codes = ld_weight_b128(unit + kScaleBytes + lane * 16);
    const u32 both = ld_weight_u16(unit + lane * 2);
    scales[0] = both & 0xFF, scales[1] = both >> 8;
  }
  struct Place {
    u32 codes, scales;
    GPURT_FN void start(u32 unit, u32 lane) {
      codes = unit + kScaleBytes + lane * 16;
      scales = unit + lane * 2;
    }
    GPURT_FN void advance(u32 bytes) { codes += bytes, scales += bytes; }
  };
  GPURT_FN void load(const Place& place) {
    codes = ld_shared_b128(place.codes);
    scales[0] = ld_shared_u8(place.scales), scales[1] = ld_shared_u8(place.scales + 1);
  }

  // A word that hangs on all that load() read.
  GPURT_FN u32 read() const { return codes.x ^ scales[0] ^ scales[1]; }

  // A of mma j: (row g, low), (row g + 8, low), (row g, high), (row g + 8, high).
  GPURT_FN uint4 operand(u32 j) const {
    const u32 low = j < 2 ? codes.x : codes.y, high = j < 2 ? codes.z : codes.w;
    const u32 first = 2 * j % 4;
    return make_uint4(pair(low, first, scale(0)), pair(high, first, scale(1)),
                      pair(low, first + 1, scale(0)), pair(high, first + 1, scale(1)));
  }

 private:
  // Twice, by one product: shifts and masks are what the loop has too many of.
  GPURT_FN u32 scale(u32 row) const { return scales[row] * 0x00100010u + 0x76007600u; }

  // Elements 2i and 2i + 1 of a word of eight. The packer placed the bits so that a rotation and a
  // mask, or one product, bring them to their places; packing_experts.py has the table.
  GPURT_FN static u32 pair(u32 word, u32 i, u32 scale) {
    constexpr u32 kMask = 0x81C081C0u;
    const u32 turned = i == 3 ? (word & 0x001B001Bu) * 4228 : __funnelshift_r(word, word, 3 * i);
    return mul_bf16x2(turned & kMask, scale);
  }
};

}  // namespace gpurt
