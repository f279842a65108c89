// SPDX-License-Identifier: Apache-2.0
#include "comm/agreement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <random>
#include <string_view>

#include "base/error.h"
#include "plan/message_choice.h"
#include "support/sanitized.h"

namespace unisono::comm {
namespace {

std::vector<RankFacts> factsOf(int ranks) {
  std::vector<RankFacts> all(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; rank++) {
    RankFacts& facts = all[static_cast<size_t>(rank)];
    facts = {};
    facts.layout = kRankFactsLayout;
    facts.device = rank;
    facts.process = 1;
    facts.machine = 7;
    facts.host = 7;
    facts.deviceUuid[0] = static_cast<std::byte>(rank + 1);
    std::snprintf(facts.hostName.data(), facts.hostName.size(), "box");
    std::snprintf(facts.busId.data(), facts.busId.size(), "0000:%02x:00.0", rank);
    facts.reach.peers = 1;
  }
  return all;
}

// Places of ranks whose nodes found `channels` rings in the order of ranks.
std::vector<topology::RankPlace> placesOf(const std::vector<RankFacts>& ranks, int channels = 12) {
  std::vector<topology::RankPlace> places;
  std::map<uint64_t, uint16_t> members;
  for (const RankFacts& facts : ranks) {
    topology::RankPlace place{};
    place.node = facts.host;
    place.ring = place.tree = {4, channels, 1, 1, 1, 0, 30'000, 30'000};
    place.ringPosition.fill(members[facts.host]);
    place.treePosition.fill(members[facts.host]++);
    places.push_back(place);
  }
  return places;
}

Decision decideFrom(const std::vector<RankFacts>& ranks, int rank) {
  Decision decision = decide(ranks, placesOf(ranks));
  decision.config.rank = rank;
  return decision;
}

// The text of the invalidUsage with which `ranks` are refused.
std::string refusal(const std::vector<RankFacts>& ranks) {
  try {
    checkFacts(ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Facts, RanksThatFitAreTaken) {
  EXPECT_EQ(refusal(factsOf(1)), "");
  EXPECT_EQ(refusal(factsOf(8)), "");
  auto ranks = factsOf(4);
  for (RankFacts& facts : ranks) facts.deviceUuid = {};
  // The same device numbers on other (simulated) nodes are other devices.
  for (size_t r = 0; r < 4; r++) ranks[r].host = r;
  EXPECT_EQ(refusal(ranks), "");
}

TEST(Facts, TwoRanksOnADeviceAreNamedWithTheRemedy) {
  auto ranks = factsOf(4);
  ranks[3].deviceUuid = ranks[1].deviceUuid;
  const std::string text = refusal(ranks);
  EXPECT_TRUE(has(text, "Ranks 1 and 3")) << text;
  EXPECT_TRUE(has(text, "0000:03:00.0")) << text;
  EXPECT_TRUE(has(text, "NCCL_MULTI_RANK_GPU_ENABLE=1")) << text;
  ranks[3].multiRankDevice = 1;
  EXPECT_NE(refusal(ranks), "") << "one rank alone cannot allow it";
  ranks[1].multiRankDevice = 1;
  EXPECT_EQ(refusal(ranks), "");
}

TEST(Facts, OtherVersionsBackendsAndMachinesAreRefused) {
  auto version = factsOf(3);
  version[2].layout++;
  EXPECT_TRUE(has(refusal(version), "Rank 2")) << refusal(version);
  auto backend = factsOf(3);
  backend[1].backend = 1;
  EXPECT_TRUE(has(refusal(backend), "UNISONO_BACKEND")) << refusal(backend);
  auto machine = factsOf(3);
  machine[1].machine = machine[2].machine = 8;
  // One host id, two machines.
  EXPECT_TRUE(has(refusal(machine), "Ranks 0 and 1")) << refusal(machine);
  EXPECT_TRUE(has(refusal(machine), "NCCL_HOSTID")) << refusal(machine);
  machine[1].host = machine[2].host = 9;
  EXPECT_EQ(refusal(machine), "") << "the network joins them";
}

TEST(Facts, ProcessesThatCannotShareMemoryAreRefusedWithTheCause) {
  auto space = factsOf(3);
  for (RankFacts& facts : space) facts.networkNamespace = 40;
  EXPECT_EQ(refusal(space), "");
  space[2].networkNamespace = 41;
  EXPECT_TRUE(has(refusal(space), "Ranks 0 and 2")) << refusal(space);
  EXPECT_TRUE(has(refusal(space), "network namespaces")) << refusal(space);
  auto user = factsOf(3);
  for (RankFacts& facts : user) facts.user = 1000;
  EXPECT_EQ(refusal(user), "");
  user[1].user = 1001;
  EXPECT_TRUE(has(refusal(user), "different users (1000 and 1001)")) << refusal(user);
  // Different machines have nothing to do with each other's namespaces and users.
  space[2].machine = 8;
  EXPECT_TRUE(has(refusal(space), "different machines")) << refusal(space);
  space[2].host = 8;
  EXPECT_EQ(refusal(space), "");
  user[1].host = 8;
  EXPECT_EQ(refusal(user), "") << "the network joins them";
}

TEST(Facts, RanksWithDifferentNetworksAreRefusedWhereTheyNeedOne) {
  auto ranks = factsOf(3);
  std::ranges::copy(std::string_view("Fabric (v11)"), ranks[2].networkName.begin());
  EXPECT_EQ(refusal(ranks), "") << "one host";
  ranks[1].host = 9;
  ranks[1].network = 1;
  const std::string text = refusal(ranks);
  for (const char* part : {"Ranks 0 and 2", "Fabric (v11)", "NCCL_NET_PLUGIN", "rank 2"}) {
    EXPECT_TRUE(has(text, part)) << text;
  }
}

TEST(Facts, RanksThatWouldChooseDifferentlyAreRefused) {
  auto threads = factsOf(3);
  threads[1].tuning.threads = 256;
  EXPECT_TRUE(has(refusal(threads), "Ranks 0 and 1 have different values of NCCL_NTHREADS"))
      << refusal(threads);
  auto thresholds = factsOf(3);
  thresholds[2].tuning.thresholds[3] = 7;
  EXPECT_TRUE(has(refusal(thresholds), "NCCL_THREAD_THRESHOLDS")) << refusal(thresholds);
  auto order = factsOf(3);
  order[1].tuning.deterministic = 1;
  EXPECT_TRUE(has(refusal(order), "UNISONO_DETERMINISTIC")) << refusal(order);
  auto file = factsOf(3);
  file[2].measurements = 9;
  EXPECT_TRUE(has(refusal(file), "UNISONO_TUNING_FILE")) << refusal(file);
}

TEST(Decision, TheModelFollowsTheSettings) {
  auto ranks = factsOf(4);
  const auto threadsOf = [](const Decision& decision) {
    return decision.config.model->maxThreads[static_cast<int>(device::Algorithm::ring)]
                                            [static_cast<int>(device::Protocol::simple)];
  };
  const int threads = threadsOf(decideFrom(ranks, 0));
  for (RankFacts& facts : ranks) {
    facts.tuning.threads = 256;
    facts.allowed = tuning::parseAllowed("nvls", "");
  }
  const Decision decision = decideFrom(ranks, 0);
  EXPECT_EQ(threadsOf(decision), threads / 2);
  EXPECT_EQ(decision.warnings.size(), 1u);
}

TEST(Decision, IsTheSameOnEveryRank) {
  for (unsigned seed = 0; seed < (test::kSanitized ? 50 : 500); seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const int n = 1 + static_cast<int>(random() % 40);
    auto ranks = factsOf(n);
    const bool cuda = random() % 2 == 0;
    for (RankFacts& facts : ranks) {
      facts.backend = cuda ? 1 : 0;
      facts.host = random() % 3;
      // Mostly not set, or out of all reason.
      if (random() % 4 == 0) facts.minChannels = static_cast<int64_t>(random() % 100) - 5;
      if (random() % 4 == 0) facts.maxChannels = static_cast<int64_t>(random() % 100) - 5;
      if (random() % 4 == 0) {
        facts.bufferBytes = static_cast<int64_t>((uint64_t{random()} << random() % 31)) - 5;
      }
      if (random() % 8 == 0) facts.reach.peers = 0;
      if (random() % 8 == 0) facts.allowed = tuning::parseAllowed("ring", "");
    }
    std::vector<DecisionSummary> summaries;
    for (int rank = 0; rank < n; rank++) {
      const Decision decision = decideFrom(ranks, rank);
      summaries.push_back(summarize(decision));
      ASSERT_EQ(decision.config.rank, rank);
      if (rank > 0) continue;
      const plan::CommConfig& config = decision.config;
      ASSERT_GE(config.channels, 1);
      ASSERT_LE(config.channels, 64);
      const uint32_t slotBytes = config.slotBytes[plan::indexOf(device::Protocol::simple)];
      ASSERT_GT(slotBytes, 0u);
      ASSERT_EQ(slotBytes % 512, 0u);
      ASSERT_GT(slotBytes * config.slicesPerChunk, slotBytes) << "overflow";
      ASSERT_TRUE(std::has_single_bit(decision.slots));
      ASSERT_EQ(config.slicesPerChunk, 2u);
      ASSERT_EQ(decision.slots % config.slicesPerChunk, 0u);
      ASSERT_GE(config.channelsPerPeer, 1);
      ASSERT_EQ(config.peerChannels % config.channelsPerPeer, 0);
      ASSERT_EQ(decision.graphs.rings.size(), static_cast<size_t>(config.channels));
      for (std::vector<int32_t> ring : decision.graphs.rings) {
        // Each node is entered once.
        int entries = 0;
        for (size_t i = 0; i < ring.size(); i++) {
          const size_t before = (i + ring.size() - 1) % ring.size();
          entries += ranks[static_cast<size_t>(ring[i])].host !=
                     ranks[static_cast<size_t>(ring[before])].host;
        }
        ASSERT_EQ(entries, decision.nodes == 1 ? 0 : decision.nodes);
        std::sort(ring.begin(), ring.end());
        for (int32_t r = 0; r < n; r++) ASSERT_EQ(ring[static_cast<size_t>(r)], r);
      }
    }
    ASSERT_NO_THROW(checkSummaries(summaries));
  }
}

TEST(Decision, SettingsOfTheWeakestRankHold) {
  auto ranks = factsOf(4);
  ranks[1].maxChannels = 7;
  ranks[2].maxChannels = 5;
  ranks[3].minChannels = 30;
  EXPECT_EQ(decideFrom(ranks, 0).config.channels, 5);
  ranks = factsOf(4);
  ranks[2].bufferBytes = 1 << 20;
  ranks[3].bufferBytes = 1 << 16;
  const Decision decision = decideFrom(ranks, 0);
  EXPECT_EQ(decision.config.slotBytes[plan::indexOf(device::Protocol::simple)] * decision.slots,
            1u << 16);
  ranks[1].llBufferBytes = 1 << 15;
  ranks[0].ll128BufferBytes = 1;
  for (RankFacts& facts : ranks) facts.allowed = tuning::parseAllowed("", "LL,LL128,Simple");
  const Decision lines = decideFrom(ranks, 0);
  const auto slotOf = [&](device::Protocol protocol) {
    return lines.config.slotBytes[plan::indexOf(protocol)];
  };
  EXPECT_EQ(slotOf(device::Protocol::ll) * lines.slots, 1u << 15);
  EXPECT_EQ(slotOf(device::Protocol::ll128), 512u) << "as small as it can be";
  const int ll = static_cast<int>(device::Protocol::ll);
  EXPECT_EQ(lines.config.model->facts.chunkBytes[ll], (1u << 15) / lines.slots / 2);
  EXPECT_GT(decideFrom(ranks, 0).config.directLineBits, 0);
  ranks[0].reach.peers = 0;
  EXPECT_EQ(decideFrom(ranks, 0).config.directLineBits, 0);
  EXPECT_EQ(decideFrom(factsOf(17), 0).config.directLineBits, 0);
}

// Lines of 128 bytes may arrive in pieces there, even where the user asks for them.
TEST(Decision, SlotsInHostMemoryExcludeLl128) {
  auto ranks = factsOf(2);
  for (RankFacts& facts : ranks) facts.allowed = tuning::parseAllowed("ring", "LL128");
  const auto exclusion = [&] {
    return decideFrom(ranks, 0)
        .config.model
        ->of(device::Operation::allReduce, device::Algorithm::ring, device::Protocol::ll128)
        .exclusion;
  };
  EXPECT_EQ(exclusion(), tuning::Exclusion::none);
  ranks[1].reach.transports = 1u << static_cast<int>(transport::TransportKind::hostMemory);
  EXPECT_EQ(exclusion(), tuning::Exclusion::splitLines);
}

TEST(Decision, SmallMessagesThroughHostMemoryGoOverLl) {
  auto ranks = factsOf(2);
  EXPECT_EQ(decideFrom(ranks, 0).config.peerSlots.lineBytes, 0u) << "the direct family is faster";
  ranks[1].reach.transports = 1u << static_cast<int>(transport::TransportKind::hostMemory);
  EXPECT_EQ(decideFrom(ranks, 0).config.peerSlots.lineBytes, 8192u);
  EXPECT_EQ(decideFrom(ranks, 0).config.peerLineBytes, 4096u);
}

// On a channel: small through host memory, whose channels are slow, and large through sockets,
// which one thread serves.
TEST(Decision, PartsOfMessagesSuitWhatCarriesThem) {
  auto ranks = factsOf(2);
  for (RankFacts& facts : ranks) {
    facts.backend = static_cast<int32_t>(runtime::Backend::cuda);
    facts.multiprocessors = 132;
  }
  const auto parts = [&](transport::TransportKind kind) {
    for (RankFacts& facts : ranks) facts.reach.transports = 1u << static_cast<int>(kind);
    const plan::CommConfig config = decideFrom(ranks, 0).config;
    return std::pair(config.minBytesPerPart, config.minRemoteBytesPerPart);
  };
  using Parts = std::pair<uint64_t, uint64_t>;
  EXPECT_EQ(parts(transport::TransportKind::hostMemory), Parts(16 << 10, 64 << 10));
  EXPECT_EQ(parts(transport::TransportKind::network), Parts(64 << 10, 64 << 10)) << "a plug-in";
  for (RankFacts& facts : ranks) facts.networkName = {"Socket"};
  EXPECT_EQ(parts(transport::TransportKind::network), Parts(1 << 20, 1 << 20));
  EXPECT_EQ(parts(transport::TransportKind::hostMemory), Parts(16 << 10, 64 << 10));
}

// Of all connections that a rank can have for messages to and from other hosts.
TEST(Decision, MemoryOfMessagesBetweenHostsIsBounded) {
  constexpr int kOfHost = 8;
  struct Backend {
    runtime::Backend backend;
    uint64_t most;
  };
  for (const auto& [backend, most] : {Backend{runtime::Backend::cuda, 2 * (uint64_t{192} << 20)},
                                      Backend{runtime::Backend::host, 2 * (uint64_t{4} << 20)}}) {
    for (const int count : {16, 32, 64, 256, 1024}) {
      auto ranks = factsOf(count);
      for (size_t rank = 0; rank < ranks.size(); rank++) {
        ranks[rank].host = 100 + rank / kOfHost;
        ranks[rank].backend = static_cast<int32_t>(backend);
        ranks[rank].network = 1;
        ranks[rank].sharesNetBuffers = 1;
      }
      const auto bytesOf = [&](const plan::MessageSlots& slots, const Decision& decision) {
        const auto fifos = static_cast<uint64_t>(count - kOfHost) *
                           static_cast<uint64_t>(decision.config.channelsPerPeer);
        return 2 * fifos * decision.slots * (slots.bytes + slots.lineBytes);
      };
      const Decision decision = decideFrom(ranks, 0);
      const plan::CommConfig& config = decision.config;
      const bool isFloor = config.remoteSlots.bytes < 2 * 4096;
      EXPECT_TRUE(isFloor || bytesOf(config.remoteSlots, decision) <= most) << count;
      EXPECT_TRUE(config.remoteSlots == config.peerSlots ||
                  4 * bytesOf(config.remoteSlots, decision) > most)
          << "smaller than needed for " << count;
      std::printf("%d ranks: slots of %u and %u bytes, %.1f MB in place of %.1f MB\n", count,
                  config.remoteSlots.bytes, config.remoteSlots.lineBytes,
                  static_cast<double>(bytesOf(config.remoteSlots, decision)) / 1e6,
                  static_cast<double>(bytesOf(config.peerSlots, decision)) / 1e6);
      EXPECT_EQ(plan::messageSlots(config, 0, 1), config.peerSlots);
      EXPECT_EQ(plan::messageSlots(config, 0, kOfHost), config.remoteSlots);
      // Where one rank wants it, all of them have large ones.
      ranks[3].sharesNetBuffers = 0;
      EXPECT_EQ(decideFrom(ranks, 0).config.remoteSlots, config.peerSlots);
    }
  }
}

// Lines of 128 bytes have slots only where calls may use them, such as if the user asks for them.
TEST(Decision, TheNetworkCarriesEveryProtocol) {
  auto ranks = factsOf(2);
  EXPECT_FALSE(usesNetwork(ranks));
  ranks[1].host = 8;
  EXPECT_FALSE(usesNetwork(ranks)) << "simulated hosts";
  const auto exclusion = [&](device::Protocol protocol) {
    return decideFrom(ranks, 0)
        .config.model->of(device::Operation::allReduce, device::Algorithm::ring, protocol)
        .exclusion;
  };
  EXPECT_EQ(decideFrom(ranks, 0).config.peerSlots.lineBytes, 0u);
  ranks[1].network = 1;
  EXPECT_TRUE(usesNetwork(ranks));
  const auto bytesOfWideSlots = [&] {
    return decideFrom(ranks, 0).config.slotBytes[plan::indexOf(device::Protocol::ll128)];
  };
  EXPECT_NE(exclusion(device::Protocol::ll128), tuning::Exclusion::none) << "before Volta";
  EXPECT_EQ(bytesOfWideSlots(), 0u) << "nothing may use them";
  const tuning::Allowed any = ranks[0].allowed;
  ranks[0].allowed = ranks[1].allowed = tuning::parseAllowed("ring", "LL128");
  EXPECT_EQ(exclusion(device::Protocol::ll128), tuning::Exclusion::none);
  EXPECT_GT(bytesOfWideSlots(), 0u);
  ranks[0].allowed = ranks[1].allowed = any;
  EXPECT_EQ(exclusion(device::Protocol::ll), tuning::Exclusion::none);
  EXPECT_EQ(exclusion(device::Protocol::simple), tuning::Exclusion::none);
  // So do messages.
  EXPECT_EQ(decideFrom(ranks, 0).config.peerSlots.lineBytes, 8192u);
  EXPECT_EQ(decideFrom(ranks, 0).config.peerLineBytes, 2048u);
  ranks[0].tuning.p2pLlThreshold = ranks[1].tuning.p2pLlThreshold = 0;
  EXPECT_EQ(decideFrom(ranks, 0).config.peerLineBytes, 0u);
  ranks[0].allowed = tuning::parseAllowed("", "Simple");
  EXPECT_EQ(decideFrom(ranks, 0).config.peerSlots.lineBytes, 0u);
  ranks[0].allowed = ranks[1].allowed;
  ranks[1].network = 0;
  ranks[1].machine = 8;
  EXPECT_TRUE(usesNetwork(ranks));
  ranks[1].machine = ranks[0].machine;
  ranks[0].backend = ranks[1].backend = static_cast<int>(runtime::Backend::cuda);
  EXPECT_TRUE(usesNetwork(ranks));
}

TEST(Decision, ChannelsOfMessagesStayWithinTheirBounds) {
  struct Bounds {
    int64_t min, max, maxOfAll;
    int channels;
  };
  // The default of the host backend is 4.
  for (const Bounds& bounds : {Bounds{0, 0, 0, 4}, Bounds{5, 0, 0, 8}, Bounds{8, 0, 0, 8},
                               Bounds{0, 3, 0, 2}, Bounds{0, 1, 0, 1}, Bounds{8, 2, 0, 2},
                               Bounds{3, 3, 0, 2}, Bounds{8, 0, 6, 4}, Bounds{1, 64, 0, 4}}) {
    auto ranks = factsOf(2);
    ranks[0].minPeerChannels = bounds.min;
    ranks[1].maxPeerChannels = bounds.max;
    ranks[1].maxChannels = bounds.maxOfAll;
    const plan::CommConfig config = decideFrom(ranks, 0).config;
    EXPECT_EQ(config.peerChannels, bounds.channels) << bounds.min << " to " << bounds.max;
    EXPECT_EQ(config.channelsPerPeer, std::min(bounds.channels, 2));
  }
}

// As NCCL, rounded up to a power of two; the largest of all ranks.
TEST(Decision, ChannelsToOtherHostsAreThoseThatTheUserSets) {
  for (const auto& [wanted, channels] :
       {std::pair(0, 2), std::pair(1, 1), std::pair(3, 4), std::pair(4, 4), std::pair(64, 4)}) {
    auto ranks = factsOf(2);
    ranks[1].host = 101;
    ranks[1].netPeerChannels = wanted;
    const plan::CommConfig config = decideFrom(ranks, 0).config;
    EXPECT_EQ(config.remoteChannelsPerPeer, channels) << wanted;
    EXPECT_EQ(config.channelsPerPeer, 2);
  }
}

TEST(Decision, TheThresholdOfMessagesIsForEachChannelOfAPeer) {
  auto ranks = factsOf(2);
  const auto isDirect = [&](int64_t threshold, uint64_t bytes) {
    for (RankFacts& facts : ranks) facts.tuning.p2pLlThreshold = threshold;
    const Decision decision = decideFrom(ranks, 0);
    EXPECT_EQ(decision.config.channelsPerPeer, 2);
    return plan::carries(decision.config, plan::MessagePath::directLl, bytes);
  };
  EXPECT_TRUE(isDirect(-1, 256 << 10));
  EXPECT_FALSE(isDirect(-1, (256 << 10) + 1));
  EXPECT_FALSE(isDirect(0, 1));
  EXPECT_TRUE(isDirect(1000, 2000));
  EXPECT_FALSE(isDirect(1000, 2001));
  EXPECT_TRUE(isDirect(std::numeric_limits<int64_t>::max(), 256 << 10));
  EXPECT_FALSE(isDirect(std::numeric_limits<int64_t>::max(), (256 << 10) + 1));
  ranks[1].tuning.p2pLlThreshold = 7;
  EXPECT_TRUE(has(refusal(ranks), "NCCL_P2P_LL_THRESHOLD")) << refusal(ranks);
}

TEST(Decision, WindowsOfDirectCallsStaySmall) {
  for (int ranks = 2; ranks <= device::kDirectMaxRanks; ranks++) {
    const Decision decision = decideFrom(factsOf(ranks), 0);
    const int bits = decision.config.directLineBits;
    EXPECT_GT(decision.config.wide.blocks, 0);
    EXPECT_LE(device::directWindowBytes(ranks, bits), device::kDirectHeaderBytes + (9u << 20))
        << ranks;
    EXPECT_GE(uint64_t{8} << bits, uint64_t{256} << 10) << ranks;
  }
}

TEST(Decision, MachinesTellHowManyChannelsThereAre) {
  auto channels = [](std::vector<RankFacts> ranks, int found, bool cuda) {
    for (RankFacts& facts : ranks) facts.backend = cuda ? 1 : 0;
    return decide(ranks, placesOf(ranks, found)).config.channels;
  };
  EXPECT_EQ(channels(factsOf(8), 12, true), 24);
  EXPECT_EQ(channels(factsOf(8), 2, true), 4);
  EXPECT_EQ(channels(factsOf(1), 1, true), 24) << "no link bounds a rank alone";
  EXPECT_EQ(channels(factsOf(8), 12, false), 2);
  EXPECT_EQ(channels(factsOf(8), 1, false), 2);
  auto asked = factsOf(8);
  asked[3].minChannels = 9;
  EXPECT_EQ(channels(asked, 12, false), 9);
  EXPECT_EQ(channels(asked, 3, true), 9);
  asked[5].maxChannels = 1;
  EXPECT_EQ(channels(asked, 12, false), 1);
  EXPECT_EQ(channels(asked, 12, true), 1);

  auto apart = factsOf(8);
  apart[2].reach.transports = 1u << static_cast<int>(transport::TransportKind::hostMemory);
  EXPECT_EQ(channels(apart, 2, true), 8) << "host memory needs more than the search finds";
  EXPECT_EQ(channels(apart, 6, true), 12);
  EXPECT_EQ(channels(apart, 2, false), 2);
  apart[4].maxChannels = 3;
  EXPECT_EQ(channels(apart, 2, true), 3);
  apart = factsOf(8);
  apart[2].reach.transports = 1u << static_cast<int>(transport::TransportKind::network);
  EXPECT_EQ(channels(apart, 2, true), 4);
}

// The limits below which a part of the machine is left unused or a buffer is not offered.
TEST(Decision, SmallCallsStaySmall) {
  using plan::Call;
  auto* memory = reinterpret_cast<std::byte*>(uint64_t{1} << 40);
  const device::ReductionSpec spec{device::DataType::int8, device::Reduction::sum, false, 0};
  for (uint8_t backend : {0, 1}) {
    SCOPED_TRACE(backend == 0 ? "host" : "CUDA");
    auto ranks = factsOf(8);
    for (RankFacts& facts : ranks) facts.backend = backend;
    ranks.front().reach.peers = 0;  // nothing is direct
    const plan::CommConfig config = decideFrom(ranks, 0).config;
    auto channelsFor = [&](uint64_t bytes) {
      const auto made = makePlan(config, {{Call::broadcast, memory, memory, bytes, spec, 0, true}});
      return std::get<plan::CollectiveLaunch>(made.launches.front()).blocks;
    };
    EXPECT_EQ(channelsFor(1024), 1);
    EXPECT_EQ(channelsFor(32 << 10), 1);
    EXPECT_EQ(channelsFor(uint64_t{1} << 30), config.channels);
    auto isOffered = [&](uint64_t bytes) {
      const auto made = makePlan(config, {{Call::receive, memory, memory, bytes, spec, 1, true}});
      const auto& launch = std::get<plan::SendReceiveLaunch>(made.launches.front());
      return launch.arguments.work[0].receive.offered;
    };
    EXPECT_FALSE(isOffered(1));
    EXPECT_FALSE(isOffered(64 << 10));
    EXPECT_TRUE(isOffered(8 << 20));
  }
}

TEST(Summaries, TheFieldThatDiffersIsNamed) {
  struct Case {
    int64_t DecisionSummary::*field;
    const char* name;
  };
  const Case cases[] = {{&DecisionSummary::channels, "channels"},
                        {&DecisionSummary::slotBytes, "bytes of a slot"},
                        {&DecisionSummary::slots, "slots"},
                        {&DecisionSummary::slicesPerChunk, "slices"},
                        {&DecisionSummary::peerChannels, "point-to-point"},
                        {&DecisionSummary::channelsPerPeer, "channels of a peer"},
                        {&DecisionSummary::remoteChannelsPerPeer, "channels of a peer on another"},
                        {&DecisionSummary::directLineBits, "direct stream"},
                        {&DecisionSummary::nodes, "nodes"},
                        {&DecisionSummary::costModel, "predicted times"}};
  const DecisionSummary same = summarize(decideFrom(factsOf(3), 0));
  auto text = [](const std::vector<DecisionSummary>& summaries) -> std::string {
    try {
      checkSummaries(summaries);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internalError);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(text({same, same, same}), "");
  EXPECT_EQ(hashOf(same), hashOf(summarize(decideFrom(factsOf(3), 1))));
  for (const Case& wanted : cases) {
    DecisionSummary other = same;
    other.*wanted.field += 1;
    EXPECT_NE(hashOf(other), hashOf(same)) << wanted.name;
    const std::string report = text({same, same, other});
    EXPECT_TRUE(has(report, wanted.name)) << report;
    EXPECT_TRUE(has(report, "Ranks 0 and 2")) << report;
  }
  struct Hash {
    uint64_t topology::JoinedHash::*field;
    const char* name;
  };
  const Hash hashes[] = {
      {&topology::JoinedHash::nodes, "nodes"},       {&topology::JoinedHash::graphs, "graphs"},
      {&topology::JoinedHash::channels, "channels"}, {&topology::JoinedHash::rings, "rings"},
      {&topology::JoinedHash::trees, "trees"},       {&topology::JoinedHash::collnet, "CollNet"},
      {&topology::JoinedHash::nvls, "NVLS"}};
  static_assert(sizeof(topology::JoinedHash) == std::size(hashes) * sizeof(uint64_t));
  for (const Hash& wanted : hashes) {
    DecisionSummary other = same;
    other.joined.*wanted.field += 1;
    EXPECT_TRUE(has(text({same, other}), wanted.name)) << text({same, other});
  }
}

// What a rank found on its own node reaches the comparison.
TEST(Summaries, OtherGraphsAreADifference) {
  const auto ranks = factsOf(4);
  auto report = [&](const std::vector<topology::RankPlace>& places) -> std::string {
    try {
      checkSummaries({summarize(decideFrom(ranks, 0)), summarize(decide(ranks, places))});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(report(placesOf(ranks)), "");
  auto slower = placesOf(ranks);
  for (auto& place : slower) place.ring.speedIntra = 20'000;
  EXPECT_TRUE(has(report(slower), "graphs")) << report(slower);
  auto turned = placesOf(ranks);
  for (size_t r = 0; r < 4; r++) turned[r].ringPosition.fill(static_cast<uint16_t>(3 - r));
  EXPECT_TRUE(has(report(turned), "rings")) << report(turned);
  auto other = placesOf(ranks);
  for (size_t r = 0; r < 4; r++) other[r].treePosition.fill(static_cast<uint16_t>(3 - r));
  EXPECT_TRUE(has(report(other), "trees")) << report(other);
}

TEST(Decide, TheUsersLimitHoldsForTheBlocksOfDirectCalls) {
  std::vector<RankFacts> ranks = factsOf(2);
  ranks[1].maxChannels = 5;
  const plan::CommConfig config = decideFrom(ranks, 0).config;
  EXPECT_EQ(config.directBlocks, 5);
  EXPECT_EQ(config.wide.blocks, 5);
}

// All blocks of all ranks on a device wait for each other, so all must be resident.
TEST(Decide, RanksThatShareADeviceHaveFewerChannels) {
  constexpr int kRanks = 14, kDevices = 2;
  std::vector<RankFacts> ranks = factsOf(kRanks);
  for (int rank = 0; rank < kRanks; rank++) {
    RankFacts& facts = ranks[static_cast<size_t>(rank)];
    facts.backend = static_cast<int32_t>(runtime::Backend::cuda);
    facts.multiRankDevice = 1;
    facts.multiprocessors = 132;
    facts.deviceUuid[0] = static_cast<std::byte>(rank % kDevices);
  }
  const plan::CommConfig config = decideFrom(ranks, 0).config;
  EXPECT_LE(config.channels * kRanks / kDevices, 132);
  EXPECT_LE(config.peerChannels * kRanks / kDevices, 132);
  EXPECT_LE(config.directBlocks * kRanks / kDevices, 132);
  EXPECT_LE(config.wide.blocks * kRanks / kDevices, 132);
  EXPECT_GE(config.channels, 8);
}

}  // namespace
}  // namespace unisono::comm
