// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/bootstrap.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/system.h"
#include "bootstrap/mailbox.h"
#include "bootstrap/root_service.h"

namespace unisono::bootstrap {
namespace {

// How long rank 0 waits for the port of NCCL_COMM_ID, which the previous communicator may still
// hold.
constexpr std::chrono::seconds kPortTimeout{5};

// A binomial tree over the ranks. The children of rank r are r + 1, r + 2, r + 4 ... below the
// lowest set bit of r, and the subtree of a child r + m is the m ranks from there on: whole ranges,
// so that parts of an all-gather travel without reordering, in log2(ranks) steps.
struct Tree {
  int rank;
  int ranks;

  int reach() const {
    return rank == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(ranks))) : rank & -rank;
  }
  int parent() const { return rank - reach(); }  // of a rank other than 0
  std::vector<int> children() const {
    std::vector<int> result;
    for (int step = 1; step < reach() && rank + step < ranks; step *= 2) {
      result.push_back(rank + step);
    }
    return result;
  }
  std::vector<int> neighbours() const {
    std::vector<int> result = children();
    if (rank != 0) result.push_back(parent());
    return result;
  }
  int end() const { return std::min(rank + reach(), ranks); }
};

}  // namespace

Bootstrap::Bootstrap(int rank, int ranks, std::unique_ptr<Mailbox> mailbox)
    : rank_(rank), ranks_(ranks), mailbox_(std::move(mailbox)) {
  if (rank > 0) mailbox_->keepUplink(Tree{rank, ranks}.parent());
}

Bootstrap::~Bootstrap() {
  leave("has left the communicator", [](int) { return DepartureCounts{}; });
}

std::unique_ptr<Bootstrap> Bootstrap::connect(const UniqueId& id, int rank, int ranks,
                                              const Settings& settings,
                                              std::function<bool()> aborted,
                                              std::shared_ptr<PeerWatcher> watcher) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw invalidArgument("Rank {} of {} ranks does not exist", rank, ranks);
  }
  const std::chrono::milliseconds timeout = initTimeoutOf(settings);
  std::unique_ptr<RootService> root;
  if (id.fixedAddress && rank == 0) {
    const Address here = localizeScope(id.root, listInterfaces(), settings.socketInterface);
    Listener listener(here,
                      Wait(std::min<std::chrono::milliseconds>(timeout, kPortTimeout), aborted));
    root = std::make_unique<RootService>(std::move(listener), id.secret,
                                         RootTimes{.timeout = timeout});
  }
  // When this fails, the root is destroyed as well and tells the others.
  Membership membership = joinRendezvous(id, rank, ranks, settings, aborted);
  if (root) keepUntilExit(std::move(root));
  auto mailbox = std::make_unique<Mailbox>(rank, std::move(membership),
                                           MailboxTimes{.limit = timeoutOf(settings)},
                                           std::move(aborted), std::move(watcher));
  return std::unique_ptr<Bootstrap>(new Bootstrap(rank, ranks, std::move(mailbox)));
}

void Bootstrap::checkPeer(int peer) const {
  if (peer < 0 || peer >= ranks_) {
    throw invalidArgument("Rank {} of {} ranks does not exist", peer, ranks_).rank(rank_);
  }
}

void Bootstrap::send(int peer, uint64_t tag, std::span<const std::byte> message) {
  checkPeer(peer);
  if (message.size() > kLongestMessage) {
    throw invalidArgument("A bootstrap message of {} bytes is longer than {}", message.size(),
                          kLongestMessage)
        .rank(rank_)
        .peer(peer);
  }
  mailbox_->send(peer, FrameKind::message, tag, message);
}

std::vector<std::byte> Bootstrap::receive(int peer, uint64_t tag) {
  checkPeer(peer);
  return mailbox_->receive(peer, FrameKind::message, tag);
}

void Bootstrap::sendAfterFailure(int peer, uint64_t tag, std::span<const std::byte> message,
                                 const std::function<void()>& check) {
  checkPeer(peer);
  mailbox_->send(peer, FrameKind::message, tag, message,
                 {.check = check, .evenAfterFailure = true});
}

std::vector<std::byte> Bootstrap::receiveAfterFailure(int peer, uint64_t tag,
                                                      const std::function<void()>& check) {
  checkPeer(peer);
  return mailbox_->receive(peer, FrameKind::message, tag,
                           {.check = check, .evenAfterFailure = true});
}

void Bootstrap::handleMessages(uint64_t tag, MessageHandler handler) {
  mailbox_->handleMessages(tag, std::move(handler));
}

void Bootstrap::allGather(std::span<std::byte> all, size_t bytesPerRank,
                          const std::function<void()>& check) {
  const auto ranks = static_cast<size_t>(ranks_);
  if (bytesPerRank > kLongestCollective / ranks || all.size() != ranks * bytesPerRank) {
    throw invalidArgument("An all-gather of {} bytes per rank does not fit a buffer of {}",
                          bytesPerRank, all.size())
        .rank(rank_);
  }
  const uint64_t number = collectives_++;
  try {
    runCollective(number, all, bytesPerRank, check);
  } catch (const Error& error) {
    // A failure that ends the communicator is told to all of its ranks in any case.
    if (!mailbox_->failure()) {
      mailbox_->failCollective(number, {rank_, fmt::format("{} ({})", error.what(), processName())},
                               Tree{rank_, ranks_}.neighbours());
    }
    throw;
  }
}

void Bootstrap::barrier() {
  allGather({}, 0);
}

void Bootstrap::receivePart(int peer, uint64_t number, std::span<std::byte> into,
                            const std::function<void()>& check) {
  const std::vector<std::byte> part =
      mailbox_->receive(peer, FrameKind::collective, number, {.check = check});
  if (part.size() != into.size()) {
    throw internalError(
        "All-gather {} received {} bytes instead of {}: the ranks disagree on its size", number,
        part.size(), into.size())
        .rank(rank_)
        .peer(peer);
  }
  if (!part.empty()) std::memcpy(into.data(), part.data(), part.size());
}

// Parts move up the tree until rank 0 has them all, and the whole moves down again.
void Bootstrap::runCollective(uint64_t number, std::span<std::byte> all, size_t bytesPerRank,
                              const std::function<void()>& check) {
  const Tree tree = {rank_, ranks_};
  auto range = [&](int first, int end) {
    return all.subspan(static_cast<size_t>(first) * bytesPerRank,
                       static_cast<size_t>(end - first) * bytesPerRank);
  };
  const std::vector<int> children = tree.children();
  for (int child : children)
    receivePart(child, number, range(child, Tree{child, ranks_}.end()), check);
  if (rank_ != 0) {
    mailbox_->send(tree.parent(), FrameKind::collective, number, range(rank_, tree.end()),
                   {.check = check});
    receivePart(tree.parent(), number, all, check);
  }
  // The largest subtree first: it is the deepest.
  for (auto child = children.rbegin(); child != children.rend(); ++child) {
    mailbox_->send(*child, FrameKind::collective, number, all, {.check = check});
  }
}

// Neighbours in the tree wait for this rank; they tell theirs. A failure that another rank has
// caused is passed on as it came.
void Bootstrap::fail(std::string_view cause) noexcept {
  if (ended_.exchange(true)) return;
  try {
    const Failure failure =
        mailbox_->failure().value_or(Failure{rank_, fmt::format("{} ({})", cause, processName())});
    mailbox_->announce(failure);
    for (int peer : Tree{rank_, ranks_}.neighbours()) {
      try {
        mailbox_->sendFailure(peer, failure);
      } catch (const Error&) {
        // This neighbour is the one that has ended, or this rank is being aborted.
      }
    }
  } catch (const std::exception&) {
    // There is no memory left for telling others.
  }
}

void Bootstrap::leave(std::string_view how,
                      const std::function<DepartureCounts(int peer)>& counts) noexcept {
  if (ended_.exchange(true)) return;
  try {
    mailbox_->leave(fmt::format("Rank {} ({}) {}", rank_, processName(), how), counts);
  } catch (const std::exception&) {
    // There is no memory left for telling others, who will take this end for a failure.
  }
}

}  // namespace unisono::bootstrap
