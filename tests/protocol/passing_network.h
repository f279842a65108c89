// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/runtime.h"
#include "transport/net/network_driver.h"
#include "transport/net/stream.h"

// Stands in for the proxies and the network between the nodes of a world: a kernel for each launch,
// of one task, that takes slots out of FIFOs as a sender's proxy does, and puts them into the FIFOs
// of the receivers. It puts the bytes of a slot there in another order than they were sent.
namespace unisono::protocol {

class PassingNetwork {
 public:
  // The ends of the network of a FIFO from one rank to another.
  struct Stream {
    device::Fifo receive{}, send{};
    device::Protocol protocol = device::Protocol::simple;
    uint32_t slots = 0, slotBytes = 0;
  };

  explicit PassingNetwork(runtime::Runtime& runtime) : runtime_(runtime) {}

  // One end of a FIFO. From any thread.
  void connect(uint64_t tag, size_t fifo, bool sends, const transport::StreamMemory& memory);
  // After a launch of a rank, on the rank's stream, and the network's part on its own stream: until
  // all launches so far have ended.
  void enqueue(runtime::Stream ofRank, runtime::Stream ofNetwork);

  // Valid once all ranks are connected.
  std::vector<Stream*> streams();

 private:
  friend class PassingKernel;

  runtime::Runtime& runtime_;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, size_t>, std::unique_ptr<Stream>> streams_;  // by tag and number
  uint64_t launched_ = 0;
  uint64_t ended_ = 0;  // launches; of kernels
};

// The network of the communicators of a world.
std::shared_ptr<const transport::NetworkDriver> driverOf(PassingNetwork& network);

}  // namespace unisono::protocol
