// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "base/error.h"
#include "plan/direct_plan.h"
#include "plan/message_choice.h"

namespace unisono::plan {
namespace {

using device::Message;
using device::SendReceiveWork;

struct PendingMessage {
  std::byte* buffer;
  uint64_t bytes;
  // Of a receive: see Task.
  bool open;
  device::WindowReference window;
};

// The messages of a group, in call order, by the peer at the other end.
struct MessageQueues {
  std::vector<std::deque<PendingMessage>> to, from;
  explicit MessageQueues(int ranks)
      : to(static_cast<size_t>(ranks)), from(static_cast<size_t>(ranks)) {}

  // Messages of no bytes are left out by both sides.
  void send(int peer, const void* buffer, uint64_t bytes) {
    if (bytes == 0) return;
    auto* address = static_cast<std::byte*>(const_cast<void*>(buffer));
    to[static_cast<size_t>(peer)].push_back({address, bytes, false, {}});
  }
  // Part `part` of the task's output.
  void receive(int peer, const Task& task, uint64_t bytes, int part = 0) {
    if (bytes == 0) return;
    const uint64_t offset = static_cast<uint64_t>(part) * bytes;
    device::WindowReference window = task.window;
    window.offset += offset;
    from[static_cast<size_t>(peer)].push_back(
        {static_cast<std::byte*>(task.output) + offset, bytes, task.outputIsOpen, window});
  }
};

void enqueueMessages(const CommConfig& config, const Task& task, MessageQueues& queues) {
  const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
  const auto* input = static_cast<const std::byte*>(task.input);
  auto at = [bytes](auto* base, int rank) { return base + static_cast<uint64_t>(rank) * bytes; };
  switch (task.call) {
    case Call::send:
      queues.send(task.peer, input, bytes);
      break;
    case Call::receive:
      queues.receive(task.peer, task, bytes);
      break;
    case Call::allToAll:
      for (int r = 0; r < config.ranks; r++) {
        queues.send(r, at(input, r), bytes);
        queues.receive(r, task, bytes, r);
      }
      break;
    case Call::gather:
      queues.send(task.peer, input, bytes);
      for (int r = 0; config.rank == task.peer && r < config.ranks; r++) {
        queues.receive(r, task, bytes, r);
      }
      break;
    case Call::scatter:
      queues.receive(task.peer, task, bytes);
      for (int r = 0; config.rank == task.peer && r < config.ranks; r++) {
        queues.send(r, at(input, r), bytes);
      }
      break;
    default:
      break;
  }
}

// How a message between two ranks `delta` apart is split; the same at both ends.
Message split(const CommConfig& config, int delta, int peer, const PendingMessage& letter) {
  const MessageChoice choice = fifoChoice(config, config.rank, peer, letter.bytes);
  return {.peer = peer,
          .firstChannel = static_cast<uint16_t>(firstMessageChannel(config, 0, delta)),
          .channels = static_cast<uint16_t>(choice.channels),
          .buffer = letter.buffer,
          .bytes = letter.bytes,
          .part = choice.partBytes,
          .slice = static_cast<uint32_t>(choice.sliceBytes),
          .offered = choice.offered,
          .asLines = choice.path == MessagePath::fifoLl};
}

void checkMessagesToSelf(const CommConfig& config, const MessageQueues& queues) {
  const auto& to = queues.to[static_cast<size_t>(config.rank)];
  const auto& from = queues.from[static_cast<size_t>(config.rank)];
  if (to.size() != from.size()) {
    throw invalidUsage("The group has {} send(s) from this rank to itself but {} receive(s)",
                       to.size(), from.size())
        .rank(config.rank)
        .remedy("Put a send and its receive between the same ncclGroupStart and ncclGroupEnd");
  }
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i].bytes != from[i].bytes) {
      throw invalidUsage("This rank sends {} bytes to itself but receives {}", to[i].bytes,
                         from[i].bytes)
          .rank(config.rank)
          .remedy("Pass the same count and type to both calls");
    }
  }
}

}  // namespace

int firstMessageChannel(const CommConfig& config, int from, int to) {
  // Consecutive distances use consecutive channels, so that messages to near ranks need few blocks.
  // Every turn through the channels is shifted by one peer, so that ranks at regular distances (one
  // GPU of each node, for example) do not share channels while others are idle. NCCL mirrors the
  // bits of the distance instead, which uses the highest channels first; here they would cost
  // blocks, because a launch has a block for every channel up to its highest.
  const int delta = (to - from + config.ranks) % config.ranks;
  const int turn = config.peerChannels / config.channelsPerPeer;
  return (delta + delta / turn) % turn * config.channelsPerPeer;
}

namespace {

// In round `delta` every rank sends to rank + delta and receives from rank - delta, so the two ends
// of a message are in the same round, and all ranks go through the rounds in the same order.
// Further messages of a pair wait for the next pass. Calls visit(delta, to, from) for each round
// that is not empty; it takes at least one message.
template <typename Visit>
void forEachRound(const CommConfig& config, MessageQueues& queues, Visit visit) {
  auto anyLeft = [&] {
    auto notEmpty = [](const auto& queue) { return !queue.empty(); };
    return std::any_of(queues.to.begin(), queues.to.end(), notEmpty) ||
           std::any_of(queues.from.begin(), queues.from.end(), notEmpty);
  };
  while (anyLeft()) {
    for (int delta = 0; delta < config.ranks; delta++) {
      const int to = (config.rank + delta) % config.ranks;
      const int from = (config.rank + config.ranks - delta) % config.ranks;
      if (queues.to[static_cast<size_t>(to)].empty() &&
          queues.from[static_cast<size_t>(from)].empty()) {
        continue;
      }
      visit(delta, to, from);
    }
  }
}

// Takes the messages out of `queues` for whose sizes `takes` says so.
template <typename Takes>
MessageQueues takeOf(const CommConfig& config, MessageQueues& queues, Takes takes) {
  MessageQueues taken(config.ranks);
  auto isTaken = [&](const PendingMessage& message) { return takes(message.bytes); };
  auto take = [&](auto& from, auto& to) {
    for (size_t rank = 0; rank < from.size(); rank++) {
      std::copy_if(from[rank].begin(), from[rank].end(), std::back_inserter(to[rank]), isTaken);
      std::erase_if(from[rank], isTaken);
    }
  };
  take(queues.to, taken.to);
  take(queues.from, taken.from);
  return taken;
}

// The windows and the connections for messages of other sizes are connected at the first message,
// so that no later one waits for its peer before it is launched.
void needPeers(const CommConfig& config, device::DirectPeers to, device::DirectPeers from,
               Needs& needs) {
  for (int peer = 0; peer < config.ranks - 1; peer++) {
    const int rank = device::rankOfPeer(peer, config.rank);
    const bool sends = (to >> peer & 1) != 0, receives = (from >> peer & 1) != 0;
    if (sends) needs.peers.push_back({rank, true});
    if (receives) needs.peers.push_back({rank, false});
  }
  if (carries(config, MessagePath::directLl, 1)) needs.direct |= to | from;
  if (sendsWide(config)) needs.wide |= to | from;
}

void addMessages(const CommConfig& config, MessageQueues& queues, DirectPacker& packer,
                 Needs& needs) {
  forEachRound(config, queues, [&](int, int to, int from) {
    auto& outgoing = queues.to[static_cast<size_t>(to)];
    auto& incoming = queues.from[static_cast<size_t>(from)];
    DirectMessages messages;
    if (!outgoing.empty()) {
      messages.to = to;
      messages.input = outgoing.front().buffer;
      messages.inputBytes = outgoing.front().bytes;
      outgoing.pop_front();
    }
    if (!incoming.empty()) {
      messages.from = from;
      messages.output = incoming.front().buffer;
      messages.outputBytes = incoming.front().bytes;
      incoming.pop_front();
    }
    const device::DirectWork work = directWork(config, messages);
    needPeers(config, work.to, work.from, needs);
    packer.add(work);
  });
}

// The messages over LL128.
std::vector<device::DirectMessage> takeWide(const CommConfig& config, MessageQueues& queues,
                                            Needs& needs) {
  std::vector<device::DirectMessage> messages;
  forEachRound(config, queues, [&](int delta, int to, int from) {
    auto take = [&](std::deque<PendingMessage>& queue, int rank,
                    bool sends) -> device::DirectPeers {
      if (queue.empty()) return 0;
      const PendingMessage message = queue.front();
      queue.pop_front();
      const int peer = delta == 0 ? config.ranks - 1 : device::peerOfRank(rank, config.rank);
      messages.push_back(wideMessage(config, peer, sends, message.buffer, message.bytes));
      return static_cast<device::DirectPeers>(delta == 0 ? 0 : 1u << peer);
    };
    const device::DirectPeers receiver = take(queues.to[static_cast<size_t>(to)], to, true);
    const device::DirectPeers sender = take(queues.from[static_cast<size_t>(from)], from, false);
    needPeers(config, receiver, sender, needs);
  });
  return messages;
}

// The rounds of messages through the FIFOs of channels.
std::vector<SendReceiveWork> planRounds(const CommConfig& config, MessageQueues& queues,
                                        Needs& needs) {
  std::vector<SendReceiveWork> works;
  forEachRound(config, queues, [&](int delta, int to, int from) {
    auto& outgoing = queues.to[static_cast<size_t>(to)];
    auto& incoming = queues.from[static_cast<size_t>(from)];
    SendReceiveWork& work = works.emplace_back();
    if (!incoming.empty()) {
      work.addressIsOpen = incoming.front().open;
      work.window = incoming.front().window;
    }
    auto take = [&](std::deque<PendingMessage>& queue, int peer, bool sends) -> Message {
      Message message{};
      message.peer = -1;
      if (queue.empty()) return message;
      message = split(config, delta, peer, queue.front());
      queue.pop_front();
      if (delta != 0) needs.peers.push_back({peer, sends});
      return message;
    };
    work.send = take(outgoing, to, true);
    work.receive = take(incoming, from, false);
  });
  return works;
}

// Takes the first of `works` and adds them to the arguments of a launch, as many as fit. Returns
// how many blocks they need.
template <typename Arguments>
int addRounds(std::span<const SendReceiveWork>& works, Arguments& arguments) {
  const size_t count = std::min(works.size(), std::size(arguments.work));
  int blocks = 0;
  for (const SendReceiveWork& work : works.first(count)) {
    for (const Message* message : {&work.send, &work.receive}) {
      blocks = std::max(blocks, message->peer < 0 ? 0 : message->firstChannel + message->channels);
    }
    arguments.work[arguments.works++] = work;
  }
  works = works.subspan(count);
  return blocks;
}

std::vector<SendReceiveLaunch> launchesOf(std::span<const SendReceiveWork> works) {
  std::vector<SendReceiveLaunch> launches;
  while (!works.empty()) {
    SendReceiveLaunch& launch = launches.emplace_back();
    launch.blocks = addRounds(works, launch.arguments);
  }
  return launches;
}

// All messages of all kinds, in one launch unless there are very many.
std::vector<MessagesLaunch> launchesOf(const CommConfig& config,
                                       std::span<const SendReceiveWork> works,
                                       std::span<const device::DirectMessage> messages) {
  std::vector<MessagesLaunch> launches;
  const auto isOverLl = [](const device::DirectMessage& message) { return message.blocks == 0; };
  while (!works.empty() || !messages.empty()) {
    launches.push_back({std::make_shared<device::MessagesArguments>()});
    device::MessagesArguments& arguments = *launches.back().arguments;
    arguments.rank = config.rank;
    arguments.ranks = config.ranks;
    arguments.lineBits = config.directLineBits;
    arguments.channels = addRounds(works, arguments);
    size_t count = std::min(messages.size(), std::size(arguments.message));
    // What a rank sends to itself stays with what receives it.
    const auto isOwn = [&](size_t m) { return messages[m].peer == config.ranks - 1; };
    if (count < messages.size() && isOwn(count) && !messages[count].sends) count--;
    const std::span<const device::DirectMessage> taken = messages.first(count);
    std::ranges::copy(taken, arguments.message);
    arguments.messages = static_cast<int32_t>(count);
    arguments.peers = std::ranges::any_of(taken, isOverLl) ? config.ranks - 1 : 0;
    arguments.wide = wideStreamsOf(config, taken);
    messages = messages.subspan(count);
  }
  return launches;
}

WideMessagesLaunch wideMessagesLaunch(const CommConfig& config,
                                      std::span<const device::DirectMessage> messages) {
  WideMessagesLaunch launch{};
  device::WideMessagesArguments& arguments = launch.arguments;
  arguments.wide = wideStreamsOf(config, messages);
  arguments.rank = config.rank;
  arguments.ranks = config.ranks;
  arguments.messages = static_cast<int32_t>(messages.size());
  std::ranges::copy(messages, arguments.message);
  return launch;
}

}  // namespace

void planMessages(const CommConfig& config, const std::vector<Task>& tasks, Plan& plan) {
  DirectPacker packer(config);
  MessageQueues queues(config.ranks);
  for (const Task& task : tasks) {
    const bool isPair = task.call == Call::send || task.call == Call::receive;
    if (!isPair && canBeInPlace(config, task)) {
      const device::DirectWork work = directWork(config, task);
      needPeers(config, work.to, work.from, plan.needs);
      if (isWideMessages(config, task)) {
        // They use the FIFOs of collectives, after those of the group and before other messages.
        plan.launches.emplace_back(wideLaunch(config, task, device::Algorithm::direct));
      } else {
        packer.add(work);
      }
    } else {
      enqueueMessages(config, task, queues);
    }
  }
  checkMessagesToSelf(config, queues);
  MessageQueues direct = takeOf(config, queues, [&](uint64_t bytes) {
    return carries(config, MessagePath::directLl, bytes);
  });
  addMessages(config, direct, packer, plan.needs);
  MessageQueues overLl128 = takeOf(config, queues, [&](uint64_t bytes) {
    return carries(config, MessagePath::directLl128, bytes);
  });
  const std::vector<device::DirectMessage> wide = takeWide(config, overLl128, plan.needs);
  const std::vector<SendReceiveWork> staged = planRounds(config, queues, plan.needs);
  const std::vector<DirectLaunch> launches = packer.take();
  const auto append = [&](const auto& more) {
    for (const auto& launch : more) plan.launches.emplace_back(launch);
  };
  // Some peer may send only after it has received more than one launch may send, or what other
  // messages of this group bring.
  if (launches.size() > 1 || staged.size() > device::kMaxSendReceiveWorks ||
      wide.size() > device::kMaxWideMessages || (!staged.empty() && !wide.empty())) {
    DirectStreams streams = streamsOf(config, launches);
    append(streams.first);
    streams.messages.insert(streams.messages.end(), wide.begin(), wide.end());
    append(launchesOf(config, staged, streams.messages));
    return;
  }
  const auto appendLarger = [&] {
    if (!wide.empty()) plan.launches.emplace_back(wideMessagesLaunch(config, wide));
    append(launchesOf(staged));
  };
  if (launches.empty() || (staged.empty() && wide.empty())) {
    append(launches);
    appendLarger();
    return;
  }
  // A peer may send here only after it has received there, or the other way around, so neither part
  // may wait for the other: messages over LL are sent, which waits for nobody, before the larger
  // ones and received after them.
  const auto [sends, rest] = splitDirections(launches.front());
  if (sends) plan.launches.emplace_back(*sends);
  appendLarger();
  if (rest) plan.launches.emplace_back(*rest);
}

}  // namespace unisono::plan
