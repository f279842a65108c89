// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "device/work.h"

// One FIFO between two hosts: the sender's kernel fills slots in memory of its host, the proxy of
// the sender sends them over a connection, and the proxy of the receiver puts them into slots that
// the receiver's kernel reads. Each FIFO has a connection of its own, so that the flow control of
// the connection is that of the FIFO, and no FIFO waits for another one.
namespace unisono::transport {

// The FIFO's memory as the CPU addresses it (device::Fifo).
struct StreamMemory {
  uint64_t* tail;  // followed by the reports of the slots
  uint64_t* head;
  std::byte* slots;
  uint32_t slotCount, slotBytes;
  bool onDevice = false;  // the slots are in memory of the device, and only adapters reach them

  std::byte* slot(uint64_t step) const {
    return slots + (step & (slotCount - 1)) * size_t{slotBytes};
  }
};

// What a look at a stream has found.
struct StreamProgress {
  bool moved = false;           // some bytes
  bool waitsForSocket = false;  // nothing can move until the socket is ready
  bool mustLook = false;        // more can move at any time, and no socket tells when
};

// One end of a stream. By one thread at a time.
class Stream {
 public:
  explicit Stream(const StreamMemory& memory) : memory_(memory) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Moves what can be moved without waiting, at most a few slots.
  virtual StreamProgress progress() = 0;
  // Whether there is something to send.
  virtual bool isPending() const { return false; }
  // The socket, and for what it must become ready, where progress() may wait for one.
  virtual pollfd socket() const { return {-1, 0, 0}; }
  // Why the connection failed; empty while it has not.
  const std::string& failure() const { return failure_; }
  // `wake` ends a nap of the thread that calls progress(). Before the first progress().
  void setWake(std::function<void()> wake) { wake_ = std::move(wake); }

 protected:
  // Keeps the other streams of the proxy from waiting for this one.
  static constexpr int kSlotsAtOnce = 4;

  // The counters that this end reads and the kernels store, and the other one.
  uint64_t tail() const;
  uint64_t head() const;
  void setTail(uint64_t steps);
  void setHead(uint64_t steps);
  // Of the slot that the sender's kernel has filled.
  device::SlotReport reportOf(uint64_t step) const;
  uint32_t filledBytes(uint64_t step) const;

  const StreamMemory memory_;
  uint64_t step_ = 0;  // slots passed
  std::string failure_;
  std::function<void()> wake_;  // for other threads of the stream
};

}  // namespace unisono::transport
