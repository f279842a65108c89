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

UNISONO_DEVICE MessagePart messagePart(uint64_t bytes, uint64_t part, int index, int channels) {
  uint64_t offset = part * index;
  if (offset >= bytes) return {bytes, 0};
  return {offset, index == channels - 1 || bytes - offset < part ? bytes - offset : part};
}

// The address to which a message goes straight, if the receiver offered one; else null.
UNISONO_DEVICE std::byte* takeOffer(Group& group, const Communicator& communicator,
                                    Connection& connection, int peer, int channel) {
  // offer[0] counts the messages offered, offer[1] is the address of the latest.
  const uint64_t wanted = connection.offers + 1;
  uint64_t* line = connection.offer;
  if (group.isWaiter(0)) {
    if (!waitUntil(
            communicator.abortFlag, {"an offer", communicator.rank, peer, channel},
            [line, wanted] { return loadRelaxed(line) >= wanted; }, wanted)) {
      group.setAborted();
    }
    loadAcquire(line);
  }
  group.syncAll();
  std::byte* address = reinterpret_cast<std::byte*>(line[1]);
  group.syncAll();
  if (group.isPoster()) connection.offers = wanted;
  return group.aborted() ? nullptr : address;
}

UNISONO_DEVICE void sendMessage(Group& group, const Communicator& communicator, int channel,
                                const SendReceiveWork& work) {
  const int index = channel - work.sendFirstChannel;
  MessagePart part = messagePart(work.sendBytes, work.sendPart, index, work.sendChannels);
  if (work.sendBytes != 0 && part.bytes == 0) return;
  const std::byte* from = static_cast<const std::byte*>(work.input) + part.offset;

  if (work.sendPeer == communicator.rank) {  // to oneself: the receive half does nothing
    ReduceCopy copy{};
    copy.source[0] = from;
    copy.destination[0] = static_cast<std::byte*>(work.output) + part.offset;
    copy.sources = copy.destinations = 1;
    copy.elements = part.bytes;
    if (group.isWorker() && copy.source[0] != copy.destination[0])
      reduceCopy(group, asBytes(), copy);
    return;
  }

  Connection& connection = communicator.send[work.sendPeer * communicator.peerChannels + channel];
  SimpleProtocol protocol(group, communicator, channel, communicator.peerSlotBytes, nullptr, -1,
                          &connection, work.sendPeer);
  if (connection.offer != nullptr) {
    std::byte* direct = takeOffer(group, communicator, connection, work.sendPeer, channel);
    if (reinterpret_cast<uint64_t>(direct) != kStagedOffer) {
      protocol.sendDirect(asBytes(), from, direct + part.offset, part.bytes);
      protocol.finish();
      return;
    }
  }
  const uint64_t most = uint64_t{communicator.peerSlotBytes} * communicator.slicesPerChunk;
  uint64_t done = 0;
  do {
    uint64_t size = part.bytes - done < most ? part.bytes - done : most;
    protocol.chunk(asBytes(), false, from + done, true, nullptr, size, false, false);
    done += size;
  } while (done < part.bytes);
  protocol.finish();
}

UNISONO_DEVICE void receiveMessage(Group& group, const Communicator& communicator, int channel,
                                   const SendReceiveWork& work) {
  if (work.receivePeer == communicator.rank) return;
  const int index = channel - work.receiveFirstChannel;
  MessagePart part = messagePart(work.receiveBytes, work.receivePart, index, work.receiveChannels);
  if (work.receiveBytes != 0 && part.bytes == 0) return;
  std::byte* to = static_cast<std::byte*>(work.output) + part.offset;

  Connection& connection =
      communicator.receive[work.receivePeer * communicator.peerChannels + channel];
  SimpleProtocol protocol(group, communicator, channel, communicator.peerSlotBytes, &connection,
                          work.receivePeer, nullptr, -1);
  if (connection.offer != nullptr) {
    const uint64_t address =
        work.offerDirect ? reinterpret_cast<uint64_t>(work.output) : kStagedOffer;
    if (group.isPoster() && !group.aborted()) {
      storeRelaxed(connection.offer + 1, address);
      storeRelease(connection.offer, ++connection.offers);
    }
    if (work.offerDirect) {
      protocol.receiveDirect();
      protocol.finish();
      return;
    }
  }
  const uint64_t most = uint64_t{communicator.peerSlotBytes} * communicator.slicesPerChunk;
  uint64_t done = 0;
  do {
    uint64_t size = part.bytes - done < most ? part.bytes - done : most;
    protocol.chunk(asBytes(), true, nullptr, false, to + done, size, false, false);
    done += size;
  } while (done < part.bytes);
  protocol.finish();
}

UNISONO_DEVICE void sendBlock(Group& group, int channel, const SendReceiveArguments& arguments) {
  stayStopped(group, *arguments.communicator);
  for (int w = 0; w < arguments.works; w++) {
    const SendReceiveWork& work = arguments.work[w];
    if (work.sendPeer < 0 || channel < work.sendFirstChannel ||
        channel >= work.sendFirstChannel + work.sendChannels) {
      continue;
    }
    sendMessage(group, *arguments.communicator, channel, work);
    group.syncAll();
  }
  keepStopped(group, *arguments.communicator);
}

UNISONO_DEVICE void receiveBlock(Group& group, int channel, const SendReceiveArguments& arguments) {
  stayStopped(group, *arguments.communicator);
  for (int w = 0; w < arguments.works; w++) {
    const SendReceiveWork& work = arguments.work[w];
    if (work.receivePeer < 0 || channel < work.receiveFirstChannel ||
        channel >= work.receiveFirstChannel + work.receiveChannels) {
      continue;
    }
    receiveMessage(group, *arguments.communicator, channel, work);
    group.syncAll();
  }
  keepStopped(group, *arguments.communicator);
}

}  // namespace unisono::device::UNISONO_TARGET
