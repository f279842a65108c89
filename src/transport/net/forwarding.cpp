// SPDX-License-Identifier: Apache-2.0
#include "transport/net/forwarding.h"

#include <sys/eventfd.h>

#include <utility>

#include "base/log.h"

namespace unisono::transport {
namespace {

// Looking at a process reads a file.
constexpr std::chrono::milliseconds kBetweenLooks{100};

uint64_t load(uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

void store(uint64_t& word, uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

ForwardingPage& pageOf(const FifoMemory& memory) {
  return *reinterpret_cast<ForwardingPage*>(memory.page());
}

}  // namespace

static_assert(sizeof(ForwardingPage) <= FifoMemory::kPageBytes);

bool Forwarder::Served::isBusy() const {
  return load(pageOf(*memory).busy) != 0 && ended() == ForwardingPage::no;
}

ForwardingPage::Ended Forwarder::Served::ended() const {
  return static_cast<ForwardingPage::Ended>(load(pageOf(*memory).ended));
}

Forwarder::~Forwarder() {
  for (const auto& served : served_) proxy_.remove(served->client);
}

uint64_t Forwarder::add(std::unique_ptr<FifoMemory> memory, const Proxy::Client& client,
                        std::function<bool()> hasSenderEnded) {
  const std::lock_guard lock(mutex_);
  Served& served = *served_.emplace_back(std::make_unique<Served>());
  pageOf(*memory).wake = proxy_.wakeTicket();
  served.memory = std::move(memory);
  served.hasSenderEnded = std::move(hasSenderEnded);
  Proxy::Client own = client;
  own.isIdle = [&served] { return !served.isBusy(); };
  return served.client = proxy_.add(std::move(own));
}

void Forwarder::leaveCommunicator() {
  for (const auto& served : served_) {
    proxy_.replace(served->client, {[&served = *served] { return !served.isBusy(); },
                                    [&served = *served](const Error& error) {
                                      logInfo("For a rank that has ended: {}", error.what());
                                      served.hasFailed = true;
                                    }});
  }
}

bool Forwarder::isOver() {
  const auto now = std::chrono::steady_clock::now();
  const bool looks = now >= nextLook_;
  if (looks) nextLook_ = now + kBetweenLooks;
  bool isOver = true;
  for (const auto& served : served_) {
    if (served->isOver) continue;
    ForwardingPage::Ended ended = served->ended();
    // It cannot say that any more.
    if (ended == ForwardingPage::no && looks && served->hasSenderEnded &&
        served->hasSenderEnded()) {
      ended = ForwardingPage::byAbort;
    }
    served->isOver = served->hasFailed || ended == ForwardingPage::byAbort ||
                     (ended == ForwardingPage::inOrder && proxy_.isDrained(served->client));
    if (served->isOver) proxy_.remove(served->client);
    isOver = isOver && served->isOver;
  }
  return isOver;
}

void ForwardedSends::add(const std::vector<std::byte*>& blocks,
                         const std::vector<device::Protocol>& protocols, uint32_t slots) {
  Group group{reinterpret_cast<ForwardingPage*>(blocks.front()), {}, {}};
  group.wake = runtime::fetchDescriptor(group.page->wake);
  for (size_t fifo = 0; fifo < protocols.size(); fifo++) {
    group.fifos.push_back({FifoMemory::makeFifo(blocks, fifo), protocols[fifo]});
  }
  const std::lock_guard lock(mutex_);
  slots_ = slots;
  if (busy_) setBusy(group);  // of launches that run already, noteLaunch() tells nobody more
  groups_.push_back(std::move(group));
}

void ForwardedSends::setBusy(const Group& group) {
  store(group.page->busy, 1);
  static_cast<void>(::eventfd_write(group.wake.get(), 1));
}

void ForwardedSends::noteLaunch() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(busy_, true)) return;
  for (const Group& group : groups_) setBusy(group);
}

bool ForwardedSends::noteIdle(const std::function<bool()>& isIdle) {
  // A launch either comes before isIdle(), which then returns false, or after the stores.
  const std::lock_guard lock(mutex_);
  if (!isIdle()) return false;
  if (!std::exchange(busy_, false)) return true;
  for (const Group& group : groups_) store(group.page->busy, 0);
  return true;
}

bool ForwardedSends::isDrained() const {
  for (const Group& group : groups_) {
    for (const auto& [memory, protocol] : group.fifos) {
      const uint64_t head = load(*memory.head);
      uint64_t& report = memory.tail[device::kReportsWord + head % slots_];
      const bool isPending = protocol == device::Protocol::ll
                                 ? device::isLineReportOf(load(report), head)
                                 : head < load(*memory.tail);
      if (isPending) return false;
    }
  }
  return true;
}

void ForwardedSends::end(ForwardingPage::Ended how) {
  const std::lock_guard lock(mutex_);
  for (const Group& group : groups_) {
    store(group.page->ended, how);
    static_cast<void>(::eventfd_write(group.wake.get(), 1));
  }
  groups_.clear();
}

}  // namespace unisono::transport
