// Workspace: a body's temporary arrays, cut from its worker's scratch.
//
// A task that needs more than the executor gave (very wide models, many rows) takes memory of its
// own thread instead, which grows to the largest need and stays: no task fails for lack of it.
#pragma once
#include <memory>

#include "context.hpp"

namespace gpurt::host {

class Workspace {
 public:
  static constexpr u64 kAlign = 64;

  /// `size_bytes`: the sum of padded(...) over all arrays that will be taken.
  Workspace(const BodyContext& context, u64 size_bytes) : next_(context.scratch) {
    if (size_bytes <= context.scratch_bytes) return;
    thread_local std::unique_ptr<u8[]> overflow;
    thread_local u64 overflow_bytes = 0;
    if (overflow_bytes < size_bytes + kAlign) {
      overflow_bytes = size_bytes + kAlign;
      overflow = std::make_unique_for_overwrite<u8[]>(overflow_bytes);
    }
    const u64 base = reinterpret_cast<u64>(overflow.get());
    next_ = overflow.get() + ((base + kAlign - 1) / kAlign * kAlign - base);
  }

  /// Over memory of the caller's, 64-byte aligned and large enough.
  explicit Workspace(u8* memory) : next_(memory) {}

  /// Bytes that take<T>(count) uses up.
  template <class T>
  static constexpr u64 padded(u64 count) {
    return (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
  }

  /// `count` elements, not initialised, 64-byte aligned.
  template <class T>
  T* take(u64 count) {
    T* const array = reinterpret_cast<T*>(next_);
    next_ += padded<T>(count);
    return array;
  }

 private:
  u8* next_;
};

}  // namespace gpurt::host
