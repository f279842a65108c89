// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "device/multicast.h"
#include "device/work.h"
#include "memory/arena.h"
#include "runtime/runtime.h"
#include "topology/join.h"

namespace unisono::transport {

// What a rank shares with those of its node for an algorithm with heads (device/multicast.h). Each
// buffer holds those of all channels.
struct HeadBuffers {
  device::MulticastLayout layout;
  int channels;
  int head = -1;                        // the number of this rank among the heads; -1: it is none
  std::vector<std::vector<int>> heads;  // [head][node]
  std::byte* own;
  std::vector<std::byte*> members;           // the buffers of all ranks of the node
  std::byte* all = nullptr;                  // their multicast address, or null
  std::array<topology::TreePlace, 2> trees;  // of heads: its places, for even and odd channels
  int networkPeer = 0;                       // that reduces for heads; 0: none

  size_t bytes() const { return layout.bytes() * static_cast<size_t>(channels); }
};

// The communicator's tables in device memory: device::DeviceCommunicator and everything it points
// to. Kernels keep counters in them, so each entry is written only once, when its connection is
// made.
class DeviceTables {
 public:
  struct Sizes {
    int ranks;
    int channels;  // of collectives
    int peerChannels;
  };

  // Allocates from `arena`, which must live longer. `head` is copied except for its table pointers.
  DeviceTables(runtime::Runtime& runtime, int device, memory::Arena& arena, const Sizes& sizes,
               device::DeviceCommunicator head);

  device::DeviceCommunicator* address() const { return communicator_; }
  device::Channel* channels() const { return channels_; }
  // The words of device::LaunchMark: those of plain launches, then those of captured ones.
  uint64_t* marks() const { return marks_; }
  uint64_t* capturedMarks() const { return marks_ + device::kMarkWords; }

  // The index of the connection to `peer` on a channel, which is made if it does not exist.
  int32_t connectionTo(int channel, int peer);
  // One direction of it, a FIFO for each protocol.
  void setFifos(bool sends, int channel, int peer, std::span<const device::Fifo> fifos);
  // `order` as in device::Ring, one entry per rank.
  void setRing(int channel, int previous, int next, const std::vector<int32_t>& order,
               int position);
  // Neighbours in a tree of a channel, by rank.
  void setTree(device::Tree device::Channel::*member, int channel,
               const topology::TreePlace& place);
  // Neighbours in the CollNet chain of a channel; with `hasNetwork` the parent is the network.
  void setChain(int channel, const topology::TreePlace& place, bool hasNetwork);
  // The member is the one of device::DeviceCommunicator that the algorithm uses.
  void setHeads(device::Multicast* device::DeviceCommunicator::*member, const HeadBuffers& buffers);
  // The FIFOs for messages to or from a peer, on consecutive channels, of protocol Simple or LL.
  void setPeer(bool sends, device::Protocol protocol, int peer, int firstChannel,
               std::span<const device::Fifo> fifos);

 private:
  device::Tree treeAt(int channel, const topology::TreePlace& place);
  void write(void* destination, const void* source, size_t bytes);

  runtime::Runtime& runtime_;
  memory::Arena& arena_;
  Sizes sizes_;
  std::shared_ptr<void> stream_;
  device::DeviceCommunicator* communicator_;
  uint64_t* marks_;
  device::Channel* channels_;
  int32_t* orders_;
  device::Fifo *send_, *receive_;
  device::Fifo *sendLines_ = nullptr, *receiveLines_ = nullptr;
  std::vector<std::vector<int>> peers_;  // of the connections of each channel
};

}  // namespace unisono::transport
