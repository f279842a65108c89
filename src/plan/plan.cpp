// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "plan/collective_plan.h"
#include "plan/direct_plan.h"
#include "plan/message_choice.h"

namespace unisono::plan {
namespace {

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
  planCollectives(config, std::span(calls).subspan(parts.share > 0 ? 0 : 1, both ? 2 : 1), plan);
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
    planCollectives(config, {&call, 1}, plan);
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
    if (!run.empty()) planCollectives(config, run, plan);
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
