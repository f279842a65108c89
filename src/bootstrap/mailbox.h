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
#include <thread>
#include <tuple>
#include <vector>

#include "bootstrap/rendezvous.h"

namespace unisono::bootstrap {

// Messages between the ranks of one communicator, over TCP.
//
// A pair of ranks shares one connection, opened by whoever sends first; when both open one at
// once, each keeps sending on the one it chose first, so that messages of a sender stay in order.
// Nobody reads in the background: a thread that waits in receive() reads for all threads of its
// rank, and one of the others takes over when it leaves. What the kernel does not take at once is
// written by a thread that exists only while there is such a rest, so that send() never waits for
// the receiver.
class Mailbox {
 public:
  Mailbox(int rank, Membership membership, std::chrono::milliseconds timeout,
          std::function<bool()> aborted);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  // Writes what send() has left, for kDrainTimeout at most, and closes every connection.
  ~Mailbox();

  // Throws Error(remoteError) when the peer cannot be reached: with the failure that a rank has
  // sent, or else naming the peer.
  void send(int peer, FrameKind kind, uint64_t tag, std::span<const std::byte> payload);
  // Makes every wait of the peer end with this text. Takes a second at most.
  void sendFailure(int peer, std::string_view text);
  // The oldest message of this peer, kind and tag. Throws Error(remoteError) when the peer is gone
  // or has sent a failure, Error(timeout) when nothing comes; both name the peer.
  std::vector<std::byte> receive(int peer, FrameKind kind, uint64_t tag);

  // Longest that the destructor waits for a receiver that does not read.
  static constexpr std::chrono::seconds kDrainTimeout{5};

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Key = std::tuple<int, FrameKind, uint64_t>;  // peer, kind, tag

  struct Connection {
    Connection(Socket connected, const Secret& secret, std::chrono::milliseconds timeout);
    Socket socket;
    FrameReader reader;
    Clock::time_point deadline;  // for a stranger to show who it is
    std::optional<int> peer;     // nothing: a stranger
    bool open = true;
    std::deque<std::vector<std::byte>> unsent;
    size_t unsentOffset = 0;  // bytes of the first that are sent
  };
  using ConnectionPointer = std::shared_ptr<Connection>;

  struct Peer {
    ConnectionPointer out;  // what we send on, once chosen
    bool connecting = false;
    int openConnections = 0;
    std::optional<Clock::time_point> goneSince;
  };

  std::optional<std::vector<std::byte>> take(const Key& key);
  void throwIfReported() const;
  void throwIfHopeless(int peer, Clock::time_point now) const;
  void makeProgress(Lock& lock, const Wait& wait);
  void acceptAll();
  void readFrom(const ConnectionPointer& connection);
  void deliver(const ConnectionPointer& connection, Frame frame);
  void refuse(const ConnectionPointer& connection, std::string_view reason);
  void drop(const ConnectionPointer& connection);
  void expireStrangers();
  void sendWithin(std::chrono::milliseconds limit, int peer, FrameKind kind, uint64_t tag,
                  std::span<const std::byte> payload);
  ConnectionPointer connectionTo(int peer, std::chrono::milliseconds limit, Lock& lock);
  ConnectionPointer connectTo(int peer, std::chrono::milliseconds limit) const;
  void add(const ConnectionPointer& connection);
  void introduce(const ConnectionPointer& connection, int peer);
  void writeUnsent(const ConnectionPointer& connection);
  std::vector<ConnectionPointer> unsentConnections() const;
  void startWriter();
  void writerLoop();

  const int rank_;
  const std::vector<Address> addresses_;
  const Secret session_;
  const std::chrono::milliseconds timeout_;
  const std::function<bool()> aborted_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Poller poller_;
  Listener listener_;
  bool polling_ = false;                          // a thread is reading for all
  std::map<int, ConnectionPointer> connections_;  // by descriptor
  std::vector<ConnectionPointer> strangers_;      // oldest first
  std::vector<Peer> peers_;
  std::map<Key, std::deque<std::vector<std::byte>>> inbox_;
  std::optional<std::pair<int, std::string>> failure_;  // who told us of it, and the text
  std::thread writer_;
  bool writing_ = false;
  bool closing_ = false;
};

}  // namespace unisono::bootstrap
