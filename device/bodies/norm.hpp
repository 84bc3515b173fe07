// The scale of an RMS norm, for bodies that norm a row as they read it (rows.hpp norms a copy).
#pragma once
#include "simd.hpp"

#define GPURT_EACH_LEVEL "norm_kernels.hpp"
#include "simd_each.hpp"
