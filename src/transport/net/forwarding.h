// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/unique_descriptor.h"
#include "runtime/descriptor_service.h"
#include "transport/net/fifo_memory.h"
#include "transport/net/proxy.h"
#include "transport/transport.h"

// PXN: where a port is nearer to the GPU of another rank of the host, that rank forwards what a
// rank sends. The FIFOs are in memory of the forwarder, the kernels of the sender fill them, and
// the proxy of the forwarder sends the data over a connection to the receiver. The two ranks call
// each other only to connect; all else they tell each other by a page of memory.
namespace unisono::transport {

struct ForwardingPage {
  enum Ended : uint64_t { no, inOrder, byAbort };

  // Of the sender: 1 while it may launch calls or their kernels run. The forwarder's proxy then
  // looks at the FIFOs.
  uint64_t busy;
  uint64_t ended;                  // of the sender: how; afterwards it uses nothing of all this
  runtime::DescriptorTicket wake;  // of the forwarder: an eventfd that ends the sleep of its proxy
};

// What a rank forwards for others.
class Forwarder final : public Service {
 public:
  explicit Forwarder(Proxy& proxy) : proxy_(proxy) {}
  ~Forwarder() override;

  // Makes a client of the proxy for the FIFOs in `memory`, and returns its number. `client` has the
  // functions that it shares with the others of the communicator. `hasSenderEnded` tells whether
  // the sender's process has ended; empty: unknown. From any thread.
  uint64_t add(std::unique_ptr<FifoMemory> memory, const Proxy::Client& client,
               std::function<bool()> hasSenderEnded = {});
  // From here on only the senders count, and the communicator is not used any more.
  void leaveCommunicator();
  bool isOver() override;

 private:
  struct Served {
    std::unique_ptr<FifoMemory> memory;
    uint64_t client;
    std::function<bool()> hasSenderEnded;
    std::atomic<bool> hasFailed{false};
    bool isOver = false;

    bool isBusy() const;
    ForwardingPage::Ended ended() const;
  };

  Proxy& proxy_;
  std::mutex mutex_;  // of calls of add()
  std::vector<std::unique_ptr<Served>> served_;
  std::chrono::steady_clock::time_point nextLook_{};  // of isOver(): at processes of senders
};

// What others forward for a rank.
class ForwardedSends {
 public:
  // `blocks` are the mapped ones of FifoMemory::blocks(), which live longer than this.
  void add(const std::vector<std::byte*>& blocks, const std::vector<device::Protocol>& protocols,
           uint32_t slots);
  void noteLaunch();
  // Returns what `isIdle` does, and lets the forwarders sleep if that is true.
  bool noteIdle(const std::function<bool()>& isIdle);
  // Whether everything has been sent that ended kernels have put into FIFOs.
  bool isDrained() const;
  void end(ForwardingPage::Ended how);

 private:
  struct Fifo {
    device::Fifo memory;
    device::Protocol protocol;
  };
  struct Group {
    ForwardingPage* page;
    UniqueDescriptor wake;
    std::vector<Fifo> fifos;
  };

  // Has the forwarder look at the FIFOs.
  static void setBusy(const Group& group);

  std::mutex mutex_;  // of busy_ and the pages
  bool busy_ = false;
  std::vector<Group> groups_;
  uint32_t slots_ = 0;
};

}  // namespace unisono::transport
