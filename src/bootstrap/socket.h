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
};

// A listening TCP socket, non-blocking and close-on-exec.
class Listener {
 public:
  Listener() = default;
  // Binds to `address`; port 0 takes a free one. Throws Error(systemError) with a remedy; when the
  // address is in use, tries again until `wait` expires.
  Listener(const Address& address, const Wait& wait);
  Listener(Listener&&) = default;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener() { close(); }

  int descriptor() const { return descriptor_.get(); }
  explicit operator bool() const { return static_cast<bool>(descriptor_); }
  const Address& address() const { return address_; }
  // The next caller, or nothing when nobody waits.
  std::optional<Socket> accept() const;
  // Who waits unaccepted is reset.
  void close();

 private:
  UniqueDescriptor descriptor_;
  Address address_;
};

// Waits for many descriptors at once. One thread waits; any thread may add and remove meanwhile.
class Poller {
 public:
  enum class Interest { read, write };

  Poller();
  void add(int descriptor, Interest interest = Interest::read) const;
  void setInterest(int descriptor, Interest interest) const;
  void remove(int descriptor) const;
  // The descriptors that are ready; empty after `timeout` or a signal.
  std::vector<int> wait(std::chrono::milliseconds timeout) const;

 private:
  UniqueDescriptor descriptor_;
};

}  // namespace unisono::bootstrap
