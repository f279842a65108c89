// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "runtime/host/stream.h"

namespace unisono::runtime::host {

// The point of an event that was recorded last. Graphs that use the event share it.
class LastPoint {
 public:
  std::shared_ptr<EventPoint> get() const {
    const std::lock_guard lock(mutex_);
    return point_;
  }
  void set(std::shared_ptr<EventPoint> point) {
    const std::lock_guard lock(mutex_);
    point_ = std::move(point);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<EventPoint> point_;
};

// The work of one stream from the beginning to the end of a capture, in order. One thread at a time
// adds to it; it may be launched on any streams.
class HostGraph {
 public:
  // Called for each launch of the graph.
  using MakeOperation = std::function<Operation()>;

  void add(MakeOperation make) { nodes_.push_back({std::move(make), nullptr}); }
  // See Event::makeGraphWait() and Event::recordInGraph().
  void addWait(const std::shared_ptr<LastPoint>& event);
  void addRecord(const std::shared_ptr<LastPoint>& event);

  template <typename Enqueue>
  void launch(Enqueue enqueue) const {
    for (const Node& node : nodes_) enqueue(node.make());
  }

 private:
  struct Node {
    MakeOperation make;
    const LastPoint* recorded;  // null: it records nothing
  };
  std::list<Node> nodes_;
  std::list<std::shared_ptr<LastPoint>> awaited_;
};

}  // namespace unisono::runtime::host
