// The rows of x as matvec's kernels read them, kept by each worker from one task to the next.
//
//   step rows -> floats -> norm -> (block formats) 16-bit codes with a scale per 32 of them
//
// A worker's tasks of one operator follow each other with the same x, and preparing 16 rows costs a
// fifth of such a task. Whether what is kept fits is decided by comparing the content of x and norm
// with a copy, which costs a twentieth of preparing: never by addresses or step numbers, which a
// later launch may repeat. So it cannot be stale, and bits do not depend on who ran what before.
#pragma once
#include <memory>

#include "matvec_task.hpp"
#include "rows.hpp"
#include "workspace.hpp"

namespace gpurt::host {

constexpr u32 kQuad = 4;     // rows of x that share one pass over W
constexpr u32 kCodes = 128;  // activations rounded at a time: four blocks

/// The step's rows as kernels read them. Rows go in quads; a last quad of one row alone is kept
/// apart, because one row is what decoding has. Others are filled up with rows of zeros.
struct PreparedRows {
  f32* x;       // [padded rows, x_stride], zero past k; block formats: one row, scratch
  i16* codes;   // [padded rows, x_stride], block formats only
  f32* quads;   // [quads, blocks, 2, 4]: four rows' scales of a block, then scale * sum(codes)
  f32* single;  // [blocks, 2]: the same of a row alone
  u64 x_stride;
  u32 padded_rows;  // the step's rows, and the rows of zeros
};

constexpr u32 padded_rows(u32 rows) {
  return rows % kQuad < 2 ? rows : rows / kQuad * kQuad + kQuad;
}

/// One worker's prepared rows, and what they were made from.
class RowMemory {
 public:
  const PreparedRows& rows() const { return rows_; }

  /// Whether the rows at hand are those of `task`.
  bool holds(const MatvecTask& task) const {
    if (!(key_ == key_of(task))) return false;
    if (task.norm && std::memcmp(norm_, task.norm, task.k * sizeof(f32)) != 0) return false;
    const u64 row_bytes = task.x_row_bytes;
    if (!task.row_index) return std::memcmp(source_, task.x, task.rows * row_bytes) == 0;
    for (u32 row = 0; row < task.rows; ++row) {
      if (std::memcmp(source_ + row * row_bytes, task.x_row(row), row_bytes) != 0) return false;
    }
    return true;
  }

  /// Makes room for the rows of `task` and remembers what they come from; the caller fills them.
  const PreparedRows& keep(const MatvecTask& task) {
    const bool blocked = is_blocked(task.w_dtype);
    const u64 count = padded_rows(task.rows);
    const u64 stride = blocked ? (task.k + kCodes - 1) / kCodes * kCodes : padded_lanes(task.k);
    const u64 x_count = blocked ? stride : count * stride;
    const u64 code_count = blocked ? count * stride : 0;
    const u64 scale_count = blocked ? u64{2} * (task.k / kBlock) : 0;  // of one row
    const u64 row_bytes = task.x_row_bytes;
    using W = Workspace;
    reserve(W::padded<f32>(x_count) + W::padded<i16>(code_count) +
            W::padded<f32>(scale_count * count) + W::padded<f32>(scale_count) +
            W::padded<f32>(task.k) + W::padded<u8>(task.rows * row_bytes));
    Workspace space(memory_.get());
    rows_.x = space.take<f32>(x_count);
    rows_.codes = blocked ? space.take<i16>(code_count) : nullptr;
    rows_.quads = space.take<f32>(scale_count * count);
    rows_.single = space.take<f32>(scale_count);
    rows_.x_stride = stride;
    rows_.padded_rows = static_cast<u32>(count);
    norm_ = space.take<f32>(task.k);
    source_ = space.take<u8>(task.rows * row_bytes);
    if (task.norm) std::memcpy(norm_, task.norm, task.k * sizeof(f32));
    for (u32 row = 0; row < task.rows; ++row) {
      std::memcpy(source_ + row * row_bytes, task.x_row(row), row_bytes);
    }
    key_ = key_of(task);
    return rows_;
  }

 private:
  struct Key {
    u32 rows, k, x_dtype, eps_bits;
    bool blocked, normed;
    bool operator==(const Key&) const = default;
  };

  static Key key_of(const MatvecTask& task) {
    return {task.rows,
            task.k,
            task.x_dtype,
            std::bit_cast<u32>(task.eps),
            is_blocked(task.w_dtype),
            task.norm != nullptr};
  }

  void reserve(u64 size_bytes) {
    if (size_bytes <= size_bytes_) return;
    memory_.reset(static_cast<u8*>(std::aligned_alloc(Workspace::kAlign, size_bytes)));
    if (!memory_) throw std::bad_alloc();
    size_bytes_ = size_bytes;
  }

  struct Free {
    void operator()(u8* p) const { std::free(p); }
  };

  std::unique_ptr<u8, Free> memory_;
  u64 size_bytes_ = 0;
  PreparedRows rows_{};
  Key key_{};
  f32* norm_ = nullptr;
  u8* source_ = nullptr;
};

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "matvec_rows_kernels.hpp"
#include "simd_each.hpp"
