// SPDX-License-Identifier: Apache-2.0
#include "transport/net/message_forwarder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "base/error.h"
#include "base/thread.h"
#include "transport/net/group_ends.h"
#include "transport/net/network_driver.h"

namespace unisono::transport {
namespace {

constexpr uint64_t kPurpose = 13;  // of tagOf(): no purpose of the connector has this number
// Between two looks at receivers that have not accepted yet.
constexpr std::chrono::microseconds kForwarderPoll{200};

struct Ends {
  int32_t sender, receiver;
};

// What needs the forwarder of a group, which may have made its last call.
template <typename Call>
auto withForwarder(const TransportContext& context, const ConnectionGroup& group, Call call) {
  try {
    return call();
  } catch (const Error&) {
    // One that has failed says why before it leaves.
    if (context.options.check) context.options.check();
    const auto& hasLeft = context.options.hasLeft;
    if (!hasLeft || !hasLeft(group.forwarder)) throw;
    throw Error(ErrorCode::remoteError,
                fmt::format("Rank {} forwards messages of rank {} to rank {} (PXN), and has left "
                            "the communicator before the first of them",
                            group.forwarder, group.sender, group.receiver))
        .rank(context.config.rank)
        .peer(group.forwarder)
        .remedy(
            "Call ncclCommDestroy on all ranks of a host after the last message, or set "
            "NCCL_P2P_PXN_LEVEL=0");
  }
}

}  // namespace

MessageForwarder::MessageForwarder(const TransportContext& context, Proxy& proxy,
                                   Forwarder& forwarder)
    : context_(context), proxy_(proxy), forwarder_(forwarder) {
  thread_ = startThread("unisono-forward", [this] { run(); });
  // Its owner closes this before the bootstrap ends.
  context_.bootstrap.handleMessages(tagOf(kPurpose, false, 0, 0),
                                    [this](int peer, std::vector<std::byte> message) {
                                      const std::lock_guard lock(mutex_);
                                      inbox_.emplace_back(peer, std::move(message));
                                      changed_.notify_all();
                                    });
}

void MessageForwarder::close() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    changed_.notify_all();
  }
  context_.bootstrap.handleMessages(tagOf(kPurpose, false, 0, 0), {});
  thread_.join();
  jobs_.clear();
  network_.reset();
}

void MessageForwarder::ask(const TransportContext& context, const ConnectionGroup& group) {
  tell(context, group, {});
}

void MessageForwarder::tell(const TransportContext& context, const ConnectionGroup& group,
                            std::span<const std::byte> offer) {
  const Ends ends{group.sender, group.receiver};
  const auto bytes = std::as_bytes(std::span(&ends, 1));
  std::vector<std::byte> message(bytes.begin(), bytes.end());
  message.insert(message.end(), offer.begin(), offer.end());
  withForwarder(context, group, [&] {
    context.bootstrap.send(group.forwarder, tagOf(kPurpose, false, 0, 0), message);
  });
}

std::vector<std::byte*> MessageForwarder::borrow(const TransportContext& context,
                                                 const ConnectionGroup& group, size_t blocks) {
  return withForwarder(context, group, [&] {
    return context.blocks.borrow(group.forwarder, groupTag(group, true), blocks);
  });
}

void MessageForwarder::run() {
  std::unique_lock lock(mutex_);
  bool waits = false;  // for receivers
  while (!closed_) {
    if (waits) {
      changed_.wait_for(lock, kForwarderPoll);
    } else {
      changed_.wait(lock, [this] { return closed_ || !inbox_.empty(); });
    }
    const auto messages = std::exchange(inbox_, {});
    lock.unlock();
    waits = serve(messages);
    lock.lock();
  }
}

// Returns whether receivers have to accept.
bool MessageForwarder::serve(const Messages& messages) {
  try {
    for (const auto& [peer, message] : messages) take(peer, message);
    context_.checkState();
    const runtime::DeviceScope scope(context_.runtime, context_.own().device);
    return tryAll();
  } catch (const Error& error) {
    context_.options.fail(error);
  } catch (const std::exception& error) {
    context_.options.fail(internalError("{}", error.what()).rank(context_.config.rank));
  }
  jobs_.clear();
  return false;
}

void MessageForwarder::take(int peer, std::span<const std::byte> message) {
  Ends ends{-1, -1};
  if (message.size() >= sizeof(ends)) std::memcpy(&ends, message.data(), sizeof(ends));
  std::vector<ConnectionGroup> groups;
  if (std::min(ends.sender, ends.receiver) >= 0 &&
      std::max(ends.sender, ends.receiver) < context_.config.ranks) {
    groups = groupsForMessages(context_.config, context_.places, ends.sender, ends.receiver);
  }
  const auto group = std::ranges::find(groups, context_.config.rank, &ConnectionGroup::forwarder);
  if (group == groups.end() || (peer != ends.sender && peer != ends.receiver)) {
    throw internalError("Rank {} asks for messages that this rank does not forward", peer)
        .rank(context_.config.rank)
        .peer(peer)
        .remedy("Use the same version of the library on all ranks");
  }
  Job& job = jobs_[{ends.sender, ends.receiver}];
  job.group = std::move(*group);
  if (peer == ends.sender) {
    job.isAsked = true;
  } else {
    job.offer.assign(message.begin() + sizeof(ends), message.end());
  }
}

// Returns what serve() does.
bool MessageForwarder::tryAll() {
  bool waits = false;
  for (auto entry = jobs_.begin(); entry != jobs_.end();) {
    Job& job = entry->second;
    const bool isReady = job.isAsked && !job.offer.empty();
    if (isReady && tryConnect(job)) {
      finish(job);
      entry = jobs_.erase(entry);
    } else {
      waits = waits || isReady;
      entry++;
    }
  }
  return waits;
}

bool MessageForwarder::tryConnect(Job& job) {
  if (job.memory == nullptr) {
    job.memory = memoryOf(context_, job.group);
    job.ends = endsOf(context_, job.group, *job.memory);
    const auto added = unpackOffer(context_, job.ends, job.offer);
    job.offer.assign(added.begin(), added.end());
  }
  if (network_ == nullptr) network_ = context_.options.network->makeNetwork(context_);
  return network_->tryConnect(job.ends, job.offer, job.connections);
}

void MessageForwarder::finish(Job& job) {
  const ConnectionGroup& group = job.group;
  // Only now is it known where the slots are.
  const std::vector<memory::Block> blocks = job.memory->blocks();
  addForwarded(context_, proxy_, forwarder_, std::move(job.memory), std::move(job.connections),
               group);
  context_.blocks.lend(group.sender, groupTag(group, true), blocks);
}

}  // namespace unisono::transport
