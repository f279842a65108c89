// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/weak_memory.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "runtime/host/task.h"

namespace unisono::runtime::host {
namespace {

// Stores of a location that a load may still return.
constexpr size_t kStoresKept = 16;
// Ranges and locations of earlier runs that are kept.
constexpr size_t kTableKept = 8192;

bool acquires(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_release;
}
bool releases(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_acquire;
}

void joinInto(std::vector<uint32_t>& into, const std::vector<uint32_t>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

uint64_t valueInMemory(const Access& access) {
  return performNow({Access::Kind::load, std::memory_order_relaxed, access.bytes, access.address});
}
void writeToMemory(const Access& access, uint64_t value) {
  performNow({Access::Kind::store, std::memory_order_relaxed, access.bytes, access.address, value});
}

}  // namespace

void WeakMemory::View::join(const View& other) {
  joinInto(clocks, other.clocks);
  joinInto(stores, other.stores);
}

void WeakMemory::clear() {
  run_++;
  if (locations_.size() > kTableKept) locations_.clear();
  if (cells_.size() > kTableKept) cells_.clear();
  tasks_.clear();
  fences_.clear();
  locationCount_ = 0;
}

void WeakMemory::forget(const void* address, size_t bytes) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + bytes;
  std::erase_if(locations_, [&](const auto& entry) {
    const auto at = reinterpret_cast<uintptr_t>(entry.first);
    return at >= begin && at < end;
  });
  split(begin);
  split(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

size_t WeakMemory::addTask(const SharedView& before) {
  const size_t task = tasks_.size();
  TaskState& state = tasks_.emplace_back();
  if (before != nullptr) state.view = *before;
  if (state.view.clocks.size() <= task) state.view.clocks.resize(task + 1);
  state.view.clocks[task] = 1;
  return task;
}

WeakMemory::Location& WeakMemory::locate(const Access& access) {
  Location& location = locations_[access.address];
  const uint64_t value = valueInMemory(access);
  if (location.run != run_) {
    location.run = run_;
    location.index = locationCount_++;
    location.bytes = access.bytes;
    location.first = 0;
    location.stores.assign(1, {value, nullptr});
  } else if (location.bytes != access.bytes) {
    throw internalError("{} is accessed both {} and {} bytes wide", access.address, location.bytes,
                        access.bytes);
  } else if (location.stores.back().value != value) {
    // By a thread that is not a task, or the memory was freed and used again: visible at once.
    location.first = location.newest() + 1;
    location.stores.assign(1, {value, nullptr});
  }
  return location;
}

void WeakMemory::append(Location& location, uint64_t value, SharedView view) {
  location.stores.push_back({value, std::move(view)});
  if (location.stores.size() > kStoresKept) {
    location.stores.pop_front();
    location.first++;
  }
}

uint32_t& WeakMemory::floorOf(size_t task, const Location& location) {
  auto& floors = tasks_[task].view.stores;
  if (floors.size() <= location.index) floors.resize(location.index + 1);
  uint32_t& floor = floors[location.index];
  floor = std::max(floor, location.first);
  return floor;
}

WeakMemory::Loaded WeakMemory::load(size_t task, const Access& access, bool newest,
                                    const Choose& choose) {
  Location& location = locate(access);
  uint32_t& floor = floorOf(task, location);
  const uint32_t last = location.newest();
  const uint32_t before = floor;
  const size_t count = last - floor + 1;
  floor = last - static_cast<uint32_t>(newest || count == 1 ? 0 : choose(count));
  const uint32_t read = floor;
  const Message& message = location.stores[read - location.first];
  if (message.view != nullptr) {
    TaskState& state = tasks_[task];
    (acquires(access.order) ? state.view : state.acquirable).join(*message.view);
  }
  return {message.value, location.stores.back().value, read != last, read != before};
}

// What a store tells readers that acquire it. The caller has raised the floor to that store.
WeakMemory::SharedView WeakMemory::published(size_t task, std::memory_order order,
                                             const Location& location) {
  TaskState& state = tasks_[task];
  if (releases(order)) return release(task);
  if (state.fenced == nullptr) return nullptr;
  View view = *state.fenced;
  if (view.stores.size() <= location.index) view.stores.resize(location.index + 1);
  view.stores[location.index] = state.view.stores[location.index];
  return std::make_shared<const View>(std::move(view));
}

void WeakMemory::store(size_t task, const Access& access) {
  Location& location = locate(access);
  floorOf(task, location) = location.newest() + 1;
  append(location, access.operand, published(task, access.order, location));
  writeToMemory(access, access.operand);
}

uint64_t WeakMemory::modify(size_t task, const Access& access) {
  Location& location = locate(access);
  const Message read = location.stores.back();
  TaskState& state = tasks_[task];
  if (read.view != nullptr) {
    (acquires(access.order) ? state.view : state.acquirable).join(*read.view);
  }
  uint64_t value = access.kind == Access::Kind::add ? read.value + access.operand : access.operand;
  if (access.bytes == 4) value = static_cast<uint32_t>(value);
  floorOf(task, location) = location.newest() + 1;
  SharedView view = published(task, access.order, location);
  if (read.view != nullptr) {
    // A read-modify-write passes on what it read: both are one release sequence.
    View both = *read.view;
    if (view != nullptr) both.join(*view);
    view = std::make_shared<const View>(std::move(both));
  }
  append(location, value, std::move(view));
  writeToMemory(access, value);
  return read.value;
}

void WeakMemory::fence(size_t task, std::memory_order order) {
  TaskState& state = tasks_[task];
  if (acquires(order)) state.view.join(state.acquirable);
  if (order == std::memory_order_seq_cst) {
    // No edge of happens-before: such fences only agree on what is the newest.
    joinInto(state.view.stores, fences_);
    fences_ = state.view.stores;
  }
  if (releases(order)) state.fenced = release(task);
}

bool WeakMemory::hasNewer(size_t task, const void* address) const {
  auto entry = locations_.find(address);
  if (entry == locations_.end() || entry->second.run != run_) return false;
  const Location& location = entry->second;
  const auto& floors = tasks_[task].view.stores;
  return location.index >= floors.size() || floors[location.index] < location.newest();
}

WeakMemory::SharedView WeakMemory::release(size_t task) {
  View& view = tasks_[task].view;
  auto copy = std::make_shared<const View>(view);
  view.clocks[task]++;
  return copy;
}

void WeakMemory::acquire(size_t task, const View& view) {
  tasks_[task].view.join(view);
}

// Makes a cell end at `at`, if one goes across it.
void WeakMemory::split(uintptr_t at) {
  auto cell = cells_.upper_bound(at);
  if (cell == cells_.begin()) return;
  --cell;
  if (cell->first >= at || cell->second.end <= at) return;
  Cell rest = cell->second;
  cell->second.end = at;
  cells_.emplace(at, std::move(rest));
}

std::optional<WeakMemory::Race> WeakMemory::note(size_t task, const void* address, size_t bytes,
                                                 bool writes, bool isAtomic) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + bytes;
  const auto& clocks = tasks_[task].view.clocks;
  auto isOrdered = [&](const Entry& entry) {
    return entry.task == task || (entry.task < clocks.size() && entry.clock <= clocks[entry.task]);
  };
  std::optional<Race> race;
  auto cell = cells_.lower_bound(begin);
  if (cell == cells_.end() || cell->first != begin || cell->second.end != end) {
    split(begin);
    split(end);
    cell = cells_.lower_bound(begin);
  }
  for (uintptr_t at = begin; at < end; ++cell) {
    if (cell == cells_.end() || cell->first > at) {
      const uintptr_t gapEnd = cell == cells_.end() ? end : std::min(end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{gapEnd, run_, {}});
    }
    auto& entries = cell->second.entries;
    if (std::exchange(cell->second.run, run_) != run_) entries.clear();
    for (const Entry& entry : entries) {
      if (race || isOrdered(entry) || !(writes || entry.writes) || (isAtomic && entry.isAtomic)) {
        continue;
      }
      race = Race{reinterpret_cast<const void*>(at),
                  task,
                  writes,
                  isAtomic,
                  entry.task,
                  entry.writes,
                  entry.isAtomic};
    }
    // What is ordered before a plain write is ordered before everything that is ordered after the
    // write.
    std::erase_if(entries, [&](const Entry& entry) {
      return isOrdered(entry) &&
             ((writes && !isAtomic) ||
              (entry.task == task && entry.writes == writes && entry.isAtomic == isAtomic));
    });
    entries.push_back({task, clocks[task], writes, isAtomic});
    at = cell->second.end;
  }
  return race;
}

}  // namespace unisono::runtime::host
