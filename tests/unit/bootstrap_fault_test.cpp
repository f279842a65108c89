// SPDX-License-Identifier: Apache-2.0
// What must not harm a communicator, and what must end it with an error that says why.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <latch>
#include <sstream>

#include "base/log.h"
#include "bootstrap/mailbox.h"
#include "bootstrap/root_service.h"
#include "bootstrap_testing.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

const std::function<bool()> kNever;

// What is logged while it lives.
class LogCapture {
 public:
  LogCapture() : file_(testing::TempDir() + fmt::format("bootstrap_log_{}", ::getpid())) {
    ::unlink(file_.c_str());
    ::setenv("NCCL_DEBUG", "WARN", 1);
    ::setenv("NCCL_DEBUG_FILE", file_.c_str(), 1);
    resetLog();
  }
  ~LogCapture() {
    ::unsetenv("NCCL_DEBUG");
    ::unsetenv("NCCL_DEBUG_FILE");
    resetLog();
    ::unlink(file_.c_str());
  }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(file_).rdbuf();
    return all.str();
  }
  int refusals() const {
    const std::string all = text();
    int count = 0;
    for (size_t at = all.find("refused"); at != std::string::npos;
         at = all.find("refused", at + 1)) {
      count++;
    }
    return count;
  }

 private:
  std::string file_;
};

Socket connectRaw(const Address& address) {
  int error = 0;
  auto socket = Socket::connect(address, Wait(milliseconds(2000), kNever), error);
  if (!socket) throw systemError(error, "connect");
  return std::move(*socket);
}

void write(const Socket& socket, const std::string& text) {
  socket.write(std::as_bytes(std::span(text)));
}

std::string frameBytes(FrameHeader header, size_t payload) {
  const std::vector<std::byte> bytes = encodeFrame(header, std::vector<std::byte>(payload));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string withLength(FrameHeader header, uint64_t length) {
  header.length = length;
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

// Everything that a stranger may do to a listener whose frames carry `secret` and are of `kind`.
// Returns the connections, of which the last three are closed already.
std::vector<Socket> annoy(const Address& target, const Secret& secret, FrameKind kind) {
  Secret wrong = secret;
  wrong[1] ^= 1;
  const FrameHeader good = {.secret = secret, .kind = kind, .sender = 1};
  std::mt19937 random(12345);
  std::string noise(300, '\0');
  for (char& letter : noise) letter = static_cast<char>(random());
  std::vector<Socket> sockets;
  auto say = [&](const std::string& text) {
    sockets.push_back(connectRaw(target));
    write(sockets.back(), text);
  };
  say(noise);
  say("GET / HTTP/1.1\r\nHost: example\r\n\r\n");
  say(frameBytes({.secret = wrong, .kind = kind, .sender = 1}, sizeof(good)));
  say(withLength(good, uint64_t{1} << 62));
  say(frameBytes({.secret = secret, .kind = FrameKind::table}, sizeof(good)));
  say(frameBytes(good, 32).substr(0, 60));
  sockets.back().close();
  say(frameBytes(good, 0).substr(0, 20));
  sockets.back().close();
  say("");
  sockets.back().close();
  return sockets;
}
constexpr int kAnnoyances = 8;

Listener listenLocally(int backlog = Listener::kMaxBacklog) {
  return Listener(Address{AddressFamily::ipv4, 0, 0, {127, 0, 0, 1}}, Wait(milliseconds(0), kNever),
                  backlog);
}

// Ranks whose listeners are known to the test. They get their mailboxes by start().
struct Mailboxes {
  explicit Mailboxes(int count, int backlog = Listener::kMaxBacklog) {
    for (int rank = 0; rank < count; rank++) {
      listeners.push_back(listenLocally(backlog));
      addresses.push_back(listeners.back().address());
    }
    ranks.resize(listeners.size());
  }
  Mailbox& start(int rank, const MailboxTimes& times = {}, std::function<bool()> aborted = {}) {
    auto& mailbox = ranks[static_cast<size_t>(rank)];
    mailbox = std::make_unique<Mailbox>(rank, membershipOf(rank), times, std::move(aborted));
    return *mailbox;
  }
  Membership membershipOf(int rank) {
    Membership membership;
    membership.ranks = static_cast<int>(addresses.size());
    for (size_t r = 0; r < addresses.size(); r++) {
      membership.neighbours.emplace(static_cast<int>(r), addresses[r]);
    }
    membership.session = session;
    membership.listener = std::move(listeners[static_cast<size_t>(rank)]);
    return membership;
  }
  const Secret session = randomSecret();
  std::vector<Listener> listeners;
  std::vector<Address> addresses;
  std::vector<std::unique_ptr<Mailbox>> ranks;
};

struct Pair : Mailboxes {
  Pair() : Mailboxes(2) {
    start(0);
    start(1);
  }
};

const std::vector<std::byte> kHello(5, std::byte{5});

// Sends and receives a message in both directions.
void talk(Mailbox& a, int rankOfA, Mailbox& b, int rankOfB) {
  a.send(rankOfB, FrameKind::message, 9, kHello);
  b.send(rankOfA, FrameKind::message, 9, kHello);
  EXPECT_EQ(b.receive(rankOfA, FrameKind::message, 9), kHello);
  EXPECT_EQ(a.receive(rankOfB, FrameKind::message, 9), kHello);
}

// Returns when `condition` holds. Only a test that fails waits for long.
void eventually(const std::function<bool()>& condition) {
  const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
  bool holds = condition();
  while (!holds && Clock::now() < limit) {
    std::this_thread::sleep_for(milliseconds(2));
    holds = condition();
  }
  EXPECT_TRUE(holds);
}

// The next connection of a listener that nobody else reads.
Socket acceptOne(const Listener& listener) {
  std::optional<Socket> socket;
  eventually([&] { return (socket = listener.accept()).has_value(); });
  return std::move(*socket);
}

TEST(BootstrapStranger, DoesNotHarmTheRoot) {
  const LogCapture log;
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::vector<Socket> open;
  expectNoErrors(runThreads(firstRanks(3), [&](int rank) {
    if (rank == 2) {
      open = annoy(id.root, id.secret, FrameKind::announce);
      open.push_back(connectRaw(id.root));  // silence
      open.push_back(connectRaw(id.root));
      write(open.back(), "nis");  // the start of a header, and then nothing more
      std::this_thread::sleep_for(milliseconds(50));
    }
    auto bootstrap = Bootstrap::connect(id, rank, 3, settings);
    EXPECT_EQ(bootstrap->allGather(rank), firstRanks(3));
  }));
  EXPECT_EQ(log.refusals(), kAnnoyances) << log.text();
  EXPECT_THAT(log.text(),
              AllOf(HasSubstr("does not speak"), HasSubstr("secret is not"),
                    HasSubstr("longer than"), HasSubstr("not expected"),
                    HasSubstr("middle of a message"), HasSubstr("before it sent anything")));
}

TEST(BootstrapStranger, AnnouncementsThatMakeNoSenseAreRefused) {
  const LogCapture log;
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  auto announce = [&](uint32_t rank, const Announcement& announcement, size_t bytes) {
    Socket socket = connectRaw(id.root);
    socket.write(encodeFrame({.secret = id.secret, .kind = FrameKind::announce, .sender = rank},
                             std::as_bytes(std::span(&announcement, 1)).first(bytes)));
    return socket;
  };
  const Announcement good = {.ranks = 2, .listener = id.root};
  std::vector<Socket> open;
  open.push_back(announce(0, good, sizeof(good) - 1));
  open.push_back(announce(2, good, sizeof(good)));
  open.push_back(announce(0, {.ranks = 0, .listener = id.root}, sizeof(good)));
  open.push_back(announce(0, {.ranks = ~0u, .listener = id.root}, sizeof(good)));
  open.push_back(announce(0, {.ranks = 2, .listener = {}}, sizeof(good)));
  runRanks(2, settings, id, [](Bootstrap& bootstrap) { bootstrap.barrier(); });
  EXPECT_EQ(log.refusals(), 5) << log.text();
}

TEST(BootstrapStranger, SilenceIsEnded) {
  const LogCapture log;
  const Settings settings = localSettings(1);
  const UniqueId id = createUniqueId(settings);
  const Socket silent = connectRaw(id.root);
  pollfd closed = {silent.descriptor(), POLLIN, 0};
  ASSERT_EQ(::poll(&closed, 1, -1), 1);
  std::byte byte;
  EXPECT_TRUE(silent.read(std::span(&byte, 1)).closed);
  EXPECT_THAT(log.text(), HasSubstr("sent nothing for too long"));
  runRanks(2, settings, id, [](Bootstrap& bootstrap) { bootstrap.barrier(); });
}

TEST(BootstrapStranger, FloodOfSilencePushesOutTheOldest) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::vector<Socket> silent;
  for (size_t i = 0; i < kMaxStrangers + 50; i++) silent.push_back(connectRaw(id.root));
  runRanks(2, settings, id, [](Bootstrap& bootstrap) { bootstrap.barrier(); });
}

TEST(BootstrapStranger, DoesNotHarmTheRanks) {
  const LogCapture log;
  Pair pair;
  const Address& target = pair.addresses[0];
  std::vector<Socket> open = annoy(target, pair.session, FrameKind::message);
  auto introduce = [&](FrameKind kind, uint32_t sender) {
    open.push_back(connectRaw(target));
    write(open.back(), frameBytes({.secret = pair.session, .kind = kind, .sender = sender}, 0));
  };
  introduce(FrameKind::hello, 2);
  introduce(FrameKind::hello, 0);
  introduce(FrameKind::message, 1);
  introduce(FrameKind::welcome, 1);
  talk(*pair.ranks[0], 0, *pair.ranks[1], 1);
  eventually([&] { return log.refusals() == kAnnoyances + 4; });
  EXPECT_EQ(log.refusals(), kAnnoyances + 4) << log.text();
}

// Nobody calls the ranks while strangers fill the queue of their listeners.
TEST(BootstrapStranger, FloodBeforeTheFirstCallDoesNotHarmTheRanks) {
  Mailboxes all(3, 4);
  for (int rank = 0; rank < 3; rank++) all.start(rank);
  std::vector<Socket> silent;
  for (int i = 0; i < 100; i++) {
    for (const Address& address : all.addresses) silent.push_back(Socket::startConnecting(address));
  }
  talk(*all.ranks[0], 0, *all.ranks[1], 1);
  talk(*all.ranks[1], 1, *all.ranks[2], 2);
}

// A listener that makes room for strangers may close the connection of a rank that it has not read
// yet. The rank tries again.
TEST(BootstrapStranger, RankThatIsClosedToMakeRoomConnectsAgain) {
  Mailboxes pair(2);
  std::thread sender([&] { pair.start(0).send(1, FrameKind::message, 9, kHello); });
  acceptOne(pair.listeners[1]);
  acceptOne(pair.listeners[1]);
  EXPECT_EQ(pair.start(1).receive(0, FrameKind::message, 9), kHello);
  sender.join();
}

TEST(BootstrapStranger, RankThatTheRootClosesToMakeRoomAnnouncesItselfAgain) {
  Listener listener = listenLocally();
  const UniqueId id = {listener.address(), randomSecret(), false};
  std::thread rank([&] {
    expectNoErrors(
        runThreads({0}, [&](int) { Bootstrap::connect(id, 0, 1, localSettings())->barrier(); }));
  });
  acceptOne(listener);
  acceptOne(listener);
  const RootService root(std::move(listener), id.secret, RootTimes{milliseconds(30000)});
  rank.join();
}

// All connect to all before any of them receives, and every queue holds a few connections only.
TEST(BootstrapQueue, AllConnectToAllWithShortQueues) {
  constexpr int kRanks = 24;
  Mailboxes all(kRanks, 1);
  for (int rank = 0; rank < kRanks; rank++) all.start(rank);
  expectNoErrors(runThreads(firstRanks(kRanks), [&](int rank) {
    Mailbox& mailbox = *all.ranks[static_cast<size_t>(rank)];
    for (int i = 1; i < kRanks; i++) {
      mailbox.send((rank + i) % kRanks, FrameKind::message, 9, kHello);
    }
    for (int i = 1; i < kRanks; i++) {
      EXPECT_EQ(mailbox.receive((rank + i) % kRanks, FrameKind::message, 9), kHello);
    }
  }));
}

TEST(BootstrapLate, RankIsAwaitedWithoutLimitAndNamed) {
  const LogCapture log;
  Mailboxes pair(2);
  const MailboxTimes times = {.limit = {}, .reportInterval = milliseconds(5)};
  std::thread waiter(
      [&] { EXPECT_EQ(pair.start(0, times).receive(1, FrameKind::message, 9), kHello); });
  Mailbox& late = pair.start(1);
  eventually(
      [&] { return log.text().find("rank 0 has been waiting for rank 1") != std::string::npos; });
  late.send(0, FrameKind::message, 9, kHello);
  waiter.join();
}

TEST(BootstrapLate, RankIsNamedToEveryRankWhileInitWaits) {
  const LogCapture log;
  Listener listener = listenLocally();
  const UniqueId id = {listener.address(), randomSecret(), false};
  const RootService root(
      std::move(listener), id.secret,
      RootTimes{.timeout = milliseconds(60000), .reportInterval = milliseconds(5)});
  auto isNamedTo = [&](int rank) {
    std::istringstream lines(log.text());
    for (std::string line; std::getline(lines, line);) {
      if (line.find(fmt::format("rank {} has been waiting", rank)) != std::string::npos &&
          line.find("1 of 3 ranks have not joined yet: rank 1") != std::string::npos) {
        return true;
      }
    }
    return false;
  };
  expectNoErrors(runThreads(firstRanks(3), [&](int rank) {
    if (rank == 1) eventually([&] { return isNamedTo(0) && isNamedTo(2); });
    Bootstrap::connect(id, rank, 3, localSettings())->barrier();
  }));
}

// There is no limit, and no connection whose end could tell.
TEST(BootstrapLate, RankThatEndedBeforeItConnectedEndsTheWait) {
  Mailboxes pair(2);
  pair.start(1);
  pair.ranks[1].reset();
  Mailbox& rank = pair.start(0);
  for (const bool sends : {false, true}) {
    try {
      if (sends) rank.send(1, FrameKind::message, 9, kHello);
      rank.receive(1, FrameKind::message, 9);
      FAIL() << "nobody is there";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::remoteError);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("peer 1"), HasSubstr("ended or failed")));
    }
  }
}

// The peer's system accepts the connection, but no process ever answers.
TEST(BootstrapLate, LimitEndsWaitingForAnAnswer) {
  Mailboxes pair(2);
  Mailbox& rank = pair.start(0, {.limit = milliseconds(20)});
  const auto errors = runThreads({0, 1}, [&](int) { rank.send(1, FrameKind::message, 9, kHello); });
  for (const std::exception_ptr& error : errors) {
    EXPECT_EQ(errorOf(error).code(), ErrorCode::timeout);
    EXPECT_THAT(errorOf(error).what(), HasSubstr("peer 1"));
  }
}

TEST(BootstrapAbort, WhileSeveralThreadsConnect) {
  Mailboxes pair(2);
  std::atomic<bool> abort{false};
  Mailbox& rank = pair.start(0, {}, [&] { return abort.load(); });
  std::thread aborter([&] {
    const Socket connection = acceptOne(pair.listeners[1]);
    abort = true;
    // Held until both threads have ended.
    eventually([&] { return abort == false; });
  });
  const auto errors = runThreads({0, 1}, [&](int) { rank.send(1, FrameKind::message, 9, kHello); });
  abort = false;
  aborter.join();
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(errorOf(error).what(), HasSubstr("aborted"));
  }
}

TEST(BootstrapMissing, RankIsNamedToEveryRankThatWaits) {
  const LogCapture log;
  const Settings settings = localSettings(1);
  const UniqueId id = createUniqueId(settings);
  const auto errors =
      runThreads({0, 2, 4}, [&](int rank) { Bootstrap::connect(id, rank, 5, settings); });
  for (const std::exception_ptr& pointer : errors) {
    const Error error = errorOf(pointer);
    EXPECT_EQ(error.code(), ErrorCode::timeout);
    EXPECT_THAT(error.what(), HasSubstr("2 of 5 ranks did not join within 1 s: ranks 1, 3"));
  }
  EXPECT_THAT(log.text(), HasSubstr("ranks 1, 3")) << "the root's own log";
  // One who comes a little later still hears why.
  const auto late = runThreads({1}, [&](int rank) { Bootstrap::connect(id, rank, 5, settings); });
  EXPECT_THAT(errorOf(late[0]).what(), HasSubstr("ranks 1, 3"));
}

TEST(BootstrapMissing, RootOfCommId) {
  Settings settings = localSettings(1);
  settings.commId = "127.0.0.1:1";
  // The limit of one second and the grace for the root's answer.
  const auto errors = runThreads(
      {1}, [&](int rank) { Bootstrap::connect(createUniqueId(settings), rank, 2, settings); });
  EXPECT_THAT(errorOf(errors[0]).what(), AllOf(HasSubstr("rank 0"), HasSubstr("127.0.0.1:1")));
}

TEST(BootstrapMissing, IdThatWasUsedBefore) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  Bootstrap::connect(id, 0, 1, settings);
  const auto errors = runThreads({0}, [&](int) { Bootstrap::connect(id, 0, 1, settings); });
  EXPECT_EQ(errorOf(errors[0]).code(), ErrorCode::remoteError);
  EXPECT_THAT(errorOf(errors[0]).what(), HasSubstr("one id for each communicator"));
}

TEST(BootstrapContradiction, NumberOfRanks) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  const auto errors = runThreads(
      {0, 1}, [&](int rank) { Bootstrap::connect(id, rank, rank == 0 ? 2 : 3, settings); });
  for (const std::exception_ptr& error : errors) {
    EXPECT_EQ(errorOf(error).code(), ErrorCode::invalidUsage);
    EXPECT_THAT(errorOf(error).what(), HasSubstr("the same number"));
  }
}

TEST(BootstrapContradiction, SameRankTwice) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  const auto errors =
      runThreads({1, 1}, [&](int rank) { Bootstrap::connect(id, rank, 3, settings); });
  for (const std::exception_ptr& error : errors) {
    EXPECT_EQ(errorOf(error).code(), ErrorCode::invalidUsage);
    EXPECT_THAT(errorOf(error).what(), HasSubstr("claim rank 1"));
  }
}

TEST(BootstrapContradiction, SizesOfAnAllGather) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  // They stay until all have failed: one that still waits for a rank that leaves is told of that.
  std::vector<std::unique_ptr<Bootstrap>> bootstraps(4);
  const auto errors = runThreads(firstRanks(4), [&](int rank) {
    auto& bootstrap = bootstraps[static_cast<size_t>(rank)];
    bootstrap = Bootstrap::connect(id, rank, 4, settings);
    const size_t bytes = rank == 3 ? 8 : 4;
    std::vector<std::byte> all(4 * bytes);
    bootstrap->allGather(all, bytes);
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(errorOf(error).what(), HasSubstr("bytes instead of"));
  }
}

TEST(BootstrapContradiction, VersionIsNamedByTheRoot) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::atomic<bool> joins{false};
  const auto errors = runThreads({0, 1}, [&](int rank) {
    if (rank == 0) {
      joins = true;
      Bootstrap::connect(id, 0, 2, settings);
      return;
    }
    eventually([&] { return joins.load(); });
    // What a later version sends may be longer.
    struct {
      Announcement announcement = {.ranks = 2, .version = 77, .listener = {}};
      uint64_t more[4] = {};
    } later;
    const Socket socket = connectRaw(id.root);
    socket.write(encodeFrame({.secret = id.secret, .kind = FrameKind::announce, .sender = 1},
                             std::as_bytes(std::span(&later, 1))));
    eventually([&] {
      std::byte byte;
      return socket.read(std::span(&byte, 1)).bytes == 1;  // the refusal
    });
  });
  EXPECT_EQ(errorOf(errors[0]).code(), ErrorCode::invalidUsage);
  EXPECT_THAT(errorOf(errors[0]).what(),
              AllOf(HasSubstr("Rank 1 (127.0.0.1"), HasSubstr("another version"), HasSubstr("77")));
}

TEST(BootstrapAbort, WhileRanksAreMissing) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::atomic<bool> abort{false};
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(100));
    abort = true;
  });
  const auto errors = runThreads({0, 1}, [&](int rank) {
    // Only rank 0 is aborted; rank 1 hears of it from the root.
    Bootstrap::connect(id, rank, 3, settings, [&, rank] { return rank == 0 && abort; });
  });
  aborter.join();
  EXPECT_THAT(errorOf(errors[0]).what(), HasSubstr("aborted"));
  EXPECT_THAT(errorOf(errors[1]).what(), HasSubstr("Rank 0"));
  EXPECT_THAT(errorOf(errors[1]).what(), HasSubstr("left"));
}

TEST(BootstrapAbort, WhileReceiving) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::atomic<bool> abort{false};
  const auto errors = runThreads({0, 1}, [&](int rank) {
    auto bootstrap = Bootstrap::connect(id, rank, 2, settings, [&] { return abort.load(); });
    bootstrap->barrier();
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      abort = true;
    }
    bootstrap->receive(1 - rank, 0);
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(errorOf(error).what(), HasSubstr("aborted"));
  }
}

TEST(BootstrapPeer, ThatLeavesIsNamed) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  const auto errors = runThreads(firstRanks(3), [&](int rank) {
    auto bootstrap = Bootstrap::connect(id, rank, 3, settings);
    bootstrap->barrier();
    bootstrap->send((rank + 1) % 3, 5, {});
    bootstrap->receive((rank + 2) % 3, 5);
    if (rank == 2) return;
    if (rank == 0) bootstrap->receive(2, 1);
    // By now it may also be the connection that fails.
    std::this_thread::sleep_for(milliseconds(100));
    for (int i = 0; i < 3; i++) bootstrap->send(2, 1, std::vector<std::byte>(100000));
    bootstrap->receive(2, 1);
  });
  for (size_t rank : {0u, 1u}) {
    EXPECT_EQ(errorOf(errors[rank]).code(), ErrorCode::remoteError);
    EXPECT_THAT(errorOf(errors[rank]).what(), HasSubstr("peer 2"));
  }
}

// A rank that ends, with or without a failure, when it has greeted another one and was not greeted
// in return. The other side may take it for one that is there.
TEST(BootstrapPeer, ThatEndsWhileItConnectsSaysSo) {
  for (const bool fails : {false, true}) {
    Mailboxes pair(2);
    Mailbox& one = pair.start(1);
    std::thread sender([&] { one.send(0, FrameKind::message, 9, kHello); });
    const Socket socket = acceptOne(pair.listeners[0]);
    FrameReader reader(pair.session, {{FrameKind::hello, kLongestName},
                                      {FrameKind::greeting, 0},
                                      {FrameKind::message, kLongestMessage},
                                      {FrameKind::failure, kLongestText},
                                      {FrameKind::departure, kLongestText}});
    const auto next = [&] {
      eventually([&] { return reader.read(socket) == FrameReader::Status::complete; });
      return reader.take();
    };
    EXPECT_EQ(next().header.kind, FrameKind::hello);
    write(socket, frameBytes({.secret = pair.session, .kind = FrameKind::welcome, .sender = 0}, 0));
    sender.join();
    EXPECT_EQ(next().header.kind, FrameKind::greeting);
    EXPECT_EQ(next().header.kind, FrameKind::message);
    if (fails) {
      one.announce({1, "the cause"});
    } else {
      one.leave("Rank 1 has left", [](int) { return DepartureCounts{}; });
    }
    const Frame last = next();
    EXPECT_EQ(last.header.kind, fails ? FrameKind::failure : FrameKind::departure);
    EXPECT_EQ(last.header.tag, 1u);
    EXPECT_THAT(last.text(), HasSubstr(fails ? "the cause" : "Rank 1 has left"));
  }
}

// A rank that was never connected to one that has left hears from others why.
TEST(BootstrapPeer, ThatHasLeftIsNamedWhereItWasNeverConnected) {
  Mailboxes three(3);
  for (int rank = 0; rank < 3; rank++) three.start(rank);
  talk(*three.ranks[0], 0, *three.ranks[1], 1);
  talk(*three.ranks[1], 1, *three.ranks[2], 2);
  three.ranks[2]->leave("Rank 2 has left", [](int) { return DepartureCounts{1, 1, 1}; });
  three.ranks[2].reset();
  try {
    three.ranks[0]->send(2, FrameKind::message, 9, kHello);
    FAIL() << "it was connected";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("Rank 2 has left"), HasSubstr("peer 2")));
  }
}

// The other side of a rank that leaves: it greets nobody who would find it dead.
TEST(BootstrapPeer, ThatHasLeftGreetsNobody) {
  Pair pair;
  pair.ranks[0]->leave("Rank 0 has left", [](int) { return DepartureCounts{}; });
  try {
    pair.ranks[1]->send(0, FrameKind::message, 9, kHello);
    pair.ranks[1]->receive(0, FrameKind::message, 9);
    FAIL() << "it was greeted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("peer 0"), HasSubstr("not in this communicator")));
  }
  EXPECT_FALSE(pair.ranks[1]->failure());
}

// What a rank still says in a communicator that it has ended is ignored. The connection, which
// others of the family use, stays: it answers a greeting of another one.
TEST(BootstrapPeer, ThatHasEndedACommunicatorIsNotHeardInIt) {
  Mailboxes pair(2);
  Mailbox& zero = pair.start(0);
  const Socket socket = connectRaw(pair.addresses[0]);
  const auto say = [&](FrameKind kind, const Secret& secret, size_t payload) {
    write(socket, frameBytes({.secret = secret, .kind = kind, .sender = 1, .tag = 1}, payload));
  };
  const Secret other = secretOfChild(pair.session, 3, 0);
  say(FrameKind::hello, pair.session, 0);
  say(FrameKind::greeting, pair.session, 0);
  say(FrameKind::departure, pair.session, sizeof(DepartureCounts));
  say(FrameKind::absent, pair.session, 0);
  say(FrameKind::message, pair.session, 10);
  say(FrameKind::failure, pair.session, 10);
  say(FrameKind::message, other, 10);
  say(FrameKind::greeting, other, 0);
  FrameReader reader(
      pair.session,
      {{FrameKind::welcome, kLongestName}, {FrameKind::greeting, 0}, {FrameKind::absent, 0}});
  reader.acceptFamily();
  const auto next = [&] {
    eventually([&] { return reader.read(socket) == FrameReader::Status::complete; });
    return reader.take().header;
  };
  EXPECT_EQ(next().kind, FrameKind::welcome);
  EXPECT_EQ(next().kind, FrameKind::greeting);
  const FrameHeader answer = next();
  EXPECT_EQ(answer.kind, FrameKind::absent);
  EXPECT_EQ(answer.secret, other);
  EXPECT_FALSE(zero.failure());
  EXPECT_THROW(zero.receive(1, FrameKind::message, 1), Error);
}

// The one that is told sends before it reads, over a connection that is there already or a new one.
TEST(BootstrapPeer, ThatFailedHasSaidWhyToOneThatSends) {
  for (const bool connected : {false, true}) {
    Pair pair;
    auto& ranks = pair.ranks;
    const std::vector<std::byte> message(100000);
    if (connected) {
      ranks[1]->send(0, FrameKind::message, 1, message);
      ranks[0]->receive(1, FrameKind::message, 1);
    }
    ranks[0]->sendFailure(1, {0, "the cause"});
    ranks[0].reset();
    try {
      // The kernel may take a few before it hears that nobody reads them.
      for (int i = 0; i < 3; i++) ranks[1]->send(0, FrameKind::message, 1, message);
      FAIL() << "nobody is there";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::remoteError);
      EXPECT_THAT(error.what(), HasSubstr("Rank 0 reports: the cause")) << connected;
    }
  }
}

TEST(BootstrapPeer, ThatIsSilentIsNamedAfterTheTimeout) {
  const Settings settings = localSettings(1);
  const UniqueId id = createUniqueId(settings);
  // Rank 1 stays until rank 0 has given up.
  std::latch gaveUp(1);
  std::exception_ptr error;
  expectNoErrors(runThreads({0, 1}, [&](int rank) {
    auto bootstrap = Bootstrap::connect(id, rank, 2, settings);
    if (rank == 1) return gaveUp.wait();
    try {
      bootstrap->receive(1, 3);
    } catch (...) {
      error = std::current_exception();
    }
    gaveUp.count_down();
  }));
  EXPECT_EQ(errorOf(error).code(), ErrorCode::timeout);
  EXPECT_THAT(errorOf(error).what(), HasSubstr("peer 1"));
}

// Rank 5 leaves before a barrier: every other rank hears of 5, not of its neighbour's end.
TEST(BootstrapPeer, FailureOfACollectiveNamesItsCauseEverywhere) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  const auto errors = runThreads(firstRanks(8), [&](int rank) {
    auto bootstrap = Bootstrap::connect(id, rank, 8, settings);
    bootstrap->barrier();
    if (rank == 5) return;
    bootstrap->barrier();
  });
  for (size_t rank = 0; rank < 8; rank++) {
    if (rank == 5) continue;
    EXPECT_EQ(errorOf(errors[rank]).code(), ErrorCode::remoteError);
    EXPECT_THAT(errorOf(errors[rank]).what(), HasSubstr("peer 5")) << rank;
  }
}

// A rank that fails in what it does between two collectives tells the others why.
TEST(BootstrapPeer, FailureBetweenCollectivesIsToldEverywhere) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  const auto errors = runThreads(firstRanks(8), [&](int rank) {
    auto bootstrap = Bootstrap::connect(id, rank, 8, settings);
    bootstrap->barrier();
    if (rank == 5) {
      bootstrap->fail("the file is missing");
      return;
    }
    bootstrap->barrier();
  });
  for (size_t rank = 0; rank < 8; rank++) {
    if (rank == 5) continue;
    EXPECT_EQ(errorOf(errors[rank]).code(), ErrorCode::remoteError);
    EXPECT_THAT(errorOf(errors[rank]).what(),
                testing::StartsWith("Rank 5 reports: the file is missing"))
        << rank;
  }
}

}  // namespace
}  // namespace unisono::bootstrap
