// Units of bf16 as matvec.cuh and expert_units.cuh read them, made when a plan is loaded.
//
// The layout is in graphs/ops/packing.py.
#pragma once
#include <cstring>

#include "../types.hpp"

namespace gpurt::host {

/// A tile of bf16 bit patterns [rows, k], rows a multiple of 16 and k of 64, to its units. kGroup:
/// columns that a lane owns side by side; experts' are 16, and lie as their lanes read them.
template <u32 kGroup>
void pack_mma16_units(const u16* w, u64 rows, u64 k, u8* units) {
  for (u64 chunk = 0; chunk < k / 64; ++chunk) {
    for (u64 tile = 0; tile < rows / 16; ++tile, units += 2048) {
      for (u32 g = 0; g < 8; ++g) {
        const u16* low = w + (tile * 16 + g) * k + chunk * 64;
        const u16* high = low + 8 * k;
        for (u32 c = 0; c < 4; ++c) {
          for (u32 q = 0; q < 16; q += 4) {
            const u32 column = 4 * kGroup * (q / kGroup) + kGroup * c + q % kGroup;
            u64 a, b;
            std::memcpy(&a, low + column, 8);
            std::memcpy(&b, high + column, 8);
            if (kGroup == 16) {
              const u64 both[2] = {(a & 0xFFFFFFFF) | b << 32, a >> 32 | (b >> 32) << 32};
              std::memcpy(units + q / 4 * 512 + (4 * g + c) * 16, both, 16);
              continue;
            }
            u8* to = units + q / 4 * 256 + g * 16 + c * 4;
            const u32 parts[4] = {static_cast<u32>(a), static_cast<u32>(a >> 32),
                                  static_cast<u32>(b), static_cast<u32>(b >> 32)};
            for (u32 i = 0; i < 4; ++i) std::memcpy(to + i / 2 * 1024 + i % 2 * 128, parts + i, 4);
          }
        }
      }
    }
  }
}

}  // namespace gpurt::host
