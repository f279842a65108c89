// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>
#include <set>

#include "api/aliases.h"
#include "api/arguments.h"
#include "api/in_group.h"
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

// A handle of ncclCommRegister or ncclCommWindowRegister is the address of an entry.
struct Registration {
  ncclComm_t communicator;
  std::shared_ptr<void> memory;                         // of a registration
  std::shared_ptr<const plan::SymmetricWindow> window;  // of a window
  void* buffer;

  bool isWindow() const { return window != nullptr; }
};
auto& registrations() {
  static auto* set = new std::set<Registration*>;
  return *set;
}

Registration* add(Registration registration) {
  const std::lock_guard lock(mutex);
  return *registrations().insert(new Registration(std::move(registration))).first;
}

// With the lock held. Throws unless the handle is one of this communicator and this kind.
auto find(ncclComm_t comm, void* handle, bool isWindow) {
  auto entry = registrations().find(static_cast<Registration*>(handle));
  if (entry != registrations().end() && (*entry)->communicator == comm &&
      (*entry)->isWindow() == isWindow) {
    return entry;
  }
  throw invalidUsage("{} is not a {} of this communicator", handle,
                     isWindow ? "window" : "registration")
      .remedy(fmt::format("Pass a handle that {} returned for this communicator, once",
                          isWindow ? "ncclCommWindowRegister" : "ncclCommRegister"));
}

void removeRegistration(ncclComm_t comm, void* handle, bool isWindow) {
  comm::findHandle(comm);
  const std::lock_guard lock(mutex);
  const auto entry = find(comm, handle, isWindow);
  delete *entry;
  registrations().erase(entry);
}

// The window that a handle stands for, and its communicator.
Registration windowOf(ncclWindow_t handle) {
  api::checkNotNull(handle, "window");
  const std::lock_guard lock(mutex);
  const auto entry = registrations().find(reinterpret_cast<Registration*>(handle));
  if (entry == registrations().end() || !(*entry)->isWindow()) {
    throw invalidArgument("{} is not a window", static_cast<void*>(handle))
        .remedy("Pass what ncclCommWindowRegister returned, before it is deregistered");
  }
  return **entry;
}

// Where this rank sees byte `offset` of a rank's buffer; null if it cannot access it.
void* addressIn(const plan::SymmetricWindow& window, size_t offset, int rank) {
  if (offset >= window.bytes) {
    throw invalidArgument("offset is {}, but the window has {} bytes", offset, window.bytes)
        .remedy("Pass an offset in the window");
  }
  std::byte* base = window.bases[static_cast<size_t>(rank)];
  return base == nullptr ? nullptr : base + offset;
}

// Flags of 2.28.9, and of versions up to 2.32 whose meaning every transfer here has: stores of
// one-sided operations would be ordered.
constexpr int kStrictOrdering = 0x02;
constexpr int kWindowFlags = NCCL_WIN_COLL_SYMMETRIC | kStrictOrdering;

}  // namespace

extern "C" {

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  return api::guarded([&] {
    api::checkNotNull(ptr, "ptr");
    if (size == 0) {  // as cudaMalloc
      *ptr = nullptr;
      return;
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
    *handle = add({comm, communicator->registerMemory(buff, size), nullptr, buff});
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return api::guarded([&] {
    if (handle == nullptr) {
      comm::findHandle(comm);
    } else {
      removeRegistration(comm, handle, false);
    }
  });
}

// As with NCCL, nothing is done for a buffer of no bytes, not even together with other ranks.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags) {
  return api::inGroup([&] {
    api::checkNotNull(win, "win");
    const auto communicator = comm::findHandle(comm)->getActive();
    if ((winFlags & ~kWindowFlags) != 0) {
      throw invalidArgument("winFlags is {:#x}, which has unknown bits", winFlags)
          .remedy("Pass NCCL_WIN_DEFAULT or NCCL_WIN_COLL_SYMMETRIC");
    }
    *win = nullptr;
    if (buff == nullptr || size == 0) return;
    api::checkBuffer(*communicator, buff, size, device::DataType::uint8, "buff");
    if (reinterpret_cast<uintptr_t>(buff) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
      throw invalidArgument("buff ({}) is not a multiple of {} bytes", buff,
                            NCCL_WIN_REQUIRED_ALIGNMENT)
          .rank(communicator->rank())
          .remedy("Pass the start of what ncclMemAlloc returned, or of a page in it");
    }
    comm::CallGroup::current().addRegister(
        comm, buff, size, (winFlags & NCCL_WIN_COLL_SYMMETRIC) != 0,
        [comm, buff, win](std::shared_ptr<const plan::SymmetricWindow> window) {
          *win = reinterpret_cast<ncclWindow_t>(add({comm, nullptr, std::move(window), buff}));
        });
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  return api::guarded([&] {
    if (win != nullptr) removeRegistration(comm, win, true);
  });
}

// Declared in nccl_device.h, since 2.29.
#pragma GCC visibility push(default)

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr) {
  return api::guarded([&] {
    api::checkNotNull(outUserPtr, "outUserPtr");
    api::checkNotNull(win, "win");
    comm::findHandle(comm);
    const std::lock_guard lock(mutex);
    *outUserPtr = (*find(comm, win, true))->buffer;
  });
}

// Null if this rank cannot load from and store to the memory of rank `peer`. The address holds
// until the window is deregistered or the communicator ends.
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** outPtr) {
  return api::guarded([&] {
    api::checkNotNull(outPtr, "outPtr");
    const Registration found = windowOf(window);
    api::checkRank(*comm::communicatorOf(found.communicator), peer, "peer");
    *outPtr = addressIn(*found.window, offset, peer);
  });
}

// The same for a rank of ncclTeamLsa().
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank,
                                     void** outPtr) {
  return api::guarded([&] {
    api::checkNotNull(outPtr, "outPtr");
    const Registration found = windowOf(window);
    const auto team = comm::communicatorOf(found.communicator)->loadStoreTeam();
    if (lsaRank < 0 || lsaRank >= team.ranks) {
      throw invalidArgument("lsaRank is {}, but ncclTeamLsa has {} ranks", lsaRank, team.ranks)
          .remedy(fmt::format("Pass a rank from 0 to {}", team.ranks - 1));
    }
    *outPtr = addressIn(*found.window, offset, team.first + lsaRank);
  });
}

// Null: windows have no multicast addresses.
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void** outPtr) {
  return api::guarded([&] {
    api::checkNotNull(outPtr, "outPtr");
    addressIn(*windowOf(window).window, offset, 0);
    *outPtr = nullptr;
  });
}

#pragma GCC visibility pop
}  // extern "C"

UNISONO_ALIAS(ncclGetLsaDevicePointer);
UNISONO_ALIAS(ncclGetLsaMultimemDevicePointer);
UNISONO_ALIAS(ncclGetPeerDevicePointer);
UNISONO_ALIAS(ncclMemAlloc);
UNISONO_ALIAS(ncclMemFree);
UNISONO_ALIAS(ncclCommRegister);
UNISONO_ALIAS(ncclCommDeregister);
UNISONO_ALIAS(ncclCommWindowRegister);
UNISONO_ALIAS(ncclCommWindowDeregister);
UNISONO_ALIAS(ncclWinGetUserPtr);
