// SPDX-License-Identifier: Apache-2.0
#include "transport/net/plugin_stream.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"

namespace unisono::transport {
namespace {

// Keeps plug-ins that send to a closed socket from ending the process. The proxy's own thread
// blocks all signals anyway.
class BlockedBrokenPipe {
 public:
  BlockedBrokenPipe() {
    sigset_t pending;
    ::sigpending(&pending);
    wasPending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::sigemptyset(&signal_);
    ::sigaddset(&signal_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~BlockedBrokenPipe() {
    const timespec now{};
    if (!wasPending_) static_cast<void>(::sigtimedwait(&signal_, nullptr, &now));
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedBrokenPipe(const BlockedBrokenPipe&) = delete;
  BlockedBrokenPipe& operator=(const BlockedBrokenPipe&) = delete;

 private:
  sigset_t signal_, before_;
  bool wasPending_ = false;
};

}  // namespace

PluginStream::PluginStream(std::shared_ptr<const plugin::Net> net, void* connection, bool sends,
                           const StreamMemory& memory, std::optional<void*> region)
    : Stream(memory),
      net_(std::move(net)),
      connection_(connection),
      region_(region.value_or(nullptr)),
      sends_(sends) {
  if (region) return;
  const int result = functions().registerMemory(connection_, memory.slots, memory.bytes(),
                                                plugin::kHostMemory, &region_);
  if (result == plugin::kSuccess) return;
  close();
  throw Error(ErrorCode::systemError,
              fmt::format("The net plug-in {} cannot use {} bytes of memory: its regMr returned {}",
                          net_->name(), memory.bytes(), plugin::describeResult(result)))
      .remedy("Raise the limit of locked memory (ulimit -l), or use NCCL_NET=Socket");
}

PluginStream::~PluginStream() {
  // Nobody can do anything about a failure.
  static_cast<void>(functions().deregisterMemory(connection_, region_));
  close();
}

void PluginStream::close() {
  static_cast<void>(sends_ ? functions().closeSender(connection_)
                           : functions().closeReceiver(connection_));
}

bool PluginStream::check(const char* function, int result) {
  if (result == plugin::kSuccess) return true;
  failure_ = fmt::format("{} returned {}", function, plugin::describeResult(result));
  return false;
}

bool PluginStream::takeRequest(int& bytes) {
  int done = 0;
  bytes = kUnknown;
  if (!check("test", functions().test(requests_.front(), &done, &bytes)) || done == 0) return false;
  requests_.pop_front();
  return true;
}

PluginSendStream::~PluginSendStream() {
  if (!failure_.empty() || !requests_.empty() || isBegun(step_)) return;
  const BlockedBrokenPipe blocked;
  // The receiver has as many receives posted, which would otherwise fail when the connection is
  // closed, maybe before data that are still on their way are there. It may have closed the
  // connection, and an abort must not wait.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
  // post() may have to be called again.
  for (uint32_t posted = 0; posted < memory_.slotCount && failure_.empty();) {
    if (post(step_, 0)) {
      posted++;
    } else if (std::chrono::steady_clock::now() > deadline) {
      break;
    }
  }
  for (int bytes = 0; !requests_.empty() && failure_.empty();) {
    if (!takeRequest(bytes) && std::chrono::steady_clock::now() > deadline) break;
  }
}

bool PluginSendStream::isPending() const {
  return failure_.empty() && (isBegun(step_) || !requests_.empty());
}

// Returns whether the plug-in has taken the message.
bool PluginSendStream::post(uint64_t step, size_t bytes) {
  void* request = nullptr;
  const int result =
      functions().send(connection_, memory_.slot(step), bytes, region_, eventsOf(step), &request);
  if (!check("isend", result) || request == nullptr) return false;
  requests_.push_back(request);
  return true;
}

StreamProgress PluginSendStream::progress() {
  StreamProgress progress;
  if (!failure_.empty()) return progress;
  for (int i = 0; i < kSlotsAtOnce; i++) {
    const uint64_t step = step_ + requests_.size();
    if (!isFilled(step) || !post(step, std::max<size_t>(filledBytes(step), 1))) break;
    progress.moved = true;
  }
  int bytes = 0;
  while (failure_.empty() && !requests_.empty() && takeRequest(bytes)) {
    release(step_++);
    progress.moved = true;
  }
  progress.mustLook = isPending();
  return progress;
}

// Returns whether there may be room for another one.
bool PluginReceiveStream::post() {
  const uint64_t step = step_ + requests_.size() + (received_ ? 1 : 0);
  if (!isFree(step)) return false;
  void* request = nullptr;
  const int result = functions().receive(connection_, memory_.slot(step), memory_.slotBytes,
                                         region_, eventsOf(step), &request);
  if (!check("irecv", result) || request == nullptr) return false;
  requests_.push_back(request);
  return true;
}

// Returns whether another slot may be complete.
bool PluginReceiveStream::completeSlot() {
  int bytes = 0;
  if (!received_) {
    if (requests_.empty() || !takeRequest(bytes)) return false;
    if (bytes == 0) {
      ended_ = true;
      return true;
    }
    if (bytes < kUnknown || bytes > static_cast<int>(memory_.slotBytes) || ended_) {
      failure_ = fmt::format("{} bytes arrived that do not belong to it", bytes);
      return false;
    }
    received_ = true;
    noteBytes(step_, static_cast<uint32_t>(std::max(bytes, 0)));
  }
  if (flushes_ && !flushed_) {
    const int result = functions().flush(connection_, memory_.slot(step_),
                                         static_cast<int>(memory_.slotBytes), region_, &flush_);
    if (!check("iflush", result)) return false;
    flushed_ = true;
  }
  if (flush_ != nullptr) {
    int done = 0;
    if (!check("test", functions().test(flush_, &done, nullptr)) || done == 0) return false;
    flush_ = nullptr;
  }
  received_ = flushed_ = false;
  setTail(++step_);
  return true;
}

StreamProgress PluginReceiveStream::progress() {
  StreamProgress progress;
  if (!failure_.empty()) return progress;
  while (!ended_ && post()) {
  }
  for (int i = 0; i < kSlotsAtOnce && failure_.empty() && completeSlot(); i++) {
    progress.moved = true;
  }
  return progress;
}

}  // namespace unisono::transport
