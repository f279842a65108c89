// SPDX-License-Identifier: Apache-2.0
#include "tuning/choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/math.h"
#include "device/direct_work.h"
#include "device/multicast.h"

namespace unisono::tuning {
namespace {

using device::DataType;
using device::Reduction;

constexpr int kFewestBlockThreads = 96;  // one warp of workers
// About as many calls as NCCL puts into one batch, whose trees are pipelined.
constexpr int kCallsPerBatch = 8;
// Long rings multiply the rounding errors of 8-bit floating-point types: what is not a ring wins.
constexpr int kMaxExactRing = 8;
constexpr double kLossy = 1024;
// Rings over Simple sum one-byte types more slowly than they send them: a reduce of 1 GB takes 3052
// us on 2 H200, and 2890 us in bfloat16 (docs/results/2026-11-28-host-memory.md).
constexpr double kOneByteReduce = 1.05;

// By log2(bytes / 64): the part of its bandwidth that a tree reaches.
constexpr double kTreeCorrection[device::kNcclProtocols][24] = {
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5,
     .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9}};

bool isFloat8(DataType type) {
  return type == DataType::float8e4m3 || type == DataType::float8e5m2;
}

// The bytes that pass through the FIFOs of a rank. A ring moves every byte of an all-reduce twice.
uint64_t trafficOf(const CostModel& model, const Question& question, Algorithm algorithm) {
  if (algorithm == Algorithm::directTree) {
    const RailParts parts =
        railParts(model.facts.direct, question.bytes, model.facts.maxRanksPerNode);
    return parts.share + parts.rest;
  }
  const bool twice = algorithm == Algorithm::ring && question.operation == Operation::allReduce;
  return twice ? 2 * question.bytes : question.bytes;
}

// Why this call in particular cannot be carried.
Exclusion callExclusion(const CostModel& model, const Question& question, Algorithm algorithm,
                        Protocol protocol) {
  if (algorithm == Algorithm::direct || algorithm == Algorithm::twoShot) {
    const uint64_t share = shareOf(question.operation, question.bytes, model.facts.ranks);
    return model.facts.direct.fits(protocol, share) ? Exclusion::none : Exclusion::tooLarge;
  }
  if (algorithm == Algorithm::directTree) {
    const RailParts parts =
        railParts(model.facts.direct, question.bytes, model.facts.maxRanksPerNode);
    const bool fits = model.facts.direct.fits(Protocol::ll128, parts.share) &&
                      model.facts.direct.fits(Protocol::ll, parts.rest);
    return fits ? Exclusion::none : Exclusion::tooLarge;
  }
  const bool network = algorithm == Algorithm::collNetDirect ||
                       algorithm == Algorithm::collNetChain ||
                       (algorithm == Algorithm::nvls && model.facts.nodes > 1);
  if (network && question.operation != Operation::allGather &&
      (model.facts.collnetReductions & collnetBit(question.type, question.reduction)) == 0) {
    return Exclusion::networkOperation;
  }
  if (algorithm == Algorithm::nvls || algorithm == Algorithm::nvlsTree) {
    if (question.operation != Operation::allGather &&
        !device::isMulticastReduction(question.type, question.reduction)) {
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

// The part of its bandwidth that a tree reaches with sizes from 64 << log on.
double treeCorrection(const CostModel& model, const Question& question, Algorithm algorithm,
                      Protocol protocol, int log) {
  const auto& machine = model.facts.machine;
  const bool blackwellOnX86 =
      machine.lowestSm >= 100 &&
      machine.cpuArchitecture == static_cast<int>(topology::CpuArchitecture::x86);
  const bool isCorrected = question.operation == Operation::allReduce && log >= 0 &&
                           ((algorithm == Algorithm::tree && log < 23) ||
                            (algorithm == Algorithm::nvlsTree && log < 24 && blackwellOnX86));
  return isCorrected ? kTreeCorrection[costColumn(protocol)][log] : 1;
}

double modelTime(const CostModel& model, const Question& question, Algorithm algorithm,
                 Protocol protocol, const Estimate& estimate) {
  const auto& facts = model.facts;
  double latency = estimate.latencyUs;
  if (algorithm == Algorithm::ring && protocol == Protocol::simple && facts.nodes > 1 &&
      question.operation == Operation::allReduce &&
      question.bytes /
              (static_cast<uint64_t>(facts.channels) * static_cast<uint64_t>(facts.ranks)) >=
          64) {
    latency *= facts.machine.lowestSm < 80 ? 1.9 : 1.4;
  }
  const int rounds =
      algorithm == Algorithm::ring ? question.calls : ceilDivide(question.calls, kCallsPerBatch);
  latency *= rounds;
  if (estimate.bandwidth <= 0) return latency;
  const int log = std::bit_width(question.bytes >> 6) - 1;
  const double part = treeCorrection(model, question, algorithm, protocol, log);
  double transfer = static_cast<double>(question.bytes) / (1000 * estimate.bandwidth * part);
  // The parts are steps, but no call takes longer than a larger one.
  const double nextPart =
      model.formulasOnly ? part : treeCorrection(model, question, algorithm, protocol, log + 1);
  if (nextPart > part) {
    const auto next = static_cast<double>(uint64_t{64} << (log + 1));
    transfer = std::min(transfer, next / (1000 * estimate.bandwidth * nextPart));
  }
  return latency + transfer;
}

// The predicted time, whether or not the candidate is excluded.
double timeOf(const CostModel& model, const Question& question, Algorithm algorithm,
              Protocol protocol) {
  const Estimate& estimate = model.of(question.operation, algorithm, protocol);
  const double time = estimate.measured.empty()
                          ? modelTime(model, question, algorithm, protocol, estimate)
                          : measuredTime(estimate.measured, question.bytes);
  if (algorithm != Algorithm::ring) return time;
  if (isFloat8(question.type) && model.facts.ranks > kMaxExactRing) return time * kLossy;
  const bool isSlower = question.operation == Operation::reduce && protocol == Protocol::simple &&
                        device::elementBytes(question.type) == 1;
  return isSlower ? time * kOneByteReduce : time;
}

// What the user's settings leave, of descending preference.
enum class Respects : uint8_t { both, algorithm, protocol, nothing };

bool respects(const CostModel::Candidate& candidate, Respects settings) {
  switch (settings) {
    case Respects::both:
      return candidate.allowed();
    case Respects::algorithm:
      return candidate.allowedAlgorithm;
    case Respects::protocol:
      return candidate.allowedProtocol;
    case Respects::nothing:
      break;
  }
  return true;
}

// Finds the fastest candidate that can carry the call and that `isIn` takes; `timeOf` is what it
// costs.
template <typename IsIn, typename TimeOf>
bool chooseFrom(const CostModel& model, const Question& question, IsIn isIn, TimeOf time,
                Choice& choice) {
  double best = std::numeric_limits<double>::infinity();
  for (const CostModel::Candidate& candidate :
       model.candidates[static_cast<size_t>(question.operation)]) {
    if (!isIn(candidate)) continue;
    const auto [algorithm, protocol] = std::pair(candidate.algorithm, candidate.protocol);
    if (callExclusion(model, question, algorithm, protocol) != Exclusion::none) continue;
    const double us = time(algorithm, protocol);
    if (us >= best) continue;
    best = us;
    choice.algorithm = algorithm;
    choice.protocol = protocol;
  }
  return best < std::numeric_limits<double>::infinity();
}

void chooseByModel(const CostModel& model, const Question& question, Choice& choice) {
  const auto time = [&](Algorithm algorithm, Protocol protocol) {
    return timeOf(model, question, algorithm, protocol);
  };
  for (const Respects settings :
       {Respects::both, Respects::algorithm, Respects::protocol, Respects::nothing}) {
    choice.allowed = settings == Respects::both;
    const auto preferred = [&](const CostModel::Candidate& candidate) {
      return respects(candidate, settings) && candidate.preferred;
    };
    const auto any = [&](const CostModel::Candidate& candidate) {
      return respects(candidate, settings);
    };
    if (chooseFrom(model, question, preferred, time, choice) ||
        chooseFrom(model, question, any, time, choice)) {
      return;
    }
  }
}

// Whether tuner plug-ins know both.
bool isAdvised(Algorithm algorithm, Protocol protocol) {
  return static_cast<int>(algorithm) < device::kNcclAlgorithms &&
         static_cast<int>(protocol) < device::kNcclProtocols;
}

// Among what the user allows, with the times of a plug-in.
bool chooseByAdvice(const CostModel& model, const Question& question, const TimeTable& before,
                    const TimeTable& advised, Choice& choice) {
  const auto time = [&](Algorithm algorithm, Protocol protocol) -> double {
    const auto a = static_cast<size_t>(algorithm), p = static_cast<size_t>(protocol);
    return isAdvised(algorithm, protocol) ? advised[a][p]
                                          : timeOf(model, question, algorithm, protocol);
  };
  const auto isIn = [&](const CostModel::Candidate& candidate) {
    if (!candidate.allowed()) return false;
    const auto a = static_cast<size_t>(candidate.algorithm);
    const auto p = static_cast<size_t>(candidate.protocol);
    const bool isKnown = isAdvised(candidate.algorithm, candidate.protocol);
    if (isKnown && advised[a][p] < 0) return false;
    return (isKnown && advised[a][p] != before[a][p]) || candidate.preferred;
  };
  return before != advised && chooseFrom(model, question, isIn, time, choice);
}

// The shape of a call of the direct family.
DirectShape directShapeOf(const CostModel& model, const Question& question, const Choice& choice) {
  const int ranks = model.facts.ranks;
  const uint64_t share = shareOf(question.operation, question.bytes, ranks);
  if (choice.protocol == Protocol::ll) {
    return directShape(ceilDivide(share, uint64_t{8}), model.facts.direct.blocks);
  }
  const bool twoShot = choice.algorithm == Algorithm::twoShot;
  const bool multiplies = question.reduction == device::Reduction::preMulSum;
  const WideCallShape shape = wideCallShape(
      model.facts.wide, {.kind = wideKindOf(question.operation, twoShot),
                         .ranks = ranks,
                         .bytes = twoShot ? partOfTwoShot(question.bytes, ranks) : share,
                         .type = question.type,
                         .multiplies = multiplies});
  return {shape.blocks, shape.threads};
}

void setShape(const CostModel& model, const Question& question, Choice& choice) {
  if (choice.algorithm == Algorithm::direct || choice.algorithm == Algorithm::twoShot) {
    const DirectShape shape = directShapeOf(model, question, choice);
    choice.channels = shape.blocks;
    choice.threads = shape.threads;
    return;
  }
  const auto a = static_cast<size_t>(choice.algorithm);
  const auto p = static_cast<size_t>(choice.protocol);
  const uint64_t traffic = trafficOf(model, question, choice.algorithm);
  int channels = model.facts.channels, workers = model.maxThreads[a][p];
  // Larger reductions are bound by what their threads can sum.
  constexpr uint64_t kSmallReduction = 8 << 20;
  const bool isSmall = device::isCopy(question.operation) || question.bytes <= kSmallReduction;
  if (choice.algorithm == Algorithm::ring && choice.protocol == Protocol::simple && isSmall) {
    workers = model.smallRingThreads;
  }
  const auto perThread = static_cast<uint64_t>(model.bytesPerThread[a][p]);
  // One thread of a rank takes the data out of all lines that go through sockets, so that further
  // channels cost it time: an all-reduce of 16 KB takes 51 us with one and 67 with several
  // (docs/results/2026-11-26-h100x2.md).
  const bool throughSockets = model.facts.network && model.facts.sockets;
  const uint64_t factor = throughSockets && choice.protocol == Protocol::ll ? 8 : 1;
  const uint64_t perChannel =
      std::max<uint64_t>(static_cast<uint64_t>(workers) * perThread * factor, 1);
  choice.load = static_cast<double>(traffic) / static_cast<double>(perChannel);
  if (choice.algorithm == Algorithm::nvls || choice.algorithm == Algorithm::nvlsTree) {
    const bool bounded = choice.algorithm == Algorithm::nvls && model.facts.nodes > 1;
    channels = bounded ? std::min(model.facts.nvlsChannels, channels) : model.facts.nvlsChannels;
    choice.load = channels;
  } else {
    channels = channelsOf(choice.load, channels);
    // Rounding up may leave nothing for the last channels.
    const uint64_t share = choice.algorithm == Algorithm::directTree
                               ? traffic
                               : shareOf(question.operation, question.bytes, model.facts.ranks);
    const uint64_t grains =
        std::max<uint64_t>(share / kGrainBytes + (share % kGrainBytes != 0 ? 1 : 0), 1);
    const uint64_t each = ceilDivide(grains, static_cast<uint64_t>(channels));
    channels = static_cast<int>(ceilDivide(grains, each));
    const bool shrinks = choice.algorithm != Algorithm::collNetDirect && channels == 1;
    while (shrinks && traffic < static_cast<uint64_t>(workers) * perThread && workers % 128 == 0) {
      workers /= 2;
    }
  }
  choice.channels = channels;
  // Trees and NVLS split a block, so that none of its threads are to spare.
  const bool whole = device::groupsOf(choice.algorithm) > 1 || choice.algorithm == Algorithm::pat;
  const int most = device::maxChannelThreads(choice.protocol);
  choice.threads = whole ? most
                         : std::clamp(workers + device::serviceThreads(choice.protocol),
                                      kFewestBlockThreads, most);
  choice.chunkBytes = model.facts.chunkBytes[p];
}

// The times of the allowed candidates, for a plug-in.
TimeTable tableFor(const CostModel& model, const Question& question) {
  TimeTable table;
  for (auto& row : table) row.fill(kExcluded);
  for (const CostModel::Candidate& candidate :
       model.candidates[static_cast<size_t>(question.operation)]) {
    const auto [algorithm, protocol] = std::pair(candidate.algorithm, candidate.protocol);
    const auto a = static_cast<size_t>(algorithm);
    if (!isAdvised(algorithm, protocol) || !candidate.allowed()) continue;
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
  int advisedChannels = 0;
  bool advised = false;
  if (advisor != nullptr) {
    const TimeTable before = tableFor(model, question);
    TimeTable times = before;
    advisedChannels = advisor->advise(question, times);
    advised = chooseByAdvice(model, question, before, times, choice);
  }
  if (!advised) chooseByModel(model, question, choice);
  choice.timeUs = timeOf(model, question, choice.algorithm, choice.protocol);
  setShape(model, question, choice);
  const bool ours = static_cast<int>(choice.algorithm) >= device::kNcclAlgorithms;
  if (advisor == nullptr || ours) return choice;
  if (advisedChannels > 0) {
    choice.channels = std::min(advisedChannels, model.facts.channels);
    choice.load = choice.channels;
  }
  const uint64_t chunk = advisor->adviseChunk(question, choice);
  if (chunk < choice.chunkBytes) {
    choice.chunkBytes =
        std::min(choice.chunkBytes, std::max(chunk / kGrainBytes * kGrainBytes, kGrainBytes));
  }
  return choice;
}

const Choice& ChoiceCache::choose(const CostModel& model, const Question& question) {
  const uint64_t hash = mix64(question.bytes + static_cast<uint64_t>(question.operation));
  Entry& entry = entries_[hash % kKept];
  if (entry.question != question) {
    entry = {question, tuning::choose(model, question)};
  }
  return entry.choice;
}

int channelsOf(double load, int channels) {
  return static_cast<int>(std::clamp(load, 1.0, static_cast<double>(channels)));
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
      if (!row.chosen && row.exclusion == Exclusion::none && !estimate.preferred &&
          (estimate.allowed || !choice.allowed)) {
        row.exclusion = Exclusion::onlyForced;
      }
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
                                       uint64_t highest, const Advisor* advisor) {
  const auto at = [&](uint64_t bytes) {
    question.bytes = bytes;
    return choose(model, question, advisor);
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

}  // namespace unisono::tuning
