// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/simple.h"

// Point-to-point messages. Two groups of a block work at once, one sends and one receives, each
// through its own list in the same order of rounds on every rank: a wait is only ever for something
// earlier, so no order of calls can deadlock.
namespace unisono::device::UNISONO_TARGET {

UNISONO_DEVICE ReductionSpec asBytes() {
  return {DataType::uint8, Reduction::sum, false, 0};
}

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

// Through the slots of the connection.
UNISONO_DEVICE void transfer(SimpleProtocol& protocol, const DeviceCommunicator& communicator,
                             bool sends, std::byte* buffer, uint64_t bytes) {
  const uint64_t most = uint64_t{communicator.peerSlotBytes} * communicator.slicesPerChunk;
  uint64_t done = 0;
  do {
    const uint64_t size = bytes - done < most ? bytes - done : most;
    protocol.chunk(asBytes(), !sends, sends ? buffer + done : nullptr, sends,
                   sends ? nullptr : buffer + done, size, false, false);
    done += size;
  } while (done < bytes);
}

UNISONO_DEVICE void sendMessage(ThreadGroup& group, const DeviceCommunicator& communicator,
                                int channel, const SendReceiveWork& work, MessagePart part) {
  const Message& message = work.send;
  std::byte* from = message.buffer + part.offset;
  if (message.peer == communicator.rank) {  // to oneself: the receive half does nothing
    ReduceCopy copy{};
    copy.source[0] = from;
    copy.destination[0] = work.receive.buffer + part.offset;
    copy.sources = copy.destinations = 1;
    copy.elements = part.bytes;
    if (group.isWorker() && !group.aborted() && copy.source[0] != copy.destination[0]) {
      reduceCopy(group, asBytes(), copy);
    }
    return;
  }

  Connection& connection = communicator.send[message.peer * communicator.peerChannels + channel];
  SimpleProtocol protocol(group, communicator, channel, communicator.peerSlotBytes, nullptr, -1,
                          &connection, message.peer);
  const uint64_t offer =
      connection.offer != nullptr ? protocol.takeOffer(connection) : kStagedOffer;
  if (offer != 0 && offer != kStagedOffer) {
    protocol.sendDirect(asBytes(), from, reinterpret_cast<std::byte*>(offer) + part.offset,
                        part.bytes);
  } else {
    transfer(protocol, communicator, true, from, part.bytes);
  }
  protocol.finish();
}

UNISONO_DEVICE void receiveMessage(ThreadGroup& group, const DeviceCommunicator& communicator,
                                   int channel, const SendReceiveWork& work, MessagePart part) {
  const Message& message = work.receive;
  if (message.peer == communicator.rank) return;
  Connection& connection = communicator.receive[message.peer * communicator.peerChannels + channel];
  SimpleProtocol protocol(group, communicator, channel, communicator.peerSlotBytes, &connection,
                          message.peer, nullptr, -1);
  const bool direct = connection.offer != nullptr && work.offerDirect && message.buffer != nullptr;
  if (connection.offer != nullptr) {
    protocol.makeOffer(connection,
                       direct ? reinterpret_cast<uint64_t>(message.buffer) : kStagedOffer);
  }
  if (direct) {
    protocol.receiveDirect(connection);
  } else {
    transfer(protocol, communicator, false, message.buffer + part.offset, part.bytes);
  }
  protocol.finish();
}

// All messages that the group of one direction has on a channel.
UNISONO_DEVICE void messageBlock(ThreadGroup& group, bool sends, int channel,
                                 const SendReceiveArguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  stayStopped(group, communicator, arguments.launchFlag);
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
      sendMessage(group, communicator, channel, work, part);
    } else {
      receiveMessage(group, communicator, channel, work, part);
    }
    group.syncAll();
  }
  keepStopped(group, communicator);
}

}  // namespace unisono::device::UNISONO_TARGET
