// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/direct.h"
#include "device/collective/wide_fifos.h"

// Messages of the direct family over LL128 (docs/decisions/0018-messages-over-ll128.md).
namespace unisono::device::UNISONO_TARGET {

// The messages of a launch to a peer, or from it, in one block of the FIFOs, from the view of one
// lane of the team that moves them. At the other end a team may have more lanes or fewer: lines
// carry their own flags.
template <typename Arguments>
class WideStream : WideFifos {
 public:
  // `at`: the block of the FIFOs, and the lane among those of the team.
  UNISONO_DEVICE WideStream(const Arguments& arguments, const DirectLane& at, int peer)
      : WideFifos(arguments.wide.memory, arguments.abortFlag, arguments.rank, arguments.ranks,
                  arguments.wide.windowBlocks, arguments.wide.slotLines, at.block),
        arguments_(arguments),
        at_(at),
        peer_(peer) {}

  // By all lanes of the team, as they wait for each other. The buffers of a launch that does not
  // run belong to the user; `runs` may differ between warps.
  template <typename SyncTeam>
  UNISONO_DEVICE void run(bool sends, bool runs, SyncTeam syncTeam) const {
    if (peer_ == peers_) {
      if (runs) copyOwn();
    } else if (sends) {
      send(runs, syncTeam);
    } else {
      receive(runs, syncTeam);
    }
  }

 private:
  // A pass of the message number `message` of the launch.
  struct Pass {
    int message;
    uint32_t offset, bytes;
    UNISONO_DEVICE uint32_t words() const { return (bytes + 7) / 8; }
  };
  // Those of this block, in the order of the messages.
  template <typename Visit>
  UNISONO_DEVICE void forEachPass(bool sends, Visit visit) const {
    for (int m = 0; m < arguments_.messages; m++) {
      const DirectMessage& message = arguments_.message[m];
      if (message.peer != peer_ || message.sends != sends || at_.block >= message.blocks) continue;
      const uint32_t most = message.passBytes(), step = most * message.blocks;
      for (uint32_t offset = most * static_cast<uint32_t>(at_.block); offset < message.bytes;
           offset += step) {
        const uint32_t left = message.bytes - offset;
        visit(Pass{m, offset, left < most ? left : most});
      }
    }
  }
  UNISONO_DEVICE UserWords wordsOf(int message, const Pass& pass) const {
    std::byte* buffer = arguments_.message[message].buffer;
    // The larger the units in which a buffer that is not aligned is accessed, the better.
    const uint64_t bits = reinterpret_cast<uint64_t>(buffer) | arguments_.message[message].bytes;
    return {buffer + pass.offset, pass.bytes, bits % 4 == 0 ? 4u : bits % 2 == 0 ? 2u : 1u};
  }
  // Calls visit(place, word) for the words of each pass of the lanes.
  template <typename Visit>
  UNISONO_DEVICE bool forEachPlace(const Pass& pass, Visit visit) const {
    for (uint32_t q = 0; CopyFormat::hasPart(q, at_.lane, at_.lanes, pass.words()); q++) {
      uint64_t word[CopyFormat::kWords] = {};
      if (!visit(CopyFormat::Place(q, at_.lane, at_.lanes), word)) return false;
    }
    return true;
  }
  using Words = uint64_t (&)[CopyFormat::kWords];

  template <typename SyncTeam>
  UNISONO_DEVICE void send(bool going, SyncTeam syncTeam) const {
    // On their way together with the first data.
    uint64_t taken = loadRelaxed(takenBy(peer_));
    uint64_t step = sentTo(peer_);
    bool any = false;
    forEachPass(true, [&](const Pass& pass) {
      going = going && sendPass(pass, step, taken);
      step++;
      any = true;
    });
    if (!any) return;
    syncTeam();  // every lane has read the step
    if (at_.lane != 0) return;
    noteWrite(&stepsOf(peer_)->sent, sizeof(step));
    stepsOf(peer_)->sent = step;
  }
  // False after an abort.
  UNISONO_DEVICE bool sendPass(const Pass& pass, uint64_t step, uint64_t& taken) const {
    const UserWords from = wordsOf(pass.message, pass);
    std::byte* to = slotTo(peer_, step);
    bool hasSlot = false;
    return forEachPlace(pass, [&](CopyFormat::Place place, Words word) {
      from.load(place, word);
      if (!hasSlot && !awaitSlot(peer_, step, taken)) return false;
      hasSlot = true;
      CopyFormat::store(to, place, pass.words(), CopyFormat::flagOf(step), word, false);
      return true;
    });
  }

  // Before each pass, tells the sender that the ones before have been taken. The last one of a
  // launch is returned by the next launch, as in collectives. Relaxed: the lanes have
  // used what they loaded before the barrier.
  template <typename SyncTeam>
  UNISONO_DEVICE void receive(bool going, SyncTeam syncTeam) const {
    uint64_t step = receivedFrom(peer_);
    bool any = false;
    forEachPass(false, [&](const Pass& pass) {
      if (going && at_.lane == 0) storeRelaxed(takenFrom(peer_), step);
      going = going && receivePass(pass, step);
      step++;
      any = true;
      syncTeam();  // every lane has taken its lines
    });
    if (!any || at_.lane != 0) return;
    noteWrite(&stepsOf(peer_)->received, sizeof(step));
    stepsOf(peer_)->received = step;
  }
  // False after an abort.
  UNISONO_DEVICE bool receivePass(const Pass& pass, uint64_t step) const {
    const UserWords to = wordsOf(pass.message, pass);
    const std::byte* from = slotFrom(peer_, step);
    return forEachPlace(pass, [&](CopyFormat::Place place, Words word) {
      CopyFormat::Loaded lines{};
      if (!waitForLines<CopyFormat>(abortFlag_, {"lines of its peers", me_, rankOf(peer_), block_},
                                    from, place, pass.words(), CopyFormat::flagOf(step), word,
                                    false, lines, false)) {
        return false;
      }
      to.store(place, word);
      return true;
    });
  }

  // To oneself: the receiving message is the next one.
  UNISONO_DEVICE void copyOwn() const {
    forEachPass(true, [&](const Pass& pass) {
      const UserWords from = wordsOf(pass.message, pass), to = wordsOf(pass.message + 1, pass);
      forEachPlace(pass, [&](CopyFormat::Place place, Words word) {
        from.load(place, word);
        to.store(place, word);
        return true;
      });
    });
  }

  const Arguments& arguments_;
  DirectLane at_;
  int peer_;
};

// The part of a team in a launch: team `team` of block `at.block` among those for messages over
// LL128, of which the launch has `firstBlock` others before. `isLast` says to one lane of a block
// that all its teams are done.
template <typename Arguments, typename Stopped, typename SyncTeam, typename IsLast>
UNISONO_DEVICE void wideTeam(const Arguments& arguments, DirectLane at, int team, int firstBlock,
                             Stopped stopped, SyncTeam syncTeam, IsLast isLast) {
  const WideStreams& wide = arguments.wide;
  const int block = firstBlock + at.block;
  if (team == 0 && at.lane == 0) markStart(arguments.mark, block, 0);
  // The second block of those of the FIFOs has the streams that the first has no teams for.
  int index = team;
  if (at.block >= wide.blocks) {
    at.block -= wide.blocks;
    index += kMaxTeams;
  }
  if (team < kMaxTeams && index < wide.streams) {
    const int stream = wide.stream[index];
    WideStream<Arguments>(arguments, at, stream / 2).run(stream % 2 != 0, !stopped(), syncTeam);
  }
  if (isLast()) markEnd(arguments.mark, block, 0);
}

}  // namespace unisono::device::UNISONO_TARGET
