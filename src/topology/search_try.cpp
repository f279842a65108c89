#include "topology/search_try.h"

#include <algorithm>

namespace unisono::topology {

bool SearchTry::isTree() const {
  return attempt_.pattern == Pattern::tree || attempt_.pattern == Pattern::balancedTree ||
         attempt_.pattern == Pattern::splitTree;
}

bool SearchTry::hasHead() const {
  return attempt_.pattern == Pattern::nvls || attempt_.pattern == Pattern::collnetDirect;
}

int SearchTry::leaveStep() const {
  if (!hasNets()) return -1;
  const int last = space_.gpuCount() - 1;
  switch (attempt_.pattern) {
    case Pattern::ring:
      return leaves_ == 0 ? last : -1;
    case Pattern::splitTree:
      return leaves_ == 0 ? std::min(1, last) : -1;
    case Pattern::balancedTree:
      if (leaves_ == 0) return 0;
      return leaves_ == 1 && last > 0 ? 1 : -1;
    default:
      return leaves_ == 0 ? 0 : -1;
  }
}

Bandwidth SearchTry::leaveSpeed() const {
  // A balanced tree sends half from its first GPU and half from its second.
  if (attempt_.pattern == Pattern::balancedTree && space_.gpuCount() > 1)
    return (attempt_.speedInter + 1) / 2;
  return attempt_.speedInter;
}

SearchTry::Outcome SearchTry::run(const Attempt& attempt, Solution& solution, long long budget,
                                  int reachable) {
  attempt_ = attempt;
  solution_ = &solution;
  free_ = LinkBudget(space_.linkBandwidth());
  portIn_ = portOut_ = space_.portBandwidth();
  channels_.clear();
  orders_.clear();
  used_.assign(static_cast<std::size_t>(space_.gpuCount()), false);
  leaves_ = 0;
  closed_ = working_ = false;
  hops_ = 0;
  frames_.clear();
  moves_.clear();
  startNets_ = space_.netsFor(-1, attempt.typeInter);
  leaveNets_.assign(static_cast<std::size_t>(space_.gpuCount()), {});

  Outcome outcome;
  pushMoves();
  while (!frames_.empty()) {
    Frame& frame = frames_.back();
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
    if (move.kind == Kind::finish && static_cast<int>(channels_.size()) >= reachable)
      return outcome;
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
    const std::size_t count = startNets_.size();
    if (hasHead()) {
      // Heads are a set: in one order only, or all their permutations would be tried.
      std::size_t i = 0;
      if (number > 0)
        i = static_cast<std::size_t>(
            std::find(startNets_.begin(), startNets_.end(), channels_.back().netIn) -
            startNets_.begin() + 1);
      for (; i < count; ++i) addStartsFrom(startNets_[i]);
      return;
    }
    for (std::size_t i = 0; i < count; ++i)
      addStartsFrom(startNets_[(static_cast<std::size_t>(number) + i) % count]);
    return;
  }
  if (hasHead()) {
    if (number < space_.gpuCount()) moves_.push_back({Kind::start, Order::free, number, -1});
    return;
  }
  // A chain leaves one of the links of a ring idle; in turn, none is.
  if (number > 0 && isTree() && !attempt_.sameChannels)
    moves_.push_back({Kind::start, Order::rotated, rotated(0), -1});
  if (number == 0)
    moves_.push_back({Kind::start, Order::listed, 0, -1});
  else
    moves_.push_back({Kind::start, Order::replay, channels_.back().gpus.front(), -1});
  if (number == 0 || !attempt_.sameChannels)
    for (int gpu = 0; gpu < space_.gpuCount(); ++gpu)
      moves_.push_back({Kind::start, Order::free, gpu, -1});
}

void SearchTry::addStartsFrom(int net) {
  const std::size_t number = channels_.size();
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
      net != channels_.back().netOut)
    return;
  if (number > 0)
    moves_.push_back({Kind::start, Order::replay, channels_.back().gpus.front(), net});
  if (number > 0 && attempt_.sameChannels) return;
  if (number == 0 && !space_.hasSwitch()) moves_.push_back({Kind::start, Order::listed, 0, net});
  for (std::size_t i = 0; i < local.size(); ++i)
    moves_.push_back({Kind::start, Order::free, local[(number + i) % local.size()], net});
}

// GPU number `step` of the channel in work when it follows the first channel from another start.
int SearchTry::rotated(std::size_t step) const {
  const std::size_t number = channels_.size() - (working_ ? 1 : 0);
  const std::vector<int>& first = channels_.front().gpus;
  return first[(step + number) % first.size()];
}

const std::vector<int>& SearchTry::nextGpus(int gpu, int net, int towardsNet) {
  using Neighbours = SearchSpace::Neighbours;
  Neighbours neighbours = Neighbours::next;
  if (attempt_.pattern == Pattern::ring) neighbours = Neighbours::nextThenPrevious;
  if (attempt_.pattern == Pattern::balancedTree || attempt_.pattern == Pattern::splitTree)
    neighbours = Neighbours::previousThenNext;
  if (space_.hasSwitch() || towardsNet == 0) net = -1;
  if (net < 0) towardsNet = 0;
  const std::uint64_t key =
      (static_cast<std::uint64_t>(gpu) << 32) | (static_cast<std::uint64_t>(net + 1) << 8) |
      (static_cast<std::uint64_t>(towardsNet + 1) << 4) | static_cast<std::uint64_t>(neighbours);
  const auto [entry, isNew] = nextCache_.try_emplace(key);
  if (isNew) entry->second = space_.nextGpus(gpu, net, towardsNet, neighbours);
  return entry->second;
}

void SearchTry::addNexts() {
  const Channel& channel = channels_.back();
  const std::size_t step = channel.gpus.size() - 1;
  const auto add = [&](int gpu) {
    if (!used_[static_cast<std::size_t>(gpu)]) moves_.push_back({Kind::next, Order::free, gpu, -1});
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
  const std::size_t number = channels_.size() - 1;
  if (leaves_ == 1) {
    moves_.push_back({Kind::leave, Order::free, channel.gpus.back(), channel.netOut});
    return;
  }
  std::vector<int>& nets = leaveNets_[static_cast<std::size_t>(channel.gpus.back())];
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

bool SearchTry::reserve(const Route& route, Bandwidth speed, PathType limit) {
  if (route.type > limit || route.type >= PathType::net) return false;
  return free_.take(route, speed);
}

bool SearchTry::reserveNet(const Route& route, const Route& back, int net, Bandwidth speed,
                           std::vector<Bandwidth>& ports) {
  Bandwidth& port = ports[static_cast<std::size_t>(space_.portOf(net))];
  if (port < speed) return false;
  // A tree's traffic goes up and down.
  if (isTree() && back.type > attempt_.typeInter) return false;
  if (!reserve(route, speed, attempt_.typeInter)) return false;
  port -= speed;
  hops_ += route.hops;
  return true;
}

void SearchTry::releaseNet(const Route& route, int net, Bandwidth speed,
                           std::vector<Bandwidth>& ports) {
  free_.giveBack(route, speed);
  ports[static_cast<std::size_t>(space_.portOf(net))] += speed;
  hops_ -= route.hops;
}

// The reservations of a channel with a head, one a step: NVLS takes one share between each GPU and
// the switch in both directions and two at the head, which also moves the result; CollNet direct
// spreads one share over all other GPUs, to the head and back.
const Route* SearchTry::headRoute(int gpu, int step, Bandwidth& speed) const {
  const int count = space_.gpuCount();
  const int other = step % count;
  if (step >= 2 * count) return nullptr;
  const bool towards = step >= count;
  if (attempt_.pattern == Pattern::nvls) {
    speed = attempt_.speedIntra * (other == gpu ? 2 : 1);
    return towards ? &space_.gpuToSwitch(other) : &space_.switchToGpu(other);
  }
  speed = other == gpu ? 0 : (attempt_.speedIntra + count - 2) / std::max(1, count - 1);
  return towards ? &space_.gpuToGpu(other, gpu) : &space_.gpuToGpu(gpu, other);
}

bool SearchTry::reserveHead(int gpu) {
  Bandwidth speed = 0;
  for (int step = 0; const Route* route = headRoute(gpu, step, speed); ++step) {
    if (reserve(*route, speed, attempt_.typeIntra)) continue;
    releaseHead(gpu, step);
    return false;
  }
  return true;
}

void SearchTry::releaseHead(int gpu, int steps) {
  Bandwidth speed = 0;
  for (int step = 0; step < steps; ++step)
    if (const Route* route = headRoute(gpu, step, speed)) free_.giveBack(*route, speed);
}

bool SearchTry::apply(const Move& move) {
  switch (move.kind) {
    case Kind::start: {
      if (move.net >= 0 &&
          !reserveNet(space_.netToGpu(move.net, move.gpu), space_.gpuToNet(move.gpu, move.net),
                      move.net, attempt_.speedInter, portIn_))
        return false;
      channels_.push_back({{move.gpu}, move.net, -1});
      orders_.push_back(move.order);
      used_[static_cast<std::size_t>(move.gpu)] = true;
      leaves_ = 0;
      closed_ = false;
      working_ = true;
      return true;
    }
    case Kind::next: {
      const int from = channels_.back().gpus.back();
      const Route& route = space_.gpuToGpu(from, move.gpu);
      if (isTree() && space_.gpuToGpu(move.gpu, from).type > attempt_.typeIntra) return false;
      if (!reserve(route, attempt_.speedIntra, attempt_.typeIntra)) return false;
      hops_ += route.hops;
      used_[static_cast<std::size_t>(move.gpu)] = true;
      channels_.back().gpus.push_back(move.gpu);
      return true;
    }
    case Kind::leave: {
      if (!reserveNet(space_.gpuToNet(move.gpu, move.net), space_.netToGpu(move.net, move.gpu),
                      move.net, leaveSpeed(), portOut_))
        return false;
      channels_.back().netOut = move.net;
      ++leaves_;
      return true;
    }
    case Kind::close: {
      const Channel& channel = channels_.back();
      const Route& route = space_.gpuToGpu(channel.gpus.back(), channel.gpus.front());
      if (!reserve(route, attempt_.speedIntra, attempt_.typeIntra)) return false;
      hops_ += route.hops;
      closed_ = true;
      return true;
    }
    case Kind::head:
      if (!reserveHead(move.gpu)) return false;
      closed_ = true;
      return true;
    case Kind::finish:
      std::fill(used_.begin(), used_.end(), false);
      working_ = false;
      return true;
  }
  return false;
}

void SearchTry::undo(const Move& move) {
  switch (move.kind) {
    case Kind::start:
      if (move.net >= 0)
        releaseNet(space_.netToGpu(move.net, move.gpu), move.net, attempt_.speedInter, portIn_);
      used_[static_cast<std::size_t>(move.gpu)] = false;
      channels_.pop_back();
      orders_.pop_back();
      working_ = false;
      return;
    case Kind::next: {
      channels_.back().gpus.pop_back();
      const Route& route = space_.gpuToGpu(channels_.back().gpus.back(), move.gpu);
      free_.giveBack(route, attempt_.speedIntra);
      hops_ -= route.hops;
      used_[static_cast<std::size_t>(move.gpu)] = false;
      return;
    }
    case Kind::leave:
      releaseNet(space_.gpuToNet(move.gpu, move.net), move.net, leaveSpeed(), portOut_);
      --leaves_;
      return;
    case Kind::close: {
      const Channel& channel = channels_.back();
      const Route& route = space_.gpuToGpu(channel.gpus.back(), channel.gpus.front());
      free_.giveBack(route, attempt_.speedIntra);
      hops_ -= route.hops;
      closed_ = false;
      return;
    }
    case Kind::head:
      releaseHead(move.gpu, 2 * space_.gpuCount());
      closed_ = false;
      return;
    case Kind::finish: {
      // Back in the channel that was complete: all its GPUs, its exits and its end are in force.
      for (const int gpu : channels_.back().gpus) used_[static_cast<std::size_t>(gpu)] = true;
      const bool twice = attempt_.pattern == Pattern::balancedTree && space_.gpuCount() > 1;
      leaves_ = !hasNets() ? 0 : twice ? 2 : 1;
      closed_ = hasHead() || (attempt_.pattern == Pattern::ring && !hasNets());
      working_ = true;
      return;
    }
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
      space_.portOf(channels_.back().netIn) != space_.portOf(channels_.back().netOut))
    return false;
  solution_->attempt = attempt_;
  solution_->channels = channels_;
  solution_->hops = hops_;
  return count == attempt_.maxChannels;
}

}  // namespace unisono::topology
