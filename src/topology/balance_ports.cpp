#include "topology/balance_ports.h"

#include <algorithm>
#include <vector>

namespace unisono::topology {

namespace {

class PortBalancer {
 public:
  PortBalancer(const SearchSpace& space, Solution& solution)
      : space_(space), solution_(solution), links_(space.linkBandwidth()) {
    uses_.assign(space.portBandwidth().size(), 0);
    for (const Channel& channel : solution.channels) {
      isSound_ = take(channel) && isSound_;
      ++usesOf(channel.netIn);
    }
  }

  void run() {
    if (!isSound_) return;
    // Every move brings the uses of two ports closer, so there are few.
    std::size_t moves = 4 * solution_.channels.size();
    bool changed = true;
    while (changed && moves > 0) {
      changed = false;
      for (Channel& channel : solution_.channels) {
        if (!move(channel)) continue;
        changed = true;
        if (--moves == 0) return;
      }
    }
  }

 private:
  // Between a channel's port and one of its GPUs.
  struct Part {
    int gpu;
    bool toPort;
    Bandwidth speed;
  };

  std::vector<Part> partsOf(const Channel& channel) const {
    const Bandwidth speed = solution_.attempt.speedInter;
    const int first = channel.gpus.front();
    const int second = channel.gpus.size() > 1 ? channel.gpus[1] : first;
    switch (solution_.attempt.pattern) {
      case Pattern::ring:
        return {{first, false, speed}, {channel.gpus.back(), true, speed}};
      case Pattern::splitTree:
        return {{first, false, speed}, {second, true, speed}};
      case Pattern::balancedTree:
        return {
            {first, false, speed}, {first, true, (speed + 1) / 2}, {second, true, (speed + 1) / 2}};
      default:
        return {{first, false, speed}, {first, true, speed}};
    }
  }

  // A port may have several NETs: a channel can leave by another than it enters by.
  const Route& routeOf(const Part& part, const Channel& channel) const {
    return part.toPort ? space_.gpuToNet(part.gpu, channel.netOut)
                       : space_.netToGpu(channel.netIn, part.gpu);
  }
  const Route& backOf(const Part& part, const Channel& channel) const {
    return part.toPort ? space_.netToGpu(channel.netOut, part.gpu)
                       : space_.gpuToNet(part.gpu, channel.netIn);
  }

  struct Load {
    const Route* route;
    Bandwidth speed;
  };
  std::vector<Load> loadsOf(const Channel& channel) const {
    std::vector<Load> loads;
    for (std::size_t i = 0; i + 1 < channel.gpus.size(); ++i)
      loads.push_back(
          {&space_.gpuToGpu(channel.gpus[i], channel.gpus[i + 1]), solution_.attempt.speedIntra});
    for (const Part& part : partsOf(channel))
      loads.push_back({&routeOf(part, channel), part.speed});
    return loads;
  }

  bool take(const Channel& channel) {
    const std::vector<Load> loads = loadsOf(channel);
    for (std::size_t i = 0; i < loads.size(); ++i) {
      if (links_.take(*loads[i].route, loads[i].speed)) continue;
      while (i-- > 0) links_.giveBack(*loads[i].route, loads[i].speed);
      return false;
    }
    return true;
  }

  void giveBack(const Channel& channel) {
    for (const Load& load : loadsOf(channel)) links_.giveBack(*load.route, load.speed);
  }

  PathType nearness(int net) const {
    PathType nearest = PathType::dis;
    for (int gpu = 0; gpu < space_.gpuCount(); ++gpu)
      nearest = std::min(nearest,
                         std::max(space_.netToGpu(net, gpu).type, space_.gpuToNet(gpu, net).type));
    return nearest;
  }

  // Whether no path of the channel is farther than the solution allows.
  bool isNear(const Channel& channel) const {
    const Attempt& attempt = solution_.attempt;
    const bool tree = attempt.pattern != Pattern::ring;
    for (std::size_t i = 0; i + 1 < channel.gpus.size(); ++i) {
      const int from = channel.gpus[i], to = channel.gpus[i + 1];
      if (space_.gpuToGpu(from, to).type > attempt.typeIntra) return false;
      if (tree && space_.gpuToGpu(to, from).type > attempt.typeIntra) return false;
    }
    const std::vector<Part> parts = partsOf(channel);
    return std::all_of(parts.begin(), parts.end(), [&](const Part& part) {
      return routeOf(part, channel).type <= attempt.typeInter &&
             (!tree || backOf(part, channel).type <= attempt.typeInter);
    });
  }

  int& usesOf(int net) { return uses_[static_cast<std::size_t>(space_.portOf(net))]; }

  // The channel at another port: as it is, then begun at each GPU beside that port.
  std::vector<Channel> versionsAt(const Channel& channel, int net) const {
    std::vector<Channel> versions{{channel.gpus, net, net}};
    for (const int gpu : space_.localGpus(net)) {
      Channel& version = versions.emplace_back(versions.front());
      std::rotate(version.gpus.begin(), std::find(version.gpus.begin(), version.gpus.end(), gpu),
                  version.gpus.end());
    }
    return versions;
  }

  // Moves the channel to the least used port that can take it; false if it should stay.
  bool move(Channel& channel) {
    const int own = channel.netIn;
    std::vector<int> candidates;
    for (int net = 0; net < space_.netCount(); ++net)
      if (usesOf(own) >= usesOf(net) + 2 &&
          space_.net(net).bandwidth == space_.net(own).bandwidth &&
          nearness(net) == nearness(own) &&
          (space_.net(net).collective || !space_.net(own).collective))
        candidates.push_back(net);
    if (candidates.empty()) return false;
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](int a, int b) { return usesOf(a) < usesOf(b); });
    giveBack(channel);
    for (const int net : candidates) {
      for (Channel& version : versionsAt(channel, net)) {
        if (!isNear(version) || !take(version)) continue;
        if (version.gpus != channel.gpus) solution_.attempt.sameChannels = false;
        channel = std::move(version);
        --usesOf(own);
        ++usesOf(net);
        return true;
      }
    }
    take(channel);
    return false;
  }

  const SearchSpace& space_;
  Solution& solution_;
  LinkBudget links_;
  bool isSound_ = true;  // the channels fit into the links before any moves
  std::vector<int> uses_;
};

}  // namespace

void balancePorts(const SearchSpace& space, Solution& solution) {
  if (solution.channels.empty() || space.netCount() == 0 || solution.attempt.crossNic != 0 ||
      solution.attempt.pattern == Pattern::nvls ||
      solution.attempt.pattern == Pattern::collnetDirect)
    return;
  PortBalancer(space, solution).run();
}

}  // namespace unisono::topology
