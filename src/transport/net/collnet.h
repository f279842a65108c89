// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "plugin/collnet.h"
#include "transport/connector.h"

namespace unisono::transport {

struct CollNetConnection;

// The connections of a communicator's rank to a CollNet plug-in: one for the heads of each channel,
// which the algorithms share. NCCL has one for all channels, whose collectives its proxies put into
// an order that each call tells them. Here slots are all that proxies know of calls, and only those
// of one FIFO have an order.
class CollNetConnections final : public ReducingDriver {
 public:
  // The heads of a channel, by node.
  using Group = std::pair<int, std::vector<int>>;
  // All that the algorithms of a communicator need, in the same order on every rank.
  static std::set<Group> groupsOf(const ChannelGraphs& graphs, const plan::CommConfig& config);

  // `ports`: those that this rank uses, by group (from the first one again); empty: any.
  CollNetConnections(std::shared_ptr<const plugin::CollNet> collNet, std::vector<int> ports)
      : collNet_(std::move(collNet)), ports_(std::move(ports)) {}
  ~CollNetConnections() override;

  // Connects the groups that this rank is in. Collective, and fails on all ranks alike if one could
  // not begin. Returns why it failed here, or nothing. `slotBytes`: of the largest collective.
  std::string connect(bootstrap::Bootstrap& bootstrap, const std::set<Group>& groups,
                      uint32_t slotBytes);

  std::unique_ptr<ReducingNetwork> makeNetwork(const TransportContext& context) const override;
  std::shared_ptr<const CollNetConnection> find(const Group& group) const;
  const plugin::NetPort& portOf(const CollNetConnection& connection) const;
  // "mlx5_0 of SHARP (v11)".
  std::string nameOf(const CollNetConnection& connection) const;

 private:
  struct Listening {
    Group group;
    int device;
    void* listener = nullptr;
    std::vector<plugin::NetHandle> handles;  // by node
  };

  std::string listen(int rank, uint32_t slotBytes, std::vector<Listening>& own) const;
  static void exchange(bootstrap::Bootstrap& bootstrap, std::vector<Listening>& own);
  std::string failed(const char* function, int result) const;

  const std::shared_ptr<const plugin::CollNet> collNet_;
  const std::vector<int> ports_;
  std::map<Group, std::shared_ptr<const CollNetConnection>> connections_;
};

}  // namespace unisono::transport
