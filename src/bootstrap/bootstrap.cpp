// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/bootstrap.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "base/system.h"
#include "bootstrap/mailbox.h"
#include "bootstrap/root_service.h"

namespace unisono::bootstrap {
namespace {

// How long rank 0 waits for the port of NCCL_COMM_ID, which the previous communicator may still
// hold.
constexpr std::chrono::seconds kPortTimeout{5};

// The ids in use: NCCL_COMM_ID makes one root, however many ids there are.
std::span<const UniqueId> checkIds(std::span<const UniqueId> ids, int ranks) {
  if (ids.empty() || ids.size() > static_cast<size_t>(ranks)) {
    throw invalidArgument("{} unique ids cannot serve {} ranks", ids.size(), ranks);
  }
  if (ids.front().fixedAddress) return ids.first(1);
  std::map<Secret, size_t> numbers;
  for (size_t i = 0; i < ids.size(); i++) {
    if (ids[i].fixedAddress) {
      throw invalidArgument("Unique id {} was made with NCCL_COMM_ID, and unique id 0 without", i)
          .remedy("Set NCCL_COMM_ID to the same value in all processes that make unique ids");
    }
    const auto [other, added] = numbers.emplace(ids[i].secret, i);
    if (!added) {
      throw invalidArgument("Unique ids {} and {} are the same", other->second, i)
          .remedy("Make each with a call of ncclGetUniqueId of its own");
    }
  }
  return ids;
}

}  // namespace

Bootstrap::Bootstrap(int rank, int roots, std::unique_ptr<Mailbox> mailbox,
                     std::shared_ptr<LocalRanks> local)
    : mailbox_(std::move(mailbox)),
      rank_(rank),
      ranks_(mailbox_->members().ranks()),
      tree_{mailbox_->members().placeOf(rank), ranks_, roots},
      local_(std::move(local)) {
  if (uplink() >= 0) mailbox_->keepUplink(uplink());
}

int Bootstrap::rankAt(int place) const {
  return mailbox_->members().rankAt(place);
}

int Bootstrap::uplink() const {
  return tree_.parent() < 0 ? -1 : rankAt(tree_.parent());
}

Bootstrap::~Bootstrap() {
  leave("has left the communicator", [](int) { return DepartureCounts{}; });
}

std::unique_ptr<Bootstrap> Bootstrap::connect(std::span<const UniqueId> ids, int rank, int ranks,
                                              const Settings& settings,
                                              std::function<bool()> aborted,
                                              std::shared_ptr<PeerWatcher> watcher) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw invalidArgument("Rank {} of {} ranks does not exist", rank, ranks);
  }
  ids = checkIds(ids, ranks);
  std::unique_ptr<RootService> root;
  const UniqueId& first = ids.front();
  if (first.fixedAddress && rank == 0) {
    const Address here = localizeScope(first.root, listInterfaces(), settings.socketInterface);
    const auto timeout =
        std::min<std::chrono::milliseconds>(connectTimeoutOf(settings), kPortTimeout);
    root = std::make_unique<RootService>(Listener(here, Wait(timeout, aborted)), first.secret,
                                         RootTimes{.timeout = timeoutOf(settings)});
  }
  // When this fails, the root is destroyed as well and tells the others.
  Membership membership = joinRendezvous(ids, rank, ranks, settings, aborted);
  if (root) keepUntilExit(std::move(root));
  auto local = LocalRanks::join(membership.session, rank);
  const Address own = membership.listener.address();
  auto mailbox = std::make_unique<Mailbox>(rank, std::move(membership),
                                           MailboxTimes{.limit = timeoutOf(settings)},
                                           std::move(aborted), std::move(watcher));
  std::unique_ptr<Bootstrap> result(
      new Bootstrap(rank, static_cast<int>(ids.size()), std::move(mailbox), std::move(local)));
  try {
    result->mailbox_->learnAddresses(result->allGatherShared(own));
  } catch (const std::exception& error) {
    result->fail(error.what());
    throw;
  }
  return result;
}

std::unique_ptr<Seat> Bootstrap::takeSeat(uint64_t number, int color) const {
  return mailbox_->takeSeat(number, color);
}

std::unique_ptr<Bootstrap> Bootstrap::connectMembers(std::unique_ptr<Seat> seat, int rank,
                                                     std::span<const int> members,
                                                     const Settings& settings,
                                                     std::function<bool()> aborted,
                                                     std::shared_ptr<PeerWatcher> watcher) const {
  auto local = LocalRanks::join(seat->communicator(), rank);
  const auto all = local->makeOnce(0, typeid(Members), [&]() -> LocalRanks::Value {
    std::vector<int> family;
    for (const int member : members) family.push_back(mailbox_->members().familyRank(member));
    return std::make_shared<const Members>(std::move(family));
  });
  auto mailbox = std::make_unique<Mailbox>(
      rank, std::move(seat), std::static_pointer_cast<const Members>(all),
      MailboxTimes{.limit = timeoutOf(settings)}, std::move(aborted), std::move(watcher));
  std::unique_ptr<Bootstrap> result(new Bootstrap(rank, 1, std::move(mailbox), std::move(local)));
  result->shares_ = 1;
  return result;
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
                 {.check = check, .evenAfterFailure = true, .evenAfterAbort = true});
}

std::vector<std::byte> Bootstrap::receiveAfterFailure(int peer, uint64_t tag,
                                                      const std::function<void()>& check) {
  checkPeer(peer);
  return mailbox_->receive(peer, FrameKind::message, tag,
                           {.check = check, .evenAfterFailure = true, .evenAfterAbort = true});
}

void Bootstrap::handleMessages(uint64_t tag, MessageHandler handler) {
  mailbox_->handleMessages(tag, std::move(handler));
}

void Bootstrap::handleQuestions(QuestionHandlers handlers) {
  mailbox_->handleQuestions(std::move(handlers));
}

bool Bootstrap::ask(int peer, std::span<const std::byte> question, bool connects) {
  checkPeer(peer);
  return mailbox_->ask(peer, question, connects);
}

std::pair<std::string, std::string> Bootstrap::addressOf(int peer) const {
  const std::string text = mailbox_->addressOfPeer(peer);
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return {};
  return {text.substr(0, colon), text.substr(colon + 1)};
}

bool Bootstrap::hasDied(int peer) const {
  const auto failure = mailbox_->failure();
  return failure && failure->isDeath && failure->rank == peer;
}

void Bootstrap::allGather(std::span<std::byte> all, size_t bytesPerRank,
                          const std::function<void()>& check) {
  const auto ranks = static_cast<size_t>(ranks_);
  if (bytesPerRank > kLongestCollective / ranks || all.size() != ranks * bytesPerRank) {
    throw invalidArgument("An all-gather of {} bytes per rank does not fit a buffer of {}",
                          bytesPerRank, all.size())
        .rank(rank_);
  }
  const auto own = all.subspan(static_cast<size_t>(rank_) * bytesPerRank, bytesPerRank);
  const LocalRanks::Bytes result = gather(own, check);
  if (!all.empty()) std::memcpy(all.data(), result->data(), all.size());
}

LocalRanks::Bytes Bootstrap::gather(std::span<const std::byte> own,
                                    const std::function<void()>& check) {
  const uint64_t number = collectives_++;
  try {
    return runCollective(number, own, check);
  } catch (const Error& error) {
    // A failure that ends the communicator is told to all of its ranks in any case.
    if (!mailbox_->failure()) {
      mailbox_->failCollective(number, {rank_, fmt::format("{} ({})", error.what(), processName())},
                               reachableNeighbours());
    }
    throw;
  }
}

void Bootstrap::failAttempt(uint64_t number, std::string_view cause) noexcept {
  try {
    mailbox_->failCollective(number, {rank_, fmt::format("{} ({})", cause, processName())},
                             reachableNeighbours());
  } catch (const std::exception&) {
    // Out of memory: the others cannot be told.
  }
}

std::optional<Error> Bootstrap::attemptFailure(uint64_t number) const {
  return mailbox_->collectiveFailure(number);
}

void Bootstrap::barrier() {
  allGather({}, 0);
}

std::vector<int> Bootstrap::reachableNeighbours() const {
  std::vector<int> result = tree_.neighbours();
  std::ranges::transform(result, result.begin(), [this](int place) { return rankAt(place); });
  std::erase_if(result, [this](int peer) { return !mailbox_->reaches(peer); });
  return result;
}

void Bootstrap::checkSize(int peer, uint64_t number, size_t bytes, size_t expected) const {
  if (bytes == expected) return;
  throw internalError(
      "Exchange {} between the processes of the communicator received {} bytes instead of {}",
      number, bytes, expected)
      .rank(rank_)
      .peer(peer)
      .remedy("Load the same libnccl.so.2 on all ranks, and make the same calls in the same order");
}

// Parts in the order of places become parts in the order of ranks.
std::vector<std::byte> Bootstrap::byRank(std::vector<std::byte> byPlace, size_t bytes) const {
  int place = 0;
  while (place < ranks_ && rankAt(place) == place) place++;
  if (place == ranks_ || bytes == 0) return byPlace;
  std::vector<std::byte> result(byPlace.size());
  for (place = 0; place < ranks_; place++) {
    std::memcpy(result.data() + static_cast<size_t>(rankAt(place)) * bytes,
                byPlace.data() + static_cast<size_t>(place) * bytes, bytes);
  }
  return result;
}

// Parts move up the tree until the rank at place 0 has them all, and the whole moves down again.
// Inside a process it is only announced.
LocalRanks::Bytes Bootstrap::runCollective(uint64_t number, std::span<const std::byte> own,
                                           const std::function<void()>& check) {
  const size_t bytes = own.size(), total = static_cast<size_t>(ranks_) * bytes;
  const auto receive = [&](int peer) {
    return mailbox_->receive(peer, FrameKind::collective, number, {.check = check});
  };
  const auto send = [&](int peer, std::span<const std::byte> part) {
    mailbox_->send(peer, FrameKind::collective, number, part, {.check = check});
  };
  const int place = tree_.rank;
  const std::vector<int> children = tree_.children();
  std::vector<std::byte> part(static_cast<size_t>(tree_.end() - place) * bytes);
  if (bytes > 0) std::memcpy(part.data(), own.data(), bytes);
  for (const int child : children) {
    const std::vector<std::byte> theirs = receive(rankAt(child));
    const auto ranks = static_cast<size_t>(tree_.of(child).end() - child);
    checkSize(rankAt(child), number, theirs.size(), ranks * bytes);
    if (bytes == 0) continue;
    std::memcpy(part.data() + static_cast<size_t>(child - place) * bytes, theirs.data(),
                theirs.size());
  }
  LocalRanks::Bytes result;
  if (place == 0) {
    result = local_->add(number, byRank(std::move(part), bytes));
  } else {
    const int parent = uplink();
    send(parent, part);
    part = receive(parent);
    if (part.empty()) result = local_->find(number);
    if (result == nullptr) {
      checkSize(parent, number, part.size(), total);
      result = local_->add(number, std::move(part));
    }
    checkSize(parent, number, result->size(), total);
  }
  for (auto child = children.rbegin(); child != children.rend(); ++child) {
    const bool isLocal = local_->contains(rankAt(*child));
    send(rankAt(*child), isLocal ? std::span<const std::byte>() : std::span(*result));
  }
  return result;
}

// Neighbours in the tree wait for this rank; they tell theirs. A failure that another rank has
// caused is passed on as it came.
void Bootstrap::fail(std::string_view cause) noexcept {
  if (ended_.exchange(true)) return;
  try {
    const Failure failure =
        mailbox_->failure().value_or(Failure{rank_, fmt::format("{} ({})", cause, processName())});
    mailbox_->announce(failure);
    for (const int peer : reachableNeighbours()) {
      try {
        mailbox_->sendFailure(peer, failure);
      } catch (const Error&) {
        // This neighbour is the one that has ended, or this rank is being aborted.
      }
    }
  } catch (const std::exception&) {
    // Out of memory: the others cannot be told.
  }
}

void Bootstrap::leave(std::string_view how,
                      const std::function<DepartureCounts(int peer)>& counts) noexcept {
  if (ended_.exchange(true)) return;
  try {
    mailbox_->leave(fmt::format("Rank {} ({}) {}", rank_, processName(), how), counts);
  } catch (const std::exception&) {
    // Out of memory: the others cannot be told, and will take this end for a failure.
  }
}

}  // namespace unisono::bootstrap
