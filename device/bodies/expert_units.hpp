// Units of nvfp4 as expert_units.cuh reads them, made from stored blocks when a plan is loaded.
//
// The layout is in graphs/ops/packing_experts.py, which also makes the tables: what a byte of codes
// becomes by its place in a word, and what a scale becomes.
#pragma once
#include <cstring>

#include "../types.hpp"

namespace gpurt::host {

struct Nvfp4Tables {
  const u32* bytes;  // [4][256]: the bits of a byte of codes, in their places
  const u8* scales;  // [256]
};

constexpr u32 kUnitRows = 16;
constexpr u32 kUnitLanes = 32;
constexpr u32 kUnitColumns = 4;  // blocks of 16 elements in a chunk
constexpr u32 kStoredBlock = 9;  // eight bytes of codes, one of scale
constexpr u32 kNvfp4Unit = 18 * kUnitLanes;

/// One word of eight codes under its scale: a negative one flips signs, zero clears magnitudes.
inline u32 placed_codes(Nvfp4Tables tables, u32 word, u32 scale) {
  word ^= (scale >> 7) * 0x88888888U;
  word &= (scale & 127) == 0 ? 0x88888888U : ~0U;
  return tables.bytes[word & 255] | tables.bytes[256 + (word >> 8 & 255)] |
         tables.bytes[512 + (word >> 16 & 255)] | tables.bytes[768 + (word >> 24)];
}

/// Rows of stored blocks [rows, count, 9], rows a multiple of 16, to their units. Columns past
/// `count` are zeros. The tables come by value: a store of bytes could change what lies elsewhere.
inline void pack_nvfp4_units(Nvfp4Tables tables, const u8* blocks, u64 rows, u64 count, u8* units) {
  const u64 chunks = (count + kUnitColumns - 1) / kUnitColumns;
  for (u64 chunk = 0; chunk < chunks; ++chunk) {
    for (u64 tile = 0; tile < rows / kUnitRows; ++tile, units += kNvfp4Unit) {
      for (u32 row = 0; row < kUnitRows; ++row) {
        const u8* from = blocks + ((tile * kUnitRows + row) * count + chunk * kUnitColumns) * 9;
        for (u32 c = 0; c < kUnitColumns; ++c, from += kStoredBlock) {
          const u32 lane = row % 8 * kUnitColumns + c;
          u32 words[2] = {};
          u8 scale = 0;
          if (chunk * kUnitColumns + c < count) {
            std::memcpy(words, from, sizeof words);
            scale = from[8];
          }
          for (u32& word : words) word = placed_codes(tables, word, scale);
          units[2 * lane + row / 8] = tables.scales[scale];
          std::memcpy(units + 2 * kUnitLanes + 16 * lane + row / 8 * 8, words, sizeof words);
        }
      }
    }
  }
}

}  // namespace gpurt::host
