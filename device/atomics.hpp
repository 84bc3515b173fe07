// Atomic accesses by order and scope: the only words of the protocol, for every place it runs.
//
// Owns: three backends behind one set of names, chosen at compile time:
//   device     compiler builtins, no header: NVRTC compiles them in a fraction of libcu++'s time
//   host       std::atomic_ref
//   GPURT_SIM  calls into tests/sim: every access is a scheduling point of a seeded simulation
// Does not know: what any word means (counter.hpp and scheduler/ do).
//
//   load_acquire   load_relaxed   store_release   store_relaxed
//   add_release    add_relaxed    add_acq_rel     exchange_acq_rel   (these return the old value)
//   fence_seq_cst  pause          clock_ns
//
// Names without a suffix order accesses among the workers of one device; the same name with
// `_system` also orders them with the host and with other devices. T is u32 or u64, aligned.
#pragma once
#include "types.hpp"

#if !GPURT_ON_DEVICE && !defined(GPURT_SIM)
#include <atomic>
#include <chrono>
#include <thread>
#endif

namespace gpurt {

// The value's type is not deduced: store_release(&control->exit, 1) means a u32.
template <class T>
struct Same {
  using type = T;
};
template <class T>
using Value = typename Same<T>::type;

#if GPURT_ON_DEVICE

// The orders are literal arguments: the builtins take no variables there.
#define GPURT_ATOMICS(SUFFIX, SCOPE)                                     \
  template <class T>                                                     \
  GPURT_FN void store_release##SUFFIX(T* p, Value<T> value) {            \
    __nv_atomic_store_n(p, value, __NV_ATOMIC_RELEASE, SCOPE);           \
  }                                                                      \
  template <class T>                                                     \
  GPURT_FN void store_relaxed##SUFFIX(T* p, Value<T> value) {            \
    __nv_atomic_store_n(p, value, __NV_ATOMIC_RELAXED, SCOPE);           \
  }                                                                      \
  template <class T>                                                     \
  GPURT_FN T exchange_acq_rel##SUFFIX(T* p, Value<T> value) {            \
    return __nv_atomic_exchange_n(p, value, __NV_ATOMIC_ACQ_REL, SCOPE); \
  }                                                                      \
  GPURT_FN void fence_seq_cst##SUFFIX() {                                \
    __nv_atomic_thread_fence(__NV_ATOMIC_SEQ_CST, SCOPE);                \
  }

GPURT_ATOMICS(, __NV_THREAD_SCOPE_DEVICE)
GPURT_ATOMICS(_system, __NV_THREAD_SCOPE_SYSTEM)
#undef GPURT_ATOMICS

// Of words of global memory, and said so: the builtins take any address, and the compiler asks, or
// the hardware does, whether it is shared; of an add after a trip to L2 that nobody else waits for.
#define GPURT_LOAD(NAME, ORDER_AND_SCOPE)                        \
  template <class T>                                             \
  GPURT_FN T NAME(const T* p) {                                  \
    T value;                                                     \
    if constexpr (sizeof(T) == 8) {                              \
      asm volatile("ld." ORDER_AND_SCOPE ".global.u64 %0, [%1];" \
                   : "=l"(value)                                 \
                   : "l"(p)                                      \
                   : "memory");                                  \
    } else {                                                     \
      asm volatile("ld." ORDER_AND_SCOPE ".global.u32 %0, [%1];" \
                   : "=r"(value)                                 \
                   : "l"(p)                                      \
                   : "memory");                                  \
    }                                                            \
    return value;                                                \
  }

GPURT_LOAD(load_acquire, "acquire.gpu")
GPURT_LOAD(load_relaxed, "relaxed.gpu")
GPURT_LOAD(load_acquire_system, "acquire.sys")
GPURT_LOAD(load_relaxed_system, "relaxed.sys")
#undef GPURT_LOAD

#define GPURT_ADD(NAME, ORDER_AND_SCOPE)                                   \
  template <class T>                                                       \
  GPURT_FN T NAME(T* p, Value<T> value) {                                  \
    T old;                                                                 \
    if constexpr (sizeof(T) == 8) {                                        \
      asm volatile("atom." ORDER_AND_SCOPE ".global.add.u64 %0, [%1], %2;" \
                   : "=l"(old)                                             \
                   : "l"(p), "l"(value)                                    \
                   : "memory");                                            \
    } else {                                                               \
      asm volatile("atom." ORDER_AND_SCOPE ".global.add.u32 %0, [%1], %2;" \
                   : "=r"(old)                                             \
                   : "l"(p), "r"(value)                                    \
                   : "memory");                                            \
    }                                                                      \
    return old;                                                            \
  }

GPURT_ADD(add_release, "release.gpu")
GPURT_ADD(add_relaxed, "relaxed.gpu")
GPURT_ADD(add_acq_rel, "acq_rel.gpu")
GPURT_ADD(add_release_system, "release.sys")
GPURT_ADD(add_relaxed_system, "relaxed.sys")
GPURT_ADD(add_acq_rel_system, "acq_rel.sys")
#undef GPURT_ADD

// Nothing: each poll is already a round trip to L2, and a sleep would lengthen every hop.
GPURT_FN void pause() {}

GPURT_FN u64 clock_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

#else  // host and simulator

enum class Order : u32 { kRelaxed, kAcquire, kRelease, kAcqRel };

#if defined(GPURT_SIM)

// Defined by tests/sim/machine.cpp. Values travel as u64, `size_bytes` is 4 or 8.
namespace sim {
u64 load(const void* p, u32 size_bytes, Order order);
void store(void* p, u32 size_bytes, u64 value, Order order);
u64 add(void* p, u32 size_bytes, u64 value, Order order);
u64 exchange(void* p, u32 size_bytes, u64 value, Order order);
void fence_seq_cst();
void pause();
u64 clock_ns();
}  // namespace sim

namespace backend {
template <Order order, class T>
T load(const T* p) {
  return static_cast<T>(sim::load(p, sizeof(T), order));
}
template <Order order, class T>
void store(T* p, T value) {
  sim::store(p, sizeof(T), value, order);
}
template <Order order, class T>
T add(T* p, T value) {
  return static_cast<T>(sim::add(p, sizeof(T), value, order));
}
template <Order order, class T>
T exchange(T* p, T value) {
  return static_cast<T>(sim::exchange(p, sizeof(T), value, order));
}
}  // namespace backend

inline void fence_seq_cst() {
  sim::fence_seq_cst();
}
inline void pause() {
  sim::pause();
}
inline u64 clock_ns() {
  return sim::clock_ns();
}

#else  // host

namespace backend {
constexpr std::memory_order std_order(Order order) {
  switch (order) {
    case Order::kRelaxed:
      return std::memory_order_relaxed;
    case Order::kAcquire:
      return std::memory_order_acquire;
    case Order::kRelease:
      return std::memory_order_release;
    case Order::kAcqRel:
      return std::memory_order_acq_rel;
  }
  return std::memory_order_seq_cst;
}
template <Order order, class T>
T load(const T* p) {
  // atomic_ref<const T> is C++26; a load writes nothing.
  return std::atomic_ref<T>(*const_cast<T*>(p)).load(std_order(order));
}
template <Order order, class T>
void store(T* p, T value) {
  std::atomic_ref<T>(*p).store(value, std_order(order));
}
template <Order order, class T>
T add(T* p, T value) {
  return std::atomic_ref<T>(*p).fetch_add(value, std_order(order));
}
template <Order order, class T>
T exchange(T* p, T value) {
  return std::atomic_ref<T>(*p).exchange(value, std_order(order));
}
}  // namespace backend

inline void fence_seq_cst() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Yields: there may be more workers than cores, and the one we wait for may have none.
inline void pause() {
  std::this_thread::yield();
}

inline u64 clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

#endif  // GPURT_SIM

template <class T>
concept Word = sizeof(T) == 4 || sizeof(T) == 8;

#define GPURT_ATOMICS(SUFFIX)                           \
  template <Word T>                                     \
  T load_acquire##SUFFIX(const T* p) {                  \
    return backend::load<Order::kAcquire>(p);           \
  }                                                     \
  template <Word T>                                     \
  T load_relaxed##SUFFIX(const T* p) {                  \
    return backend::load<Order::kRelaxed>(p);           \
  }                                                     \
  template <Word T>                                     \
  void store_release##SUFFIX(T* p, Value<T> value) {    \
    backend::store<Order::kRelease>(p, value);          \
  }                                                     \
  template <Word T>                                     \
  void store_relaxed##SUFFIX(T* p, Value<T> value) {    \
    backend::store<Order::kRelaxed>(p, value);          \
  }                                                     \
  template <Word T>                                     \
  T add_release##SUFFIX(T* p, Value<T> value) {         \
    return backend::add<Order::kRelease>(p, value);     \
  }                                                     \
  template <Word T>                                     \
  T add_relaxed##SUFFIX(T* p, Value<T> value) {         \
    return backend::add<Order::kRelaxed>(p, value);     \
  }                                                     \
  template <Word T>                                     \
  T add_acq_rel##SUFFIX(T* p, Value<T> value) {         \
    return backend::add<Order::kAcqRel>(p, value);      \
  }                                                     \
  template <Word T>                                     \
  T exchange_acq_rel##SUFFIX(T* p, Value<T> value) {    \
    return backend::exchange<Order::kAcqRel>(p, value); \
  }

// One machine: its memory has one scope.
GPURT_ATOMICS()
GPURT_ATOMICS(_system)
#undef GPURT_ATOMICS
inline void fence_seq_cst_system() {
  fence_seq_cst();
}

#endif  // GPURT_ON_DEVICE

}  // namespace gpurt
