// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bootstrap/connection_pool.h"
#include "bootstrap/members.h"
#include "bootstrap/peer_watcher.h"
#include "bootstrap/rendezvous.h"

namespace unisono::bootstrap {

// How long a mailbox waits for other ranks. They may be late for any reason, so without a limit a
// wait ends only when the other rank answers, has ended or has failed.
struct MailboxTimes {
  std::optional<std::chrono::milliseconds> limit;
  std::chrono::milliseconds reportInterval = kReportInterval;
};

// What ends a wait besides its success and the failure of the peer.
struct WaitRule {
  // Throws when the caller gives up. Called with a lock held: it must not call the bootstrap.
  std::function<void()> check = {};
  // Failures of other ranks do not matter, only the peer, and an abort of the mailbox.
  bool evenAfterFailure = false;
  // An abort does not matter either.
  bool evenAfterAbort = false;
};

// What ends a communicator: an error that `rank` reports, or its end without a departure.
struct Failure {
  int rank;
  std::string text;
  bool isDeath = false;
};

// Messages between the ranks of one communicator, over the connections of its family (see
// ConnectionPool).
//
// A rank greets another one before its first message, and is greeted in return, each with all news
// (failures, departures). From then on the two hear of each other's end: a rank that ends this
// communicator without a departure, or whose last connection to this one closes, has died. The
// first failure or death that a rank hears of is passed on to all that it has greeted. Those of the
// all-gathers at init form a tree, so every rank hears of it. What ends one communicator means
// nothing for the others of its family.
class Mailbox final : private ConnectionPool::User {
 public:
  // Rank `rank` of `members`; null: all ranks of the family.
  Mailbox(int rank, std::unique_ptr<Seat> seat, std::shared_ptr<const Members> members,
          const MailboxTimes& times, std::function<bool()> aborted,
          std::shared_ptr<PeerWatcher> watcher = {});
  // Of the first communicator of a family, with a pool of its own.
  Mailbox(int rank, Membership membership, const MailboxTimes& times, std::function<bool()> aborted,
          std::shared_ptr<PeerWatcher> watcher = {});
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  // The last one of a pool writes what send() has left, for ConnectionPool::kDrainTimeout at most.
  ~Mailbox();

  // Never waits for the receiver to receive. The first call for a peer connects to it. Throws
  // Error(remoteError) when the peer has ended, cannot be reached or has sent a failure, and
  // Error(timeout) at the limit.
  void send(int peer, FrameKind kind, uint64_t tag, std::span<const std::byte> payload,
            const WaitRule& rule = {});
  // Makes every wait of the other ranks end with this failure. Takes no time: those who are not
  // connected hear it from others, or when they connect.
  void announce(const Failure& failure);
  // The same, and connects to `peer` if it is not connected, which takes a second at most.
  void sendFailure(int peer, const Failure& failure);
  // Ends the waits of all ranks for parts of one all-gather, now and later, with this failure.
  // Connects to `neighbours`, who pass it on, which takes a second for each at most.
  void failCollective(uint64_t number, const Failure& failure, const std::vector<int>& neighbours);
  // Such a failure of another rank, if there is one.
  std::optional<Error> collectiveFailure(uint64_t number) const;
  // Says to those who are connected that this rank leaves, and takes no other in. `counts` is
  // called with each of them.
  void leave(const std::string& text, const std::function<DepartureCounts(int peer)>& counts);
  // The oldest message of this peer, kind and tag. Throws as send() does.
  std::vector<std::byte> receive(int peer, FrameKind kind, uint64_t tag, const WaitRule& rule = {});

  // See Bootstrap::handleMessages.
  using MessageHandler = std::function<void(int peer, std::vector<std::byte> message)>;
  void handleMessages(uint64_t tag, MessageHandler handler);

  // See Bootstrap.
  void handleQuestions(QuestionHandlers handlers);
  bool ask(int peer, std::span<const std::byte> question, bool connects);
  // Where `peer` listens, for people.
  std::string addressOfPeer(int peer) const;

  // Stays in contact with a rank at a lower place, `uplink` at first, another one when it has left.
  // As every rank but the first has one, news reach all ranks whoever has left.
  void keepUplink(int uplink);

  using AddressTable = ConnectionPool::AddressTable;
  void learnAddresses(AddressTable addresses);
  // A place in a communicator that ranks of this one make under a number that they have for it.
  std::unique_ptr<Seat> takeSeat(uint64_t number, int color) const;
  const Members& members() const { return *members_; }
  // Whether this rank can connect to that one, or is connected.
  bool reaches(int peer) const;

  // The failure that another rank has sent, if there is one.
  std::optional<Failure> failure() const;

 private:
  using Lock = ConnectionPool::Lock;
  using Key = std::tuple<int, FrameKind, uint64_t>;  // peer, kind, tag

  struct Peer {
    bool isGreeted = false;   // by this rank
    bool hasGreeted = false;  // this rank
    std::optional<ConnectionPool::Gone> gone;
    std::optional<std::string> farewell;  // if it has left in an orderly manner
  };

  void deliver(int familyRank, Frame frame) override;
  void lose(int familyRank) override;
  void wake() override { changed_.notify_all(); }
  void tick() override { seekUplink(); }

  Peer& peerOf(int peer) { return peers_[peer]; }
  const Peer& peerOf(int peer) const;
  std::string describe(int peer) const;
  std::optional<std::vector<std::byte>> take(const Key& key);
  bool isAborted(Lock& lock) const;
  void throwIfReported() const;
  void throwIfEnded(bool aborted, const WaitRule& rule, std::string_view doing) const;
  void throwIfGone(int peer, bool evenIfOthersFailed) const;
  void throwIfCollectiveFailed(const Key& key) const;
  const std::optional<ConnectionPool::Gone>& goneOf(int peer) const;
  std::optional<std::string> farewellOf(int peer) const;
  Error errorOf(const Failure& failure) const;
  Error timeoutError(int peer, std::string_view what) const;
  void reportWait(int peer, const Wait& wait, Reminder& reminder) const;

  bool greet(int peer);
  bool seekContact(int peer);
  void trySeekContact(int peer);
  void awaitContact(int peer, const Wait& wait, const WaitRule& rule, Lock& lock);
  void contactToTell(int peer, Lock& lock);
  void endContact(int peer, std::string text, std::string_view deathText);
  std::vector<int> greetedPeers() const;
  void post(int peer, FrameKind kind, uint64_t tag, std::span<const std::byte> payload);
  void hearNews(int from, const Frame& frame);

  void seekUplink();
  void hearFailure(Failure failure);
  void hearDeparture(Departure departure, int from);
  void tell(int peer, const Failure& failure);
  void tellAll(const Failure& failure);
  void tell(int peer, const Departure& departure);
  void hearFailedCollective(uint64_t number, const Failure& failure);
  void tellFailedCollective(int peer, uint64_t number, const Failure& failure);

  const int rank_;
  const std::shared_ptr<const Members> members_;
  const std::shared_ptr<ConnectionPool> pool_;
  const Secret communicator_;
  const MailboxTimes times_;
  const std::function<bool()> aborted_;
  const std::shared_ptr<PeerWatcher> watcher_;

  std::mutex& mutex_;  // of the pool
  std::condition_variable changed_;
  std::map<int, Peer> peers_;  // those that anything is known of
  std::map<Key, std::deque<std::vector<std::byte>>> inbox_;
  std::map<uint64_t, MessageHandler> handlers_;  // of messages, by tag
  QuestionHandlers questionHandlers_;
  std::optional<Failure> failure_;  // of another rank
  std::optional<Failure> told_;     // what the others are told: the same, or a failure of this rank
  std::map<uint64_t, Failure> failedCollectives_;  // the last ones, by number
  std::optional<Departure> earliest_;  // of those who left, the one with the fewest collectives
  int uplink_ = -1;
  std::optional<Clock::time_point> seeksFrom_;  // when to look for another one
  bool leaving_ = false;                        // it takes part in nothing new
};

}  // namespace unisono::bootstrap
