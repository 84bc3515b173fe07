// Memory: what a load may return, when stores are buffered and nothing is coherent for free.
//
// Owns: the C++ release/acquire model in an executable form, over one arena of simulated memory.
// Does not know: fibres (machine.hpp) and what the words mean.
//
//   relaxed store -> store buffer of its fibre -> history of its location (a few messages, newest
//   last) -> a load picks one of the messages that happens-before still allows
//
// - A buffered store leaves at a random later moment, in any order between locations; a release or
// a
//   sequentially consistent fence by the same fibre drains the buffer first.
// - A message of a release carries its fibre's clock; an acquire that picks it joins that clock. An
//   atomic add reads the newest message and passes the clock on (C++20 release sequences).
// - Plain accesses are checked: two that conflict without happens-before are a failure. Data words
// of
//   simulated tasks (data_load, data_store) may be stale instead, so that a value goes wrong.
// - Not modelled: a load that sees a store which comes later in another fibre (load buffering). A
//   write that overtakes an earlier read is reported by data_store instead.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "atomics.hpp"
#include "random.hpp"

namespace gpurt::sim {

constexpr u32 kHistoryCapacity = 6;   // messages of one location that a stale load may still see
constexpr u32 kStalePercent = 40;     // chance that an allowed load looks one message further back
constexpr u32 kNobody = 0xFFFFFFFFu;  // the writer of initial values

// Which accesses of other fibres come before mine. `order` decides races; `seen` also holds what
// sequentially consistent fences forbid to overlook, which orders no plain access.
struct Clock {
  std::vector<u32> order;
  std::vector<u32> seen;
  explicit Clock(u32 fibres = 0) : order(fibres), seen(fibres) {}
  void join(const Clock& other);
};

struct Access {
  u32 fibre = kNobody;
  u32 epoch = 0;
};

struct Reader {
  u32 fibre;
  u32 first;  // epoch of the first read: coherence forbids who comes after it to go back
  u32 last;   // epoch of the last read: a write must come after it
};

struct Message {
  u64 value = 0;
  Access writer;
  std::shared_ptr<const Clock> release;  // null: nothing to synchronise with
  std::vector<Reader> readers;           // one per fibre
};

// All the model knows of one word that some fibre touched.
struct Location {
  u32 size_bytes = 0;            // 0: no atomic access yet
  std::vector<Message> history;  // oldest first; the newest is what memory holds
  bool plain_written = false;    // memory holds a plain store that the history lacks
  Access plain_write;
  std::vector<Reader> plain_reads;  // since the last plain write
};

// An operation broken on purpose, by the addresses it works on: how a planted bug enters without a
// word in the headers under test.
struct Broken {
  enum class How : u32 {
    kRelaxed,    // no order
    kTruncated,  // keeps 32 bits
    kBlind,      // loads always give 0
    kNoFence,    // fences do nothing; no addresses
  };
  const void* begin;
  const void* end;
  How how;
  u32 fibre = kNobody;  // only this one; kNobody: all
};

class Memory {
 public:
  Memory(u64 arena_bytes, u32 fibres, Random& random);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Off: only wrong values and hangs show what a missing order does.
  void check_races(bool enabled) { checks_races_ = enabled; }

  // Zeroed, at the same offset in every run of a seed. Valid as long as this object. `name`, a
  // literal, is what complaints say.
  void* allocate(u64 bytes, u64 alignment, const char* name);
  bool contains(const void* p) const;

  u64 load(u32 fibre, const void* p, u32 size_bytes, Order order);
  void store(u32 fibre, void* p, u32 size_bytes, u64 value, Order order);
  u64 add(u32 fibre, void* p, u32 size_bytes, u64 value, Order order);
  u64 exchange(u32 fibre, void* p, u32 size_bytes, u64 value, Order order);
  void fence_seq_cst(u32 fibre);

  // A store is about to overwrite the newest value at `p`: it must come after the store of that
  // value
  // (`writer`) and after all reads that returned it (`readers`).
  void expect_overwritable(u32 fibre, const void* p, u32 size_bytes, bool writer, bool readers);

  // A plain access of compiled code is about to happen.
  void plain_read(u32 fibre, const void* p, u64 bytes);
  void plain_write(u32 fibre, const void* p, u64 bytes);

  // One buffered store of some fibre becomes visible; called between steps of the machine.
  void drain_some();
  void drain_all(u32 fibre);

  void plant(const Broken& rule) { broken_.push_back(rule); }
  // How often a planted rule changed an operation: a bug that never bites was not planted.
  u64 bite_count() const { return bite_count_; }
  u64 write_count() const { return write_count_; }
  // The first race or misuse found, else empty.
  const std::string& complaint() const { return complaint_; }
  u64 offset(const void* p) const;

 private:
  struct Buffered {
    u64 word;
    u64 value;
    Access writer;
  };
  struct Named {
    u64 begin;
    const char* name;
  };
  struct View {
    Clock clock;
    std::deque<Buffered> buffer;
  };

  u64 rmw(u32 fibre, void* p, u32 size_bytes, Order order, u64 value, bool is_add);
  bool is_broken(u32 fibre, const void* p, Broken::How how);
  Access tick(u32 fibre);
  Location& touch(u64 word);
  Location& atomic_location(u32 fibre, const void* p, u32 size_bytes, bool writes);
  Message& pick(u32 fibre, Location& place);
  bool is_known(const View& view, const Message& message) const;
  bool is_before(const Access& access, u32 fibre) const;
  void publish(u64 word, Message message);
  void drain_word(u32 fibre, u64 word);
  void drain_entry(View& view, std::size_t index);
  void expect_readers(const std::vector<Reader>& readers, u32 fibre, u64 word, const char* what);
  void expect_before(const Access& access, u32 fibre, u64 word, const char* what);
  std::string name_of(u64 word) const;
  u64 memory_value(u64 word, u32 size_bytes) const;

  std::unique_ptr<u8[], void (*)(void*)> arena_;
  u64 arena_bytes_;
  u64 used_bytes_ = 0;
  Random& random_;
  std::vector<View> views_;
  Clock fences_;
  std::vector<Named> names_;  // ascending
  std::vector<u32> index_;    // by word: into locations_, plus 1
  std::deque<Location> locations_;
  std::vector<Broken> broken_;
  u64 bite_count_ = 0;
  bool checks_races_ = true;
  u64 buffered_count_ = 0;
  u64 write_count_ = 0;
  std::string complaint_;
};

}  // namespace gpurt::sim
