// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/mapped_transport.h"

#include "base/math.h"
#include "transport/mapped/copied_fifos.h"

namespace unisono::transport {
namespace {

// Per channel, the sender's memory has a line with the head counter of each FIFO and one with the
// receiver's offer (of protocol Simple), the receiver's memory one with the tail counter of each
// FIFO.
size_t linesOf(size_t fifos, bool ofSender) {
  return ofSender ? fifos + 1 : fifos;
}

size_t linesBytes(const ConnectionGroup& group, bool ofSender) {
  constexpr size_t kSlotAlignment = 4096;
  const size_t lines = linesOf(group.fifos.size(), ofSender);
  return roundUp(group.channels.size() * lines * device::kCounterLineBytes, kSlotAlignment);
}

// All channels from one rank to another share one block of memory at each end.
class MappedTransport : public Transport {
 public:
  std::unique_ptr<PendingConnection> setup(const ConnectionGroup& group) final;

 protected:
  explicit MappedTransport(const TransportContext& context) : context_(context) {}

  virtual memory::Arena& arena() = 0;
  virtual Offers offersOf(const ConnectionGroup& group) const = 0;
  // May replace FIFOs by others, which this rank's kernels use.
  virtual void adapt(const ConnectionGroup&, std::vector<device::Fifo>&) {}

  const TransportContext context_;

 private:
  class Pending;

  PeerLink linkOf(const ConnectionGroup& group) const {
    return context_.linkBetween(group.sender, group.receiver);
  }
  memory::Block makeBlock(const ConnectionGroup& group, bool ofSender);
  void send(int peer, const ConnectionGroup& group, bool ofSender, const memory::Block& block);
  std::byte* receive(int peer, const ConnectionGroup& group, bool ofSender);
  std::vector<device::Fifo> makeFifos(const ConnectionGroup& group, std::byte* sender,
                                      std::byte* receiver) const;
  // What both ends must agree on.
  uint32_t kindOf(const PeerLink& link) const {
    return static_cast<uint32_t>(link.transport) << 3 | (link.copiesIn ? 4u : 0u) |
           (link.copiesOut ? 2u : 0u) | (link.read ? 1u : 0u);
  }
};

class MappedTransport::Pending final : public PendingConnection {
 public:
  Pending(MappedTransport& transport, const ConnectionGroup& group, memory::Block own)
      : transport_(transport), group_(group), own_(own) {}

  std::vector<device::Fifo> connect() override {
    const int through = transport_.linkOf(group_).through;
    const bool sends = group_.sender == transport_.context_.config.rank;
    const int peer = sends ? group_.receiver : group_.sender;
    const auto block = [&](bool ofSender) {
      if (through < 0 && ofSender == sends) return own_.address;
      return transport_.receive(through < 0 ? peer : through, group_, ofSender);
    };
    std::byte* sender = block(true);
    std::byte* receiver = block(false);
    std::vector<device::Fifo> fifos = transport_.makeFifos(group_, sender, receiver);
    transport_.adapt(group_, fifos);
    return fifos;
  }

 private:
  MappedTransport& transport_;
  const ConnectionGroup group_;
  const memory::Block own_;  // of this rank's end, unless the rank between provides it
};

memory::Block MappedTransport::makeBlock(const ConnectionGroup& group, bool ofSender) {
  size_t bytes = linesBytes(group, ofSender);
  if (linkOf(group).read == ofSender) {
    for (const auto& fifo : group.fifos) {
      bytes += group.channels.size() * context_.slots * fifo.slotBytes;
    }
  }
  return arena().allocate(bytes);
}

void MappedTransport::send(int peer, const ConnectionGroup& group, bool ofSender,
                           const memory::Block& block) {
  context_.blocks.send(peer, tagOf(group.purpose, ofSender, group.sender, group.receiver),
                       kindOf(linkOf(group)), block);
}

std::byte* MappedTransport::receive(int peer, const ConnectionGroup& group, bool ofSender) {
  return context_.blocks.receive(peer, tagOf(group.purpose, ofSender, group.sender, group.receiver),
                                 kindOf(linkOf(group)));
}

std::unique_ptr<PendingConnection> MappedTransport::setup(const ConnectionGroup& group) {
  const int rank = context_.config.rank;
  const int through = linkOf(group).through;
  memory::Block own{};
  for (const bool ofSender : {true, false}) {
    const int end = ofSender ? group.sender : group.receiver;
    if (through == rank) {
      const memory::Block block = makeBlock(group, ofSender);
      send(group.sender, group, ofSender, block);
      send(group.receiver, group, ofSender, block);
    } else if (through < 0 && end == rank) {
      own = makeBlock(group, ofSender);
      send(ofSender ? group.receiver : group.sender, group, ofSender, own);
    }
  }
  return std::make_unique<Pending>(*this, group, own);
}

std::vector<device::Fifo> MappedTransport::makeFifos(const ConnectionGroup& group,
                                                     std::byte* sender, std::byte* receiver) const {
  const size_t count = group.fifos.size();
  const bool read = linkOf(group).read, reports = linkOf(group).copiesOut;
  const Offers offers = offersOf(group);
  std::byte* slots = (read ? sender : receiver) + linesBytes(group, read);
  std::vector<device::Fifo> fifos;
  for (size_t channel = 0; channel < group.channels.size(); channel++) {
    std::byte* senderLines = sender + channel * linesOf(count, true) * device::kCounterLineBytes;
    std::byte* receiverLines =
        receiver + channel * linesOf(count, false) * device::kCounterLineBytes;
    for (size_t i = 0; i < count; i++) {
      device::Fifo fifo{};
      fifo.slots = slots;
      fifo.head = reinterpret_cast<uint64_t*>(senderLines + i * device::kCounterLineBytes);
      fifo.tail = reinterpret_cast<uint64_t*>(receiverLines + i * device::kCounterLineBytes);
      if (offers.any && group.fifos[i].protocol == device::Protocol::simple) {
        fifo.offer = reinterpret_cast<uint64_t*>(senderLines + count * device::kCounterLineBytes);
        fifo.byAddress = offers.byAddress ? 1 : 0;
      }
      if (reports && group.fifos[i].protocol == device::Protocol::simple) fifo.hasProxy = 1;
      fifos.push_back(fifo);
      slots += size_t{context_.slots} * group.fifos[i].slotBytes;
    }
  }
  return fifos;
}

// Lets the kernels of both ranks access each other's memory without mapping it, if they can. Both
// ends decide alike, and each opens its own direction.
bool openPeer(const TransportContext& context, int peer) {
  runtime::Runtime& runtime = context.runtime;
  const int device = context.own().device;
  // Both ends exchange the word of an offer, which is an atomic operation.
  if (!runtime.canAccessPeer(device, peer) || !runtime.canAccessPeer(peer, device) ||
      !runtime.supportsPeerAtomics(device, peer) || !runtime.supportsPeerAtomics(peer, device)) {
    return false;
  }
  runtime.openPeer(device, peer);
  return true;
}

class PeerTransport final : public MappedTransport {
 public:
  explicit PeerTransport(const TransportContext& context) : MappedTransport(context) {}

 private:
  memory::Arena& arena() override { return context_.arena; }

  Offers offersOf(const ConnectionGroup& group) const override {
    const int peer = group.sender == context_.config.rank ? group.receiver : group.sender;
    return offersBetween(context_, peer);
  }
};

class HostMemoryTransport final : public MappedTransport {
 public:
  explicit HostMemoryTransport(const TransportContext& context)
      : MappedTransport(context),
        arena_(context.runtime, context.own().device, kSlabBytes, memory::Arena::Place::host) {}

  void noteLaunch() override {
    if (copied_ != nullptr) copied_->noteLaunch();
  }
  void drain() override {
    if (copied_ != nullptr) copied_->drain();
  }
  void close() override {
    if (copied_ != nullptr) copied_->close();
  }

 private:
  // Slabs are registered with the device one by one.
  static constexpr size_t kSlabBytes = 1 << 20;

  memory::Arena& arena() override { return arena_; }
  // A GPU that may not reach the other one's memory cannot write to its buffers either.
  Offers offersOf(const ConnectionGroup&) const override { return {false, false}; }

  void adapt(const ConnectionGroup& group, std::vector<device::Fifo>& fifos) override {
    const PeerLink link = context_.linkBetween(group.sender, group.receiver);
    const bool sends = group.sender == context_.config.rank;
    if (!(sends ? link.copiesIn : link.copiesOut)) return;
    if (copied_ == nullptr) copied_ = std::make_unique<CopiedFifos>(context_);
    copied_->replace(group, fifos);
  }

  memory::Arena arena_;
  std::unique_ptr<CopiedFifos> copied_;  // null while kernels copy
};

}  // namespace

Offers offersBetween(const TransportContext& context, int peer) {
  const PeerLink link = context.linkBetween(context.config.rank, peer);
  if (link.through >= 0 || link.transport != TransportKind::peer) return {false, false};
  const PeerPlace& theirs = context.places[static_cast<size_t>(peer)];
  if (theirs.process != context.own().process) return {link.atomics, false};
  const bool opened = openPeer(context, theirs.device);
  return {opened, opened};
}

std::unique_ptr<Transport> makePeerTransport(const TransportContext& context) {
  return std::make_unique<PeerTransport>(context);
}

std::unique_ptr<Transport> makeHostMemoryTransport(const TransportContext& context) {
  return std::make_unique<HostMemoryTransport>(context);
}

}  // namespace unisono::transport
