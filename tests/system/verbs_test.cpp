// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "network_testing.h"
#include "support/fake_verbs.h"

// Ranks on simulated nodes that InfiniBand or RoCE joins: adapters of net/fake_verbs.cpp, in
// processes of their own for each test, as the adapters read the environment once.
namespace unisono::system_test {
namespace {

using namespace std::chrono_literals;

using Variables = std::vector<std::pair<const char*, const char*>>;

void useVerbs(const Variables& variables = {}) {
  testing::loadFakeVerbs();
  ::setenv("NCCL_NET", "IB", 1);
  for (const auto& [name, value] : variables) ::setenv(name, value, 1);
}

// Runs `body` in processes that are a node each, once all have joined. `special` are the variables
// of the last one.
void onNodes(int nodes, const Variables& variables, const Variables& special,
             const std::function<void(int rank, ncclComm_t comm)>& body) {
  const Pipe pipe;
  const std::vector<int> results = runChildren(nodes, [&](int rank) {
    useVerbs(variables);
    if (rank == nodes - 1) useVerbs(special);
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    check(unisonoHostSetDevice(rank));
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, nodes, sharedId(pipe, rank, nodes), rank));
    body(rank, comm);
  });
  EXPECT_EQ(results, std::vector<int>(static_cast<size_t>(nodes), 0));
}

TEST(Verbs, JoinTwoProcesses) {
  onNodes(2, {}, {}, [](int, ncclComm_t comm) {
    for (const size_t count : {1, 1000, 300'000}) useOnce(comm, count);
    EXPECT_GT(testing::fakeVerbsCounter("fakeVerbsRequests"), 0);
    check(ncclCommDestroy(comm));
    EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsOpen"), 0) << "all that was made is destroyed";
  });
}

// Two communicators at once, of which one outlives the other.
TEST(Verbs, MoveTheDataOfEveryCall) {
  inChild([] {
    useVerbs();
    {
      const Ranks first(3, 1);  // nodes, ranks of each
      {
        const Ranks second(2, 2);
        everyCall(second, {4099});
        everyCall(first, {1});
      }
      everyCall(first, {60'001});
    }
    EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsOpen"), 0) << "all that was made is destroyed";
  });
}

}  // namespace
}  // namespace unisono::system_test
