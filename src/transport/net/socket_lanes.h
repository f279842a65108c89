// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/unique_descriptor.h"
#include "bootstrap/socket.h"

namespace unisono::transport {

// How many sockets a connection has besides its first one, and how many threads serve them.
struct LaneCounts {
  uint32_t threads = 0, sockets = 0;
};
// By NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, and where they are below 0 by the PCI vendor
// of the network interface ("0x1d0f", or empty).
LaneCounts chooseLanes(int64_t threads, int64_t socketsPerThread, std::string_view vendor);

// The sockets of a connection that carry pieces of large slots, and the threads that serve them.
// Both ends cut a slot in the same way, so that nothing on these sockets says what it is.
class SocketLanes {
 public:
  enum class Direction { send, receive };
  static constexpr uint32_t kMaxSockets = 64, kMaxThreads = 16;  // NCCL's limits
  // Slots of at most so many bytes are not worth to wake a thread.
  static constexpr uint32_t kMinPieceBytes = 64 << 10;

  // `sockets` may be empty: then there are no threads, and start() must not be called. `slots` is
  // how many slots can be on their way at once. `cores` and `ignoresOwnCores` as for
  // ScopedCpuAffinity: where the threads stay.
  SocketLanes(std::vector<bootstrap::Socket> sockets, uint32_t threads, Direction direction,
              uint32_t slots, std::string_view cores = {}, bool ignoresOwnCores = false);
  // Ends the threads, whatever they do.
  ~SocketLanes() { stop(); }
  SocketLanes(const SocketLanes&) = delete;
  SocketLanes& operator=(const SocketLanes&) = delete;

  bool carries(uint32_t bytes) const { return !lanes_.empty() && bytes > kMinPieceBytes; }
  // Begins to move a slot that they carry. `notify` is called by a thread when it is done or
  // cannot be; it is the same for all slots.
  void start(uint64_t step, std::byte* data, uint32_t bytes, const std::function<void()>& notify);
  // Also of slots that were not started.
  bool isDone(uint64_t step) const {
    return pieces_[step % pieces_.size()].load(std::memory_order_acquire) == 0;
  }
  std::vector<const bootstrap::Socket*> sockets() const;
  // Why they have failed; empty while they have not.
  std::string failure() const;
  bool isSilence() const;  // as Stream::isSilence

 private:
  struct Piece {
    std::byte* data;
    size_t bytes;
    uint64_t step;
  };
  // A slot has at most one piece for each lane.
  struct Lane {
    bootstrap::Socket socket;
    std::vector<Piece> pieces;  // a ring
    std::atomic<uint64_t> posted{0};
    uint64_t moved = 0;     // pieces; of the thread
    size_t movedBytes = 0;  // of the next piece
  };
  struct Helper {
    UniqueDescriptor wakeUp;  // an eventfd
    std::atomic<bool> sleeps{false};
    std::thread thread;
  };
  enum class Found { nothing, progress, fullSocket };

  void stop();
  void serve(size_t number);
  Found move(Lane& lane);
  void wake(Helper& helper);

  const Direction direction_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::vector<std::atomic<uint32_t>> pieces_;  // that are left of each slot
  size_t nextLane_ = 0;
  std::function<void()> notify_;
  std::atomic<bool> stops_{false};
  std::atomic<int> error_{0};  // errno, or kClosed

  static constexpr int kClosed = -1;
};

}  // namespace unisono::transport
