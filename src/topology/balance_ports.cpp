// SPDX-License-Identifier: Apache-2.0
#include "topology/balance_ports.h"

#include <algorithm>
#include <vector>

namespace unisono::topology {

namespace {

class PortBalancer {
 public:
  PortBalancer(const SearchSpace& space, Solution& solution)
      : space_(space),
        solution_(solution),
        traffic_(solution.attempt.pattern, solution.attempt.speedIntra, solution.attempt.speedInter,
                 space.gpus()),
        links_(space.linkBandwidth()) {
    uses_.assign(space.portBandwidth().size(), 0);
    for (const Channel& channel : solution.channels) {
      isSound_ = take(channel) && isSound_;
      ++usesOf(channel.netIn);
    }
  }

  void run() {
    if (!isSound_) return;
    // Every move brings the uses of two ports closer, so there are few.
    size_t moves = 4 * solution_.channels.size();
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
  bool take(const Channel& channel) {
    const std::vector<PathUse> uses = traffic_.all(channel);
    for (size_t i = 0; i < uses.size(); i++) {
      if (links_.take(space_.routeOf(uses[i]), uses[i].speed)) continue;
      while (i-- > 0) links_.giveBack(space_.routeOf(uses[i]), uses[i].speed);
      return false;
    }
    return true;
  }

  void giveBack(const Channel& channel) {
    for (const PathUse& use : traffic_.all(channel)) {
      links_.giveBack(space_.routeOf(use), use.speed);
    }
  }

  PathType nearness(int net) const {
    const Machine& machine = space_.machine();
    return distanceToGpus(machine.topology, machine.paths, space_.netNode(net));
  }

  // Whether no path of the channel is farther than the solution allows.
  bool isNear(const Channel& channel) const {
    const Attempt& attempt = solution_.attempt;
    const std::vector<PathUse> uses = traffic_.all(channel);
    return std::all_of(uses.begin(), uses.end(), [&](const PathUse& use) {
      const PathType limit = use.isNetwork() ? attempt.typeInter : attempt.typeIntra;
      return space_.routeOf(use).type <= limit &&
             (!isTree(attempt.pattern) || space_.oppositeOf(use).type <= limit);
    });
  }

  int& usesOf(int net) { return uses_[static_cast<size_t>(space_.portOf(net))]; }

  // The channel at another port: unchanged, then starting at each GPU close to that port.
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
    for (int net = 0; net < space_.netCount(); net++) {
      if (usesOf(own) >= usesOf(net) + 2 &&
          space_.net(net).bandwidth == space_.net(own).bandwidth &&
          nearness(net) == nearness(own) &&
          (space_.net(net).collective || !space_.net(own).collective)) {
        candidates.push_back(net);
      }
    }
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
  const ChannelTraffic traffic_;
  LinkBudget links_;
  bool isSound_ = true;  // the channels fit into the links before any moves
  std::vector<int> uses_;
};

}  // namespace

void balancePorts(const SearchSpace& space, Solution& solution) {
  if (solution.channels.empty() || space.netCount() == 0 || solution.attempt.crossNic != 0 ||
      solution.attempt.pattern == Pattern::nvls ||
      solution.attempt.pattern == Pattern::collnetDirect) {
    return;
  }
  PortBalancer(space, solution).run();
}

}  // namespace unisono::topology
