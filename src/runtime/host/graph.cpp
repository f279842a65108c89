// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/graph.h"

#include <algorithm>

namespace unisono::runtime::host {

// Once for a graph: what is captured later follows on the same stream.
void HostGraph::addWait(const std::shared_ptr<LastPoint>& event) {
  if (std::ranges::find(awaited_, event) != awaited_.end()) return;
  awaited_.push_back(event);
  add([event]() -> Operation {
    auto point = event->get();
    if (point == nullptr) return CopyOperation{};  // of nothing
    return WaitOperation{std::move(point)};
  });
}

// The event is recorded once, after the last work that asked for it.
void HostGraph::addRecord(const std::shared_ptr<LastPoint>& event) {
  std::erase_if(nodes_, [&](const Node& node) { return node.recorded == event.get(); });
  add([event]() -> Operation {
    auto point = std::make_shared<EventPoint>();
    event->set(point);
    return RecordOperation{std::move(point)};
  });
  nodes_.back().recorded = event.get();
}

}  // namespace unisono::runtime::host
