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
#include <utility>
#include <vector>

#include "bootstrap/reactor.h"
#include "bootstrap/rendezvous.h"

namespace unisono::bootstrap {

// The connections of one rank to other ranks, over TCP. They serve all communicators of a family:
// one that was made from unique ids, and those that were split or shrunk from members of the
// family. Ranks have the numbers here that they have in the first communicator. The pool lives as
// long as a communicator of this rank uses it.
//
// A pair of ranks shares one connection, opened by whichever sends first. When both open one at
// once, each keeps sending on the one that it had first, so that messages of a sender stay in
// order. The reactor's thread accepts, reads and writes, so ranks can connect to each other in any
// order, also while the other rank is in no call.
//
// The side that opens a connection says hello and sends nothing until it is welcomed. Before that
// the other side may have closed the connection to make room for others, or the system may have
// lost it (a full accept queue); nothing is lost then, and the first side tries again.
//
// A frame names its communicator by the second half of its secret; the first half is that of the
// family. Who is greeted in a communicator that it is not in, because it has left it or could not
// join it, says so.
class ConnectionPool final : private Reactor::Handler {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // The end of a communicator at this rank. Its functions are called by any thread, with the lock
  // held; `peer` is a number of the pool.
  class User {
   public:
    // Throws Error where the frame makes no sense: then the connection is closed.
    virtual void deliver(int peer, Frame frame) = 0;
    // The last connection with this peer was closed.
    virtual void lose(int peer) = 0;
    // Who waits for a connection must look again.
    virtual void wake() = 0;
    // Every Reactor::kTick while one is requested.
    virtual void tick() = 0;

   protected:
    ~User() = default;
  };

  ConnectionPool(int rank, Membership membership);
  ConnectionPool(const ConnectionPool&) = delete;
  ConnectionPool& operator=(const ConnectionPool&) = delete;
  ~ConnectionPool();
  // From now on connections are accepted.
  void start();

  // The secret of the first communicator.
  const Secret& session() const { return session_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // Guards the pool and its users. What follows is called with it held.
  std::mutex& mutex() { return mutex_; }

  // Replaces the user of this communicator, if there is one.
  void add(const Secret& communicator, User& user);
  // Nothing is delivered from now on. The last user waits, without the lock, until what was sent is
  // written, for kDrainTimeout at most and not when `aborted` returns true.
  void remove(const Secret& communicator, const std::function<bool()>& aborted, Lock& lock);
  static constexpr std::chrono::seconds kDrainTimeout{5};

  bool isConnected(int peer) const;
  // Starts to connect, if the address is known and no attempt is under way or was made just now.
  // Throws Error(systemError) when no socket can be made.
  void approach(int peer);
  // The next attempt comes in a minute.
  void postpone(int peer);
  // Sends to a peer that is connected; does nothing otherwise. It may not be connected any more
  // when this returns.
  void send(int peer, const FrameHeader& header, std::span<const std::byte> payload);
  size_t unsentFrames(int peer) const;
  // Reads what has arrived but was not noticed by the reactor's thread yet.
  void readEverything();
  void requestTick() { reactor_.requestTick(); }

  // Why a peer cannot be reached, and since when.
  struct Gone {
    Clock::time_point since;
    std::string text;
  };
  const std::optional<Gone>& goneOf(int peer) const;
  // Where all ranks listen, by rank. Until then a rank of which nothing is known must connect
  // first.
  using AddressTable = std::shared_ptr<const std::vector<Address>>;
  void learnAddresses(AddressTable addresses);
  // Nothing while it is not known.
  const Address* addressOf(int peer) const;
  // For people: "process 17 on host n1", or the address while the name is not known.
  std::string describe(int peer) const;

 private:
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
    PeerSocketPointer out;      // where frames are sent, once one is open
    PeerSocketPointer attempt;  // the one that we are opening
    Clock::time_point nextAttempt = {};
    int rejections = 0;  // connections in a row that it closed without a welcome
    int openConnections = 0;
    std::optional<Gone> gone;
    std::string name;  // of its process, once it is known
  };

  void serve(int descriptor) override;
  void tick() override;

  Peer& peerOf(int peer) { return peers_[peer]; }
  const Peer& peerOf(int peer) const;
  std::string addressText(int peer) const;
  void wakeUsers();

  void acceptAll();
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
  void startAttempt(int peer);
  void finishConnecting(const PeerSocketPointer& connection);
  void markGone(int peer, std::string text);

  const int rank_;
  const int ranks_;
  const std::map<int, Address> neighbours_;
  const std::function<Address(const Address&)> localize_;
  const Secret session_;
  const std::string name_;
  Reactor& reactor_;

  std::mutex mutex_;
  std::condition_variable drained_;
  Listener listener_;
  // Set while the process has no descriptor left to accept a connection that waits.
  std::optional<Stranger> paused_;
  std::map<int, PeerSocketPointer> connections_;  // by descriptor
  std::deque<PeerSocketPointer> strangers_;       // oldest first
  AddressTable addresses_;                        // null while it is not known
  std::map<int, Peer> peers_;                     // those that anything is known of
  std::map<uint64_t, User*> users_;               // by the second half of the secret
  bool closing_ = false;                          // the last user has gone
  uint32_t number_ = 0;                           // with the reactor
};

// The place of this rank in a communicator that is being made: keeps what others send until a
// mailbox takes it over. Who can be greeted by another rank must have one.
class Seat final : private ConnectionPool::User {
 public:
  Seat(std::shared_ptr<ConnectionPool> pool, const Secret& communicator);
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;
  // Unless it was taken over, those who have greeted this rank hear that it does not take part.
  ~Seat();

  const std::shared_ptr<ConnectionPool>& pool() const { return pool_; }
  const Secret& communicator() const { return communicator_; }
  // With the lock held: delivers to `user` what has arrived, and all that follows.
  void handOver(ConnectionPool::User& user);

 private:
  void deliver(int peer, Frame frame) override;
  void lose(int peer) override;
  void wake() override {}
  void tick() override {}

  const std::shared_ptr<ConnectionPool> pool_;
  const Secret communicator_;
  bool isTaken_ = false;
  // In the order of arrival; nothing: the peer was lost.
  std::vector<std::pair<int, std::optional<Frame>>> early_;
};

}  // namespace unisono::bootstrap
