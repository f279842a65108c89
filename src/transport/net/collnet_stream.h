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

// What a connection has registered memory as. Ends before the connection.
using CollNetRegion = std::shared_ptr<void>;
CollNetRegion makeRegion(std::shared_ptr<const CollNetConnection> connection, void* region);

// The FIFO to a network that reduces and the one from it. Each slot of the first is one collective
// of the plug-in, as the slot reports, whose result is the slot of the same step in the second. All
// heads pass the same steps in the same order, so that collectives fit together. A step without
// data passes no network.
class CollNetStream final : public Stream {
 public:
  // A FIFO's memory, which lives longer, and what it is registered as.
  struct Slots {
    StreamMemory memory;
    CollNetRegion region;
  };
  // `flushes`: kernels see results only after a flush.
  CollNetStream(std::shared_ptr<const CollNetConnection> connection, const Slots& send,
                Slots results, bool flushes);
  StreamProgress progress() override;
  bool isPending() const override { return failure_.empty() && step_ < tail(); }

 private:
  const plugin::CollNetFunctions& functions() const { return connection_->collNet->functions(); }
  bool check(const char* function, int result);
  bool begin();
  bool isFlushed();
  bool complete();

  const std::shared_ptr<const CollNetConnection> connection_;
  const CollNetRegion region_;
  const Slots results_;
  const bool flushes_;
  std::deque<void*> requests_;  // of the slots from step_ on; null: nothing to wait for
  // Of the slot at step_:
  bool arrived_ = false;   // its result has
  bool flushed_ = false;   // the flush has begun
  void* flush_ = nullptr;  // its request
};

}  // namespace unisono::transport
