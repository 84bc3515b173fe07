// device/atomics.hpp for the emulator. The host's threads are at work meanwhile, so every access is
// an atomic one; a load that may be a poll lets the other fibres run.
#pragma once
#include <chrono>

#include "machine.hpp"
#include "types.hpp"

namespace gpurt {

template <class T>
struct Same {
  using type = T;
};
template <class T>
using Value = typename Same<T>::type;

#define GPURT_ATOMICS(SUFFIX)                               \
  template <class T>                                        \
  T load_relaxed##SUFFIX(const T* p) {                      \
    emu::yield();                                           \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);            \
  }                                                         \
  template <class T>                                        \
  T load_acquire##SUFFIX(const T* p) {                      \
    return load_relaxed##SUFFIX(p);                         \
  }                                                         \
  template <class T>                                        \
  void store_relaxed##SUFFIX(T* p, Value<T> value) {        \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);           \
  }                                                         \
  template <class T>                                        \
  void store_release##SUFFIX(T* p, Value<T> value) {        \
    store_relaxed##SUFFIX(p, value);                        \
  }                                                         \
  template <class T>                                        \
  T add_relaxed##SUFFIX(T* p, Value<T> value) {             \
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);  \
  }                                                         \
  template <class T>                                        \
  T add_release##SUFFIX(T* p, Value<T> value) {             \
    return add_relaxed##SUFFIX(p, value);                   \
  }                                                         \
  template <class T>                                        \
  T add_acq_rel##SUFFIX(T* p, Value<T> value) {             \
    return add_relaxed##SUFFIX(p, value);                   \
  }                                                         \
  template <class T>                                        \
  T exchange_acq_rel##SUFFIX(T* p, Value<T> value) {        \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST); \
  }                                                         \
  inline void fence_seq_cst##SUFFIX() {                     \
    __atomic_thread_fence(__ATOMIC_SEQ_CST);                \
  }

GPURT_ATOMICS()
GPURT_ATOMICS(_system)
#undef GPURT_ATOMICS
inline void pause() {
  emu::yield();
}
// Slower than the host's: a step takes that much longer here, and no time-out may end it.
constexpr int kSlowness = 20;
inline u64 clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch() / kSlowness;
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace gpurt
