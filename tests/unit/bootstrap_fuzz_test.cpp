// SPDX-License-Identifier: Apache-2.0
// Random frames against the root of a rendezvous and against the mailbox of a rank. Strangers, who
// do not know the secret, must not harm a job. Those who know it are ranks, which may end a job but
// nothing else. UNISONO_TEST_FRAMES sets the number of frames of each test.

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "bootstrap/mailbox.h"
#include "bootstrap/root_service.h"
#include "bootstrap_testing.h"
#include "support/seed.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<std::byte>;

const std::function<bool()> kNever;
constexpr Address kLoopback{AddressFamily::ipv4, 0, 0, {127, 0, 0, 1}};
constexpr int kRanks = 4;

size_t frameCount() {
  const char* frames = std::getenv("UNISONO_TEST_FRAMES");
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr size_t kSample = 2'000;
#else
  constexpr size_t kSample = 10'000;
#endif
  return frames == nullptr ? kSample : std::strtoull(frames, nullptr, 10);
}

class Fuzzer {
 public:
  explicit Fuzzer(const Secret& secret) : secret_(secret) {}

  uint64_t below(uint64_t limit) { return random_() % limit; }
  Bytes noise(size_t bytes) { return randomBytes(random_, bytes); }

  // What a stranger may send: never with the secret.
  Bytes strangersFrame() {
    FrameHeader header = anyHeader();
    header.secret[below(2)] ^= uint64_t{1} << below(64);
    Bytes frame = encodeFrame(header, noise(below(200)));
    switch (below(6)) {
      case 0:
        return noise(1 + below(300));
      case 1:
        frame.resize(1 + below(sizeof(header)));  // it ends in the middle
        return frame;
      case 2:
        setLength(frame, random_() | uint64_t{1} << below(64));
        return frame;
      case 3:
        frame[below(sizeof(header.magic))] ^= std::byte{1};
        return frame;
      default:
        return frame;
    }
  }

  // What a rank may send that has gone mad. Most frames are such that its connection goes on.
  Bytes ranksFrame(uint32_t sender) {
    static constexpr FrameKind kKinds[] = {
        FrameKind::message,  FrameKind::collective, FrameKind::failure,
        FrameKind::death,    FrameKind::departure,  FrameKind::failedCollective,
        FrameKind::question, FrameKind::answer,     FrameKind::greeting};
    FrameHeader header = anyHeader();
    Bytes payload = noise(below(80));
    if (below(200) != 0) {
      header.kind = below(500) == 0 ? FrameKind::absent : kKinds[below(std::size(kKinds))];
      header.sender = sender;
      // Of another communicator of the family, which the target may have a seat in.
      if (below(16) == 0) header.secret = secretOfChild(secret_, below(3), 0);
      if (header.kind == FrameKind::greeting || header.kind == FrameKind::absent) {
        payload.clear();
      } else if (header.kind != FrameKind::message && header.kind != FrameKind::collective) {
        header.tag = below(kRanks);
        payload.resize(payload.size() + sizeof(DepartureCounts));
      }
      if (below(2) == 0 && !payload.empty()) {
        const DepartureCounts counts{below(4), below(4), below(4)};
        std::memcpy(payload.data(), &counts, std::min(payload.size(), sizeof(counts)));
      }
    }
    Bytes frame = encodeFrame(header, payload);
    // Lengths that a rank would have to allocate much for are allowed, but make the test slow.
    if (below(500) == 0) setLength(frame, below(2) == 0 ? below(4096) : uint64_t{1} << 40);
    if (below(500) == 0) frame[below(sizeof(header))] ^= static_cast<std::byte>(1 << below(8));
    return frame;
  }

  Bytes announcement() {
    Announcement announcement{.ranks = static_cast<uint32_t>(below(6)),
                              .listener = kLoopback,
                              .roots = static_cast<uint32_t>(below(8) == 0 ? below(4) : 1),
                              .root = static_cast<uint32_t>(below(16) == 0 ? below(3) : 0)};
    if (below(4) != 0) announcement.ranks = kRanks;
    if (below(16) == 0) announcement.version = static_cast<uint32_t>(random_());
    if (below(16) == 0) announcement.ids = random_();
    Bytes payload(sizeof(announcement));
    std::memcpy(payload.data(), &announcement, sizeof(announcement));
    if (below(8) == 0) payload[below(payload.size())] = static_cast<std::byte>(random_());
    if (below(16) == 0) payload.resize(below(kMaxAnnouncement + 1));
    return encodeFrame({.secret = secret_,
                        .kind = below(8) == 0 ? anyHeader().kind : FrameKind::announce,
                        .sender = static_cast<uint32_t>(below(kRanks + 1)),
                        .tag = below(20)},
                       payload);
  }

 private:
  FrameHeader anyHeader() {
    static constexpr uint64_t kTags[] = {0, 1, 2, 3, 7, uint64_t{1} << 31, ~uint64_t{0}};
    return {.secret = secret_,
            .kind = static_cast<FrameKind>(below(20)),
            .sender = static_cast<uint32_t>(below(8) == 0 ? random_() : below(kRanks + 1)),
            .tag = kTags[below(std::size(kTags))]};
  }
  static void setLength(Bytes& frame, uint64_t length) {
    if (frame.size() < sizeof(FrameHeader)) return;
    std::memcpy(frame.data() + offsetof(FrameHeader, length), &length, sizeof(length));
  }

  const Secret secret_;
  std::mt19937 random_{static_cast<uint32_t>(test::seed())};
};

std::optional<Socket> tryToConnect(const Address& address) {
  int error = 0;
  return Socket::connect(address, Wait(milliseconds(5000), kNever), error);
}

Socket connectTo(const Address& address) {
  auto socket = tryToConnect(address);
  if (!socket) throw std::runtime_error("nobody listens any more");
  return std::move(*socket);
}

void writeAll(const Socket& socket, std::span<const std::byte> bytes) {
  const Wait wait(milliseconds(10000), kNever);
  while (!bytes.empty()) {
    const Transfer transfer = socket.write(bytes);
    if (transfer.closed || wait.isExpired()) return;
    bytes = bytes.subspan(transfer.bytes);
    if (transfer.bytes == 0) socket.sleepUntilWritable(wait);
  }
}

// Says that nothing more comes, and waits until the other side has closed the connection: it has
// read everything, or refused the rest.
void finish(const Socket& socket) {
  ::shutdown(socket.descriptor(), SHUT_WR);
  const Wait wait(milliseconds(20000), kNever);
  std::byte rest[4096];
  for (;;) {
    const Transfer transfer = socket.read(rest);
    if (transfer.closed) return;
    if (wait.isExpired()) break;
    if (transfer.bytes == 0) socket.sleepUntilReadable(wait);
  }
  ADD_FAILURE() << "a connection stays open";
}

// `frames` connections with one frame each, a few at a time.
void annoy(Fuzzer& fuzzer, const Address& target, size_t frames) {
  constexpr size_t kAtOnce = 32;
  for (size_t sent = 0; sent < frames;) {
    std::vector<Socket> sockets;
    for (; sockets.size() < kAtOnce && sent < frames; sent++) {
      sockets.push_back(connectTo(target));
      writeAll(sockets.back(), fuzzer.strangersFrame());
    }
    for (const Socket& socket : sockets) finish(socket);
  }
}

// A rank whose address is known to a test.
struct Rank {
  Rank(int rank, const Secret& session, const std::map<int, Address>& others = {}) {
    Membership membership;
    membership.ranks = kRanks;
    membership.neighbours = others;
    membership.session = session;
    membership.listener = Listener(kLoopback, Wait(milliseconds(0), kNever));
    address = membership.listener.address();
    mailbox = std::make_unique<Mailbox>(rank, std::move(membership), MailboxTimes{}, kNever);
  }
  Address address;
  std::unique_ptr<Mailbox> mailbox;
};

void talk(Mailbox& zero, Mailbox& one) {
  const Bytes message(100, std::byte{5});
  one.send(0, FrameKind::message, 9, message);
  EXPECT_EQ(zero.receive(1, FrameKind::message, 9), message);
  zero.send(1, FrameKind::message, 9, message);
  EXPECT_EQ(one.receive(0, FrameKind::message, 9), message);
}

TEST(BootstrapFuzz, FramesOfStrangersDoNotHarmRanks) {
  const Secret session = randomSecret();
  Fuzzer fuzzer(session);
  const Rank zero(0, session);
  const Rank one(1, session, {{0, zero.address}});
  talk(*zero.mailbox, *one.mailbox);
  const int descriptors = openDescriptors();
  std::atomic<bool> done{false};
  std::thread ranks([&] {
    while (!done) {
      talk(*zero.mailbox, *one.mailbox);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  annoy(fuzzer, zero.address, frameCount());
  done = true;
  ranks.join();
  EXPECT_EQ(openDescriptors(), descriptors);
  EXPECT_FALSE(zero.mailbox->failure());
}

TEST(BootstrapFuzz, FramesOfStrangersDoNotHarmARendezvous) {
  const Settings settings = localSettings(7200);  // a rank waits for as long as frames are sent
  const UniqueId id = createUniqueId(settings);
  Fuzzer fuzzer(id.secret);
  std::thread first([&] { Bootstrap::connect(id, 0, 2, settings)->barrier(); });
  annoy(fuzzer, id.root, frameCount());
  Bootstrap::connect(id, 1, 2, settings)->barrier();
  first.join();
}

// Whatever ranks say, the mailbox can be destroyed, keeps nothing and leaves others alone.
TEST(BootstrapFuzz, FramesOfRanksEndNothingButTheirJob) {
  constexpr size_t kFramesOfAConnection = 200, kConnectionsOfAMailbox = 20;
  const Secret session = randomSecret();
  Fuzzer fuzzer(session);
  const Rank zero(0, session);  // of another job that the same thread serves
  const Rank one(1, session, {{0, zero.address}});
  talk(*zero.mailbox, *one.mailbox);
  const int descriptors = openDescriptors();
  std::atomic<size_t> handled{0};  // those of one kind and tag
  size_t sent = 0;
  while (sent < frameCount()) {
    const Rank target(0, session);
    target.mailbox->handleMessages(7, [&](int, const Bytes&) { handled++; });
    const std::unique_ptr<Seat> seat = target.mailbox->takeSeat(fuzzer.below(3), 0);
    for (size_t c = 0; c < kConnectionsOfAMailbox && sent < frameCount(); c++) {
      const auto sender = static_cast<uint32_t>(1 + fuzzer.below(kRanks - 1));
      Bytes bytes;
      // Most introduce themselves.
      if (fuzzer.below(32) != 0) {
        bytes = encodeFrame({.secret = session, .kind = FrameKind::hello, .sender = sender}, {});
        const Bytes greeting =
            encodeFrame({.secret = session, .kind = FrameKind::greeting, .sender = sender}, {});
        if (fuzzer.below(32) != 0) bytes.insert(bytes.end(), greeting.begin(), greeting.end());
      }
      for (size_t f = 0; f < kFramesOfAConnection; f++, sent++) {
        Bytes frame = fuzzer.ranksFrame(sender);
        bytes.insert(bytes.end(), frame.begin(), frame.end());
      }
      const Socket socket = connectTo(target.address);
      writeAll(socket, bytes);
      finish(socket);
    }
  }
  EXPECT_EQ(openDescriptors(), descriptors);
  std::printf("%zu frames sent; a handler got %zu\n", sent, handled.load());
  EXPECT_GT(handled, 0u);
  talk(*zero.mailbox, *one.mailbox);
}

TEST(BootstrapFuzz, AnnouncementsEndNothingButTheirRendezvous) {
  constexpr size_t kAnnouncements = 10;
  const Secret secret = randomSecret();
  Fuzzer fuzzer(secret);
  const int descriptors = openDescriptors();
  for (size_t sent = 0; sent < frameCount() / 10;) {
    Listener listener(kLoopback, Wait(milliseconds(0), kNever));
    const Address address = listener.address();
    const RootService root(std::move(listener), secret, RootTimes{.timeout = milliseconds(500)});
    std::vector<Socket> sockets;
    for (size_t a = 0; a < kAnnouncements; a++, sent++) {
      // Nobody listens any more if it is complete.
      auto socket = tryToConnect(address);
      if (!socket) break;
      writeAll(*socket, fuzzer.announcement());
      sockets.push_back(std::move(*socket));
    }
    if (!sockets.empty()) {
      ::shutdown(sockets[fuzzer.below(sockets.size())].descriptor(), SHUT_RDWR);
    }
  }
  EXPECT_EQ(openDescriptors(), descriptors);
}

}  // namespace
}  // namespace unisono::bootstrap
