// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/work.h"
#include "plugin/net.h"

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
  device::Protocol protocol = device::Protocol::simple;

  std::byte* slot(uint64_t step) const {
    return slots + (step & (slotCount - 1)) * size_t{slotBytes};
  }
  size_t bytes() const { return size_t{slotCount} * slotBytes; }
};

// What a look at a stream has found.
struct StreamProgress {
  bool moved = false;           // some bytes
  bool waitsForSocket = false;  // nothing can move until the socket is ready
  bool mustLook = false;        // more can move at any time, and no socket tells when
};

// How many slots of a stream have come how far, from the first one on.
struct SlotCounts {
  uint64_t free = 0;    // that may be filled, or received into
  uint64_t ready = 0;   // that are filled, or have arrived and may have to be flushed
  uint64_t posted = 0;  // of a sender: that were handed to the network
  uint64_t passed = 0;  // that were sent, or passed on to the kernel
  uint64_t done = 0;    // that may be used once more
};

class Stream;

// Sees what a stream moves. By the thread that moves it.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  // Around each look at the stream, which may have moved some bytes.
  virtual void before(Stream& stream) = 0;
  virtual void after(Stream& stream, bool moved) = 0;
  // Nothing can move before the next launch.
  virtual void rest() {}
  // What a net plug-in tells of a slot goes here. Null: nobody wants to know.
  virtual plugin::NetEvents* eventsOf(uint64_t /*step*/) { return nullptr; }
};

// One end of a stream. By one thread at a time.
class Stream {
 public:
  explicit Stream(const StreamMemory& memory) : memory_(memory), slotBytes_(memory.slotCount) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Moves what can be moved without waiting, at most a few slots.
  virtual StreamProgress progress() = 0;
  // Whether there is something to send.
  virtual bool isPending() const { return false; }
  // The socket, and for what it must become ready, where progress() may wait for one.
  virtual pollfd socket() const { return {-1, 0, 0}; }
  // How many slots have passed, and how many bytes were sent in them.
  uint64_t steps() const { return step_; }
  uint64_t bytes() const { return bytes_; }
  virtual SlotCounts counts() { return {}; }
  // Of one of the last slots that are ready; 0: unknown.
  uint32_t bytesOf(uint64_t step) const { return slotBytes_[step & (memory_.slotCount - 1)]; }
  // Before the first progress().
  void addObserver(std::unique_ptr<StreamObserver> observer) {
    observers_.push_back(std::move(observer));
  }
  const std::vector<std::unique_ptr<StreamObserver>>& observers() const { return observers_; }
  // Why the connection failed; empty while it has not.
  const std::string& failure() const { return failure_; }
  // Whether it failed because the other machine does not answer, so that nothing else will tell
  // more of the cause.
  bool isSilence() const { return isSilence_; }
  // `wake` ends a nap of the thread that calls progress(). Before the first progress().
  void setWake(std::function<void()> wake) { wake_ = std::move(wake); }

 protected:
  // Keeps the other streams of the proxy from waiting for this one.
  static constexpr int kSlotsAtOnce = 4;

  // Of a sender: whether the kernel fills a slot, or has done so, and whether it has. A slot that
  // is filled stays so until it is released. `step` is that of the last call or the next one.
  bool isBegun(uint64_t step) const;
  bool isFilled(uint64_t step);
  // Of a slot that is filled: the bytes that stand for it, those of the lines with protocol LL.
  uint32_t filledBytes(uint64_t step) const;
  // Passes on that a slot may be filled once more. In order.
  void release(uint64_t step);
  device::SlotReport reportOf(uint64_t step) const;
  // Of a sender that has handed `posted` slots to the network, and a receiver which has so many.
  SlotCounts countsOfSender(uint64_t posted);
  SlotCounts countsOfReceiver(uint64_t arrived) const;
  void noteBytes(uint64_t step, uint32_t bytes) {
    slotBytes_[step & (memory_.slotCount - 1)] = bytes;
  }
  plugin::NetEvents* eventsOf(uint64_t step) const;

  // Of a receiver: whether data of a step may be put into its slot, of which the steps from `step_`
  // on have not all arrived. The kernel may be done with lines that are not known to be complete.
  bool isFree(uint64_t step) const;
  // Passes on what arrived in a slot.
  void setTail(uint64_t steps);

  // What the kernels store: by the sender except with protocol LL, and by the receiver.
  uint64_t tail() const;
  uint64_t head() const;
  void setHead(uint64_t steps);
  // Lines that tell by themselves when they are there. Those of LL128 pass as the bytes that they
  // are.
  bool hasLines() const { return memory_.protocol == device::Protocol::ll; }
  // What the lines of a slot can hold; 0 with protocol Simple.
  size_t lineDataBytes() const {
    return hasLines() ? device::payloadOf(memory_.protocol, memory_.slotBytes) : 0;
  }

  const StreamMemory memory_;
  uint64_t step_ = 0;   // slots passed
  uint64_t bytes_ = 0;  // of a sender
  std::string failure_;
  bool isSilence_ = false;
  std::function<void()> wake_;  // for other threads of the stream

 private:
  uint64_t reportWord(uint64_t step) const;

  std::vector<uint32_t> slotBytes_;  // by slot, of the last step
  std::vector<std::unique_ptr<StreamObserver>> observers_;
  uint64_t examined_ = ~uint64_t{0};  // the step of whose lines the first ones may be incomplete:
  size_t openLines_ = 0;
};

}  // namespace unisono::transport
