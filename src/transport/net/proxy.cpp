// SPDX-License-Identifier: Apache-2.0
#include "transport/net/proxy.h"

#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <thread>
#include <utility>

#include "base/cpu_affinity.h"
#include "base/log.h"
#include "base/open_descriptor.h"
#include "base/thread.h"
#include "runtime/runtime.h"

namespace unisono::transport {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// How often the thread looks without a nap after data have moved.
constexpr int kLooksAwake = 100;
constexpr std::chrono::nanoseconds kShortestNap = 20us, kLongestNap = 500us;
// No socket ends the nap when data arrive.
constexpr std::chrono::nanoseconds kLongestNapWithoutSockets = 50us;
// When a process dies, its rank's bootstrap connection tells more than its data connections. Where
// a machine does not answer there is nothing to wait for: UNISONO_NETWORK_TIMEOUT has passed.
constexpr auto kGrace = 1s;
// A look at an empty socket is a system call, which delays the other streams. Where nothing has
// arrived for so many looks, only one of eight looks at it while data of others move.
constexpr uint32_t kQuietAfter = 200, kLooksOfQuiet = 8;

}  // namespace

Proxy::Proxy(int device)
    : device_(device),
      wakeUp_(openDescriptor([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }, "eventfd")),
      wakeOffer_(runtime::offerDescriptor(wakeUp_.get())) {
  startThread("unisono-proxy", [this] { run(); }).detach();
}

// Never destroyed: the thread runs until the process ends.
Proxy& Proxy::ofDevice(int device, std::string_view cores, bool ignoresOwnCores) {
  static std::mutex mutex;
  static auto& proxies = *new std::map<int, Proxy*>;
  std::lock_guard lock(mutex);
  Proxy*& proxy = proxies[device];
  if (proxy == nullptr) {
    const ScopedCpuAffinity nearPort(cores, ignoresOwnCores);  // the thread inherits it
    proxy = new Proxy(device);
  }
  return *proxy;
}

std::unique_lock<std::mutex> Proxy::lockFromOutside() {
  visitors_++;
  std::unique_lock lock(mutex_);
  visitors_--;
  return lock;
}

uint64_t Proxy::add(Client client) {
  const auto lock = lockFromOutside();
  members_.push_back({++lastNumber_, std::move(client)});
  return lastNumber_;
}

void Proxy::remove(uint64_t client) {
  const auto lock = lockFromOutside();
  std::erase_if(entries_, [client](const Entry& entry) { return entry.client == client; });
  std::erase_if(members_, [client](const Member& member) { return member.number == client; });
}

void Proxy::replace(uint64_t client, Client functions) {
  const auto lock = lockFromOutside();
  const auto found = std::ranges::find(members_, client, &Member::number);
  if (found != members_.end()) found->client = std::move(functions);
}

void Proxy::addStream(uint64_t client, std::unique_ptr<Stream> stream, Place place) {
  stream->setWake([this] { wake(); });
  {
    const auto lock = lockFromOutside();
    entries_.push_back({client, std::move(stream), std::move(place), {}});
  }
  wake();
}

bool Proxy::isDrained(uint64_t client) {
  const auto lock = lockFromOutside();
  return std::none_of(entries_.begin(), entries_.end(), [client](const Entry& entry) {
    return entry.client == client && entry.stream->isPending();
  });
}

void Proxy::wake() {
  if (sleeps_.exchange(false)) static_cast<void>(::eventfd_write(wakeUp_.get(), 1));
}

void Proxy::run() {
  // Net plug-ins may call CUDA, such as cuFlushGPUDirectRDMAWrites() for the current context.
  try {
    runtime::Runtime::get().makeCurrent(device_);
  } catch (const Error& error) {
    logWarn("The thread that moves network data has no device: {}", error.what());
  }
  int quietLooks = 0;
  std::chrono::nanoseconds nap = kShortestNap;
  for (;;) {
    while (visitors_.load() > 0) ::sched_yield();
    const bool naps = quietLooks >= kLooksAwake;
    // Whoever wakes this thread from here on ends the nap.
    if (naps) sleeps_.exchange(true);
    bool moved = false;
    {
      std::unique_lock lock(mutex_);
      moved = moveAll(lock, naps);
      if (moved && quietLooks >= kLooksAwake) note(ProxyActivity::active);
      if (!moved && quietLooks + 1 == kLooksAwake) note(ProxyActivity::idle);
    }
    if (moved) {
      quietLooks = 0;
      nap = kShortestNap;
    } else if (!naps) {
      quietLooks++;
      ::sched_yield();
    } else if (const auto longest = hasSilent_ ? kLongestNapWithoutSockets : kLongestNap;
               nap < longest) {
      sleep(nap);
      nap = std::min(2 * nap, longest);
    } else {
      bool idle = false;
      {
        std::unique_lock lock(mutex_);
        // A kernel may have stored a tail and ended since the last look, so the counters are read
        // again once all are done. That may find a failure, which has to be reported first.
        idle = isIdle() && !moveAll(lock) && !mustLook_ && isIdle();
        for (const Entry& entry : entries_) {
          for (const auto& observer : entry.stream->observers()) {
            if (idle) observer->rest();
          }
        }
        if (idle) note(ProxyActivity::sleeps);
      }
      sleep(idle ? std::nullopt : std::optional(longest));
      if (idle) {
        const std::lock_guard lock(mutex_);
        note(ProxyActivity::wakes);
        quietLooks = 0;
        nap = kShortestNap;
      }
    }
  }
}

// The streams may be others afterwards.
void Proxy::letIn(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  while (visitors_.load() > 0) ::sched_yield();
  lock.lock();
}

// Of receivers that have been empty for long takes a few, unless `all`. An abort waits for at most
// one stream: a look at hundreds of them can take longer than it may.
bool Proxy::moveAll(std::unique_lock<std::mutex>& lock, bool all) {
  bool moved = false;
  looks_++;
  sockets_.assign(1, {wakeUp_.get(), POLLIN, 0});
  mustLook_ = hasSilent_ = false;
  for (size_t i = 0; i < entries_.size(); i++) {
    if (visitors_.load() > 0) {
      letIn(lock);
      moved = true;  // nobody sleeps after this look, which may have missed some
      if (i >= entries_.size()) break;
    }
    Entry& entry = entries_[i];
    const bool isQuiet = entry.emptyLooks >= kQuietAfter;
    if (!all && isQuiet && (looks_ + i) % kLooksOfQuiet != 0) {
      sockets_.push_back(entry.stream->socket());
      continue;
    }
    for (const auto& observer : entry.stream->observers()) observer->before(*entry.stream);
    const StreamProgress progress = entry.stream->progress();
    for (const auto& observer : entry.stream->observers())
      observer->after(*entry.stream, progress.moved);
    moved |= progress.moved;
    // Its slots stay free until something arrives.
    const bool isEmpty = progress.waitsForSocket && !progress.moved && !progress.mustLook &&
                         entry.stream->socket().events == POLLIN;
    entry.emptyLooks = isEmpty ? std::min(entry.emptyLooks + 1, kQuietAfter) : 0;
    if (progress.waitsForSocket) sockets_.push_back(entry.stream->socket());
    mustLook_ |= progress.mustLook;
    hasSilent_ |= entry.stream->socket().fd < 0;
    if (!entry.stream->failure().empty()) reportFailure(entry);
  }
  return moved;
}

void Proxy::reportFailure(Entry& entry) {
  if (entry.isForgiven) return;
  const Clock::time_point now = Clock::now();
  if (!entry.failedAt) entry.failedAt = now;
  if (!entry.stream->isSilence() && now - *entry.failedAt < kGrace) return;
  for (Member& member : members_) {
    if (member.number != entry.client) continue;
    if (member.client.hasLeft && std::ranges::any_of(entry.place.peers, member.client.hasLeft)) {
      entry.isForgiven = true;
      return;
    }
    if (std::exchange(member.hasFailed, true)) continue;
    Error error(entry.place.code, fmt::format("The {} {} failed: {}", entry.place.kind,
                                              entry.place.connection, entry.stream->failure()));
    error.rank(entry.place.rank);
    if (entry.place.peers.size() == 1) error.peer(entry.place.peers.front());
    error.remedy(std::string(entry.place.remedy));
    member.client.fail(error);
  }
}

bool Proxy::isIdle() {
  const auto isPending = [this](const Entry& entry) {
    return entry.failedAt && !entry.isForgiven &&
           std::any_of(members_.begin(), members_.end(), [&](const Member& member) {
             return member.number == entry.client && !member.hasFailed;
           });
  };
  if (std::any_of(entries_.begin(), entries_.end(), isPending)) return false;
  return std::all_of(members_.begin(), members_.end(), [](const Member& member) {
    try {
      return member.hasFailed || member.client.isIdle();
    } catch (const Error& error) {
      logInfo("The proxy of a device: {}", error.what());
      return true;  // the device has failed
    }
  });
}

void Proxy::note(ProxyActivity activity) {
  for (const Member& member : members_) {
    if (member.client.note) member.client.note(activity);
  }
}

// Until a socket is ready, something is launched, or the nap is over.
void Proxy::sleep(std::optional<std::chrono::nanoseconds> nap) {
  timespec limit{};
  if (nap) limit.tv_nsec = nap->count();
  ::ppoll(sockets_.data(), sockets_.size(), nap ? &limit : nullptr, nullptr);
  sleeps_.store(false);
  if ((sockets_.front().revents & POLLIN) != 0) {
    eventfd_t count = 0;
    static_cast<void>(::eventfd_read(wakeUp_.get(), &count));
  }
}

void waitUntilDrained(Proxy& proxy, uint64_t client, const TransportContext& context) {
  while (!proxy.isDrained(client)) {
    context.checkState();
    std::this_thread::sleep_for(200us);
  }
}

}  // namespace unisono::transport
