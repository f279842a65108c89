// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/unique_descriptor.h"
#include "bootstrap/frame.h"
#include "bootstrap/socket.h"

namespace unisono::bootstrap {

class Rendezvous;

struct RootTimes {
  std::optional<std::chrono::milliseconds> timeout;
  std::chrono::milliseconds reportInterval = kReportInterval;
  // How long ranks that are late for a failed rendezvous are still told why it failed.
  std::chrono::milliseconds linger{60000};
};

// The root of one rendezvous, with a thread of its own. Every rank connects, announces its rank,
// the number of ranks and where it listens, and keeps the connection open. When all have joined,
// each gets the addresses of the ranks next to it in RankTree and a new secret for the connections
// between ranks, and the thread ends. Where the communicator has several roots, each serves a block
// of ranks, and the heads below its own: these say when all that their own roots serve have joined,
// and tell their own roots when all ranks have. It ends the rendezvous with a text for every rank
// when
//   - not every rank has joined `timeout`, if there is one, after the first one (the text names the
//     missing ranks);
//   - ranks contradict each other: their number, version or unique ids differ, or two claim the
//     same rank;
//   - a rank leaves before all have joined, or reports that another root has failed;
//   - the service is destroyed.
// Before the first rank joins it waits without limit: making an id early costs nothing. Every
// `reportInterval` it tells the ranks, which log it, who is missing.
// Connections that do not announce a rank within kStrangerTimeout are refused with one line in the
// log. Neither they nor a lack of descriptors ends a rendezvous.
class RootService {
 public:
  RootService(Listener listener, const Secret& secret, const RootTimes& times);
  RootService(const RootService&) = delete;
  RootService& operator=(const RootService&) = delete;
  // Stops and joins the thread, which takes milliseconds, or a second when a rank does not read its
  // answer.
  ~RootService();

  bool finished() const { return finished_.load(std::memory_order_acquire); }

 private:
  void run();

  std::mutex stopMutex_;                    // guards stop_
  UniqueDescriptor stop_;                   // an eventfd; closed when the thread ends
  std::unique_ptr<Rendezvous> rendezvous_;  // the thread's, while it runs
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

// Keeps a service until it is finished, or stops it when the process exits. A forked child leaves
// its parent's services alone.
void keepUntilExit(std::unique_ptr<RootService> service);

}  // namespace unisono::bootstrap
