// SPDX-License-Identifier: Apache-2.0
// Communicators whose ranks are shared out among several roots.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <numeric>

#include "bootstrap/rank_tree.h"
#include "bootstrap/root_service.h"
#include "bootstrap_testing.h"

namespace unisono::bootstrap {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

TEST(RankTree, SubtreesAreRangesOfRanks) {
  for (int ranks = 1; ranks <= 40; ranks++) {
    for (int roots = 1; roots <= ranks; roots++) {
      const RankTree tree{0, ranks, roots};
      EXPECT_EQ(tree.parent(), -1);
      EXPECT_EQ(tree.end(), ranks);
      int deepest = 0;
      for (int rank = 0; rank < ranks; rank++) {
        const RankTree here = tree.of(rank);
        int next = rank + 1;
        for (const int child : here.children()) {
          ASSERT_EQ(child, next) << rank << " of " << ranks << " with " << roots;
          ASSERT_EQ(tree.of(child).parent(), rank);
          next = tree.of(child).end();
        }
        ASSERT_EQ(next, here.end());
        int depth = 0;
        for (int r = rank; r != 0; r = tree.of(r).parent()) depth++;
        deepest = std::max(deepest, depth);
      }
      const auto perRoot = static_cast<unsigned>((ranks + roots - 1) / roots);
      EXPECT_LE(deepest, std::bit_width(perRoot - 1) + std::bit_width(unsigned(roots) - 1));
    }
  }
}

// As NCCL shares ranks out: the first ranks % roots of the roots have one rank more.
TEST(RankTree, BlocksAreEvenAndInOrder) {
  std::vector<int> blocks;
  for (int rank = 0; rank < 11; rank++) blocks.push_back(RankTree{rank, 11, 4}.block());
  EXPECT_EQ(blocks, (std::vector{0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3}));
  EXPECT_EQ((RankTree{0, 11, 4}.headOf(3)), 9);
  EXPECT_TRUE((RankTree{9, 11, 4}.isHead()));
  EXPECT_FALSE((RankTree{10, 11, 4}.isHead()));
}

std::vector<UniqueId> makeIds(int count, const Settings& settings) {
  std::vector<UniqueId> ids;
  for (int i = 0; i < count; i++) ids.push_back(createUniqueId(settings));
  return ids;
}

TEST(BootstrapRoots, AllRanksHearOfAll) {
  const Settings settings = localSettings();
  for (const auto& [ranks, roots] :
       std::vector<std::pair<int, int>>{{1, 1}, {2, 2}, {7, 3}, {8, 8}, {13, 5}, {24, 4}}) {
    const std::vector<UniqueId> ids = makeIds(roots, settings);
    std::vector<int> expected(static_cast<size_t>(ranks));
    std::iota(expected.begin(), expected.end(), 0);
    expectNoErrors(runThreads(firstRanks(ranks), [&, count = ranks](int rank) {
      const auto bootstrap = Bootstrap::connect(ids, rank, count, settings);
      EXPECT_EQ(bootstrap->allGather(rank), expected);
      // The addresses of all are known.
      const int peer = (rank + count / 2) % count, other = (rank + count - count / 2) % count;
      bootstrap->send(peer, 5, std::as_bytes(std::span(&rank, 1)));
      EXPECT_EQ(bootstrap->receive(other, 5).size(), sizeof(rank));
      bootstrap->barrier();
    }));
  }
}

// Whichever rank is missing, the others of all roots hear of it.
TEST(BootstrapRoots, MissingRankIsNamedToTheRanksOfAllRoots) {
  const Settings settings = localSettings(1);
  constexpr int kRanks = 12, kRoots = 4;
  for (const int missing : {1, 9}) {
    const std::vector<UniqueId> ids = makeIds(kRoots, settings);
    std::vector<int> ranks = firstRanks(kRanks);
    std::erase(ranks, missing);
    const auto errors = runThreads(
        ranks, [&](int rank) { Bootstrap::connect(ids, rank, kRanks, settings)->barrier(); });
    int named = 0;
    for (const auto& error : errors) {
      const Error caught = errorOf(error);
      EXPECT_THAT(caught.what(), HasSubstr("did not join")) << missing;
      if (std::string(caught.what()).find(fmt::format("rank {}", missing)) != std::string::npos) {
        named++;
      }
    }
    EXPECT_GE(named, kRanks / kRoots - 1);
  }
}

// A rank that gives up, or ends, while others wait for their roots.
TEST(BootstrapRoots, RankThatLeavesEndsTheWaitOfAll) {
  const Settings settings = localSettings();
  constexpr int kRanks = 9, kRoots = 3;
  for (const int leaver : {0, 3, 5, 8}) {
    const std::vector<UniqueId> ids = makeIds(kRoots, settings);
    // Rank 1 never comes, so that nobody can be done before.
    std::vector<int> ranks = firstRanks(kRanks);
    std::erase(ranks, 1);
    const auto errors = runThreads(ranks, [&](int rank) {
      // It is called a few times until the rank has announced itself, and then for each slice.
      int calls = 0;
      Bootstrap::connect(ids, rank, kRanks, settings,
                         [&calls, gives = rank == leaver] { return gives && ++calls > 10; });
    });
    for (size_t i = 0; i < ranks.size(); i++) {
      const std::string text = errorOf(errors[i]).what();
      if (ranks[i] == leaver) {
        EXPECT_THAT(text, HasSubstr("aborted"));
      } else {
        EXPECT_THAT(text, HasSubstr(fmt::format("Rank {} ", leaver))) << ranks[i];
      }
    }
  }
}

TEST(BootstrapRoots, ListsThatDifferAreNamed) {
  const Settings settings = localSettings();
  const std::vector<UniqueId> ids = makeIds(3, settings);
  std::vector<UniqueId> swapped = ids;
  std::swap(swapped[1], swapped[2]);
  const auto errors = runThreads(firstRanks(6), [&](int rank) {
    Bootstrap::connect(rank == 1 ? swapped : ids, rank, 6, settings)->barrier();
  });
  for (const auto& error : errors) {
    EXPECT_THAT(errorOf(error).what(), HasSubstr("different lists of unique ids"));
  }
}

TEST(BootstrapRoots, IdsThatCannotBeUsedTogether) {
  const Settings settings = localSettings();
  const UniqueId id = createUniqueId(settings);
  Settings fixed = settings;
  fixed.commId = "127.0.0.1:29519";  // below the ports that connections are given
  const UniqueId atAddress = createUniqueId(fixed);
  const auto refusal = [&](std::vector<UniqueId> ids, int ranks) {
    return std::string(
        errorOf(runThreads({0}, [&](int) { Bootstrap::connect(ids, 0, ranks, settings); }).front())
            .what());
  };
  EXPECT_THAT(refusal({id, id}, 2), HasSubstr("Unique ids 0 and 1 are the same"));
  EXPECT_THAT(refusal({id, atAddress}, 2), HasSubstr("NCCL_COMM_ID"));
  EXPECT_THAT(refusal({id, createUniqueId(settings)}, 1), HasSubstr("2 unique ids"));
  // With NCCL_COMM_ID all ids are the same, and one root serves all ranks.
  expectNoErrors(runThreads(firstRanks(3), [&](int rank) {
    Bootstrap::connect(std::vector{atAddress, atAddress}, rank, 3, settings)->barrier();
  }));
}

// The process that made one of the ids ends.
TEST(BootstrapRoots, EndOfOneRootIsToldByAll) {
  const Settings settings = localSettings();
  std::vector<UniqueId> ids = makeIds(3, settings);
  const std::function<bool()> never;
  Listener listener(Address{AddressFamily::ipv4, 0, 0, {127, 0, 0, 1}},
                    Wait(std::chrono::seconds(1), never));
  ids[1].root = listener.address();
  auto root = std::make_unique<RootService>(std::move(listener), ids[1].secret,
                                            RootTimes{std::chrono::seconds(30)});
  std::thread end([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    root.reset();
  });
  // Rank 4, which it serves, is missing.
  const auto errors = runThreads({0, 1, 2, 3, 5, 6, 7, 8},
                                 [&](int rank) { Bootstrap::connect(ids, rank, 9, settings); });
  end.join();
  for (const auto& error : errors) {
    EXPECT_THAT(errorOf(error).what(),
                AnyOf(HasSubstr("The process of the communicator's root ended"),
                      HasSubstr("Cannot reach the communicator's root")));
  }
}

}  // namespace
}  // namespace unisono::bootstrap
