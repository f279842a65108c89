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

#include "bootstrap/peer_watcher.h"
#include "bootstrap/reactor.h"
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
  // Only the peer matters and `check`, not failures of other ranks or an abort of the mailbox.
  bool evenAfterFailure = false;
};

// What ends a communicator: an error that `rank` reports, or its end without a departure.
struct Failure {
  int rank;
  std::string text;
  bool isDeath = false;
};

// Messages between the ranks of one communicator, over TCP.
//
// A pair of ranks shares one connection, opened by whichever sends first. When both open one at
// once, each keeps sending on the one that it had first, so that messages of a sender stay in
// order. The reactor's thread accepts, reads and writes, so ranks can connect to each other in any
// order, also while the other rank is in no call.
//
// The side that opens a connection says hello and sends nothing but news (failures, departures)
// until it is welcomed. Before that the other side may have closed the connection to make room for
// others, or the system may have lost it (a full accept queue); nothing is lost then, and the first
// side tries again.
//
// A rank whose last connection to this one closes without a departure has died. The first failure
// or death that a rank hears of is passed on over all its connections. Those of the all-gathers at
// init form a tree, so every rank hears of it.
class Mailbox final : private Reactor::Handler {
 public:
  Mailbox(int rank, Membership membership, const MailboxTimes& times, std::function<bool()> aborted,
          std::shared_ptr<PeerWatcher> watcher = {});
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  // Writes what send() has left, for kDrainTimeout at most, and closes every connection.
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

  // Keeps a connection to a lower rank, `uplink` at first, another one when it has left. As every
  // rank but the lowest has one, news reach all ranks whoever has left.
  void keepUplink(int uplink);

  // Where all ranks listen, by rank. Until then a rank of which nothing is known must connect
  // first.
  using AddressTable = std::shared_ptr<const std::vector<Address>>;
  void learnAddresses(AddressTable addresses);
  // Where this rank listens, and how it reads the addresses of others.
  const Address& address() const { return listener_.address(); }
  const std::function<Address(const Address&)>& localize() const { return localize_; }
  // Whether this rank can connect to that one, or is connected.
  bool reaches(int peer) const;

  // The failure that another rank has sent, if there is one.
  std::optional<Failure> failure() const;

  // How long the destructor waits for a receiver that does not read.
  static constexpr std::chrono::seconds kDrainTimeout{5};

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Key = std::tuple<int, FrameKind, uint64_t>;  // peer, kind, tag

  enum class Stage { connecting, greeting, open, closed };

  // After a failed attempt to connect.
  static constexpr std::chrono::milliseconds kConnectPause{20};

  struct PeerSocket {
    PeerSocket(Socket opened, const Secret& secret);
    Socket socket;
    FrameReader reader;
    Stage stage = Stage::greeting;
    std::optional<int> peer;           // nothing: a stranger
    std::optional<Stranger> stranger;  // while it is one
    Clock::time_point deadline;        // for a stranger to say hello
    std::deque<std::vector<std::byte>> unsent;
    size_t unsentOffset = 0;  // bytes of the first that are sent
    bool watchesWrite = false;
  };
  using PeerSocketPointer = std::shared_ptr<PeerSocket>;

  struct Peer {
    PeerSocketPointer out;      // where messages are sent, once one is open
    PeerSocketPointer attempt;  // the one that we are opening
    Clock::time_point nextAttempt = {};
    int rejections = 0;  // connections in a row that it closed without a welcome
    int openConnections = 0;
    std::optional<Clock::time_point> goneSince;
    std::string goneText;
    std::string name;                     // of its process, once it is known
    std::optional<std::string> farewell;  // if it has left in an orderly manner
  };

  void serve(int descriptor) override;
  void tick() override;

  Peer& peerOf(int peer) { return peers_[peer]; }
  const Peer& peerOf(int peer) const;
  // Nothing while it is not known.
  const Address* addressOf(int peer) const;
  std::string addressText(int peer) const;
  std::optional<std::vector<std::byte>> take(const Key& key);
  void throwIfReported() const;
  void throwIfEnded(const Wait& wait, const WaitRule& rule, std::string_view doing) const;
  void throwIfGone(int peer, bool evenIfOthersFailed) const;
  void throwIfCollectiveFailed(const Key& key) const;
  Error errorOf(const Failure& failure) const;
  std::string describe(int peer) const;
  Error timeoutError(int peer, std::string_view what) const;
  void reportWait(int peer, const Wait& wait, Reminder& reminder) const;

  void acceptAll();
  void readEverything();
  void readFrom(const PeerSocketPointer& connection);
  void deliver(const PeerSocketPointer& connection, Frame frame);
  void identify(const PeerSocketPointer& connection, int sender);
  void refuse(const PeerSocketPointer& connection, std::string_view reason);
  void drop(const PeerSocketPointer& connection);
  void makeRoomForStranger();
  void introduce(const PeerSocketPointer& connection, FrameKind kind);
  void welcomed(const PeerSocketPointer& connection);
  void enqueue(const PeerSocketPointer& connection, const FrameHeader& header,
               std::span<const std::byte> payload);
  void writeUnsent(const PeerSocketPointer& connection);
  bool hasUnsent() const;

  PeerSocketPointer connectionTo(int peer, const Wait& wait, const WaitRule& rule, Lock& lock);
  void connectToTell(int peer, Lock& lock);
  void seekUplink();
  void startAttempt(int peer);
  void finishConnecting(const PeerSocketPointer& connection);
  void markGone(int peer, std::string text);
  void hearFailure(Failure failure);
  void hearDeparture(Departure departure, int from);
  void tell(const PeerSocketPointer& connection, const Failure& failure);
  void tellAll(const Failure& failure);
  void tell(const PeerSocketPointer& connection, const Departure& departure);
  void hearFailedCollective(uint64_t number, const Failure& failure);
  void tellFailedCollective(const PeerSocketPointer& connection, uint64_t number,
                            const Failure& failure);
  static bool isIntroduced(const PeerSocket& connection);
  std::vector<PeerSocketPointer> introducedConnections() const;
  void sendOn(const PeerSocketPointer& connection, int peer, FrameKind kind, uint64_t tag,
              std::span<const std::byte> payload);

  const int rank_;
  const int ranks_;
  const std::map<int, Address> neighbours_;
  const std::function<Address(const Address&)> localize_;
  const Secret session_;
  const MailboxTimes times_;
  const std::function<bool()> aborted_;
  const std::string name_;
  Reactor& reactor_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Listener listener_;
  std::optional<Stranger> paused_;  // while there is no descriptor for a connection in the queue
  std::map<int, PeerSocketPointer> connections_;  // by descriptor
  std::deque<PeerSocketPointer> strangers_;       // oldest first
  AddressTable addresses_;                        // null while it is not known
  std::map<int, Peer> peers_;                     // those that anything is known of
  std::map<Key, std::deque<std::vector<std::byte>>> inbox_;
  std::map<uint64_t, MessageHandler> handlers_;  // of messages, by tag
  QuestionHandlers questionHandlers_;
  std::optional<Failure> failure_;  // of another rank
  std::optional<Failure> told_;     // what the others are told: the same, or a failure of this rank
  std::map<uint64_t, Failure> failedCollectives_;  // the last ones, by number
  std::optional<Departure> earliest_;  // of those who left, the one with the fewest collectives
  int uplink_ = -1;
  std::optional<Clock::time_point> seeksFrom_;  // when to look for another one
  bool leaving_ = false, left_ = false;         // it ends; it has said so
  const std::shared_ptr<PeerWatcher> watcher_;
  uint32_t number_ = 0;  // with the reactor
};

}  // namespace unisono::bootstrap
