// SPDX-License-Identifier: Apache-2.0
// Communicators that share the connections of the one that they were split from, and what becomes
// of each of them when another one ends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <csignal>
#include <latch>
#include <mutex>
#include <optional>

#include "bootstrap/connection_pool.h"
#include "bootstrap_testing.h"
#include "support/seed.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

// ThreadSanitizer ends a forked child of a process with threads when it starts one.
#ifdef __SANITIZE_THREAD__
constexpr bool kChildMayStartThreads = false;
#else
constexpr bool kChildMayStartThreads = true;
#endif

// What a rank hears of the others.
class Watcher final : public PeerWatcher {
 public:
  void peerFailed(const Error& error) override {
    const std::lock_guard lock(mutex_);
    failure_ = error;
  }
  void peerLeft(const Departure& departure) override {
    const std::lock_guard lock(mutex_);
    left_.push_back(departure.rank);
  }
  std::optional<Error> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  bool hasLeft(int rank) const {
    const std::lock_guard lock(mutex_);
    return std::ranges::count(left_, rank) > 0;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> failure_;
  std::vector<int> left_;
};

template <typename Condition>
void eventually(const char* what, const Condition& condition) {
  const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    ASSERT_LT(Clock::now(), limit) << what;
    std::this_thread::sleep_for(milliseconds(2));
  }
}

constexpr int kNone = -1;  // a color: this rank does not take part

struct Choice {
  int color, key;
};

// The ranks of `color` in the order of their keys.
std::vector<int> membersOf(const std::vector<Choice>& choices, int color) {
  std::vector<int> members;
  for (int rank = 0; rank < static_cast<int>(choices.size()); rank++) {
    if (choices[static_cast<size_t>(rank)].color == color) members.push_back(rank);
  }
  std::ranges::stable_sort(members, {},
                           [&](int rank) { return choices[static_cast<size_t>(rank)].key; });
  return members;
}

int indexOf(const std::vector<int>& members, int rank) {
  return static_cast<int>(std::ranges::find(members, rank) - members.begin());
}

std::unique_ptr<Bootstrap> split(Bootstrap& parent, int color, int key,
                                 std::shared_ptr<PeerWatcher> watcher = {}) {
  const uint64_t number = parent.numberAttempts(1);
  std::unique_ptr<Seat> seat;
  if (color != kNone) seat = parent.takeSeat(number, color);
  const std::vector<Choice> choices = parent.allGather(Choice{color, key});
  if (color == kNone) return nullptr;
  const std::vector<int> members = membersOf(choices, color);
  return parent.connectMembers(std::move(seat), indexOf(members, parent.rank()), members,
                               localSettings(), {}, std::move(watcher));
}

void expectAllGather(Bootstrap& bootstrap, uint64_t salt) {
  struct Part {
    uint64_t rank, salted;
  };
  const auto own = static_cast<uint64_t>(bootstrap.rank());
  const std::vector<Part> all = bootstrap.allGather(Part{own, own * 7919 + salt});
  for (uint64_t rank = 0; rank < all.size(); rank++) {
    EXPECT_EQ(all[rank].rank, rank) << "rank " << own;
    EXPECT_EQ(all[rank].salted, rank * 7919 + salt) << "rank " << own;
  }
}

// Everybody sends to everybody, so that every pair gets into contact.
void expectMessages(Bootstrap& bootstrap, uint64_t salt) {
  const auto message = [&](int from, int to) {
    return std::vector<std::byte>(static_cast<size_t>(from * 31 + to) + salt % 1000,
                                  static_cast<std::byte>(salt));
  };
  const int rank = bootstrap.rank();
  for (int peer = 0; peer < bootstrap.size(); peer++) bootstrap.send(peer, 3, message(rank, peer));
  for (int peer = 0; peer < bootstrap.size(); peer++) {
    EXPECT_EQ(bootstrap.receive(peer, 3), message(peer, rank)) << peer << " to " << rank;
  }
}

// Generations of random splits of communicators that still exist, which are used at random and end
// in a random order: parents before their children, and children first.
TEST(BootstrapFamily, RandomSplitsAndEnds) {
  const uint64_t seed = test::seed();
  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; round++) {
    const auto ranks = static_cast<int>(2 + (seed + static_cast<uint64_t>(round) * 5) % 12);
    runRanks(ranks, localSettings(), [&](Bootstrap& first) {
      // Drawn alike on all ranks.
      std::mt19937 common(static_cast<uint32_t>(seed) + static_cast<uint32_t>(round));
      std::vector<std::unique_ptr<Bootstrap>> owned;
      std::vector<Bootstrap*> live{&first};
      for (int generation = 0; generation < 4; generation++) {
        // Those that exist on all ranks are at the same index; a missing one is null.
        const size_t which = common() % live.size();
        const int colors = static_cast<int>(1 + common() % 3);
        std::vector<int> color(static_cast<size_t>(ranks)), key(static_cast<size_t>(ranks));
        for (int& c : color) c = static_cast<int>(common() % static_cast<uint32_t>(colors + 1)) - 1;
        for (int& k : key) k = static_cast<int>(common() % 5);
        Bootstrap* parent = live[which];
        if (parent == nullptr) {
          live.push_back(nullptr);
          continue;
        }
        const auto mine = static_cast<size_t>(first.rank());
        owned.push_back(split(*parent, color[mine], key[mine]));
        live.push_back(owned.back().get());
        if (live.back() == nullptr) continue;
        expectAllGather(*live.back(), seed + which);
        expectMessages(*live.back(), seed + which);
      }
      for (Bootstrap* each : live) {
        if (each != nullptr) expectAllGather(*each, seed);
      }
      // In an order of its own.
      std::mt19937 own(static_cast<uint32_t>(seed) + 100 + static_cast<uint32_t>(first.rank()));
      std::ranges::shuffle(owned, own);
      for (auto& each : owned) each.reset();
    });
  }
}

// Where a part of the tree has the ranks of a color, nobody connects. The descriptors are counted
// while nobody runs.
TEST(BootstrapFamily, SplitsUseTheConnectionsThatAreThere) {
  constexpr int kRanks = 32;
  int before = 0, halves = 0, blocks = 0, oddOnes = 0, oddAgain = 0;
  std::barrier<> meet(kRanks);
  runRanks(kRanks, localSettings(), [&](Bootstrap& first) {
    const auto count = [&](int& into) {
      first.barrier();
      meet.arrive_and_wait();
      if (first.rank() == 0) into = openDescriptors();
      meet.arrive_and_wait();
    };
    const auto use = [&](int color, int key) {
      const auto child = split(first, color, key);
      expectAllGather(*child, 1);
      first.barrier();
    };
    const int rank = first.rank();
    count(before);
    use(rank / 16, -rank);
    count(halves);
    use(rank / 8, rank);
    use(rank / 4, rank);
    count(blocks);
    use(rank % 2, rank);
    count(oddOnes);
    use(rank % 2, -rank);
    count(oddAgain);
  });
  EXPECT_EQ(halves, before);
  EXPECT_EQ(blocks, before);
  EXPECT_LE(oddOnes, before + 2 * kRanks) << "one connection for each rank of the new trees";
  EXPECT_EQ(oddAgain, oddOnes) << "connections of an earlier split";
}

TEST(BootstrapFamily, ManySplitsLeaveNothingBehind) {
  constexpr int kRanks = 4, kSplits = 1000;
  const uint64_t seed = test::seed();
  std::barrier<> meet(kRanks);
  // Threads that serve the process have descriptors of their own, which stay.
  runRanks(1, localSettings(), [](Bootstrap& bootstrap) { bootstrap.barrier(); });
  const int before = openDescriptors();
  int early = 0, late = 0;
  runRanks(kRanks, localSettings(), [&](Bootstrap& first) {
    std::mt19937 common(static_cast<uint32_t>(seed));
    expectMessages(first, 1);  // all are connected
    const auto count = [&](int& into) {
      meet.arrive_and_wait();
      if (first.rank() == 0) into = openDescriptors();
      meet.arrive_and_wait();
    };
    for (int i = 0; i < kSplits; i++) {
      if (i == 10) count(early);
      std::vector<Choice> choices(kRanks);
      for (Choice& choice : choices) {
        choice = {static_cast<int>(common() % 3) - 1, static_cast<int>(common() % 4)};
      }
      const Choice mine = choices[static_cast<size_t>(first.rank())];
      const auto child = split(first, mine.color, mine.key);
      if (child != nullptr) expectAllGather(*child, seed + static_cast<uint64_t>(i));
    }
    first.barrier();
    count(late);
  });
  EXPECT_EQ(late, early);
  eventually("the end of the root", [&] { return openDescriptors() <= before; });
}

// The parent has gone everywhere; children need connections that it never had.
TEST(BootstrapFamily, ChildrenOutliveTheirParent) {
  constexpr int kRanks = 9;
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  expectNoErrors(runThreads(firstRanks(kRanks), [&](int rank) {
    auto parent = Bootstrap::connect(id, rank, kRanks, settings);
    const auto watcher = std::make_shared<Watcher>();
    const auto child = split(*parent, rank % 2, -rank, watcher);
    const auto grandchild = split(*child, 0, rank);
    if (rank % 3 == 0) child->barrier();
    parent->leave("was destroyed", [](int) { return DepartureCounts{}; });
    parent.reset();
    if (rank % 3 != 0) child->barrier();
    expectAllGather(*child, 5);
    expectMessages(*child, 5);
    expectMessages(*grandchild, 6);
    EXPECT_FALSE(watcher->failure());
    EXPECT_FALSE(watcher->hasLeft(0));
    child->barrier();
  }));
}

// A failure of a child is told to its ranks, with their numbers in it, and to nobody else; and that
// of a parent not to its children.
TEST(BootstrapFamily, FailureEndsOneCommunicator) {
  constexpr int kRanks = 6;
  for (const bool parentFails : {false, true}) {
    const Settings settings = localSettings();
    const UniqueId id = createUniqueId(settings);
    std::barrier<> meet(kRanks);
    expectNoErrors(runThreads(firstRanks(kRanks), [&](int rank) {
      const auto ofParent = std::make_shared<Watcher>();
      const auto ofChild = std::make_shared<Watcher>(), ofSibling = std::make_shared<Watcher>();
      auto parent = Bootstrap::connect(id, rank, kRanks, settings, {}, ofParent);
      auto child = split(*parent, rank / 3, -rank, ofChild);  // rank 4 is 1 in its child
      auto sibling = split(*parent, 0, rank, ofSibling);
      child->barrier();
      sibling->barrier();
      meet.arrive_and_wait();
      if (rank == 4) (parentFails ? *parent : *child).fail("the file is missing");
      const bool hears = rank != 4 && (parentFails || rank >= 3);
      const auto& watcher = parentFails ? ofParent : ofChild;
      if (hears) {
        eventually("the failure", [&] { return watcher->failure().has_value(); });
        EXPECT_THAT(
            watcher->failure()->what(),
            StartsWith(parentFails ? "Rank 4 reports: the file" : "Rank 1 reports: the file"));
        EXPECT_THROW((parentFails ? *parent : *child).barrier(), Error);
      }
      meet.arrive_and_wait();
      expectAllGather(*sibling, 3);
      expectMessages(*sibling, 3);
      if (parentFails) expectAllGather(*child, 4);
      if (!parentFails) expectAllGather(*parent, 4);
      if (!parentFails && rank < 3) expectMessages(*child, 4);
      // Nor does the end of what has failed matter.
      (parentFails ? parent : child).reset();
      expectMessages(*sibling, 5);
      EXPECT_FALSE(ofSibling->failure());
      EXPECT_FALSE((parentFails ? ofChild : ofParent)->failure());
    }));
  }
}

// One rank destroys a child, and is named there to whoever needs it. The parent and a sibling go
// on.
TEST(BootstrapFamily, DepartureIsOfOneCommunicator) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::barrier<> meet(4);
  expectNoErrors(runThreads(firstRanks(4), [&](int rank) {
    const auto ofParent = std::make_shared<Watcher>(), ofChild = std::make_shared<Watcher>();
    auto parent = Bootstrap::connect(id, rank, 4, settings, {}, ofParent);
    auto child = split(*parent, 0, -rank, ofChild);
    expectMessages(*child, 1);
    child->barrier();
    meet.arrive_and_wait();
    if (rank == 1) child.reset();  // rank 2 there
    if (rank != 1) {
      eventually("the departure", [&] { return ofChild->hasLeft(2); });
      EXPECT_FALSE(ofChild->failure());
      try {
        child->receive(2, 1);
        ADD_FAILURE() << "it has left";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("has left the communicator"), HasSubstr("peer 2")));
      }
      EXPECT_FALSE(ofChild->failure());
    }
    meet.arrive_and_wait();
    expectMessages(*parent, 2);
    expectAllGather(*parent, 2);
    EXPECT_FALSE(ofParent->hasLeft(1));
    expectMessages(*split(*parent, 0, rank), 3);
    meet.arrive_and_wait();
  }));
}

// The first message to a rank that has left but still exists: its sender is told, and the
// connection, which others use, stays.
TEST(BootstrapFamily, FirstMessageToOneThatHasLeftHarmsNothing) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::barrier<> meet(2);
  expectNoErrors(runThreads({0, 1}, [&](int rank) {
    const auto ofParent = std::make_shared<Watcher>(), ofChild = std::make_shared<Watcher>();
    auto parent = Bootstrap::connect(id, rank, 2, settings, {}, ofParent);
    auto child = split(*parent, 0, rank, ofChild);
    if (rank == 0) child->leave("was destroyed", [](int) { return DepartureCounts{}; });
    meet.arrive_and_wait();
    if (rank == 1) {
      const auto talk = [&] {
        for (int i = 0; i < 3; i++) child->send(0, 5, std::vector<std::byte>(100'000));
        child->receive(0, 5);
      };
      EXPECT_THROW(talk(), Error);
      EXPECT_FALSE(ofChild->failure());
    }
    meet.arrive_and_wait();
    expectMessages(*parent, 1);
    expectMessages(*split(*parent, 0, rank), 2);
    EXPECT_FALSE(ofParent->failure());
    meet.arrive_and_wait();
  }));
}

// What others send to a rank that has a seat and nothing else yet is kept for it.
TEST(BootstrapFamily, EarlyMessagesAreKept) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::latch sent(2);
  expectNoErrors(runThreads(firstRanks(3), [&](int rank) {
    auto parent = Bootstrap::connect(id, rank, 3, settings);
    auto seat = parent->takeSeat(7, 1);
    parent->barrier();
    if (rank == 1) sent.wait();
    const std::vector<int> members{2, 1, 0};
    const int mine = 2 - rank;
    auto child = parent->connectMembers(std::move(seat), mine, members, settings, {}, {});
    if (rank != 1) {
      for (int i = 0; i < 3; i++) {
        child->send(1, 5, std::vector<std::byte>(10, static_cast<std::byte>(10 * rank + i)));
      }
      child->send(1, 6, std::vector<std::byte>(300'000));
      sent.count_down();
    } else {
      for (const int peer : {0, 2}) {
        for (int i = 0; i < 3; i++) {
          EXPECT_EQ(child->receive(peer, 5),
                    std::vector<std::byte>(10, static_cast<std::byte>(10 * (2 - peer) + i)));
        }
        EXPECT_EQ(child->receive(peer, 6).size(), 300'000u);
      }
    }
    expectAllGather(*child, 9);
  }));
}

// A rank gives its seat up when others have greeted it already, or before they do. They are told,
// and nothing else ends.
TEST(BootstrapFamily, SeatThatIsGivenUpEndsTheWaitOfOthers) {
  for (const bool late : {false, true}) {
    const Settings settings = localSettings();
    const UniqueId id = createUniqueId(settings);
    std::latch sent(2), gaveUp(1), done(3);
    expectNoErrors(runThreads(firstRanks(3), [&](int rank) {
      const auto ofParent = std::make_shared<Watcher>();
      auto parent = Bootstrap::connect(id, rank, 3, settings, {}, ofParent);
      auto seat = parent->takeSeat(7, 1);
      parent->barrier();
      if (rank == 1) {
        if (late) sent.wait();
        seat.reset();
        gaveUp.count_down();
      } else {
        if (!late) gaveUp.wait();
        auto child =
            parent->connectMembers(std::move(seat), rank, std::vector{0, 1, 2}, settings, {}, {});
        child->send(1, 5, {});
        sent.count_down();
        try {
          child->receive(1, 5);
          ADD_FAILURE() << "nobody is there";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::remoteError);
          EXPECT_THAT(error.what(), HasSubstr("not in this communicator"));
        }
      }
      done.arrive_and_wait();
      expectAllGather(*parent, 8);
      EXPECT_FALSE(ofParent->failure());
    }));
  }
}

// Of four processes one is killed. Every communicator that it is in fails, with its number there,
// also where the parent has gone. Others go on.
TEST(BootstrapFamily, DeathEndsEveryCommunicatorOfTheProcess) {
  if (!kChildMayStartThreads) GTEST_SKIP() << "ThreadSanitizer: no threads in forked children";
  for (const bool withParent : {true, false}) {
    const Settings settings = localSettings();
    const UniqueId id = createUniqueId(settings);
    constexpr int kProcesses = 4, kVictim = 2;
    std::vector<pid_t> processes;
    int gate[2], survivors[2];
    ASSERT_EQ(::pipe(gate), 0);
    ASSERT_EQ(::pipe(survivors), 0);
    for (int rank = 0; rank < kProcesses; rank++) {
      const pid_t process = ::fork();
      ASSERT_GE(process, 0);
      if (process != 0) {
        processes.push_back(process);
        continue;
      }
      char byte = 0;
      ::close(gate[1]);
      if (rank == kVictim) ::close(survivors[1]);
      EXPECT_EQ(::read(gate[0], &byte, 1), 0);
      try {
        const auto ofParent = std::make_shared<Watcher>(), ofAll = std::make_shared<Watcher>();
        const auto ofSpared = std::make_shared<Watcher>(), ofPair = std::make_shared<Watcher>();
        auto parent = Bootstrap::connect(id, rank, kProcesses, settings, {}, ofParent);
        const auto all = split(*parent, 0, -rank, ofAll);  // the victim is rank 1
        const auto pair = split(*all, rank / 2, rank, ofPair);
        const auto spared = split(*all, rank == kVictim ? kNone : 0, rank, ofSpared);
        pair->barrier();
        if (spared != nullptr) spared->barrier();
        all->barrier();
        if (!withParent) parent.reset();
        all->barrier();
        // The victim dies when the others have left the barrier, which could fail otherwise.
        if (rank == kVictim) {
          for (int i = 1; i < kProcesses; i++) EXPECT_EQ(::read(survivors[0], &byte, 1), 1);
          ::raise(SIGKILL);
        }
        EXPECT_EQ(::write(survivors[1], &byte, 1), 1);
        const auto expectDeath = [&](const Watcher& watcher, int number) {
          eventually("the death", [&] { return watcher.failure().has_value(); });
          EXPECT_THAT(watcher.failure()->what(),
                      AllOf(HasSubstr("Rank " + std::to_string(number) + " (process"),
                            HasSubstr("has died")));
        };
        expectDeath(*ofAll, 1);
        EXPECT_THROW(all->barrier(), Error);
        if (withParent) expectDeath(*ofParent, kVictim);
        if (rank == 3) expectDeath(*ofPair, 0);
        for (int i = 0; i < 20; i++) expectAllGather(*spared, 1);
        expectMessages(*spared, 1);
        EXPECT_FALSE(ofSpared->failure());
        if (rank < 2) expectMessages(*pair, 2);
        if (rank < 2) {
          EXPECT_FALSE(ofPair->failure());
        }
        spared->barrier();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      std::_Exit(testing::Test::HasFailure() ? 1 : 0);
    }
    for (const int end : {gate[0], gate[1], survivors[0], survivors[1]}) ::close(end);
    for (int rank = 0; rank < kProcesses; rank++) {
      int status = 0;
      const pid_t process = processes[static_cast<size_t>(rank)];
      ASSERT_EQ(::waitpid(process, &status, 0), process);
      if (rank == kVictim) {
        EXPECT_TRUE(WIFSIGNALED(status)) << status;
      } else {
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << rank << ": " << status;
      }
    }
  }
}

// Several threads of a rank use several communicators of a family at once.
TEST(BootstrapFamily, AreUsedAtOnce) {
  runRanks(4, localSettings(), [](Bootstrap& first) {
    std::vector<std::unique_ptr<Bootstrap>> children;
    for (int i = 0; i < 4; i++) children.push_back(split(first, 0, i % 2 == 0 ? first.rank() : 0));
    expectNoErrors(runThreads(firstRanks(4), [&](int i) {
      Bootstrap& child = *children[static_cast<size_t>(i)];
      for (int round = 0; round < 30; round++) {
        expectAllGather(child, static_cast<uint64_t>(i) + static_cast<uint64_t>(round));
        expectMessages(child, static_cast<uint64_t>(i) * 100 + static_cast<uint64_t>(round));
      }
      children[static_cast<size_t>(i)].reset();
    }));
    first.barrier();
  });
}

// An abort ends the waits of one communicator only.
TEST(BootstrapFamily, AbortEndsTheWaitsOfOne) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  std::barrier<> meet(2);
  expectNoErrors(runThreads({0, 1}, [&](int rank) {
    auto parent = Bootstrap::connect(id, rank, 2, settings);
    std::atomic<bool> aborted{false};
    auto seat = parent->takeSeat(3, 0);
    parent->barrier();
    // The callback may ask the parent, as that of a split does.
    auto child = parent->connectMembers(
        std::move(seat), rank, std::vector{0, 1}, settings,
        [&] { return aborted.load() || parent->attemptFailure(77).has_value(); }, {});
    child->barrier();
    if (rank == 0) {
      std::thread aborter([&] {
        std::this_thread::sleep_for(milliseconds(30));
        aborted = true;
      });
      EXPECT_THROW(child->receive(1, 5), Error);
      aborter.join();
    }
    meet.arrive_and_wait();
    expectAllGather(*parent, 1);
    if (rank == 1) parent->failAttempt(77, "the cause");
    if (rank == 0) {
      eventually("the failed attempt", [&] { return parent->attemptFailure(77).has_value(); });
    }
    expectAllGather(*parent, 2);
    meet.arrive_and_wait();
  }));
}

}  // namespace
}  // namespace unisono::bootstrap
