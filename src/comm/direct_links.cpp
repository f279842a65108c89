// SPDX-License-Identifier: Apache-2.0
#include "comm/direct_links.h"

#include <algorithm>
#include <utility>

#include "base/math.h"

namespace unisono::comm {

using Kind = LaunchNote::Kind;
using Advance = LaunchNote::Advance;
namespace {

constexpr size_t kLineBytes = 16;  // of LL
static_assert(diagnose::kStepSlots == device::kWideSlots);

}  // namespace

DirectLinks::DirectLinks(const plan::CommConfig& config, const device::DirectMemory& lines,
                         const device::WideMemory& wide, const LaunchNote& note,
                         std::span<const uint64_t> marks, ReadWords read)
    : config_(config),
      rank_(plan::localRank(config)),
      ranks_(plan::localRanks(config)),
      lineBits_(config.directLineBits),
      lines_(lines),
      wide_(wide),
      windowBlocks_(config.wide.blocks),
      slotLines_(config.wide.slotLines),
      note_(note),
      marks_(marks),
      read_(std::move(read)) {}

std::optional<std::vector<diagnose::Link>> DirectLinks::run() {
  bool answers = true;
  // A note of another kind may have lines of an earlier launch.
  const bool hasLines = note_.kind == Kind::lines || note_.kind == Kind::messages;
  if (lines_.window != nullptr && hasLines) answers = addLines();
  if (wide_.window != nullptr && note_.kind == Kind::wide) {
    answers = addSteps() && (!note_.offers || addBuffers());
  }
  if (wide_.window != nullptr && note_.kind == Kind::messages) answers = answers && addStreams();
  if (!answers) return std::nullopt;
  return std::move(links_);
}

bool DirectLinks::isUnfinished(int block, int group) const {
  const int index = block * device::kMarkGroups + group;
  return marks_[static_cast<size_t>(index)] == 2 * note_.number;
}

// The lines of the launch that are there: their flags are of this lap of the stream, or of a later
// one.
bool DirectLinks::addLines() {
  const int peers = ranks_ - 1;
  const uint32_t capacity = uint32_t{1} << lineBits_;
  for (int peer = 0; peer < peers; peer++) {
    const uint32_t count = note_.lines[peer];
    if (count == 0) continue;
    int block = 0, row = 0;
    if (note_.kind == Kind::lines) {
      while (block < note_.blocks && !isUnfinished(block)) block++;
      if (block == note_.blocks) return true;
      row = block;
    } else {
      block = note_.firstLineBlock + peer;
      if (!isUnfinished(block, 1)) continue;
    }
    const auto* position = reinterpret_cast<const uint64_t*>(&lines_.positions[row * peers + peer]);
    uint64_t streams = 0;
    if (!read_(std::span(&position, 1), std::span(&streams, 1))) return false;
    const auto received = static_cast<uint32_t>(streams >> 32);
    const uint32_t begin = received - (note_.advance == Advance::last ? 0 : count);

    const uint32_t read = std::min(count, capacity);
    const auto* stream = reinterpret_cast<const uint64_t*>(
        lines_.window + device::kDirectHeaderBytes +
        (static_cast<size_t>(device::rankOfPeer(peer, rank_)) << lineBits_) * kLineBytes);
    std::vector<const uint64_t*> addresses;
    addresses.reserve(2 * size_t{read});
    for (uint32_t i = 0; i < read; i++) {
      const uint64_t* line = stream + 2 * size_t{(begin + i) & (capacity - 1)};
      addresses.push_back(line);
      addresses.push_back(line + 1);
    }
    std::vector<uint64_t> words(addresses.size());
    if (!read_(addresses, words)) return false;
    uint32_t there = 0;
    const uint32_t laps = uint32_t{1} << (32 - lineBits_);
    const auto isThere = [&](uint32_t index) {
      const auto flag = static_cast<uint32_t>(words[2 * size_t{index % capacity}] >> 32);
      return ((flag - (((begin + index) >> lineBits_) + 1)) & (laps - 1)) < laps / 2;
    };
    while (there < count && isThere(there)) there++;
    diagnose::Link link;
    link.peer = plan::rankOfLocalPeer(config_, peer);
    link.kind = diagnose::Link::Kind::lines;
    link.channel = block;
    link.tail = there;
    link.all = count;
    link.waits = there < count;
    links_.push_back(link);
  }
  return true;
}

// What this rank has taken in earlier launches, and what it has acknowledged since.
bool DirectLinks::readHeads(std::vector<Fifo>& fifos) {
  std::vector<const uint64_t*> addresses;
  for (const Fifo& fifo : fifos) {
    addresses.push_back(&wide_.steps[fifo.block * (ranks_ - 1) + fifo.peer].received);
    addresses.push_back(reinterpret_cast<const uint64_t*>(wide_.theirs[fifo.peer]) +
                        fifo.block * device::kDirectMaxRanks + rank_);
  }
  std::vector<uint64_t> words(addresses.size());
  if (!read_(addresses, words)) return false;
  for (size_t i = 0; i < fifos.size(); i++) {
    fifos[i].base = words[2 * i];
    // Before the first step nothing is acknowledged, or what came before this launch.
    fifos[i].head = std::max(words[2 * i + 1], fifos[i].base);
  }
  return true;
}

// The steps whose last lines are there, from the head on.
template <typename LastLine>
bool DirectLinks::readTails(std::vector<Fifo>& fifos, LastLine lastLine) {
  std::vector<const uint64_t*> addresses;
  for (const Fifo& fifo : fifos) {
    const auto index = static_cast<size_t>(fifo.peer) * static_cast<size_t>(windowBlocks_) +
                       static_cast<size_t>(fifo.block);
    for (uint64_t step = fifo.head; step < fifo.head + device::kWideSlots; step++) {
      const size_t slot = index * device::kWideSlots + step % device::kWideSlots;
      const std::byte* line =
          wide_.window + device::wideHeaderBytes() +
          (slot * slotLines_ + lastLine(fifo, step - fifo.base)) * device::kWideLineBytes;
      addresses.push_back(reinterpret_cast<const uint64_t*>(line + device::kWideLineData));
    }
  }
  std::vector<uint64_t> words(addresses.size());
  if (!read_(addresses, words)) return false;
  for (size_t i = 0; i < fifos.size(); i++) {
    Fifo& fifo = fifos[i];
    const uint64_t end = fifo.steps == 0 ? ~uint64_t{0} : fifo.base + fifo.steps;
    fifo.tail = fifo.head;
    while (fifo.tail < std::min(fifo.head + device::kWideSlots, end) &&
           words[i * device::kWideSlots + fifo.tail - fifo.head] > fifo.tail) {
      fifo.tail++;
    }
  }
  return true;
}

// Of the FIFOs from a peer the first one that waits, or else the first one that is full.
void DirectLinks::add(const Fifo& fifo, bool waits) {
  diagnose::Link link;
  link.peer = plan::rankOfLocalPeer(config_, fifo.peer);
  link.kind = diagnose::Link::Kind::steps;
  link.channel = fifo.block;
  link.tail = fifo.tail - fifo.base;
  link.head = fifo.head - fifo.base;
  link.all = fifo.steps;
  link.waits = waits;
  const auto known = std::ranges::find_if(links_, [&](const diagnose::Link& other) {
    return other.kind == link.kind && other.peer == link.peer;
  });
  if (known == links_.end()) {
    links_.push_back(link);
  } else if (!known->waits && (waits || !known->isFull(diagnose::kStepSlots))) {
    *known = link;
  }
}

// The bytes of a rank's share, as in device/collective/direct_wide.h.
uint64_t DirectLinks::shareOf(int rank, uint64_t stride) const {
  const uint64_t begin = static_cast<uint64_t>(rank) * stride;
  if (begin + note_.shareBytes <= note_.endBytes) return note_.shareBytes;
  return begin < note_.endBytes ? note_.endBytes - begin : 0;
}

bool DirectLinks::addSteps() {
  constexpr uint64_t kWordsPerLine = device::kWideLineData / 8;
  const uint64_t passWords = note_.passLines * kWordsPerLine;
  const uint64_t shareWords = ceilDivide(uint64_t{note_.shareBytes}, uint64_t{8});
  const auto passes = static_cast<uint32_t>(ceilDivide(shareWords, passWords));
  const uint64_t perPass = note_.twoShot ? 2 : 1;
  const auto blocks = static_cast<uint32_t>(note_.blocks);
  // As passesOf() in device/collective/direct_buffers.h.
  struct Range {
    uint32_t first, end, step;
  };
  const auto rangeOf = [&](uint32_t block) -> Range {
    if (!note_.offers) return {block, passes, blocks};
    return {static_cast<uint32_t>(uint64_t{passes} * block / blocks),
            static_cast<uint32_t>(uint64_t{passes} * (block + 1) / blocks), 1};
  };
  std::vector<Fifo> fifos;
  for (int block = 0; block < note_.blocks; block++) {
    const Range range = rangeOf(static_cast<uint32_t>(block));
    if (!isUnfinished(block) || range.first >= range.end) continue;
    const uint64_t steps = ceilDivide(range.end - range.first, range.step) * perPass;
    for (int peer = 0; peer < ranks_ - 1; peer++) {
      if ((note_.from >> peer & 1) == 0) continue;
      fifos.push_back({.peer = peer, .block = block, .steps = steps, .stepsPerPass = perPass});
    }
  }
  const auto lastLine = [&](const Fifo& fifo, uint64_t step) -> uint64_t {
    const Range range = rangeOf(static_cast<uint32_t>(fifo.block));
    const uint64_t pass = range.first + step / perPass * range.step;
    const bool isOperand = note_.reduces && step % perPass == 0;
    const uint64_t share = isOperand
                               ? shareOf(rank_, note_.inputStride)
                               : shareOf(device::rankOfPeer(fifo.peer, rank_), note_.outputStride);
    const uint64_t words = ceilDivide(share, uint64_t{8}), before = pass * passWords;
    const uint64_t left = words > before ? std::min(words - before, passWords) : 1;
    return (left - 1) / kWordsPerLine;
  };
  if (!readHeads(fifos) || !readTails(fifos, lastLine)) return false;
  for (const Fifo& fifo : fifos) {
    // Where ranks use each other's buffers, steps are those of the rest, of which there may be
    // none.
    const bool isUsed = !note_.offers || fifo.head > fifo.base || fifo.tail > fifo.base;
    const uint64_t needed = std::min(fifo.head + perPass, fifo.base + fifo.steps);
    if (isUsed) add(fifo, fifo.tail < needed);
  }
  return true;
}

// A message over LL128 that has ended and one of which nothing has come look the same: the steps of
// a stream are counted when it ends. So only those in the middle are told, or the only one of a
// block, and of their steps the first lines.
bool DirectLinks::addStreams() {
  std::vector<Fifo> fifos;
  std::vector<bool> isOnly;
  const int rows = note_.wideBlocks == 0 ? 0 : (note_.blocks - note_.firstWideBlock);
  for (int row = 0; row < rows; row++) {
    if (!isUnfinished(note_.firstWideBlock + row)) continue;
    const int first = row / note_.wideBlocks * device::kMaxTeams;
    const int end = std::min(first + device::kMaxTeams, note_.streams);
    for (int i = first; i < end; i++) {
      const int peer = note_.stream[i] / 2;
      if (note_.stream[i] % 2 != 0 || peer >= ranks_ - 1) continue;
      fifos.push_back({.peer = peer, .block = row % note_.wideBlocks});
      isOnly.push_back(end - first == 1);
    }
  }
  if (!readHeads(fifos)) return false;
  if (!readTails(fifos, [](const Fifo&, uint64_t) { return uint64_t{0}; })) return false;
  for (size_t i = 0; i < fifos.size(); i++) {
    const Fifo& fifo = fifos[i];
    if (fifo.head > fifo.base || fifo.tail > fifo.base || isOnly[i]) {
      add(fifo, fifo.tail == fifo.head);
    }
  }
  return true;
}

// Zero copy: which offers of peers this rank has not taken, and which answers to its own.
bool DirectLinks::addBuffers() {
  constexpr size_t kWords = sizeof(device::BufferOffer) / sizeof(uint64_t);
  std::vector<const uint64_t*> addresses;
  std::vector<int> blocks;
  for (int block = 0; block < note_.blocks; block++) {
    if (!isUnfinished(block)) continue;
    blocks.push_back(block);
    const auto* offers = reinterpret_cast<const uint64_t*>(wide_.window + device::wideOffersAt()) +
                         static_cast<size_t>(block) * device::kDirectMaxRanks * kWords;
    for (size_t i = 0; i < device::kDirectMaxRanks * kWords; i++) addresses.push_back(offers + i);
  }
  std::vector<uint64_t> words(addresses.size());
  if (!read_(addresses, words)) return false;
  for (int peer = 0; peer < ranks_ - 1 && !blocks.empty(); peer++) {
    diagnose::Link link;
    link.peer = plan::rankOfLocalPeer(config_, peer);
    link.kind = diagnose::Link::Kind::buffers;
    link.channel = blocks.front();
    for (size_t i = 0; i < blocks.size(); i++) {
      const uint64_t* offer = &words[(i * device::kDirectMaxRanks +
                                      static_cast<size_t>(device::rankOfPeer(peer, rank_))) *
                                     kWords];
      if (offer[0] != 0 || offer[1] != 0) link.tail = 1;
      if (offer[2] != 0) link.head = 1;
    }
    links_.push_back(link);
  }
  return true;
}

}  // namespace unisono::comm
