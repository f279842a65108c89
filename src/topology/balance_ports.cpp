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
      takeChain(channel);
      takePort(channel, channel.netIn);
      ++uses_[static_cast<std::size_t>(space.portOf(channel.netIn))];
    }
  }

  void run() {
    // Every move brings the uses of two ports closer, so there are few.
    std::size_t moves = 4 * solution_.channels.size();
    bool changed = true;
    while (changed && moves > 0) {
      changed = false;
      for (Channel& channel : solution_.channels) {
        const int better = betterPort(channel);
        if (better < 0) continue;
        channel.netIn = channel.netOut = better;
        changed = true;
        if (--moves == 0) return;
      }
    }
  }

 private:
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

  const Route& routeOf(const Part& part, int net) const {
    return part.toPort ? space_.gpuToNet(part.gpu, net) : space_.netToGpu(net, part.gpu);
  }
  const Route& backOf(const Part& part, int net) const {
    return part.toPort ? space_.netToGpu(net, part.gpu) : space_.gpuToNet(part.gpu, net);
  }

  void takeChain(const Channel& channel) {
    for (std::size_t i = 0; i + 1 < channel.gpus.size(); ++i)
      links_.take(space_.gpuToGpu(channel.gpus[i], channel.gpus[i + 1]),
                  solution_.attempt.speedIntra);
  }

  bool takePort(const Channel& channel, int net) {
    const std::vector<Part> parts = partsOf(channel);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (links_.take(routeOf(parts[i], net), parts[i].speed)) continue;
      while (i-- > 0) links_.giveBack(routeOf(parts[i], net), parts[i].speed);
      return false;
    }
    return true;
  }

  void leavePort(const Channel& channel, int net) {
    for (const Part& part : partsOf(channel)) links_.giveBack(routeOf(part, net), part.speed);
  }

  PathType nearness(int net) const {
    PathType nearest = PathType::dis;
    for (int gpu = 0; gpu < space_.gpuCount(); ++gpu)
      nearest = std::min(nearest,
                         std::max(space_.netToGpu(net, gpu).type, space_.gpuToNet(gpu, net).type));
    return nearest;
  }

  bool mayUse(const Channel& channel, int net) const {
    const bool tree = solution_.attempt.pattern != Pattern::ring;
    const std::vector<Part> parts = partsOf(channel);
    return std::all_of(parts.begin(), parts.end(), [&](const Part& part) {
      return routeOf(part, net).type <= solution_.attempt.typeInter &&
             (!tree || backOf(part, net).type <= solution_.attempt.typeInter);
    });
  }

  int usesOf(int net) const { return uses_[static_cast<std::size_t>(space_.portOf(net))]; }

  // Moves the channel's traffic to the least used port that can take it, and returns that; -1 if
  // the channel should stay.
  int betterPort(const Channel& channel) {
    const int own = channel.netIn;
    std::vector<int> candidates;
    for (int net = 0; net < space_.netCount(); ++net)
      if (usesOf(own) >= usesOf(net) + 2 && mayUse(channel, net) &&
          space_.net(net).bandwidth == space_.net(own).bandwidth &&
          nearness(net) == nearness(own) &&
          (space_.net(net).collective || !space_.net(own).collective))
        candidates.push_back(net);
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](int a, int b) { return usesOf(a) < usesOf(b); });
    if (candidates.empty()) return -1;
    leavePort(channel, own);
    for (const int net : candidates) {
      if (!takePort(channel, net)) continue;
      --uses_[static_cast<std::size_t>(space_.portOf(own))];
      ++uses_[static_cast<std::size_t>(space_.portOf(net))];
      return net;
    }
    takePort(channel, own);
    return -1;
  }

  const SearchSpace& space_;
  Solution& solution_;
  LinkBudget links_;
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
