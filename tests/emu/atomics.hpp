// device/atomics.hpp for the emulator: fibres switch only inside collectives, so plain is atomic.
#pragma once
#include "types.hpp"

namespace gpurt {

template <class T>
struct Same {
  using type = T;
};
template <class T>
using Value = typename Same<T>::type;

#define GPURT_PLAIN(SUFFIX)                          \
  template <class T>                                 \
  T load_acquire##SUFFIX(const T* p) {               \
    return *p;                                       \
  }                                                  \
  template <class T>                                 \
  T load_relaxed##SUFFIX(const T* p) {               \
    return *p;                                       \
  }                                                  \
  template <class T>                                 \
  void store_release##SUFFIX(T* p, Value<T> value) { \
    *p = value;                                      \
  }                                                  \
  template <class T>                                 \
  void store_relaxed##SUFFIX(T* p, Value<T> value) { \
    *p = value;                                      \
  }                                                  \
  template <class T>                                 \
  T add_relaxed##SUFFIX(T* p, Value<T> value) {      \
    const T old = *p;                                \
    *p += value;                                     \
    return old;                                      \
  }                                                  \
  template <class T>                                 \
  T add_release##SUFFIX(T* p, Value<T> value) {      \
    return add_relaxed##SUFFIX(p, value);            \
  }                                                  \
  template <class T>                                 \
  T add_acq_rel##SUFFIX(T* p, Value<T> value) {      \
    return add_relaxed##SUFFIX(p, value);            \
  }                                                  \
  template <class T>                                 \
  T exchange_acq_rel##SUFFIX(T* p, Value<T> value) { \
    const T old = *p;                                \
    *p = value;                                      \
    return old;                                      \
  }                                                  \
  inline void fence_seq_cst##SUFFIX() {}

GPURT_PLAIN()
GPURT_PLAIN(_system)
#undef GPURT_PLAIN
inline void pause() {}
inline u64 clock_ns() {
  return 0;
}

}  // namespace gpurt
