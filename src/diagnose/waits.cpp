// SPDX-License-Identifier: Apache-2.0
#include "diagnose/waits.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace unisono::diagnose {
namespace {

bool hasOffers(const RankView& rank) {
  return std::ranges::any_of(rank.links, [](const Link& link) {
    return link.kind == Link::Kind::buffers && link.tail != 0;
  });
}

const Link* linkOfHead(const RankView& head, const Link& link) {
  const auto found = std::ranges::find_if(head.links, [&](const Link& theirs) {
    return theirs.kind == Link::Kind::heads && theirs.peer == link.peer &&
           theirs.channel == link.channel && theirs.all == link.all;
  });
  return found == head.links.end() ? nullptr : &*found;
}

}  // namespace

const Call* Waits::counterpart(const Call& call, int of, int rank) const {
  if (call.isReplay()) {
    const std::optional<Call>& theirs = view(rank).replay;
    const bool fits = theirs && (call.isMessage() || theirs->sequence == call.sequence);
    return fits ? &*theirs : nullptr;
  }
  if (!call.isMessage()) return view(rank).findCollective(call.sequence);
  if (rank == of) return view(rank).findMessage(call.call, call.peer, call.sequence);
  const bool sends = call.call == plan::Call::send;
  return view(rank).findMessage(sends ? plan::Call::receive : plan::Call::send, of, call.sequence);
}

bool Waits::hasArrived(const Call& call, int of, int rank) const {
  const RankView& other = view(rank);
  if (!other.isKnown || other.hasLeft) return false;
  if (!call.isMessage()) {
    return call.isReplay() ? other.replayed >= call.sequence
                           : other.lastCollective() >= call.sequence;
  }
  if (rank == of) return true;
  if (call.isReplay()) return lateMessages(of, rank).empty();
  const bool sends = call.call == plan::Call::send;
  const Flow *mine = view(of).findFlow(rank, sends), *theirs = other.findFlow(of, !sends);
  if (mine != nullptr && theirs != nullptr) {
    return theirs->entered + theirs->replayed >= call.sequence + mine->replayed;
  }
  return other.lastMessage(sends ? plan::Call::receive : plan::Call::send, of) >= call.sequence;
}

std::vector<Waits::LateMessages> Waits::lateMessages(int of, int rank) const {
  std::vector<LateMessages> late;
  for (const Flow& flow : view(of).flows) {
    if (flow.peer != rank || rank == of || !view(rank).isKnown) continue;
    const Flow* theirs = view(rank).findFlow(of, !flow.sends);
    if (theirs == nullptr && view(rank).flows.size() >= kFlows) continue;  // nobody knows
    const uint64_t begun = theirs == nullptr ? 0 : theirs->entered + theirs->replayed;
    const uint64_t needed = view(of).begunMessages(flow);
    if (begun < needed) late.push_back({flow.sends, begun, needed});
  }
  return late;
}

std::vector<int> Waits::peersOfMessage(const Call& call, int of) const {
  std::vector<int> peers{call.peer};
  if (!call.isReplay()) return peers;
  for (const Flow& flow : view(of).flows) {
    const bool isNew = std::ranges::find(peers, flow.peer) == peers.end();
    if (isNew && !lateMessages(of, flow.peer).empty()) peers.push_back(flow.peer);
  }
  return peers;
}

std::vector<int> Waits::waitedFor(int rank) const {
  const RankView& waiter = view(rank);
  const Call* current = waiter.isKnown && !waiter.hasLeft ? waiter.current() : nullptr;
  if (current == nullptr) return {};
  std::vector<int> peers;
  const auto isBehind = [&](int peer) {
    if (peer == rank || !view(peer).isKnown) return false;
    if (!hasArrived(*current, rank, peer)) return true;
    const Call* theirs = counterpart(*current, rank, peer);
    return theirs != nullptr && !view(peer).isFinished(*theirs) &&
           (waiter.hasStarted(*current) ? !view(peer).hasStarted(*theirs)
                                        : theirs->launch == 0 && current->launch == 0);
  };
  if (current->isMessage()) {
    for (const int peer : peersOfMessage(*current, rank)) {
      if (isBehind(peer)) peers.push_back(peer);
    }
  } else {
    for (const RankView& other : views_) {
      if (isBehind(other.rank)) peers.push_back(other.rank);
    }
  }
  if (!peers.empty() || !waiter.hasStarted(*current)) return peers;
  std::set<int> found;
  for (const Link& link : waiter.links) {
    if (link.kind == Link::Kind::fifo) {
      const bool isFull = link.sends && link.isFull(waiter.slots);
      const bool isEmpty = !link.sends && link.tail == link.head;
      if (isFull || (isEmpty && mayStillSend(link.peer))) found.insert(link.peer);
    } else if (link.kind == Link::Kind::heads) {
      for (const int head : lateHeads(link)) {
        if (head != rank && link.tail != link.head) found.insert(head);
      }
    } else if (link.waits || waitsForBuffers(waiter, link)) {
      if (mayStillSend(link.peer)) found.insert(link.peer);
    }
  }
  for (const RankView& receiver : views_) {
    if (isFullFor(receiver, rank) != nullptr) found.insert(receiver.rank);
  }
  return {found.begin(), found.end()};
}

const Link* Waits::isFullFor(const RankView& receiver, int sender) {
  const auto found = std::ranges::find_if(receiver.links, [&](const Link& link) {
    return link.kind == Link::Kind::steps && link.peer == sender && link.isFull(kStepSlots) &&
           (link.all == 0 || link.tail < link.all);
  });
  return found == receiver.links.end() ? nullptr : &*found;
}

bool Waits::waitsForBuffers(const RankView& waiter, const Link& link) const {
  if (link.kind != Link::Kind::buffers) return false;
  if (hasOffers(waiter)) return link.tail == 0;
  return hasUsedBuffers(waiter.rank) && !hasUsedBuffers(link.peer);
}

bool Waits::hasUsedBuffers(int rank) const {
  return std::ranges::any_of(views_, [&](const RankView& peer) {
    return std::ranges::any_of(peer.links, [&](const Link& link) {
      return link.kind == Link::Kind::buffers && link.peer == rank && link.head != 0;
    });
  });
}

std::vector<int> Waits::headsOf(const Link& link) const {
  std::vector<int> heads;
  for (const RankView& each : views_) {
    if (linkOfHead(each, link) != nullptr) heads.push_back(each.rank);
  }
  return heads;
}

std::vector<int> Waits::lateHeads(const Link& link) const {
  std::vector<int> late = headsOf(link);
  std::erase_if(late, [&](int head) {
    return !view(head).isSilent() && linkOfHead(view(head), link)->tail > link.head;
  });
  return late;
}

bool Waits::mayStillSend(int peer) const {
  return view(peer).isKnown && view(peer).current() != nullptr;
}

std::string Waits::placeOf(int waiter, int peer) const {
  const RankView& from = view(waiter);
  for (const Link& link : from.links) {
    if (link.kind == Link::Kind::heads) {
      const std::vector<int> late = lateHeads(link);
      if (link.tail == link.head || std::ranges::find(late, peer) == late.end()) continue;
      return fmt::format("rank {} waits for step {} of channel {}, which {} reduces with rank {}",
                         waiter, link.head + 1, link.channel, link.port, peer);
    }
    if (link.peer != peer) continue;
    if (link.kind == Link::Kind::lines && link.waits) {
      return fmt::format("rank {} waits for line {} of {} from rank {}", waiter, link.tail + 1,
                         link.all, peer);
    }
    if (link.kind == Link::Kind::steps && link.waits) {
      return fmt::format("rank {} waits for step {}{} of block {} from rank {}", waiter,
                         link.tail + 1, link.all == 0 ? "" : fmt::format(" of {}", link.all),
                         link.channel, peer);
    }
    if (waitsForBuffers(from, link)) {
      return fmt::format(
          "rank {} waits for rank {} to {} (zero copy: nothing counts how far a rank is)", waiter,
          peer, hasOffers(from) ? "offer its buffers" : "be done with its buffers");
    }
    if (link.kind != Link::Kind::fifo) continue;
    if (link.sends && link.tail - link.head >= from.slots) {
      return fmt::format("rank {} waits for rank {} to take step {} of channel {}", waiter, peer,
                         link.head + 1, link.channel);
    }
    if (!link.sends && link.tail == link.head) {
      return fmt::format("rank {} waits for step {} of channel {} from rank {}", waiter,
                         link.tail + 1, link.channel, peer);
    }
  }
  if (const Link* link = isFullFor(view(peer), waiter)) {
    return fmt::format("rank {} waits for rank {} to take step {} of block {}", waiter, peer,
                       link->head + 1, link->channel);
  }
  return "";
}

}  // namespace unisono::diagnose
