// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tuning/names.h"

// Measured times of calls. They replace the estimates of the cost model, and are all that is known
// of the direct algorithms. Pure.
namespace unisono::tuning {

struct MeasuredPoint {
  uint64_t bytes;  // the larger of a rank's input and output, as nccl-tests counts
  double timeUs;

  bool operator==(const MeasuredPoint&) const = default;
};

// The times of one operation by one algorithm and protocol, by ascending bytes.
struct MeasuredCurve {
  Operation operation;
  Algorithm algorithm;
  Protocol protocol;
  int nodes, ranks;
  std::vector<MeasuredPoint> points;
};
using MeasuredTable = std::vector<MeasuredCurve>;

// The times of a call that is messages, all of which one path carries.
struct MessageCurve {
  MessageOperation operation;
  MessagePath path;
  int nodes, ranks;
  std::vector<MeasuredPoint> points;
};
using MessageTable = std::vector<MessageCurve>;

// What a file has.
struct Measurements {
  MeasuredTable collectives;
  MessageTable messages;
};

// The times of the direct algorithms on NVSwitch machines (docs/results).
const MeasuredTable& builtinMeasurements();

// The times of rings and trees inside a node of `ranks` GPUs on NVSwitches, derived from those of 2
// H200 and 4 H100: the formulas of the cost model are far from them, and would not compare with
// those of the direct algorithms. Empty for what does not use FIFOs.
std::vector<MeasuredPoint> fifoPoints(Operation operation, Algorithm algorithm, Protocol protocol,
                                      int ranks);

// Parses the text of UNISONO_TUNING_FILE: lines of "operation algorithm protocol nodes ranks bytes
// microseconds", in any order; # starts a comment. Of messages, the algorithm and the protocol are
// the name of the path ("Direct LL"). Throws Error(invalidUsage) that names the line and lists what
// is accepted.
Measurements parseMeasurements(std::string_view text, std::string_view source);

// Changes with everything that they say.
uint64_t hashOf(const Measurements& measurements);

// Replaces each time by that of a larger size where that is shorter: a call can always be carried
// as fast as a larger one, so what was measured otherwise is noise.
void limitToLargerSizes(std::vector<MeasuredPoint>& points);

// `base`, in which the curves of `table` replace all of the same operation, algorithm and protocol.
MeasuredTable replaceCurves(const MeasuredTable& base, const MeasuredTable& table);

// The most bytes that a rank sends or receives inside a node, as a multiple of the call's bytes: of
// the direct family, rings and trees (where the ranks of a node are chains).
double linkTraffic(Operation operation, Algorithm algorithm, int ranks);

// The points for a communicator, empty if there are none. Those of the direct algorithms inside one
// node are interpolated between numbers of ranks. Beyond them the same traffic takes as long as
// with the nearest number that was measured, and a little more for each rank.
std::vector<MeasuredPoint> pointsFor(const MeasuredTable& table, Operation operation,
                                     Algorithm algorithm, Protocol protocol, int nodes, int ranks);

// The time of a call: linear between points, that of the first point below it, and on the line
// through the last two beyond them. `points` must not be empty.
double measuredTime(const std::vector<MeasuredPoint>& points, uint64_t bytes);

}  // namespace unisono::tuning
