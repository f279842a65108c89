// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest-spi.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <span>

#include "base/error.h"
#include "plan/direct_plan.h"
#include "plan/message_choice.h"
#include "plan/message_settings.h"
#include "plan_testing.h"

// The plans of all ranks together: do their sends and receives meet, and can they always go on?
namespace unisono::plan {
namespace {

using device::Message;
using device::SendReceiveWork;

// What a launch does, of either kind.
struct Rounds {
  int blocks;
  std::span<const SendReceiveWork> works;
};
Rounds roundsOf(const Launch& launch) {
  if (const auto* few = std::get_if<SendReceiveLaunch>(&launch)) {
    return {few->blocks, {few->arguments.work, static_cast<size_t>(few->arguments.works)}};
  }
  const auto& many = std::get<MessagesLaunch>(launch);
  EXPECT_EQ(many.arguments->messages, 0);
  return {many.blocks(), {many.arguments->work, static_cast<size_t>(many.arguments->works)}};
}

// Runs the launches of all ranks as the device would: the launches of a rank one after another; in
// a launch, for each channel, one group that sends and one that receives, each through its list in
// order. A send meets the receive at the other end of its connection; both take that step together,
// as if the FIFO had no slot, which is the hardest case.
class Model {
 public:
  explicit Model(std::vector<Plan> plans) : plans_(std::move(plans)), ranks_(plans_.size()) {
    for (size_t rank = 0; rank < plans_.size(); rank++) {
      for (const Launch& launch : plans_[rank].launches) {
        ranks_[rank].launches.push_back(roundsOf(launch));
      }
      load(rank);
    }
  }

  // Nothing left to do, and every message as it was sent.
  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); rank++) {
        for (auto& [channel, list] : ranks_[rank].sends) {
          while (!list.empty() && step(rank, channel, *list.front())) {
            list.pop_front();
            moved = true;
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
      for (size_t rank = 0; rank < ranks_.size(); rank++) moved = finishLaunch(rank) || moved;
    }
    for (size_t rank = 0; rank < ranks_.size(); rank++) {
      ASSERT_EQ(ranks_[rank].next, ranks_[rank].launches.size())
          << "rank " << rank << " waits for ever in launch " << ranks_[rank].next;
    }
  }

  uint64_t bytesMoved() const { return bytesMoved_; }

 private:
  using Lists = std::map<int, std::deque<const SendReceiveWork*>>;  // by channel
  struct Rank {
    std::vector<Rounds> launches;
    size_t next = 0;  // the launch that runs
    Lists sends, receives;
  };

  void load(size_t index) {
    Rank& rank = ranks_[index];
    rank.sends.clear();
    rank.receives.clear();
    if (rank.next == rank.launches.size()) return;
    const Rounds& launch = rank.launches[rank.next];
    const auto self = static_cast<int>(index);
    for (const SendReceiveWork& work : launch.works) {
      list(work, work.send, launch.blocks, rank.sends);
      if (work.receive.peer != self) list(work, work.receive, launch.blocks, rank.receives);
    }
  }

  static void list(const SendReceiveWork& work, const Message& message, int blocks, Lists& lists) {
    for (int c = 0; message.peer >= 0 && c < message.channels; c++) {
      ASSERT_LT(message.firstChannel + c, blocks);
      lists[message.firstChannel + c].push_back(&work);
    }
  }

  bool finishLaunch(size_t index) {
    Rank& rank = ranks_[index];
    auto empty = [](const auto& entry) { return entry.second.empty(); };
    if (rank.next == rank.launches.size() ||
        !std::all_of(rank.sends.begin(), rank.sends.end(), empty) ||
        !std::all_of(rank.receives.begin(), rank.receives.end(), empty)) {
      return false;
    }
    rank.next++;
    load(index);
    return true;
  }

  // Whether the send of `rank` on `channel` meets its receive.
  bool step(size_t rank, int channel, const SendReceiveWork& work) {
    const auto self = static_cast<int>(rank);
    const Message& send = work.send;
    if (send.peer == self) {
      EXPECT_EQ(work.receive.peer, self);
      EXPECT_EQ(send.bytes, work.receive.bytes);
      count(send, channel);
      return true;
    }
    auto& list = ranks_[static_cast<size_t>(send.peer)].receives[channel];
    if (list.empty() || list.front()->receive.peer != self) return false;
    compare(send, list.front()->receive);
    count(send, channel);
    list.pop_front();
    return true;
  }

  static void compare(const Message& send, const Message& receive) {
    ASSERT_EQ(send.bytes, receive.bytes);
    ASSERT_EQ(send.part, receive.part);
    ASSERT_EQ(send.channels, receive.channels);
    ASSERT_EQ(send.firstChannel, receive.firstChannel);
    ASSERT_EQ(send.slice, receive.slice);
    ASSERT_EQ(send.asLines, receive.asLines);
  }

  void count(const Message& send, int channel) {
    const uint64_t offset = send.part * static_cast<uint64_t>(channel - send.firstChannel);
    ASSERT_LT(offset, send.bytes) << "a channel with nothing to do";
    const bool last = channel == send.firstChannel + send.channels - 1;
    ASSERT_TRUE(last || offset + send.part <= send.bytes);
    bytesMoved_ += last ? send.bytes - offset : send.part;
  }

  const std::vector<Plan> plans_;
  std::vector<Rank> ranks_;
  uint64_t bytesMoved_ = 0;
};

std::vector<Plan> plansOf(const std::vector<std::vector<Task>>& tasks, int peerChannels,
                          int channelsPerPeer) {
  std::vector<Plan> plans;
  const int ranks = static_cast<int>(tasks.size());
  for (int rank = 0; rank < ranks; rank++) {
    CommConfig config = configOf(rank, ranks, 4, peerChannels, channelsPerPeer);
    // Two ranks to a host.
    config.peerSlots.lineBytes = 1024;
    config.peerLineBytes = 2048;
    config.remoteSlots = {2048, 512};
    auto hosts = std::make_shared<std::vector<uint64_t>>();
    for (int other = 0; other < ranks; other++) hosts->push_back(static_cast<uint64_t>(other / 2));
    config.hosts = std::move(hosts);
    plans.push_back(makePlan(config, tasks[static_cast<size_t>(rank)]));
    for (const Launch& launch : plans.back().launches) {
      EXPECT_LE(roundsOf(launch).blocks, peerChannels);
    }
  }
  return plans;
}

// Both ends of a connection list it once for each message.
void expectPeersAgree(const std::vector<Plan>& plans) {
  std::map<std::pair<int, int>, int> sends, receives;
  for (size_t rank = 0; rank < plans.size(); rank++) {
    for (const PeerUse& use : plans[rank].needs.peers) {
      const auto self = static_cast<int>(rank);
      ASSERT_NE(use.peer, self);
      const auto pair = use.sends ? std::pair(self, use.peer) : std::pair(use.peer, self);
      (use.sends ? sends : receives)[pair]++;
    }
  }
  EXPECT_EQ(sends, receives);
}

void expectThatAllMeet(const std::vector<std::vector<Task>>& tasks, uint64_t bytes,
                       int peerChannels = 4, int channelsPerPeer = 2) {
  const std::vector<Plan> plans = plansOf(tasks, peerChannels, channelsPerPeer);
  expectPeersAgree(plans);
  Model model(plans);
  model.run();
  if (::testing::Test::HasFatalFailure()) return;
  EXPECT_EQ(model.bytesMoved(), bytes);
}

// Of few bytes, of one part, of several.
uint64_t randomBytes(std::mt19937& random) {
  return random() % (uint64_t{1} << random() % 18);
}

TEST(PlanMessages, RandomSendsAndReceivesMeetInAnyOrder) {
  for (unsigned seed = 0; seed < 1500; seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 9);
    // Few channels, so that different peers share them.
    const int peerChannels = 1 << random() % 4;
    const int channelsPerPeer = 1 << random() % 4;
    struct SentMessage {
      int from, to;
      uint64_t bytes;
    };
    std::vector<SentMessage> messages;
    uint64_t bytes = 0;
    for (unsigned i = random() % 250; i > 0; i--) {
      messages.push_back({static_cast<int>(random() % static_cast<unsigned>(ranks)),
                          static_cast<int>(random() % static_cast<unsigned>(ranks)),
                          randomBytes(random)});
      bytes += messages.back().bytes;
    }
    std::vector<std::vector<Task>> tasks(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; rank++) {
      // Every rank mixes its sends and receives in its own way; the order between two stays.
      std::map<std::pair<bool, int>, std::deque<Task>> queues;
      for (const SentMessage& m : messages) {
        if (m.from == rank) {
          queues[{true, m.to}].push_back(
              taskOf(Call::send, m.bytes, device::DataType::uint8, m.to));
        }
        if (m.to == rank) {
          queues[{false, m.from}].push_back(
              taskOf(Call::receive, m.bytes, device::DataType::uint8, m.from));
        }
      }
      while (!queues.empty()) {
        auto queue = std::next(queues.begin(), static_cast<ptrdiff_t>(random() % queues.size()));
        tasks[static_cast<size_t>(rank)].push_back(queue->second.front());
        queue->second.pop_front();
        if (queue->second.empty()) queues.erase(queue);
      }
    }
    expectThatAllMeet(tasks, bytes, peerChannels, std::min(channelsPerPeer, peerChannels));
    if (HasFailure()) return;
  }
}

TEST(PlanMessages, RandomMixesWithAllToAllGatherAndScatter) {
  for (unsigned seed = 0; seed < 500; seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto ranks = 1 + random() % 8;
    std::vector<Task> calls;
    uint64_t bytes = 0;
    for (unsigned i = random() % 12; i > 0; i--) {
      static constexpr Call kCalls[] = {Call::allToAll, Call::gather, Call::scatter};
      const Call call = kCalls[random() % 3];
      calls.push_back(taskOf(call, randomBytes(random), device::DataType::uint8,
                             static_cast<int>(random() % ranks)));
      bytes += calls.back().count * ranks * (call == Call::allToAll ? ranks : 1);
    }
    expectThatAllMeet(std::vector<std::vector<Task>>(ranks, calls), bytes);
    if (HasFailure()) return;
  }
}

TEST(PlanMessages, AllToAllOfManyRanksNeedsSeveralLaunches) {
  const std::vector<Task> calls = {taskOf(Call::allToAll, 10'000)};
  expectThatAllMeet(std::vector<std::vector<Task>>(130, calls), 130 * 130 * 10'000ull, 32, 1);
}

void runWithoutReceive() {
  Model model({makePlan(configOf(0, 2), {taskOf(Call::send, 10, device::DataType::uint8, 1)}),
               makePlan(configOf(1, 2), {})});
  model.run();
}

// The rank itself is the first of them.
TEST(PlanMessages, RanksAtRegularDistancesShareNoChannelWhileAnotherIsIdle) {
  for (const int peerChannels : {1, 4, 8, 32}) {
    for (int channelsPerPeer = 1; channelsPerPeer <= peerChannels; channelsPerPeer *= 2) {
      const int turn = peerChannels / channelsPerPeer;
      for (int distance = 1; distance <= turn; distance *= 2) {
        SCOPED_TRACE(std::to_string(peerChannels) + " channels, " +
                     std::to_string(channelsPerPeer) + " of each peer, distance " +
                     std::to_string(distance));
        const CommConfig config = configOf(0, turn * distance, 4, peerChannels, channelsPerPeer);
        std::set<int> channels;
        for (int i = 0; i < turn; i++) {
          const int first = firstMessageChannel(config, 0, i * distance);
          EXPECT_EQ(first % channelsPerPeer, 0);
          EXPECT_LT(first, peerChannels);
          channels.insert(first);
        }
        EXPECT_EQ(static_cast<int>(channels.size()), turn);
      }
    }
  }
}

TEST(PlanMessages, TheModelSeesAMissingReceive) {
  EXPECT_FATAL_FAILURE(runWithoutReceive(), "waits for ever");
}

TEST(PlanMessages, ToOneself) {
  const CommConfig config = configOf(1, 3);
  const Task send = taskOf(Call::send, 8, device::DataType::float64, 1);
  Task receive = taskOf(Call::receive, 8, device::DataType::float64, 1);
  const Plan plan = makePlan(config, {send, receive});
  EXPECT_EQ(plan.launches.size(), 1u);
  EXPECT_TRUE(plan.needs.peers.empty());
  EXPECT_THROW(makePlan(config, {send}), Error);
  EXPECT_THROW(makePlan(config, {receive}), Error);
  EXPECT_THROW(makePlan(config, {send, receive, send}), Error);
  receive.count = 7;
  EXPECT_THROW(makePlan(config, {send, receive}), Error);
}

TEST(PlanMessages, BothEndsOfALargeMessageExchangeAnOffer) {
  const CommConfig config = configOf(0, 2);
  auto workOf = [&](const Task& task) {
    const Plan plan = makePlan(config, {task});
    return std::get<SendReceiveLaunch>(plan.launches.front()).arguments.work[0];
  };
  for (const uint64_t bytes : {config.directBytes - 1, config.directBytes}) {
    const bool large = bytes == config.directBytes;
    const Task send = taskOf(Call::send, bytes, device::DataType::uint8, 1);
    const Task receive = taskOf(Call::receive, bytes, device::DataType::uint8, 1);
    EXPECT_EQ(workOf(send).send.offered, large);
    EXPECT_EQ(workOf(receive).receive.offered, large);
  }
}

TEST(PlanMessages, OffersNameThePlaceOfEachPart) {
  const CommConfig config = configOf(1, 4);
  Task task = taskOf(Call::allToAll, config.directBytes);
  task.window = {77, 1000};
  for (const bool open : {true, false}) {
    task.outputIsOpen = open;
    const Plan plan = makePlan(config, {task});
    const auto& arguments = std::get<SendReceiveLaunch>(plan.launches.front()).arguments;
    ASSERT_EQ(arguments.works, 4);
    for (int w = 0; w < arguments.works; w++) {
      const device::SendReceiveWork& work = arguments.work[w];
      EXPECT_EQ(work.addressIsOpen, open);
      EXPECT_EQ(work.window.window, 77u);
      EXPECT_EQ(work.window.offset,
                1000 + static_cast<uint64_t>(work.receive.peer) * config.directBytes);
      EXPECT_EQ(work.receive.offered, work.receive.peer != config.rank);
    }
  }
}

// What a plan of one rank does with its messages to `peer`.
MessageChoice plannedFor(const CommConfig& config, const Task& task, int peer) {
  MessageChoice choice;
  for (const Launch& launch : makePlan(config, {task}).launches) {
    if (std::holds_alternative<CopyLaunch>(launch)) return {.path = MessagePath::copyEngines};
    if (const auto* direct = std::get_if<DirectLaunch>(&launch)) {
      return {.path = MessagePath::directLl, .channels = direct->blocks};
    }
    if (const auto* wide = std::get_if<WideLaunch>(&launch)) {
      return {.path = MessagePath::directLl128, .channels = wide->blocks};
    }
    if (const auto* wide = std::get_if<WideMessagesLaunch>(&launch)) {
      return {.path = MessagePath::directLl128, .channels = wide->arguments.message[0].blocks};
    }
    if (std::holds_alternative<BarrierLaunch>(launch)) continue;
    for (const SendReceiveWork& work : roundsOf(launch).works) {
      const Message& message = work.send;
      if (message.peer != peer) continue;
      choice.path = message.asLines ? MessagePath::fifoLl : MessagePath::fifoSimple;
      choice.channels = message.channels;
      choice.partBytes = message.part;
      choice.sliceBytes = message.slice;
      choice.offered = message.offered;
      return choice;
    }
  }
  ADD_FAILURE() << "no message to rank " << peer;
  return choice;
}

// Messages travel as `unisono explain` says: by every path, with its channels, parts and slices.
TEST(Messages, TravelAsTheChoiceSays) {
  struct Settings {
    const char* algorithms;
    const char* protocols;
    uint64_t messageBytes;  // NCCL_P2P_LL_THRESHOLD
    bool reach, hosts;
    uint64_t fasterBytes = ~uint64_t{0};  // over LL, as measured
  };
  constexpr uint64_t kAny = ~uint64_t{0};
  std::set<MessagePath> seen;
  for (const Settings& settings :
       {Settings{"", "", kAny, true, false}, Settings{"", "", 100'000, true, false},
        Settings{"ring", "", kAny, true, false}, Settings{"", "Simple", kAny, true, false},
        Settings{"", "^LL128", kAny, true, false}, Settings{"", "^LL", kAny, true, false},
        Settings{"", "", kAny, false, false}, Settings{"", "", kAny, false, true},
        Settings{"", "", kAny, true, false, 1000}, Settings{"", "", kAny, true, false, 0}}) {
    for (const int ranks : {2, 4, 8}) {
      CommConfig config = configOf(0, ranks, 24, 32, 4);
      config.minBytesPerPart = config.minRemoteBytesPerPart = 64 << 10;
      config.directBytes = 256 << 10;
      if (settings.reach) {
        config.directLineBits = tuning::directLineBits(ranks);
        config.wide = tuning::wideGeometry(ranks);
        config.wide.offerBytes = 32 << 20;
      } else {
        config.peerSlots = {32 << 10, 4096};
        config.peerLineBytes = 2048;
      }
      if (settings.hosts) {
        config.remoteSlots = {8192, 1024};
        std::vector<uint64_t> hosts(static_cast<size_t>(ranks), 6);
        hosts[0] = 5;
        config.hosts = std::make_shared<const std::vector<uint64_t>>(hosts);
      }
      tuning::ModelInput input = testing::modelInputOf(config, {.lowLatencyTraffic = std::nullopt,
                                                                .algorithms = settings.algorithms,
                                                                .protocols = settings.protocols});
      input.facts.direct.messageBytes = settings.messageBytes;
      input.facts.direct.fasterMessageBytes[indexOf(device::Protocol::ll)] = settings.fasterBytes;
      config.model = std::make_shared<tuning::CostModel>(tuning::makeModel(input));
      const SymmetricWindow window{std::vector<std::byte*>(static_cast<size_t>(ranks), nullptr),
                                   kAny};
      for (const Call call : {Call::send, Call::allToAll, Call::gather, Call::scatter}) {
        for (const bool symmetric : {false, true}) {
          for (uint64_t bytes = 1; bytes <= uint64_t{64} << 20; bytes = bytes * 3 + 1) {
            SCOPED_TRACE(fmt::format("NCCL_ALGO={} NCCL_PROTO={} call {} ranks {} bytes {}",
                                     settings.algorithms, settings.protocols,
                                     static_cast<int>(call), ranks, bytes));
            // The root of a gather is another rank, so that this one sends.
            const int peer = call == Call::scatter ? 0 : 1;
            Task task = taskOf(call, bytes, device::DataType::uint8, peer);
            if (symmetric) task.symmetric = &window;
            const MessageQuestion question{call, 0, 1, bytes, symmetric};
            const MessageChoice choice = messageChoice(config, question);
            EXPECT_EQ(choice, plannedFor(config, task, 1));
            EXPECT_EQ(exclusionOf(config, choice.path, question), MessageExclusion::none);
            for (int p = 0; p < tuning::kMessagePaths; p++) {
              const auto path = static_cast<MessagePath>(p);
              if (path < choice.path) {
                EXPECT_NE(exclusionOf(config, path, question), MessageExclusion::none) << p;
              }
              EXPECT_NE(reasonOf(config, path, question), "") << p;
            }
            seen.insert(choice.path);
          }
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), size_t{tuning::kMessagePaths});
}

// Of a rank on the second of three nodes, which have 3, 4 and 1 ranks.
TEST(Messages, InsideANodeOfSeveralGoOverLines) {
  CommConfig config = configOf(5, 8, 24, 32, 4);
  config.hosts =
      std::make_shared<const std::vector<uint64_t>>(std::vector<uint64_t>{1, 1, 1, 2, 2, 2, 2, 3});
  config.nodes = std::make_shared<const NodeRanks>(std::vector<int>{0, 0, 0, 1, 1, 1, 1, 2});
  config.remoteSlots = {8192, 1024};
  config.directLineBits = tuning::directLineBits(4);
  config.wide = tuning::wideGeometry(4);
  config.wide.offerBytes = 32 << 20;
  testing::setModel(config, {.nodes = 3, .ranksPerNode = 4});

  const auto sendTo = [](int peer, uint64_t bytes) {
    return taskOf(Call::send, bytes, device::DataType::uint8, peer);
  };
  // Rank 6 is number 3 of its node and the third peer there of this rank, which is number 2.
  const Plan small = makePlan(config, {sendTo(6, 1000)});
  ASSERT_EQ(small.launches.size(), 1u);
  const auto& lines = std::get<DirectLaunch>(small.launches[0]).arguments;
  EXPECT_EQ(lines.rank, 2);
  EXPECT_EQ(lines.ranks, 4);
  EXPECT_EQ(lines.work[0].to, 0b100);
  EXPECT_EQ(small.needs.direct, 0b100);
  EXPECT_EQ(small.needs.wide, 0b100);

  const Plan large = makePlan(config, {sendTo(3, 4 << 20)});
  ASSERT_EQ(large.launches.size(), 1u);
  const auto& wide = std::get<WideMessagesLaunch>(large.launches[0]).arguments;
  EXPECT_EQ(wide.rank, 2);
  EXPECT_EQ(wide.ranks, 4);
  EXPECT_EQ(wide.message[0].peer, 0);
  EXPECT_EQ(wide.wide.stream[0], 1);

  for (const int remote : {2, 7}) {
    const Plan plan = makePlan(config, {sendTo(remote, 1000)});
    ASSERT_EQ(plan.launches.size(), 1u);
    const Message& message = roundsOf(plan.launches[0]).works[0].send;
    EXPECT_EQ(message.peer, remote);
    EXPECT_EQ(plan.needs.direct | plan.needs.wide, 0);
    for (const MessagePath path : {MessagePath::directLl, MessagePath::directLl128}) {
      EXPECT_EQ(exclusionOf(config, path, {.from = 5, .to = remote, .bytes = 1000}),
                MessageExclusion::otherNode);
    }
  }

  // A call with messages to all ranks is not one launch of the direct family.
  const Task all = taskOf(Call::allToAll, 1000);
  EXPECT_FALSE(canBeInPlace(config, all));
  const Plan mixed = makePlan(config, {all});
  EXPECT_EQ(mixed.needs.direct, 0b111);
  std::set<int> remote;
  for (const Launch& launch : mixed.launches) {
    if (std::holds_alternative<DirectLaunch>(launch)) continue;
    for (const SendReceiveWork& work : roundsOf(launch).works) {
      if (work.send.peer >= 0) remote.insert(work.send.peer);
    }
  }
  EXPECT_EQ(remote, (std::set<int>{0, 1, 2, 7}));

  // The only rank of its node has nobody to share lines with.
  config.rank = 7;
  EXPECT_EQ(localRanks(config), 1);
  EXPECT_EQ(makePlan(config, {sendTo(5, 1000)}).needs.direct, 0);
}

// What the user has measured moves the borders between the paths, but not beyond what they carry.
TEST(Messages, FollowMeasuredTimes) {
  const auto pathsOf = [](const std::string& lines, int64_t threshold, const char* protocols,
                          bool ofHost, std::initializer_list<uint64_t> sizes) {
    CommConfig config = configOf(0, 2, 24, 32, 4);
    config.slotBytes.fill(512 << 10);
    config.directLineBits = ofHost ? 0 : tuning::directLineBits(2);
    config.wide = ofHost ? tuning::WideGeometry{} : tuning::wideGeometry(2);
    MessageFacts facts;
    facts.fewestChannels = facts.mostChannels = facts.residentBlocks = facts.mostBlocks = 32;
    facts.allowed = tuning::parseAllowed("", protocols);
    facts.llThreshold = threshold;
    facts.measured = tuning::parseMeasurements(lines, "file").messages;
    tuning::ModelInput input =
        testing::modelInputOf(config, {.lowLatencyTraffic = std::nullopt, .protocols = protocols});
    input.facts.slotsOfHost = ofHost;
    setMessages(facts, config, input.facts);
    config.model = std::make_shared<tuning::CostModel>(tuning::makeModel(input));
    std::string paths;
    for (const uint64_t bytes : sizes) {
      const MessageQuestion question{.to = 1, .bytes = bytes};
      paths += fmt::format("{}{}", paths.empty() ? "" : ", ",
                           nameOf(messageChoice(config, question).path));
    }
    return paths;
  };
  constexpr uint64_t kKilo = 1 << 10;
  const auto direct = {64 * kKilo, 64 * kKilo + 1, 1024 * kKilo, 1024 * kKilo + 1, 8192 * kKilo};
  constexpr const char* kUsual = "Direct LL, Direct LL, Direct LL128, Direct LL128, Direct LL128";
  EXPECT_EQ(pathsOf("", -1, "", false, direct), kUsual);
  const std::string lines =
      "SendReceive Direct LL 1 2 1024 2\n"
      "SendReceive Direct LL 1 2 65536 3\n"
      "SendReceive Direct LL 1 2 262144 9\n"
      "SendReceive Direct LL128 1 2 1024 4\n"
      "SendReceive Direct LL128 1 2 262144 8\n"
      "SendReceive Direct LL128 1 2 1048576 16\n"
      "SendReceive Direct LL128 1 2 8388608 99\n";
  const std::string fifos =
      "SendReceive FIFO Simple 1 2 1024 10\n"
      "SendReceive FIFO Simple 1 2 1048576 20\n"
      "SendReceive FIFO Simple 1 2 8388608 90\n";
  EXPECT_EQ(pathsOf(lines, -1, "", false, direct),
            "Direct LL, Direct LL128, Direct LL128, Direct LL128, Direct LL128");
  EXPECT_EQ(pathsOf(lines + fifos, -1, "", false, direct),
            "Direct LL, Direct LL128, Direct LL128, FIFO Simple, FIFO Simple");
  EXPECT_EQ(pathsOf(lines + fifos, -1, "^LL128", false, direct),
            "Direct LL, Direct LL, FIFO Simple, FIFO Simple, FIFO Simple")
      << "LL128 is not the next path then, and FIFOs are slower up to 256 KiB";
  EXPECT_EQ(pathsOf(lines + fifos, int64_t{1} << 40, "", false, direct),
            "Direct LL, Direct LL128, Direct LL128, Direct LL128, Direct LL128")
      << "the user's limit of lines comes first";
  std::string others = lines + fifos;
  for (size_t at = 0; (at = others.find(" 1 2 ", at)) != std::string::npos;) others[at + 3] = '4';
  EXPECT_EQ(pathsOf(others, -1, "", false, direct), kUsual) << "of other ranks";
  // Through memory of the host.
  const auto small = {4 * kKilo, 4 * kKilo + 1, 16 * kKilo, 16 * kKilo + 1};
  EXPECT_EQ(pathsOf("", -1, "", true, small), "FIFO LL, FIFO Simple, FIFO Simple, FIFO Simple");
  const std::string slow =
      "SendReceive FIFO LL 1 2 1024 8\nSendReceive FIFO LL 1 2 16384 11\n"
      "SendReceive FIFO LL 1 2 65536 40\nSendReceive FIFO Simple 1 2 1024 11\n"
      "SendReceive FIFO Simple 1 2 65536 14\n";
  EXPECT_EQ(pathsOf(slow, -1, "", true, small), "FIFO LL, FIFO LL, FIFO LL, FIFO Simple");
  EXPECT_EQ(pathsOf(slow, 0, "", true, small),
            "FIFO Simple, FIFO Simple, FIFO Simple, FIFO Simple");
}

// Slices fit into the slots of the connection.
TEST(Messages, ToOtherHostsHaveTheirSlots) {
  CommConfig config = configOf(1, 4);
  config.peerSlots = {8192, 1024};
  config.remoteSlots = {1024, 256};
  config.peerLineBytes = 2048;
  config.hosts = std::make_shared<const std::vector<uint64_t>>(std::vector<uint64_t>{5, 5, 6, 6});
  const auto sliceTo = [&](int peer, uint64_t count) {
    const Plan plan = makePlan(config, {taskOf(Call::send, count, device::DataType::uint8, peer)});
    return roundsOf(plan.launches.front()).works.front().send.slice;
  };
  EXPECT_EQ(sliceTo(0, 1 << 20), 8192u);
  EXPECT_EQ(sliceTo(2, 1 << 20), 1024u);
  EXPECT_EQ(sliceTo(0, 100), device::payloadOf(device::Protocol::ll, 1024));
  EXPECT_EQ(sliceTo(3, 100), device::payloadOf(device::Protocol::ll, 256));
}

}  // namespace
}  // namespace unisono::plan
