// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "bootstrap/socket.h"

// One FIFO between two hosts: the sender's kernel fills slots in memory of its host, the proxy of
// the sender sends them over a TCP connection, and the proxy of the receiver puts them into slots
// that the receiver's kernel reads. Each FIFO has a connection of its own, so that TCP's flow
// control is that of the FIFO, and no FIFO waits for another one.
//
// On the wire a slot is a SlotHeader and as many bytes as the kernel has put into the slot. The
// last header says that the sender ends in order; a connection that ends without it has failed.
namespace unisono::transport {

struct SlotHeader {
  uint32_t step;  // the lower half, for a check
  uint32_t bytes;

  static constexpr uint32_t kEnd = ~uint32_t{0};  // in place of `bytes`
};

// The FIFO's memory as the CPU addresses it (device::Fifo).
struct StreamMemory {
  uint64_t* tail;  // followed by the sizes of the slots
  uint64_t* head;
  std::byte* slots;
  uint32_t slotCount, slotBytes;

  std::byte* slot(uint64_t step) const {
    return slots + (step & (slotCount - 1)) * size_t{slotBytes};
  }
};

// What a look at a stream has found.
struct StreamProgress {
  bool moved = false;           // some bytes
  bool waitsForSocket = false;  // nothing can move until the socket is ready
};

// One end of a stream. By one thread at a time.
class Stream {
 public:
  Stream(bootstrap::Socket socket, const StreamMemory& memory)
      : socket_(std::move(socket)), memory_(memory) {}
  virtual ~Stream() = default;

  // Moves what can be moved without waiting, at most a few slots.
  virtual StreamProgress progress() = 0;
  // Of poll(): what the socket must become ready for.
  virtual short events() const = 0;
  // Whether there is something to send.
  virtual bool isPending() const { return false; }

  int descriptor() const { return socket_.descriptor(); }
  // Why the connection failed; empty while it has not.
  const std::string& failure() const { return failure_; }

 protected:
  // Keeps the other streams of the proxy from waiting for this one.
  static constexpr int kSlotsAtOnce = 4;

  bootstrap::Socket socket_;
  const StreamMemory memory_;
  uint64_t step_ = 0;  // slots passed
  std::string failure_;
};

class SendStream final : public Stream {
 public:
  using Stream::Stream;
  // Sends the last header, unless slots are left to send.
  ~SendStream() override;
  StreamProgress progress() override;
  short events() const override;
  bool isPending() const override;

 private:
  bool write(StreamProgress& progress);

  SlotHeader header_{};
  size_t sent_ = 0;  // bytes of the header and the slot
};

class ReceiveStream final : public Stream {
 public:
  using Stream::Stream;
  StreamProgress progress() override;
  short events() const override;

 private:
  bool read(std::byte* into, size_t bytes, StreamProgress& progress);
  bool readSlot(StreamProgress& progress);

  SlotHeader header_{};
  size_t received_ = 0;  // bytes of the header and the slot
  bool ended_ = false;   // in order
};

}  // namespace unisono::transport
