// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "base/settings.h"
#include "bootstrap/local_ranks.h"
#include "bootstrap/peer_watcher.h"
#include "bootstrap/rank_tree.h"
#include "bootstrap/socket.h"
#include "bootstrap/unique_id.h"

namespace unisono::bootstrap {

class Mailbox;
class Seat;

// One rank's end of the network with which the ranks of a communicator set themselves up: TCP
// between every pair, connected at first use, shared by the communicators of a family (see
// ConnectionPool). Not fast and not for data.
//
// Every wait ends with Error(internalError) when `aborted` returns true, with Error(remoteError)
// when the peer has ended or failed, and with Error(timeout) after UNISONO_BOOTSTRAP_TIMEOUT if
// that is set; all name the peer. A peer that lives may be late without limit: a warning names it
// once a minute. send() and receive() may be called from any threads at once. Collectives
// (allGather, barrier) are called by every rank in the same order, by one thread of a rank at a
// time. After a rank has failed or died, every rank gets the error that caused it, and the object
// can only be destroyed, but for what goes on between ranks that live (sendAfterFailure).
class Bootstrap {
 public:
  // Waits until all ranks have joined, for 600 s if UNISONO_BOOTSTRAP_TIMEOUT does not say
  // otherwise. Several ids share the ranks, see RankTree; all ranks have the same ones. `aborted`
  // is called from any thread that waits, during the life of the object. Throws Error(timeout) that
  // names the missing ranks, Error(invalidUsage) when ranks contradict each other, and
  // Error(remoteError) when the root has ended.
  static std::unique_ptr<Bootstrap> connect(std::span<const UniqueId> ids, int rank, int ranks,
                                            const Settings& settings,
                                            std::function<bool()> aborted = {},
                                            std::shared_ptr<PeerWatcher> watcher = {});
  static std::unique_ptr<Bootstrap> connect(const UniqueId& id, int rank, int ranks,
                                            const Settings& settings,
                                            std::function<bool()> aborted = {},
                                            std::shared_ptr<PeerWatcher> watcher = {}) {
    return connect(std::span(&id, 1), rank, ranks, settings, std::move(aborted),
                   std::move(watcher));
  }
  // A place for this rank in another communicator of ranks of this one, which uses the connections
  // of this one: it needs none of its own where there are some, and may outlive this one. A rank
  // takes its seat before the others can know that it takes part. They are in the same communicator
  // if they have given the same number and color.
  std::unique_ptr<Seat> takeSeat(uint64_t number, int color) const;
  // Joins the others on seats of the same number and color: `members` are their ranks here, in the
  // order of their new ranks, of which `rank` is this one's. There is no rendezvous, and no wait.
  std::unique_ptr<Bootstrap> connectMembers(std::unique_ptr<Seat> seat, int rank,
                                            std::span<const int> members, const Settings& settings,
                                            std::function<bool()> aborted,
                                            std::shared_ptr<PeerWatcher> watcher) const;
  // Leaves, unless this rank has failed or has left.
  ~Bootstrap();

  int rank() const { return rank_; }
  int size() const { return ranks_; }

  // `all` has size() parts of `bytesPerRank`: this rank's own is input, the others are output.
  // size() * bytesPerRank is limited to 256 MiB. When it fails on one rank, it fails on all of them
  // with the same cause; later ones work.
  // `check`, if there is one, throws when this rank gives up: then it fails as well.
  void allGather(std::span<std::byte> all, size_t bytesPerRank,
                 const std::function<void()>& check = {});
  // Every rank's value, by rank.
  template <typename T>
  std::vector<T> allGather(const T& value, const std::function<void()>& check = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(ranks_));
    all[static_cast<size_t>(rank_)] = value;
    allGather(std::as_writable_bytes(std::span(all)), sizeof(T), check);
    return all;
  }
  // The same, without a copy for each of the ranks in this process.
  template <typename T>
  std::shared_ptr<const std::vector<T>> allGatherShared(const T& value,
                                                        const std::function<void()>& check = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    const LocalRanks::Bytes bytes = gather(std::as_bytes(std::span(&value, 1)), check);
    return share([&] {
      std::vector<T> all(static_cast<size_t>(ranks_));
      std::memcpy(all.data(), bytes->data(), bytes->size());
      return all;
    });
  }
  // Returns what `make()` returns, which is the same on all ranks. Only one rank of each process
  // calls it; an Error that it throws is thrown on all of these. Called as allGather() is, but
  // without waiting for other processes.
  template <typename Make>
  auto share(const Make& make) {
    using T = std::invoke_result_t<Make>;
    return std::static_pointer_cast<const T>(
        local_->makeOnce(shares_++, typeid(T), [&] { return std::make_shared<const T>(make()); }));
  }
  // Returns when every rank has called it.
  void barrier();

  // Tells the other ranks that this one has failed and why: their collectives end with this cause,
  // and their watchers hear of it. Once all-gathers have connected the ranks it takes no time,
  // before that a few seconds at most.
  void fail(std::string_view cause) noexcept;
  // Tells them that this rank ends with nothing in progress: `how` follows its name ("was
  // destroyed"). Nothing but the destructor may follow. `counts` is called with some of the ranks.
  void leave(std::string_view how, const std::function<DepartureCounts(int peer)>& counts) noexcept;

  // Sends at most 1 MiB; never waits for the receiver. Messages of one sender with the same
  // tag arrive in order. `peer` may be this rank.
  void send(int peer, uint64_t tag, std::span<const std::byte> message);
  std::vector<std::byte> receive(int peer, uint64_t tag);
  // The same between ranks that go on after others have failed: only the end of `peer` itself, or
  // what `check` throws, ends the wait.
  void sendAfterFailure(int peer, uint64_t tag, std::span<const std::byte> message,
                        const std::function<void()>& check);
  std::vector<std::byte> receiveAfterFailure(int peer, uint64_t tag,
                                             const std::function<void()>& check);
  // Numbers something that ranks do together without this object, such as making another
  // communicator: `count` numbers from the returned one. Called as allGather() is, but without
  // waiting.
  uint64_t numberAttempts(uint64_t count) {
    return std::exchange(collectives_, collectives_ + count);
  }
  // Tells the ranks that are in an attempt that it has failed here, and returns what another rank
  // has told.
  void failAttempt(uint64_t number, std::string_view cause) noexcept;
  std::optional<Error> attemptFailure(uint64_t number) const;

  // Calls `handler` with each message of `tag` instead of keeping it for receive(), also with those
  // that have arrived already, in the order of each sender. It is called on any thread with a lock
  // held: it must neither wait nor call this object. Without a handler they are kept again.
  using MessageHandler = std::function<void(int peer, std::vector<std::byte> message)>;
  void handleMessages(uint64_t tag, MessageHandler handler);

  // Questions to other ranks, which answer them whatever their calls wait for, as long as their
  // processes run. ask() never waits: it returns whether the question, of at most kLongestQuestion
  // bytes, is under way. If `peer` is not connected yet it is not, but with `connects` a later
  // attempt will find it connected.
  void handleQuestions(QuestionHandlers handlers);
  bool ask(int peer, std::span<const std::byte> question, bool connects);
  // Address and port where `peer` listens, for people; empty while they are not known.
  std::pair<std::string, std::string> addressOf(int peer) const;
  // Whether `peer` is the first rank that has ended without leaving.
  bool hasDied(int peer) const;
  // A rank with which this one is in contact from the beginning; -1 for one of the ranks. Going
  // from uplink to uplink ends there.
  int uplink() const;

 private:
  Bootstrap(int rank, int roots, std::unique_ptr<Mailbox> mailbox,
            std::shared_ptr<LocalRanks> local);

  LocalRanks::Bytes gather(std::span<const std::byte> own, const std::function<void()>& check);
  LocalRanks::Bytes runCollective(uint64_t number, std::span<const std::byte> own,
                                  const std::function<void()>& check);
  void checkSize(int peer, uint64_t number, size_t bytes, size_t expected) const;
  int rankAt(int place) const;
  std::vector<std::byte> byRank(std::vector<std::byte> byPlace, size_t bytes) const;
  std::vector<int> reachableNeighbours() const;
  void checkPeer(int peer) const;

  std::unique_ptr<Mailbox> mailbox_;
  const int rank_;
  const int ranks_;
  const RankTree tree_;  // of places, see Members
  const std::shared_ptr<LocalRanks> local_;
  uint64_t collectives_ = 0;
  uint64_t shares_ = 0;
  std::atomic<bool> ended_{false};  // this rank has failed or has left
};

}  // namespace unisono::bootstrap
