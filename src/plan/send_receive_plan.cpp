// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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

// What carries a message, in the order in which the messages of a group are planned.
enum class Carrier : uint8_t { lines, wide, fifos };

struct PendingMessage {
  Carrier carrier = Carrier::fifos;
  // The round: how many ranks further on the receiver is, and how many messages of the same carrier
  // and direction are before this one, to or from the same rank. Until they are arranged, `pass`
  // counts all messages of the direction.
  int delta = 0;
  uint32_t pass = 0;
  int rank = 0;  // at the other end
  std::byte* buffer = nullptr;
  uint64_t bytes = 0;
  // Of a receive: see Task.
  bool open = false;
  device::WindowReference window{};

  auto round() const { return std::pair(pass, delta); }
};
using PendingMessages = std::span<const PendingMessage>;

// The messages of a group, in call order.
class MessageQueues {
 public:
  explicit MessageQueues(const CommConfig& config) : config_(config) {}

  // Messages of no bytes are left out by both sides.
  void send(int rank, const void* buffer, uint64_t bytes) {
    if (bytes == 0) return;
    PendingMessage& message = add(to_, rank, rank - config_.rank, bytes);
    message.buffer = static_cast<std::byte*>(const_cast<void*>(buffer));
  }
  // Part `part` of the task's output.
  void receive(int rank, const Task& task, uint64_t bytes, int part = 0) {
    if (bytes == 0) return;
    const uint64_t offset = static_cast<uint64_t>(part) * bytes;
    PendingMessage& message = add(from_, rank, config_.rank - rank, bytes);
    message.buffer = static_cast<std::byte*>(task.output) + offset;
    message.open = task.outputIsOpen;
    message.window = task.window;
    message.window.offset += offset;
  }

  // Follows the last message.
  void arrange() {
    arrange(to_);
    arrange(from_);
  }
  PendingMessages to(Carrier carrier) const { return of(to_, carrier); }
  PendingMessages from(Carrier carrier) const { return of(from_, carrier); }

  // Before they are arranged: throws an error if what this rank sends to itself does not match what
  // it receives.
  void checkMessagesToSelf() const;

 private:
  PendingMessage& add(std::vector<PendingMessage>& list, int rank, int delta,
                      uint64_t bytes) const {
    PendingMessage& message = list.emplace_back();
    message.carrier = carrierOf(rank, bytes);
    message.delta = (delta + config_.ranks) % config_.ranks;
    message.pass = static_cast<uint32_t>(list.size());
    message.rank = rank;
    message.bytes = bytes;
    return message;
  }
  Carrier carrierOf(int rank, uint64_t bytes) const {
    if (!areOnOneNode(config_, rank, config_.rank)) return Carrier::fifos;
    if (carries(config_, MessagePath::directLl, bytes)) return Carrier::lines;
    if (carries(config_, MessagePath::directLl128, bytes)) return Carrier::wide;
    return Carrier::fifos;
  }
  // Sorts by carrier and round. Takes no memory, as std::stable_sort() does.
  static void arrange(std::vector<PendingMessage>& list) {
    const auto queue = [](const PendingMessage& message) {
      return std::pair(message.carrier, message.delta);
    };
    std::ranges::sort(list, {}, [&](const PendingMessage& message) {
      return std::pair(queue(message), message.pass);
    });
    for (size_t i = 0; i < list.size(); i++) {
      const bool continues = i > 0 && queue(list[i - 1]) == queue(list[i]);
      list[i].pass = continues ? list[i - 1].pass + 1 : 0;
    }
    std::ranges::sort(list, {}, [](const PendingMessage& message) {
      return std::pair(message.carrier, message.round());
    });
  }
  static PendingMessages of(const std::vector<PendingMessage>& list, Carrier carrier) {
    return {std::ranges::lower_bound(list, carrier, {}, &PendingMessage::carrier),
            std::ranges::upper_bound(list, carrier, {}, &PendingMessage::carrier)};
  }

  const CommConfig& config_;
  std::vector<PendingMessage> to_, from_;
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

// How a message is split; the same at both ends.
Message split(const CommConfig& config, const PendingMessage& message, bool sends) {
  const int from = sends ? config.rank : message.rank, to = sends ? message.rank : config.rank;
  const MessageChoice choice = fifoChoice(config, from, to, message.bytes);
  return {.peer = message.rank,
          .firstChannel = static_cast<uint16_t>(firstMessageChannel(config, from, to)),
          .channels = static_cast<uint16_t>(choice.channels),
          .buffer = message.buffer,
          .bytes = message.bytes,
          .part = choice.partBytes,
          .slice = static_cast<uint32_t>(choice.sliceBytes),
          .offered = choice.offered,
          .asLines = choice.path == MessagePath::fifoLl};
}

void MessageQueues::checkMessagesToSelf() const {
  const auto isOwn = [](const PendingMessage& message) { return message.delta == 0; };
  const auto sends = std::ranges::count_if(to_, isOwn),
             receives = std::ranges::count_if(from_, isOwn);
  if (sends != receives) {
    throw invalidUsage("The group has {} send(s) from this rank to itself but {} receive(s)", sends,
                       receives)
        .rank(config_.rank)
        .remedy("Put a send and its receive between the same ncclGroupStart and ncclGroupEnd");
  }
  auto received = from_.begin();
  for (const PendingMessage& sent : to_) {
    if (!isOwn(sent)) continue;
    received = std::find_if(received, from_.end(), isOwn);
    if (sent.bytes != received->bytes) {
      throw invalidUsage("This rank sends {} bytes to itself but receives {}", sent.bytes,
                         received->bytes)
          .rank(config_.rank)
          .remedy("Pass the same count and type to both calls");
    }
    received++;
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
  const int channels = channelsBetween(config, from, to);
  const int turn = config.peerChannels / channels;
  return (delta + delta / turn) % turn * channels;
}

namespace {

// In round `delta` every rank sends to rank + delta and receives from rank - delta, so the two ends
// of a message are in the same round, and all ranks go through the rounds in the same order.
// Further messages of a pair wait for the next pass. Calls visit(delta, outgoing, incoming) for
// each round that has messages; one of the two pointers may be null.
template <typename Visit>
void forEachRound(PendingMessages to, PendingMessages from, Visit visit) {
  while (!to.empty() || !from.empty()) {
    const bool sendsNext = from.empty() || (!to.empty() && to[0].round() <= from[0].round());
    const PendingMessage& next = sendsNext ? to[0] : from[0];
    const auto take = [&next](PendingMessages& list) -> const PendingMessage* {
      if (list.empty() || list[0].round() != next.round()) return nullptr;
      const PendingMessage* message = list.data();
      list = list.subspan(1);
      return message;
    };
    const PendingMessage *outgoing = take(to), *incoming = take(from);
    visit(next.delta, outgoing, incoming);
  }
}

// The windows and the connections for messages of other sizes are connected at the first message,
// so that no later one waits for its peer before it is launched.
void needPeers(const CommConfig& config, device::DirectPeers to, device::DirectPeers from,
               Needs& needs) {
  for (int peer = 0; peer < localRanks(config) - 1; peer++) {
    const int rank = rankOfLocalPeer(config, peer);
    const bool sends = (to >> peer & 1) != 0, receives = (from >> peer & 1) != 0;
    if (sends) needs.peers.push_back({rank, true});
    if (receives) needs.peers.push_back({rank, false});
  }
  if (carries(config, MessagePath::directLl, 1)) needs.direct |= to | from;
  if (sendsWide(config)) needs.wide |= to | from;
}

void addMessages(const CommConfig& config, const MessageQueues& queues, DirectPacker& packer,
                 Needs& needs) {
  const auto add = [&](int, const PendingMessage* outgoing, const PendingMessage* incoming) {
    DirectMessages messages;
    if (outgoing != nullptr) {
      messages.to = outgoing->rank;
      messages.input = outgoing->buffer;
      messages.inputBytes = outgoing->bytes;
    }
    if (incoming != nullptr) {
      messages.from = incoming->rank;
      messages.output = incoming->buffer;
      messages.outputBytes = incoming->bytes;
    }
    const device::DirectWork work = directWork(config, messages);
    needPeers(config, work.to, work.from, needs);
    packer.add(work);
  };
  forEachRound(queues.to(Carrier::lines), queues.from(Carrier::lines), add);
}

// The messages over LL128.
std::vector<device::DirectMessage> planWide(const CommConfig& config, const MessageQueues& queues,
                                            Needs& needs) {
  std::vector<device::DirectMessage> messages;
  const auto add = [&](int delta, const PendingMessage* outgoing, const PendingMessage* incoming) {
    const auto addOne = [&](const PendingMessage* message, bool sends) -> device::DirectPeers {
      if (message == nullptr) return 0;
      const int peer = delta == 0 ? localRanks(config) - 1 : localPeerOf(config, message->rank);
      messages.push_back(wideMessage(config, peer, sends, message->buffer, message->bytes));
      return static_cast<device::DirectPeers>(delta == 0 ? 0 : 1u << peer);
    };
    const device::DirectPeers receiver = addOne(outgoing, true), sender = addOne(incoming, false);
    needPeers(config, receiver, sender, needs);
  };
  forEachRound(queues.to(Carrier::wide), queues.from(Carrier::wide), add);
  return messages;
}

// The rounds of messages through the FIFOs of channels.
std::vector<SendReceiveWork> planRounds(const CommConfig& config, const MessageQueues& queues,
                                        Needs& needs) {
  std::vector<SendReceiveWork> works;
  const auto add = [&](int delta, const PendingMessage* outgoing, const PendingMessage* incoming) {
    SendReceiveWork& work = works.emplace_back();
    if (incoming != nullptr) {
      work.addressIsOpen = incoming->open;
      work.window = incoming->window;
    }
    const auto messageOf = [&](const PendingMessage* message, bool sends) -> Message {
      if (message == nullptr) {
        Message none{};
        none.peer = -1;
        return none;
      }
      if (delta != 0) needs.peers.push_back({message->rank, sends});
      return split(config, *message, sends);
    };
    work.send = messageOf(outgoing, true);
    work.receive = messageOf(incoming, false);
  };
  forEachRound(queues.to(Carrier::fifos), queues.from(Carrier::fifos), add);
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
    arguments.rank = localRank(config);
    arguments.ranks = localRanks(config);
    arguments.lineBits = config.directLineBits;
    arguments.channels = addRounds(works, arguments);
    size_t count = std::min(messages.size(), std::size(arguments.message));
    // What a rank sends to itself stays with what receives it.
    const auto isOwn = [&](size_t m) { return messages[m].peer == localRanks(config) - 1; };
    if (count < messages.size() && isOwn(count) && !messages[count].sends) count--;
    const std::span<const device::DirectMessage> taken = messages.first(count);
    std::ranges::copy(taken, arguments.message);
    arguments.messages = static_cast<int32_t>(count);
    arguments.peers = std::ranges::any_of(taken, isOverLl) ? localRanks(config) - 1 : 0;
    arguments.wide = wideStreamsOf(config, taken, device::kChannelThreads);
    messages = messages.subspan(count);
  }
  return launches;
}

WideMessagesLaunch wideMessagesLaunch(const CommConfig& config,
                                      std::span<const device::DirectMessage> messages) {
  WideMessagesLaunch launch{};
  device::WideMessagesArguments& arguments = launch.arguments;
  arguments.wide = wideStreamsOf(config, messages, device::kMaxWideMessageThreads);
  arguments.rank = localRank(config);
  arguments.ranks = localRanks(config);
  arguments.messages = static_cast<int32_t>(messages.size());
  std::ranges::copy(messages, arguments.message);
  return launch;
}

}  // namespace

void planMessages(const CommConfig& config, const std::vector<Task>& tasks, Plan& plan) {
  DirectPacker packer(config);
  MessageQueues queues(config);
  for (const Task& task : tasks) {
    if (!consistsOfMessages(task.call) || usesCopyEngines(config, task)) continue;
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
  queues.checkMessagesToSelf();
  queues.arrange();
  addMessages(config, queues, packer, plan.needs);
  const std::vector<device::DirectMessage> wide = planWide(config, queues, plan.needs);
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
