// SPDX-License-Identifier: Apache-2.0
#include "comm/agreement.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "base/fnv.h"
#include "bootstrap/frame.h"
#include "device/multicast.h"
#include "plan/message_settings.h"

namespace unisono::comm {

using transport::TransportKind;

// Ranks with facts of different sizes cannot exchange them, so the root of the rendezvous must
// refuse them before: it compares the version of the protocol.
static_assert(sizeof(RankFacts) == 984 && bootstrap::kProtocolVersion == 25,
              "After a change of what ranks exchange, raise kProtocolVersion and adapt this line");

namespace {

struct Defaults {
  int channels;  // where the machine does not tell
  uint32_t headSlotBytes;
  int64_t ringBytesPerThread;  // a channel with less is not worth its start
};

// CUDA: as many rings as H200 needs to fill its links with one block each. Host: small, so that
// hundreds of ranks fit.
constexpr Defaults kCuda{24, 64 << 10, 64};
constexpr Defaults kHost{2, 8 << 10, 128};

// The search finds 4 channels through the host bridges of 2 H200, which take 1.2 to 1.35 times as
// long for all-reduces of 2 to 8 MB (docs/results/2026-11-28-host-memory.md).
constexpr int kHostMemoryChannels = 8;

constexpr uint32_t kSlicesPerChunk = 2;
constexpr auto kSmaller = [](int64_t a, int64_t b) { return std::min(a, b); };
constexpr auto kLarger = [](int64_t a, int64_t b) { return std::max(a, b); };

// The value that every rank can live with of a setting that ranks may set differently.
template <typename Member, typename Choose>
int64_t settingOf(const std::vector<RankFacts>& ranks, Member member, Choose choose) {
  int64_t result = 0;
  for (const RankFacts& facts : ranks) {
    const int64_t value = facts.*member;
    if (value > 0) result = result == 0 ? value : choose(result, value);
  }
  return result;
}

// What the choice of algorithms depends on must be alike: ranks that choose differently hang.
void checkTuning(const RankFacts& first, const RankFacts& facts, size_t rank) {
  using tuning::TuningSettings;
  struct Field {
    const char* variable;
    int64_t TuningSettings::*value;
  };
  static constexpr Field kFields[] = {
      {"NCCL_NTHREADS", &TuningSettings::threads},
      {"NCCL_LL128_NTHREADS", &TuningSettings::ll128Threads},
      {"NCCL_NET_OVERHEAD", &TuningSettings::netOverheadNs},
      {"NCCL_LL128_C2C", &TuningSettings::ll128C2c},
      {"NCCL_PAT_ENABLE", &TuningSettings::patEnable},
      {"NCCL_P2P_LL_THRESHOLD", &TuningSettings::p2pLlThreshold},
      {"UNISONO_DETERMINISTIC (or of the flag "
       "UNISONO_CTA_POLICY_DETERMINISTIC in ncclConfig_t.CTAPolicy)",
       &TuningSettings::deterministic}};
  const char* differs = nullptr;
  for (const Field& field : kFields) {
    if (facts.tuning.*field.value != first.tuning.*field.value) differs = field.variable;
  }
  if (facts.tuning.thresholds != first.tuning.thresholds) differs = "NCCL_THREAD_THRESHOLDS";
  if (differs != nullptr) {
    throw invalidUsage("Ranks 0 and {} have different values of {}", rank, differs)
        .remedy(fmt::format("Set {} to the same value on all ranks", differs));
  }
  if (facts.measurements != first.measurements) {
    throw invalidUsage("Ranks 0 and {} have different files of UNISONO_TUNING_FILE", rank)
        .remedy("Give all ranks the same file");
  }
}

// Ranks that all want CollNet must have the same plug-in, unless the user can do without.
void checkCollNet(const RankFacts& first, const RankFacts& facts, size_t rank) {
  const CollNetFacts &a = first.collnet, &b = facts.collnet;
  if (a.nodes == 0 || b.nodes == 0 || a.plugin == b.plugin) return;
  if (a.ignoresMismatch != 0 && b.ignoresMismatch != 0) return;
  const auto nameOf = [](const CollNetFacts& collnet) {
    return collnet.plugin.front() == '\0' ? "none" : collnet.plugin.data();
  };
  throw Error(ErrorCode::systemError,
              fmt::format("Ranks 0 and {} use different CollNet plug-ins: {} on {}, and {} on {}",
                          rank, nameOf(a), first.hostName.data(), nameOf(b), facts.hostName.data()))
      .remedy(
          "Make the plug-in work on all ranks (earlier warnings say what fails), or set "
          "NCCL_COLLNET_ENABLE=0 or NCCL_IGNORE_COLLNET_MISMATCH=1")
      .rank(static_cast<int>(rank));
}

transport::ChainGraph chainGraphOf(const topology::Joined& joined, int channels) {
  transport::ChainGraph graph;
  for (int channel = 0; channel < channels; channel++) {
    auto& chains = graph.chains.emplace_back(static_cast<size_t>(joined.ranks()));
    auto& heads = graph.heads.emplace_back();
    for (int node = 0; node < joined.nodes(); node++) {
      const std::span<const int> chain = joined.collnetChain(channel, node);
      heads.push_back(chain.front());
      for (size_t i = 1; i < chain.size(); i++) {
        chains[static_cast<size_t>(chain[i])].up = chain[i - 1];
        chains[static_cast<size_t>(chain[i - 1])].down.push_back(chain[i]);
      }
    }
  }
  return graph;
}

transport::HeadGraph headGraphOf(const topology::Joined& joined,
                                 std::vector<std::vector<int>> heads) {
  transport::HeadGraph graph;
  graph.nodes.resize(static_cast<size_t>(joined.nodes()));
  for (int rank = 0; rank < joined.ranks(); rank++) {
    graph.nodeOf.push_back(joined.nodeOf(rank));
    graph.nodes[static_cast<size_t>(joined.nodeOf(rank))].push_back(rank);
  }
  graph.heads = std::move(heads);
  return graph;
}

// Inside a node every rank is a head, on several nodes those that the search found.
transport::HeadGraph multicastGraphOf(const topology::Joined& joined) {
  if (joined.nodes() == 1) {
    std::vector<std::vector<int>> all;
    for (int r = 0; r < joined.ranks(); r++) all.push_back({r});
    return headGraphOf(joined, std::move(all));
  }
  transport::HeadGraph graph = headGraphOf(joined, joined.nvlsHeads());
  for (size_t tree = 0; tree < graph.trees.size(); tree++) {
    graph.trees[tree].resize(static_cast<size_t>(joined.ranks()));
    for (size_t head = 0; head < graph.heads.size(); head++) {
      for (const int member : graph.heads[head]) {
        graph.trees[tree][static_cast<size_t>(member)] =
            joined.nvlsTreePlace(static_cast<int>(head), static_cast<int>(tree), member);
      }
    }
  }
  return graph;
}

// The trees of rails, of which even and odd channels have one of two; none unless all nodes have as
// many ranks.
std::vector<std::vector<topology::TreePlace>> railsOf(const plan::NodeRanks& nodes, int channels) {
  const size_t rails = nodes.ranks.front().size();
  const auto hasAsMany = [&](const std::vector<int>& node) { return node.size() == rails; };
  if (!std::ranges::all_of(nodes.ranks, hasAsMany)) return {};
  std::array<std::vector<topology::TreePlace>, 2> trees;
  for (size_t tree = 0; tree < trees.size(); tree++) {
    trees[tree].resize(nodes.nodeOf.size());
    for (size_t rail = 0; rail < rails; rail++) {
      std::vector<int> members;
      for (const std::vector<int>& node : nodes.ranks) members.push_back(node[rail]);
      for (size_t node = 0; node < members.size(); node++) {
        trees[tree][static_cast<size_t>(members[node])] =
            topology::doubleTreePlace(members, static_cast<int>(node), static_cast<int>(tree));
      }
    }
  }
  std::vector<std::vector<topology::TreePlace>> result;
  for (size_t channel = 0; channel < static_cast<size_t>(channels); channel++) {
    result.push_back(trees[channel % trees.size()]);
  }
  return result;
}

}  // namespace

Hosts hostsOf(const std::vector<RankFacts>& ranks) {
  Hosts hosts;
  std::set<std::pair<uint64_t, std::string_view>> devices;
  for (size_t r = 0; r < ranks.size(); r++) {
    hosts.ranks[ranks[r].host].push_back(static_cast<int>(r));
    devices.emplace(ranks[r].host, ranks[r].busId.data());
  }
  hosts.devices = static_cast<int>(devices.size());
  return hosts;
}

bool usesNetwork(const std::vector<RankFacts>& ranks) {
  const RankFacts& first = ranks.front();
  const bool real = first.backend == static_cast<int>(runtime::Backend::cuda);
  const auto differs = [&](const RankFacts& facts) { return facts.host != first.host; };
  const auto wants = [&](const RankFacts& facts) {
    return facts.network != 0 || facts.machine != first.machine ||
           facts.networkNamespace != first.networkNamespace || facts.user != first.user;
  };
  return std::any_of(ranks.begin(), ranks.end(), differs) &&
         (real || std::any_of(ranks.begin(), ranks.end(), wants));
}

void checkFacts(const std::vector<RankFacts>& ranks) {
  const RankFacts& first = ranks.front();
  const bool network = usesNetwork(ranks);
  std::map<uint64_t, size_t> hosts;  // by hash: the first rank
  for (size_t r = 0; r < ranks.size(); r++) {
    const RankFacts& facts = ranks[r];
    if (facts.layout != first.layout) {
      throw invalidUsage("Rank {} on {} runs another version of the library than rank 0 on {}", r,
                         facts.hostName.data(), first.hostName.data())
          .remedy("Load the same libnccl.so.2 on all ranks");
    }
    if (facts.backend != first.backend) {
      throw invalidUsage("Rank {} on {} uses another backend than rank 0", r, facts.hostName.data())
          .remedy("Set UNISONO_BACKEND to the same value on all ranks");
    }
    // The first rank with which this one shares memory.
    const size_t o = network ? hosts.emplace(facts.host, r).first->second : 0;
    const RankFacts& other = ranks[o];
    if (facts.machine != other.machine) {
      throw invalidUsage("Ranks {} and {} are on different machines ({} and {}) with the same {}",
                         o, r, other.hostName.data(), facts.hostName.data(), "NCCL_HOSTID")
          .remedy("Set NCCL_HOSTID to a value of its own on each machine, or unset it");
    }
    if (facts.networkNamespace != other.networkNamespace) {
      throw invalidUsage(
          "Ranks {} and {} have the same NCCL_HOSTID in different network namespaces (hosts {} and "
          "{}), so they cannot share memory",
          o, r, other.hostName.data(), facts.hostName.data())
          .remedy(
              "Unset NCCL_HOSTID, so that they use the network, or let their containers share a "
              "network (docker: --network=host or --network=container:NAME)");
    }
    if (facts.user != other.user) {
      throw invalidUsage(
          "Ranks {} and {} have the same NCCL_HOSTID as different users ({} and {}), so they "
          "cannot share memory",
          o, r, other.user, facts.user)
          .remedy("Unset NCCL_HOSTID, so that they use the network, or run them as the same user");
    }
    if (network && facts.networkName != first.networkName) {
      throw invalidUsage("Ranks 0 and {} use different networks: {} on {}, and {} on {}", r,
                         first.networkName.data(), first.hostName.data(), facts.networkName.data(),
                         facts.hostName.data())
          .remedy(
              "Install the same net plug-in for all ranks, and set NCCL_NET_PLUGIN and NCCL_NET "
              "to the same values")
          .rank(static_cast<int>(r));
    }
    checkCollNet(first, facts, r);
    checkTuning(first, facts, r);
  }
  std::map<std::pair<uint64_t, std::array<std::byte, 16>>, size_t> devices;
  for (size_t r = 0; r < ranks.size(); r++) {
    const auto [other, added] = devices.emplace(std::pair(ranks[r].host, ranks[r].deviceUuid), r);
    if (!added && (ranks[r].multiRankDevice == 0 || ranks[other->second].multiRankDevice == 0)) {
      throw invalidUsage("Ranks {} and {} are both on device {} ({}) of {}", other->second, r,
                         ranks[r].device, ranks[r].busId.data(), ranks[r].hostName.data())
          .remedy(
              "Give every rank a device of its own (cudaSetDevice before the communicator is "
              "made), "
              "or set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks to share one");
    }
  }
}

// Returns how many blocks a rank may launch at a time: blocks wait for the blocks of other ranks,
// so that all of them must be resident at once, one per multiprocessor.
int64_t residentBlocks(const std::vector<RankFacts>& ranks) {
  std::map<std::pair<uint64_t, std::array<std::byte, 16>>, int64_t> ranksOf;
  std::optional<int64_t> result;
  for (const RankFacts& facts : ranks) {
    const int64_t sharing = ++ranksOf[{facts.host, facts.deviceUuid}];
    if (facts.multiprocessors == 0) continue;
    const int64_t blocks = facts.multiprocessors / sharing;
    result = std::min(result.value_or(blocks), blocks);
  }
  return std::max<int64_t>(result.value_or(topology::kMostChannels), 1);
}

// `most` channels, 0 for any, and `resident` blocks at a time.
static plan::MessageFacts messageFactsOf(const std::vector<RankFacts>& ranks,
                                         const tuning::Allowed& allowed, int64_t most,
                                         int64_t resident) {
  plan::MessageFacts facts;
  facts.cuda = ranks.front().backend == static_cast<int>(runtime::Backend::cuda);
  if (usesNetwork(ranks)) {
    for (const RankFacts& rank : ranks) facts.hosts.push_back(rank.host);
  }
  facts.fewestChannels = settingOf(ranks, &RankFacts::minPeerChannels, kLarger);
  facts.mostChannels = settingOf(ranks, &RankFacts::maxPeerChannels, kSmaller);
  facts.remoteChannelsPerPeer = settingOf(ranks, &RankFacts::netPeerChannels, kLarger);
  facts.mostBlocks = most > 0 ? most : resident;
  facts.residentBlocks = resident;
  facts.allowed = allowed;
  facts.llThreshold = ranks.front().tuning.p2pLlThreshold;
  facts.sharesNetBuffers =
      std::ranges::all_of(ranks, [](const RankFacts& rank) { return rank.sharesNetBuffers != 0; });
  return facts;
}

Decision decide(const std::vector<RankFacts>& ranks, const std::vector<topology::RankPlace>& places,
                const TuningChanges& changes) {
  const bool cuda = ranks.front().backend == static_cast<int>(runtime::Backend::cuda);
  const Defaults& defaults = cuda ? kCuda : kHost;
  const plan::SlotDefaults& slots = plan::slotDefaults(cuda);

  const int64_t least = settingOf(ranks, &RankFacts::minChannels, kLarger);
  const int64_t most = settingOf(ranks, &RankFacts::maxChannels, kSmaller);
  const int64_t blocks = residentBlocks(ranks);
  const int64_t resident = std::min<int64_t>(blocks, topology::kMostChannels);
  uint32_t transports = 0;
  for (const RankFacts& facts : ranks) transports |= facts.reach.transports;
  const auto isUsed = [transports](TransportKind kind) {
    return (transports >> static_cast<int>(kind) & 1) != 0;
  };
  const bool network = usesNetwork(ranks) || isUsed(TransportKind::network);
  // The machine tells how many channels fill its links. Without links (one rank, simulated
  // devices) it is what one device can use.
  topology::JoinSettings bounds{1, topology::kMostChannels};
  if (isUsed(TransportKind::hostMemory) && !network) bounds.minChannels = kHostMemoryChannels;
  if (!cuda || ranks.size() == 1) bounds = {defaults.channels, defaults.channels};
  const auto bounded = [&](int channels) {
    int64_t result = std::max<int64_t>(channels, least);
    if (most > 0) result = std::min(result, most);
    result = std::min(result, resident);
    return static_cast<int>(std::clamp<int64_t>(result, 1, topology::kMostChannels));
  };
  bounds = {bounded(bounds.minChannels), bounded(bounds.maxChannels)};

  const auto slotBytes = [&](int64_t RankFacts::*setting, uint32_t automatic) {
    const int64_t buffer = settingOf(ranks, setting, kSmaller);
    return plan::slotBytesOf(buffer, slots.count, automatic);
  };

  Decision decision;
  decision.joined = topology::join(places, bounds);
  tuning::ModelInput input;
  input.facts = tuning::factsOf(decision.joined);
  tuning::Allowed allowed = ranks.front().allowed;
  bool allReach = true, multicast = true, collnet = true;
  for (const RankFacts& facts : ranks) {
    allowed = tuning::intersect(allowed, facts.allowed);
    allReach = allReach && facts.reach.peers != 0;
    multicast = multicast && facts.multicast != 0;
    const CollNetFacts& own = facts.collnet;
    collnet = collnet && own.nodes != 0 && own.plugin.front() != '\0' &&
              own.plugin == ranks.front().collnet.plugin;
    input.facts.collnetReductions &= own.reductions;
    input.facts.collnetAllGather = input.facts.collnetAllGather && own.allGather != 0;
    input.facts.collnetReduceScatter = input.facts.collnetReduceScatter && own.reduceScatter != 0;
  }

  plan::CommConfig& config = decision.config;
  config.ranks = static_cast<int>(ranks.size());
  config.channels = decision.joined.channels();
  const uint32_t simple = slotBytes(&RankFacts::bufferBytes, slots.simple);
  config.slotBytes.fill(simple);
  config.slotBytes[plan::indexOf(device::Protocol::ll)] =
      slotBytes(&RankFacts::llBufferBytes, slots.ll);
  config.slotBytes[plan::indexOf(device::Protocol::ll128)] =
      slotBytes(&RankFacts::ll128BufferBytes, slots.ll128);
  config.slicesPerChunk = kSlicesPerChunk;
  config.fixedOrder = ranks.front().tuning.deterministic != 0;

  const int64_t mostBlocks = most > 0 ? std::min(most, blocks) : blocks;
  tuning::setLimits(allReach, input.facts, static_cast<int>(mostBlocks));
  config.directBlocks = input.facts.direct.blocks;
  config.directLineBits =
      input.facts.reachNode ? tuning::directLineBits(input.facts.maxRanksPerNode) : 0;
  decision.nodes = decision.joined.nodes();
  config.nodes = plan::nodeRanksOf(decision.joined);
  input.facts.network = network;
  input.facts.sockets = ranks.front().networkName.data() == std::string_view("Socket");
  input.facts.slotsOfHost = isUsed(TransportKind::hostMemory);
  decision.graphs.multicast = multicastGraphOf(decision.joined);
  const auto nvlsHeads = static_cast<int>(decision.graphs.multicast.heads.size());
  input.facts.multicast = multicast && allReach && nvlsHeads > 0 &&
                          input.facts.maxRanksPerNode <= device::kMaxMulticastRanks;
  for (const RankFacts& facts : ranks) {
    collnet = collnet && decision.nodes >= facts.collnet.nodes;
  }
  input.facts.collnet = collnet && allReach && usesNetwork(ranks) && decision.nodes > 1 &&
                        decision.joined.collnetChannels() > 0;
  if (input.facts.collnet) {
    decision.graphs.collnet = chainGraphOf(decision.joined, config.channels);
    decision.graphs.multicast.hasNetwork = true;
    decision.graphs.collnetDirect = headGraphOf(decision.joined, decision.joined.collnetHeads());
    decision.graphs.collnetDirect.hasNetwork = true;
  }
  input.facts.nvlsChannels = std::min(input.facts.nvlsChannels, config.channels);
  input.facts.headSlotBytes = std::min(simple, defaults.headSlotBytes);
  if (input.facts.multicast) {
    config.multicast = {input.facts.nvlsChannels, input.facts.headSlotBytes, nvlsHeads};
  }
  if (input.facts.collnet) {
    config.collnetDirect = {config.channels, input.facts.headSlotBytes, input.facts.collnetHeads};
  }
  input.facts.chunkBytes = plan::chunkBytesOf(config);
  input.allowed = allowed;
  input.settings = ranks.front().tuning;
  plan::MessageFacts messages = messageFactsOf(ranks, allowed, most, blocks);
  messages.measured = changes.measurements.messages;
  plan::setMessages(messages, config, input.facts);
  int64_t& ringThreshold = input.settings.thresholds.back();
  if (ringThreshold < 0) ringThreshold = defaults.ringBytesPerThread;
  input.measured = tuning::replaceCurves(input.measured, changes.measurements.collectives);
  input.constants = changes.constants;
  config.model = std::make_shared<tuning::CostModel>(tuning::makeModel(input));
  decision.warnings = tuning::warningsOf(input, *config.model);
  // Its slots are large, and over sockets each FIFO has a connection and threads.
  if (!config.model->mayUse(device::Protocol::ll128)) {
    config.slotBytes[plan::indexOf(device::Protocol::ll128)] = 0;
  }

  decision.slots = slots.count;
  for (int c = 0; c < decision.joined.channels(); c++) {
    std::vector<int>& ring = decision.graphs.rings.emplace_back(decision.joined.ringOrder(c));
    // A ring reduces in its order.
    if (config.fixedOrder) std::iota(ring.begin(), ring.end(), 0);
    auto& tree = decision.graphs.trees.emplace_back();
    for (int r = 0; r < config.ranks; r++) tree.push_back(decision.joined.treePlace(c, r));
  }
  if (config.nodes != nullptr) {
    decision.graphs.rails = railsOf(*config.nodes, decision.joined.channels());
  }
  return decision;
}

DecisionSummary summarize(const Decision& decision) {
  const plan::CommConfig& config = decision.config;
  return {config.channels,
          config.slotBytes[plan::indexOf(device::Protocol::simple)],
          config.peerSlots.bytes,
          config.remoteSlots.bytes,
          decision.slots,
          config.slicesPerChunk,
          config.peerChannels,
          config.channelsPerPeer,
          config.remoteChannelsPerPeer,
          config.directLineBits,
          decision.nodes,
          0,
          static_cast<int64_t>(tuning::hashOf(*config.model)),
          topology::hashOf(decision.joined)};
}

uint64_t hashOf(const DecisionSummary& summary) {
  static_assert(std::has_unique_object_representations_v<DecisionSummary>);
  Fnv hash;
  hash.add(std::string_view(reinterpret_cast<const char*>(&summary), sizeof(summary)));
  return hash.value();
}

void checkSummaries(const std::vector<DecisionSummary>& summaries) {
  struct Field {
    const char* name;
    int64_t DecisionSummary::*value;
  };
  static constexpr Field kFields[] = {
      {"channels", &DecisionSummary::channels},
      {"bytes of a slot", &DecisionSummary::slotBytes},
      {"bytes of a slot for messages", &DecisionSummary::peerSlotBytes},
      {"bytes of a slot for messages between hosts", &DecisionSummary::remoteSlotBytes},
      {"slots", &DecisionSummary::slots},
      {"slices of a chunk", &DecisionSummary::slicesPerChunk},
      {"point-to-point channels", &DecisionSummary::peerChannels},
      {"channels of a peer", &DecisionSummary::channelsPerPeer},
      {"channels of a peer on another host", &DecisionSummary::remoteChannelsPerPeer},
      {"lines of a direct stream", &DecisionSummary::directLineBits},
      {"nodes", &DecisionSummary::nodes},
      {"the tuner plug-in (1: it is used)", &DecisionSummary::advised},
  };
  constexpr const char* kSameInputs =
      "Load the same libnccl.so.2 on all ranks, with the same NCCL_* variables, topology and graph "
      "files";
  const DecisionSummary& first = summaries.front();
  for (size_t r = 1; r < summaries.size(); r++) {
    for (const Field& field : kFields) {
      if (summaries[r].*field.value != first.*field.value) {
        throw internalError("Ranks 0 and {} decided differently on {}: {} and {}", r, field.name,
                            first.*field.value, summaries[r].*field.value)
            .remedy(kSameInputs);
      }
    }
    const std::string_view differs = topology::firstDifference(first.joined, summaries[r].joined);
    if (!differs.empty()) {
      throw internalError("Ranks 0 and {} decided differently on {}", r, differs)
          .remedy(kSameInputs);
    }
    // Follows from the graphs: they come first.
    if (summaries[r].costModel != first.costModel) {
      throw internalError("Ranks 0 and {} decided differently on the predicted times of calls", r)
          .remedy(kSameInputs);
    }
  }
}

}  // namespace unisono::comm
