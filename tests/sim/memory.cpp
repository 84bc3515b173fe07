// The operations of the memory model; memory.hpp states the model.
#include "memory.hpp"

#include <algorithm>
#include <cstdlib>

namespace gpurt::sim {
namespace {

bool acquires(Order order) {
  return order == Order::kAcquire || order == Order::kAcqRel;
}
bool releases(Order order) {
  return order == Order::kRelease || order == Order::kAcqRel;
}

void join_words(std::vector<u32>& into, const std::vector<u32>& from) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void note(std::vector<Reader>& readers, const Access& access) {
  for (Reader& reader : readers) {
    if (reader.fibre != access.fibre) continue;
    reader.last = access.epoch;
    return;
  }
  readers.push_back(Reader{access.fibre, access.epoch, access.epoch});
}

}  // namespace

void Clock::join(const Clock& other) {
  join_words(order, other.order);
  join_words(seen, other.seen);
}

Memory::Memory(u64 arena_bytes, u32 fibres, Random& random)
    : arena_(static_cast<u8*>(std::calloc(arena_bytes, 1)), std::free),
      arena_bytes_(arena_bytes),
      random_(random),
      views_(fibres),
      fences_(fibres) {
  for (View& view : views_) view.clock = Clock(fibres);
}

void* Memory::allocate(u64 bytes, u64 alignment, const char* name) {
  // Offsets, not addresses, are aligned: the layout must not depend on where the arena landed.
  used_bytes_ = (used_bytes_ + alignment - 1) / alignment * alignment;
  if (used_bytes_ + bytes > arena_bytes_) {
    complaint_ = "the arena is too small";
    std::abort();
  }
  void* p = arena_.get() + used_bytes_;
  names_.push_back(Named{used_bytes_, name});
  used_bytes_ += (bytes + 7) / 8 * 8;
  index_.resize(used_bytes_ / 4 + 2);
  return p;
}

bool Memory::contains(const void* p) const {
  const auto* byte = static_cast<const u8*>(p);
  return byte >= arena_.get() && byte < arena_.get() + used_bytes_;
}

u64 Memory::offset(const void* p) const {
  return static_cast<u64>(static_cast<const u8*>(p) - arena_.get());
}

std::string Memory::name_of(u64 word) const {
  const auto after =
      std::upper_bound(names_.begin(), names_.end(), word * 4,
                       [](u64 byte, const Named& named) { return byte < named.begin; });
  const Named& named = *(after - 1);
  return std::string(named.name) + " + " + std::to_string(word * 4 - named.begin);
}

u64 Memory::memory_value(u64 word, u32 size_bytes) const {
  // Typed, not memcpy: the linker routes that to the race check.
  const u8* p = arena_.get() + word * 4;
  return size_bytes == 4 ? *reinterpret_cast<const u32*>(p) : *reinterpret_cast<const u64*>(p);
}

Access Memory::tick(u32 fibre) {
  Clock& clock = views_[fibre].clock;
  clock.order[fibre] += 1;
  clock.seen[fibre] = clock.order[fibre];
  return Access{fibre, clock.order[fibre]};
}

bool Memory::is_before(const Access& access, u32 fibre) const {
  return access.fibre == kNobody || access.fibre == fibre ||
         access.epoch <= views_[fibre].clock.order[access.fibre];
}

bool Memory::is_known(const View& view, const Message& message) const {
  const std::vector<u32>& seen = view.clock.seen;
  if (message.writer.fibre == kNobody) return true;
  if (message.writer.epoch <= seen[message.writer.fibre]) return true;
  for (const Reader& reader : message.readers) {
    if (reader.first <= seen[reader.fibre]) return true;
  }
  return false;
}

void Memory::expect_before(const Access& access, u32 fibre, u64 word, const char* what) {
  if (!checks_races_ || is_before(access, fibre) || !complaint_.empty()) return;
  complaint_ = std::string(what) + " at " + name_of(word) + ": fibre " + std::to_string(fibre) +
               " does not come after fibre " + std::to_string(access.fibre);
}

void Memory::expect_readers(const std::vector<Reader>& readers, u32 fibre, u64 word,
                            const char* what) {
  for (const Reader& reader : readers) {
    expect_before(Access{reader.fibre, reader.last}, fibre, word, what);
  }
}

Location& Memory::touch(u64 word) {
  if (index_[word] == 0) {
    locations_.emplace_back();
    index_[word] = static_cast<u32>(locations_.size());
  }
  return locations_[index_[word] - 1];
}

Location& Memory::atomic_location(u32 fibre, const void* p, u32 size_bytes, bool writes) {
  if (!contains(p) || offset(p) % size_bytes != 0) {
    complaint_ = "an atomic access outside of simulated memory, or misaligned";
    std::abort();
  }
  const u64 word = offset(p) / 4;
  Location& place = touch(word);
  if (place.size_bytes == 0) {
    place.size_bytes = size_bytes;
    place.plain_written = false;
    Message initial;
    initial.value = memory_value(word, size_bytes);
    initial.writer = place.plain_write;
    place.history.push_back(initial);
  } else if (place.size_bytes != size_bytes && complaint_.empty()) {
    complaint_ = "one word accessed with two sizes at " + name_of(word);
  }
  expect_before(place.plain_write, fibre, word, "an atomic access races with a plain write");
  if (writes) {
    expect_readers(place.plain_reads, fibre, word, "an atomic write races with a plain read");
  }
  if (place.plain_written) {
    place.plain_written = false;
    Message message;
    message.value = memory_value(word, size_bytes);
    message.writer = place.plain_write;
    publish(word, message);
  }
  return place;
}

Message& Memory::pick(u32 fibre, Location& place) {
  const View& view = views_[fibre];
  std::size_t i = place.history.size() - 1;
  while (i > 0 && !is_known(view, place.history[i]) && random_.chance(kStalePercent)) --i;
  return place.history[i];
}

bool Memory::is_broken(u32 fibre, const void* p, Broken::How how) {
  for (const Broken& rule : broken_) {
    if (p < rule.begin || p >= rule.end || rule.how != how) continue;
    if (rule.fibre != kNobody && rule.fibre != fibre) continue;
    bite_count_ += 1;
    return true;
  }
  return false;
}

void Memory::publish(u64 word, Message message) {
  Location& place = touch(word);
  u8* p = arena_.get() + word * 4;
  if (place.size_bytes == 4) {
    *reinterpret_cast<u32*>(p) = static_cast<u32>(message.value);
  } else {
    *reinterpret_cast<u64*>(p) = message.value;
  }
  place.history.push_back(std::move(message));
  if (place.history.size() > kHistoryCapacity) place.history.erase(place.history.begin());
  write_count_ += 1;
}

void Memory::drain_entry(View& view, std::size_t index) {
  const Buffered entry = view.buffer[index];
  view.buffer.erase(view.buffer.begin() + static_cast<std::ptrdiff_t>(index));
  buffered_count_ -= 1;
  Message message;
  message.value = entry.value;
  message.writer = entry.writer;
  publish(entry.word, std::move(message));
}

void Memory::drain_word(u32 fibre, u64 word) {
  View& view = views_[fibre];
  for (std::size_t i = 0; i < view.buffer.size();) {
    if (view.buffer[i].word == word) {
      drain_entry(view, i);
    } else {
      ++i;
    }
  }
}

void Memory::drain_all(u32 fibre) {
  View& view = views_[fibre];
  while (!view.buffer.empty()) drain_entry(view, 0);
}

void Memory::drain_some() {
  if (buffered_count_ == 0) return;
  u32 fibre = random_.below(static_cast<u32>(views_.size()));
  while (views_[fibre].buffer.empty()) fibre = (fibre + 1) % static_cast<u32>(views_.size());
  View& view = views_[fibre];
  const u64 word = view.buffer[random_.below(static_cast<u32>(view.buffer.size()))].word;
  for (std::size_t i = 0; i < view.buffer.size(); ++i) {
    if (view.buffer[i].word != word) continue;
    drain_entry(view, i);  // the oldest to this word: stores to one word keep their order
    return;
  }
}

u64 Memory::load(u32 fibre, const void* p, u32 size_bytes, Order order) {
  if (is_broken(fibre, p, Broken::How::kRelaxed)) order = Order::kRelaxed;
  const Access access = tick(fibre);
  Location& place = atomic_location(fibre, p, size_bytes, false);
  View& view = views_[fibre];
  const u64 word = offset(p) / 4;
  for (auto entry = view.buffer.rbegin(); entry != view.buffer.rend(); ++entry) {
    if (entry->word == word) return entry->value;
  }
  Message& message = pick(fibre, place);
  note(message.readers, access);
  if (acquires(order) && message.release) view.clock.join(*message.release);
  if (is_broken(fibre, p, Broken::How::kBlind)) return 0;
  return message.value;
}

void Memory::store(u32 fibre, void* p, u32 size_bytes, u64 value, Order order) {
  if (is_broken(fibre, p, Broken::How::kRelaxed)) order = Order::kRelaxed;
  const Access access = tick(fibre);
  atomic_location(fibre, p, size_bytes, true);
  const u64 word = offset(p) / 4;
  if (!releases(order)) {
    views_[fibre].buffer.push_back(Buffered{word, value, access});
    buffered_count_ += 1;
    return;
  }
  drain_all(fibre);
  Message message;
  message.value = value;
  message.writer = access;
  message.release = std::make_shared<const Clock>(views_[fibre].clock);
  publish(word, std::move(message));
}

u64 Memory::rmw(u32 fibre, void* p, u32 size_bytes, Order order, u64 value, bool is_add) {
  if (is_broken(fibre, p, Broken::How::kRelaxed)) order = Order::kRelaxed;
  const Access access = tick(fibre);
  Location& place = atomic_location(fibre, p, size_bytes, true);
  const u64 word = offset(p) / 4;
  if (releases(order)) drain_all(fibre);
  drain_word(fibre, word);
  View& view = views_[fibre];
  Message& newest = place.history.back();
  note(newest.readers, access);
  const u64 old = newest.value;
  if (acquires(order) && newest.release) view.clock.join(*newest.release);
  Message message;
  message.value = is_add ? old + value : value;
  if (size_bytes == 4 || is_broken(fibre, p, Broken::How::kTruncated)) message.value &= 0xFFFFFFFFu;
  message.writer = access;
  message.release = newest.release;
  if (releases(order)) {
    Clock clock = view.clock;
    if (newest.release) clock.join(*newest.release);
    message.release = std::make_shared<const Clock>(std::move(clock));
  }
  publish(word, std::move(message));
  return old;
}

u64 Memory::add(u32 fibre, void* p, u32 size_bytes, u64 value, Order order) {
  return rmw(fibre, p, size_bytes, order, value, true);
}

u64 Memory::exchange(u32 fibre, void* p, u32 size_bytes, u64 value, Order order) {
  return rmw(fibre, p, size_bytes, order, value, false);
}

void Memory::fence_seq_cst(u32 fibre) {
  for (const Broken& rule : broken_) {
    if (rule.how != Broken::How::kNoFence) continue;
    bite_count_ += 1;
    return;
  }
  tick(fibre);
  drain_all(fibre);
  // Two fences are ordered one way or the other: what came before the first cannot be overlooked
  // after the second. That orders no plain access, so only `seen` is joined.
  join_words(views_[fibre].clock.seen, fences_.seen);
  join_words(fences_.seen, views_[fibre].clock.seen);
}

void Memory::expect_overwritable(u32 fibre, const void* p, u32 size_bytes, bool writer,
                                 bool readers) {
  const u64 word = offset(p) / 4;
  const Location& place = atomic_location(fibre, p, size_bytes, true);
  const Message& newest = place.history.back();
  if (writer) expect_before(newest.writer, fibre, word, "a store overtakes an earlier store");
  if (readers) {
    expect_readers(newest.readers, fibre, word, "a store overtakes an earlier read");
  }
}

void Memory::plain_read(u32 fibre, const void* p, u64 bytes) {
  const Access access = tick(fibre);
  const u64 end = (offset(p) + bytes + 3) / 4;
  for (u64 word = offset(p) / 4; word < end; ++word) {
    drain_word(fibre, word);
    Location& place = touch(word);
    expect_before(place.plain_write, fibre, word, "a plain read races with a plain write");
    if (place.size_bytes != 0) {
      expect_before(place.history.back().writer, fibre, word,
                    "a plain read races with an atomic write");
    }
    note(place.plain_reads, access);
  }
}

void Memory::plain_write(u32 fibre, const void* p, u64 bytes) {
  const Access access = tick(fibre);
  const u64 end = (offset(p) + bytes + 3) / 4;
  for (u64 word = offset(p) / 4; word < end; ++word) {
    drain_word(fibre, word);
    Location& place = touch(word);
    expect_before(place.plain_write, fibre, word, "a plain write races with a plain write");
    expect_readers(place.plain_reads, fibre, word, "a plain write races with a plain read");
    if (place.size_bytes != 0) {
      const Message& newest = place.history.back();
      expect_before(newest.writer, fibre, word, "a plain write races with an atomic write");
      expect_readers(newest.readers, fibre, word, "a plain write races with an atomic read");
    }
    place.plain_reads.clear();
    place.plain_write = access;
    place.plain_written = place.size_bytes != 0;
  }
}

}  // namespace gpurt::sim
