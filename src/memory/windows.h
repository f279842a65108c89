// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "device/window.h"
#include "memory/arena.h"
#include "runtime/runtime.h"

namespace unisono::memory {

// The windows of one rank of a communicator: memory of the application that its peers map, and
// memory of the peers that it has mapped (docs/decisions/0009-windows.md). A window is an
// allocation, or the adjacent allocations that hold a buffer. Calls only look up; one thread of the
// process, the mapper, does everything that takes time, in work().
class Windows : public std::enable_shared_from_this<Windows> {
 public:
  struct WindowOptions {
    int rank;
    std::vector<bool> peers;  // by rank: those that windows are shared with
    uint64_t maxBytes;        // of own windows, and of mapped ones
  };
  // `wake` has the mapper call work() soon. It is called from any thread.
  using Wake = std::function<void(const std::shared_ptr<Windows>&)>;
  // `arena` provides the table of mapped windows.
  static std::shared_ptr<Windows> create(runtime::Runtime& runtime, int device,
                                         std::shared_ptr<Arena> arena,
                                         bootstrap::Bootstrap& bootstrap,
                                         const WindowOptions& options, Wake wake);

  // In device memory: [peer * kWindowSlots + index].
  device::MappedWindow* table() const { return table_; }

  // Returns the place of a buffer of this rank that `peer` (-1: every peer) is to store into, after
  // it has made a window if there is none. No window for memory that cannot be shared, and where
  // there is no room. `kept`: a graph keeps the place, so it stays valid while the memory lives.
  device::WindowReference find(const void* address, uint64_t bytes, int peer, bool kept);

  // Makes a window for the allocation of a buffer, as find() does, and keeps it until it is
  // unregistered as often as it was registered, or its memory is freed. Returns its id, or 0 if the
  // memory cannot be shared.
  uint64_t registerMemory(const void* address, uint64_t bytes);
  void unregisterMemory(uint64_t window);

  // For ranks that want to know that a window is in use from now on. Both wait for mappers, until
  // `ended` returns true or a few seconds have passed. The owner: returns whether peers were told
  // of the window; they are not if its memory cannot be shared. A peer: returns when it has mapped
  // the window, or has found out that it cannot do so now.
  bool awaitAnnounced(uint64_t window, const std::function<bool()>& ended);
  void awaitMapped(int peer, uint64_t window, const std::function<bool()>& ended);
  // A window of `peer` that this rank has mapped, with its memory as long as the result lives; null
  // if it has not.
  std::shared_ptr<runtime::MappedMemory> mapped(int peer, uint64_t window) const;

  // Only for the mapper: does what there is to do, and returns when it wants to be called again;
  // nothing if there are no windows.
  std::optional<std::chrono::milliseconds> work();

  // Tells the peers to unmap this rank's windows, unless `aborted`. Afterwards the bootstrap may be
  // destroyed. What this rank has mapped stays mapped while the object lives.
  void close(bool aborted);

  struct WindowStatistics {
    uint64_t ownBytes, mappedBytes;
  };
  WindowStatistics statistics() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct OwnWindow {
    uint64_t id;  // 0: the memory cannot be shared
    runtime::Allocation allocation;
    std::vector<bool> wanted, told;  // by peer
    Clock::time_point lastUse;
    bool kept;              // by a graph
    int registrations = 0;  // by the application
  };
  struct RetiredWindow {
    uint64_t id;
    std::vector<bool> told;
  };
  // Sent as the id and the handles. Without handles: unmap it.
  struct WindowMessage {
    uint64_t window;
    std::vector<runtime::MemoryHandle> handles;  // of adjacent allocations
  };
  struct PeerWindow {
    uint64_t id;
    std::shared_ptr<runtime::MappedMemory> memory;
    uint64_t bytes;
    bool unmapping;
  };
  using WindowEntry = std::pair<int, uint64_t>;  // peer, index

  Windows(runtime::Runtime& runtime, int device, std::shared_ptr<Arena> arena,
          bootstrap::Bootstrap& bootstrap, const WindowOptions& options, Wake wake);

  using OwnKey = std::pair<uint64_t, uint64_t>;  // address and bytes of the allocations

  OwnWindow* findOwn(const runtime::Allocation& allocation);
  bool tell(OwnWindow& window, int peer);
  template <typename Ready>
  void await(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ended, Ready ready);
  bool makeRoom(uint64_t bytes);
  void retire(const OwnWindow& window);
  void findFreed();
  void announce();
  void send(int peer, const WindowMessage& message);
  void receive();
  void map(int peer, const WindowMessage& message);
  void unmap(const WindowEntry& place, PeerWindow& window);
  uint64_t change(const WindowEntry& place, device::WindowChange change, uint64_t window = 0,
                  void* base = nullptr);
  void logOnce(std::atomic<bool>& logged, const std::string& text) const;

  runtime::Runtime& runtime_;
  const int device_;
  const std::shared_ptr<Arena> arena_;
  const WindowOptions options_;
  const Wake wake_;
  device::MappedWindow* table_;

  mutable std::mutex mutex_;
  std::map<OwnKey, OwnWindow> own_;
  uint64_t ownBytes_ = 0;
  std::vector<bool> indexUsed_ = std::vector<bool>(device::kWindowSlots);
  uint64_t generation_ = 0;
  std::vector<RetiredWindow> retired_;
  std::deque<std::pair<int, std::vector<std::byte>>> inbox_;
  struct Answer {
    uint64_t window;
    std::weak_ptr<runtime::MappedMemory> memory;  // none if it was not mapped
  };
  std::map<WindowEntry, Answer> answered_;   // the last window there that was mapped, or was not
  std::condition_variable answeredChanged_;  // the same for what was told
  bool closed_ = false;

  std::mutex bootstrapMutex_;  // held while messages are sent
  bootstrap::Bootstrap* bootstrap_;

  // Of the mapper's thread.
  std::shared_ptr<void> stream_;
  std::shared_ptr<runtime::PinnedMemory> users_;
  std::map<WindowEntry, PeerWindow> mapped_;
  std::deque<std::pair<int, WindowMessage>> waiting_;  // for their index to become free
  std::atomic<uint64_t> mappedBytes_{0};
  Clock::time_point nextLook_;
  std::atomic<bool> exportLogged_{false}, mapLogged_{false}, roomLogged_{false};
};

}  // namespace unisono::memory
