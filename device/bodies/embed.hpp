// embed: x[r] = table[token[r]]. The table is any float or block format; x is f32. With eps above 0
// the row is divided by the root of its mean square; then it is multiplied by scale. Normed again,
// with weights, it may go to `normed`, too.
#pragma once
#include "context.hpp"
#include "matvec_task.hpp"
#include "norm.hpp"

namespace gpurt {

namespace host {

template <class T>
inline void embed_floats(const u8* row, u32 count, f32* x) {
  const T* const from = reinterpret_cast<const T*>(row);
  for (u32 i = 0; i < count; ++i) x[i] = to_f32(from[i]);
}

inline f32 half_at(const u8* p) {
  F16 half;
  std::memcpy(&half, p, sizeof(half));
  return to_f32(half);
}

inline void embed_q4_1(const u8* row, u32 count, f32* x) {
  for (u32 b = 0; b < count / kBlock; ++b, row += kQ41Bytes, x += kBlock) {
    const f32 d = half_at(row);
    const f32 m = half_at(row + 2);
    for (u32 i = 0; i < 16; ++i) {
      x[i] = static_cast<f32>(row[4 + i] & 15) * d + m;
      x[i + 16] = static_cast<f32>(row[4 + i] >> 4) * d + m;
    }
  }
}

inline void embed_q8_0(const u8* row, u32 count, f32* x) {
  for (u32 b = 0; b < count / kBlock; ++b, row += kQ80Bytes, x += kBlock) {
    const f32 d = half_at(row);
    for (u32 i = 0; i < kBlock; ++i) x[i] = static_cast<f32>(static_cast<i8>(row[2 + i])) * d;
  }
}

inline void embed_nvfp4(const u8* row, u32 count, f32* x) {
  for (u32 b = 0; b < count / kNvfp4Block; ++b, row += kNvfp4Bytes, x += kNvfp4Block) {
    const f32 scale = kE4m3Values[row[kNvfp4Codes]];
    for (u32 i = 0; i < kNvfp4Block; ++i) x[i] = kE2m1[row[i / 2] >> (i % 2 * 4) & 15] * scale;
  }
}

/// One row of any format as floats.
inline void embed_row(u32 dtype, const u8* from, u32 count, f32* to) {
  switch (dtype) {
    case kF32:
      return embed_floats<f32>(from, count, to);
    case kF16:
      return embed_floats<F16>(from, count, to);
    case kBf16:
      return embed_floats<Bf16>(from, count, to);
    case kNvfp4:
      return embed_nvfp4(from, count, to);
    case kQ41:
      return embed_q4_1(from, count, to);
    default:
      return embed_q8_0(from, count, to);
  }
}

inline void embed_norm(u32 count, f32 eps, f32* x) {
  f64 squares = 0.0;
  for (u32 i = 0; i < count; ++i) squares += static_cast<f64>(x[i]) * static_cast<f64>(x[i]);
  const f32 scale = static_cast<f32>(1.0 / __builtin_sqrt(squares / count + static_cast<f64>(eps)));
  for (u32 i = 0; i < count; ++i) x[i] *= scale;
}

inline void embed_scale(u32 count, f32 scale, f32* x) {
  for (u32 i = 0; i < count; ++i) x[i] *= scale;
}

}  // namespace host

struct embed {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u8* const table = arg<const u8>(record, 0);
    f32* const x = arg<f32>(record, 1);
    const u32 hidden = record.param[0];
    const u32 dtype = record.param[1];
    const f32 eps = param_f32(record, 2);
    const f32 scale = param_f32(record, 3);
    const host::NormedRows normed{arg<const f32>(record, 2), arg<void>(record, 3), hidden,
                                  param_f32(record, 4), record.param[5] == kBf16};
    const u64 stride = host::row_bytes(dtype, hidden);
    for (u32 row = 0; row < context.step->rows; ++row) {
      const u8* const from = table + context.rows[row].token * stride;
      f32* const to = x + row * u64{hidden};
      host::embed_row(dtype, from, hidden, to);
      if (eps > 0.0F) host::embed_norm(hidden, eps, to);
      if (scale != 1.0F) host::embed_scale(hidden, scale, to);
      if (normed.to != nullptr) GPURT_AT_LEVEL(store_normed, normed, row, to);
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
