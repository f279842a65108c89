// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.h"

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "plan/direct_plan.h"

namespace unisono::plan {
namespace {

using device::CollectiveWork;
using device::Operation;

// Parts of a collective start at multiples of this many bytes, so that vector accesses stay
// aligned.
constexpr uint64_t kGrainBytes = 512;

bool isMessage(Call call) {
  return call == Call::send || call == Call::receive || call == Call::allToAll ||
         call == Call::gather || call == Call::scatter;
}

Operation operationOf(Call call) {
  switch (call) {
    case Call::allReduce:
      return Operation::allReduce;
    case Call::allGather:
      return Operation::allGather;
    case Call::reduceScatter:
      return Operation::reduceScatter;
    case Call::broadcast:
      return Operation::broadcast;
    default:
      return Operation::reduce;
  }
}

// Returns a number that is proportional to the bytes that pass through each rank's ring connection,
// with the same factor for all calls.
uint64_t trafficOf(const CommConfig& config, const Task& task) {
  const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
  const uint64_t ranks = static_cast<uint64_t>(config.ranks);
  switch (task.call) {
    case Call::allReduce:
      return 2 * bytes;
    case Call::allGather:
    case Call::reduceScatter:
      return ranks * bytes;
    default:
      return bytes;
  }
}

// Lays a run of collectives end to end and cuts it into equal shares, one per channel. A call may
// begin in the middle of one channel and end in the middle of another, so that small calls of a
// group share launches and no channel idles.
class ChannelPacker {
 public:
  ChannelPacker(const CommConfig& config, uint64_t traffic)
      : shape_(config), channels_(tuning::chooseChannels(config.tuningInput, traffic)) {
    share_ = (traffic + static_cast<uint64_t>(channels_) - 1) / static_cast<uint64_t>(channels_);
    share_ = std::max<uint64_t>(share_, 1);
  }

  int channels() const { return channels_; }

  void place(uint64_t traffic, CollectiveWork& work) {
    const uint64_t bytesPerElement = device::elementBytes(work.reduction.type);
    const uint64_t grain = kGrainBytes / bytesPerElement;
    const uint64_t last = static_cast<uint64_t>(channels_) - 1;
    const uint64_t begin = std::min(position_ / share_, last);
    const uint64_t end = std::min((position_ + traffic - 1) / share_, last);
    // Elements that stand for a span of traffic.
    auto elements = [&](uint64_t span) {
      const double exact = static_cast<double>(work.count) * static_cast<double>(span) /
                           static_cast<double>(traffic);
      return (static_cast<uint64_t>(exact) + grain - 1) / grain * grain;
    };
    uint64_t low = elements((begin + 1) * share_ - position_);
    // With thousands of ranks a share may be less than what one element moves.
    const uint64_t middle = std::max(elements(share_), grain);
    uint64_t channels = end - begin + 1;
    if (channels == 1 || low >= work.count) {
      channels = 1;
      low = work.count;
    } else {
      // Rounding up may leave nothing for the last channels.
      channels = std::min(channels, 1 + (work.count - low + middle - 1) / middle);
    }
    work.firstChannel = static_cast<uint16_t>(begin);
    work.channels = static_cast<uint16_t>(channels);
    work.low = low;
    work.middle = middle;
    work.high = channels == 1 ? low : work.count - low - (channels - 2) * middle;
    position_ += traffic;
  }

 private:
  const CommConfig& shape_;
  int channels_;
  uint64_t share_;
  uint64_t position_ = 0;
};

// Cuts the parts of a work into chunks and slices.
void cut(const CommConfig& config, CollectiveWork& work) {
  const auto size = static_cast<uint32_t>(device::elementBytes(work.reduction.type));
  const uint64_t ranks = static_cast<uint64_t>(config.ranks);
  const bool circulates =
      work.operation == Operation::allReduce &&
      work.algorithm == device::Algorithm::ring;  // a chunk for each rank at once
  const uint32_t slotBytes =
      device::payloadOf(work.protocol, config.slotBytes[indexOf(work.protocol)]);
  // The data of the protocols with lines arrive piece by piece, so that their chunks are one slot.
  const uint32_t slicesPerChunk =
      work.protocol == device::Protocol::simple ? config.slicesPerChunk : 1;
  work.chunkElements = slotBytes * slicesPerChunk / size;

  const uint64_t round = work.chunkElements * (circulates ? ranks : 1);
  auto lastChunk = [&](uint64_t part) {
    const uint64_t grain = 16 / size;
    const uint64_t even = ceilDivide(part % round, circulates ? ranks : 1);
    return static_cast<uint32_t>(std::min<uint64_t>(roundUp(even, grain), work.chunkElements));
  };
  work.lastLow = lastChunk(work.low);
  work.lastMiddle = lastChunk(work.middle);
  work.lastHigh = lastChunk(work.high);

  // Equal slices in the largest chunk that occurs; a small one is not worth cutting.
  constexpr uint64_t kSmallestSlice = 64 << 10;
  const uint64_t largest = std::max({work.low, work.channels > 2 ? work.middle : 0, work.high});
  const uint64_t chunk = largest < round ? lastChunk(largest) : work.chunkElements;
  const uint64_t slices =
      std::clamp<uint64_t>(ceilDivide(chunk * size, kSmallestSlice), 1, slicesPerChunk);
  const uint64_t slice = roundUp(ceilDivide(chunk * size, slices), kGrainBytes);
  work.sliceElements = static_cast<uint32_t>(std::min<uint64_t>(slice, slotBytes)) / size;
}

// What carries a call that takes no direct path.
struct PathOfCall {
  device::Algorithm algorithm;
  device::Protocol protocol;
};

PathOfCall pathOf(const CommConfig& config, const Task& task) {
  using device::Algorithm;
  using device::Protocol;
  const tuning::TuningInput& input = config.tuningInput;
  const Operation operation = operationOf(task.call);
  const auto allows = [&](auto which) { return input.allowed.allows(operation, which); };
  PathOfCall path{Algorithm::ring, Protocol::simple};
  if (config.ranks == 1) return path;
  if (operation == Operation::allReduce && !allows(Algorithm::ring) && allows(Algorithm::tree)) {
    path.algorithm = Algorithm::tree;
  }
  const uint64_t traffic = trafficOf(config, task);
  if (allows(Protocol::ll) && traffic <= input.lowLatencyMaxBytes) {
    path.protocol = Protocol::ll;
  } else if (!allows(Protocol::simple)) {
    path.protocol = allows(Protocol::ll128) ? Protocol::ll128 : Protocol::ll;
  }
  return path;
}

CollectiveWork workOf(const CommConfig& config, const Task& task) {
  CollectiveWork work{};
  work.operation = config.ranks == 1 ? Operation::local : operationOf(task.call);
  const PathOfCall path = pathOf(config, task);
  work.algorithm = path.algorithm;
  work.protocol = path.protocol;
  work.root = task.peer;
  work.reduction = task.reduction;
  work.input = task.input;
  work.output = task.output;
  work.count = task.count;
  work.offered =
      config.ranks > 1 && path.protocol == device::Protocol::simple && offersOutput(config, task);
  work.addressIsOpen = task.outputIsOpen;
  work.window = task.window;
  return work;
}

// A run of collectives that share launches, of blocks with `groups` thread groups.
void planRun(const CommConfig& config, const std::vector<Task>& run, int groups, Plan& plan) {
  for (size_t first = 0; first < run.size(); first += device::kMaxCollectiveWorks) {
    const size_t size = std::min<size_t>(run.size() - first, device::kMaxCollectiveWorks);
    uint64_t traffic = 0;
    for (size_t i = 0; i < size; i++) traffic += trafficOf(config, run[first + i]);
    ChannelPacker packer(config, traffic);
    CollectiveLaunch launch{};
    launch.arguments.groups = groups;
    for (size_t i = 0; i < size; i++) {
      CollectiveWork& work = launch.arguments.work[launch.arguments.works++];
      work = workOf(config, run[first + i]);
      packer.place(trafficOf(config, run[first + i]), work);
      cut(config, work);
      launch.blocks = std::max(launch.blocks, work.firstChannel + work.channels);
      if (config.ranks > 1) {
        (work.algorithm == device::Algorithm::tree ? plan.needs.trees : plan.needs.rings) = true;
      }
    }
    plan.launches.emplace_back(launch);
  }
}

}  // namespace

bool offersOutput(const CommConfig& config, const Task& task) {
  const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
  switch (task.call) {
    case Call::allReduce:
    case Call::broadcast:
      return bytes >= config.directBytes;
    case Call::allGather:
      return bytes * static_cast<uint64_t>(config.ranks) >= config.directBytes;
    default:
      return false;
  }
}

CollectiveLaunch planCopy(int channels, void* to, const void* from, uint64_t bytes) {
  constexpr uint64_t kBytesPerChannel = 1 << 20;
  const uint64_t used =
      std::clamp<uint64_t>(bytes / kBytesPerChannel, 1, static_cast<uint64_t>(channels));
  const uint64_t part = roundUp(ceilDivide(bytes, used), kGrainBytes);
  CollectiveLaunch launch{};
  launch.arguments.works = 1;
  launch.arguments.groups = 1;
  CollectiveWork& work = launch.arguments.work[0];
  work.operation = Operation::local;
  work.reduction.type = device::DataType::uint8;
  work.input = from;
  work.output = to;
  work.count = bytes;
  work.channels = static_cast<uint16_t>(ceilDivide(bytes, part));
  work.low = std::min(part, bytes);
  work.middle = part;
  work.high = bytes - part * (work.channels - 1u);
  launch.blocks = work.channels;
  return launch;
}

Plan makePlan(const CommConfig& config, const std::vector<Task>& tasks) {
  Plan plan;
  std::vector<Task> run, messages;
  int groups = 1;  // of the run
  DirectPacker direct(config);
  auto endRun = [&] {
    if (!run.empty()) planRun(config, run, groups, plan);
    run.clear();
  };
  auto endDirect = [&] {
    for (DirectLaunch& launch : direct.take()) {
      plan.launches.emplace_back(std::move(launch));
      plan.needs.direct = everyPeer(config);
    }
  };
  for (const Task& task : tasks) {
    if (isMessage(task.call)) {
      messages.push_back(task);
    } else if (task.count == 0) {
      continue;
    } else if (chooseDirect(config, task.call, shareBytes(task))) {
      endRun();
      // A large call that follows must not wait for other ranks. That of all-reduce may.
      plan.needs.rings = plan.needs.rings || task.call != Call::allReduce;
      direct.add(directWork(config, task));
    } else {
      endDirect();
      const int needed = device::groupsOf(pathOf(config, task).algorithm);
      if (needed != groups) endRun();
      groups = needed;
      run.push_back(task);
    }
  }
  endRun();
  endDirect();
  if (!messages.empty()) planMessages(config, messages, plan);
  return plan;
}

}  // namespace unisono::plan
