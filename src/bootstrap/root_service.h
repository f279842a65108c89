#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "base/unique_descriptor.h"
#include "bootstrap/frame.h"
#include "bootstrap/socket.h"

namespace unisono::bootstrap {

class Rendezvous;

// The root of one rendezvous, a thread of its own. Every rank connects, announces its rank, the
// number of ranks and where it listens, and keeps the connection open. When all have come, each
// gets the table of addresses and a fresh secret for the connections between ranks, and the thread
// ends. It ends the rendezvous with a text for every rank when
//   - not every rank has come `timeout` after the first one (the text names the missing ranks);
//   - ranks contradict each other: their number differs, or two claim the same rank;
//   - a rank leaves before all have come;
//   - the service is destroyed.
// Before the first rank comes it waits without limit: making an id early costs nothing.
// Connections that do not announce a rank properly within kStrangerTimeout are refused with one
// line in the log.
class RootService {
 public:
  RootService(Listener listener, const Secret& secret, std::chrono::milliseconds timeout);
  RootService(const RootService&) = delete;
  RootService& operator=(const RootService&) = delete;
  // Stops and joins the thread: milliseconds, or a second when a rank does not take its answer.
  ~RootService();

  bool finished() const { return finished_.load(std::memory_order_acquire); }

 private:
  void run();

  UniqueDescriptor stop_;
  std::unique_ptr<Rendezvous> rendezvous_;  // the thread's, while it runs
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

// How long a new connection may take to show that it belongs here (less if the timeout is less).
inline constexpr std::chrono::seconds kStrangerTimeout{10};
// How many connections may be in that state; one more pushes out the oldest.
inline constexpr size_t kMostStrangers = 1024;

// Keeps a service until it is finished, or stops it when the process exits. A forked child leaves
// its parent's services alone.
void keepUntilExit(std::unique_ptr<RootService> service);

}  // namespace unisono::bootstrap
