// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/multicast.h"

#include <sys/mman.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "base/error.h"
#include "base/fork.h"

namespace unisono::runtime::host {
namespace {

class MulticastRange;

// By start.
struct Ranges {
  std::shared_mutex mutex;
  std::map<uintptr_t, const MulticastRange*> ranges;

  // Never destroyed: communicators may end after static objects.
  static Ranges& get() {
    static auto* const all = new Ranges;
    return *all;
  }
};

class MulticastRange final : public MappedMemory {
 public:
  MulticastRange(std::span<std::byte* const> members, size_t bytes)
      : MappedMemory(nullptr), members_(members.begin(), members.end()), bytes_(bytes) {
    void* address =
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw systemError(errno, "mmap of a multicast range");
    address_ = address;
    Ranges& all = Ranges::get();
    std::unique_lock lock(all.mutex);
    all.ranges.emplace(reinterpret_cast<uintptr_t>(address), this);
  }
  ~MulticastRange() override {
    Ranges& all = Ranges::get();
    {
      std::unique_lock lock(all.mutex);
      all.ranges.erase(reinterpret_cast<uintptr_t>(address_));
    }
    // In a child something else may be at these addresses.
    if (forks_ == forkCount()) ::munmap(address_, bytes_);
  }

  bool holds(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(address_) < bytes_;
  }
  std::vector<std::byte*> membersAt(uintptr_t address) const {
    std::vector<std::byte*> members = members_;
    for (std::byte*& member : members) member += address - reinterpret_cast<uintptr_t>(address_);
    return members;
  }

 private:
  const int forks_ = forkCount();  // of the process that made this
  std::vector<std::byte*> members_;
  size_t bytes_;
};

}  // namespace

std::shared_ptr<MappedMemory> mapMulticast(std::span<std::byte* const> members, size_t bytes) {
  return std::make_shared<MulticastRange>(members, bytes);
}

std::vector<std::byte*> multicastMembers(const void* address) {
  const auto where = reinterpret_cast<uintptr_t>(address);
  Ranges& all = Ranges::get();
  std::shared_lock lock(all.mutex);
  auto range = all.ranges.upper_bound(where);
  if (range == all.ranges.begin() || !(--range)->second->holds(where)) {
    throw internalError("{} is not a multicast address", address);
  }
  return range->second->membersAt(where);
}

size_t multicastRanges() {
  Ranges& all = Ranges::get();
  std::shared_lock lock(all.mutex);
  return all.ranges.size();
}

}  // namespace unisono::runtime::host
