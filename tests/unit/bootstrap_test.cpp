// SPDX-License-Identifier: Apache-2.0
// Ranks that meet and talk: as threads and as processes, over IPv4 and IPv6.

#include "bootstrap/bootstrap.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <ctime>
#include <mutex>

#include "bootstrap/frame.h"
#include "bootstrap/interfaces.h"
#include "bootstrap_testing.h"
#include "support/seed.h"

namespace unisono::bootstrap {
namespace {

// ThreadSanitizer ends a forked child of a process with threads when it starts one.
#ifdef __SANITIZE_THREAD__
constexpr bool kChildMayStartThreads = false;
#else
constexpr bool kChildMayStartThreads = true;
#endif

// A port that was free a moment ago.
uint16_t freePort() {
  const std::function<bool()> never;
  return Listener(Address{AddressFamily::ipv4, 0, 0, {127, 0, 0, 1}},
                  Wait(std::chrono::milliseconds(0), never))
      .address()
      .port;
}

void exerciseAllGather(Bootstrap& bootstrap, uint32_t seed) {
  const auto size = static_cast<size_t>(bootstrap.size());
  std::mt19937 random(seed);
  for (int round = 0; round < 4; round++) {
    const size_t bytes = random() % (round == 3 ? 20000 : 100);
    const std::vector<std::byte> expected = randomBytes(random, size * bytes);
    std::vector<std::byte> all(size * bytes);
    const size_t own = static_cast<size_t>(bootstrap.rank()) * bytes;
    std::copy_n(expected.begin() + static_cast<ptrdiff_t>(own), bytes,
                all.begin() + static_cast<ptrdiff_t>(own));
    bootstrap.allGather(all, bytes);
    EXPECT_EQ(all, expected) << "rank " << bootstrap.rank() << " seed " << seed;
  }
}

class BootstrapRanks : public testing::TestWithParam<int> {};

TEST_P(BootstrapRanks, AllGather) {
  const auto seed = static_cast<uint32_t>(test::seed());
  runRanks(GetParam(), localSettings(),
           [&](Bootstrap& bootstrap) { exerciseAllGather(bootstrap, seed); });
}

TEST_P(BootstrapRanks, EveryPairTalksInRandomSizes) {
  const auto seed = static_cast<uint32_t>(test::seed());
  const int count = GetParam();
  auto stream = [&](int from, int to) {
    return std::mt19937(seed + static_cast<uint32_t>(from * count + to));
  };
  runRanks(count, localSettings(), [&](Bootstrap& bootstrap) {
    for (int peer = 0; peer < count; peer++) {
      std::mt19937 random = stream(bootstrap.rank(), peer);
      for (uint64_t message = 0; message < 6; message++) {
        bootstrap.send(peer, message / 2, randomBytes(random, random() % 5000));
      }
    }
    for (int peer = count - 1; peer >= 0; peer--) {
      std::mt19937 random = stream(peer, bootstrap.rank());
      std::vector<std::vector<std::byte>> expected;
      for (int message = 0; message < 6; message++) {
        expected.push_back(randomBytes(random, random() % 5000));
      }
      // Tags in another order than they were sent in; two messages of each, in their order.
      for (uint64_t tag : {2, 0, 1}) {
        EXPECT_EQ(bootstrap.receive(peer, tag), expected[2 * tag]);
        EXPECT_EQ(bootstrap.receive(peer, tag), expected[2 * tag + 1]);
      }
    }
    bootstrap.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, BootstrapRanks, testing::Values(1, 2, 3, 5, 8, 13, 16));

TEST(Bootstrap, TypedAllGather) {
  struct Card {
    int rank;
    double weight;
  };
  runRanks(6, localSettings(), [](Bootstrap& bootstrap) {
    const std::vector<Card> cards =
        bootstrap.allGather(Card{bootstrap.rank(), 0.5 * bootstrap.rank()});
    ASSERT_EQ(cards.size(), 6u);
    for (int rank = 0; rank < 6; rank++) {
      EXPECT_EQ(cards[static_cast<size_t>(rank)].rank, rank);
      EXPECT_EQ(cards[static_cast<size_t>(rank)].weight, 0.5 * rank);
    }
  });
}

TEST(Bootstrap, BarrierWaitsForTheLastRank) {
  std::atomic<int> arrived{0};
  runRanks(5, localSettings(), [&](Bootstrap& bootstrap) {
    for (int round = 1; round <= 3; round++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(7 * bootstrap.rank()));
      arrived++;
      bootstrap.barrier();
      EXPECT_GE(arrived.load(), 5 * round);
      bootstrap.barrier();
    }
  });
}

// Both send far more than the kernel keeps before either receives.
TEST(Bootstrap, SendNeverWaitsForTheReceiver) {
  constexpr size_t kMessages = 16;
  runRanks(2, localSettings(), [&](Bootstrap& bootstrap) {
    const int peer = 1 - bootstrap.rank();
    for (size_t i = 0; i < kMessages; i++) {
      bootstrap.send(peer, 7, std::vector<std::byte>(kLongestMessage, std::byte(i)));
    }
    for (size_t i = 0; i < kMessages; i++) {
      EXPECT_EQ(bootstrap.receive(peer, 7), std::vector<std::byte>(kLongestMessage, std::byte(i)));
    }
  });
}

TEST(Bootstrap, HandlersGetTheirMessagesInOrderAndReceiversTheOthers) {
  constexpr int kMessages = 100;
  runRanks(2, localSettings(), [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 0) {
      for (int i = 0; i < kMessages; i++) {
        const auto value = static_cast<std::byte>(i);
        for (const uint64_t tag : {7, 8}) bootstrap.send(1, tag, std::span(&value, 1));
        if (i == kMessages / 2) bootstrap.barrier();
      }
      bootstrap.barrier();
      return;
    }
    bootstrap.barrier();  // some have arrived
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<int> handled;
    bootstrap.handleMessages(7, [&](int peer, std::vector<std::byte> message) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(peer, 0);
      handled.push_back(std::to_integer<int>(message.at(0)));
      changed.notify_all();
    });
    for (int i = 0; i < kMessages; i++) {
      EXPECT_EQ(bootstrap.receive(0, 8), std::vector<std::byte>(1, static_cast<std::byte>(i)));
    }
    {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, std::chrono::seconds(30), [&] { return handled.size() == kMessages; });
      for (int i = 0; i < kMessages; i++) EXPECT_EQ(handled.at(static_cast<size_t>(i)), i);
    }
    bootstrap.barrier();
  });
}

TEST(Bootstrap, WhatWasSentArrivesAfterTheSenderIsGone) {
  runRanks(2, localSettings(), [&](Bootstrap& bootstrap) {
    bootstrap.barrier();
    const std::vector<std::byte> message(kLongestMessage, std::byte{42});
    if (bootstrap.rank() == 0) {
      for (int i = 0; i < 8; i++) bootstrap.send(1, 1, message);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (int i = 0; i < 8; i++) EXPECT_EQ(bootstrap.receive(0, 1), message);
    }
  });
}

TEST(Bootstrap, SeveralThreadsOfARankTalkAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kMessages = 50;
  runRanks(3, localSettings(), [&](Bootstrap& bootstrap) {
    expectNoErrors(runThreads(firstRanks(kThreads), [&](int thread) {
      const auto tag = static_cast<uint64_t>(thread);
      for (int i = 0; i < kMessages; i++) {
        for (int peer = 0; peer < 3; peer++) {
          const int value = thread * 1000 + i;
          bootstrap.send(peer, tag, std::as_bytes(std::span(&value, 1)));
        }
        for (int peer = 0; peer < 3; peer++) {
          const std::vector<std::byte> message = bootstrap.receive(peer, tag);
          int value = 0;
          ASSERT_EQ(message.size(), sizeof(value));
          std::memcpy(&value, message.data(), sizeof(value));
          EXPECT_EQ(value, thread * 1000 + i);
        }
      }
    }));
  });
}

TEST(Bootstrap, WrongArguments) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  EXPECT_THROW(Bootstrap::connect(id, 2, 2, settings), Error);
  EXPECT_THROW(Bootstrap::connect(id, -1, 2, settings), Error);
  EXPECT_THROW(Bootstrap::connect(id, 0, 0, settings), Error);
  EXPECT_THROW(createUniqueId(localSettings(0)), Error);
  auto bootstrap = Bootstrap::connect(id, 0, 1, settings);
  EXPECT_THROW(bootstrap->send(1, 0, {}), Error);
  EXPECT_THROW(bootstrap->receive(-1, 0), Error);
  EXPECT_THROW(bootstrap->send(0, 0, std::vector<std::byte>(kLongestMessage + 1)), Error);
  std::vector<std::byte> small(3);
  EXPECT_THROW(bootstrap->allGather(small, 4), Error);
}

// Sanity, not a benchmark: a scheme that is quadratic in threads woken would use many seconds
// of processor time, whatever else the machine does.
TEST(Bootstrap, ManyRanksInOneProcess) {
  constexpr int kRanks = 128;
  const std::clock_t start = std::clock();
  runRanks(kRanks, localSettings(60), [&](Bootstrap& bootstrap) {
    std::vector<std::byte> all(kRanks * 64);
    for (int round = 0; round < 5; round++) bootstrap.allGather(all, 64);
    const std::vector<int> ranks = bootstrap.allGather(bootstrap.rank());
    EXPECT_EQ(ranks, firstRanks(kRanks));
  });
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 20);
}

TEST(Bootstrap, Ipv6Loopback) {
  Settings settings = localSettings();
  settings.socketFamily = "AF_INET6";
  UniqueId id;
  try {
    id = createUniqueId(settings);
  } catch (const Error&) {
    GTEST_SKIP() << "no IPv6 here";
  }
  EXPECT_EQ(id.root.family, AddressFamily::ipv6);
  runRanks(4, settings, id, [](Bootstrap& bootstrap) { exerciseAllGather(bootstrap, 1); });
}

TEST(Bootstrap, Ipv6LinkLocalWithScope) {
  const std::vector<NetworkInterface> interfaces = listInterfaces();
  const NetworkInterface* linkLocal = nullptr;
  for (const NetworkInterface& entry : interfaces) {
    if (entry.up && entry.address.isLinkLocal()) linkLocal = &entry;
  }
  if (linkLocal == nullptr) GTEST_SKIP() << "no link-local address here";
  Settings settings = localSettings();
  settings.socketInterface.clear();  // listen where the root is reached
  settings.socketFamily.clear();
  Address root = linkLocal->address;
  root.port = freePort();
  settings.commId = root.text();
  UniqueId id = createUniqueId(settings);
  EXPECT_EQ(id.root, root);
  id.root.scope += 1000;  // as if it came from a machine that numbers its interfaces otherwise
  runRanks(3, settings, id, [](Bootstrap& bootstrap) { exerciseAllGather(bootstrap, 2); });
}

TEST(Bootstrap, ListensWhereItReachesTheRoot) {
  Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  settings.socketInterface.clear();
  runRanks(3, settings, id, [](Bootstrap& bootstrap) { exerciseAllGather(bootstrap, 3); });
}

// The same address serves one communicator after the other; rank 0 comes last.
TEST(Bootstrap, CommIdTwiceInARow) {
  Settings settings = localSettings();
  settings.commId = fmt::format("localhost:{}", freePort());
  for (int round = 0; round < 3; round++) {
    expectNoErrors(runThreads(firstRanks(4), [&](int rank) {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      // Each rank makes the id itself, as programs started without a launcher do.
      auto bootstrap = Bootstrap::connect(createUniqueId(settings), rank, 4, settings);
      exerciseAllGather(*bootstrap, static_cast<uint32_t>(round));
    }));
  }
}

TEST(Bootstrap, SeveralProcesses) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  if (!kChildMayStartThreads) GTEST_SKIP() << "ThreadSanitizer: no threads in forked children";
  constexpr int kProcesses = 4;
  std::vector<pid_t> children;
  // The root starts its work only when no more copies of it are made.
  int gate[2];
  ASSERT_EQ(::pipe(gate), 0);
  for (int rank = 0; rank < kProcesses; rank++) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int status = 1;
      char byte;
      ::close(gate[1]);
      EXPECT_EQ(::read(gate[0], &byte, 1), 0);
      try {
        auto bootstrap = Bootstrap::connect(id, rank, kProcesses, settings);
        exerciseAllGather(*bootstrap, 4);
        // A child can be the root of ids of its own, and ends without waiting for its parent's.
        Bootstrap::connect(createUniqueId(settings), 0, 1, settings)->barrier();
        createUniqueId(settings);
        bootstrap->barrier();
        status = testing::Test::HasFailure() ? 1 : 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      std::exit(status);  // with the clean-up that a program's end does
    }
    children.push_back(child);
  }
  ::close(gate[0]);
  ::close(gate[1]);
  for (pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace
}  // namespace unisono::bootstrap
