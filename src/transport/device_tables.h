// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "device/work.h"
#include "memory/arena.h"
#include "runtime/runtime.h"

namespace unisono::transport {

// The communicator's tables in device memory: device::DeviceCommunicator and everything it points
// to. Kernels keep counters in them, so each entry is written only once, when its connection is
// made.
class DeviceTables {
 public:
  struct Sizes {
    int ranks;
    int rings;  // channels of the rings
    int peerChannels;
  };

  // Allocates from `arena`, which must live longer. `head` is copied except for its table pointers.
  DeviceTables(runtime::Runtime& runtime, int device, memory::Arena& arena, const Sizes& sizes,
               device::DeviceCommunicator head);

  device::DeviceCommunicator* address() const { return communicator_; }

  // `order` as in device::RingChannel, one entry per rank.
  void setRing(int channel, const device::Connection& receive, const device::Connection& send,
               const std::vector<int32_t>& order, int position);
  void setPeer(bool sends, int peer, int firstChannel,
               const std::vector<device::Connection>& connections);

 private:
  void write(void* destination, const void* source, size_t bytes);

  runtime::Runtime& runtime_;
  Sizes sizes_;
  std::shared_ptr<void> stream_;
  device::DeviceCommunicator* communicator_;
  device::RingChannel* rings_;
  int32_t* orders_;
  device::Connection* send_;
  device::Connection* receive_;
};

}  // namespace unisono::transport
