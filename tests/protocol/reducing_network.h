// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "runtime/runtime.h"
#include "transport/transport.h"

// Stands in for a network that reduces (CollNet) between the nodes of a world: a kernel for each
// launch that needs it, one task for each channel. It sees what the proxy of a plug-in sees: FIFOs
// of slots with their reports, and not the buffers of the user.
namespace unisono::protocol {

class SimulatedNetwork {
 public:
  // The ends of the network of the FIFOs of the heads, by node.
  struct Stream {
    transport::ReducingNetwork::Stream use;
    std::vector<device::Fifo> receive, send;
    std::shared_ptr<runtime::PinnedMemory> memory;
  };

  SimulatedNetwork(runtime::Runtime& runtime, uint32_t slots) : runtime_(runtime), slots_(slots) {}

  // From any thread.
  transport::ReducingNetwork::Ends connect(int rank,
                                           const transport::ReducingNetwork::Stream& stream);
  // What a launch of rank 0 needs of the network, on a stream of its own. `abortFlag` is that of
  // rank 0.
  void enqueue(const plan::CollectiveLaunch& launch, int nodes, const uint32_t* abortFlag,
               runtime::Stream stream);

  const std::vector<std::unique_ptr<Stream>>& streams() const { return streams_; }
  void reset() { stopped_ = 0; }

 private:
  friend class NetworkKernel;

  runtime::Runtime& runtime_;
  const uint32_t slots_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  uint32_t stopped_ = 0;  // set when an abort has ended a launch
};

// The network of the communicators of a world.
std::shared_ptr<const transport::ReducingDriver> driverOf(SimulatedNetwork& network);

}  // namespace unisono::protocol
