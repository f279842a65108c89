// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <memory>

#include "plugin/collnet.h"
#include "transport/net/stream.h"

namespace unisono::transport {

// A connection of a CollNet plug-in: the heads of all nodes for one channel. Closed with the last
// owner.
struct CollNetConnection {
  CollNetConnection(std::shared_ptr<const plugin::CollNet> net, void* connection, int port,
                    size_t ranks)
      : collNet(std::move(net)), handle(connection), device(port), nodes(ranks) {}
  ~CollNetConnection() { static_cast<void>(collNet->functions().closeConnection(handle)); }
  CollNetConnection(const CollNetConnection&) = delete;
  CollNetConnection& operator=(const CollNetConnection&) = delete;

  const std::shared_ptr<const plugin::CollNet> collNet;
  void* const handle;
  const int device;
  const size_t nodes;
};

// The FIFO to a network that reduces and the one from it. Each slot of the first is one collective
// of the plug-in, as the slot reports, whose result is the slot of the same step in the second. All
// heads pass the same steps in the same order, so that collectives fit together. A step without
// data passes no network.
class CollNetStream final : public Stream {
 public:
  // Throws Error if the memory, which lives longer, cannot be registered.
  CollNetStream(std::shared_ptr<const CollNetConnection> connection, const StreamMemory& send,
                const StreamMemory& receive);
  ~CollNetStream() override;
  StreamProgress progress() override;
  bool isPending() const override { return failure_.empty() && step_ < tail(); }

 private:
  const plugin::CollNetFunctions& functions() const { return connection_->collNet->functions(); }
  void* registerSlots(const StreamMemory& memory) const;
  bool check(const char* function, int result);
  bool begin();
  bool complete();

  const std::shared_ptr<const CollNetConnection> connection_;
  const StreamMemory results_;
  void* sendRegion_ = nullptr;
  void* receiveRegion_ = nullptr;
  std::deque<void*> requests_;  // of the slots from step_ on; null: nothing to wait for
};

}  // namespace unisono::transport
