// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "diagnose/call_table.h"

namespace unisono::diagnose {

// What the table of one rank says, as plain values.
struct RankView {
  int rank = 0;
  bool isKnown = false;  // false: this process cannot read its table
  bool hasLeft = false;  // it has destroyed its communicator
  int ranks = 0, device = 0;
  uint32_t slots = 0;
  uint64_t id = 0;
  std::string name, network;
  std::string host;     // of its process; empty: it is this one
  std::string address;  // of its host, for other hosts; empty: unknown
  // For a rank of another host that did not answer: its process and address.
  std::string place;
  int64_t pid = 0;
  // Of its process: "stopped", "ended", or "" if it runs or nobody can say.
  std::string processState;
  int64_t silentFor = 0;  // nanoseconds since its watchdog looked last
  uint64_t entered = 0, launched = 0, started = 0, finished = 0;
  int64_t changed = 0;
  uint32_t captures = 0;       // groups of calls in graphs, which are not among `calls`
  uint64_t replayed = 0;       // collectives in replays that have begun
  std::optional<Call> replay;  // that runs
  std::array<uint64_t, plan::kCallKinds> counts{};  // of all calls, by kind
  int error = 0;                                    // ncclResult_t
  bool isAborted = false, isFinalized = false;
  uint64_t reported = 0;    // the call that its process has explained last: Report::key()
  std::vector<Call> calls;  // the last ones, oldest first
  std::vector<Link> links;
  std::vector<QuietPoint> quietPoints;  // the last ones, oldest first
  std::vector<Call> captured;           // see CallTable
  std::vector<Flow> flows;              // of the first peers
  std::string elsewhere;  // the call of another communicator that the same process waits in
  std::map<std::string, std::string> settings;  // of its process, that are not the defaults

  // Its watchdog, which looks several times a second, no longer does: its progress is not known.
  bool isSilent() const { return !processState.empty() || silentFor > 2'000'000'000; }
  bool isFinished(const Call& call) const {
    return !call.isReplay() && call.launch != 0 && call.launch <= finished;
  }
  // The kernel of the call or, where the table no longer holds that call, of one before it runs.
  bool hasStarted(const Call& call) const {
    if (call.isReplay()) return true;
    return call.launch != 0 && (call.launch <= started || (isOverrun() && started > finished));
  }
  // It has made so many calls ahead that the table does not hold the one that it is in.
  bool isOverrun() const;
  // The call that it is in. Launches do not overlap, so that calls wait for a replay that runs.
  const Call* current() const;
  // When the current call could begin: when it was made, or when the one before it was done.
  int64_t waitsSince(const Call& call) const;
  const Call* findCollective(uint64_t sequence) const;
  const Call* findMessage(plan::Call call, int peer, uint64_t sequence) const;
  // The number of its last collective, or of its last message of this kind.
  uint64_t lastCollective() const;
  uint64_t lastMessage(plan::Call call, int peer) const;
  // Null if the table has none.
  const Flow* findFlow(int peer, bool sends) const;
  // How many messages of the flow it has finished or is in; see current().
  uint64_t begunMessages(const Flow& flow) const;
};

// Says whether a rank of `ranks` can have made such a call.
bool isPossible(const Call& call, int ranks);

// Reads a table of a segment.
RankView readView(const ProcessHead& head, const CallTable& table, int64_t now);

// For a rank whose device does not say how far it is: collectives that all others have finished are
// finished, and whatever it has launched has begun.
void assumeProgress(std::vector<RankView>& views, int rank);

// "AllReduce #17 (count 1024, float32, sum)", "Send #3 to rank 1 (count 8, int32)".
std::string describe(const Call& call);
// Without number: what two ranks must have in common.
std::string describeArguments(const Call& call);
const char* nameOf(plan::Call call);
const char* nameOf(device::DataType type);
const char* nameOf(device::Reduction reduction);

// Says whether two calls of the same number fit together, in what NCCL lets differ: types of equal
// size where data are only copied, and signed and unsigned integers in sums and products.
bool fitTogether(const Call& a, const Call& b);

// The first pair of calls with the same number that do not fit together.
struct Mismatch {
  int rankA, rankB;
  Call a, b;
};
// Compares the collectives of both, and the messages from `a` to `b`. Where either has captured
// calls their numbers tell nothing.
std::optional<Mismatch> findMismatch(const RankView& a, const RankView& b);
std::string describe(const Mismatch& mismatch);

// The same for calls that fit together; the number of the call does not count.
uint64_t hashOfKind(const Call& call);
// Says how calls of two ranks of which at least one has captured calls into graphs differ: the
// collectives of both, and the messages from `a` to `b`. Nothing if they do not, or if it is not
// known: nobody sees the order of replays, so that only sums are compared, of moments when both
// ranks had finished the same number of collectives, or of these messages.
std::optional<std::string> findReplayMismatch(const RankView& a, const RankView& b);

}  // namespace unisono::diagnose
