// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/multicast.h"
#include "device/protocol/fifo.h"
#include "device/reduce/reduce_copy.h"

// Stands in for a network that reduces (CollNet) between simulated nodes: one more task for each
// channel, of one rank. It sees what a network sees, FIFOs of slots, and not the buffers of the
// user. Only on the host target.
namespace unisono::device::host_target {

class NetworkChannel {
 public:
  NetworkChannel(ThreadGroup& group, const DeviceCommunicator& communicator,
                 const ReductionServer& server, int channel)
      : group_(group),
        communicator_(communicator),
        server_(server),
        channel_(channel),
        nodes_(server.nodes) {}

  // Make the steps of a work. Return false after an abort.
  bool runHeads(const CollectiveWork& work) {
    const ChannelPart part = work.part(channel_);
    if (work.operation != Operation::allReduce) {
      for (uint64_t done = 0; done < part.count; done += work.chunkElements) {
        const uint64_t left = part.count - done;
        for (int h = 0; h < server_.streams; h++) {
          select(h);
          if (!step(work, left < work.chunkElements ? left : work.chunkElements)) return false;
        }
      }
      return true;
    }
    const auto heads = static_cast<uint64_t>(server_.streams);
    const uint64_t all = work.chunkElements * heads;
    for (uint64_t done = 0; done < part.count; done += all) {
      const uint64_t left = part.count - done;
      const uint64_t size = left < all ? part.lastChunk : work.chunkElements;
      for (uint64_t h = 0; h < heads; h++) {
        select(static_cast<int>(h));
        const uint64_t first = h * size;
        const uint64_t rest = first < left ? left - first : 0;
        if (!step(work, rest < size ? rest : size)) return false;
      }
    }
    return true;
  }
  bool runChain(const CollectiveWork& work) {
    select(0);
    const ChannelPart part = work.part(channel_);
    for (uint64_t chunk = 0; chunk < part.count; chunk += work.chunkElements) {
      const uint64_t left = part.count - chunk;
      const uint64_t elements = left < work.chunkElements ? left : work.chunkElements;
      for (uint64_t done = 0; done < elements; done += work.sliceElements) {
        const uint64_t size = elements - done;
        if (!step(work, size < work.sliceElements ? size : work.sliceElements)) return false;
      }
    }
    return true;
  }

 private:
  void select(int stream) {
    const int first = (channel_ * server_.streams + stream) * nodes_;
    receive_ = server_.receive + first;
    send_ = server_.send + first;
  }
  // Waits until `counter` and `ahead` exceed `step`.
  bool wait(const char* what, const uint64_t* counter, uint64_t ahead, uint64_t step) {
    const WaitSubject subject{what,    communicator_.rank, kNetworkPeer, channel_,
                              counter, step + 1 - ahead};
    return waitUntil(communicator_.abortFlag, subject,
                     [&] { return loadAcquire(counter) + ahead > step; });
  }
  std::byte* slot(const Fifo& fifo) const {
    const uint32_t bytes = communicator_.slotBytes[static_cast<int>(Protocol::simple)];
    return fifo.slots + (fifo.step & (communicator_.slots - 1)) * bytes;
  }
  static uint64_t roundUp16(uint64_t bytes) { return (bytes + 15) / 16 * 16; }
  void copy(const std::byte* from, std::byte* to, uint64_t bytes) {
    ReduceCopy copy{};
    copy.addSource(from, false);
    copy.addDestination(to);
    copyOnly(group_, copy, bytes);
  }

  // Combines `elements` elements at `offset` in the slots of all nodes.
  void reduce(const ReductionSpec& spec, uint64_t offset, std::byte* result, uint64_t elements) {
    for (int n = 0; n < nodes_ && elements > 0; n++) {
      ReduceCopy copy{};
      if (n > 0) copy.addSource(result, false);
      copy.addSource(slot(receive_[n]) + offset, false);
      copy.addDestination(result);
      copy.elements = elements;
      reduceCopy(group_, spec, copy);
    }
  }

  // Makes a step of the collective with a slot of every node. `elements` are those that a node
  // sends or, in a reduce-scatter, receives.
  bool step(const CollectiveWork& work, uint64_t elements) {
    for (int n = 0; n < nodes_; n++) {
      if (!wait("operands of all nodes", receive_[n].tail, 0, receive_[n].step)) return false;
    }
    for (int n = 0; n < nodes_; n++) {
      if (!wait("a free slot", send_[n].head, communicator_.slots, send_[n].step)) return false;
    }
    const uint64_t bytes = elements * elementBytes(work.reduction.type);
    const auto place = [&](int node) { return static_cast<uint64_t>(node) * roundUp16(bytes); };
    switch (work.operation) {
      case Operation::allGather:
        for (int to = 0; to < nodes_; to++) {
          for (int from = 0; from < nodes_; from++) {
            copy(slot(receive_[from]), slot(send_[to]) + place(from), bytes);
          }
        }
        break;
      case Operation::reduceScatter:
        for (int to = 0; to < nodes_; to++) {
          reduce(work.reduction, place(to), slot(send_[to]), elements);
        }
        break;
      default:
        reduce(work.reduction, 0, slot(send_[0]), elements);
        for (int to = 1; to < nodes_; to++) copy(slot(send_[0]), slot(send_[to]), bytes);
        break;
    }
    for (int n = 0; n < nodes_; n++) {
      storeRelease(receive_[n].head, ++receive_[n].step);
      storeRelease(send_[n].tail, ++send_[n].step);
    }
    return true;
  }

  ThreadGroup& group_;
  const DeviceCommunicator& communicator_;
  const ReductionServer& server_;
  int channel_;
  int nodes_;
  Fifo* receive_ = nullptr;  // of the stream
  Fifo* send_ = nullptr;
};

// What the task of a channel does: the works that cover it, in order.
inline void reductionServer(ThreadGroup& group, int channel, const CollectiveArguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  if ((loadRelaxed(arguments.launchFlag) | loadRelaxed(&communicator.stopped)) != 0) return;
  const Algorithm algorithm = arguments.work[0].algorithm;
  const bool heads = usesHeads(algorithm);
  const ReductionServer& server =
      heads ? *communicator.headsOf(algorithm)->server : *communicator.server;
  NetworkChannel network(group, communicator, server, channel);
  for (int w = 0; w < arguments.works; w++) {
    const CollectiveWork& work = arguments.work[w];
    if (channel < work.firstChannel || channel >= work.firstChannel + work.channels) continue;
    if (heads ? network.runHeads(work) : network.runChain(work)) continue;
    storeRelaxed(&communicator.stopped, uint32_t{1});
    return;
  }
}

}  // namespace unisono::device::host_target
