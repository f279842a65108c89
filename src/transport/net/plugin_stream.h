// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "plugin/net.h"
#include "transport/net/stream.h"

// Streams over the connections of a net plug-in. A slot is one message of as many bytes as the
// kernel has put into it, a slot without data is one byte, and a message without data says that
// the sender ends in order. A receiver whose plug-in does not tell how long messages are takes it
// for data that no kernel waits for; only the departure of the sender's rank then tells the end of
// the connection from a failure. The receiver keeps a receive posted for each free slot, one by
// one: receives that are grouped end together, so that a FIFO would wait for another one.
namespace unisono::transport {

class PluginStream : public Stream {
 public:
  ~PluginStream() override;

 protected:
  // Owns the connection, and `region`, which the memory is registered as, from here on. Without a
  // region registers memory of the host; throws Error if that cannot be.
  PluginStream(std::shared_ptr<const plugin::Net> net, void* connection, bool sends,
               const StreamMemory& memory, std::optional<void*> region);

  const plugin::NetFunctions& functions() const { return net_->functions(); }
  // Notes the failure of a function; returns whether it has succeeded.
  bool check(const char* function, int result);
  // Whether the first request is complete, which removes it. `bytes` may be unknown.
  static constexpr int kUnknown = -1;
  bool takeRequest(int& bytes);

  const std::shared_ptr<const plugin::Net> net_;
  void* const connection_;
  void* region_ = nullptr;
  std::deque<void*> requests_;  // of the slots from step_ on

 private:
  void close();

  const bool sends_;
};

class PluginSendStream final : public PluginStream {
 public:
  PluginSendStream(std::shared_ptr<const plugin::Net> net, void* connection,
                   const StreamMemory& memory, std::optional<void*> region = {})
      : PluginStream(std::move(net), connection, true, memory, region) {}
  // Tells the receiver of the end, unless slots are left to send.
  ~PluginSendStream() override;
  StreamProgress progress() override;
  bool isPending() const override;
  SlotCounts counts() override { return countsOfSender(step_ + requests_.size()); }

 private:
  bool post(uint64_t step, size_t bytes);
};

class PluginReceiveStream final : public PluginStream {
 public:
  PluginReceiveStream(std::shared_ptr<const plugin::Net> net, void* connection, bool flushes,
                      const StreamMemory& memory, std::optional<void*> region = {})
      : PluginStream(std::move(net), connection, false, memory, region), flushes_(flushes) {}
  StreamProgress progress() override;
  SlotCounts counts() override { return countsOfReceiver(step_ + (received_ ? 1 : 0)); }

 private:
  bool post();
  bool completeSlot();

  const bool flushes_;     // kernels see what was received only after a flush
  bool flushed_ = false;   // the flush of the slot at step_ has begun
  void* flush_ = nullptr;  // its request
  bool received_ = false;  // the slot at step_ has its data
  bool ended_ = false;     // in order
};

}  // namespace unisono::transport
