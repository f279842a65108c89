// SPDX-License-Identifier: Apache-2.0
#include "plan/direct_plan.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "plan/message_choice.h"

namespace unisono::plan {
namespace {

using device::DirectPeers;
using device::DirectWork;

// Lines to and from each peer that one launch may move.
uint32_t linesPerLaunch(const CommConfig& config) {
  return (uint32_t{1} << config.directLineBits) / device::kDirectShares;
}

// One rank of this node, unless it is this one.
DirectPeers peersOf(const CommConfig& config, int rank) {
  if (rank == config.rank) return 0;
  return static_cast<DirectPeers>(1u << localPeerOf(config, rank));
}

bool isWhole(const DirectWork& work) {
  const auto bits = reinterpret_cast<uint64_t>(work.input) |
                    reinterpret_cast<uint64_t>(work.output) | work.inputBytes | work.outputBytes |
                    work.inputStride | work.outputStride;
  return bits % 8 == 0;
}

}  // namespace

DirectPeers everyPeer(const CommConfig& config) {
  return static_cast<DirectPeers>((1u << (localRanks(config) - 1)) - 1);
}

uint64_t shareBytes(const Task& task) {
  return task.count * device::elementBytes(task.reduction.type);
}

bool sendsWide(const CommConfig& config) {
  const MessageExclusion exclusion = exclusionOf(config, MessagePath::directLl128, {.bytes = 1});
  return exclusion == MessageExclusion::none || exclusion == MessageExclusion::threshold ||
         exclusion == MessageExclusion::slower;
}

bool isWideMessage(const CommConfig& config, uint64_t bytes) {
  return carries(config, MessagePath::directLl128, bytes);
}

bool isWideMessages(const CommConfig& config, const Task& task) {
  return hasOwnLaunch(config, task.call) &&
         carries(config, MessagePath::directLl128, shareBytes(task), task.call);
}

bool canBeInPlace(const CommConfig& config, const Task& task) {
  return !usesCopyEngines(config, task) && config.nodes == nullptr &&
         (carries(config, MessagePath::directLl, shareBytes(task), task.call) ||
          isWideMessages(config, task));
}

DirectWork directWork(const CommConfig& config, const Task& task) {
  const auto bytes = static_cast<uint32_t>(shareBytes(task));
  const bool isRoot = config.rank == task.peer;
  DirectWork work{};
  work.input = static_cast<const std::byte*>(task.input);
  work.output = static_cast<std::byte*>(task.output);
  work.inputBytes = work.outputBytes = bytes;
  work.reduction = task.reduction;
  const DirectPeers all = everyPeer(config), root = peersOf(config, task.peer);
  work.to = work.from = all;
  switch (task.call) {
    case Call::allReduce:
      work.reduces = true;
      break;
    case Call::reduceScatter:
      work.reduces = true;
      work.inputStride = bytes;
      break;
    case Call::reduce:
      work.reduces = true;
      work.to = root;
      work.from = isRoot ? all : 0;
      break;
    case Call::allGather:
      work.outputStride = bytes;
      work.own = true;
      break;
    case Call::allToAll:
      work.inputStride = work.outputStride = bytes;
      work.own = true;
      break;
    case Call::broadcast:
    case Call::scatter:
      work.inputStride = task.call == Call::scatter ? bytes : 0;
      work.to = isRoot ? all : 0;
      work.from = root;
      work.own = isRoot;
      break;
    case Call::gather:
      work.outputStride = bytes;
      work.to = root;
      work.from = isRoot ? all : 0;
      work.own = isRoot;
      break;
    case Call::send:
    case Call::receive:
      break;
  }
  const auto me = static_cast<uint64_t>(localRank(config));
  if (work.own)
    work.own = work.input + me * work.inputStride != work.output + me * work.outputStride;
  // What a rank passes for a buffer that it does not need says nothing.
  if (work.to == 0 && !work.own && !work.reduces) work.input = nullptr;
  if (work.from == 0 && !work.own) work.output = nullptr;
  work.whole = isWhole(work);
  return work;
}

DirectWork directWork(const CommConfig& config, const DirectMessages& messages) {
  DirectWork work{};
  if (messages.to) work.to = peersOf(config, *messages.to);
  if (messages.from) work.from = peersOf(config, *messages.from);
  work.input = messages.input;
  work.output = messages.output;
  work.inputBytes = static_cast<uint32_t>(messages.inputBytes);
  work.outputBytes = static_cast<uint32_t>(messages.outputBytes);
  work.reduction = {device::DataType::uint8, device::Reduction::sum, false, 0};
  work.own = messages.to == config.rank && messages.input != messages.output;
  work.whole = isWhole(work);
  return work;
}

WideLaunch wideLaunch(const CommConfig& config, const Task& task, device::Algorithm algorithm) {
  WideLaunch launch;
  device::WideArguments& arguments = launch.arguments;
  DirectWork& work = arguments.work;
  work = directWork(config, task);
  arguments.endBytes = ~uint64_t{0};
  arguments.twoShot = algorithm == device::Algorithm::twoShot;
  if (arguments.twoShot) {
    arguments.endBytes = shareBytes(task);
    work.inputStride = work.outputStride =
        tuning::partOfTwoShot(arguments.endBytes, localRanks(config));
    work.inputBytes = work.outputBytes = static_cast<uint32_t>(work.inputStride);
  }
  const bool isMessages = consistsOfMessages(task.call);
  const tuning::WideCallShape shape = tuning::wideCallShape(
      config.wide,
      {.kind = isMessages ? tuning::WideKind::message
                          : tuning::wideKindOf(operationOf(task.call), arguments.twoShot),
       .ranks = localRanks(config),
       .bytes = work.inputBytes,
       .type = work.reduction.type,
       .multiplies = task.reduction.reduction == device::Reduction::preMulSum,
       // The tables of windows have the ranks of all nodes.
       .hasWindows = config.nodes == nullptr});
  arguments.offers = shape.offers;
  arguments.ownInput = task.inputWindow;
  arguments.ownOutput = task.window;
  arguments.inputIsOpen = task.inputIsOpen;
  arguments.outputIsOpen = task.outputIsOpen;
  arguments.rank = localRank(config);
  arguments.ranks = localRanks(config);
  arguments.blocks = config.wide.blocks;
  arguments.slotLines = config.wide.slotLines;
  arguments.passLines = shape.passLines;
  const uint64_t lines = ceilDivide(uint64_t{work.inputBytes}, uint64_t{device::kWideLineData});
  arguments.passes = static_cast<uint32_t>(ceilDivide(lines, uint64_t{shape.passLines}));
  arguments.teams = device::WarpDivisor::of(shape.teams);
  launch.blocks = shape.blocks;
  launch.threads = shape.threads;
  return launch;
}

void beginDirect(const CommConfig& config, DirectLaunch& launch) {
  launch.arguments.works = 0;
  launch.arguments.rank = localRank(config);
  launch.arguments.ranks = localRanks(config);
  launch.arguments.lineBits = config.directLineBits;
}

void addDirect(const CommConfig& config, const DirectWork& work, DirectLaunch& launch) {
  const uint32_t lines = device::linesOf(std::max(work.inputBytes, work.outputBytes));
  const tuning::DirectShape shape = tuning::directShape(lines, config.directBlocks);
  DirectWork& added = launch.arguments.work[launch.arguments.works++];
  added = work;
  // Blocks of their own for each work while there are any.
  added.blocks = static_cast<uint8_t>(shape.blocks);
  added.firstBlock = static_cast<uint8_t>(launch.blocks % config.directBlocks);
  launch.blocks += shape.blocks;
  launch.threads = std::max(launch.threads, shape.threads);
}

void DirectPacker::begin() {
  beginDirect(config_, launches_.emplace_back());
  lines_.assign(static_cast<size_t>(localRanks(config_) - 1), {});
}

void DirectPacker::add(const DirectWork& work) {
  const int peers = localRanks(config_) - 1;
  const auto after = [&](int peer) {
    device::DirectPosition lines = lines_[static_cast<size_t>(peer)];
    if ((work.to >> peer & 1) != 0) lines.sent += device::linesOf(work.inputBytes);
    if ((work.from >> peer & 1) != 0) lines.received += device::linesOf(work.outputBytes);
    return lines;
  };
  const uint32_t most = linesPerLaunch(config_);
  bool fits = !launches_.empty() && launches_.back().arguments.works < device::kMaxDirectWorks;
  for (int peer = 0; fits && peer < peers; peer++) {
    const device::DirectPosition lines = after(peer);
    fits = lines.sent <= most && lines.received <= most;
  }
  if (!fits) begin();
  for (int peer = 0; peer < peers; peer++) lines_[static_cast<size_t>(peer)] = after(peer);
  addDirect(config_, work, launches_.back());
}

std::vector<DirectLaunch> DirectPacker::take() {
  for (DirectLaunch& launch : launches_) {
    launch.blocks = std::min(launch.blocks, config_.directBlocks);
  }
  return std::exchange(launches_, {});
}

device::DirectMessage wideMessage(const CommConfig& config, int peer, bool sends, std::byte* buffer,
                                  uint64_t bytes) {
  const tuning::WideShape shape = wideMessageShape(config, bytes);
  if (shape.passLines > device::kMaxPassLines) {
    throw internalError("A pass over LL128 has {} lines", shape.passLines).rank(config.rank);
  }
  return {buffer, static_cast<uint32_t>(bytes),       static_cast<uint8_t>(peer),
          sends,  static_cast<uint8_t>(shape.blocks), static_cast<uint8_t>(shape.passLines - 1)};
}

device::WideStreams wideStreamsOf(const CommConfig& config,
                                  std::span<const device::DirectMessage> messages, int threads) {
  device::WideStreams streams{};
  streams.windowBlocks = config.wide.blocks;
  streams.slotLines = config.wide.slotLines;
  for (const device::DirectMessage& message : messages) {
    const bool receivesOwn = message.peer == localRanks(config) - 1 && !message.sends;
    if (message.blocks == 0 || receivesOwn) continue;
    streams.blocks = std::max<int32_t>(streams.blocks, message.blocks);
    const auto stream = static_cast<uint8_t>(2 * message.peer + (message.sends ? 1 : 0));
    uint8_t* const end = streams.stream + streams.streams;
    if (std::find(streams.stream, end, stream) != end) continue;
    streams.stream[streams.streams++] = stream;
  }
  const int teams = std::max(streams.teams(), 1);
  const int warps = std::min(threads / device::kWarpThreads / teams, device::kMaxTeamWarps);
  streams.teamWarps = device::WarpDivisor::of(teams > device::kTeamBarriers ? 1 : warps);
  return streams;
}

DirectStreams streamsOf(const CommConfig& config, const std::vector<DirectLaunch>& launches) {
  std::vector<DirectWork> works;
  for (const DirectLaunch& launch : launches) {
    works.insert(works.end(), launch.arguments.work,
                 launch.arguments.work + launch.arguments.works);
  }
  // In place, a share must be sent before another takes its place, which streams do not promise.
  // What comes before such a call stays before it in every stream.
  const auto isInPlace = [](const DirectWork& work) {
    return work.to != 0 && work.from != 0 && work.input == work.output;
  };
  const auto rest = std::find_if(works.rbegin(), works.rend(), isInPlace).base();

  DirectStreams streams;
  DirectPacker first(config);
  std::for_each(works.begin(), rest, [&](const DirectWork& work) { first.add(work); });
  const auto add = [&](const std::byte* buffer, uint32_t bytes, int peer, bool sends) {
    streams.messages.push_back(
        {const_cast<std::byte*>(buffer), bytes, static_cast<uint8_t>(peer), sends, 0, 0});
  };
  std::for_each(rest, works.end(), [&](DirectWork work) {
    for (int peer = 0; peer < localRanks(config) - 1; peer++) {
      const auto rank = static_cast<uint64_t>(device::rankOfPeer(peer, localRank(config)));
      if ((work.to >> peer & 1) != 0) {
        add(work.input + rank * work.inputStride, work.inputBytes, peer, true);
      }
      if ((work.from >> peer & 1) != 0) {
        add(work.output + rank * work.outputStride, work.outputBytes, peer, false);
      }
    }
    work.to = work.from = 0;
    if (work.own) first.add(work);
  });
  streams.first = first.take();
  return streams;
}

std::pair<std::optional<DirectLaunch>, std::optional<DirectLaunch>> splitDirections(
    const DirectLaunch& launch) {
  std::optional<DirectLaunch> sends(launch), rest(launch);
  sends->arguments.works = rest->arguments.works = 0;
  for (int w = 0; w < launch.arguments.works; w++) {
    DirectWork work = launch.arguments.work[w];
    if (work.to != 0) {
      DirectWork& half = sends->arguments.work[sends->arguments.works++];
      half = work;
      half.from = 0;
      half.own = false;
    }
    if (work.from != 0 || work.own) {
      DirectWork& half = rest->arguments.work[rest->arguments.works++];
      half = work;
      half.to = 0;
    }
  }
  if (sends->arguments.works == 0) sends.reset();
  if (rest->arguments.works == 0) rest.reset();
  return {sends, rest};
}

}  // namespace unisono::plan
