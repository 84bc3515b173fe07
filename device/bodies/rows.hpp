// Row operations that several bodies share: conversion to float and RMSNorm.
#pragma once
#include "simd.hpp"

namespace gpurt::host {

constexpr u64 kPadLanes = 16;  // the widest level: arrays padded to it need no tail at any level

constexpr u64 padded_lanes(u64 count) {
  return (count + kPadLanes - 1) / kPadLanes * kPadLanes;
}

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "rows_kernels.hpp"
#include "simd_each.hpp"
