// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/fifo.h"
#include "device/reduce/reduce_copy.h"

// Stands in for a network that reduces (CollNet) between simulated nodes: one more task for each
// channel, of one rank. It sees what a network sees, FIFOs of slots, and not the buffers of the
// user. Only on the host target.
namespace unisono::device::host_target {

class NetworkChannel {
 public:
  NetworkChannel(ThreadGroup& group, const DeviceCommunicator& communicator, int channel)
      : group_(group),
        communicator_(communicator),
        channel_(channel),
        nodes_(communicator.server->nodes),
        receive_(communicator.server->receive + channel * nodes_),
        send_(communicator.server->send + channel * nodes_) {}

  // Makes the steps of a work. Returns false after an abort.
  bool run(const CollectiveWork& work) {
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
  void reduce(const ReductionSpec& spec, ReduceCopy copy, uint64_t elements) {
    copy.elements = elements;
    reduceCopy(group_, spec, copy);
  }

  // Combines a slot of every node and returns the result to all of them.
  bool step(const CollectiveWork& work, uint64_t elements) {
    for (int n = 0; n < nodes_; n++) {
      if (!wait("operands of all nodes", receive_[n].tail, 0, receive_[n].step)) return false;
    }
    for (int n = 0; n < nodes_; n++) {
      if (!wait("a free slot", send_[n].head, communicator_.slots, send_[n].step)) return false;
    }
    std::byte* result = slot(send_[0]);
    for (int n = 0; n < nodes_; n++) {
      ReduceCopy copy{};
      if (n > 0) copy.addSource(result, false);
      copy.addSource(slot(receive_[n]), false);
      copy.addDestination(result);
      reduce(work.reduction, copy, elements);
    }
    for (int n = 1; n < nodes_; n++) {
      ReduceCopy copy{};
      copy.addSource(result, false);
      copy.addDestination(slot(send_[n]));
      reduce(work.reduction, copy, elements);
    }
    for (int n = 0; n < nodes_; n++) {
      storeRelease(receive_[n].head, ++receive_[n].step);
      storeRelease(send_[n].tail, ++send_[n].step);
    }
    return true;
  }

  ThreadGroup& group_;
  const DeviceCommunicator& communicator_;
  int channel_;
  int nodes_;
  Fifo* receive_;
  Fifo* send_;
};

// What the task of a channel does: the works that cover it, in order.
inline void reductionServer(ThreadGroup& group, int channel, const CollectiveArguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  if ((loadRelaxed(arguments.launchFlag) | loadRelaxed(&communicator.stopped)) != 0) return;
  NetworkChannel network(group, communicator, channel);
  for (int w = 0; w < arguments.works; w++) {
    const CollectiveWork& work = arguments.work[w];
    if (work.algorithm != Algorithm::collNetChain || channel < work.firstChannel ||
        channel >= work.firstChannel + work.channels) {
      continue;
    }
    if (network.run(work)) continue;
    storeRelaxed(&communicator.stopped, uint32_t{1});
    return;
  }
}

}  // namespace unisono::device::host_target
