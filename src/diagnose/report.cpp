// SPDX-License-Identifier: Apache-2.0
#include "diagnose/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/fnv.h"
#include "base/system.h"
#include "diagnose/waits.h"

namespace unisono::diagnose {
namespace {

// What a report shows of what grows with the number of ranks.
constexpr size_t kMaxDetails = 16, kMaxSettings = 16;

double secondsOf(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / 1e9;
}

// Why calls do not end, worked out for one call of one rank.
class Inquiry {
 public:
  Inquiry(const std::vector<RankView>& views, int self, int64_t now)
      : views_(views), waits_(views), self_(view(self)), now_(now) {}

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
      for (const int peer : waits_.peersOfMessage(report_.call, owner_)) {
        if (peer != owner_) some.push_back(peer);
      }
      return some;
    }
    std::vector<int> all;
    for (const RankView& each : views_) all.push_back(each.rank);
    return all;
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
      const Call* call = waits_.counterpart(report_.call, owner_, rank);
      if (!waits_.hasArrived(report_.call, owner_, rank)) {
        report_.missing.push_back(rank);
      } else if (call == nullptr || view(rank).isFinished(*call)) {
        report_.finished.push_back(rank);
      } else {
        report_.waiting.push_back(rank);
      }
    }
  }

  void findWaits() {
    for (const RankView& waiter : views_) {
      for (const int peer : waits_.waitedFor(waiter.rank))
        report_.waits.emplace_back(waiter.rank, peer);
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
      const Call* other = waits_.counterpart(report_.call, owner_, rank);
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
      const Call* call = waits_.counterpart(report_.call, owner_, rank);
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
      const Call* call = waits_.counterpart(report_.call, owner_, rank);
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
        if (link.kind != Link::Kind::heads || link.tail == link.head ||
            !waits_.lateHeads(link).empty()) {
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
            link.bytesInFlight, rank.rank, link.channel, link.port, rankList(waits_.headsOf(link)));
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
      where = waits_.placeOf(waiter, peer);
      if (!where.empty()) break;
    }
    if (where.empty() && !report_.waits.empty()) {
      where = waits_.placeOf(report_.waits.front().first, report_.waits.front().second);
    }
    report_.headline =
        fmt::format("stuck in the kernel: {}", where.empty() ? rankList(report_.waiting) : where);
    report_.next = silentAdvice(stopped).value_or(
        "Look for device errors (dmesg, nvidia-smi) on the ranks that hold others up, then report "
        "this text. ncclCommAbort ends the call");
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
    for (const Waits::LateMessages& late : waits_.lateMessages(owner_, rank)) {
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
  const Waits waits_;
  const RankView& self_;
  const int64_t now_;
  int owner_ = 0;
  Report report_;
};

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

}  // namespace unisono::diagnose
