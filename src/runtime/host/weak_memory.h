// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/host/schedule.h"

namespace unisono::runtime::host {

// Memory as tasks may see it under relaxed orders: every atomic location keeps its last stores, a
// load may return any of them that the task's view allows, and views travel with releases and
// acquires. Plain accesses are checked for data races by the same views (vector clocks) and go to
// the machine's memory, for one that does not race has only one value that it can read.
// docs/proof.md says how this relates to the memory model of PTX. Not thread-safe.
class WeakMemory {
 public:
  // What has happened before a point of a task, and the oldest stores that it may still read there.
  struct View {
    std::vector<uint32_t> clocks;  // [task]
    std::vector<uint32_t> stores;  // [location]
    void join(const View& other);
  };
  using SharedView = std::shared_ptr<const View>;

  // Which of `count` stores a load returns; 0 is the newest.
  using Choose = std::function<size_t(size_t count)>;

  struct Loaded {
    uint64_t value;
    uint64_t newest;
    bool isStale;   // an older store than the newest was read
    bool advanced;  // a newer store than the last one that the task read there
  };

  // A plain access, or an atomic one that collides with a plain one, and the access that is not
  // ordered before it.
  struct Race {
    const void* address;
    size_t task;
    bool writes, isAtomic;
    size_t other;
    bool otherWrites, otherIsAtomic;
  };

  // Forgets everything, but keeps its tables for the next run: most runs are like the one before.
  void clear();
  // Forgets what a range held: it is about to be used for something else.
  void forget(const void* address, size_t bytes);

  // A task that starts after what `before` has seen; null: after nothing.
  size_t addTask(const SharedView& before);

  // A load, store or read-modify-write. `newest`: a load takes no choice.
  Loaded load(size_t task, const Access& access, bool newest, const Choose& choose);
  void store(size_t task, const Access& access);
  uint64_t modify(size_t task, const Access& access);
  void fence(size_t task, std::memory_order order);

  // Whether a load of `address` could return a store that the task has not seen there.
  bool hasNewer(size_t task, const void* address) const;

  // Notes an access of either kind; returns the race that it makes, if any.
  std::optional<Race> note(size_t task, const void* address, size_t bytes, bool writes,
                           bool isAtomic);

  // The task's view as others may observe it, and what it observes of others.
  SharedView release(size_t task);
  void acquire(size_t task, const View& view);

 private:
  struct Message {
    uint64_t value;
    SharedView view;  // what a reader that acquires learns; may be null
  };
  struct Location {
    uint64_t run = 0;  // in which it was last used
    uint32_t index;
    unsigned bytes;
    uint32_t first;  // the number of the oldest store that is kept
    std::deque<Message> stores;
    uint32_t newest() const { return first + static_cast<uint32_t>(stores.size()) - 1; }
  };
  struct TaskState {
    View view;
    View acquirable;    // what an acquire fence would add
    SharedView fenced;  // what the last release fence covers
  };
  // What tasks did to a range since it was last written by one that had seen all of it.
  struct Entry {
    size_t task;
    uint32_t clock;
    bool writes, isAtomic;
  };
  struct Cell {
    uintptr_t end;
    uint64_t run;  // in which the entries were made
    std::vector<Entry> entries;
  };

  Location& locate(const Access& access);
  void append(Location& location, uint64_t value, SharedView view);
  uint32_t& floorOf(size_t task, const Location& location);
  SharedView published(size_t task, std::memory_order order, const Location& location);
  void split(uintptr_t at);

  std::unordered_map<const void*, Location> locations_;
  uint32_t locationCount_ = 0;  // in this run, ever
  uint64_t run_ = 1;            // since the last clear()
  std::deque<TaskState> tasks_;
  std::map<uintptr_t, Cell> cells_;  // by where they begin
  std::vector<uint32_t> fences_;     // the stores that sequentially consistent fences have seen
};

}  // namespace unisono::runtime::host
