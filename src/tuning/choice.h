// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tuning/model.h"

// Which algorithm and protocol carry a call, with how many channels and threads. Pure.
namespace unisono::tuning {

// Parts of a call on different channels, and chunks, are multiples of this, so that vector accesses
// stay aligned.
inline constexpr uint64_t kGrainBytes = 512;

struct Question {
  Operation operation = Operation::allReduce;
  uint64_t bytes = 0;  // the larger of a rank's input and output, as nccl-tests counts
  device::DataType type = device::DataType::float32;
  device::Reduction reduction = device::Reduction::sum;
  int calls = 1;  // calls like this one that run together

  bool operator==(const Question&) const = default;
};

struct Choice {
  Algorithm algorithm = Algorithm::ring;
  Protocol protocol = Protocol::simple;
  int channels = 1;
  int threads = 0;          // of each channel's block
  double load = 0;          // channels that the call keeps busy, as a fraction and without a limit
  uint64_t chunkBytes = 0;  // payload of a chunk; 0: unknown
  double timeUs = 0;
  // False where NCCL_ALGO and NCCL_PROTO leave nothing that can carry the call.
  bool allowed = true;

  // Bytes of the call by time, GB/s.
  double bandwidth(uint64_t bytes) const {
    return timeUs > 0 ? static_cast<double>(bytes) / timeUs / 1000 : 0;
  }
};

// Times by device::Algorithm and device::Protocol, in microseconds; kExcluded for what cannot carry
// the call.
constexpr float kExcluded = -1;
using TimeTable = std::array<std::array<float, device::kNcclProtocols>, device::kNcclAlgorithms>;

// Someone who knows better than the model: a tuner plug-in.
class Advisor {
 public:
  virtual ~Advisor() = default;
  // May change the times of the algorithms that NCCL has, where they are not kExcluded. What the
  // library does not choose by itself is chosen where its time is changed. Returns the number of
  // channels to use, or 0.
  virtual int advise(const Question& question, TimeTable& times) const = 0;
  // May change the size of a chunk.
  virtual uint64_t adviseChunk(const Question& question, const Choice& choice) const = 0;
};

// Returns the fastest candidate among those that the library prefers for the call and the user
// allows; if there is none, among those that it can run and the user allows. If the user's settings
// exclude all, the fastest that respects one of NCCL_ALGO and NCCL_PROTO, else the fastest of all.
// Takes about 1,500 instructions without an advisor (docs/results/2026-11-27-eager.md), at any
// number of ranks.
Choice choose(const CostModel& model, const Question& question, const Advisor* advisor = nullptr);

// Keeps the choices of a model, because programs repeat a few calls: to find one takes a tenth of
// the instructions of choose(). For one thread at a time.
class ChoiceCache {
 public:
  const Choice& choose(const CostModel& model, const Question& question);

 private:
  static constexpr size_t kKept = 64;
  struct Entry {
    Question question{.calls = 0};  // no call asks that
    Choice choice;
  };
  std::array<Entry, kKept> entries_;
};

// One row of the explanation: an algorithm and protocol that could carry the operation.
struct CandidateReport {
  Algorithm algorithm;
  Protocol protocol;
  Exclusion exclusion;
  bool allowed;
  bool chosen;
  double timeUs;       // excluded ones have one too where the model does; 0: none
  bool measured;       // the time comes from measurements
  std::string reason;  // why it lost or is excluded; empty for the choice
};
// The same choice with all candidates of the operation: the choice first, then by time, then those
// excluded.
struct Explanation {
  Choice choice;
  std::vector<CandidateReport> candidates;
};
Explanation explain(const CostModel& model, const Question& question,
                    const Advisor* advisor = nullptr);

// A range of sizes with one choice. The channels are those at both ends.
struct ChoiceRange {
  uint64_t firstBytes, lastBytes;
  Algorithm algorithm;
  Protocol protocol;
  int firstChannels, lastChannels;
  double firstTimeUs, lastTimeUs;
};
// How the choice changes over sizes from `lowest` to `highest` bytes, with borders found to the
// byte as far as a search between powers of two (and 64 steps between them) sees them.
std::vector<ChoiceRange> choicesBySize(const CostModel& model, Question question, uint64_t lowest,
                                       uint64_t highest, const Advisor* advisor = nullptr);

// The channels of calls that share a launch, from the sum of their loads.
int channelsOf(double load, int channels);

}  // namespace unisono::tuning
