// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/lines.h"
#include "device/protocol/simple.h"

// Point-to-point messages. Two groups of a block work at once, one sends and one receives, each
// through its own list in the same order of rounds on every rank: a wait is only ever for something
// earlier, so no order of calls can deadlock.
namespace unisono::device::UNISONO_TARGET {

// The bytes of a message that one of its channels carries.
struct MessagePart {
  uint64_t offset;
  uint64_t bytes;
};

UNISONO_DEVICE MessagePart partOf(const Message& message, int channel) {
  const int index = channel - message.firstChannel;
  const uint64_t offset = message.part * index;
  if (offset >= message.bytes) return {message.bytes, 0};
  const uint64_t left = message.bytes - offset;
  return {offset, index == message.channels - 1 || left < message.part ? left : message.part};
}

// Prepares the block for a part of a message; one end of a FIFO.
UNISONO_DEVICE void loadMessage(ThreadGroup& group, Block& block, bool sends,
                                const DeviceCommunicator& communicator, const Message& message) {
  if (group.isLoader(0)) {
    const bool lines = message.asLines;
    Fifo* table = sends ? (lines ? communicator.sendLines : communicator.send)
                        : (lines ? communicator.receiveLines : communicator.receive);
    End& end = sends ? block.send[0] : block.receive[0];
    loadEnd(end, table + message.peer * communicator.peerChannels + block.channel, message.peer);
    block.slotBytes = end.fifo.slotBytes;
  }
  group.syncAll();
}

// Through the slots of the FIFO: at least one step, even if there is nothing to move. With
// `answers` the first step is the answer to an offer that was taken. The receiver waits for it even
// after an abort, so the waiter must not learn of one in a later step before it is posted.
template <typename P>
UNISONO_DEVICE void transfer(ThreadGroup& group, P& protocol, bool sends, std::byte* buffer,
                             uint64_t bytes, uint64_t most, bool answers) {
  uint64_t done = 0;
  do {
    const auto size = static_cast<uint32_t>(bytes - done < most ? bytes - done : most);
    std::byte* at = buffer + done;
    if (sends) {
      protocol.move({.input = at, .send = 1, .elements = size});
    } else {
      protocol.move({.receive = 1, .output = at, .elements = size});
    }
    done += size;
    if (answers) group.syncAll();
    answers = false;
  } while (done < bytes);
}

UNISONO_DEVICE void sendMessage(ThreadGroup& group, Block& block,
                                const DeviceCommunicator& communicator, const SendReceiveWork& work,
                                MessagePart part) {
  const Message& message = work.send;
  std::byte* from = message.buffer + part.offset;
  if (message.peer == block.rank) {  // to oneself: the receive half does nothing
    ReduceCopy copy{};
    std::byte* to = work.receive.buffer + part.offset;
    copy.addSource(from, false);
    copy.addDestination(to);
    if (group.isWorker() && !group.aborted() && from != to) copyOnly(group, copy, part.bytes);
    return;
  }

  loadMessage(group, block, true, communicator, message);
  if (message.asLines) {
    Lines<LowLatencyFormat, 0, 1, true> protocol(group, block);
    transfer(group, protocol, true, from, part.bytes, message.slice, false);
    protocol.finish();
    return;
  }
  Simple<0, 1, true> protocol(group, block);
  const bool offered = message.offered && block.send[0].fifo.offer != nullptr;
  const uint64_t to = offered ? protocol.takeOffer() : kStagedOffer;
  if (to != 0 && to != kStagedOffer) {
    protocol.sendDirect(from, reinterpret_cast<std::byte*>(to) + part.offset, part.bytes);
  } else {
    transfer(group, protocol, true, from, part.bytes, message.slice, offered);
  }
  protocol.finish();
}

UNISONO_DEVICE void receiveMessage(ThreadGroup& group, Block& block,
                                   const DeviceCommunicator& communicator,
                                   const SendReceiveWork& work, MessagePart part) {
  const Message& message = work.receive;
  if (message.peer == block.rank) return;
  loadMessage(group, block, false, communicator, message);
  if (message.asLines) {
    Lines<LowLatencyFormat, 1, 0, true> protocol(group, block);
    transfer(group, protocol, false, message.buffer + part.offset, part.bytes, message.slice,
             false);
    protocol.finish();
    return;
  }
  Simple<1, 0, true> protocol(group, block);
  const Fifo& fifo = block.receive[0].fifo;
  bool direct = false;
  if (message.offered && fifo.offer != nullptr) {
    direct = protocol.offerBuffer(message.buffer, work.addressIsOpen, work.window) &&
             protocol.receiveDirect();
  }
  if (!direct) {
    transfer(group, protocol, false, message.buffer + part.offset, part.bytes, message.slice,
             false);
  }
  protocol.finish();
}

// All messages that the group of one direction has on a channel.
template <typename Arguments>
UNISONO_DEVICE void messageBlock(ThreadGroup& group, Block& block, bool sends, int channel,
                                 const Arguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  if (group.isPoster()) markStart(arguments.mark, channel, sends ? 0 : 1);
  if (group.isLoader(0)) {
    loadCommunicator(block, communicator, channel);
    block.work.reduction.type = DataType::uint8;  // elements are bytes
  }
  stayStopped(group, communicator, arguments.launchFlag);
  group.syncAll();
  for (int w = 0; w < arguments.works; w++) {
    const SendReceiveWork& work = arguments.work[w];
    const Message& message = sends ? work.send : work.receive;
    if (message.peer < 0 || channel < message.firstChannel ||
        channel >= message.firstChannel + message.channels) {
      continue;
    }
    const MessagePart part = partOf(message, channel);
    if (message.bytes != 0 && part.bytes == 0) continue;
    if (sends) {
      sendMessage(group, block, communicator, work, part);
    } else {
      receiveMessage(group, block, communicator, work, part);
    }
    group.syncAll();
  }
  keepStopped(group, communicator);
  if (group.isPoster()) markEnd(arguments.mark, channel, sends ? 0 : 1);
}

}  // namespace unisono::device::UNISONO_TARGET
