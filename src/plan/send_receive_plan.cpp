// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>

#include "base/error.h"
#include "plan/plan.h"

namespace unisono::plan {
namespace {

using device::Message;
using device::SendReceiveWork;

struct Letter {
  std::byte* buffer;
  uint64_t bytes;
  bool open;
};

// The messages of a group, in call order, by the peer at the other end.
struct Mail {
  std::vector<std::deque<Letter>> to, from;
  explicit Mail(int ranks) : to(static_cast<size_t>(ranks)), from(static_cast<size_t>(ranks)) {}

  // Messages of no bytes are left out by both sides.
  void send(int peer, const void* buffer, uint64_t bytes) {
    if (bytes == 0) return;
    auto* address = static_cast<std::byte*>(const_cast<void*>(buffer));
    to[static_cast<size_t>(peer)].push_back({address, bytes, false});
  }
  void receive(int peer, void* buffer, uint64_t bytes, bool open) {
    if (bytes == 0) return;
    from[static_cast<size_t>(peer)].push_back({static_cast<std::byte*>(buffer), bytes, open});
  }
};

void sort(const Shape& shape, const Task& task, Mail& mail) {
  const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
  const auto* input = static_cast<const std::byte*>(task.input);
  auto* output = static_cast<std::byte*>(task.output);
  auto at = [bytes](auto* base, int rank) { return base + static_cast<uint64_t>(rank) * bytes; };
  switch (task.call) {
    case Call::send:
      mail.send(task.peer, input, bytes);
      break;
    case Call::receive:
      mail.receive(task.peer, output, bytes, task.outputIsOpen);
      break;
    case Call::allToAll:
      for (int r = 0; r < shape.ranks; r++) {
        mail.send(r, at(input, r), bytes);
        mail.receive(r, at(output, r), bytes, task.outputIsOpen);
      }
      break;
    case Call::gather:
      mail.send(task.peer, input, bytes);
      for (int r = 0; shape.rank == task.peer && r < shape.ranks; r++) {
        mail.receive(r, at(output, r), bytes, task.outputIsOpen);
      }
      break;
    case Call::scatter:
      mail.receive(task.peer, output, bytes, task.outputIsOpen);
      for (int r = 0; shape.rank == task.peer && r < shape.ranks; r++) {
        mail.send(r, at(input, r), bytes);
      }
      break;
    default:
      break;
  }
}

// How a message between two ranks `delta` apart is split; the same at both ends.
Message split(const Shape& shape, int delta, int peer, const Letter& letter) {
  constexpr uint64_t kGrainBytes = 512;
  const uint64_t most = std::clamp<uint64_t>(letter.bytes / shape.minBytesPerPart, 1,
                                             static_cast<uint64_t>(shape.channelsPerPeer));
  const uint64_t part =
      ((letter.bytes + most - 1) / most + kGrainBytes - 1) / kGrainBytes * kGrainBytes;
  return {.peer = peer,
          .firstChannel = static_cast<uint16_t>(firstMessageChannel(shape, 0, delta)),
          .channels = static_cast<uint16_t>((letter.bytes + part - 1) / part),
          .buffer = letter.buffer,
          .bytes = letter.bytes,
          .part = part};
}

void checkMessagesToSelf(const Shape& shape, const Mail& mail) {
  const auto& to = mail.to[static_cast<size_t>(shape.rank)];
  const auto& from = mail.from[static_cast<size_t>(shape.rank)];
  if (to.size() != from.size()) {
    throw invalidUsage("The group has {} send(s) from this rank to itself but {} receive(s)",
                       to.size(), from.size())
        .rank(shape.rank)
        .remedy("Put a send and its receive between the same ncclGroupStart and ncclGroupEnd");
  }
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i].bytes != from[i].bytes) {
      throw invalidUsage("This rank sends {} bytes to itself but receives {}", to[i].bytes,
                         from[i].bytes)
          .rank(shape.rank)
          .remedy("Pass the same count and type to both calls");
    }
  }
}

}  // namespace

int firstMessageChannel(const Shape& shape, int from, int to) {
  const int delta = (to - from + shape.ranks) % shape.ranks;
  return delta * shape.channelsPerPeer % shape.peerChannels;
}

void planMessages(const Shape& shape, const std::vector<Task>& tasks, Plan& plan) {
  Mail mail(shape.ranks);
  for (const Task& task : tasks) sort(shape, task, mail);
  checkMessagesToSelf(shape, mail);

  SendReceiveLaunch launch{};
  auto endLaunch = [&] {
    if (launch.arguments.works > 0) plan.launches.emplace_back(launch);
    launch = {};
  };
  // In round `delta` every rank sends to rank + delta and receives from rank - delta, so the two
  // ends of a message are in the same round, and all ranks go through the rounds in the same order.
  // Further messages of a pair wait for the next pass.
  auto anyLeft = [&] {
    auto notEmpty = [](const auto& queue) { return !queue.empty(); };
    return std::any_of(mail.to.begin(), mail.to.end(), notEmpty) ||
           std::any_of(mail.from.begin(), mail.from.end(), notEmpty);
  };
  while (anyLeft()) {
    for (int delta = 0; delta < shape.ranks; delta++) {
      const int to = (shape.rank + delta) % shape.ranks;
      const int from = (shape.rank + shape.ranks - delta) % shape.ranks;
      auto& outgoing = mail.to[static_cast<size_t>(to)];
      auto& incoming = mail.from[static_cast<size_t>(from)];
      if (outgoing.empty() && incoming.empty()) continue;
      if (launch.arguments.works == device::kMaxSendReceiveWorks) endLaunch();
      SendReceiveWork& work = launch.arguments.work[launch.arguments.works++];
      work.offerDirect = !incoming.empty() && incoming.front().open &&
                         incoming.front().bytes >= shape.directBytes && delta != 0;
      auto take = [&](std::deque<Letter>& queue, int peer, bool sends) -> Message {
        Message message{};
        message.peer = -1;
        if (queue.empty()) return message;
        message = split(shape, delta, peer, queue.front());
        queue.pop_front();
        if (delta != 0) plan.peers.push_back({peer, sends});
        launch.blocks = std::max(launch.blocks, message.firstChannel + message.channels);
        return message;
      };
      work.send = take(outgoing, to, true);
      work.receive = take(incoming, from, false);
    }
  }
  endLaunch();
}

}  // namespace unisono::plan
