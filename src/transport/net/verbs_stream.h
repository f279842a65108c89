// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "transport/net/stream.h"
#include "transport/net/verbs_connection.h"

// Streams over RDMA. The sender writes slots into the receiver's memory. The immediate data of the
// last write of a slot are its size; they complete a receive, which tells the receiver that the
// data are there. The receiver posts a receive for each free slot and then writes how many it has
// posted in all, the credits, into the sender's memory, so that no write finds no receive and no
// slot is written before it is free.
//
// Slots take turns on the queue pairs, which may complete them in any order, or are split over all
// of them.
namespace unisono::transport {

// Memory of whole pages, as children of fork() lose pages that an adapter knows.
class PageMemory {
 public:
  static constexpr size_t kBytes = 4096;
  PageMemory();
  ~PageMemory();
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;
  uint64_t* words() const { return static_cast<uint64_t*>(memory_); }

 private:
  void* memory_;
};

class VerbsStream : public Stream {
 public:
  // What this end tells the other one. `group` and `fifo` are its own.
  const VerbsEndpoint& endpoint() const { return endpoint_; }
  // Makes the connection ready. Throws Error.
  void connect(const VerbsEndpoint& remote);

 protected:
  VerbsStream(const VerbsPort& port, const VerbsOptions& options,
              const VerbsConnection::Sizes& sizes, const StreamMemory& memory)
      : Stream(memory), connection_(port, options, sizes) {}
  // Whether the connection is usable; notes its failure.
  bool isUsable();

  PageMemory credits_;  // before connection_, which writes it
  VerbsConnection connection_;
  VerbsEndpoint endpoint_, remote_;
};

class VerbsSendStream final : public VerbsStream {
 public:
  // `slots`: the region of its memory; null: the stream registers memory of the host.
  VerbsSendStream(const VerbsPort& port, const VerbsOptions& options, size_t queuePairs,
                  const StreamMemory& memory, VerbsRegion slots = {nullptr, nullptr});
  StreamProgress progress() override;
  bool isPending() const override;
  SlotCounts counts() override { return countsOfSender(posted_); }

 private:
  bool write(uint64_t step);
  bool write(size_t pair, uint64_t step, size_t begin, size_t bytes, size_t total);

  uint64_t posted_ = 0;              // slots that were handed to the adapter
  std::vector<uint32_t> unwritten_;  // by slot: writes that have not completed
  ibv_mr& slots_;
};

class VerbsReceiveStream final : public VerbsStream {
 public:
  // What adapters do with the slots of a receiver.
  static int accessOf(const VerbsOptions& options, bool onDevice);
  // `slots` as for VerbsSendStream. `flushes`: kernels see what arrives only after a flush.
  VerbsReceiveStream(const VerbsPort& port, const VerbsOptions& options, const StreamMemory& memory,
                     VerbsRegion slots = {nullptr, nullptr}, bool flushes = false);
  StreamProgress progress() override;
  SlotCounts counts() override { return countsOfReceiver(flushes_ ? flushedTo_ : step_); }

 private:
  bool post();
  bool sendCredits();
  bool isComplete(uint64_t step) const;
  bool flushArrived();

  uint64_t posted_ = 0, told_ = 0;  // receives, and those of which the sender was told
  uint32_t unsent_ = 0;             // writes of credits that have not completed
  std::vector<uint64_t> arrived_;   // writes, by queue pair
  const bool flushes_;
  uint64_t flushedTo_ = 0;  // slots that the flush under way covers; step_ without one
  ibv_mr& words_;
};

}  // namespace unisono::transport
