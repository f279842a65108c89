// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "transport/net/forwarding.h"
#include "transport/net/network.h"
#include "transport/net/proxy.h"
#include "transport/transport.h"

namespace unisono::transport {

// Connects what this rank forwards of messages (PXN). It takes no part in the calls in which their
// two ends connect: the sender asks for a group, the receiver tells where it listens, and a thread
// makes the connection and tells the sender where the FIFOs are.
class MessageForwarder {
 public:
  // Both other objects live longer than this.
  MessageForwarder(const TransportContext& context, Proxy& proxy, Forwarder& forwarder);
  ~MessageForwarder() { close(); }
  MessageForwarder(const MessageForwarder&) = delete;
  MessageForwarder& operator=(const MessageForwarder&) = delete;
  // Connects nothing more. While the bootstrap exists.
  void close();

  // Of the sender and the receiver of a group: tell the forwarder, and never wait. They throw
  // Error(remoteError) if it has left.
  static void ask(const TransportContext& context, const ConnectionGroup& group);
  static void tell(const TransportContext& context, const ConnectionGroup& group,
                   std::span<const std::byte> offer);
  // Of the sender: waits for the memory of the FIFOs, and throws the same.
  static std::vector<std::byte*> borrow(const TransportContext& context,
                                        const ConnectionGroup& group, size_t blocks);

 private:
  struct Job {
    bool isAsked = false;
    std::vector<std::byte> offer;  // empty: not told yet
    ConnectionGroup group{};
    std::unique_ptr<FifoMemory> memory;  // null: not begun
    NetworkGroup ends{};
    std::vector<NetworkConnection> connections;
  };

  using Messages = std::vector<std::pair<int, std::vector<std::byte>>>;  // by rank
  void run();
  bool serve(const Messages& messages);
  void take(int peer, std::span<const std::byte> message);
  bool tryAll();
  bool tryConnect(Job& job);
  void finish(Job& job);

  const TransportContext context_;
  Proxy& proxy_;
  Forwarder& forwarder_;
  std::unique_ptr<Network> network_;  // of the thread
  std::mutex mutex_;                  // of what follows
  std::condition_variable changed_;
  Messages inbox_;
  bool closed_ = false;
  std::map<std::pair<int, int>, Job> jobs_;  // of the thread, by sender and receiver
  std::thread thread_;
};

}  // namespace unisono::transport
