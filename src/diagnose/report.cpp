// SPDX-License-Identifier: Apache-2.0
#include "diagnose/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/fnv.h"
#include "base/system.h"

namespace unisono::diagnose {
namespace {

// What a report shows of what grows with the number of ranks.
constexpr size_t kMaxDetails = 16, kMaxWaitsText = 16, kMaxWaitsJson = 1024, kMaxSettings = 16;

double secondsOf(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / 1e9;
}

// Why calls do not end, worked out for one call of one rank.
class Inquiry {
 public:
  Inquiry(const std::vector<RankView>& views, int self, int64_t now)
      : views_(views), self_(view(self)), now_(now) {}

  std::optional<Report> run() {
    const Call* mine = self_.current();
    if (mine == nullptr) return std::nullopt;
    report_.call = firstOf(*mine);
    report_.rank = owner_;
    if (report_.call.isReplay() && report_.call.isMessage()) {
      const bool sends = report_.call.call == plan::Call::send;
      const Flow* flow = self_.findFlow(report_.call.peer, sends);
      if (flow != nullptr) report_.call.sequence = self_.begunMessages(*flow);
    }
    report_.isOverrun = !report_.call.isReplay() && view(owner_).isOverrun();
    report_.seconds = secondsOf(now_ - view(owner_).waitsSince(report_.call));
    sortRanks();
    findWaits();
    findCycle();
    judge();
    for (const int rank : report_.missing) {
      addDetail(rank);
      if (report_.call.isReplay() && report_.call.isMessage()) addLateMessages(rank);
    }
    for (const int rank : report_.silent) {
      if (report_.details.size() == kMaxDetails) break;
      report_.details.push_back(fmt::format("rank {} ({}) did not answer", rank, view(rank).place));
    }
    for (const RankView& each : views_) {
      const bool isSilent = std::ranges::find(report_.silent, each.rank) != report_.silent.end();
      if (isSilent || !each.processState.empty()) addTraffic(each.rank);
    }
    compareSettings();
    return std::move(report_);
  }

 private:
  const RankView& view(int rank) const { return views_[static_cast<size_t>(rank)]; }
  // Who must take part in a call, the rank itself first.
  std::vector<int> participants() const {
    if (report_.call.isMessage()) {
      std::vector<int> some{owner_};
      for (const int peer : peersOfMessage(report_.call, owner_)) {
        if (peer != owner_) some.push_back(peer);
      }
      return some;
    }
    std::vector<int> all;
    for (const RankView& each : views_) all.push_back(each.rank);
    return all;
  }
  // The call of `rank` that belongs to `call`, which `of` has made.
  const Call* counterpart(const Call& call, int of, int rank) const {
    if (call.isReplay()) {
      const std::optional<Call>& theirs = view(rank).replay;
      const bool fits = theirs && (call.isMessage() || theirs->sequence == call.sequence);
      return fits ? &*theirs : nullptr;
    }
    if (!call.isMessage()) return view(rank).findCollective(call.sequence);
    if (rank == of) return view(rank).findMessage(call.call, call.peer, call.sequence);
    const bool sends = call.call == plan::Call::send;
    return view(rank).findMessage(sends ? plan::Call::receive : plan::Call::send, of,
                                  call.sequence);
  }
  // Whether `rank` has made it; also if its table no longer holds it.
  bool hasArrived(const Call& call, int of, int rank) const {
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

  // The messages of `of` to or from `rank` that this one has not begun.
  struct LateMessages {
    bool sends;  // `of`
    uint64_t begun, needed;
  };
  std::vector<LateMessages> lateMessages(int of, int rank) const {
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
  // Whom a message waits for; in a replay the first message stands for all of its group.
  std::vector<int> peersOfMessage(const Call& call, int of) const {
    std::vector<int> peers{call.peer};
    if (!call.isReplay()) return peers;
    for (const Flow& flow : view(of).flows) {
      const bool isNew = std::ranges::find(peers, flow.peer) == peers.end();
      if (isNew && !lateMessages(of, flow.peer).empty()) peers.push_back(flow.peer);
    }
    return peers;
  }

  // Of the collectives that ranks are in, the first is the cause: all make them in the same order.
  Call firstOf(const Call& mine) {
    owner_ = self_.rank;
    Call first = mine;
    if (mine.isMessage()) return first;
    for (const RankView& other : views_) {
      const Call* current = other.isKnown && !other.hasLeft ? other.current() : nullptr;
      if (current == nullptr || other.isSilent() || current->isMessage() ||
          current->isReplay() != mine.isReplay() || current->sequence >= first.sequence) {
        continue;
      }
      first = *current;
      owner_ = other.rank;
    }
    return first;
  }

  void sortRanks() {
    for (const int rank : participants()) {
      if (!view(rank).isKnown) {
        if (!view(rank).place.empty()) report_.silent.push_back(rank);
        continue;
      }
      const Call* call = counterpart(report_.call, owner_, rank);
      if (!hasArrived(report_.call, owner_, rank)) {
        report_.missing.push_back(rank);
      } else if (call == nullptr || view(rank).isFinished(*call)) {
        report_.finished.push_back(rank);
      } else {
        report_.waiting.push_back(rank);
      }
    }
  }

  // The ranks that `rank` waits for in the call that it is in.
  std::vector<int> waitedFor(int rank) const {
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
  // A FIFO of the direct family from `sender`, of which only the receiver knows how far it is.
  static const Link* isFullFor(const RankView& receiver, int sender) {
    const auto found = std::ranges::find_if(receiver.links, [&](const Link& link) {
      return link.kind == Link::Kind::steps && link.peer == sender && link.isFull(kStepSlots) &&
             (link.all == 0 || link.tail < link.all);
    });
    return found == receiver.links.end() ? nullptr : &*found;
  }
  // Whether a rank waits for what a peer offers, of which it needs all before it takes any, or for
  // the end of the peer's use of its buffers.
  bool waitsForBuffers(const RankView& waiter, const Link& link) const {
    if (link.kind != Link::Kind::buffers) return false;
    if (hasOffers(waiter)) return link.tail == 0;
    return hasUsedBuffers(waiter.rank) && !hasUsedBuffers(link.peer);
  }
  static bool hasOffers(const RankView& rank) {
    return std::ranges::any_of(rank.links, [](const Link& link) {
      return link.kind == Link::Kind::buffers && link.tail != 0;
    });
  }
  // A peer that is not yet at the end itself has its answer.
  bool hasUsedBuffers(int rank) const {
    return std::ranges::any_of(views_, [&](const RankView& peer) {
      return std::ranges::any_of(peer.links, [&](const Link& link) {
        return link.kind == Link::Kind::buffers && link.peer == rank && link.head != 0;
      });
    });
  }
  // The heads of a network that reduces, as far as it is known: those with links to it.
  std::vector<int> headsOf(const Link& link) const {
    std::vector<int> heads;
    for (const RankView& each : views_) {
      if (linkOfHead(each, link) != nullptr) heads.push_back(each.rank);
    }
    return heads;
  }
  static const Link* linkOfHead(const RankView& head, const Link& link) {
    const auto found = std::ranges::find_if(head.links, [&](const Link& theirs) {
      return theirs.kind == Link::Kind::heads && theirs.peer == link.peer &&
             theirs.channel == link.channel && theirs.all == link.all;
    });
    return found == head.links.end() ? nullptr : &*found;
  }
  // Those that hold up the next result of `link`: they have not sent what it is made of, or their
  // process does not run.
  std::vector<int> lateHeads(const Link& link) const {
    std::vector<int> late = headsOf(link);
    std::erase_if(late, [&](int head) {
      return !view(head).isSilent() && linkOfHead(view(head), link)->tail > link.head;
    });
    return late;
  }
  bool mayStillSend(int peer) const {
    return view(peer).isKnown && view(peer).current() != nullptr;
  }

  void findWaits() {
    for (const RankView& waiter : views_) {
      for (const int peer : waitedFor(waiter.rank)) report_.waits.emplace_back(waiter.rank, peer);
    }
  }

  // A walk along the waits comes back to a rank only if there is a cycle.
  void findCycle() {
    std::map<int, std::vector<int>> edges;
    for (const auto& [waiter, peer] : report_.waits) edges[waiter].push_back(peer);
    std::set<int> done;
    std::vector<int> path;
    const auto walk = [&](auto& self, int rank) -> bool {
      const auto seen = std::find(path.begin(), path.end(), rank);
      if (seen != path.end()) {
        report_.cycle.assign(seen, path.end());
        return true;
      }
      if (!done.insert(rank).second) return false;
      path.push_back(rank);
      for (const int next : edges[rank]) {
        if (self(self, next)) return true;
      }
      path.pop_back();
      return false;
    };
    for (const RankView& each : views_) {
      path.clear();
      if (walk(walk, each.rank)) return;
    }
  }

  // "process 17", or "process 17 on host n1" where that is not this one.
  static std::string processText(const RankView& rank) {
    const bool isHere = rank.host.empty() || rank.host == hostName();
    return isHere ? fmt::format("process {}", rank.pid)
                  : fmt::format("process {} on host {}", rank.pid, rank.host);
  }

  void judge() {
    if (judgeMismatch() || judgeMissing() || judgeSilent() || judgeConnecting() || judgeOutside() ||
        judgeNetwork() || judgeReducer()) {
      return;
    }
    judgeKernel();
  }

  bool judgeMismatch() {
    for (const int rank : participants()) {
      const Call* other = counterpart(report_.call, owner_, rank);
      if (other == nullptr || fitTogether(report_.call, *other)) continue;
      // Their groups may begin with other messages.
      if (report_.call.isReplay() && report_.call.isMessage()) continue;
      report_.verdict = Verdict::differentCalls;
      report_.headline = fmt::format("arrived with another call: {}",
                                     describe(Mismatch{owner_, rank, report_.call, *other}));
      report_.next =
          "All ranks must make the same calls with the same arguments, in the same order, and a "
          "receive of the same size for each send";
      return true;
    }
    return false;
  }

  bool judgeMissing() {
    if (report_.missing.empty()) return false;
    report_.verdict = Verdict::notArrived;
    report_.headline = fmt::format("not arrived: {}", rankList(report_.missing));
    const RankView& first = view(report_.missing.front());
    const std::string process = processText(first);
    if (first.processState == "stopped") {
      report_.next = fmt::format("Let {} go on (kill -CONT {})", process, first.pid);
    } else if (first.processState == "ended") {
      report_.next = fmt::format("Look at the output of {} for why it has ended", process);
    } else if (!first.elsewhere.empty()) {
      report_.next =
          "Make the calls of the two communicators in the same order on all ranks, or make them on "
          "different streams and do not wait for one before the other is made";
    } else if (!report_.cycle.empty()) {
      report_.next = "Put sends and receives that wait for each other into one group";
    } else {
      report_.next = fmt::format(
          "Look at what {} does instead, for instance with gdb -p {} or py-spy dump --pid {}",
          process, first.pid, first.pid);
    }
    return true;
  }

  bool judgeSilent() {
    if (report_.silent.empty()) return false;
    report_.verdict = Verdict::noAnswer;
    report_.headline =
        fmt::format("no answer from {}, for which the others may wait", rankList(report_.silent));
    report_.next =
        fmt::format("Look whether this process runs, and whether its host can be reached: {}",
                    view(report_.silent.front()).place);
    return true;
  }

  bool judgeConnecting() {
    std::vector<int> connecting;
    for (const int rank : report_.waiting) {
      const Call* call = counterpart(report_.call, owner_, rank);
      if (call != nullptr && call->launch == 0) connecting.push_back(rank);
    }
    if (connecting.empty()) return false;
    report_.verdict = Verdict::notConnected;
    report_.headline =
        fmt::format("still connecting or held up before the launch: {}", rankList(connecting));
    for (const int rank : connecting) addDetail(rank);
    report_.next = silentAdvice(connecting)
                       .value_or(
                           "Look at the log of these ranks with NCCL_DEBUG=WARN: it says for which "
                           "rank they wait");
    return true;
  }

  bool judgeOutside() {
    std::vector<int> queued;
    for (const int rank : report_.waiting) {
      const Call* call = counterpart(report_.call, owner_, rank);
      if (call != nullptr && !view(rank).isSilent() && !view(rank).hasStarted(*call)) {
        queued.push_back(rank);
      }
    }
    if (queued.empty()) return false;
    report_.verdict = Verdict::outside;
    report_.headline = fmt::format(
        "waiting outside the library: the kernel has not begun on {}, where other work is before "
        "it on the stream",
        rankList(queued));
    for (const int rank : queued) addDetail(rank);
    report_.next = silentAdvice(queued).value_or(
        "Look at the kernels, copies and events before this call on its stream, and whether they "
        "wait for something that comes after it" +
        adviceOnSharedGpu(queued));
    return true;
  }

  // CUDA puts the streams of a process on a GPU into a few queues, in which work waits for that of
  // other streams.
  std::string adviceOnSharedGpu(const std::vector<int>& ranks) const {
    for (const int rank : ranks) {
      for (const RankView& other : views_) {
        const RankView& own = view(rank);
        if (other.rank == rank || !other.isKnown || other.host != own.host ||
            other.pid != own.pid || other.device != own.device) {
          continue;
        }
        return fmt::format(
            ". Ranks {} and {} of process {} share GPU {} and its hardware queues: set "
            "CUDA_DEVICE_MAX_CONNECTIONS=32, use fewer streams, or give each rank a GPU",
            std::min(rank, other.rank), std::max(rank, other.rank), own.pid, own.device);
      }
    }
    return "";
  }

  std::optional<std::string> silentAdvice(const std::vector<int>& ranks) const {
    for (const int rank : ranks) {
      if (view(rank).processState == "stopped") {
        return fmt::format("Let {} go on (kill -CONT {})", processText(view(rank)), view(rank).pid);
      }
    }
    return std::nullopt;
  }

  // Data that have been in a FIFO to another host all the time, although the receiver waits for
  // them.
  bool judgeNetwork() {
    const Link* stuck = nullptr;
    const RankView* sender = nullptr;
    for (const RankView& rank : views_) {
      if (!rank.processState.empty()) return false;
      for (const Link& link : rank.links) {
        if (stuck != nullptr || link.kind != Link::Kind::fifo || !link.network || !link.sends ||
            link.tail == link.head) {
          continue;
        }
        const auto& theirs = view(link.peer).links;
        const auto other = std::find_if(theirs.begin(), theirs.end(), [&](const Link& end) {
          return end.network && !end.sends && end.peer == rank.rank &&
                 end.channel == link.channel && end.lines == link.lines;
        });
        if (other != theirs.end() && other->tail != other->head) continue;
        stuck = &link;
        sender = &rank;
      }
    }
    if (stuck == nullptr) return false;
    report_.verdict = Verdict::inNetwork;
    const bool isKnown = view(stuck->peer).isKnown;
    report_.headline = fmt::format(
        "waiting for the network{}: {} bytes from rank {} to rank {} on channel {} do not leave "
        "through {}",
        isKnown ? "" : fmt::format(" or for rank {} on another host", stuck->peer),
        stuck->bytesInFlight, sender->rank, stuck->peer, stuck->channel,
        (sender->network.empty() ? "it" : sender->network) +
            (stuck->port.empty() ? "" : fmt::format(" ({})", stuck->port)));
    report_.next = fmt::format(
        "Look at the network between the hosts{}. NCCL_DEBUG=INFO shows what a net plug-in logs. "
        "ncclCommAbort ends the call",
        isKnown ? "" : fmt::format(", and at what rank {} does", stuck->peer));
    return true;
  }

  // Slots that all heads have sent to a network that reduces, and that do not come back.
  bool judgeReducer() {
    for (const RankView& rank : views_) {
      for (const Link& link : rank.links) {
        if (link.kind != Link::Kind::heads || link.tail == link.head || !lateHeads(link).empty()) {
          continue;
        }
        std::vector<int> unknown;
        for (const RankView& each : views_) {
          if (!each.isKnown && !each.hasLeft) unknown.push_back(each.rank);
        }
        report_.verdict = Verdict::inNetwork;
        report_.headline = fmt::format(
            "waiting for the network{}: {} bytes of rank {} on channel {} do not come back from "
            "{}, which reduces for {}",
            unknown.empty() ? "" : fmt::format(" or for {} on another host", rankList(unknown)),
            link.bytesInFlight, rank.rank, link.channel, link.port, rankList(headsOf(link)));
        report_.next =
            "Look at the network between the hosts. NCCL_DEBUG=INFO shows what a net plug-in logs. "
            "ncclCommAbort ends the call";
        return true;
      }
    }
    return false;
  }

  void judgeKernel() {
    report_.verdict = Verdict::inKernel;
    std::vector<int> stopped;
    for (const int rank : report_.waiting) {
      if (view(rank).isSilent()) stopped.push_back(rank);
    }
    for (const int rank : stopped) addDetail(rank);
    std::string where;
    // A rank that holds others up and waits for nobody itself.
    for (const auto& [waiter, peer] : report_.waits) {
      const bool waits = std::any_of(report_.waits.begin(), report_.waits.end(),
                                     [p = peer](const auto& edge) { return edge.first == p; });
      if (waits && stopped.empty()) continue;
      if (!stopped.empty() && std::find(stopped.begin(), stopped.end(), peer) == stopped.end()) {
        continue;
      }
      where = placeOf(waiter, peer);
      if (!where.empty()) break;
    }
    if (where.empty() && !report_.waits.empty()) {
      where = placeOf(report_.waits.front().first, report_.waits.front().second);
    }
    report_.headline =
        fmt::format("stuck in the kernel: {}", where.empty() ? rankList(report_.waiting) : where);
    report_.next = silentAdvice(stopped).value_or(
        "Look for device errors (dmesg, nvidia-smi) on the ranks that hold others up, then report "
        "this text. ncclCommAbort ends the call");
  }

  // "rank 0 waits for rank 1 at channel 3, step 17".
  std::string placeOf(int waiter, int peer) const {
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

  // What other ranks have for a rank that does not go on, or miss from it, by port of the network.
  void addTraffic(int rank) {
    for (const RankView& other : views_) {
      const Call* current = other.isKnown && !other.hasLeft ? other.current() : nullptr;
      if (current == nullptr || other.isSilent() || !other.hasStarted(*current)) continue;
      std::map<std::string, uint64_t> bytes;
      std::set<std::string> missing;
      for (const Link& link : other.links) {
        if (link.peer != rank || !link.network || link.kind != Link::Kind::fifo) continue;
        if (link.sends && link.bytesInFlight > 0) bytes[link.port] += link.bytesInFlight;
        if (!link.sends && link.tail == link.head) missing.insert(link.port);
      }
      const auto add = [&](std::string text) {
        if (report_.details.size() < kMaxDetails) report_.details.push_back(std::move(text));
      };
      for (const auto& [port, count] : bytes) {
        add(fmt::format("{} bytes from rank {} to rank {} do not leave over {}", count, other.rank,
                        rank, port));
      }
      for (const std::string& port : missing) {
        add(fmt::format("rank {} has no data from rank {} over {}", other.rank, rank, port));
      }
    }
  }

  void addLateMessages(int rank) {
    for (const LateMessages& late : lateMessages(owner_, rank)) {
      if (report_.details.size() == kMaxDetails) return;
      report_.details.push_back(
          fmt::format("rank {} has begun {} message{} {} rank {}, with those of replays; rank {} "
                      "is in message {}",
                      rank, late.begun, late.begun == 1 ? "" : "s", late.sends ? "from" : "to",
                      owner_, owner_, late.needed));
    }
  }

  void addDetail(int rank) {
    if (report_.details.size() == kMaxDetails) return;
    const RankView& other = view(rank);
    std::string text =
        fmt::format("rank {} ({}, device {})", rank, processText(other), other.device);
    if (other.hasLeft) {
      report_.details.push_back(text + " has destroyed its communicator");
      return;
    }
    if (const Call* current = other.current(); current != nullptr) {
      text += fmt::format(" is in {} since {:.1f} s", describe(*current),
                          secondsOf(now_ - other.waitsSince(*current)));
    } else if (other.captures != 0) {
      text += fmt::format(
          " runs none of its {} captured calls, whose replays have begun {} collectives in all",
          other.captures, other.replayed);
    } else if (!other.calls.empty()) {
      text += fmt::format(" has finished {}, {:.1f} s ago or less, and made no call since",
                          describe(other.calls.back()), secondsOf(now_ - other.changed));
    } else {
      text += " has made no call";
    }
    if (!other.elsewhere.empty()) text += fmt::format("; its process waits in {}", other.elsewhere);
    if (!other.processState.empty()) {
      text +=
          fmt::format("; its process is {}",
                      other.processState == "stopped" ? "stopped (SIGSTOP or a debugger)" : "gone");
    } else if (other.isSilent()) {
      text += fmt::format("; its process has been silent for {:.1f} s", secondsOf(other.silentFor));
    }
    report_.details.push_back(std::move(text));
  }

  // What the processes of all ranks do not have alike, but for what a user sets on one of them to
  // tell it from others or to see more of it.
  void compareSettings() {
    std::set<std::string> names;
    for (const RankView& each : views_) {
      for (const auto& [name, value] : each.settings) names.insert(name);
    }
    for (const char* own : {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "UNISONO_TRACE",
                            "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"}) {
      names.erase(own);
    }
    for (const std::string& name : names) {
      std::map<std::string, std::vector<int>> ranksOf;  // by value
      for (const RankView& each : views_) {
        if (!each.isKnown) continue;
        const auto found = each.settings.find(name);
        const bool isSet = found != each.settings.end();
        ranksOf[isSet ? found->second : "its default"].push_back(each.rank);
      }
      if (ranksOf.size() < 2 || report_.settings.size() == kMaxSettings) continue;
      std::vector<std::string> parts;
      for (const auto& [value, ranks] : ranksOf) {
        parts.push_back(fmt::format("{} on {}", value, rankList(ranks)));
      }
      report_.settings.push_back(fmt::format("{} is {}", name, fmt::join(parts, ", ")));
    }
  }

  const std::vector<RankView>& views_;
  const RankView& self_;
  const int64_t now_;
  int owner_ = 0;
  Report report_;
};

const char* nameOf(Verdict verdict) {
  static constexpr const char* kNames[] = {"different_calls", "not_arrived", "no_answer",
                                           "not_connected",   "outside",     "in_network",
                                           "in_kernel"};
  return kNames[static_cast<size_t>(verdict)];
}

std::string communicatorText(const RankView& self) {
  return self.name.empty() ? fmt::format("of {} ranks", self.ranks)
                           : fmt::format("{} of {} ranks", self.name, self.ranks);
}

std::string waitsText(const Report& report) {
  std::vector<std::string> edges;
  for (const auto& [waiter, peer] : report.waits) {
    if (edges.size() == kMaxWaitsText) break;
    edges.push_back(fmt::format("{} -> {}", waiter, peer));
  }
  std::string text = fmt::format("{}", fmt::join(edges, ", "));
  if (report.waits.size() > kMaxWaitsText) {
    text += fmt::format(" and {} more", report.waits.size() - kMaxWaitsText);
  }
  return text;
}

}  // namespace

std::string rankList(const std::vector<int>& ranks) {
  if (ranks.empty()) return "none";
  std::vector<std::string> parts;
  for (size_t first = 0, next = 0; first < ranks.size(); first = next) {
    next = first + 1;
    while (next < ranks.size() && ranks[next] == ranks[next - 1] + 1) next++;
    if (next - first >= 3) {
      parts.push_back(fmt::format("{}-{}", ranks[first], ranks[next - 1]));
    } else {
      for (size_t i = first; i < next; i++) parts.push_back(fmt::format("{}", ranks[i]));
    }
  }
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(parts, ", "));
}

std::optional<Report> explain(const std::vector<RankView>& views, int self, int64_t now) {
  return Inquiry(views, self, now).run();
}

uint64_t Report::key() const {
  Fnv hash;
  hash.add(call.sequence);
  hash.add(call.replay);
  if (call.isMessage()) {
    for (const int number : {static_cast<int>(call.call), rank, call.peer}) {
      hash.add(static_cast<uint64_t>(number));
    }
  }
  return hash.value();
}

std::string Report::text(const RankView& self) const {
  std::string text = fmt::format("No progress for {:.1f} s: {}\n", seconds, headline);
  auto line = [&](const char* label, const std::string& value) {
    text += fmt::format("  {:<14}{}\n", label, value);
  };
  line("call:", fmt::format("{}{} of rank {}, communicator {}",
                            isOverrun ? "one of more than 64 that are queued, before " : "",
                            describe(call), rank, communicatorText(self)));
  line("not arrived:", rankList(missing));
  line("waiting:", rankList(waiting));
  line("finished:", rankList(finished));
  if (!silent.empty()) line("no answer:", rankList(silent));
  if (!waits.empty()) line("who for whom:", waitsText(*this));
  if (!cycle.empty()) line("cycle:", fmt::format("ranks {}", fmt::join(cycle, " -> ")));
  for (const std::string& detail : details) line("", detail);
  for (const std::string& setting : settings) line("differs:", setting);
  line("next:", next);
  text.pop_back();
  return text;
}

std::string Report::json(const RankView& self) const {
  std::vector<std::string> edges;
  for (const auto& [waiter, peer] : waits) {
    if (edges.size() == kMaxWaitsJson) break;
    edges.push_back(fmt::format("[{},{}]", waiter, peer));
  }
  const auto quoted = [](const std::vector<std::string>& lines) {
    std::vector<std::string> result;
    for (const std::string& each : lines) result.push_back(quoteJson(each));
    return result;
  };
  return fmt::format(
      "{{\"unisono_hang\":{{\"verdict\":\"{}\",\"headline\":{},\"communicator\":{},\"id\":\"{:x}\","
      "\"ranks\":{},\"rank\":{},\"call\":\"{}\",\"sequence\":{},\"count\":{},\"type\":\"{}\","
      "\"reduction\":{},\"peer\":{},\"replay\":{},\"seconds\":{:.1f},\"not_arrived\":[{}],"
      "\"waiting\":[{}],"
      "\"finished\":[{}],\"no_answer\":[{}],\"waits\":[{}],\"cycle\":[{}],\"details\":[{}],"
      "\"settings\":[{}],"
      "\"next\":{}}}}}",
      nameOf(verdict), quoteJson(headline), quoteJson(self.name), self.id, self.ranks, rank,
      diagnose::nameOf(call.call), call.sequence, call.count, diagnose::nameOf(call.type),
      call.reduces() ? quoteJson(diagnose::nameOf(call.reduction)) : "null",
      call.isMessage() || call.hasRoot() ? fmt::format("{}", call.peer) : "null",
      call.isReplay() ? fmt::format("{}", call.replay) : "null", seconds, fmt::join(missing, ","),
      fmt::join(waiting, ","), fmt::join(finished, ","), fmt::join(silent, ","),
      fmt::join(edges, ","), fmt::join(cycle, ","), fmt::join(quoted(details), ","),
      fmt::join(quoted(settings), ","), quoteJson(next));
}

}  // namespace unisono::diagnose
