// What code compiled with -fsanitize=thread calls before each plain access.
//
// The sanitizer's own runtime is not linked: these functions take its place and feed the seeded
// model, so a plain access of the product's headers that no happens-before orders is a failure of
// that seed. Memory outside of the simulated arena belongs to the test itself and is not checked.
#include <cstddef>
#include <cstring>

#include "machine.hpp"

namespace {

void before_access(const void* p, std::size_t bytes, bool writes) {
  gpurt::sim::Machine* machine = gpurt::sim::machine_of_this_fibre();
  if (machine == nullptr || !machine->memory().contains(p)) return;
  if (writes) {
    machine->memory().plain_write(machine->current(), p, bytes);
  } else {
    machine->memory().plain_read(machine->current(), p, bytes);
  }
}

}  // namespace

#define GPURT_SIM_ACCESS(BYTES)                 \
  void __tsan_read##BYTES(void* p) {            \
    before_access(p, BYTES, false);             \
  }                                             \
  void __tsan_write##BYTES(void* p) {           \
    before_access(p, BYTES, true);              \
  }                                             \
  void __tsan_unaligned_read##BYTES(void* p) {  \
    before_access(p, BYTES, false);             \
  }                                             \
  void __tsan_unaligned_write##BYTES(void* p) { \
    before_access(p, BYTES, true);              \
  }                                             \
  void __tsan_volatile_read##BYTES(void* p) {   \
    before_access(p, BYTES, false);             \
  }                                             \
  void __tsan_volatile_write##BYTES(void* p) {  \
    before_access(p, BYTES, true);              \
  }

extern "C" {

GPURT_SIM_ACCESS(1)
GPURT_SIM_ACCESS(2)
GPURT_SIM_ACCESS(4)
GPURT_SIM_ACCESS(8)
GPURT_SIM_ACCESS(16)
void __tsan_read_range(void* p, std::size_t bytes) {
  before_access(p, bytes, false);
}
void __tsan_write_range(void* p, std::size_t bytes) {
  before_access(p, bytes, true);
}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// The linker routes calls here (-Wl,--wrap): the sanitizer would have caught them in its runtime.
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __real_memmove(void* to, const void* from, std::size_t bytes);
void* __real_memset(void* to, int byte, std::size_t bytes);

void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  before_access(from, bytes, false);
  before_access(to, bytes, true);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  before_access(from, bytes, false);
  before_access(to, bytes, true);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int byte, std::size_t bytes) {
  before_access(to, bytes, true);
  return __real_memset(to, byte, bytes);
}
}
