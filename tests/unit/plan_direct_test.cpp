// SPDX-License-Identifier: Apache-2.0
#include "plan/direct_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/math.h"
#include "plan/message_choice.h"
#include "plan_testing.h"

// The direct family: which calls it carries and what their launches look like.
namespace unisono::plan {
namespace {

// Streams of 1024 lines, of which a launch moves 256: 2048 bytes.
CommConfig directConfig(int rank, int ranks) {
  CommConfig config = configOf(rank, ranks);
  config.directLineBits = 10;
  testing::setModel(config);
  return config;
}

const device::DirectArguments& argumentsOf(const Launch& launch) {
  return std::get<DirectLaunch>(launch).arguments;
}

// Whether a call of `bytes` bytes of a share is direct.
bool isDirect(const CommConfig& config, Call call, uint64_t bytes) {
  const Plan plan = makePlan(config, {taskOf(call, bytes, device::DataType::uint8, 1)});
  return std::holds_alternative<DirectLaunch>(plan.launches.at(0));
}

TEST(DirectPlan, CarriesWhatALaunchCanMove) {
  for (const Call call : {Call::allReduce, Call::allGather, Call::reduceScatter, Call::broadcast,
                          Call::reduce, Call::send, Call::allToAll}) {
    EXPECT_TRUE(isDirect(directConfig(0, 4), call, 2048));
    EXPECT_FALSE(isDirect(directConfig(0, 4), call, 2049));
    EXPECT_FALSE(isDirect(configOf(0, 4), call, 1));
  }
  EXPECT_FALSE(isDirect(directConfig(0, 1), Call::allReduce, 1));
}

// Copies into the same place of every window, from the next rank on, between barriers.
TEST(DirectPlan, CopyEnginesStoreIntoSymmetricWindows) {
  constexpr uint64_t kShare = 300 << 10, kOffset = 16;
  const CommConfig config = [] {
    CommConfig result = directConfig(1, 3);
    result.directBytes = 256 << 10;
    return result;
  }();
  const auto at = [](uint64_t address) { return reinterpret_cast<std::byte*>(address); };
  const SymmetricWindow window{{at(0x1000'0000), at(0x2000'0000), at(0x3000'0000)}, 1 << 20};
  for (const Call call : {Call::allGather, Call::allToAll}) {
    Task task = taskOf(call, kShare, device::DataType::uint8, 0);
    task.input = at(0x5000'0000);
    task.output = window.bases[1] + kOffset;
    EXPECT_FALSE(usesCopyEngines(config, task));
    task.symmetric = &window;
    ASSERT_TRUE(usesCopyEngines(config, task));
    const Plan plan = makePlan(config, {task});
    ASSERT_EQ(plan.launches.size(), 3u);
    for (const size_t barrier : {0, 2}) {
      const auto& arguments = std::get<BarrierLaunch>(plan.launches[barrier]).arguments;
      EXPECT_EQ(arguments.rank, 1);
      EXPECT_EQ(arguments.ranks, 3);
    }
    EXPECT_EQ(plan.needs.direct, 0b11);
    const auto& copies = std::get<CopyLaunch>(plan.launches[1]).copies;
    ASSERT_EQ(copies.size(), 3u);
    for (size_t i = 0; i < 3; i++) {
      const size_t peer = (1 + 1 + i) % 3;
      EXPECT_EQ(copies[i].to, window.bases[peer] + kOffset + kShare);
      EXPECT_EQ(copies[i].from, at(0x5000'0000) + (call == Call::allToAll ? peer * kShare : 0));
      EXPECT_EQ(copies[i].bytes, kShare);
    }
    // Calls of a group keep their order.
    const Plan group = makePlan(config, {taskOf(Call::allReduce, 1), task, task});
    EXPECT_EQ(group.launches.size(), 7u);
    EXPECT_TRUE(std::holds_alternative<CopyLaunch>(group.launches[2]));
    EXPECT_TRUE(std::holds_alternative<CopyLaunch>(group.launches[5]));
    task.count = (256 << 10) - 1;
    EXPECT_FALSE(usesCopyEngines(config, task));
  }
  // In place a rank's own share stays where it is.
  Task inPlace = taskOf(Call::allGather, kShare, device::DataType::uint8, 0);
  inPlace.output = window.bases[1];
  inPlace.input = window.bases[1] + kShare;
  inPlace.symmetric = &window;
  EXPECT_EQ(std::get<CopyLaunch>(makePlan(config, {inPlace}).launches[1]).copies.size(), 2u);
  Task reduction = taskOf(Call::allReduce, kShare);
  reduction.symmetric = &window;
  EXPECT_FALSE(usesCopyEngines(config, reduction));
}

// Two nodes of two ranks, of which this is the second one of the second node.
CommConfig railConfig() {
  CommConfig config = configOf(3, 4);
  config.directLineBits = 12;
  config.wide = tuning::wideGeometry(2);
  config.wide.offerBytes = 1;
  config.nodes = std::make_shared<const NodeRanks>(std::vector<int>{0, 0, 1, 1});
  testing::setModel(config, {.nodes = 2, .algorithms = "DirectTree"});
  return config;
}

TEST(DirectPlan, RailsJoinWhatNodesHaveReduced) {
  const Task task = taskOf(Call::allReduce, 10'000 + 33);  // bytes
  const auto* const input = static_cast<const std::byte*>(task.input);
  auto* const output = static_cast<std::byte*>(task.output);
  const Plan plan = makePlan(railConfig(), {task});
  ASSERT_EQ(plan.launches.size(), 4u);
  constexpr uint64_t kShare = 4992, kRest = 10'033 - 2 * kShare;

  const auto& scatter = std::get<WideLaunch>(plan.launches[0]).arguments;
  EXPECT_EQ(scatter.rank, 1);
  EXPECT_EQ(scatter.ranks, 2);
  EXPECT_FALSE(scatter.offers);
  EXPECT_TRUE(scatter.work.reduces);
  EXPECT_EQ(scatter.work.input, input);
  EXPECT_EQ(scatter.work.output, output + kShare);
  EXPECT_EQ(scatter.work.inputBytes, kShare);
  EXPECT_EQ(scatter.work.inputStride, kShare);

  const device::DirectArguments& rest = argumentsOf(plan.launches[1]);
  EXPECT_EQ(rest.rank, 1);
  EXPECT_EQ(rest.ranks, 2);
  ASSERT_EQ(rest.works, 1);
  EXPECT_EQ(rest.work[0].input, input + 2 * kShare);
  EXPECT_EQ(rest.work[0].output, output + 2 * kShare);
  EXPECT_EQ(rest.work[0].inputBytes, kRest);

  const auto& rails = std::get<CollectiveLaunch>(plan.launches[2]).arguments;
  ASSERT_EQ(rails.works, 2);
  for (int w = 0; w < 2; w++) {
    const device::CollectiveWork& work = rails.work[w];
    EXPECT_EQ(work.algorithm, device::Algorithm::directTree);
    EXPECT_EQ(work.operation, device::Operation::allReduce);
    EXPECT_EQ(work.input, work.output);
    EXPECT_EQ(work.output, output + (w == 0 ? kShare : 2 * kShare));
    EXPECT_EQ(work.count, w == 0 ? kShare : kRest);
  }

  const auto& gather = std::get<WideLaunch>(plan.launches[3]).arguments;
  EXPECT_FALSE(gather.work.reduces);
  EXPECT_FALSE(gather.work.own);
  EXPECT_EQ(gather.work.input, output + kShare);
  EXPECT_EQ(gather.work.output, output);
  EXPECT_EQ(gather.work.outputBytes, kShare);
  EXPECT_EQ(gather.work.outputStride, kShare);

  EXPECT_TRUE(plan.needs.rails);
  EXPECT_FALSE(plan.needs.trees);
  EXPECT_EQ(plan.needs.direct, 1);
  EXPECT_EQ(plan.needs.wide, 1);
  EXPECT_EQ(buffersOffered(railConfig(), task).outputBytes, 0u);

  // Without a rest, and with nothing else.
  EXPECT_EQ(makePlan(railConfig(), {taskOf(Call::allReduce, 10'240)}).launches.size(), 3u);
  const Plan small = makePlan(railConfig(), {taskOf(Call::allReduce, 8192)});
  ASSERT_EQ(small.launches.size(), 2u);
  EXPECT_EQ(argumentsOf(small.launches[0]).work[0].inputBytes, 8192u);
  EXPECT_EQ(small.needs.wide, 0);
  // Groups keep their order.
  EXPECT_EQ(makePlan(railConfig(), {task, taskOf(Call::broadcast, 5), task}).launches.size(), 9u);
}

// Operands are multiplied once, before any sum, and sums divided once, after the last one.
TEST(DirectPlan, RailsScaleOnce) {
  using device::Reduction;
  struct Case {
    Reduction all, inside, along;
  };
  for (const Case& expected :
       {Case{Reduction::preMulSum, Reduction::preMulSum, Reduction::sum},
        Case{Reduction::sumPostDivide, Reduction::sum, Reduction::sumPostDivide},
        Case{Reduction::max, Reduction::max, Reduction::max}}) {
    Task task = taskOf(Call::allReduce, 10'001);
    task.reduction.reduction = expected.all;
    const Plan plan = makePlan(railConfig(), {task});
    ASSERT_EQ(plan.launches.size(), 4u);
    const auto& scatter = std::get<WideLaunch>(plan.launches[0]).arguments.work;
    EXPECT_EQ(scatter.reduction.reduction, expected.inside);
    EXPECT_EQ(argumentsOf(plan.launches[1]).work[0].reduction.reduction, expected.inside);
    const auto& rails = std::get<CollectiveLaunch>(plan.launches[2]).arguments;
    EXPECT_EQ(rails.work[0].reduction.reduction, expected.along);
    EXPECT_EQ(rails.work[1].reduction.reduction, expected.along);
  }
}

TEST(DirectPlan, ObeysTheUser) {
  const auto isDirectWith = [](const char* algorithms, const char* protocols, Call call) {
    CommConfig config = directConfig(0, 4);
    testing::setModel(config, {.algorithms = algorithms, .protocols = protocols});
    return isDirect(config, call, 1);
  };
  EXPECT_FALSE(isDirectWith("ring", "", Call::allReduce));
  EXPECT_FALSE(isDirectWith("ring", "", Call::send));
  EXPECT_TRUE(isDirectWith("direct", "", Call::broadcast));
  EXPECT_FALSE(isDirectWith("allgather:ring", "", Call::allGather));
  EXPECT_TRUE(isDirectWith("allgather:ring", "", Call::reduce));
  EXPECT_FALSE(isDirectWith("", "simple", Call::allReduce));
}

TEST(DirectPlan, CollectivesKeepTheirOrder) {
  const Plan plan =
      makePlan(directConfig(1, 4), {taskOf(Call::broadcast, 9000), taskOf(Call::allReduce, 1000),
                                    taskOf(Call::allGather, 500), taskOf(Call::allReduce, 2049),
                                    taskOf(Call::reduce, 9000), taskOf(Call::reduceScatter, 1)});
  ASSERT_EQ(plan.launches.size(), 4u);
  EXPECT_EQ(std::get<CollectiveLaunch>(plan.launches[0]).arguments.works, 1);
  EXPECT_EQ(argumentsOf(plan.launches[1]).works, 2);
  EXPECT_EQ(argumentsOf(plan.launches[1]).work[1].inputBytes, 500u);
  EXPECT_EQ(std::get<CollectiveLaunch>(plan.launches[2]).arguments.works, 2);
  EXPECT_EQ(argumentsOf(plan.launches[3]).rank, 1);
  EXPECT_EQ(plan.needs.direct, 0b111);
}

TEST(DirectPlan, RootsAndOthersHaveTheirPart) {
  // Rank 2 is the last of the peers of 0 but one.
  struct Case {
    Call call;
    device::DirectPeers rootTo, rootFrom, otherTo, otherFrom;
  };
  constexpr int kRoot = 2;
  for (const Case& expected :
       {Case{Call::broadcast, 0b111, 0, 0, 0b010}, Case{Call::scatter, 0b111, 0, 0, 0b010},
        Case{Call::reduce, 0, 0b111, 0b010, 0}, Case{Call::gather, 0, 0b111, 0b010, 0}}) {
    const Task task = taskOf(expected.call, 10, device::DataType::uint8, kRoot);
    const device::DirectWork root = directWork(directConfig(kRoot, 4), task);
    const device::DirectWork other = directWork(directConfig(0, 4), task);
    EXPECT_EQ(root.to, expected.rootTo);
    EXPECT_EQ(root.from, expected.rootFrom);
    EXPECT_EQ(other.to, expected.otherTo);
    EXPECT_EQ(other.from, expected.otherFrom);
    EXPECT_EQ(root.own, expected.call != Call::reduce);
    EXPECT_FALSE(other.own);
  }
}

TEST(DirectPlan, OwnSharesInPlaceAreNotCopied) {
  Task task = taskOf(Call::allGather, 16);
  task.input = static_cast<std::byte*>(task.output) + 3 * 16;
  EXPECT_FALSE(directWork(directConfig(3, 4), task).own);
  EXPECT_TRUE(directWork(directConfig(2, 4), task).own);
}

TEST(DirectPlan, OnlyPacksOfEightBytesAreWhole) {
  Task task = taskOf(Call::allGather, 16);
  EXPECT_TRUE(directWork(directConfig(0, 4), task).whole);
  task.count = 12;
  EXPECT_FALSE(directWork(directConfig(0, 4), task).whole);
  task.count = 16;
  task.input = static_cast<const std::byte*>(task.input) + 4;
  EXPECT_FALSE(directWork(directConfig(0, 4), task).whole);
}

// No launch moves more lines of a stream than a receiver may leave unacknowledged.
TEST(DirectPlan, LaunchesAreCutAtTheirLines) {
  std::vector<Task> tasks(10, taskOf(Call::allReduce, 800));  // 100 lines each
  const Plan plan = makePlan(directConfig(0, 2), tasks);
  ASSERT_EQ(plan.launches.size(), 5u);
  for (const Launch& launch : plan.launches) EXPECT_EQ(argumentsOf(launch).works, 2);

  // To different peers there may be as many.
  tasks.clear();
  for (int peer = 1; peer < 4; peer++) {
    tasks.push_back(taskOf(Call::send, 2048, device::DataType::uint8, peer));
  }
  EXPECT_EQ(makePlan(directConfig(0, 4), tasks).launches.size(), 1u);
}

TEST(DirectPlan, LaunchesAreCutAtTheirArguments) {
  const std::vector<Task> tasks(2 * device::kMaxDirectWorks + 1, taskOf(Call::broadcast, 1));
  const Plan plan = makePlan(directConfig(0, 2), tasks);
  ASSERT_EQ(plan.launches.size(), 3u);
  EXPECT_EQ(argumentsOf(plan.launches.back()).works, 1);
  for (const Launch& launch : plan.launches) {
    const auto& direct = std::get<DirectLaunch>(launch);
    EXPECT_LE(direct.blocks, device::kDirectMaxBlocks);
    for (int w = 0; w < direct.arguments.works; w++) {
      EXPECT_LT(direct.arguments.work[w].firstBlock, direct.blocks);
      EXPECT_LE(direct.arguments.work[w].blocks, direct.blocks);
    }
  }
}

TEST(DirectPlan, BlocksOfAWorkAreThoseOfTheLaunchCountedRoundAndRound) {
  const std::vector<Task> tasks(5, taskOf(Call::allReduce, 64 << 10));
  CommConfig config = configOf(0, 2);
  config.directLineBits = 19;
  testing::setModel(config);
  const Plan plan = makePlan(config, tasks);
  ASSERT_EQ(plan.launches.size(), 1u);
  const auto& launch = std::get<DirectLaunch>(plan.launches[0]);
  EXPECT_EQ(launch.blocks, device::kDirectMaxBlocks);
  for (int w = 0; w < 5; w++) {
    EXPECT_EQ(launch.arguments.work[w].blocks, 32);
    EXPECT_EQ(launch.arguments.work[w].firstBlock, w % 2 * 32);
  }
}

TEST(DirectPlan, MessagesOfARoundShareAWork) {
  const Plan plan =
      makePlan(directConfig(0, 2), {taskOf(Call::send, 100, device::DataType::uint8, 1),
                                    taskOf(Call::receive, 60, device::DataType::uint8, 1)});
  ASSERT_EQ(plan.launches.size(), 1u);
  ASSERT_EQ(argumentsOf(plan.launches[0]).works, 1);
  EXPECT_EQ(argumentsOf(plan.launches[0]).work[0].inputBytes, 100u);
  EXPECT_EQ(argumentsOf(plan.launches[0]).work[0].outputBytes, 60u);
  EXPECT_EQ(plan.needs.direct, 0b1);
  EXPECT_EQ(plan.needs.peers.size(), 2u) << "larger messages must not wait for the peer later";
}

// Where small and large messages meet in a group, neither kind waits for the other.
TEST(DirectPlan, DirectMessagesAreSentBeforeAndReceivedAfterStagedOnes) {
  const auto to = [](Call call, uint64_t bytes) {
    return taskOf(call, bytes, device::DataType::uint8, 1);
  };
  const Plan plan = makePlan(directConfig(0, 2), {to(Call::receive, 100), to(Call::send, 5000),
                                                  to(Call::send, 200), to(Call::receive, 6000)});
  ASSERT_EQ(plan.launches.size(), 3u);
  const device::DirectArguments& sends = argumentsOf(plan.launches[0]);
  const device::DirectArguments& receives = argumentsOf(plan.launches[2]);
  EXPECT_TRUE(std::holds_alternative<SendReceiveLaunch>(plan.launches[1]));
  ASSERT_EQ(sends.works, 1);
  EXPECT_EQ(sends.work[0].from, 0);
  EXPECT_EQ(sends.work[0].inputBytes, 200u);
  ASSERT_EQ(receives.works, 1);
  EXPECT_EQ(receives.work[0].to, 0);
  EXPECT_EQ(receives.work[0].outputBytes, 100u);
  EXPECT_EQ(plan.needs.direct, 0b1);
}

// A peer may receive all of a group before it sends: nothing of a group that one launch cannot
// move waits for a direction or a peer before it.
TEST(DirectPlan, LongGroupsAreLaunchedAsStreams) {
  const auto bytesTo = [](Call call, uint64_t bytes, int peer) {
    return taskOf(call, bytes, device::DataType::uint8, peer);
  };
  std::vector<Task> tasks;
  for (int m = 0; m < 3; m++) {
    tasks.push_back(bytesTo(Call::receive, 1000, 1));
    tasks.push_back(bytesTo(Call::send, 2000 - static_cast<uint64_t>(m), 2));
  }
  tasks.push_back(taskOf(Call::allToAll, 16));
  const Plan plan = makePlan(directConfig(0, 3), tasks);
  ASSERT_EQ(plan.launches.size(), 2u);
  const device::DirectArguments& copies = argumentsOf(plan.launches[0]);
  ASSERT_EQ(copies.works, 1);
  EXPECT_TRUE(copies.work[0].own);
  EXPECT_EQ(copies.work[0].to | copies.work[0].from, 0);
  const device::MessagesArguments& streams = *std::get<MessagesLaunch>(plan.launches[1]).arguments;
  ASSERT_EQ(streams.messages, 10);
  std::vector<uint32_t> sentToLast;  // in order: the all-to-all comes before all messages
  for (int m = 0; m < streams.messages; m++) {
    const device::DirectMessage& message = streams.message[m];
    if (message.sends && message.peer == 1) sentToLast.push_back(message.bytes);
  }
  EXPECT_EQ(sentToLast, (std::vector<uint32_t>{16, 2000, 1999, 1998}));
  EXPECT_EQ(plan.needs.direct, 0b11);

  // In place, shares must be sent before others take their places.
  tasks.back().input = tasks.back().output;
  const Plan inPlace = makePlan(directConfig(0, 3), tasks);
  ASSERT_EQ(inPlace.launches.size(), 2u);
  EXPECT_EQ(argumentsOf(inPlace.launches[0]).work[0].to, 0b11);
  EXPECT_EQ(std::get<MessagesLaunch>(inPlace.launches[1]).arguments->messages, 6);
}

// Larger messages of such a group are in the same launch, so that no kind waits for the other.
TEST(DirectPlan, LongGroupsOfBothKindsAreOneLaunch) {
  const auto tasksOf = [](int small, int large) {
    std::vector<Task> tasks;
    for (int m = 0; m < std::max(small, large); m++) {
      if (m < small) tasks.push_back(taskOf(Call::send, 100, device::DataType::uint8, 1));
      if (m < large) tasks.push_back(taskOf(Call::receive, 9000, device::DataType::uint8, 2));
    }
    return tasks;
  };
  const CommConfig config = directConfig(0, 3);
  const Plan plan = makePlan(config, tasksOf(60, 5));
  ASSERT_EQ(plan.launches.size(), 1u);
  const auto& launch = std::get<MessagesLaunch>(plan.launches[0]);
  EXPECT_EQ(launch.arguments->messages, 60);
  EXPECT_EQ(launch.arguments->works, 5);
  const int first = firstMessageChannel(config, 2, 0);
  EXPECT_EQ(launch.arguments->work[4].receive.firstChannel, first);
  EXPECT_EQ(launch.arguments->channels, first + launch.arguments->work[4].receive.channels);
  EXPECT_EQ(launch.blocks(), launch.arguments->channels + 2);

  // Several launches where one has no room, with nothing left out.
  for (const auto& [small, large] :
       {std::pair(1100, 3), std::pair(60, 200), std::pair(2100, 300)}) {
    int messages = 0, works = 0;
    for (const Launch& one : makePlan(config, tasksOf(small, large)).launches) {
      messages += std::get<MessagesLaunch>(one).arguments->messages;
      works += std::get<MessagesLaunch>(one).arguments->works;
    }
    EXPECT_EQ(messages, small);
    EXPECT_EQ(works, large);
  }
}

CommConfig wideConfig(int rank, int ranks, const char* algorithms, const char* protocols) {
  CommConfig config = configOf(rank, ranks);
  config.directLineBits = 10;
  config.wide = tuning::wideGeometry(ranks);
  testing::setModel(config, {.algorithms = algorithms, .protocols = protocols});
  return config;
}

// LL carries messages as long as it is faster than LL128: those to several peers share the links of
// a rank.
TEST(DirectPlan, LlCarriesShorterMessagesToSeveralPeers) {
  CommConfig config = wideConfig(2, 4, "", "");
  config.directLineBits = 17;
  testing::setModel(config, {});
  const auto carriesLl = [&](Call call, uint64_t bytes) {
    return carries(config, MessagePath::directLl, bytes, call);
  };
  constexpr uint64_t kKilo = 1 << 10;
  for (const auto& [call, most] :
       {std::pair(Call::allToAll, 192 * kKilo / 9), std::pair(Call::scatter, 256 * kKilo / 3),
        std::pair(Call::gather, 128 * kKilo), std::pair(Call::send, 128 * kKilo)}) {
    EXPECT_TRUE(carriesLl(call, most)) << static_cast<int>(call);
    EXPECT_FALSE(carriesLl(call, most + 1)) << static_cast<int>(call);
    EXPECT_TRUE(carries(config, MessagePath::directLl128, most + 1, call))
        << static_cast<int>(call);
  }
  testing::setModel(config, {.protocols = "ll"});
  EXPECT_TRUE(carriesLl(Call::allToAll, 256 << 10)) << "where LL128 is excluded";
}

// A lane must overwrite no input that another one has yet to send.
TEST(DirectPlan, TeamsSendOnlyWhatNoLaneOverwrites) {
  const auto teamsOf = [](Call call, device::Algorithm algorithm) {
    const CommConfig config = wideConfig(2, 4, "", "");
    const Task task = taskOf(call, 4096, device::DataType::float32, 1);
    return wideLaunch(config, task, algorithm).arguments.teams.count;
  };
  using device::Algorithm;
  EXPECT_EQ(teamsOf(Call::allReduce, Algorithm::direct), 1);
  EXPECT_EQ(teamsOf(Call::reduce, Algorithm::direct), 1);
  EXPECT_EQ(teamsOf(Call::allReduce, Algorithm::twoShot), 3);
  EXPECT_EQ(teamsOf(Call::reduceScatter, Algorithm::direct), 3);
  EXPECT_EQ(teamsOf(Call::allGather, Algorithm::direct), 3);
  EXPECT_EQ(teamsOf(Call::broadcast, Algorithm::direct), 3);
}

TEST(DirectPlan, AllToAllGatherAndScatterOverLl128) {
  const auto isWideWith = [](const CommConfig& config, Call call, uint64_t bytes) {
    const Plan plan = makePlan(config, {taskOf(call, bytes, device::DataType::uint8, 1)});
    return std::holds_alternative<WideLaunch>(plan.launches.at(0));
  };
  for (const Call call : {Call::allToAll, Call::gather, Call::scatter}) {
    const CommConfig config = wideConfig(2, 4, "", "");
    EXPECT_FALSE(isWideWith(config, call, 2048)) << "over LL";
    EXPECT_TRUE(isWideWith(config, call, 2049));
    EXPECT_TRUE(isWideWith(config, call, 8 << 20));
    EXPECT_FALSE(isWideWith(config, call, (8 << 20) + 1)) << "into mapped buffers";
    EXPECT_FALSE(isWideWith(wideConfig(2, 4, "ring", ""), call, 2049));
    EXPECT_FALSE(isWideWith(wideConfig(2, 4, "", "ll"), call, 2049));
    EXPECT_FALSE(isWideWith(directConfig(2, 4), call, 2049)) << "without windows for LL128";
    CommConfig limited = config;
    limited.wide.offerBytes = 2049;
    EXPECT_FALSE(isWideWith(limited, call, 2049));
    // What a larger call needs is connected by a small one.
    for (const uint64_t bytes : {100, 100'000}) {
      const Plan plan = makePlan(config, {taskOf(call, bytes, device::DataType::uint8, 1)});
      EXPECT_TRUE(plan.needs.wide);
      EXPECT_FALSE(plan.needs.peers.empty());
    }
  }
  // Its place is after the collectives of a group, whatever their order, and before messages.
  const Plan group =
      makePlan(wideConfig(0, 2, "direct", ""),
               {taskOf(Call::send, 100, device::DataType::uint8, 1), taskOf(Call::allReduce, 100),
                taskOf(Call::allToAll, 100'000), taskOf(Call::allReduce, 200'000)});
  ASSERT_EQ(group.launches.size(), 4u);
  EXPECT_TRUE(argumentsOf(group.launches[0]).work[0].reduces);
  EXPECT_TRUE(std::get<WideLaunch>(group.launches[1]).arguments.work.reduces);
  EXPECT_FALSE(std::get<WideLaunch>(group.launches[2]).arguments.work.reduces);
  EXPECT_EQ(argumentsOf(group.launches[3]).work[0].to, 1);

  // Parts have their places in both buffers.
  const CommConfig config = wideConfig(2, 4, "", "");
  const Plan plan = makePlan(config, {taskOf(Call::allToAll, 100'000)});
  const device::WideArguments& arguments = std::get<WideLaunch>(plan.launches.at(0)).arguments;
  EXPECT_FALSE(arguments.offers);
  EXPECT_FALSE(arguments.twoShot);
  EXPECT_EQ(arguments.work.inputStride, 100'000u);
  EXPECT_EQ(arguments.work.outputStride, 100'000u);
  EXPECT_EQ(arguments.work.to & arguments.work.from, 0b111);
  EXPECT_TRUE(arguments.work.own);
}

const device::WideMessagesArguments& wideMessagesOf(const Plan& plan, size_t launch = 0) {
  return std::get<WideMessagesLaunch>(plan.launches.at(launch)).arguments;
}

TEST(DirectPlan, MessagesOverLl128) {
  const auto isWide = [](const CommConfig& config, Call call, uint64_t bytes) {
    const Plan plan = makePlan(config, {taskOf(call, bytes, device::DataType::uint8, 1)});
    return std::holds_alternative<WideMessagesLaunch>(plan.launches.at(0));
  };
  for (const Call call : {Call::send, Call::receive}) {
    const CommConfig config = wideConfig(2, 4, "", "");
    EXPECT_FALSE(isWide(config, call, 2048)) << "over LL";
    EXPECT_TRUE(isWide(config, call, 2049));
    EXPECT_TRUE(isWide(config, call, 8 << 20));
    EXPECT_FALSE(isWide(config, call, (8 << 20) + 1)) << "into mapped buffers";
    EXPECT_FALSE(isWide(wideConfig(2, 4, "ring", ""), call, 2049));
    EXPECT_FALSE(isWide(wideConfig(2, 4, "", "ll"), call, 2049));
    EXPECT_FALSE(isWide(directConfig(2, 4), call, 2049)) << "without windows for LL128";
    // What messages of other sizes need is connected by the first one, with this peer only.
    for (const uint64_t bytes : {100, 100'000}) {
      const Plan plan = makePlan(config, {taskOf(call, bytes, device::DataType::uint8, 1)});
      EXPECT_EQ(plan.needs.wide, 0b010);
      EXPECT_EQ(plan.needs.direct, 0b010);
      ASSERT_EQ(plan.needs.peers.size(), 1u);
      EXPECT_EQ(plan.needs.peers[0].sends, call == Call::send);
    }
  }
}

// Both ends of a message deal its passes to the same FIFOs, whatever else is in their groups.
TEST(DirectPlan, EndsOfAMessageOverLl128Agree) {
  for (const int ranks : {2, 5, 16}) {
    const auto taskTo = [](Call call, uint64_t bytes, int peer) {
      return taskOf(call, bytes, device::DataType::uint8, peer);
    };
    for (uint64_t bytes = 2049; bytes <= 8 << 20; bytes = bytes * 5 / 3) {
      SCOPED_TRACE(fmt::format("{} ranks, {} bytes", ranks, bytes));
      const Plan alone =
          makePlan(wideConfig(0, ranks, "", ""), {taskTo(Call::send, bytes, ranks - 1)});
      const Plan among =
          makePlan(wideConfig(ranks - 1, ranks, "", ""),
                   {taskTo(Call::send, 3'000'000, 0), taskTo(Call::receive, bytes, 0),
                    taskTo(Call::send, 77'000, ranks / 2 - 1), taskTo(Call::receive, 5000, 0)});
      const device::WideMessagesArguments& sender = wideMessagesOf(alone);
      const device::WideMessagesArguments& receiver = wideMessagesOf(among);
      ASSERT_EQ(sender.messages, 1);
      ASSERT_EQ(receiver.messages, 4);
      const auto* const end = receiver.message + receiver.messages;
      const auto* const message = std::find_if(
          receiver.message, end, [](const device::DirectMessage& one) { return !one.sends; });
      EXPECT_EQ(message->bytes, bytes);
      EXPECT_EQ(message->blocks, sender.message[0].blocks);
      EXPECT_EQ(message->passBytes(), sender.message[0].passBytes());
      EXPECT_LE(message->passBytes(), sender.wide.slotLines * device::kWideLineData);
      EXPECT_EQ(sender.wide.blocks, sender.message[0].blocks);
      EXPECT_EQ(receiver.wide.streams, ranks == 2 ? 2 : 3);
      EXPECT_EQ(sender.threads(), 256);
      EXPECT_EQ(receiver.threads(), ranks == 2 ? 512 : 768);
    }
  }
}

// With all peers at once, and with itself.
TEST(DirectPlan, StreamsOverLl128HaveATeamEach) {
  for (int ranks = 2; ranks <= device::kDirectMaxRanks; ranks++) {
    std::vector<Task> tasks;
    for (int rank = 0; rank < ranks; rank++) {
      tasks.push_back(taskOf(Call::send, 8 << 20, device::DataType::uint8, rank));
      tasks.push_back(taskOf(Call::receive, 8 << 20, device::DataType::uint8, rank));
    }
    const CommConfig config = wideConfig(1, ranks, "", "");
    const Plan plan = makePlan(config, tasks);
    ASSERT_EQ(plan.launches.size(), 1u);
    const device::WideMessagesArguments& arguments = wideMessagesOf(plan);
    EXPECT_EQ(arguments.wide.streams, 2 * ranks - 1);
    EXPECT_LE(arguments.wide.teams(), device::kMaxTeams);
    EXPECT_LE(arguments.threads(), device::kMaxWideMessageThreads);
    EXPECT_GE(arguments.threads(), 32 * arguments.wide.teams());
    EXPECT_GE(arguments.wide.launchBlocks() / arguments.wide.blocks * device::kMaxTeams,
              arguments.wide.streams);
    EXPECT_LE(arguments.wide.launchBlocks(), 64) << "all blocks must run at once";
    EXPECT_TRUE(arguments.wide.teams() <= device::kTeamBarriers ||
                arguments.threads() == 32 * arguments.wide.teams());
    const auto* const end = arguments.message + arguments.messages;
    const auto* const own =
        std::find_if(arguments.message, end,
                     [&](const device::DirectMessage& one) { return one.peer == ranks - 1; });
    ASSERT_LT(own, end - 1);
    EXPECT_TRUE(own->sends);
    EXPECT_EQ(own[1].peer, ranks - 1);
    EXPECT_FALSE(own[1].sends);
  }
}

// No kind waits for another.
TEST(DirectPlan, MessagesOverLl128BesideOthers) {
  const auto to = [](Call call, uint64_t bytes) {
    return taskOf(call, bytes, device::DataType::uint8, 1);
  };
  const CommConfig config = wideConfig(0, 2, "", "");
  const Plan smaller = makePlan(config, {to(Call::send, 5000), to(Call::receive, 100),
                                         to(Call::send, 200), to(Call::receive, 6000)});
  ASSERT_EQ(smaller.launches.size(), 3u);
  EXPECT_EQ(argumentsOf(smaller.launches[0]).work[0].from, 0);
  EXPECT_EQ(wideMessagesOf(smaller, 1).messages, 2);
  EXPECT_EQ(argumentsOf(smaller.launches[2]).work[0].to, 0);

  const Plan larger =
      makePlan(config, {to(Call::send, 5000), to(Call::receive, 9 << 20), to(Call::send, 100)});
  ASSERT_EQ(larger.launches.size(), 1u);
  const auto& launch = std::get<MessagesLaunch>(larger.launches[0]);
  const device::MessagesArguments& arguments = *launch.arguments;
  EXPECT_EQ(arguments.works, 1);
  EXPECT_EQ(arguments.messages, 2);
  EXPECT_EQ(arguments.peers, 1);
  EXPECT_EQ(arguments.wide.streams, 1);
  EXPECT_EQ(launch.blocks(), arguments.channels + 1 + arguments.wide.launchBlocks());

  // More than a small launch holds, and than any does; what is sent to oneself stays together.
  for (const int count : {33, 1500}) {
    std::vector<Task> tasks{to(Call::send, 3000)};
    for (int i = 0; i < count; i++) {
      for (const Call call : {Call::send, Call::receive}) {
        tasks.push_back(taskOf(call, 3000, device::DataType::uint8, 0));
      }
    }
    const Plan plan = makePlan(config, tasks);
    int messages = 0;
    for (const Launch& one : plan.launches) {
      const device::MessagesArguments& part = *std::get<MessagesLaunch>(one).arguments;
      const device::DirectMessage& last = part.message[part.messages - 1];
      EXPECT_TRUE(last.peer == 0 || !last.sends);
      EXPECT_EQ(part.peers, 0);
      messages += part.messages;
    }
    EXPECT_EQ(messages, 2 * count + 1);
  }
}

TEST(DirectPlan, CallsOverLl128HaveALaunchEach) {
  const Plan plan = makePlan(wideConfig(1, 4, "direct", ""),
                             {taskOf(Call::allReduce, 100), taskOf(Call::allReduce, 1 << 20),
                              taskOf(Call::broadcast, 1 << 20), taskOf(Call::allGather, 100)});
  ASSERT_EQ(plan.launches.size(), 4u);
  EXPECT_EQ(argumentsOf(plan.launches[0]).works, 1);
  const device::WideArguments& reduction = std::get<WideLaunch>(plan.launches[1]).arguments;
  EXPECT_FALSE(reduction.twoShot);
  EXPECT_TRUE(reduction.work.reduces);
  EXPECT_EQ(reduction.work.inputBytes, 1u << 20);
  EXPECT_EQ(std::get<WideLaunch>(plan.launches[2]).arguments.work.to, 0);
  EXPECT_EQ(argumentsOf(plan.launches[3]).works, 1);
  EXPECT_TRUE(plan.needs.wide);
  EXPECT_NE(plan.needs.direct, 0);
}

// Every call is of 1 MiB, or of a share of it.
TEST(DirectPlan, OffersTheBuffersThatThePathUses) {
  const auto offered = [](const char* algorithms, const char* protocols, Call call, int rank = 0,
                          device::Reduction reduction = device::Reduction::sum) {
    CommConfig config = wideConfig(rank, 4, algorithms, protocols);
    config.resultBytes = 64 << 10;
    config.wide.offerBytes = 128 << 10;
    Task task = taskOf(call, 1 << 20, device::DataType::uint8, 1);
    task.reduction.reduction = reduction;
    const OfferedBuffers buffers = buffersOffered(config, task);
    return std::pair(buffers.inputBytes >> 20, buffers.outputBytes >> 20);
  };
  using Bytes = std::pair<uint64_t, uint64_t>;
  EXPECT_EQ(offered("twoshot", "LL128", Call::allReduce), Bytes(1, 1));
  EXPECT_EQ(offered("direct", "LL128", Call::allReduce), Bytes(0, 0));
  EXPECT_EQ(offered("direct", "LL128", Call::reduceScatter), Bytes(4, 0));
  EXPECT_EQ(offered("direct", "LL128", Call::allGather), Bytes(0, 4));
  EXPECT_EQ(offered("direct", "LL128", Call::broadcast), Bytes(0, 1));
  EXPECT_EQ(offered("direct", "LL128", Call::broadcast, 1), Bytes(0, 0)) << "the root";
  EXPECT_EQ(offered("direct", "LL128", Call::reduce), Bytes(1, 0));
  EXPECT_EQ(offered("direct", "LL128", Call::reduce, 1), Bytes(0, 0)) << "the root";
  EXPECT_EQ(offered("direct", "LL128", Call::reduceScatter, 0, device::Reduction::preMulSum),
            Bytes(0, 0));
  EXPECT_EQ(offered("ring", "Simple", Call::allReduce), Bytes(0, 1));
  EXPECT_EQ(offered("ring", "LL", Call::allReduce), Bytes(0, 0));
  EXPECT_EQ(offered("ring", "Simple", Call::reduceScatter), Bytes(0, 0));
}

// Where the links are the limit, half of the blocks are left to the user.
TEST(DirectPlan, CallsInPlaceUseTheBlocksThatTheyNeed) {
  const auto blocksOf = [](Call call, device::DataType type, const char* algorithm) {
    CommConfig config = wideConfig(0, 2, algorithm, "LL128");
    config.wide.offerBytes = 1 << 20;
    const uint64_t count = (uint64_t{64} << 20) / device::elementBytes(type);
    const Plan plan = makePlan(config, {taskOf(call, count, type)});
    return std::get<WideLaunch>(plan.launches.at(0)).blocks;
  };
  using device::DataType;
  EXPECT_EQ(blocksOf(Call::allReduce, DataType::bfloat16, "twoshot"), 32);
  EXPECT_EQ(blocksOf(Call::allReduce, DataType::float8e4m3, "twoshot"), 64);
  EXPECT_EQ(blocksOf(Call::allGather, DataType::float8e4m3, "direct"), 32);
  EXPECT_EQ(blocksOf(Call::broadcast, DataType::float32, "direct"), 32);
  EXPECT_EQ(blocksOf(Call::reduceScatter, DataType::float32, "direct"), 64);
  EXPECT_EQ(blocksOf(Call::reduce, DataType::float32, "direct"), 64);
}

TEST(DirectPlan, PartsOfTwoShotsCoverTheBuffer) {
  for (const uint64_t count : {1u, 31u, 33u, 1000u, 100'000u}) {
    const Plan plan = makePlan(wideConfig(2, 3, "twoshot", "LL128"),
                               {taskOf(Call::allReduce, count, device::DataType::float32)});
    const device::WideArguments& arguments = std::get<WideLaunch>(plan.launches.at(0)).arguments;
    EXPECT_TRUE(arguments.twoShot);
    EXPECT_EQ(arguments.endBytes, 4 * count);
    EXPECT_EQ(arguments.work.inputStride, arguments.work.inputBytes);
    EXPECT_EQ(arguments.work.outputStride, arguments.work.outputBytes);
    EXPECT_GE(3 * arguments.work.inputStride, 4 * count);
    EXPECT_EQ(arguments.work.inputStride % 128, 0u) << "parts begin at aligned addresses";
  }
}

TEST(DirectPlan, PassesOverLl128FitSlotsAndGiveEachBlockWork) {
  for (int ranks = 2; ranks <= device::kDirectMaxRanks; ranks++) {
    const tuning::WideGeometry geometry = tuning::wideGeometry(ranks);
    EXPECT_LE(device::wideWindowBytes(ranks, geometry.blocks, geometry.slotLines), 32u << 20);
    for (uint64_t bytes = 1; bytes < uint64_t{1} << 31; bytes = 3 * bytes + 7) {
      const auto kind = static_cast<tuning::WideKind>(bytes % 6);
      const tuning::WideShape shape = tuning::wideShape(geometry, kind, bytes);
      SCOPED_TRACE(fmt::format("{} ranks, {} bytes: {} blocks", ranks, bytes, shape.blocks));
      EXPECT_LE(shape.blocks, geometry.blocks);
      EXPECT_LE(tuning::wideShape(geometry, kind, bytes, 5).blocks, 5);
      EXPECT_LE(shape.passLines, geometry.slotLines);
      const uint64_t passes = ceilDivide(bytes, uint64_t{shape.passLines} * device::kWideLineData);
      EXPECT_GE(passes, static_cast<uint64_t>(shape.blocks));
    }
  }
}

// Of two ranks: what a block moves at a time, and how many blocks there are.
TEST(DirectPlan, PassesOverLl128SuitTheOperation) {
  const tuning::WideGeometry geometry = tuning::wideGeometry(2);
  constexpr uint64_t kMega = 1 << 20;
  const auto shapeOf = [&](tuning::WideKind kind, uint64_t bytes) {
    const tuning::WideShape shape = tuning::wideShape(geometry, kind, bytes);
    const uint64_t passBytes = uint64_t{shape.passLines} * device::kWideLineData;
    const uint64_t passes = ceilDivide(ceilDivide(bytes, passBytes), uint64_t(shape.blocks));
    return std::pair(shape.blocks, passes);
  };
  using Shape = std::pair<int, uint64_t>;
  using enum tuning::WideKind;
  EXPECT_EQ(shapeOf(copy, kMega), Shape(63, 1));
  EXPECT_EQ(shapeOf(copy, 2 * kMega), Shape(125, 1)) << "instead of two passes of 64 blocks";
  EXPECT_EQ(shapeOf(copy, 4 * kMega), Shape(64, 3)) << "too much for one pass";
  EXPECT_EQ(shapeOf(twoShot, kMega / 2), Shape(61, 1));
  EXPECT_EQ(shapeOf(twoShot, kMega), Shape(122, 1)) << "each with half of the lines";
  EXPECT_EQ(shapeOf(twoShot, 4 * kMega), Shape(64, 3));
  EXPECT_EQ(shapeOf(reduceScatter, kMega), Shape(63, 1));
  EXPECT_EQ(shapeOf(reduceScatter, 2 * kMega), Shape(64, 3)) << "shorter passes";
  EXPECT_EQ(shapeOf(reduceScatter, 16 * kMega), Shape(64, 9)) << "no longer";
}

// Where 32 blocks were measured to be as fast as 64.
TEST(DirectPlan, LargeWorksBoundByLinksHaveFewBlocks) {
  using enum tuning::WideKind;
  using enum device::DataType;
  tuning::WideGeometry geometry = tuning::wideGeometry(2);
  constexpr uint64_t kMega = 1 << 20;
  geometry.offerBytes = 32 * kMega;
  const auto blocksOf = [&](tuning::WideKind kind, uint64_t bytes, device::DataType type,
                            int ranks = 2) {
    const tuning::WideCall call{.kind = kind, .ranks = ranks, .bytes = bytes, .type = type};
    return tuning::wideCallShape(geometry, call).blocks;
  };
  EXPECT_EQ(blocksOf(copy, 2 * kMega, uint8), 125) << "one pass";
  for (const uint64_t bytes : {4 * kMega, 12 * kMega}) {
    for (const tuning::WideKind kind : {copy, message}) {
      EXPECT_EQ(blocksOf(kind, bytes, uint8), 32);
      EXPECT_EQ(blocksOf(kind, bytes, uint8, 3), 64);
    }
    for (const tuning::WideKind kind : {twoShot, reduceScatter, reduce}) {
      EXPECT_EQ(blocksOf(kind, bytes, bfloat16), 64);
    }
  }
  // In the buffers of the peers.
  EXPECT_EQ(blocksOf(copy, 64 * kMega, uint8, 3), 32);
  EXPECT_EQ(blocksOf(twoShot, 64 * kMega, bfloat16), 32);
  EXPECT_EQ(blocksOf(twoShot, 64 * kMega, int8), 64);
  EXPECT_EQ(blocksOf(reduce, 64 * kMega, bfloat16), 64);
}

// The passes of a launch are those of its shares, and its blocks have no more threads than these
// need.
TEST(DirectPlan, LaunchesOverLl128HaveTheirPassesAndThreads) {
  const auto launchOf = [](int ranks, Call call, uint64_t bytes, const char* algorithm) {
    const Plan plan = makePlan(wideConfig(0, ranks, algorithm, "LL128"),
                               {taskOf(call, bytes, device::DataType::uint8)});
    return std::get<WideLaunch>(plan.launches.at(0));
  };
  for (uint64_t bytes = 1; bytes < 64 << 20; bytes = 3 * bytes + 7) {
    const device::WideArguments arguments = launchOf(4, Call::allGather, bytes, "direct").arguments;
    const uint64_t passBytes = uint64_t{arguments.passLines} * device::kWideLineData;
    EXPECT_EQ(arguments.passes, ceilDivide(bytes, passBytes)) << bytes << " bytes";
  }
  constexpr uint64_t kKilo = 1 << 10, kMega = 1 << 20;
  EXPECT_EQ(launchOf(2, Call::allGather, 64 * kKilo, "direct").threads, 256);
  EXPECT_EQ(launchOf(2, Call::allGather, kMega, "direct").threads, 384) << "137 lines in a pass";
  EXPECT_EQ(launchOf(2, Call::allGather, 8 * kMega, "direct").threads, 512);
  EXPECT_EQ(launchOf(4, Call::allGather, 64 * kKilo, "direct").threads, 256);
  EXPECT_EQ(launchOf(4, Call::allGather, 400 * kKilo, "direct").threads, 384) << "3 teams";
  EXPECT_EQ(launchOf(4, Call::allReduce, 64 * kKilo, "direct").threads, 256) << "one team";
  EXPECT_EQ(launchOf(2, Call::reduceScatter, kMega / 2, "direct").threads, 384)
      << "one pair for each lane";
}

TEST(DirectPlan, GeometryHasALaneForEachLineUpToTheLimit) {
  for (const int most : {device::kDirectMaxBlocks, 20, 1}) {
    for (uint64_t lines : {1u, 64u, 65u, 512u, 513u, 4097u, 8192u, 32768u}) {
      const tuning::DirectShape shape = tuning::directShape(lines, most);
      EXPECT_GE(shape.blocks, 1);
      EXPECT_LE(shape.blocks, most);
      EXPECT_EQ(shape.threads % 32, 0);
      const auto lanes = static_cast<uint64_t>(shape.blocks) * static_cast<uint64_t>(shape.threads);
      const uint64_t mostLanes = static_cast<uint64_t>(most) * device::kDirectMaxThreads;
      EXPECT_GE(lanes, std::min(lines, mostLanes));
    }
  }
}

TEST(DirectPlan, GeometryHasSmallBlocksForFewLines) {
  using Shape = std::pair<int, int>;
  const auto shapeOf = [](uint64_t lines) {
    const tuning::DirectShape shape = tuning::directShape(lines);
    return Shape(shape.blocks, shape.threads);
  };
  EXPECT_EQ(shapeOf(1), Shape(1, 64));
  EXPECT_EQ(shapeOf(128), Shape(1, 128));
  EXPECT_EQ(shapeOf(512), Shape(4, 128));
  EXPECT_EQ(shapeOf(4096), Shape(32, 128));
  EXPECT_EQ(shapeOf(8192), Shape(32, 256));
  EXPECT_EQ(shapeOf(16384), Shape(64, 256));
  EXPECT_EQ(shapeOf(16385), Shape(33, 512));
  EXPECT_EQ(shapeOf(32768), Shape(64, 512));
}

}  // namespace
}  // namespace unisono::plan
