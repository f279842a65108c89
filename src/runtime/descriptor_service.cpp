#include "runtime/descriptor_service.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

namespace unisono::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using Token = std::array<std::byte, 16>;
using namespace std::chrono_literals;

// How long a caller may take to show its token, and how long one waits for the service's answer.
constexpr std::chrono::milliseconds kCallerPatience = 5s;
constexpr std::chrono::milliseconds kAnswerPatience = 10s;
constexpr size_t kMaxCallers = 256;

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
  // A caller that went away is its own problem.
  ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

class Service {
 public:
  Service() {
    uint64_t random[2];
    fillRandom(random, sizeof(random));
    fmt::format_to_n(name_.data(), name_.size() - 1, "unisono-{:016x}{:014x}", random[0],
                     random[1] >> 8);
    listener_ =
        UniqueDescriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_) throw systemError(errno, "socket(AF_UNIX)");
    Address address(name_);
    if (::bind(listener_.get(), address.get(), address.length) != 0) {
      throw systemError(errno, "bind of the descriptor service");
    }
    if (::listen(listener_.get(), SOMAXCONN) != 0) {
      throw systemError(errno, "listen of the descriptor service");
    }
    startThread("unisono-share", [this] { run(); }).detach();
  }

  // The process's service; of a child process, its own. Never destroyed: its thread lives as long
  // as the process.
  static Service& get() {
    static std::mutex mutex;
    static std::map<pid_t, Service*> services;
    std::lock_guard lock(mutex);
    Service*& service = services[::getpid()];
    if (service == nullptr) service = new Service();
    return *service;
  }

  const std::array<char, 48>& name() const { return name_; }

  void add(const Token& token, int descriptor) {
    UniqueDescriptor copy(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (!copy) {
      throw systemError(errno, "duplicating the descriptor of shared memory")
          .remedy("Raise the limit of open files (ulimit -n)");
    }
    std::lock_guard lock(mutex_);
    offers_[token] = std::move(copy);
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
    std::vector<Caller> callers;
    std::vector<pollfd> polls;
    while (true) {
      polls.assign(1, {listener_.get(), short(callers.size() < kMaxCallers ? POLLIN : 0), 0});
      for (const Caller& caller : callers) polls.push_back({caller.socket.get(), POLLIN, 0});
      int timeout = callers.empty() ? -1 : 1000;
      if (::poll(polls.data(), polls.size(), timeout) < 0 && errno != EINTR) {
        logWarn("The descriptor service ended: {}", std::strerror(errno));
        return;
      }
      Clock::time_point now = Clock::now();
      for (size_t i = callers.size(); i-- > 0;) {
        bool isDone = polls[i + 1].revents != 0;
        if (isDone) serve(callers[i].socket.get());
        if (isDone || now >= callers[i].deadline) {
          callers[i] = std::move(callers.back());
          callers.pop_back();
        }
      }
      if ((polls[0].revents & POLLIN) != 0) accept(callers, now);
    }
  }

  void accept(std::vector<Caller>& callers, Clock::time_point now) {
    UniqueDescriptor socket(
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      // Out of descriptors: the caller stays queued; do not spin on it.
      if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(10ms);
      return;
    }
    if (isOurUser(socket.get())) callers.push_back({std::move(socket), now + kCallerPatience});
  }

  void serve(int socket) {
    // One byte more than a token, to notice what is longer.
    std::array<std::byte, sizeof(Token) + 1> received;
    ssize_t bytes = ::recv(socket, received.data(), received.size(), MSG_DONTWAIT);
    if (bytes != static_cast<ssize_t>(sizeof(Token))) return;
    Token token;
    std::memcpy(token.data(), received.data(), sizeof(token));
    std::lock_guard lock(mutex_);
    auto offer = offers_.find(token);
    bool isHere = offer != offers_.end();
    sendAnswer(socket, isHere ? Answer::here : Answer::unknown, isHere ? offer->second.get() : -1);
  }

  std::array<char, 48> name_{};
  UniqueDescriptor listener_;
  std::mutex mutex_;
  std::map<Token, UniqueDescriptor> offers_;
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

Error processEnded() {
  return Error(ErrorCode::remoteError, "The process that shares this memory has ended")
      .remedy("Look at that process's output for why it ended");
}

UniqueDescriptor connectTo(const DescriptorTicket& ticket, Clock::time_point deadline) {
  UniqueDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw systemError(errno, "socket(AF_UNIX)");
  Address address(ticket.service);
  while (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == ENOENT) throw processEnded();
    // EAGAIN: more callers wait than the service's queue holds.
    if (errno != EAGAIN && errno != EINTR) {
      throw systemError(errno, "connect to the process that shares memory");
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::timeout, "The process that shares this memory takes no calls");
    }
    std::this_thread::sleep_for(1ms);
  }
  if (!isOurUser(socket.get())) {
    throw Error(ErrorCode::remoteError, "The process that shares this memory is another user's")
        .remedy("Run all ranks of a host as one user");
  }
  return socket;
}

// Waits until there is something to read.
void waitForAnswer(int socket, Clock::time_point deadline) {
  while (true) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{socket, POLLIN, 0};
    int ready = left.count() > 0 ? ::poll(&entry, 1, static_cast<int>(left.count())) : 0;
    if (ready > 0) return;
    if (ready == 0) {
      throw Error(ErrorCode::timeout,
                  fmt::format("The process that shares this memory did not answer in {} s",
                              std::chrono::seconds(kAnswerPatience / 1000ms).count()))
          .remedy("See whether that process is stopped");
    }
    if (errno != EINTR) throw systemError(errno, "poll");
  }
}

UniqueDescriptor receiveDescriptor(int socket) {
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
  UniqueDescriptor descriptor;
  if (bytes > 0) {
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof(int))) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header), sizeof(received));
      descriptor = UniqueDescriptor(received);
    }
  }
  if (bytes <= 0) throw processEnded();
  if (answer == Answer::unknown) {
    throw Error(ErrorCode::remoteError, "Shared memory is no longer offered, or never was")
        .remedy("Keep memory allocated while other ranks may map it");
  }
  if (!descriptor) {
    throw Error(ErrorCode::systemError, "The descriptor of shared memory did not arrive")
        .remedy("Raise the limit of open files (ulimit -n)");
  }
  return descriptor;
}

}  // namespace

std::unique_ptr<DescriptorOffer> offerDescriptor(int descriptor) {
  return std::make_unique<Offer>(descriptor);
}

UniqueDescriptor fetchDescriptor(const DescriptorTicket& ticket) {
  Clock::time_point deadline = Clock::now() + kAnswerPatience;
  UniqueDescriptor socket = connectTo(ticket, deadline);
  if (::send(socket.get(), ticket.token.data(), ticket.token.size(), MSG_NOSIGNAL) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) throw processEnded();
    throw systemError(errno, "send to the process that shares memory");
  }
  waitForAnswer(socket.get(), deadline);
  return receiveDescriptor(socket.get());
}

}  // namespace unisono::runtime
