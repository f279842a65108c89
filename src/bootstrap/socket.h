// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/unique_descriptor.h"
#include "bootstrap/address.h"
#include "bootstrap/wait.h"

namespace unisono::bootstrap {

// What one non-blocking read or write did.
struct Transfer {
  size_t bytes = 0;     // 0 when nothing could be moved now
  bool closed = false;  // the other side is gone
  int error = 0;        // errno that says why, or 0 for an orderly end
};

// A connected TCP socket: non-blocking, close-on-exec, without Nagle's delay, never raising
// SIGPIPE. Closing shuts the connection down first, so that it also ends when a forked child
// still holds a copy of the descriptor.
class Socket {
 public:
  Socket() = default;
  Socket(Socket&&) = default;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { close(); }

  // Takes over a connected descriptor.
  static Socket adopt(UniqueDescriptor descriptor);
  // Starts to connect. The socket becomes writable when finishConnecting() can tell the outcome.
  // Throws Error(systemError) when no socket can be made.
  static Socket startConnecting(const Address& address);
  // Returns 0 once the connection stands, or else errno's value.
  int finishConnecting() const;
  // Tries once; on failure returns nothing and leaves errno's value in `error` (ETIMEDOUT when the
  // wait expired). Throws when the wait is aborted or no socket can be made.
  static std::optional<Socket> connect(const Address& address, const Wait& wait, int& error);

  int descriptor() const { return descriptor_.get(); }
  Address localAddress() const;
  Address peerAddress() const;

  Transfer read(std::span<std::byte> into) const;
  Transfer write(std::span<const std::byte> from) const;
  // Sleeps until the socket can be read (or written), at most one slice of `wait`.
  void sleepUntilReadable(const Wait& wait) const;
  void sleepUntilWritable(const Wait& wait) const;

  // Ends the connection in both directions but keeps the descriptor, which other threads may hold.
  void shutdown() const;
  void close();

 private:
  UniqueDescriptor descriptor_;
  int startError_ = 0;  // of startConnecting()
};

// A listening TCP socket, non-blocking and close-on-exec.
class Listener {
 public:
  Listener() = default;
  // Binds to `address`; port 0 takes a free one. Throws Error(systemError) with a remedy; when the
  // address is in use, tries again until `wait` expires. `backlog` is how many connections the
  // kernel keeps until they are accepted.
  Listener(const Address& address, const Wait& wait, int backlog = kMaxBacklog);
  Listener(Listener&&) = default;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener() { close(); }

  int descriptor() const { return descriptor_.get(); }
  explicit operator bool() const { return static_cast<bool>(descriptor_); }
  const Address& address() const { return address_; }
  // Returns the next connection, or nothing when there is none. Throws Error(systemError) when this
  // process or the system is out of descriptors or memory; the connection then stays in the queue.
  std::optional<Socket> accept() const;
  // Resets the connections that were not accepted.
  void close();

  static constexpr int kMaxBacklog = 1 << 16;  // the system's own limit (somaxconn) applies

 private:
  UniqueDescriptor descriptor_;
  Address address_;
};

// Waits for many descriptors at once. One thread waits; any thread may add and remove descriptors.
class Poller {
 public:
  enum class Interest { read, write, both };
  struct Ready {
    int descriptor;
    uint32_t owner;  // as given to add()
  };

  Poller();
  void add(int descriptor, Interest interest = Interest::read, uint32_t owner = 0) const;
  void setInterest(int descriptor, Interest interest, uint32_t owner = 0) const;
  void remove(int descriptor) const;
  // The descriptors that are ready; empty after `timeout` (negative: none) or a signal.
  std::vector<Ready> wait(std::chrono::milliseconds timeout) const;

 private:
  UniqueDescriptor descriptor_;
};

}  // namespace unisono::bootstrap
