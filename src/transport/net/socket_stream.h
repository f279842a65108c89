// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "bootstrap/socket.h"
#include "transport/net/stream.h"

// Streams over TCP. On the wire a slot is a SlotHeader and as many bytes as the kernel has put into
// the slot. The last header says that the sender ends in order; a connection that ends without it
// has failed.
namespace unisono::transport {

struct SlotHeader {
  uint32_t step;  // the lower half, for a check
  uint32_t bytes;

  static constexpr uint32_t kEnd = ~uint32_t{0};  // in place of `bytes`
};

class SendStream final : public Stream {
 public:
  SendStream(bootstrap::Socket socket, const StreamMemory& memory)
      : Stream(memory), socket_(std::move(socket)) {}
  // Sends the last header, unless slots are left to send.
  ~SendStream() override;
  StreamProgress progress() override;
  bool isPending() const override;
  pollfd socket() const override { return {socket_.descriptor(), POLLOUT, 0}; }

 private:
  bool write(StreamProgress& progress);

  bootstrap::Socket socket_;
  SlotHeader header_{};
  size_t sent_ = 0;  // bytes of the header and the slot
};

class ReceiveStream final : public Stream {
 public:
  ReceiveStream(bootstrap::Socket socket, const StreamMemory& memory)
      : Stream(memory), socket_(std::move(socket)) {}
  StreamProgress progress() override;
  pollfd socket() const override { return {socket_.descriptor(), POLLIN, 0}; }

 private:
  bool read(std::byte* into, size_t bytes, StreamProgress& progress);
  size_t receive(std::span<std::byte> into, StreamProgress& progress);
  bool readSlot(StreamProgress& progress);

  bootstrap::Socket socket_;
  SlotHeader header_{};
  size_t received_ = 0;  // bytes of the header and the slot
  bool ended_ = false;   // in order
  // What was read beyond the end of a header or of a small slot, to save calls of recv().
  std::array<std::byte, 4096> ahead_;
  size_t aheadBegin_ = 0, aheadEnd_ = 0;
  bool isEmpty_ = false;  // the socket, in the current progress()
};

}  // namespace unisono::transport
