// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "base/error.h"
#include "base/open_descriptor.h"

namespace unisono::bootstrap {
namespace {

UniqueDescriptor makeSocket(AddressFamily family) {
  const int domain = family == AddressFamily::ipv4 ? AF_INET : AF_INET6;
  return openDescriptor(
      [&] { return ::socket(domain, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }, "socket");
}

void setOption(int descriptor, int level, int option, int value = 1) {
  ::setsockopt(descriptor, level, option, &value, sizeof(value));
}

void sleepFor(int descriptor, short events, const Wait& wait) {
  pollfd entry = {descriptor, events, 0};
  ::poll(&entry, 1, static_cast<int>(wait.slice().count()));
}

template <typename Call>
Address addressBy(Call call, int descriptor) {
  SystemAddress address;
  address.length = sizeof(address.storage);
  if (call(descriptor, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
    return {};
  }
  return fromSystem(address.pointer());
}

bool wouldBlock(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

}  // namespace

Socket Socket::adopt(UniqueDescriptor descriptor) {
  Socket result;
  setOption(descriptor.get(), IPPROTO_TCP, TCP_NODELAY);
  // Waits for other ranks have no limit, so the system must find out when a machine has died or the
  // network to it is cut: it probes after a minute of silence and gives up a minute later.
  setOption(descriptor.get(), SOL_SOCKET, SO_KEEPALIVE);
  setOption(descriptor.get(), IPPROTO_TCP, TCP_KEEPIDLE, 60);
  setOption(descriptor.get(), IPPROTO_TCP, TCP_KEEPINTVL, 10);
  setOption(descriptor.get(), IPPROTO_TCP, TCP_KEEPCNT, 6);
  result.descriptor_ = std::move(descriptor);
  return result;
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::move(other.descriptor_);
    startError_ = other.startError_;
  }
  return *this;
}

Socket Socket::startConnecting(const Address& address) {
  Socket result = adopt(makeSocket(address.family));
  const SystemAddress target = toSystem(address);
  if (::connect(result.descriptor(), target.pointer(), target.length) != 0 &&
      errno != EINPROGRESS && errno != EINTR) {
    result.startError_ = errno;
  }
  return result;
}

int Socket::finishConnecting() const {
  if (startError_ != 0) return startError_;
  int error = 0;
  socklen_t length = sizeof(error);
  ::getsockopt(descriptor(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return error;
  // Where nobody listens on a local port, TCP can connect a socket to itself.
  return localAddress() == peerAddress() ? ECONNREFUSED : 0;
}

std::optional<Socket> Socket::connect(const Address& address, const Wait& wait, int& error) {
  Socket result = startConnecting(address);
  while (result.startError_ == 0) {
    wait.throwIfAborted("connecting to " + address.text());
    pollfd entry = {result.descriptor(), POLLOUT, 0};
    if (::poll(&entry, 1, static_cast<int>(wait.slice().count())) > 0) break;
    if (wait.isExpired()) {
      error = ETIMEDOUT;
      return std::nullopt;
    }
  }
  error = result.finishConnecting();
  if (error != 0) return std::nullopt;
  return result;
}

Address Socket::localAddress() const {
  return addressBy(::getsockname, descriptor());
}
Address Socket::peerAddress() const {
  return addressBy(::getpeername, descriptor());
}

Transfer Socket::read(std::span<std::byte> into) const {
  if (into.empty()) return {};
  ssize_t count = ::recv(descriptor(), into.data(), into.size(), 0);
  if (count > 0) return {static_cast<size_t>(count), false, 0};
  if (count == 0) return {0, true, 0};
  if (wouldBlock(errno)) return {};
  return {0, true, errno};
}

Transfer Socket::write(std::span<const std::byte> from) const {
  if (from.empty()) return {};
  ssize_t count = ::send(descriptor(), from.data(), from.size(), MSG_NOSIGNAL);
  if (count >= 0) return {static_cast<size_t>(count), false, 0};
  if (wouldBlock(errno)) return {};
  return {0, true, errno};
}

void Socket::sleepUntilReadable(const Wait& wait) const {
  sleepFor(descriptor(), POLLIN, wait);
}
void Socket::sleepUntilWritable(const Wait& wait) const {
  sleepFor(descriptor(), POLLOUT, wait);
}

void Socket::shutdown() const {
  ::shutdown(descriptor(), SHUT_RDWR);
}

void Socket::close() {
  if (!descriptor_) return;
  shutdown();
  descriptor_.reset();
}

Listener::Listener(const Address& address, const Wait& wait, int backlog) {
  const SystemAddress target = toSystem(address);
  for (;;) {
    UniqueDescriptor candidate = makeSocket(address.family);
    // Connections of a root that ended a moment ago may still linger on a fixed port.
    if (address.port != 0) setOption(candidate.get(), SOL_SOCKET, SO_REUSEADDR);
    int error = 0;
    if (::bind(candidate.get(), target.pointer(), target.length) != 0 ||
        ::listen(candidate.get(), backlog) != 0) {
      error = errno;
    }
    if (error == 0) {
      descriptor_ = std::move(candidate);
      break;
    }
    wait.throwIfAborted("listening at " + address.text());
    if (error == EADDRINUSE && !wait.isExpired()) {
      std::this_thread::sleep_for(std::min(wait.slice(), std::chrono::milliseconds(10)));
      continue;
    }
    throw systemError(error, "Listening at " + address.text())
        .remedy(error == EADDRINUSE
                    ? "Another program uses this port: choose another one"
                    : "The address must be one of this machine's: check NCCL_SOCKET_IFNAME, and "
                      "NCCL_COMM_ID, which must name the machine of rank 0");
  }
  address_ = addressBy(::getsockname, descriptor());
}

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::move(other.descriptor_);
    address_ = other.address_;
  }
  return *this;
}

std::optional<Socket> Listener::accept() const {
  const int descriptor = tryOpenDescriptor([this] {
    return ::accept4(this->descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  });
  if (descriptor >= 0) return Socket::adopt(UniqueDescriptor(descriptor));
  // Every other error means that the connection has ended already.
  if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
    throwNoDescriptor(errno, "accept");
  }
  return std::nullopt;
}

void Listener::close() {
  if (!descriptor_) return;
  ::shutdown(descriptor(), SHUT_RDWR);
  descriptor_.reset();
}

Poller::Poller() {
  descriptor_ = openDescriptor([] { return ::epoll_create1(EPOLL_CLOEXEC); }, "epoll_create1");
}

namespace {

epoll_event eventFor(int descriptor, Poller::Interest interest, uint32_t owner) {
  epoll_event event = {};
  if (interest != Poller::Interest::write) event.events |= EPOLLIN;
  if (interest != Poller::Interest::read) event.events |= EPOLLOUT;
  event.data.u64 = uint64_t{owner} << 32 | static_cast<uint32_t>(descriptor);
  return event;
}

}  // namespace

void Poller::add(int descriptor, Interest interest, uint32_t owner) const {
  epoll_event event = eventFor(descriptor, interest, owner);
  if (::epoll_ctl(descriptor_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
    throw systemError(errno, "epoll_ctl");
  }
}

void Poller::setInterest(int descriptor, Interest interest, uint32_t owner) const {
  epoll_event event = eventFor(descriptor, interest, owner);
  if (::epoll_ctl(descriptor_.get(), EPOLL_CTL_MOD, descriptor, &event) != 0) {
    throw systemError(errno, "epoll_ctl");
  }
}

void Poller::remove(int descriptor) const {
  ::epoll_ctl(descriptor_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
}

std::vector<Poller::Ready> Poller::wait(std::chrono::milliseconds timeout) const {
  epoll_event events[64];
  int count = ::epoll_wait(descriptor_.get(), events, 64, static_cast<int>(timeout.count()));
  std::vector<Ready> ready;
  for (int i = 0; i < count; i++) {
    ready.push_back({static_cast<int>(events[i].data.u64 & 0xffffffff),
                     static_cast<uint32_t>(events[i].data.u64 >> 32)});
  }
  return ready;
}

}  // namespace unisono::bootstrap
