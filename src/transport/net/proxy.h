// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/unique_descriptor.h"
#include "runtime/descriptor_service.h"
#include "transport/net/stream.h"
#include "transport/transport.h"

namespace unisono::transport {

// Moves the data of all network connections of a device, and those that its copy engines move
// through host memory. Its thread runs as long as the process
// does. It polls the counters of the streams while calls may be running, sleeps longer and
// longer while they do nothing, and without a limit when all of them are done: no call
// tells it what to do, so that graphs replay without it.
class Proxy {
 public:
  // A communicator of the device.
  struct Client {
    // Whether nothing that was launched is left, and nothing can be launched without a call of
    // wake(). By the proxy's thread, seldom.
    std::function<bool()> isIdle;
    // Called once with the first failure. By the proxy's thread.
    std::function<void(const Error&)> fail;
    // Whether a peer has left in an orderly manner, so that its connections may end. May be empty.
    std::function<bool(int peer)> hasLeft = {};
    // What the proxy does when it moves no data. By its thread; may be empty.
    std::function<void(ProxyActivity)> note = {};
  };

  // The first call says on which cores its thread stays (ScopedCpuAffinity); empty: on any.
  static Proxy& ofDevice(int device, std::string_view cores = {}, bool ignoresOwnCores = false);

  // Returns the number of the client.
  uint64_t add(Client client);
  // Ends the streams of a client. Afterwards none of its functions runs, and its memory is not
  // touched.
  void remove(uint64_t client);
  // Gives a client other functions. Afterwards none of the old ones runs.
  void replace(uint64_t client, Client functions);
  // What errors of a stream name.
  struct Place {
    int rank;
    std::vector<int> peers;  // one, or all others of a collective
    std::string connection;  // "to 192.0.2.1:80 over eth0"
    std::string_view kind = "network connection";
    ErrorCode code = ErrorCode::remoteError;
    std::string_view remedy =
        "Look at the output of the peer, and at the network between the hosts";
  };
  void addStream(uint64_t client, std::unique_ptr<Stream> stream, Place place);
  // Whether everything that was to be sent has gone, or cannot go any more.
  bool isDrained(uint64_t client);
  // Something was launched.
  void wake();
  // Of an eventfd with which other processes of the host can do the same.
  const runtime::DescriptorTicket& wakeTicket() const { return wakeOffer_->ticket(); }

 private:
  struct Entry {
    uint64_t client;
    std::unique_ptr<Stream> stream;
    Place place;
    std::optional<std::chrono::steady_clock::time_point> failedAt;
    bool isForgiven = false;  // a peer has left
    uint32_t emptyLooks = 0;  // of a receiver, one after another in which nothing had arrived
  };
  struct Member {
    uint64_t number;
    Client client;
    bool hasFailed = false;
  };

  explicit Proxy(int device);
  void run();
  bool moveAll(std::unique_lock<std::mutex>& lock, bool all = true);
  void letIn(std::unique_lock<std::mutex>& lock);
  void reportFailure(Entry& entry);
  bool isIdle();
  void note(ProxyActivity activity);
  void sleep(std::optional<std::chrono::nanoseconds> nap);
  std::unique_lock<std::mutex> lockFromOutside();

  const int device_;
  const UniqueDescriptor wakeUp_;  // an eventfd
  const std::unique_ptr<runtime::DescriptorOffer> wakeOffer_;
  std::atomic<bool> sleeps_{false};
  std::atomic<int> visitors_{0};  // threads that wait for mutex_, which the proxy's thread lets in
  std::mutex mutex_;              // held while a stream moves and while functions of clients run
  std::vector<Entry> entries_;
  std::vector<Member> members_;
  uint64_t lastNumber_ = 0;
  // Of the thread, from its last look: the sockets that streams wait for, after wakeUp_; whether
  // data can move without an event that ends a sleep; whether some stream has no socket.
  std::vector<pollfd> sockets_;
  bool mustLook_ = false, hasSilent_ = false;
  uint32_t looks_ = 0;
};

// Waits until `client` is drained. Throws what TransportOptions::check does.
void waitUntilDrained(Proxy& proxy, uint64_t client, const TransportContext& context);

}  // namespace unisono::transport
