// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "base/math.h"
#include "device/multicast.h"
#include "plan/direct_plan.h"
#include "plan/message_choice.h"

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

// Says whether the receivers of a call's result offer their outputs to an algorithm over Simple.
// The exchange takes 7 us with 2 ranks and 9 to 34 us with 4, which rings make up for from
// `resultBytes` of each rank's part on, and trees earlier. Broadcasts are faster without at every
// size (docs/results/2026-11-27-small-blocks.md).
bool offersOutput(const CommConfig& config, const Task& task, device::Algorithm algorithm) {
  if (task.call != Call::allReduce && task.call != Call::allGather) return false;
  const auto ranks = static_cast<uint64_t>(config.ranks);
  const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
  const uint64_t result = task.call == Call::allGather ? bytes * ranks : bytes;
  if (algorithm == device::Algorithm::tree) return result >= config.resultBytes / 2;
  return result / ranks >= config.resultBytes;
}

// A collective and what carries it.
struct ChosenCall {
  const Task* task;
  tuning::Choice choice;
};

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

// Of the direct family over LL128.
bool isWide(const tuning::Choice& choice) {
  return choice.protocol == device::Protocol::ll128 &&
         (choice.algorithm == device::Algorithm::direct ||
          choice.algorithm == device::Algorithm::twoShot);
}

// What a collective of the direct family needs.
Needs directNeeds(const CommConfig& config, Call call, const tuning::Choice& choice) {
  Needs needs;
  (isWide(choice) ? needs.wide : needs.direct) = everyPeer(config);
  if (call == Call::allReduce) return needs;
  // A large call that follows must not wait for other ranks. That of all-reduce may.
  needs.rings = true;
  const tuning::Estimate& wide =
      config.model->of(operationOf(call), device::Algorithm::direct, device::Protocol::ll128);
  if (config.wide.blocks > 0 && wide.exclusion == tuning::Exclusion::none) {
    needs.wide = everyPeer(config);
  }
  return needs;
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
bool canShareLaunch(const ChosenCall& a, const ChosenCall& b) {
  return a.choice.algorithm == b.choice.algorithm && a.choice.protocol == b.choice.protocol &&
         usesCopyKernel(a) == usesCopyKernel(b);
}

// A run of collectives that share launches: they have the same kernel.
void planRun(const CommConfig& config, std::span<const ChosenCall> run, Plan& plan) {
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

void addDirectLaunch(const CommConfig& config, const Task& task, Plan& plan) {
  auto& launch =
      std::get<DirectLaunch>(plan.launches.emplace_back(std::in_place_type<DirectLaunch>));
  beginDirect(config, launch);
  addDirect(config, directWork(config, task), launch);
}

// An all-reduce over several nodes by Algorithm::directTree: a reduce-scatter inside each node, an
// all-reduce along each rail, and an all-gather inside each node. What does not divide among the
// ranks of a node is reduced by all of them, inside the node and along every rail, in the same
// order.
void planDirectTree(const CommConfig& config, const ChosenCall& call, Plan& plan) {
  const Task& task = *call.task;
  const uint64_t size = device::elementBytes(task.reduction.type);
  const auto ranks = static_cast<uint64_t>(localRanks(config));
  const auto parts =
      tuning::railParts(config.model->facts.direct, shareBytes(task), localRanks(config));
  const uint64_t restAt = parts.share * ranks;
  const uint64_t ownAt = parts.share * static_cast<uint64_t>(localRank(config));
  const auto* const input = static_cast<const std::byte*>(task.input);
  auto* const output = static_cast<std::byte*>(task.output);

  // Operands are scaled at the first step, results at the last one.
  const device::ReductionSpec sum{task.reduction.type, device::Reduction::sum, false, 0};
  Task inside = task, along = task;
  if (task.reduction.reduction == device::Reduction::preMulSum) along.reduction = sum;
  if (task.reduction.reduction == device::Reduction::sumPostDivide) inside.reduction = sum;

  Task ownShare = along, rest = along;
  if (parts.share > 0) {
    Task scatter = inside;
    scatter.call = Call::reduceScatter;
    scatter.output = output + ownAt;
    scatter.count = parts.share / size;
    plan.launches.emplace_back(wideLaunch(config, scatter, device::Algorithm::direct));
    plan.needs.wide |= everyPeer(config);
    ownShare.input = ownShare.output = scatter.output;
    ownShare.count = scatter.count;
  }
  if (parts.rest > 0) {
    Task reduce = inside;
    reduce.input = input + restAt;
    reduce.output = output + restAt;
    reduce.count = parts.rest / size;
    addDirectLaunch(config, reduce, plan);
    plan.needs.direct |= everyPeer(config);
    rest.input = rest.output = reduce.output;
    rest.count = reduce.count;
  }
  tuning::Choice withoutLoad = call.choice;
  withoutLoad.load = 0;
  const ChosenCall calls[] = {{&ownShare, call.choice}, {&rest, withoutLoad}};
  const bool both = parts.share > 0 && parts.rest > 0;
  planRun(config, std::span(calls).subspan(parts.share > 0 ? 0 : 1, both ? 2 : 1), plan);
  if (parts.share > 0) {
    Task gather = along;
    gather.call = Call::allGather;
    gather.input = output + ownAt;
    gather.count = ownShare.count;
    gather.reduction = sum;
    plan.launches.emplace_back(wideLaunch(config, gather, device::Algorithm::direct));
  }
}

}  // namespace

NodeRanks::NodeRanks(std::vector<int> nodeOfRanks) : nodeOf(std::move(nodeOfRanks)) {
  for (size_t rank = 0; rank < nodeOf.size(); rank++) {
    const auto node = static_cast<size_t>(nodeOf[rank]);
    if (ranks.size() <= node) ranks.resize(node + 1);
    place.push_back(static_cast<int>(ranks[node].size()));
    ranks[node].push_back(static_cast<int>(rank));
  }
}

std::shared_ptr<const NodeRanks> nodeRanksOf(const topology::Joined& joined) {
  if (joined.nodes() == 1) return nullptr;
  std::vector<int> nodeOf;
  for (int rank = 0; rank < joined.ranks(); rank++) nodeOf.push_back(joined.nodeOf(rank));
  return std::make_shared<const NodeRanks>(std::move(nodeOf));
}

int blocksOf(const Launch& launch) {
  struct Count {
    int operator()(const CollectiveLaunch& one) const { return one.blocks; }
    int operator()(const SendReceiveLaunch& one) const { return one.blocks; }
    int operator()(const DirectLaunch& one) const { return one.blocks; }
    int operator()(const MessagesLaunch& one) const { return one.blocks(); }
    int operator()(const WideLaunch& one) const { return one.blocks; }
    int operator()(const WideMessagesLaunch& one) const {
      return one.arguments.wide.launchBlocks();
    }
    int operator()(const BarrierLaunch&) const { return 1; }
    int operator()(const CopyLaunch&) const { return 0; }
  };
  return std::visit(Count{}, launch);
}

bool usesCopyEngines(const CommConfig& config, const Task& task) {
  if (task.symmetric == nullptr) return false;
  return exclusionOf(config, MessagePath::copyEngines,
                     {.call = task.call, .bytes = shareBytes(task), .symmetric = true}) ==
         MessageExclusion::none;
}

OfferedBuffers buffersOffered(const CommConfig& config, const Task& task) {
  OfferedBuffers offered;
  const uint64_t bytes = shareBytes(task);
  // No path offers less than these two.
  const auto peers = static_cast<uint64_t>(config.ranks - 1);
  if (consistsOfMessages(task.call) || (!offersOutput(config, task, device::Algorithm::tree) &&
                                        bytes * peers < config.wide.offerBytes)) {
    return offered;
  }
  const tuning::Choice choice = choiceOf(config, task);
  const uint64_t all = bytes * static_cast<uint64_t>(config.ranks);
  bool offersInput = false, offersResult = false;
  if (isWide(choice)) {
    const WideLaunch launch = wideLaunch(config, task, choice.algorithm);
    const device::DirectWork& work = launch.arguments.work;
    if (!launch.arguments.offers) return offered;
    offersInput = work.reduces && work.to != 0;
    offersResult = (!work.reduces || launch.arguments.twoShot) && work.from != 0;
  } else if (choice.algorithm != device::Algorithm::directTree) {
    offersResult =
        choice.protocol == device::Protocol::simple && offersOutput(config, task, choice.algorithm);
  }
  if (offersInput) offered.inputBytes = task.call == Call::reduceScatter ? all : bytes;
  if (offersResult) offered.outputBytes = task.call == Call::allGather ? all : bytes;
  return offered;
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

tuning::Choice choiceOf(const CommConfig& config, const Task& task) {
  if (task.choice) return *task.choice;
  tuning::Question question{operationOf(task.call), shareBytes(task), task.reduction.type,
                            task.reduction.reduction};
  if (task.call == Call::allGather || task.call == Call::reduceScatter) {
    question.bytes *= static_cast<uint64_t>(config.ranks);
  }
  // An advisor may change its mind.
  if (config.choices != nullptr && config.advisor == nullptr) {
    return config.choices->choose(*config.model, question);
  }
  return tuning::choose(*config.model, question, config.advisor.get());
}

void choose(const CommConfig& config, Task& task) {
  if (!consistsOfMessages(task.call) && config.ranks > 1 && task.count != 0) {
    task.choice = choiceOf(config, task);
  }
}

namespace {

// Every rank stores into the outputs of all, between two barriers: before the first, earlier work
// of a rank may use its output, and after the second the data are there. The copies of a rank begin
// with the next one, so that no two ranks store into the same at a time.
void planCopies(const CommConfig& config, const Task& task, Plan& plan) {
  const SymmetricWindow& window = *task.symmetric;
  const uint64_t bytes = shareBytes(task);
  const auto me = static_cast<uint64_t>(config.rank);
  const auto ranks = static_cast<uint64_t>(config.ranks);
  const auto offset =
      static_cast<uint64_t>(static_cast<std::byte*>(task.output) - window.bases[me]) + me * bytes;
  CopyLaunch launch;
  for (uint64_t i = 1; i <= ranks; i++) {
    const uint64_t peer = (me + i) % ranks;
    const std::byte* from = static_cast<const std::byte*>(task.input);
    if (task.call == Call::allToAll) from += peer * bytes;
    std::byte* to = window.bases[peer] + offset;
    if (to != from) launch.copies.push_back({to, from, bytes});
  }
  BarrierLaunch barrier{};
  barrier.arguments.rank = config.rank;
  barrier.arguments.ranks = config.ranks;
  plan.launches.emplace_back(barrier);
  plan.launches.emplace_back(std::move(launch));
  plan.launches.emplace_back(barrier);
  plan.needs.direct |= everyPeer(config);
}

// The plan of one collective, without the lists that groups need.
Plan planCollective(const CommConfig& config, const Task& task, std::vector<Launch> storage) {
  Plan plan;
  plan.launches = std::move(storage);
  if (task.count == 0) return plan;
  if (usesCopyEngines(config, task)) {
    planCopies(config, task, plan);
    return plan;
  }
  const ChosenCall call{&task, choiceOf(config, task)};
  if (isWide(call.choice)) {
    plan.launches.emplace_back(wideLaunch(config, task, call.choice.algorithm));
    plan.needs = directNeeds(config, task.call, call.choice);
  } else if (call.choice.algorithm == device::Algorithm::direct) {
    addDirectLaunch(config, task, plan);
    plan.needs = directNeeds(config, task.call, call.choice);
  } else if (call.choice.algorithm == device::Algorithm::directTree) {
    planDirectTree(config, call, plan);
  } else {
    planRun(config, {&call, 1}, plan);
  }
  return plan;
}

// Appends `part` to `plan`.
void append(Plan part, Plan& plan) {
  std::move(part.launches.begin(), part.launches.end(), std::back_inserter(plan.launches));
  plan.needs.rings |= part.needs.rings;
  plan.needs.trees |= part.needs.trees;
  plan.needs.rails |= part.needs.rails;
  plan.needs.multicast |= part.needs.multicast;
  plan.needs.chains |= part.needs.chains;
  plan.needs.collnetDirect |= part.needs.collnetDirect;
  plan.needs.direct |= part.needs.direct;
  plan.needs.wide |= part.needs.wide;
  plan.needs.peers.insert(plan.needs.peers.end(), part.needs.peers.begin(), part.needs.peers.end());
}

// A ring all-reduce begins every chunk at another rank. With a fixed order it is a reduction along
// all ranks to the last one and a broadcast from there, each in launches of its own.
Plan planInFixedOrder(const CommConfig& config, const std::vector<Task>& tasks) {
  std::vector<Task> first, second;
  for (const Task& task : tasks) {
    if (task.call != Call::allReduce) {
      (consistsOfMessages(task.call) ? second : first).push_back(task);
      continue;
    }
    Task& reduce = first.emplace_back(task);
    reduce.call = Call::reduce;
    reduce.peer = config.ranks - 1;
    reduce.outputIsOpen = false;
    reduce.window = {};
    reduce.choice.reset();
    Task& broadcast = second.emplace_back(task);
    broadcast.call = Call::broadcast;
    broadcast.input = task.output;
    broadcast.peer = config.ranks - 1;
    broadcast.reduction = {task.reduction.type, device::Reduction::sum, false, 0};
    broadcast.choice.reset();
  }
  Plan plan = makePlan(config, first);
  append(makePlan(config, second), plan);
  return plan;
}

}  // namespace

Plan makePlan(const CommConfig& config, const std::vector<Task>& tasks,
              std::vector<Launch> storage) {
  storage.clear();
  const auto isAllReduce = [](const Task& task) { return task.call == Call::allReduce; };
  if (config.fixedOrder && config.ranks > 1 && std::ranges::any_of(tasks, isAllReduce)) {
    return planInFixedOrder(config, tasks);
  }
  if (tasks.size() == 1 && !consistsOfMessages(tasks[0].call)) {
    return planCollective(config, tasks[0], std::move(storage));
  }
  Plan plan;
  plan.launches = std::move(storage);
  std::vector<ChosenCall> run;
  bool hasMessages = false;
  DirectPacker direct(config);
  auto endRun = [&] {
    if (!run.empty()) planRun(config, run, plan);
    run.clear();
  };
  auto endDirect = [&] {
    for (const DirectLaunch& launch : direct.take()) plan.launches.emplace_back(launch);
  };
  for (const Task& task : tasks) {
    if (task.count != 0 && usesCopyEngines(config, task)) {
      endRun();
      endDirect();
      planCopies(config, task, plan);
      continue;
    }
    if (consistsOfMessages(task.call)) {
      hasMessages = true;
      continue;
    }
    if (task.count == 0) continue;
    const tuning::Choice choice = choiceOf(config, task);
    if (choice.algorithm == device::Algorithm::direct ||
        choice.algorithm == device::Algorithm::twoShot) {
      endRun();
      const Needs needs = directNeeds(config, task.call, choice);
      plan.needs.rings |= needs.rings;
      plan.needs.direct |= needs.direct;
      plan.needs.wide |= needs.wide;
      if (isWide(choice)) {
        endDirect();
        plan.launches.emplace_back(wideLaunch(config, task, choice.algorithm));
      } else {
        direct.add(directWork(config, task));
      }
    } else if (choice.algorithm == device::Algorithm::directTree) {
      endRun();
      endDirect();
      planDirectTree(config, {&task, choice}, plan);
    } else {
      endDirect();
      const ChosenCall call{&task, choice};
      if (!run.empty() && !canShareLaunch(run.back(), call)) endRun();
      run.push_back(call);
    }
  }
  endRun();
  endDirect();
  if (hasMessages) planMessages(config, tasks, plan);
  return plan;
}

}  // namespace unisono::plan
