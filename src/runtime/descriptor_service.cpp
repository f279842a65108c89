// SPDX-License-Identifier: Apache-2.0
#include "runtime/descriptor_service.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/open_descriptor.h"
#include "base/thread.h"

namespace unisono::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using Token = std::array<std::byte, 16>;
using namespace std::chrono_literals;

// How long a caller may take to send its token, and how long a caller waits for the answer.
constexpr std::chrono::milliseconds kTokenTimeout = 1s;
constexpr std::chrono::milliseconds kAnswerTimeout = 10s;

// How many connections may wait for their token: few enough that they never use up the limit of
// open files.
size_t maxCallers() {
  return std::clamp<size_t>(maxDescriptors() / 8, 1, 256);
}

enum class Answer : uint8_t { here = 1, unknown = 2 };

void fillRandom(void* data, size_t bytes) {
  if (::getrandom(data, bytes, 0) != static_cast<ssize_t>(bytes)) {
    throw systemError(errno, "getrandom");
  }
}

// The address of an abstract socket: a zero byte, then the name.
struct Address {
  explicit Address(const std::array<char, 48>& name) {
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                    ::strnlen(name.data(), name.size()));
    value.sun_family = AF_UNIX;
    std::memcpy(value.sun_path + 1, name.data(), name.size());
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&value); }

  sockaddr_un value{};
  socklen_t length;
};

// Whether the process at the other end runs as our user.
bool isOurUser(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == ::geteuid();
}

void sendAnswer(int socket, Answer answer, int descriptor) {
  iovec data{&answer, sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (answer == Answer::here) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
  }
  // The caller may have closed the connection already, which harms nobody else.
  ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

UniqueDescriptor makeSocket() {
  return openDescriptor(
      [] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); },
      "socket(AF_UNIX)");
}

// "unisono-RANDOM-NAMESPACE": 96 random bits, and the network namespace in which the name is known.
std::array<char, 48> makeServiceName() {
  uint64_t first;
  uint32_t second;
  fillRandom(&first, sizeof(first));
  fillRandom(&second, sizeof(second));
  std::array<char, 48> name{};
  fmt::format_to_n(name.data(), name.size() - 1, "unisono-{:016x}{:08x}-{:x}", first, second,
                   networkNamespace());
  return name;
}

// Whether the name was made in the network namespace of this process.
bool isFromHere(const std::array<char, 48>& name) {
  return std::string_view(name.data(), ::strnlen(name.data(), name.size()))
      .ends_with(fmt::format("-{:x}", networkNamespace()));
}

Error noAnswer() {
  return Error(ErrorCode::timeout,
               fmt::format("The process that shares this memory did not answer in {} s",
                           std::chrono::seconds(kAnswerTimeout / 1000ms).count()))
      .remedy("Check whether that process is stopped");
}

class Service {
 public:
  Service() : name_(makeServiceName()), listener_(makeSocket()) {
    Address address(name_);
    if (::bind(listener_.get(), address.get(), address.length) != 0) {
      throw systemError(errno, "bind of the descriptor service");
    }
    if (::listen(listener_.get(), SOMAXCONN) != 0) {
      throw systemError(errno, "listen of the descriptor service");
    }
    startThread("unisono-share", [this] { run(); }).detach();
  }

  // Returns the service of this process; a forked child has one of its own. Services are never
  // destroyed, because their threads run until the process ends. So is the map, which threads may
  // still use during exit().
  static Service& get() {
    static std::mutex mutex;
    static auto& services = *new std::map<pid_t, Service*>;
    std::lock_guard lock(mutex);
    Service*& service = services[::getpid()];
    if (service == nullptr) service = new Service();
    return *service;
  }

  const std::array<char, 48>& name() const { return name_; }

  void add(const Token& token, int descriptor) {
    std::lock_guard lock(mutex_);
    offers_[token] = descriptor;
  }

  void remove(const Token& token) {
    std::lock_guard lock(mutex_);
    offers_.erase(token);
  }

 private:
  struct Caller {
    UniqueDescriptor socket;
    Clock::time_point deadline;
  };

  void run() {
    std::vector<pollfd> polls;
    while (true) {
      polls.assign(1, {listener_.get(), POLLIN, 0});
      for (const Caller& caller : callers_) polls.push_back({caller.socket.get(), POLLIN, 0});
      const int timeout = callers_.empty() ? -1 : 100;
      if (::poll(polls.data(), polls.size(), timeout) < 0 && errno != EINTR) {
        logWarn("The descriptor service ended: {}", std::strerror(errno));
        return;
      }
      const Clock::time_point now = Clock::now();
      size_t entry = 1;
      std::erase_if(callers_, [&](const Caller& caller) {
        const bool isReady = polls[entry++].revents != 0;
        return (isReady && serve(caller.socket.get())) || now >= caller.deadline;
      });
      if ((polls[0].revents & POLLIN) != 0) acceptAll();
    }
  }

  void acceptAll() {
    while (true) {
      UniqueDescriptor socket(tryOpenDescriptor([this] {
        return ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      }));
      if (!socket) {
        if (errno != EMFILE && errno != ENFILE) return;
        if (!callers_.empty()) {
          dropOldest();
          continue;
        }
        // The caller stays in the queue until this process has a descriptor for it.
        std::this_thread::sleep_for(10ms);
        return;
      }
      // Callers send their token at once, so most are served here and never wait in the list.
      if (!isOurUser(socket.get()) || serve(socket.get())) continue;
      if (callers_.size() >= maxCallers()) dropOldest();
      callers_.push_back({std::move(socket), Clock::now() + kTokenTimeout});
    }
  }

  // The oldest caller may have sent its token since it was last looked at. One that has not tries
  // again when its connection is closed (fetchDescriptor).
  void dropOldest() {
    serve(callers_.front().socket.get());
    callers_.pop_front();
  }

  // Answers the caller's token. Returns false if it has not arrived yet, and true when there is
  // nothing more to do for this caller.
  bool serve(int socket) {
    // One byte more than a token, to notice a message that is longer.
    std::array<std::byte, sizeof(Token) + 1> received;
    const ssize_t bytes = ::recv(socket, received.data(), received.size(), MSG_DONTWAIT);
    if (bytes < 0) return errno != EAGAIN && errno != EINTR;
    if (bytes != static_cast<ssize_t>(sizeof(Token))) return true;
    Token token;
    std::memcpy(token.data(), received.data(), sizeof(token));
    std::lock_guard lock(mutex_);
    const auto offer = offers_.find(token);
    const bool isHere = offer != offers_.end();
    sendAnswer(socket, isHere ? Answer::here : Answer::unknown, isHere ? offer->second : -1);
    return true;
  }

  const std::array<char, 48> name_;
  UniqueDescriptor listener_;
  std::deque<Caller> callers_;  // those that have not sent a token, oldest first
  std::mutex mutex_;
  std::map<Token, int> offers_;
};

class Offer final : public DescriptorOffer {
 public:
  explicit Offer(int descriptor) : service_(Service::get()) {
    ticket_.service = service_.name();
    fillRandom(ticket_.token.data(), ticket_.token.size());
    service_.add(ticket_.token, descriptor);
  }
  ~Offer() override { service_.remove(ticket_.token); }
  const DescriptorTicket& ticket() const override { return ticket_; }

 private:
  Service& service_;
  DescriptorTicket ticket_{};
};

// Explains that nobody listens at the service's address. Its name is known in one network namespace
// only, so a process in another one looks the same as one that has ended.
Error unreachable(const DescriptorTicket& ticket) {
  if (!isFromHere(ticket.service)) {
    return Error(ErrorCode::invalidUsage,
                 "The process that shares this memory runs in another network namespace, where "
                 "its descriptors cannot be fetched")
        .remedy(
            "Run all ranks of a machine in one network namespace (containers: use the host's "
            "network or that of one container)");
  }
  return Error(ErrorCode::remoteError, "The process that shares this memory has ended")
      .remedy("Look for the first error in the output of that process");
}

UniqueDescriptor connectTo(const DescriptorTicket& ticket, Clock::time_point deadline) {
  UniqueDescriptor socket = makeSocket();
  Address address(ticket.service);
  while (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == ENOENT) throw unreachable(ticket);
    // EAGAIN: the queue of the service is full.
    if (errno != EAGAIN && errno != EINTR) {
      throw systemError(errno, "connect to the process that shares memory");
    }
    if (Clock::now() >= deadline) throw noAnswer();
    std::this_thread::sleep_for(1ms);
  }
  if (!isOurUser(socket.get())) {
    throw Error(ErrorCode::remoteError,
                "The process that shares this memory belongs to another user")
        .remedy("Run all ranks of a machine as the same user");
  }
  return socket;
}

// Waits until there is something to read.
void waitForAnswer(int socket, Clock::time_point deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{socket, POLLIN, 0};
    const int ready = left.count() > 0 ? ::poll(&entry, 1, static_cast<int>(left.count())) : 0;
    if (ready > 0) return;
    if (ready == 0) throw noAnswer();
    if (errno != EINTR) throw systemError(errno, "poll");
  }
}

// Returns nothing when the service closed the connection without an answer, or when its descriptor
// did not fit into the limit of open files, which has then been raised.
std::optional<UniqueDescriptor> receiveDescriptor(int socket) {
  Answer answer{};
  iovec data{&answer, sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t bytes = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0 && errno != ECONNRESET) throw systemError(errno, "recvmsg");
  if (bytes <= 0) return std::nullopt;
  UniqueDescriptor descriptor;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    descriptor = UniqueDescriptor(received);
  }
  if (answer == Answer::unknown) {
    throw Error(ErrorCode::remoteError, "Shared memory is no longer offered, or never was")
        .remedy("Keep memory allocated while other ranks may map it");
  }
  if (!descriptor) {
    raiseDescriptorLimit();
    return std::nullopt;
  }
  return descriptor;
}

}  // namespace

std::unique_ptr<DescriptorOffer> offerDescriptor(int descriptor) {
  return std::make_unique<Offer>(descriptor);
}

UniqueDescriptor fetchDescriptor(const DescriptorTicket& ticket) {
  const Clock::time_point deadline = Clock::now() + kAnswerTimeout;
  while (true) {
    const UniqueDescriptor socket = connectTo(ticket, deadline);
    // When the other side closes the connection first, either its process has ended, which the next
    // attempt to connect shows, or it made room for other callers.
    if (::send(socket.get(), ticket.token.data(), ticket.token.size(), MSG_NOSIGNAL) >= 0) {
      waitForAnswer(socket.get(), deadline);
      if (auto descriptor = receiveDescriptor(socket.get())) return std::move(*descriptor);
    } else if (errno != EPIPE && errno != ECONNRESET) {
      throw systemError(errno, "send to the process that shares memory");
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::systemError, "The descriptor of shared memory did not arrive")
          .remedy("Raise the limit of open files of both processes (ulimit -n)");
    }
    std::this_thread::sleep_for(1ms);
  }
}

uint64_t networkNamespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/net", &status) == 0 ? status.st_ino & 0xffffffff : 0;
}

}  // namespace unisono::runtime
