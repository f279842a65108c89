// SPDX-License-Identifier: Apache-2.0
#include "topology/search.h"

#include <algorithm>
#include <array>
#include <span>

#include "topology/balance_ports.h"
#include "topology/search_try.h"

namespace unisono::topology {

namespace {

constexpr int kMaxNvlsHeads = 32, kMaxDirectHeads = 8;
// A try at less than about half of the speed found cannot win by having more channels.
constexpr Bandwidth kLowestRatioPercent = 49;
// Moves at one speed are bounded by this many tries that use their whole budget. Where most tries
// at high speeds are infeasible and exhaust theirs, a bound for all speeds together would be spent
// before the first speed that works.
constexpr long long kTriesOfOneSpeed = 16;
// Below all tables: for Ethernet of less than 1 Gb/s.
constexpr Bandwidth kSlowest[] = {60, 12, 6, 1};

// Speeds that channels are tried at, in MB/s, high to low. The last ones inside a machine (from
// 2.4 GB/s down, on Blackwell from 15 down) are not in NCCL's table: GPUs of a generation that
// is known for NVLink are also sold without.
constexpr Bandwidth kIntra[] = {40000, 30000, 20000, 18000, 15000, 12000, 10000, 9000, 7000,
                                6000,  5000,  4000,  3000,  2400,  1200,  240,   120};
constexpr Bandwidth kInter[] = {48000, 30000, 28000, 24000, 20000, 18000, 15000, 12000, 10000, 9000,
                                7000,  6000,  5000,  4000,  3000,  2400,  1200,  240,   120};
constexpr Bandwidth kIntraHopper[] = {60000, 50000, 40000, 30000, 24000, 20000, 15000, 12000,
                                      11000, 6000,  3000,  2400,  1200,  240,   120};
constexpr Bandwidth kInterHopper[] = {48000, 45000, 42000, 40000, 30000, 24000, 22000, 20000, 17500,
                                      15000, 12000, 6000,  3000,  2400,  1200,  240,   120};
constexpr Bandwidth kIntraBlackwell[] = {90000, 80000, 70000, 60000, 50000, 45000, 40000,
                                         30000, 24000, 20000, 19000, 18000, 15000, 12000,
                                         6000,  3000,  2400,  1200,  240,   120};
constexpr Bandwidth kInterBlackwell[] = {96000, 86000, 80000, 48000, 45100, 42000, 40000,
                                         30000, 24000, 22000, 20000, 17500, 15000, 12000,
                                         6000,  3000,  2400,  1200,  240,   120};

std::span<const Bandwidth> speedsFor(int sm, bool nets) {
  if (sm >= kBlackwell) {
    return nets ? std::span<const Bandwidth>(kInterBlackwell)
                : std::span<const Bandwidth>(kIntraBlackwell);
  }
  if (sm >= kHopper) {
    return nets ? std::span<const Bandwidth>(kInterHopper)
                : std::span<const Bandwidth>(kIntraHopper);
  }
  return nets ? std::span<const Bandwidth>(kInter) : std::span<const Bandwidth>(kIntra);
}

// Path types that occur between two kinds of nodes.
using PathTypes = std::array<bool, static_cast<int>(PathType::dis) + 1>;

// The next type that occurs; one beyond `farthest` if none does up to it.
PathType farther(PathType type, const PathTypes& occurs, PathType farthest) {
  int next = static_cast<int>(type) + 1;
  while (next <= static_cast<int>(farthest) && !occurs[static_cast<size_t>(next)]) ++next;
  return static_cast<PathType>(next);
}

// The search of one graph: which attempts to make, and when to stop.
class Relaxation {
 public:
  Relaxation(const SearchSpace& space, const GraphRequest& request, const SearchSettings& settings)
      : space_(space), request_(request), settings_(settings), search_(space) {
    hasNets_ = space.netCount() > 0;
    const std::span<const Bandwidth> table = speedsFor(space.lowestSm(), hasNets_);
    speeds_.assign(table.begin(), table.end());
    speeds_.insert(speeds_.end(), std::begin(kSlowest), std::end(kSlowest));
    // Each channel tries about one move per GPU if nothing prevents it.
    const long long onePass = 1LL * request.maxChannels * (space.gpuCount() + 4);
    triesSteps_ = settings.triesSteps > 0 ? settings.triesSteps : std::max(8192LL, 4 * onePass);
    sameSteps_ =
        settings.sameChannelsSteps > 0 ? settings.sameChannelsSteps : std::max(1024LL, 2 * onePass);
    speedSteps_ = settings.speedSteps > 0 ? settings.speedSteps : kTriesOfOneSpeed * triesSteps_;
    measure();
  }

  Solution find() {
    chooseFirst();
    firstPass();
    repeatChannels();
    secondPass();
    balancePorts(space_, solution_);
    return std::move(solution_);
  }

 private:
  // What the attempts so far mean for those to come.
  enum class Outlook {
    open,   // another attempt may find more
    best,   // nothing better exists: all channels that were asked for, or the bound is reached
    spent,  // the budget of this speed is used up; a lower speed has its own
  };

  // The nearest and farthest paths that there are, and the bounds of what can be reached.
  void measure() {
    const auto widen = [](PathType type, PathTypes& occurs, PathType& low, PathType& high) {
      if (type >= PathType::net) return;
      occurs[static_cast<size_t>(type)] = true;
      low = std::min(low, type);
      high = std::max(high, type);
    };
    const int gpus = space_.gpuCount(), nets = space_.netCount();
    if (gpus > 1) {
      nearestIntra_ = PathType::dis;
      farthestIntra_ = PathType::loc;
    }
    if (nets > 0) {
      nearestInter_ = PathType::dis;
      farthestInter_ = PathType::pix;
    }
    for (int gpu = 0; gpu < gpus; gpu++) {
      for (int other = 0; other < gpus; other++) {
        if (other != gpu) {
          widen(space_.gpuToGpu(gpu, other).type, intraTypes_, nearestIntra_, farthestIntra_);
        }
      }
      for (int net = 0; net < nets; net++) {
        widen(space_.gpuToNet(gpu, net).type, interTypes_, nearestInter_, farthestInter_);
        widen(space_.netToGpu(net, gpu).type, interTypes_, nearestInter_, farthestInter_);
      }
    }
    nearestIntra_ = std::min(nearestIntra_, PathType::sys);
    nearestInter_ = std::min(nearestInter_, PathType::sys);
    bounds_ = bandwidthBounds(space_.machine());
    for (int type = 0; type < static_cast<int>(PathType::net); type++) {
      Outgoing& out = out_[static_cast<size_t>(type)];
      for (int gpu = 0; gpu < gpus; gpu++) {
        const Bandwidth own = space_.outOf(gpu, static_cast<PathType>(type));
        out.all += own;
        out.least = gpu == 0 ? own : std::min(out.least, own);
      }
    }
  }

  // The nearest paths that, where they are as wide as `speed`, make one whole of all GPUs: a chain
  // needs them at least. DIS if none do.
  PathType connectingType(Bandwidth speed) const {
    const int gpus = space_.gpuCount();
    if (request_.pattern == Pattern::nvls || request_.pattern == Pattern::collnetDirect) {
      return PathType::loc;
    }
    std::vector<PathType> joins(static_cast<size_t>(gpus), PathType::dis);
    std::vector<bool> joined(static_cast<size_t>(gpus), false);
    PathType farthest = PathType::loc;
    int last = 0;
    for (int count = 1; count < gpus; count++) {
      joined[static_cast<size_t>(last)] = true;
      int next = -1;
      for (int gpu = 0; gpu < gpus; gpu++) {
        if (joined[static_cast<size_t>(gpu)]) continue;
        PathType& type = joins[static_cast<size_t>(gpu)];
        for (const Route* route : {&space_.gpuToGpu(last, gpu), &space_.gpuToGpu(gpu, last)}) {
          if (route->bandwidth >= speed) type = std::min(type, route->type);
        }
        if (next < 0 || type < joins[static_cast<size_t>(next)]) next = gpu;
      }
      last = next;
      farthest = std::max(farthest, joins[static_cast<size_t>(last)]);
    }
    return farthest;
  }

  const CpuInfo* anyCpu() const {
    const auto& cpus = space_.machine().topology.of(NodeType::cpu);
    return cpus.empty() ? nullptr : &space_.machine().topology.node(cpus.front()).cpu;
  }

  // Whether NVLink joins the GPUs into exactly two groups with a slower link in between (two
  // sockets): a tree will be best, and it needs two channels.
  bool isSplitByNvlink() const {
    const int gpus = space_.gpuCount();
    std::vector<bool> reached(static_cast<size_t>(gpus), false);
    std::vector<size_t> sizes;
    for (int first = 0; first < gpus; first++) {
      if (reached[static_cast<size_t>(first)]) continue;
      reached[static_cast<size_t>(first)] = true;
      std::vector<int> group{first};
      for (size_t i = 0; i < group.size(); i++) {
        for (int other = 0; other < gpus; other++) {
          if (reached[static_cast<size_t>(other)] ||
              space_.gpuToGpu(group[i], other).type != PathType::nvl) {
            continue;
          }
          reached[static_cast<size_t>(other)] = true;
          group.push_back(other);
        }
      }
      sizes.push_back(group.size());
    }
    return sizes.size() == 2 && sizes[0] > 1 && sizes[1] > 1;
  }

  void chooseFirst() {
    const int gpus = space_.gpuCount();
    first_.pattern = request_.pattern;
    first_.minChannels = request_.minChannels;
    first_.maxChannels = request_.maxChannels;
    first_.collnet = request_.collnet;
    if (request_.pattern == Pattern::nvls) {
      first_.maxChannels = std::min({first_.maxChannels, kMaxNvlsHeads, gpus});
    }
    if (request_.pattern == Pattern::collnetDirect) {
      first_.maxChannels = std::min({first_.maxChannels, kMaxDirectHeads, gpus});
    }
    if (gpus == 1 && request_.pattern != Pattern::ring) first_.pattern = Pattern::tree;
    // Inside a machine, NVLS must gather evenly from all GPUs.
    if (!hasNets_ && request_.pattern == Pattern::nvls) first_.minChannels = first_.maxChannels;
    // One GPU alone sends to nobody.
    if (!hasNets_ && gpus == 1) first_.minChannels = first_.maxChannels = 1;
    if (request_.pattern == Pattern::ring && first_.minChannels == 1 && first_.maxChannels >= 2 &&
        isSplitByNvlink()) {
      first_.minChannels = 2;
    }

    const bool mayCross = space_.netCount() > 1 && (request_.pattern == Pattern::ring ||
                                                    request_.pattern == Pattern::balancedTree ||
                                                    request_.pattern == Pattern::splitTree);
    first_.crossNic = mayCross && settings_.crossNic == 1 ? 1 : 0;
    triesCrossing_ =
        mayCross && settings_.crossNic == 2 &&
        (request_.pattern == Pattern::ring || request_.pattern == Pattern::balancedTree);

    totalBound_ = bounds_.widestGpu;
    if (gpus > 1 && request_.pattern != Pattern::ring) {
      totalBound_ = totalBound_ * gpus / (gpus - 1);
    }
    speedIndex_ = 0;
    while (speedIndex_ + 1 < speeds_.size() &&
           (speeds_[speedIndex_] > bounds_.widestPath ||
            speeds_[speedIndex_] * first_.minChannels > totalBound_)) {
      ++speedIndex_;
    }
  }

  // Whether an attempt cannot find more than what was found: a ring inside the machine takes its
  // speed out of every GPU, a chain out of all but the last, and each channel into one port.
  bool isHopeless(const Attempt& attempt) const {
    const Bandwidth speed = attempt.speedIntra;
    const int gpus = space_.gpuCount();
    const Outgoing& out = out_[static_cast<size_t>(attempt.typeIntra)];
    long long channels = attempt.maxChannels;
    if (gpus > 1 && attempt.pattern == Pattern::ring && !hasNets_) {
      channels = std::min<long long>(channels, out.least / speed);
    } else if (gpus > 1 && attempt.pattern != Pattern::nvls &&
               attempt.pattern != Pattern::collnetDirect) {
      channels = std::min<long long>(channels, out.all / (speed * (gpus - 1)));
    }
    if (hasNets_) {
      long long ports = 0;
      for (const Bandwidth port : space_.portBandwidth()) ports += port / attempt.speedInter;
      channels = std::min(channels, ports);
    }
    channels = std::min<long long>(channels, reachableHeads(attempt));
    if (channels < attempt.minChannels || channels <= 0) return true;
    if (attempt.pattern == Pattern::nvls) {
      return channels < static_cast<long long>(solution_.channels.size());
    }
    return channels * speed < solution_.totalIntra();
  }

  // With NVLS every GPU moves one share for each head, and heads move one more.
  int reachableHeads(const Attempt& attempt) const {
    if (attempt.pattern != Pattern::nvls) return attempt.maxChannels;
    Bandwidth least = kLocalBandwidth, most = 0;
    for (int gpu = 0; gpu < space_.gpuCount(); gpu++) {
      least = std::min(least, space_.gpuToSwitch(gpu).bandwidth);
      most = std::max(most, space_.gpuToSwitch(gpu).bandwidth);
    }
    return static_cast<int>(std::min<Bandwidth>(
        {attempt.maxChannels, least / attempt.speedIntra, most / attempt.speedIntra - 1}));
  }

  bool found() const { return !solution_.channels.empty(); }

  Outlook run(const Attempt& attempt) {
    if (isHopeless(attempt)) return Outlook::open;
    const long long budget = std::min(attempt.sameChannels ? sameSteps_ : triesSteps_, stepsLeft_);
    const SearchTry::Outcome outcome =
        search_.run(attempt, solution_, budget, reachableHeads(attempt));
    stepsLeft_ -= outcome.steps;
    timedOut_ = outcome.steps >= budget;
    if (outcome.best || (found() && solution_.totalInter() >= totalBound_)) return Outlook::best;
    return stepsLeft_ > 0 ? Outlook::open : Outlook::spent;
  }

  Outlook tryWithAndWithoutSameChannels(Attempt attempt) {
    if (request_.pattern != Pattern::nvls) {
      attempt.sameChannels = true;
      if (const Outlook outlook = run(attempt); outlook != Outlook::open) return outlook;
      // Between AMD's sockets different channels get in each other's way; better than none.
      const CpuInfo* cpu = anyCpu();
      if (found() && cpu && cpu->architecture == CpuArchitecture::x86 &&
          cpu->vendor == CpuVendor::amd && attempt.typeIntra == PathType::sys) {
        return Outlook::open;
      }
    }
    attempt.sameChannels = false;
    return run(attempt);
  }

  Outlook tryPatterns(Attempt attempt) {
    const Outlook outlook = tryWithAndWithoutSameChannels(attempt);
    if (outlook != Outlook::open || space_.lowestSm() < kHopper ||
        attempt.pattern != Pattern::balancedTree) {
      return outlook;
    }
    attempt.pattern = Pattern::tree;
    return tryWithAndWithoutSameChannels(attempt);
  }

  Outlook tryPathTypes(Attempt attempt) {
    const PathType nearest = std::max(nearestIntra_, connectingType(attempt.speedIntra));
    if (nearest >= PathType::net) return Outlook::open;
    attempt.typeInter = nearestInter_;
    while (true) {
      const PathType limit =
          std::min(hasNets_ ? std::max(attempt.typeInter, nearest) : farthestIntra_,
                   std::max(farthestIntra_, nearest));
      attempt.typeIntra = nearest;
      while (true) {
        if (const Outlook outlook = tryPatterns(attempt); outlook != Outlook::open) return outlook;
        attempt.typeIntra = farther(attempt.typeIntra, intraTypes_, limit);
        if (attempt.typeIntra > limit ||
            (found() && attempt.typeIntra > solution_.attempt.typeIntra)) {
          break;
        }
      }
      if (!hasNets_) return Outlook::open;
      // Farther paths between GPUs are tried with ports as far away. A solution is not given up for
      // one whose ports are farther, but for those that PXN reaches.
      PathTypes either = interTypes_;
      for (size_t type = 0; type < either.size(); type++) either[type] |= intraTypes_[type];
      attempt.typeInter = farther(attempt.typeInter, either, farthestInter_);
      if (attempt.typeInter > farthestInter_ ||
          (found() && attempt.typeInter > std::max(solution_.attempt.typeInter, PathType::pxn))) {
        return Outlook::open;
      }
    }
  }

  void firstPass() {
    for (; speedIndex_ < speeds_.size(); ++speedIndex_) {
      const Bandwidth speed = speeds_[speedIndex_];
      if (found() && speed * 100 <= solution_.attempt.speedInter * kLowestRatioPercent) return;
      Attempt attempt = first_;
      attempt.speedIntra = attempt.speedInter = speed;
      stepsLeft_ = speedSteps_;
      Outlook outlook = tryPathTypes(attempt);
      if (outlook == Outlook::open && triesCrossing_) {
        attempt.crossNic = 2;
        outlook = tryPathTypes(attempt);
      }
      if (outlook == Outlook::best) return;
    }
  }

  // More channels of less speed keep more thread blocks busy. Not for NVLS, whose channels are its
  // heads, nor where blocks are fast enough or links too narrow.
  void repeatChannels() {
    const int count = static_cast<int>(solution_.channels.size());
    constexpr Bandwidth kWide = 25000, kWideForHopper = 50000;
    if (count == 0 || solution_.attempt.pattern == Pattern::nvls ||
        solution_.attempt.pattern == Pattern::collnetDirect) {
      return;
    }
    if (solution_.attempt.speedIntra < kWide) return;
    if (space_.lowestSm() > kAmpere && solution_.attempt.speedIntra < kWideForHopper && count > 4) {
      return;
    }
    const int wanted = std::min(2 * count, solution_.attempt.maxChannels);
    if (wanted <= count) return;
    // Alternating rings stay in pairs: a last one without partner gets its copy as such.
    const bool lastFirst = solution_.attempt.crossNic == 2 && count % 2 == 1;
    for (int i = 0; i < wanted - count; i++) {
      const int source = lastFirst ? (i + count - 1) % count : i;
      solution_.channels.push_back(solution_.channels[static_cast<size_t>(source)]);
    }
    const int share = (wanted + count - 1) / count;
    solution_.attempt.speedIntra /= share;
    solution_.attempt.speedInter /= share;
    solution_.hops *= share;
  }

  // With the number of channels found, are they faster than the speed that found them?
  void secondPass() {
    if (!found()) return;
    Attempt attempt = solution_.attempt;
    attempt.minChannels = static_cast<int>(solution_.channels.size());
    speedIndex_ = 0;
    while (speedIndex_ + 1 < speeds_.size() &&
           speeds_[speedIndex_] > solution_.attempt.speedInter) {
      ++speedIndex_;
    }
    attempt.speedIntra = attempt.speedInter = speeds_[speedIndex_];
    timedOut_ = false;
    stepsLeft_ = speedSteps_;
    while (speedIndex_ > 0 && !timedOut_ && stepsLeft_ > 0) {
      if (request_.pattern == Pattern::ring) {
        attempt.speedIntra = attempt.speedInter = speeds_[--speedIndex_];
      } else if (request_.pattern == Pattern::nvls) {
        if (attempt.speedInter != solution_.attempt.speedInter ||
            attempt.speedInter >= 2 * attempt.speedIntra) {
          return;
        }
        attempt.maxChannels = attempt.minChannels;
        attempt.speedInter = speeds_[--speedIndex_];
      } else {
        // Two nodes, or a network that reduces, leave trees time for more inside.
        if (attempt.speedIntra != solution_.attempt.speedIntra ||
            attempt.speedIntra >= 2 * attempt.speedInter) {
          return;
        }
        attempt.speedIntra = speeds_[--speedIndex_];
      }
      run(attempt);
    }
  }

  const SearchSpace& space_;
  const GraphRequest& request_;
  const SearchSettings& settings_;
  SearchTry search_;
  Attempt first_;  // what all attempts of the first pass share
  Solution solution_;
  std::vector<Bandwidth> speeds_;
  size_t speedIndex_ = 0;
  bool hasNets_ = false, triesCrossing_ = false, timedOut_ = false;
  PathType nearestIntra_ = PathType::loc, farthestIntra_ = PathType::loc;
  PathType nearestInter_ = PathType::pix, farthestInter_ = PathType::pix;
  PathTypes intraTypes_{}, interTypes_{};
  BandwidthBounds bounds_;
  struct Outgoing {
    Bandwidth all = 0, least = 0;
  };
  std::array<Outgoing, static_cast<int>(PathType::net)> out_;  // of the GPUs, by path type
  Bandwidth totalBound_ = 0;
  long long triesSteps_ = 0, sameSteps_ = 0, speedSteps_ = 0;
  long long stepsLeft_ = 0;  // of the speed that is tried
};

// One plain chain through all GPUs, for machines where nothing else was found.
Solution plainChain(const SearchSpace& space, const GraphRequest& request) {
  Solution solution;
  solution.attempt.pattern = request.pattern;
  solution.attempt.speedIntra = solution.attempt.speedInter = kSlowest[std::size(kSlowest) - 1];
  solution.attempt.typeIntra = solution.attempt.typeInter = PathType::sys;
  Channel channel;
  for (int gpu = 0; gpu < space.gpuCount(); gpu++) channel.gpus.push_back(gpu);
  if (space.netCount() > 0) channel.netIn = channel.netOut = 0;
  solution.channels.push_back(std::move(channel));
  return solution;
}

ChannelGraph toGraph(const SearchSpace& space, const Solution& solution) {
  ChannelGraph graph;
  const Attempt& attempt = solution.attempt;
  graph.pattern = attempt.pattern;
  graph.speedIntra = attempt.speedIntra;
  graph.speedInter = attempt.speedInter;
  graph.typeIntra = attempt.typeIntra;
  graph.typeInter = attempt.typeInter;
  graph.sameChannels = attempt.sameChannels;
  graph.crossNic = attempt.crossNic;
  for (const Channel& found : solution.channels) {
    Channel channel;
    for (const int gpu : found.gpus) channel.gpus.push_back(space.gpuNode(gpu));
    if (found.netIn >= 0) {
      channel.netIn = space.netNode(found.netIn);
      channel.netOut = space.netNode(found.netOut);
      graph.latencyInterUs = std::max(graph.latencyInterUs, space.net(found.netIn).latencyUs);
    }
    // The head of CollNet direct gathers from all others, in order.
    if (attempt.pattern == Pattern::collnetDirect) {
      for (int gpu = 0; gpu < space.gpuCount(); gpu++) {
        if (gpu != found.gpus.front()) channel.gpus.push_back(space.gpuNode(gpu));
      }
    }
    graph.channels.push_back(std::move(channel));
  }
  return graph;
}

bool canReduceInSwitch(const SearchSpace& space) {
  if (!space.hasSwitch() || space.lowestSm() < kHopper || space.gpuCount() < 2) return false;
  for (int gpu = 0; gpu < space.gpuCount(); gpu++) {
    if (space.gpuToSwitch(gpu).type != PathType::nvl) return false;
  }
  return true;
}

ChannelGraph searchIn(const SearchSpace& space, const GraphRequest& request,
                      const SearchSettings& settings) {
  ChannelGraph none;
  none.pattern = request.pattern;
  const bool optional = request.pattern == Pattern::nvls ||
                        request.pattern == Pattern::collnetDirect || request.collnet;
  if (request.pattern == Pattern::nvls && !canReduceInSwitch(space)) return none;
  if (request.pattern == Pattern::collnetDirect && space.netCount() == 0) return none;
  if (request.collnet && space.netCount() == 0) return none;
  Solution solution = Relaxation(space, request, settings).find();
  if (solution.channels.empty()) {
    if (optional) return none;
    solution = plainChain(space, request);
  }
  return toGraph(space, solution);
}

}  // namespace

ChannelGraph searchGraph(const Machine& machine, const GraphRequest& request,
                         const SearchSettings& settings) {
  return searchIn(SearchSpace(machine), request, settings);
}

GraphSet searchGraphs(const Machine& machine, const SearchSettings& settings) {
  const SearchSpace space(machine);
  const auto given = [&](GraphId id) {
    const auto found = std::find_if(
        settings.given.begin(), settings.given.end(),
        [&](const NamedGraph& graph) { return graph.id == id && !graph.graph.channels.empty(); });
    return found == settings.given.end() ? nullptr : &found->graph;
  };
  const auto choose = [&](GraphId id, const GraphRequest& request) {
    if (const ChannelGraph* graph = given(id)) return *graph;
    ChannelGraph none;
    none.pattern = request.pattern;
    const bool wanted = id == GraphId::nvls ? settings.nvls : !request.collnet || settings.collnet;
    return wanted ? searchIn(space, request, settings) : none;
  };
  const auto total = [&](const ChannelGraph& graph) {
    return space.netCount() > 0 ? graph.totalInter() : graph.totalIntra();
  };
  // Trees have exactly as many channels as the ring, and a tree at less than half of the ring's
  // total is of little use: ever shorter rings give way to it, and the best pair is kept.
  GraphSet graphs;
  const auto chooseRingAndTree = [&](int maxChannels) {
    graphs.ring = choose(GraphId::ring, {Pattern::ring, 1, maxChannels, false});
    const int channels = static_cast<int>(graphs.ring.channels.size());
    graphs.tree = choose(GraphId::tree, {Pattern::balancedTree, channels, channels, false});
    return std::min(total(graphs.ring), 2 * total(graphs.tree));
  };
  Bandwidth best = chooseRingAndTree(settings.maxRingChannels);
  if (!given(GraphId::ring) && !given(GraphId::tree)) {
    GraphSet bestGraphs = graphs;
    while (2 * total(graphs.tree) < total(graphs.ring) && graphs.ring.channels.size() > 1) {
      const Bandwidth both = chooseRingAndTree(static_cast<int>(graphs.ring.channels.size()) - 1);
      if (both <= best) continue;
      best = both;
      bestGraphs = graphs;
    }
    graphs = std::move(bestGraphs);
  }
  const int channels = static_cast<int>(graphs.ring.channels.size());
  graphs.collnetChain = choose(GraphId::collnetChain, {Pattern::tree, channels, channels, true});
  graphs.collnetDirect =
      choose(GraphId::collnetDirect, {Pattern::collnetDirect, 1, settings.maxChannels, true});
  graphs.nvls = choose(GraphId::nvls, {Pattern::nvls, 1, settings.maxChannels,
                                       settings.collnet && space.netCount() > 0});
  return graphs;
}

}  // namespace unisono::topology
