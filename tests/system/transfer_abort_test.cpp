// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "child_processes.h"
#include "network_testing.h"
#include "support/fake_net.h"
#include "support/fake_verbs.h"
#include "support/seed.h"

// One of three ranks, which are nodes of a network, aborts while data are on their way: how long
// that takes, what the others learn, what is left, and whether new communicators work.
namespace unisono::system_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr int kRounds = kRanks;  // each rank aborts in one of them
constexpr size_t kInts = scaled(2 << 20, 256 << 10);
constexpr int kCallsAtOnce = 8;
constexpr std::chrono::milliseconds kLimit{scaled(100, 1000)}, kPatience{60'000};

enum class Net { sockets, verbs, plugin };

void use(Net net) {
  if (net == Net::sockets) ::setenv("NCCL_NET", "Socket", 1);
  if (net == Net::verbs) {
    testing::loadFakeVerbs();
    ::setenv("NCCL_NET", "IB", 1);
  }
  if (net == Net::plugin) ::setenv("NCCL_NET_PLUGIN", testing::fakeNetPath(11).c_str(), 1);
  // ThreadSanitizer does not see the order that other algorithms make through the network.
  ::setenv("NCCL_ALGO", "ring", 1);
}

// What is open in the adapter or the plug-in.
int openObjects(Net net) {
  if (net == Net::verbs) return testing::fakeVerbsCounter("fakeVerbsOpen");
  return net == Net::plugin ? testing::fakeNetCounter(11, "fakeNetOpen") : 0;
}

enum class Kind { allReduce, messages };

// A rank of a communicator that is made for one abort.
class Player {
 public:
  Player(Kind kind, int rank, const ncclUniqueId& id)
      : kind_(kind),
        rank_(rank),
        from_(rank, kInts * sizeof(int)),
        to_(rank, kInts * sizeof(int)),
        stream_(rank) {
    check(ncclCommInitRank(&comm_, kRanks, id, rank));
  }

  // Returns how long a call takes.
  Clock::duration call() {
    const auto begin = Clock::now();
    check(enqueue());
    stream_.synchronize();
    return Clock::now() - begin;
  }
  void verify() const { useOnce(comm_, kInts); }
  // Makes one call after another, a few of them at once, until one of them fails or `isOver()`.
  template <typename IsOver>
  void keepCalling(IsOver isOver) {
    for (int made = 0; !isOver(); made++) {
      while (made % kCallsAtOnce == 0 && isBusy() && !isOver()) std::this_thread::yield();
      if (enqueue() != ncclSuccess) return;
    }
  }
  bool isBusy() const { return unisonoHostStreamQuery(stream_) == ncclInProgress; }
  bool hasFailed() const {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &state));
    return state != ncclSuccess;
  }
  std::string error() const { return ncclGetLastError(comm_); }
  // Returns how long that took.
  Clock::duration abort() {
    const auto begin = Clock::now();
    check(ncclCommAbort(comm_));
    const auto took = Clock::now() - begin;
    unisonoHostStreamSynchronize(stream_);  // ends; it may have an error
    return took;
  }
  void destroy() { check(ncclCommDestroy(comm_)); }

 private:
  ncclResult_t enqueue() {
    if (kind_ == Kind::allReduce) {
      return ncclAllReduce(from_.as(), to_.as(), kInts, ncclInt, ncclSum, comm_, stream_);
    }
    check(ncclGroupStart());
    const int next = (rank_ + 1) % kRanks, previous = (rank_ + kRanks - 1) % kRanks;
    ncclResult_t state = ncclSend(from_.as(), kInts, ncclInt, next, comm_, stream_);
    if (state == ncclSuccess) {
      state = ncclRecv(to_.as(), kInts, ncclInt, previous, comm_, stream_);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return state == ncclSuccess ? ended : state;
  }

  const Kind kind_;
  const int rank_;
  const DeviceBuffer from_, to_;
  const DeviceStream stream_;
  ncclComm_t comm_ = nullptr;
};

using NetAndKind = std::tuple<Net, Kind>;
class TransferAborts : public ::testing::TestWithParam<NetAndKind> {};
std::string nameOf(const ::testing::TestParamInfo<NetAndKind>& info) {
  constexpr const char* kNets[] = {"Sockets", "Verbs", "Plugin"};
  constexpr const char* kKinds[] = {"AllReduce", "Messages"};
  return std::string(kNets[static_cast<int>(std::get<Net>(info.param))]) +
         kKinds[static_cast<int>(std::get<Kind>(info.param))];
}

TEST_P(TransferAborts, EndTheCommunicatorAndNothingElse) {
  const auto [net, kind] = GetParam();
  const uint64_t seed = test::seed();
  const Pipe ids;
  const Gathering begun(kRanks), ended(kRanks);
  expectAllPass(runChildren(kRanks, [&, net = net, kind = kind](int rank) {
    std::mt19937_64 random(seed + static_cast<uint64_t>(rank));
    use(net);
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    check(unisonoHostSetDevice(rank));
    const auto isClean = [&](int descriptors, int threads) {
      return openObjects(net) == 0 && openDescriptors() <= descriptors &&
             runningThreads() <= threads;
    };
    std::vector<Clock::duration> times;
    int descriptors = 0, threads = 0;
    for (int round = 0; round < kRounds; round++) {
      const int aborter = round % kRanks;
      Player player(kind, rank, sharedId(ids, rank, kRanks));
      player.call();  // connects
      begun.wait(rank);
      const auto each = player.call();
      begun.wait(rank);
      if (rank == aborter) {
        std::uniform_real_distribution<double> calls(0, kCallsAtOnce);
        const auto end = Clock::now() + calls(random) * each;
        player.keepCalling([&] { return Clock::now() > end && player.isBusy(); });
        EXPECT_TRUE(player.isBusy()) << "nothing is on its way";
      } else {
        const auto deadline = Clock::now() + kPatience;
        player.keepCalling([&] { return player.hasFailed() || Clock::now() > deadline; });
        EXPECT_NE(player.error().find("ank " + std::to_string(aborter)), std::string::npos)
            << player.error();
      }
      times.push_back(player.abort());
      ended.wait(rank);
      if (round > 0) continue;
      // What the process keeps is there from the first communicator on.
      while (openObjects(net) != 0) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(100ms);
      descriptors = openDescriptors();
      threads = runningThreads();
    }
    for (const auto deadline = Clock::now() + kPatience;
         !isClean(descriptors, threads) && Clock::now() < deadline;) {
      std::this_thread::sleep_for(10ms);
    }
    EXPECT_EQ(openObjects(net), 0);
    EXPECT_LE(openDescriptors(), descriptors);
    EXPECT_LE(runningThreads(), threads);
    // On a busy machine any one of them may be late.
    std::ranges::sort(times);
    const auto milliseconds = [](Clock::duration time) {
      return std::chrono::duration<double, std::milli>(time).count();
    };
    std::printf("rank %d: aborts took %.1f to %.1f ms\n", rank, milliseconds(times.front()),
                milliseconds(times.back()));
    EXPECT_LT(times[times.size() / 2], kLimit);

    Player player(kind, rank, sharedId(ids, rank, kRanks));
    player.verify();
    player.destroy();
  }));
}
INSTANTIATE_TEST_SUITE_P(All, TransferAborts,
                         ::testing::Combine(::testing::Values(Net::sockets, Net::verbs,
                                                              Net::plugin),
                                            ::testing::Values(Kind::allReduce, Kind::messages)),
                         nameOf);

}  // namespace
}  // namespace unisono::system_test
