// SPDX-License-Identifier: Apache-2.0
// Limits of open files, and connections that use them up. Each test runs in a child process, which
// may set limits and enter namespaces of its own; the parent never starts a thread.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/open_descriptor.h"
#include "bootstrap/reactor.h"
#include "bootstrap/root_service.h"
#include "bootstrap_testing.h"
#include "runtime/descriptor_service.h"
#include "runtime/host/segment.h"

namespace unisono {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr int kCannot = 77;  // a child's status: the system does not allow what the test needs

// Runs `body` in a child. The test fails if an expectation fails there, and is skipped if the child
// ends with kCannot.
void inChild(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(2);
    }
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kCannot) {
    GTEST_SKIP() << "NOT TESTED: this system does not allow network namespaces";
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

std::string errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void setSoftLimit(rlim_t files) {
  rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min(files, limit.rlim_max);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// Sets the soft limit and opens files until it is reached.
void useUpDescriptors() {
  setSoftLimit(64);
  ASSERT_GT(maxDescriptors(), 128u) << "the hard limit of this system is too low for the test";
  while (::dup(STDIN_FILENO) >= 0) continue;
  ASSERT_EQ(errno, EMFILE);
}

UniqueDescriptor makeMemory() {
  return UniqueDescriptor(::memfd_create("test", MFD_CLOEXEC));
}

TEST(DescriptorLimit, IsRaisedWhereverADescriptorIsMade) {
  using namespace bootstrap;
  const Address loopback = {AddressFamily::ipv4, 0, 0, {127, 0, 0, 1}};
  const std::function<bool()> never;
  const Wait wait(std::chrono::seconds(1), never);
  inChild([] {
    useUpDescriptors();
    const runtime::host::MemorySegment segment(100);
  });
  inChild([&] {
    useUpDescriptors();
    const Listener listener(loopback, wait);
  });
  inChild([] {
    useUpDescriptors();
    const Poller poller;
  });
  inChild([&] {
    Listener listener(loopback, wait);
    useUpDescriptors();
    const RootService service(std::move(listener), randomSecret(),
                              RootTimes{std::chrono::seconds(1)});
  });
  inChild([&] {
    const UniqueDescriptor memory = makeMemory();
    useUpDescriptors();
    const auto offer = runtime::offerDescriptor(memory.get());  // raises the limit for the socket
    useUpDescriptors();
    EXPECT_TRUE(runtime::fetchDescriptor(offer->ticket()));
  });
}

// A hard limit that is too low leaves an error that says so.
TEST(DescriptorLimit, IsNamedWhenItIsReached) {
  inChild([] {
    const UniqueDescriptor memory = makeMemory();
    rlimit limit = {64, 64};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    while (::dup(STDIN_FILENO) >= 0) continue;
    EXPECT_THAT(errorOf([] { runtime::host::MemorySegment(100); }),
                AllOf(HasSubstr("memfd_create"), HasSubstr("64 open files")));
  });
}

// Connects to the service of `ticket`, and says nothing.
UniqueDescriptor connectSilently(const runtime::DescriptorTicket& ticket) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, ticket.service.data(), ticket.service.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                             std::strlen(ticket.service.data()));
  UniqueDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    throw systemError(errno, "connect");
  }
  return socket;
}

TEST(DescriptorService, SilentConnectionsDoNotKeepOthersFromBeingServed) {
  inChild([] {
    raiseDescriptorLimit();
    const UniqueDescriptor memory = makeMemory();
    const auto offer = runtime::offerDescriptor(memory.get());
    std::vector<UniqueDescriptor> silent;
    for (int i = 0; i < 900; i++) silent.push_back(connectSilently(offer->ticket()));
    EXPECT_TRUE(runtime::fetchDescriptor(offer->ticket()));
  });
}

// The service cannot keep more connections than its process may have files.
TEST(DescriptorService, WorksWithFewDescriptors) {
  inChild([] {
    const UniqueDescriptor memory = makeMemory();
    int tickets[2];
    ASSERT_EQ(::pipe(tickets), 0);
    const pid_t service = ::fork();
    if (service == 0) {
      ::alarm(60);
      rlimit limit = {64, 64};
      ::setrlimit(RLIMIT_NOFILE, &limit);
      const auto offer = runtime::offerDescriptor(memory.get());
      if (::write(tickets[1], &offer->ticket(), sizeof(runtime::DescriptorTicket)) < 0) ::_exit(1);
      for (;;) ::pause();
    }
    runtime::DescriptorTicket ticket;
    ASSERT_EQ(::read(tickets[0], &ticket, sizeof(ticket)), ssize_t{sizeof(ticket)});
    std::vector<UniqueDescriptor> silent;
    for (int i = 0; i < 150; i++) silent.push_back(connectSilently(ticket));
    EXPECT_TRUE(runtime::fetchDescriptor(ticket));
    ::kill(service, SIGKILL);
    ::waitpid(service, nullptr, 0);
    EXPECT_THAT(errorOf([&] { runtime::fetchDescriptor(ticket); }), HasSubstr("has ended"));
  });
}

TEST(DescriptorService, InAnotherNetworkNamespaceIsNotTakenForOneThatEnded) {
  inChild([] {
    const UniqueDescriptor memory = makeMemory();
    const auto offer = runtime::offerDescriptor(memory.get());
    const pid_t other = ::fork();
    if (other == 0) {
      if (::unshare(CLONE_NEWNET) != 0) ::_exit(kCannot);
      EXPECT_THAT(errorOf([&] { runtime::fetchDescriptor(offer->ticket()); }),
                  AllOf(HasSubstr("network namespace"), Not(HasSubstr("ended"))));
      ::_exit(testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    ::waitpid(other, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 2);
  });
}

// A child that makes an id under a limit of open files, tells it, and then joins with both ranks of
// a communicator when it is told to.
class Victim {
 public:
  // With `isFull` it has no descriptor left until then.
  explicit Victim(rlim_t files, bool isFull = false) {
    if (::pipe(id_) != 0 || ::pipe(go_) != 0) throw systemError(errno, "pipe");
    process_ = ::fork();
    if (process_ == 0) {
      ::alarm(60);
      const rlimit limit = {files, files};
      ::setrlimit(RLIMIT_NOFILE, &limit);
      const Settings settings = bootstrap::localSettings();
      id = bootstrap::createUniqueId(settings);
      std::vector<UniqueDescriptor> unused;
      while (isFull && (unused.empty() || unused.back())) unused.emplace_back(::dup(STDIN_FILENO));
      char go;
      if (::write(id_[1], &id, sizeof(id)) < 0 || ::read(go_[0], &go, 1) != 1) ::_exit(2);
      unused.clear();
      bootstrap::runRanks(2, settings, id, [](bootstrap::Bootstrap& ranks) { ranks.barrier(); });
      std::exit(testing::Test::HasFailure() ? 1 : 0);  // joins the threads of the library
    }
    if (::read(id_[0], &id, sizeof(id)) != sizeof(id)) throw std::runtime_error("no id");
  }
  void expectJoins() {
    EXPECT_EQ(::write(go_[1], "", 1), 1);
    int status = 0;
    ::waitpid(process_, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
  pid_t process() const { return process_; }

  bootstrap::UniqueId id;

 private:
  int id_[2], go_[2];
  pid_t process_;
};

std::vector<bootstrap::Socket> connectSilently(const bootstrap::Address& target, int count) {
  std::vector<bootstrap::Socket> sockets;
  for (int i = 0; i < count; i++) sockets.push_back(bootstrap::Socket::startConnecting(target));
  return sockets;
}

TEST(Rendezvous, SilentConnectionsDoNotUseUpTheLimitOfOpenFiles) {
  inChild([] {
    Victim victim(128);
    const auto silent = connectSilently(victim.id.root, 300);
    victim.expectJoins();
  });
}

// A root that cannot accept for lack of descriptors goes on when there are some again.
TEST(Rendezvous, WaitsForDescriptors) {
  inChild([] {
    Victim victim(128, true);
    const auto silent = connectSilently(victim.id.root, 1);
    // Time for the root to find that it cannot accept. The test passes in any case if it is short.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    victim.expectJoins();
  });
}

// While the process of the root is stopped a rank announces itself, and then more strangers arrive
// than the root keeps.
TEST(Rendezvous, RankThatAnnouncedItselfBeforeStrangersIsReadFirst) {
  inChild([] {
    using namespace bootstrap;
    Victim victim(16384);
    ASSERT_EQ(::kill(victim.process(), SIGSTOP), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(victim.process(), &status, WUNTRACED), victim.process());
    const std::function<bool()> never;
    const Wait wait(std::chrono::seconds(30), never);
    int error = 0;
    const std::optional<Socket> rank = Socket::connect(victim.id.root, wait, error);
    ASSERT_TRUE(rank) << std::strerror(error);
    const Announcement announcement = {.ranks = 1, .listener = victim.id.root};
    rank->write(encodeFrame({.secret = victim.id.secret, .kind = FrameKind::announce, .sender = 0},
                            std::as_bytes(std::span(&announcement, 1))));
    const auto silent = connectSilently(victim.id.root, kMaxStrangers + 100);
    ASSERT_EQ(::kill(victim.process(), SIGCONT), 0);
    FrameReader reader(victim.id.secret, {{FrameKind::table, 1000}});
    FrameReader::Status result = FrameReader::Status::incomplete;
    while (result == FrameReader::Status::incomplete && !wait.isExpired()) {
      rank->sleepUntilReadable(wait);
      result = reader.read(*rank);
    }
    EXPECT_EQ(result, FrameReader::Status::complete) << "refused as a stranger";
    ::kill(victim.process(), SIGKILL);
    ::waitpid(victim.process(), nullptr, 0);
  });
}

}  // namespace
}  // namespace unisono
