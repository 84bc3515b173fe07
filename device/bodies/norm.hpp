// RMS norms for bodies that norm a row as they read it (rows.hpp norms a copy), or behind making
// it.
#pragma once
#include "simd.hpp"

namespace gpurt::host {

/// Where bodies that make rows x of a stream put R(x) * norm beside them.
struct NormedRows {
  const f32* norm;  // [width]
  void* to;         // [rows, width] f32 or bf16; null: not wanted
  u32 width;
  f32 eps;
  bool is_bf16;
};

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "norm_kernels.hpp"
#include "simd_each.hpp"
