#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "base/settings.h"
#include "bootstrap/unique_id.h"

namespace unisono::bootstrap {

class Mailbox;

// One rank's end of the network that the ranks of a communicator set themselves up with: TCP
// between every pair, connected when first used. Not fast and not for data.
//
// Every wait ends with Error(internalError) when `aborted` says so, with Error(timeout) after
// UNISONO_BOOTSTRAP_TIMEOUT and with Error(remoteError) when the peer is gone; both name the peer.
// send() and receive() may be called from any threads at once. Collectives (allGather, barrier) are
// called by every rank in the same order, by one thread of a rank at a time; after one of them
// fails, every rank gets the error that ended it and the object is only good for destruction.
class Bootstrap {
 public:
  // Meets the other ranks. `aborted` is called from any thread that waits, for the life of the
  // object. Throws Error(timeout) naming the ranks that did not come, Error(invalidUsage) when
  // ranks contradict each other, Error(remoteError) when the root is gone.
  static std::unique_ptr<Bootstrap> connect(const UniqueId& id, int rank, int ranks,
                                            const Settings& settings,
                                            std::function<bool()> aborted = {});
  ~Bootstrap();

  int rank() const { return rank_; }
  int size() const { return ranks_; }

  // `all` has size() parts of `bytesPerRank`; this rank's own is filled in, the others come.
  // size() * bytesPerRank is limited to 256 MiB.
  void allGather(std::span<std::byte> all, size_t bytesPerRank);
  // Every rank's value, by rank.
  template <typename T>
  std::vector<T> allGather(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(ranks_));
    all[static_cast<size_t>(rank_)] = value;
    allGather(std::as_writable_bytes(std::span(all)), sizeof(T));
    return all;
  }
  // Returns when every rank has called it.
  void barrier();

  // Hands over at most 1 MiB; never waits for the receiver. Messages of one sender with the same
  // tag arrive in order. `peer` may be this rank.
  void send(int peer, uint64_t tag, std::span<const std::byte> message);
  std::vector<std::byte> receive(int peer, uint64_t tag);

 private:
  Bootstrap(int rank, int ranks, std::unique_ptr<Mailbox> mailbox);

  void runCollective(std::span<std::byte> all, size_t bytesPerRank);
  void receivePart(int peer, uint64_t number, std::span<std::byte> into);
  void spreadFailure(const char* text) noexcept;
  void checkPeer(int peer) const;

  const int rank_;
  const int ranks_;
  std::unique_ptr<Mailbox> mailbox_;
  uint64_t collectives_ = 0;
};

}  // namespace unisono::bootstrap
