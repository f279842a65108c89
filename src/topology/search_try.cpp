// SPDX-License-Identifier: Apache-2.0
#include "topology/search_try.h"

#include <algorithm>
#include <utility>

namespace unisono::topology {

int SearchTry::leaveStep() const {
  const size_t leaves = static_cast<size_t>(leaves_);
  return leaves < leavePlaces_.size() ? leavePlaces_[leaves] : -1;
}

SearchTry::Outcome SearchTry::run(const Attempt& attempt, Solution& solution, long long budget,
                                  int reachable) {
  attempt_ = attempt;
  solution_ = &solution;
  free_ = LinkBudget(space_.linkBandwidth());
  portIn_ = portOut_ = space_.portBandwidth();
  channels_.clear();
  orders_.clear();
  used_.assign(static_cast<size_t>(space_.gpuCount()), false);
  leaves_ = 0;
  closed_ = working_ = false;
  hops_ = 0;
  frames_.clear();
  moves_.clear();
  traffic_ = {attempt.pattern, attempt.speedIntra, attempt.speedInter, space_.gpus()};
  leavePlaces_.clear();
  const Channel anyChannel{space_.gpus(), -1, -1};
  for (int place = 0; hasNets() && place < space_.gpuCount(); place++) {
    if (traffic_.leave(anyChannel, place).speed > 0) leavePlaces_.push_back(place);
  }
  startNets_ = space_.netsFor(-1, attempt.typeInter);
  leaveNets_.assign(static_cast<size_t>(space_.gpuCount()), {});

  Outcome outcome;
  pushMoves();
  while (!frames_.empty()) {
    SearchStep& frame = frames_.back();
    if (frame.applied) {
      undo(moves_[frame.cursor - 1]);
      frame.applied = false;
    }
    if (frame.cursor == moves_.size() || outcome.steps >= budget) {
      moves_.resize(frame.begin);
      frames_.pop_back();
      continue;
    }
    const Move move = moves_[frame.cursor++];
    ++outcome.steps;
    if (!apply(move)) continue;
    frame.applied = true;
    if (move.kind == Kind::finish && consider()) {
      outcome.best = true;
      return outcome;
    }
    if (move.kind == Kind::finish && static_cast<int>(channels_.size()) >= reachable) {
      return outcome;
    }
    pushMoves();
  }
  return outcome;
}

// What can come next, in the order to try it.
void SearchTry::pushMoves() {
  frames_.push_back({moves_.size(), moves_.size(), false});
  if (!working_) {
    if (static_cast<int>(channels_.size()) < attempt_.maxChannels) addStarts();
    return;
  }
  const Channel& channel = channels_.back();
  const int step = static_cast<int>(channel.gpus.size()) - 1;
  if (leaveStep() == step) {
    addLeaves();
  } else if (hasHead() && !closed_) {
    moves_.push_back({Kind::head, Order::free, channel.gpus.front(), -1});
  } else if (!hasHead() && step < space_.gpuCount() - 1) {
    addNexts();
  } else if (attempt_.pattern == Pattern::ring && !hasNets() && !closed_) {
    moves_.push_back({Kind::close, Order::free, -1, -1});
  } else {
    moves_.push_back({Kind::finish, Order::free, -1, -1});
  }
}

void SearchTry::addStarts() {
  const int number = static_cast<int>(channels_.size());
  if (hasNets()) {
    const size_t count = startNets_.size();
    if (hasHead()) {
      // Heads are a set: in one order only, or all their permutations would be tried.
      size_t i = 0;
      if (number > 0) {
        i = static_cast<size_t>(
            std::find(startNets_.begin(), startNets_.end(), channels_.back().netIn) -
            startNets_.begin() + 1);
      }
      for (; i < count; i++) addStartsFrom(startNets_[i]);
      return;
    }
    for (size_t i = 0; i < count; i++) {
      addStartsFrom(startNets_[(static_cast<size_t>(number) + i) % count]);
    }
    return;
  }
  if (hasHead()) {
    if (number < space_.gpuCount()) moves_.push_back({Kind::start, Order::free, number, -1});
    return;
  }
  // A chain leaves one of the links of a ring idle; in turn, none is.
  if (number > 0 && isTree() && !attempt_.sameChannels) {
    moves_.push_back({Kind::start, Order::rotated, rotated(0), -1});
  }
  if (number == 0) {
    moves_.push_back({Kind::start, Order::listed, 0, -1});
  } else {
    moves_.push_back({Kind::start, Order::replay, channels_.back().gpus.front(), -1});
  }
  if (number == 0 || !attempt_.sameChannels) {
    for (int gpu = 0; gpu < space_.gpuCount(); gpu++) {
      moves_.push_back({Kind::start, Order::free, gpu, -1});
    }
  }
}

void SearchTry::addStartsFrom(int net) {
  const size_t number = channels_.size();
  if (attempt_.collnet && !space_.net(net).collective) return;
  const std::vector<int>& local = space_.localGpus(net);
  if (local.empty()) return;
  if (hasHead()) {
    for (const int gpu : local) {
      const bool taken = std::any_of(channels_.begin(), channels_.end(), [&](const Channel& other) {
        return other.gpus.front() == gpu;
      });
      if (!taken) moves_.push_back({Kind::start, Order::free, gpu, net});
      if (!taken) return;
    }
    return;
  }
  // Alternating rings: an odd one enters where the one before it leaves.
  if (attempt_.pattern == Pattern::ring && attempt_.crossNic == 2 && number % 2 == 1 &&
      net != channels_.back().netOut) {
    return;
  }
  if (number > 0) {
    moves_.push_back({Kind::start, Order::replay, channels_.back().gpus.front(), net});
  }
  if (number > 0 && attempt_.sameChannels) return;
  if (number == 0 && !space_.hasSwitch()) moves_.push_back({Kind::start, Order::listed, 0, net});
  for (size_t i = 0; i < local.size(); i++) {
    moves_.push_back({Kind::start, Order::free, local[(number + i) % local.size()], net});
  }
}

// GPU number `step` of the channel in work when it follows the first channel from another start.
int SearchTry::rotated(size_t step) const {
  const size_t number = channels_.size() - (working_ ? 1 : 0);
  const std::vector<int>& first = channels_.front().gpus;
  return first[(step + number) % first.size()];
}

const std::vector<int>& SearchTry::nextGpus(int gpu, int net, int towardsNet) {
  using Neighbours = SearchSpace::Neighbours;
  Neighbours neighbours = Neighbours::next;
  if (attempt_.pattern == Pattern::ring) neighbours = Neighbours::nextThenPrevious;
  if (attempt_.pattern == Pattern::balancedTree || attempt_.pattern == Pattern::splitTree) {
    neighbours = Neighbours::previousThenNext;
  }
  if (space_.hasSwitch() || towardsNet == 0) net = -1;
  if (net < 0) towardsNet = 0;
  const uint64_t key = (static_cast<uint64_t>(gpu) << 32) | (static_cast<uint64_t>(net + 1) << 8) |
                       (static_cast<uint64_t>(towardsNet + 1) << 4) |
                       static_cast<uint64_t>(neighbours);
  const auto [entry, isNew] = nextCache_.try_emplace(key);
  if (isNew) entry->second = space_.nextGpus(gpu, net, towardsNet, neighbours);
  return entry->second;
}

void SearchTry::addNexts() {
  const Channel& channel = channels_.back();
  const size_t step = channel.gpus.size() - 1;
  const auto add = [&](int gpu) {
    if (!used_[static_cast<size_t>(gpu)]) moves_.push_back({Kind::next, Order::free, gpu, -1});
  };
  switch (orders_.back()) {
    case Order::listed:
      add(static_cast<int>(step) + 1);
      return;
    case Order::replay:
      add(channels_[channels_.size() - 2].gpus[step + 1]);
      return;
    case Order::rotated:
      add(rotated(step + 1));
      return;
    case Order::free:
      break;
  }
  const int leave = leaveStep();
  const int towards = leave < 0 ? 0 : leave == static_cast<int>(step) + 1 ? 1 : -1;
  for (const int gpu : nextGpus(channel.gpus.back(), channel.netIn, towards)) add(gpu);
}

void SearchTry::addLeaves() {
  const Channel& channel = channels_.back();
  const size_t number = channels_.size() - 1;
  if (leaves_ == 1) {
    moves_.push_back({Kind::leave, Order::free, channel.gpus.back(), channel.netOut});
    return;
  }
  std::vector<int>& nets = leaveNets_[static_cast<size_t>(channel.gpus.back())];
  if (nets.empty()) nets = space_.netsFor(channel.gpus.back(), attempt_.typeInter);
  for (const int net : nets) {
    if (attempt_.pattern == Pattern::tree && net != channel.netIn) continue;
    if (attempt_.pattern == Pattern::ring && attempt_.crossNic == 2) {
      if (number % 2 == 1 && net != channels_[number - 1].netIn) continue;
    } else if (attempt_.crossNic == 0 && space_.portOf(net) != space_.portOf(channel.netIn)) {
      continue;
    }
    moves_.push_back({Kind::leave, Order::free, channel.gpus.back(), net});
  }
}

bool SearchTry::reserve(const PathUse& use) {
  const PathType limit = use.isNetwork() ? attempt_.typeInter : attempt_.typeIntra;
  const Route& route = space_.routeOf(use);
  if (route.type > limit || route.type >= PathType::net) return false;
  // A tree's traffic goes up and down.
  if (isTree() && space_.oppositeOf(use).type > limit) return false;
  if (!free_.take(route, use.speed)) return false;
  hops_ += route.hops;
  return true;
}

void SearchTry::release(const PathUse& use) {
  const Route& route = space_.routeOf(use);
  free_.giveBack(route, use.speed);
  hops_ -= route.hops;
}

bool SearchTry::reserveNet(const PathUse& use, std::vector<Bandwidth>& ports) {
  const int net = use.kind == PathUse::Kind::gpuToPort ? use.to : use.from;
  Bandwidth& port = ports[static_cast<size_t>(space_.portOf(net))];
  if (port < use.speed || !reserve(use)) return false;
  port -= use.speed;
  return true;
}

void SearchTry::releaseNet(const PathUse& use, std::vector<Bandwidth>& ports) {
  const int net = use.kind == PathUse::Kind::gpuToPort ? use.to : use.from;
  ports[static_cast<size_t>(space_.portOf(net))] += use.speed;
  release(use);
}

bool SearchTry::apply(const Move& move) {
  const auto lastPlace = [&] { return static_cast<int>(channels_.back().gpus.size()) - 1; };
  switch (move.kind) {
    case Kind::start: {
      Channel channel{{move.gpu}, move.net, -1};
      if (move.net >= 0 && !reserveNet(traffic_.enter(channel), portIn_)) return false;
      channels_.push_back(std::move(channel));
      orders_.push_back(move.order);
      used_[static_cast<size_t>(move.gpu)] = true;
      leaves_ = 0;
      closed_ = false;
      working_ = true;
      return true;
    }
    case Kind::next: {
      Channel& channel = channels_.back();
      channel.gpus.push_back(move.gpu);
      if (!reserve(traffic_.step(channel, lastPlace()))) {
        channel.gpus.pop_back();
        return false;
      }
      used_[static_cast<size_t>(move.gpu)] = true;
      return true;
    }
    case Kind::leave: {
      Channel& channel = channels_.back();
      const int before = std::exchange(channel.netOut, move.net);
      if (!reserveNet(traffic_.leave(channel, lastPlace()), portOut_)) {
        channel.netOut = before;
        return false;
      }
      ++leaves_;
      return true;
    }
    case Kind::close:
      if (!reserve(traffic_.close(channels_.back()))) return false;
      closed_ = true;
      return true;
    case Kind::head: {
      const std::vector<PathUse> uses = traffic_.head(channels_.back());
      for (size_t i = 0; i < uses.size(); i++) {
        if (reserve(uses[i])) continue;
        while (i-- > 0) release(uses[i]);
        return false;
      }
      closed_ = true;
      return true;
    }
    case Kind::finish:
      std::fill(used_.begin(), used_.end(), false);
      working_ = false;
      return true;
  }
  return false;
}

void SearchTry::undo(const Move& move) {
  const auto lastPlace = [&] { return static_cast<int>(channels_.back().gpus.size()) - 1; };
  switch (move.kind) {
    case Kind::start:
      if (move.net >= 0) releaseNet(traffic_.enter(channels_.back()), portIn_);
      used_[static_cast<size_t>(move.gpu)] = false;
      channels_.pop_back();
      orders_.pop_back();
      working_ = false;
      return;
    case Kind::next:
      release(traffic_.step(channels_.back(), lastPlace()));
      channels_.back().gpus.pop_back();
      used_[static_cast<size_t>(move.gpu)] = false;
      return;
    case Kind::leave:
      releaseNet(traffic_.leave(channels_.back(), lastPlace()), portOut_);
      --leaves_;
      return;
    case Kind::close:
      release(traffic_.close(channels_.back()));
      closed_ = false;
      return;
    case Kind::head:
      for (const PathUse& use : traffic_.head(channels_.back())) release(use);
      closed_ = false;
      return;
    case Kind::finish:
      // Back in the channel that was complete: all its GPUs, its exits and its end are in force.
      for (const int gpu : channels_.back().gpus) used_[static_cast<size_t>(gpu)] = true;
      leaves_ = static_cast<int>(leavePlaces_.size());
      closed_ = hasHead() || (attempt_.pattern == Pattern::ring && !hasNets());
      working_ = true;
      return;
  }
}

// Keeps the channels so far if they are better; true if they cannot become better still.
bool SearchTry::consider() {
  const int count = static_cast<int>(channels_.size());
  if (count < attempt_.minChannels) return false;
  const Bandwidth intra = attempt_.speedIntra * count;
  bool better = false;
  if (attempt_.pattern == Pattern::nvls) {
    // Each head gathers its own part, so more of them are better at any speed.
    better = count > static_cast<int>(solution_->channels.size()) ||
             (count == static_cast<int>(solution_->channels.size()) &&
              attempt_.speedInter * count > solution_->totalInter());
  } else if (intra != solution_->totalIntra()) {
    better = intra > solution_->totalIntra();
  } else {
    better = attempt_.pattern == solution_->attempt.pattern &&
             attempt_.crossNic == solution_->attempt.crossNic && hops_ < solution_->hops;
  }
  if (!better) return false;
  // Alternating rings come in pairs; a last one alone must leave by the port it enters.
  if (attempt_.pattern == Pattern::ring && attempt_.crossNic == 2 && count % 2 == 1 && hasNets() &&
      space_.portOf(channels_.back().netIn) != space_.portOf(channels_.back().netOut)) {
    return false;
  }
  solution_->attempt = attempt_;
  solution_->channels = channels_;
  solution_->hops = hops_;
  return count == attempt_.maxChannels;
}

}  // namespace unisono::topology
