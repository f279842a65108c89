// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bootstrap/socket.h"
#include "transport/net/socket_lanes.h"
#include "transport/net/stream.h"

// Streams over TCP. On the wire a slot is a SlotHeader and as many bytes as the kernel has put into
// the slot; where a connection has lanes, they carry the bytes of large slots. Of the lines of
// protocol LL it is the data without the flags: recv() does not store words at once, so that the
// proxy of the receiver makes lines, which kernels can read at any time. The last header says that
// the sender ends in order; a connection that ends without it has failed.
namespace unisono::transport {

struct SlotHeader {
  uint32_t step;  // the lower half, for a check
  uint32_t bytes;

  static constexpr uint32_t kEnd = ~uint32_t{0};  // in place of `bytes`
};

// The sockets of a connection: one for headers and small slots, the others for its lanes.
struct StreamSockets {
  bootstrap::Socket first;
  std::vector<bootstrap::Socket> lanes = {};
  uint32_t threads = 0;
  std::chrono::seconds timeout{120};  // of a machine that does not answer
  // On which the threads stay (ScopedCpuAffinity); empty: on any.
  std::string cores = {};
  bool ignoresOwnCores = false;
};

// Makes the system end a connection on which the other machine answers no probes. A receiver that
// is only slow answers them.
void limitSilence(const bootstrap::Socket& socket, std::chrono::seconds timeout);

class SendStream final : public Stream {
 public:
  SendStream(StreamSockets sockets, const StreamMemory& memory);
  // Sends the last header, unless slots are left to send.
  ~SendStream() override;
  StreamProgress progress() override;
  bool isPending() const override;
  pollfd socket() const override { return {socket_.descriptor(), POLLOUT, 0}; }
  SlotCounts counts() override { return countsOfSender(posted_); }

 private:
  void begin();
  bool write(StreamProgress& progress);
  void watchPeer(const StreamProgress& progress);

  bootstrap::Socket socket_;
  const std::chrono::seconds timeout_;
  std::optional<std::chrono::steady_clock::time_point> waitsSince_;
  SlotHeader header_{};
  size_t sent_ = 0;                  // bytes of the header and the slot
  uint64_t posted_ = 0;              // slots that were written or that lanes carry
  std::vector<std::byte> lineData_;  // of the slot that is written, with protocol LL
  SocketLanes lanes_;
};

class ReceiveStream final : public Stream {
 public:
  ReceiveStream(StreamSockets sockets, const StreamMemory& memory)
      : Stream(memory),
        socket_(std::move(sockets.first)),
        lineData_(lineDataBytes()),
        lanes_(std::move(sockets.lanes), sockets.threads, SocketLanes::Direction::receive,
               memory.slotCount, sockets.cores, sockets.ignoresOwnCores) {}
  StreamProgress progress() override;
  pollfd socket() const override { return {socket_.descriptor(), POLLIN, 0}; }
  SlotCounts counts() override { return countsOfReceiver(step_); }

 private:
  bool read(std::byte* into, size_t bytes, StreamProgress& progress);
  size_t receive(std::span<std::byte> into, StreamProgress& progress);
  bool readSlot(StreamProgress& progress);
  void acknowledge(bool holdsNext);

  bootstrap::Socket socket_;
  SlotHeader header_{};
  size_t received_ = 0;  // bytes of the header and the slot
  uint64_t posted_ = 0;  // slots that were read or that lanes carry
  bool ended_ = false;   // in order
  // What was read beyond the end of a header or of a small slot, to save calls of recv().
  std::array<std::byte, 4096> ahead_;
  size_t aheadBegin_ = 0, aheadEnd_ = 0;
  bool isEmpty_ = false;  // the socket, in the current progress()
  bool isInteractive_ = false, owesAcknowledgment_ = false;  // see acknowledge()
  std::vector<std::byte> lineData_;  // of the slot that is read, with protocol LL
  SocketLanes lanes_;
};

}  // namespace unisono::transport
