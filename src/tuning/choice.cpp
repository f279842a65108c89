// SPDX-License-Identifier: Apache-2.0
#include "tuning/choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/math.h"

namespace unisono::tuning {
namespace {

using device::DataType;
using device::Reduction;

constexpr int kWarp = 32;
constexpr int kAllThreads = 640;
// About as many calls as NCCL puts into one batch, whose trees are pipelined.
constexpr int kCallsPerBatch = 8;
// Long rings multiply the rounding errors of 8-bit floating-point types: what is not a ring wins.
constexpr int kMaxExactRing = 8;
constexpr double kLossy = 1024;

// By log2(bytes / 64): the part of its bandwidth that a tree reaches.
constexpr double kTreeCorrection[device::kProtocols][24] = {
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5,
     .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9}};

bool isFloat8(DataType type) {
  return type == DataType::float8e4m3 || type == DataType::float8e5m2;
}

// The types and operators that the NVSwitch reduces.
bool multicastReduces(DataType type, Reduction reduction) {
  const bool sum = reduction == Reduction::sum;
  const bool minMax = reduction == Reduction::min || reduction == Reduction::max;
  switch (type) {
    case DataType::float32:
    case DataType::float64:
      return sum;
    case DataType::int32:
    case DataType::uint32:
    case DataType::int64:
    case DataType::uint64:
    case DataType::float16:
    case DataType::bfloat16:
      return sum || minMax;
    default:
      return false;
  }
}

// Why this call in particular cannot be carried.
Exclusion callExclusion(const CostModel& model, const Question& question, Algorithm algorithm,
                        Protocol protocol) {
  const uint64_t limit =
      model.facts.maxBytes[static_cast<size_t>(algorithm)][static_cast<size_t>(protocol)];
  if (limit > 0 && question.bytes > limit) return Exclusion::tooLarge;
  if (algorithm == Algorithm::nvls || algorithm == Algorithm::nvlsTree) {
    if (question.operation != Operation::allGather &&
        !multicastReduces(question.type, question.reduction)) {
      return Exclusion::type;
    }
  }
  if (algorithm == Algorithm::pat && question.operation == Operation::reduceScatter &&
      (question.reduction == Reduction::preMulSum ||
       question.reduction == Reduction::sumPostDivide)) {
    return Exclusion::reduction;
  }
  return Exclusion::none;
}

double modelTime(const CostModel& model, const Question& question, Algorithm algorithm,
                 Protocol protocol, const Estimate& estimate) {
  double bandwidth = estimate.bandwidth, latency = estimate.latencyUs;
  const auto& facts = model.facts;
  const bool allReduce = question.operation == Operation::allReduce;
  const int log = std::bit_width(question.bytes >> 6) - 1;
  const auto& correction = kTreeCorrection[static_cast<size_t>(protocol)];
  const bool blackwellOnX86 =
      facts.machine.lowestSm >= 100 &&
      facts.machine.cpuArchitecture == static_cast<int>(topology::CpuArchitecture::x86);
  if (allReduce && log >= 0 &&
      ((algorithm == Algorithm::tree && log < 23) ||
       (algorithm == Algorithm::nvlsTree && log < 24 && blackwellOnX86))) {
    bandwidth *= correction[log];
  }
  if (algorithm == Algorithm::ring && protocol == Protocol::simple && facts.nodes > 1 &&
      allReduce &&
      question.bytes /
              (static_cast<uint64_t>(facts.channels) * static_cast<uint64_t>(facts.ranks)) >=
          64) {
    latency *= facts.machine.lowestSm < 80 ? 1.9 : 1.4;
  }
  const int rounds =
      algorithm == Algorithm::ring ? question.calls : ceilDivide(question.calls, kCallsPerBatch);
  const double transfer =
      bandwidth > 0 ? static_cast<double>(question.bytes) / (1000 * bandwidth) : 0;
  return latency * rounds + transfer;
}

// The predicted time, whether or not the candidate is excluded.
double timeOf(const CostModel& model, const Question& question, Algorithm algorithm,
              Protocol protocol) {
  const Estimate& estimate = model.of(question.operation, algorithm, protocol);
  const double time = estimate.measured.empty()
                          ? modelTime(model, question, algorithm, protocol, estimate)
                          : measuredTime(estimate.measured, question.bytes);
  const bool lossy =
      algorithm == Algorithm::ring && isFloat8(question.type) && model.facts.ranks > kMaxExactRing;
  return lossy ? time * kLossy : time;
}

// Takes what is left out of a list of candidates by this call, and finds the fastest.
bool chooseFrom(const CostModel& model, const Question& question,
                const std::vector<CostModel::Candidate>& candidates, const TimeTable* advised,
                Choice& choice) {
  double best = std::numeric_limits<double>::infinity();
  for (const auto& [algorithm, protocol] : candidates) {
    if (callExclusion(model, question, algorithm, protocol) != Exclusion::none) continue;
    const size_t a = static_cast<size_t>(algorithm), p = static_cast<size_t>(protocol);
    double time = 0;
    if (advised != nullptr && a < advised->size()) {
      time = (*advised)[a][p];
      if (time < 0) continue;
    } else {
      time = timeOf(model, question, algorithm, protocol);
    }
    if (time >= best) continue;
    best = time;
    choice.algorithm = algorithm;
    choice.protocol = protocol;
  }
  return best < std::numeric_limits<double>::infinity();
}

// A ring moves every byte of an all-reduce twice.
uint64_t trafficOf(const Question& question, Algorithm algorithm) {
  const bool twice = algorithm == Algorithm::ring && question.operation == Operation::allReduce;
  return twice ? 2 * question.bytes : question.bytes;
}

void setShape(const CostModel& model, const Question& question, Choice& choice) {
  const auto a = static_cast<size_t>(choice.algorithm);
  const auto p = static_cast<size_t>(choice.protocol);
  const uint64_t traffic = trafficOf(question, choice.algorithm);
  int channels = model.facts.channels, threads = model.maxThreads[a][p];
  auto perThread = static_cast<uint64_t>(model.bytesPerThread[a][p]);
  const auto perChannel = [&] {
    return std::max<uint64_t>(static_cast<uint64_t>(threads) * perThread, 1);
  };
  if (choice.algorithm == Algorithm::nvls || choice.algorithm == Algorithm::nvlsTree) {
    const bool bounded = choice.algorithm == Algorithm::nvls && model.facts.nodes > 1;
    channels = bounded ? std::min(model.facts.nvlsChannels, channels) : model.facts.nvlsChannels;
  } else {
    const uint64_t useful = traffic / perChannel();
    channels = static_cast<int>(std::clamp<uint64_t>(useful, 1, static_cast<uint64_t>(channels)));
    const bool shrinks = choice.algorithm != Algorithm::collNetDirect;
    while (shrinks && channels == 1 && traffic < perChannel() && threads % 128 == 0) threads /= 2;
  }
  if (choice.algorithm == Algorithm::ring && choice.protocol == Protocol::simple) threads += kWarp;
  threads = std::max(threads, 3 * kWarp);
  if (choice.algorithm == Algorithm::tree || choice.algorithm == Algorithm::pat) {
    threads = kAllThreads;
  }
  choice.channels = channels;
  choice.threads = threads;
  choice.chunkBytes = model.facts.chunkBytes[p];
}

// The times of the allowed candidates, for a plug-in.
TimeTable tableFor(const CostModel& model, const Question& question) {
  TimeTable table;
  for (auto& row : table) row.fill(kExcluded);
  for (const auto& [algorithm, protocol] :
       model.candidates[static_cast<size_t>(question.operation)]) {
    const auto a = static_cast<size_t>(algorithm);
    if (a >= table.size()) continue;
    if (callExclusion(model, question, algorithm, protocol) != Exclusion::none) continue;
    table[a][static_cast<size_t>(protocol)] =
        static_cast<float>(timeOf(model, question, algorithm, protocol));
  }
  return table;
}

std::string lostBy(double timeUs, double bestUs) {
  return bestUs > 0 ? fmt::format("{:.3g} times the time of the choice", timeUs / bestUs)
                    : std::string("slower");
}

}  // namespace

Choice choose(const CostModel& model, const Question& question, const Advisor* advisor) {
  Choice choice;
  const auto o = static_cast<size_t>(question.operation);
  TimeTable table;
  int advisedChannels = 0;
  if (advisor != nullptr) {
    table = tableFor(model, question);
    advisedChannels = advisor->advise(question, table);
  }
  choice.allowed = chooseFrom(model, question, model.candidates[o],
                              advisor == nullptr ? nullptr : &table, choice);
  for (size_t i = 0; !choice.allowed && i < model.lastResorts[o].size(); i++) {
    if (chooseFrom(model, question, model.lastResorts[o][i], nullptr, choice)) break;
  }
  choice.timeUs = timeOf(model, question, choice.algorithm, choice.protocol);
  setShape(model, question, choice);
  if (advisedChannels > 0) choice.channels = std::min(advisedChannels, model.facts.channels);
  if (advisor != nullptr && choice.chunkBytes > 0) {
    choice.chunkBytes =
        std::clamp<uint64_t>(advisor->adviseChunk(question, choice), 1, choice.chunkBytes);
  }
  return choice;
}

Explanation explain(const CostModel& model, const Question& question, const Advisor* advisor) {
  Explanation result;
  result.choice = choose(model, question, advisor);
  const Choice& choice = result.choice;
  for (int a = 0; a < device::kAlgorithms; a++) {
    for (int p = 0; p < device::kProtocols; p++) {
      const auto algorithm = static_cast<Algorithm>(a);
      const auto protocol = static_cast<Protocol>(p);
      if (definitionOf(question.operation, algorithm, protocol) != Exclusion::none) continue;
      const Estimate& estimate = model.of(question.operation, algorithm, protocol);
      CandidateReport row{algorithm, protocol, estimate.exclusion,         estimate.allowed,
                          false,     0,        !estimate.measured.empty(), ""};
      if (row.exclusion == Exclusion::none) {
        row.exclusion = callExclusion(model, question, algorithm, protocol);
      }
      if (row.measured || estimate.bandwidth > 0) {
        row.timeUs = timeOf(model, question, algorithm, protocol);
      }
      row.chosen = algorithm == choice.algorithm && protocol == choice.protocol;
      if (row.chosen) {
        if (!choice.allowed) row.reason = "NCCL_ALGO and NCCL_PROTO leave nothing else";
      } else if (row.exclusion != Exclusion::none) {
        row.reason = reasonOf(row.exclusion);
      } else if (!estimate.allowed && choice.allowed) {
        row.reason = "excluded by NCCL_ALGO or NCCL_PROTO";
      } else if (advisor != nullptr && row.timeUs < choice.timeUs) {
        row.reason = reasonOf(Exclusion::tuner);
      } else {
        row.reason = lostBy(row.timeUs, choice.timeUs);
      }
      result.candidates.push_back(std::move(row));
    }
  }
  const auto rank = [](const CandidateReport& row) {
    return row.chosen ? 0 : row.exclusion == Exclusion::none ? 1 : 2;
  };
  std::stable_sort(result.candidates.begin(), result.candidates.end(),
                   [&](const CandidateReport& a, const CandidateReport& b) {
                     if (rank(a) != rank(b)) return rank(a) < rank(b);
                     return rank(a) == 1 && a.timeUs < b.timeUs;
                   });
  return result;
}

std::vector<ChoiceRange> choicesBySize(const CostModel& model, Question question, uint64_t lowest,
                                       uint64_t highest) {
  const auto at = [&](uint64_t bytes) {
    question.bytes = bytes;
    return choose(model, question);
  };
  const auto same = [](const Choice& a, const Choice& b) {
    return a.algorithm == b.algorithm && a.protocol == b.protocol;
  };
  constexpr uint64_t kStepsPerOctave = 64;
  std::vector<ChoiceRange> ranges;
  Choice current = at(lowest);
  const auto open = [&](uint64_t bytes, const Choice& choice) {
    ranges.push_back({bytes, bytes, choice.algorithm, choice.protocol, choice.channels,
                      choice.channels, choice.timeUs, choice.timeUs});
  };
  const auto close = [&](uint64_t bytes) {
    const Choice last = at(bytes);
    ranges.back().lastBytes = bytes;
    ranges.back().lastChannels = last.channels;
    ranges.back().lastTimeUs = last.timeUs;
  };
  open(lowest, current);
  for (uint64_t bytes = lowest; bytes < highest;) {
    const uint64_t octave = std::bit_floor(std::max<uint64_t>(bytes, 1));
    const uint64_t next =
        std::min(highest, bytes + std::max<uint64_t>(octave / kStepsPerOctave, 1));
    const Choice after = at(next);
    if (!same(current, after)) {
      // The last size with the current choice.
      uint64_t low = bytes, high = next;
      while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        (same(at(middle), current) ? low : high) = middle;
      }
      close(low);
      current = at(high);
      open(high, current);
      // What comes between the border and `next` is looked at again.
      bytes = high;
      continue;
    }
    bytes = next;
  }
  close(highest);
  return ranges;
}

int chooseChannels(const TuningInput& tuningInput, size_t bytes) {
  const size_t useful = bytes / tuningInput.minBytesPerChannel;
  return static_cast<int>(std::clamp<size_t>(useful, 1, static_cast<size_t>(tuningInput.channels)));
}

}  // namespace unisono::tuning
