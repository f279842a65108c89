// SPDX-License-Identifier: Apache-2.0
#include "diagnose/rank_view.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "base/fnv.h"
#include "base/math.h"

namespace unisono::diagnose {
namespace {

// Nothing for a record that is being written, or that no library of this version has written.
std::optional<Call> readCall(const CallRecord& record, int ranks) {
  Call call;
  call.index = record.index.load(kAcquire);
  call.sequence = record.sequence.load(kAcquire);
  call.count = record.count.load(kAcquire);
  call.launch = record.launch.load(kAcquire);
  call.entered = record.entered.load(kAcquire);
  call.replay = record.replay.load(kAcquire);
  const uint64_t kind = record.kind.load(kAcquire);
  if (call.index == 0 || record.index.load(kAcquire) != call.index) return std::nullopt;
  call.call = static_cast<plan::Call>(kind & 0xff);
  call.type = static_cast<device::DataType>(kind >> 8 & 0xff);
  call.reduction = static_cast<device::Reduction>(kind >> 16 & 0xff);
  call.peer = static_cast<int32_t>(kind >> 32);
  return isPossible(call, ranks) ? std::optional(call) : std::nullopt;
}

// From /proc, for a process of the same PID namespace that does not answer.
std::string processState(const ProcessHead& head) {
  struct stat status {};
  if (::stat("/proc/self/ns/pid", &status) != 0 || status.st_ino != head.pidNamespace) return "";
  std::ifstream file(fmt::format("/proc/{}/stat", head.pid));
  std::string text;
  if (!std::getline(file, text)) return "ended";
  const size_t name = text.rfind(')');
  if (name == std::string::npos || name + 2 >= text.size()) return "";
  const char state = text[name + 2];
  if (state == 'T' || state == 't') return "stopped";
  return state == 'Z' || state == 'X' ? "ended" : "";
}

bool isSigned(device::DataType type) {
  return type == device::DataType::int8 || type == device::DataType::int32 ||
         type == device::DataType::int64;
}

// The type that stands for those with which a sum has the same bits.
device::DataType unsignedOf(device::DataType type) {
  return isSigned(type) ? static_cast<device::DataType>(static_cast<int>(type) + 1) : type;
}

template <size_t kBytes>
std::string readText(const std::atomic<char> (&from)[kBytes]) {
  std::string text;
  for (const std::atomic<char>& letter : from) {
    const char next = letter.load(kAcquire);
    if (next == '\0') break;
    text += next;
  }
  return text;
}

}  // namespace

const char* nameOf(plan::Call call) {
  static constexpr const char* kNames[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast",
                                           "Reduce",    "Send",      "Recv",          "AlltoAll",
                                           "Gather",    "Scatter"};
  return static_cast<size_t>(call) < std::size(kNames) ? kNames[static_cast<size_t>(call)] : "?";
}
const char* nameOf(device::DataType type) {
  static constexpr const char* kNames[] = {"int8",    "uint8",    "int32",      "uint32",
                                           "int64",   "uint64",   "float16",    "float32",
                                           "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return static_cast<size_t>(type) < std::size(kNames) ? kNames[static_cast<size_t>(type)] : "?";
}
// Averages reach the device as sums with a factor or a divisor.
const char* nameOf(device::Reduction reduction) {
  static constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg or premulsum", "avg"};
  return static_cast<size_t>(reduction) < std::size(kNames) ? kNames[static_cast<size_t>(reduction)]
                                                            : "?";
}

std::string describeArguments(const Call& call) {
  std::string text = fmt::format("count {}, {}", call.count, nameOf(call.type));
  if (call.reduces()) text += fmt::format(", {}", nameOf(call.reduction));
  if (call.hasRoot()) text += fmt::format(", root {}", call.peer);
  return fmt::format("{}({})", nameOf(call.call), text);
}

std::string describe(const Call& call) {
  if (call.isReplay()) {
    std::string to;
    if (call.isMessage()) {
      to = fmt::format(" {} rank {}", call.call == plan::Call::send ? "to" : "from", call.peer);
    }
    return fmt::format("{}{}, replay {} of captured call {}", describeArguments(call), to,
                       call.replay, call.index);
  }
  std::string text = fmt::format("{} #{}", nameOf(call.call), call.sequence);
  if (call.isMessage()) {
    text += fmt::format(" {} rank {}", call.call == plan::Call::send ? "to" : "from", call.peer);
  }
  text += fmt::format(" (count {}, {}", call.count, nameOf(call.type));
  if (call.reduces()) text += fmt::format(", {}", nameOf(call.reduction));
  if (call.hasRoot()) text += fmt::format(", root {}", call.peer);
  return text + ")";
}

bool isPossible(const Call& call, int ranks) {
  const bool needsPeer = call.isMessage() || call.hasRoot();
  return static_cast<size_t>(call.call) < static_cast<size_t>(plan::kCallKinds) &&
         static_cast<size_t>(call.type) < static_cast<size_t>(device::kDataTypes) &&
         (!needsPeer || (call.peer >= 0 && call.peer < ranks));
}

const Call* RankView::current() const {
  if (replay) return &*replay;
  const auto found = std::find_if(calls.begin(), calls.end(),
                                  [this](const Call& call) { return !isFinished(call); });
  return found == calls.end() ? nullptr : &*found;
}

bool RankView::isOverrun() const {
  return !calls.empty() && calls.front().index > 1 && calls.front().launch > finished + 1;
}

int64_t RankView::waitsSince(const Call& call) const {
  return call.isReplay() ? call.entered : std::max(call.entered, changed);
}

const Call* RankView::findCollective(uint64_t sequence) const {
  const auto found = std::find_if(calls.begin(), calls.end(), [&](const Call& call) {
    return !call.isMessage() && call.sequence == sequence;
  });
  return found == calls.end() ? nullptr : &*found;
}

const Call* RankView::findMessage(plan::Call kind, int peer, uint64_t sequence) const {
  const auto found = std::find_if(calls.begin(), calls.end(), [&](const Call& call) {
    return call.call == kind && call.peer == peer && call.sequence == sequence;
  });
  return found == calls.end() ? nullptr : &*found;
}

uint64_t RankView::lastCollective() const {
  uint64_t last = 0;
  for (const Call& call : calls) {
    if (!call.isMessage()) last = std::max(last, call.sequence);
  }
  return last;
}

uint64_t RankView::lastMessage(plan::Call kind, int peer) const {
  uint64_t last = 0;
  for (const Call& call : calls) {
    if (call.call == kind && call.peer == peer) last = std::max(last, call.sequence);
  }
  return last;
}

const Flow* RankView::findFlow(int peer, bool sends) const {
  const auto found = std::ranges::find_if(
      flows, [&](const Flow& flow) { return flow.peer == peer && flow.sends == sends; });
  return found == flows.end() ? nullptr : &*found;
}

uint64_t RankView::begunMessages(const Flow& flow) const {
  const plan::Call kind = flow.sends ? plan::Call::send : plan::Call::receive;
  const Call* now = current();
  const auto later = static_cast<uint64_t>(std::ranges::count_if(calls, [&](const Call& call) {
    if (call.call != kind || call.peer != flow.peer || isFinished(call) || &call == now)
      return false;
    return now->isReplay() || call.launch == 0 || call.launch > now->launch;
  }));
  return flow.replayed + flow.entered - std::min(later, flow.entered);
}

RankView readView(const ProcessHead& head, const CallTable& table, int64_t now) {
  RankView view;
  view.isKnown = true;
  view.id = table.id.load(kAcquire);
  view.hasLeft = view.id == 0;
  // Who may not be of this job gets no place beyond these bounds.
  view.ranks = std::clamp(table.ranks.load(kAcquire), 1, kMaxRanks);
  view.rank = std::clamp(table.rank.load(kAcquire), 0, view.ranks - 1);
  view.device = table.device.load(kAcquire);
  view.slots = table.slots.load(kAcquire);
  view.name = readText(table.name);
  view.network = readText(table.network);
  view.address = readText(table.address);
  view.pid = head.pid;
  view.silentFor = std::max<int64_t>(0, now - head.alive.load(kAcquire));
  constexpr int64_t kManyLooks = 600'000'000;
  if (view.silentFor > kManyLooks) view.processState = processState(head);
  // In the opposite order of the writers: what is finished was launched, and was entered before.
  view.changed = table.changed.load(kAcquire);
  view.finished = table.finished.load(kAcquire);
  view.started = table.started.load(kAcquire);
  view.launched = table.launched.load(kAcquire);
  view.entered = table.entered.load(kAcquire);
  for (size_t kind = 0; kind < view.counts.size(); kind++) {
    view.counts[kind] = table.counts[kind].load(kAcquire);
  }
  view.error = table.error.load(kAcquire);
  view.isAborted = table.aborted.load(kAcquire) != 0;
  view.isFinalized = table.finalized.load(kAcquire) != 0;
  view.reported = table.reported.load(kAcquire);
  for (const CallRecord& record : table.calls) {
    if (const auto call = readCall(record, view.ranks)) view.calls.push_back(*call);
  }
  std::sort(view.calls.begin(), view.calls.end(),
            [](const Call& a, const Call& b) { return a.index < b.index; });
  // After the calls: who sees one that followed a capture must know of the capture.
  view.captures = table.captures.load(kAcquire);
  view.replay = readCall(table.replay, view.ranks);
  view.replayed = table.replayed.load(kAcquire);
  for (const QuietRecord& record : table.quiet) {
    const QuietPoint point{record.collectives.load(kAcquire), record.hash.load(kAcquire)};
    const bool isWhole =
        point.collectives != 0 && record.collectives.load(kAcquire) == point.collectives;
    if (isWhole) view.quietPoints.push_back(point);
  }
  std::ranges::sort(view.quietPoints, {}, &QuietPoint::collectives);
  for (const CallRecord& record : table.captured) {
    if (const auto call = readCall(record, view.ranks)) view.captured.push_back(*call);
  }
  const size_t flows = std::min<size_t>(table.flows.load(kAcquire), kFlows);
  for (size_t i = 0; i < flows; i++) {
    const FlowRecord& record = table.flow[i];
    const uint64_t kind = record.kind.load(kAcquire);
    const int peer = static_cast<int32_t>(kind & 0xffffffff);
    if (peer < 0 || peer >= view.ranks) continue;
    Flow& flow = view.flows.emplace_back(
        Flow{peer, kind >> 32 != 0, record.entered.load(kAcquire), record.replayed.load(kAcquire)});
    for (const auto& point : record.quiet) {
      const MessageSum sum{point.count.load(kAcquire), point.bytes.load(kAcquire),
                           point.hash.load(kAcquire)};
      if (sum.count != 0 && point.count.load(kAcquire) == sum.count) flow.quiet.push_back(sum);
    }
  }
  const size_t links = std::min<size_t>(table.links.load(kAcquire), kLinks);
  for (size_t i = 0; i < links; i++) {
    const uint64_t kind = table.link[i].kind.load(kAcquire);
    const int peer = static_cast<int32_t>(kind & 0xffffffff);
    if (peer < 0 || peer >= view.ranks) continue;
    view.links.push_back({peer, static_cast<int>(kind >> 32 & 0x1ffffff), kind >> 63 != 0,
                          table.link[i].tail.load(kAcquire), table.link[i].head.load(kAcquire),
                          (kind >> 62 & 1) != 0, table.link[i].bytesInFlight.load(kAcquire),
                          (kind >> 61 & 1) != 0, readText(table.link[i].port),
                          static_cast<Link::Kind>(kind >> 57 & 7), table.link[i].all.load(kAcquire),
                          (kind >> 60 & 1) != 0});
  }
  if (table.id.load(kAcquire) == view.id) return view;
  // The table went to another communicator while it was read.
  RankView left;
  left.isKnown = left.hasLeft = true;
  left.rank = view.rank;
  left.pid = view.pid;
  return left;
}

void assumeProgress(std::vector<RankView>& views, int rank) {
  RankView& own = views.at(static_cast<size_t>(rank));
  const auto hasFinished = [](const RankView& view, uint64_t sequence) {
    if (!view.isKnown || view.lastCollective() < sequence) return false;
    const Call* call = view.findCollective(sequence);
    return call == nullptr || view.isFinished(*call);
  };
  for (const Call& call : own.calls) {
    if (call.isMessage() || call.launch == 0) continue;
    const bool isFinished = std::all_of(views.begin(), views.end(), [&](const RankView& view) {
      return &view == &own || hasFinished(view, call.sequence);
    });
    if (isFinished) own.finished = std::max(own.finished, call.launch);
  }
  own.started = std::max(own.started, own.launched);
}

bool fitTogether(const Call& a, const Call& b) {
  const auto isPair = [](const Call& x, const Call& y) {
    return x.call == plan::Call::send && y.call == plan::Call::receive;
  };
  if (isPair(a, b) || isPair(b, a)) return a.bytes() == b.bytes();
  if (a.call != b.call || (a.hasRoot() && a.peer != b.peer)) return false;
  if (!a.reduces()) return a.bytes() == b.bytes();
  if (a.count != b.count || a.reduction != b.reduction) return false;
  const bool wraps =
      a.reduction == device::Reduction::sum || a.reduction == device::Reduction::prod;
  return wraps ? unsignedOf(a.type) == unsignedOf(b.type) : a.type == b.type;
}

std::optional<Mismatch> findMismatch(const RankView& a, const RankView& b) {
  if (a.captures != 0 || b.captures != 0) return std::nullopt;
  for (const Call& call : a.calls) {
    const Call* other = nullptr;
    if (!call.isMessage()) {
      other = b.findCollective(call.sequence);
    } else if (call.call == plan::Call::send && call.peer == b.rank && a.rank != b.rank) {
      other = b.findMessage(plan::Call::receive, a.rank, call.sequence);
    }
    if (other != nullptr && !fitTogether(call, *other))
      return Mismatch{a.rank, b.rank, call, *other};
  }
  return std::nullopt;
}

uint64_t hashOfKind(const Call& call) {
  Fnv hash;
  hash.add(static_cast<uint64_t>(call.call));
  hash.add(call.hasRoot() ? static_cast<uint64_t>(call.peer) : 0);
  if (call.reduces()) {
    const bool wraps =
        call.reduction == device::Reduction::sum || call.reduction == device::Reduction::prod;
    hash.add(static_cast<uint64_t>(call.reduction));
    hash.add(static_cast<uint64_t>(wraps ? unsignedOf(call.type) : call.type));
    hash.add(call.count);
  } else {
    hash.add(call.bytes());
  }
  return mix64(hash.value());
}

std::optional<std::string> findReplayMismatch(const RankView& a, const RankView& b) {
  if (a.captures == 0 && b.captures == 0) return std::nullopt;
  const Flow* sent = a.rank == b.rank ? nullptr : a.findFlow(b.rank, true);
  const Flow* received = b.findFlow(a.rank, false);
  for (const MessageSum& sum :
       sent == nullptr || received == nullptr ? std::vector<MessageSum>() : sent->quiet) {
    const auto other = std::ranges::find(received->quiet, sum.count, &MessageSum::count);
    if (other == received->quiet.end() || other->hash == sum.hash) continue;
    return fmt::format(
        "Messages in CUDA graphs differ between ranks {} and {}: rank {} has sent {} messages to "
        "rank {}, of {} bytes in all, and rank {} has received as many of other sizes, of {} bytes "
        "in all",
        a.rank, b.rank, a.rank, sum.count, b.rank, sum.bytes, b.rank, other->bytes);
  }
  for (const QuietPoint& point : a.quietPoints) {
    const auto other =
        std::ranges::find(b.quietPoints, point.collectives, &QuietPoint::collectives);
    if (other == b.quietPoints.end() || other->hash == point.hash) continue;
    // The first that one of them has run more often.
    const auto timesOf = [](const RankView& rank, const Call& call) -> uint64_t {
      for (const Call& kind : rank.captured) {
        if (hashOfKind(kind) == hashOfKind(call)) return kind.replay;
      }
      return 0;
    };
    const auto tell = [&](const RankView& rank, const RankView& than) -> std::string {
      for (const Call& kind : rank.captured) {
        const uint64_t theirs = timesOf(than, kind);
        if (kind.replay <= theirs) continue;
        return fmt::format("; rank {} has run the captured {} {} times, rank {} {} times",
                           rank.rank, describeArguments(kind), kind.replay, than.rank, theirs);
      }
      return "";
    };
    return fmt::format(
        "Calls in CUDA graphs differ between ranks {} and {}: each has finished {} collective "
        "calls, and these are not the same{}{}",
        a.rank, b.rank, point.collectives, tell(a, b), tell(b, a));
  }
  return std::nullopt;
}

std::string describe(const Mismatch& mismatch) {
  if (mismatch.a.isMessage()) {
    return fmt::format(
        "Rank {} sends message {} to rank {} with {} bytes ({}), but rank {} receives {} bytes "
        "({})",
        mismatch.rankA, mismatch.a.sequence, mismatch.rankB, mismatch.a.bytes(),
        describeArguments(mismatch.a), mismatch.rankB, mismatch.b.bytes(),
        describeArguments(mismatch.b));
  }
  return fmt::format(
      "Collective call {} differs between ranks: rank {} called {}, rank {} called {}",
      mismatch.a.sequence, mismatch.rankA, describeArguments(mismatch.a), mismatch.rankB,
      describeArguments(mismatch.b));
}

}  // namespace unisono::diagnose
