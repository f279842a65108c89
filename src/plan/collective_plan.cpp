// SPDX-License-Identifier: Apache-2.0
#include "plan/collective_plan.h"

#include <algorithm>

#include "base/math.h"
#include "device/multicast.h"

namespace unisono::plan {
namespace {

using device::CollectiveWork;
using device::Operation;

using tuning::kGrainBytes;

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
  ChannelPacker(int channels, uint64_t traffic) : channels_(channels) {
    share_ = (traffic + static_cast<uint64_t>(channels_) - 1) / static_cast<uint64_t>(channels_);
    share_ = std::max<uint64_t>(share_, 1);
  }

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
    // A span may be less than what one element moves. No part may be empty: its receivers would
    // offer their outputs, and the offers would stay until senders take them for those of later
    // calls.
    uint64_t low = std::max(elements((begin + 1) * share_ - position_), grain);
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
  int channels_;
  uint64_t share_;
  uint64_t position_ = 0;
};

// Nothing for algorithms without heads.
const HeadShape* headShapeOf(const CommConfig& config, device::Algorithm algorithm) {
  if (!device::usesHeads(algorithm)) return nullptr;
  return device::usesMulticast(algorithm) ? &config.multicast : &config.collnetDirect;
}

// Cuts the parts of a work into chunks of `chunkBytes` bytes and slices.
void cut(const CommConfig& config, uint64_t chunkBytes, CollectiveWork& work) {
  const auto size = static_cast<uint32_t>(device::elementBytes(work.reduction.type));
  const HeadShape* shape = headShapeOf(config, work.algorithm);
  const bool reducesAll = work.operation == Operation::allReduce;
  const bool circulates =
      reducesAll && (work.algorithm == device::Algorithm::ring || shape != nullptr);
  // What moves at once: a chunk for each rank, or for each head.
  const auto chunks = circulates
                          ? static_cast<uint64_t>(shape != nullptr ? shape->heads : config.ranks)
                          : uint64_t{1};
  const uint32_t slotBytes =
      shape != nullptr ? shape->slotBytes
                       : device::payloadOf(work.protocol, config.slotBytes[indexOf(work.protocol)]);
  const uint32_t slicesPerChunk =
      work.protocol == device::Protocol::simple && shape == nullptr ? config.slicesPerChunk : 1;
  if (shape != nullptr) {
    // A slot holds a chunk, or whole vectors of one for each node.
    const auto nodes = static_cast<uint64_t>(config.model->facts.nodes);
    chunkBytes = std::min(chunkBytes, reducesAll ? slotBytes : slotBytes / nodes / 16 * 16);
  } else if (work.protocol != device::Protocol::simple) {
    chunkBytes = std::min<uint64_t>(chunkBytes, slotBytes);  // these move whole chunks
  }
  work.chunkElements = static_cast<uint32_t>(chunkBytes) / size;

  const uint64_t round = work.chunkElements * chunks;
  auto lastChunk = [&](uint64_t part) {
    const uint64_t grain = 16 / size;
    const uint64_t even = ceilDivide(part % round, chunks);
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

CollectiveWork workOf(const CommConfig& config, const ChosenCall& call) {
  const Task& task = *call.task;
  CollectiveWork work{};
  const bool alone = config.ranks == 1;
  work.operation = alone ? Operation::local : operationOf(task.call);
  work.algorithm = alone ? device::kLocalAlgorithm : call.choice.algorithm;
  work.protocol = alone ? device::kLocalProtocol : call.choice.protocol;
  work.root = task.peer;
  work.reduction = task.reduction;
  work.input = task.input;
  work.output = task.output;
  work.count = task.count;
  work.offered = config.ranks > 1 && work.protocol == device::Protocol::simple &&
                 work.algorithm != device::Algorithm::directTree &&
                 offersOutput(config, task, work.algorithm);
  work.addressIsOpen = task.outputIsOpen;
  work.window = task.window;
  return work;
}

// What a collective over FIFOs, or over multicast, needs.
constexpr bool Needs::*needOf(device::Algorithm algorithm) {
  switch (algorithm) {
    case device::Algorithm::ring:
      return &Needs::rings;
    case device::Algorithm::tree:
      return &Needs::trees;
    case device::Algorithm::directTree:
      return &Needs::rails;
    case device::Algorithm::collNetChain:
      return &Needs::chains;
    case device::Algorithm::collNetDirect:
      return &Needs::collnetDirect;
    case device::Algorithm::nvls:
    case device::Algorithm::nvlsTree:
      return &Needs::multicast;
    default:
      return nullptr;
  }
}
template <device::Algorithm... kList>
constexpr bool haveNeeds(device::AlgorithmList<kList...>) {
  return ((needOf(kList) != nullptr) && ...);
}
static_assert(haveNeeds(device::CollectiveAlgorithms()), "an algorithm is missing in needOf");

bool usesCopyKernel(const ChosenCall& call) {
  return device::usesCopyKernel(call.choice.algorithm, call.choice.protocol,
                                operationOf(call.task->call));
}
}  // namespace

bool offersOutput(const CommConfig& config, const Task& task, device::Algorithm algorithm) {
  if (task.call != Call::allReduce && task.call != Call::allGather) return false;
  const auto ranks = static_cast<uint64_t>(config.ranks);
  const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
  const uint64_t result = task.call == Call::allGather ? bytes * ranks : bytes;
  if (algorithm == device::Algorithm::tree) return result >= config.resultBytes / 2;
  return result / ranks >= config.resultBytes;
}

bool canShareLaunch(const ChosenCall& a, const ChosenCall& b) {
  return a.choice.algorithm == b.choice.algorithm && a.choice.protocol == b.choice.protocol &&
         usesCopyKernel(a) == usesCopyKernel(b);
}

void planCollectives(const CommConfig& config, std::span<const ChosenCall> run, Plan& plan) {
  const HeadShape* shape = headShapeOf(config, run.front().choice.algorithm);
  while (!run.empty()) {
    const size_t size = std::min<size_t>(run.size(), device::kMaxCollectiveWorks);
    const std::span<const ChosenCall> calls = run.first(size);
    run = run.subspan(size);
    uint64_t traffic = 0;
    double load = 0;
    auto& launch = std::get<CollectiveLaunch>(
        plan.launches.emplace_back(std::in_place_type<CollectiveLaunch>));
    launch.arguments.works = 0;
    for (const ChosenCall& call : calls) {
      traffic += trafficOf(config, *call.task);
      load += call.choice.load;
      launch.threads = std::max(launch.threads, call.choice.threads);
    }
    const int channels = shape != nullptr ? shape->channels : config.channels;
    ChannelPacker packer(tuning::channelsOf(load, channels), traffic);
    for (const ChosenCall& call : calls) {
      CollectiveWork& work = launch.arguments.work[launch.arguments.works++];
      work = workOf(config, call);
      packer.place(trafficOf(config, *call.task), work);
      cut(config, call.choice.chunkBytes, work);
      launch.blocks = std::max(launch.blocks, work.firstChannel + work.channels);
      const auto need = needOf(work.algorithm);
      if (config.ranks > 1 && need != nullptr) plan.needs.*need = true;
    }
  }
}

std::array<uint64_t, device::kProtocols> chunkBytesOf(const CommConfig& config) {
  std::array<uint64_t, device::kProtocols> result{};
  for (int p = 0; p < device::kProtocols; p++) {
    const auto protocol = static_cast<device::Protocol>(p);
    const uint32_t slices = protocol == device::Protocol::simple ? config.slicesPerChunk : 1;
    const auto index = static_cast<size_t>(p);
    result[index] = uint64_t{device::payloadOf(protocol, config.slotBytes[index])} * slices;
  }
  return result;
}

CollectiveLaunch planCopy(int channels, void* to, const void* from, uint64_t bytes) {
  constexpr uint64_t kBytesPerChannel = 1 << 20;
  const uint64_t used =
      std::clamp<uint64_t>(bytes / kBytesPerChannel, 1, static_cast<uint64_t>(channels));
  const uint64_t part = roundUp(ceilDivide(bytes, used), kGrainBytes);
  CollectiveLaunch launch;
  launch.threads = device::kChannelThreads;
  launch.arguments.works = 1;
  CollectiveWork& work = launch.arguments.work[0];
  work = {};
  work.operation = Operation::local;
  work.algorithm = device::kLocalAlgorithm;
  work.protocol = device::kLocalProtocol;
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

}  // namespace unisono::plan
