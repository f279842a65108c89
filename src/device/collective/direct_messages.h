// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/direct.h"

// Messages of the direct family over LL, in the streams of its collectives.
namespace unisono::device::UNISONO_TARGET {

// The messages of a launch to and from peers, from the view of one lane.
class DirectMessages : DirectLaunch<DirectRanks<2, false>, MessagesArguments> {
 public:
  UNISONO_DEVICE DirectMessages(const MessagesArguments& arguments, const DirectLane& at)
      : DirectLaunch(arguments, at) {}

  // Sends all messages to a peer, by all lanes of a block.
  template <typename SyncBlock>
  UNISONO_DEVICE void send(int peer, bool runs, SyncBlock syncBlock) const {
    noteRead(&position(at_.block, peer)->sent, sizeof(uint32_t));
    uint32_t sent = position(at_.block, peer)->sent;
    uint32_t taken = loadRelaxed(acknowledgmentBy(peer));
    bool going = runs;
    for (int m = 0; m < arguments_.messages; m++) {
      const DirectMessage& message = arguments_.message[m];
      if (!isInStream(message, peer, true)) continue;
      const uint32_t lines = linesOf(message.bytes);
      if (going && sent + lines - taken > capacity()) {
        going = waitForRoom(peer, sent + lines);
        taken = loadRelaxed(acknowledgmentBy(peer));
      }
      if (going) sendMessage(message, sent);
      sent += lines;
    }
    syncBlock();  // every lane has read the position
    for (int r = at_.lane; r < kDirectMaxBlocks; r += at_.lanes) {
      noteWrite(&position(r, peer)->sent, sizeof(sent));
      position(r, peer)->sent = sent;
    }
  }
  // Takes all messages from a peer, by all lanes of a block. Tells the peer on the way how far it
  // is.
  template <typename SyncBlock>
  UNISONO_DEVICE void receive(int peer, bool runs, SyncBlock syncBlock) const {
    DirectPosition at = receivedFrom(peer);
    bool going = runs;
    for (int m = 0; m < arguments_.messages; m++) {
      const DirectMessage& message = arguments_.message[m];
      if (!isInStream(message, peer, false)) continue;
      going = going && receiveMessage(message, at.received);
      at.received += linesOf(message.bytes);
      if (!isAcknowledged(at)) continue;
      syncBlock();  // every lane has taken its lines
      if (going && at_.lane == 0) tell(peer, at);
      at.acknowledged = at.received;
    }
    syncBlock();  // every lane has read the position
    for (int r = at_.lane; r < kDirectMaxBlocks; r += at_.lanes) {
      noteWrite(&position(r, peer)->received, 2 * sizeof(at.received));
      position(r, peer)->received = at.received;
      position(r, peer)->acknowledged = at.acknowledged;
    }
  }

 private:
  UNISONO_DEVICE static bool isInStream(const DirectMessage& message, int peer, bool sends) {
    return message.peer == peer && message.sends == sends && message.blocks == 0;
  }
  // Lines of a message that a lane moves at a time.
  static constexpr int kLinesAtATime = 4;
  UNISONO_DEVICE static bool isWhole(const DirectMessage& message) {
    return (reinterpret_cast<uint64_t>(message.buffer) | message.bytes) % 8 == 0;
  }
  UNISONO_DEVICE void sendMessage(const DirectMessage& message, uint32_t first) const {
    const bool whole = isWhole(message);
    const auto lines = linesOf(message.bytes), lanes = static_cast<uint32_t>(at_.lanes);
    Line* stream = streamTo(message.peer);
    for (auto base = static_cast<uint32_t>(at_.lane); base < lines; base += lanes * kLinesAtATime) {
      uint64_t pack[kLinesAtATime];
      UNISONO_UNROLL
      for (unsigned k = 0; k < kLinesAtATime; k++) {
        const uint32_t index = base + k * lanes;
        pack[k] = loadShare<uint8_t>(message.buffer, message.bytes, whole, index, index < lines);
      }
      UNISONO_UNROLL
      for (unsigned k = 0; k < kLinesAtATime; k++) {
        const uint32_t index = base + k * lanes, place = first + index;
        storeLineIf(index < lines, stream + inStream(place), pack[k], flagOf(place));
      }
    }
  }
  // False after an abort.
  UNISONO_DEVICE bool receiveMessage(const DirectMessage& message, uint32_t first) const {
    const bool whole = isWhole(message);
    const auto lines = linesOf(message.bytes), lanes = static_cast<uint32_t>(at_.lanes);
    const Line* stream = streamFrom(message.peer);
    for (auto base = static_cast<uint32_t>(at_.lane); base < lines; base += lanes * kLinesAtATime) {
      Line line[kLinesAtATime] = {};
      auto allHere = [&] {
        UNISONO_UNROLL
        for (unsigned k = 0; k < kLinesAtATime; k++) {
          const uint32_t index = base + k * lanes;
          if (index < lines) line[k] = loadLine(stream + inStream(first + index));
        }
        bool here = true;
        UNISONO_UNROLL
        for (unsigned k = 0; k < kLinesAtATime; k++) {
          const uint32_t index = base + k * lanes;
          here = here && (index >= lines || lineHolds(line[k], flagOf(first + index)));
        }
        return here;
      };
      if (!waitUntil(arguments_.abortFlag,
                     {"lines of its peers", me_, rankOf(message.peer), at_.block}, allHere)) {
        return false;
      }
      UNISONO_UNROLL
      for (unsigned k = 0; k < kLinesAtATime; k++) {
        const uint32_t index = base + k * lanes;
        if (index >= lines) break;
        storeShare<uint8_t>(message.buffer, message.bytes, whole, index, lineData(line[k]));
      }
    }
    return true;
  }
  // What belongs to the block that receives; another one has the rest of a position.
  UNISONO_DEVICE DirectPosition receivedFrom(int peer) const {
    const DirectPosition* from = position(at_.block, peer);
    noteRead(&from->received, 2 * sizeof(from->received));
    return {0, from->received, from->acknowledged, 0};
  }
};

// The direct messages to or from a peer, of a launch with any number of them.
template <typename Stopped, typename SyncBlock>
UNISONO_DEVICE void directStream(const MessagesArguments& arguments, int peer, bool sends,
                                 const DirectLane& at, Stopped stopped, SyncBlock syncBlock) {
  const int block = arguments.channels + peer, group = sends ? 0 : 1;
  if (at.lane == 0) markStart(arguments.mark, block, group);
  const DirectMessages messages(arguments, at);
  const bool runs = !stopped();
  if (sends) {
    messages.send(peer, runs, syncBlock);
  } else {
    messages.receive(peer, runs, syncBlock);
  }
  if (at.lane == 0) markEnd(arguments.mark, block, group);
}

}  // namespace unisono::device::UNISONO_TARGET
