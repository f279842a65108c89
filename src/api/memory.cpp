// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>
#include <set>

#include "api/aliases.h"
#include "api/arguments.h"
#include "api/boundary.h"
#include "base/fork.h"
#include "comm/registry.h"

using namespace unisono;

namespace {

std::mutex mutex;

// The allocations of ncclMemAlloc by address.
struct Allocation {
  std::shared_ptr<runtime::DeviceMemory> memory;
  int forks;  // forkCount() of the process that made it
};
auto& allocations() {
  static auto* map = new std::map<void*, Allocation>;
  return *map;
}

// A handle of ncclCommRegister is the address of an entry.
struct Registration {
  ncclComm_t communicator;
  std::shared_ptr<void> memory;
};
auto& registrations() {
  static auto* set = new std::set<Registration*>;
  return *set;
}

}  // namespace

extern "C" {

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  return api::guarded([&] {
    api::checkNotNull(ptr, "ptr");
    if (size == 0) {
      throw invalidArgument("size must be at least 1, got 0").remedy("Pass the bytes to allocate");
    }
    auto& runtime = runtime::Runtime::get();
    auto memory = runtime.allocate(runtime.currentDevice(), size);
    void* address = memory->address();
    std::lock_guard lock(mutex);
    allocations().emplace(address, Allocation{std::move(memory), forkCount()});
    *ptr = address;
  });
}

ncclResult_t ncclMemFree(void* ptr) {
  return api::guarded([&] {
    if (ptr == nullptr) return;
    std::shared_ptr<runtime::DeviceMemory> memory;  // released outside the lock
    std::lock_guard lock(mutex);
    auto entry = allocations().find(ptr);
    if (entry == allocations().end()) {
      throw invalidArgument("{} was not allocated by ncclMemAlloc, or was freed already", ptr)
          .remedy("Pass an address that ncclMemAlloc returned, once");
    }
    checkNotForked(entry->second.forks, "The memory");
    memory = std::move(entry->second.memory);
    allocations().erase(entry);
  });
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  return api::guarded([&] {
    api::checkNotNull(handle, "handle");
    const auto communicator = comm::findHandle(comm)->communicator();
    api::checkBuffer(*communicator, buff, size, device::DataType::uint8, "buff");
    auto memory = communicator->registerMemory(buff, size);
    std::lock_guard lock(mutex);
    *handle = *registrations().insert(new Registration{comm, std::move(memory)}).first;
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return api::guarded([&] {
    comm::findHandle(comm);
    if (handle == nullptr) return;
    std::lock_guard lock(mutex);
    auto entry = registrations().find(static_cast<Registration*>(handle));
    if (entry == registrations().end() || (*entry)->communicator != comm) {
      throw invalidUsage("{} is not a registration of this communicator", handle)
          .remedy("Pass a handle that ncclCommRegister returned for this communicator, once");
    }
    delete *entry;
    registrations().erase(entry);
  });
}

}  // extern "C"

UNISONO_ALIAS(ncclMemAlloc);
UNISONO_ALIAS(ncclMemFree);
UNISONO_ALIAS(ncclCommRegister);
UNISONO_ALIAS(ncclCommDeregister);
