// SPDX-License-Identifier: Apache-2.0
#include "plan/message_choice.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/math.h"

namespace unisono::plan {
namespace {

using device::Operation;
using device::Protocol;
using tuning::kGrainBytes;

// Above it, messages that go straight into mapped buffers are as fast
// (docs/results/2026-11-23-protocols.md).
constexpr uint64_t kMaxWideMessageBytes = 8 << 20;

// Settings for an all-reduce hold for messages, too.
constexpr Operation kLike = Operation::allReduce;

// Whether NCCL_ALGO and NCCL_PROTO allow what the direct family does over a protocol.
bool allowsDirect(const CommConfig& config, Protocol protocol) {
  const tuning::Allowed& allowed = config.model->allowed;
  return allowed.allows(kLike, device::Algorithm::direct) && allowed.allows(kLike, protocol);
}

MessageExclusion copyEnginesExclusion(const CommConfig& config, const MessageQuestion& question) {
  if (question.call != Call::allGather && question.call != Call::allToAll) {
    return MessageExclusion::operation;
  }
  if (config.nodes != nullptr) return MessageExclusion::otherNode;
  if (config.ranks < 2 || config.directLineBits == 0) return MessageExclusion::model;
  if (!question.symmetric) return MessageExclusion::window;
  return question.bytes < config.directBytes ? MessageExclusion::tooSmall : MessageExclusion::none;
}

uint64_t mostWideBytes(const CommConfig& config) {
  return std::min(kMaxWideMessageBytes, config.wide.offerBytes - 1);
}

// The largest message of a call that LL carries faster than LL128. What a rank sends to several
// peers shares its links, and lines of LL have twice the bytes of their data. Measured on 2, 3 and
// 4 H200 (docs/results/2026-11-28-wide-kernels.md).
uint64_t mostBytesOverLl(const CommConfig& config, Call call) {
  constexpr uint64_t kMost = 256 << 10;
  const auto peers = static_cast<uint64_t>(std::max(config.ranks - 1, 1));
  if (!hasOwnLaunch(config, call)) return peers == 1 ? kMost : kMost / 2;
  switch (call) {
    case Call::allToAll:
      return kMost * 3 / 4 / (peers * peers);
    case Call::gather:
      return std::min(kMost * 3 / 2 / peers, kMost);
    default:
      return kMost / peers;
  }
}

MessageExclusion directExclusion(const CommConfig& config, Protocol protocol,
                                 const MessageQuestion& question) {
  const uint64_t bytes = question.bytes;
  if (bytes == 0) return MessageExclusion::empty;
  if (!areOnOneNode(config, question.from, question.to)) return MessageExclusion::otherNode;
  const bool isWide = protocol == Protocol::ll128;
  if (config.model->messages[indexOf(protocol)] != tuning::Exclusion::none ||
      (isWide && config.wide.blocks == 0)) {
    return MessageExclusion::model;
  }
  if (!allowsDirect(config, protocol)) return MessageExclusion::settings;
  const tuning::DirectLimits& direct = config.model->facts.direct;
  if (bytes > direct.messageBytes) return MessageExclusion::threshold;
  if (bytes > direct.fasterBytes(protocol)) return MessageExclusion::slower;
  const bool fits = isWide ? bytes <= mostWideBytes(config) : direct.fits(protocol, bytes);
  if (!fits) return MessageExclusion::tooLarge;
  const bool isLong = !isWide && bytes > mostBytesOverLl(config, question.call);
  return isLong && directExclusion(config, Protocol::ll128, question) == MessageExclusion::none
             ? MessageExclusion::fasterByLl128
             : MessageExclusion::none;
}

// The parts of a message.
uint64_t partOf(const CommConfig& config, int from, int to, uint64_t bytes) {
  const uint64_t least =
      areOnOneHost(config, from, to) ? config.minBytesPerPart : config.minRemoteBytesPerPart;
  const auto channels = static_cast<uint64_t>(channelsBetween(config, from, to));
  const uint64_t most = std::clamp<uint64_t>(bytes / least, 1, channels);
  return roundUp(ceilDivide(std::max<uint64_t>(bytes, 1), most), kGrainBytes);
}

MessageExclusion fifoLlExclusion(const CommConfig& config, const MessageQuestion& question) {
  const uint64_t bytes = question.bytes;
  if (question.from == question.to ||
      messageSlots(config, question.from, question.to).lineBytes == 0) {
    return MessageExclusion::noLines;
  }
  const uint64_t part = partOf(config, question.from, question.to, bytes);
  return std::min(part, bytes) > config.peerLineBytes ? MessageExclusion::tooLarge
                                                      : MessageExclusion::none;
}

// Cuts a part into slices: at least two, unless they were too small.
uint64_t sliceOf(uint32_t slotBytes, uint64_t part) {
  constexpr uint64_t kSmallestSlice = 16 << 10;
  const uint64_t slice =
      std::max(roundUp(ceilDivide(part, uint64_t{2}), kGrainBytes), kSmallestSlice);
  return std::min<uint64_t>(slice, slotBytes);
}

// Of a path of the direct family.
Protocol protocolOf(MessagePath path) {
  return path == MessagePath::directLl128 ? Protocol::ll128 : Protocol::ll;
}

}  // namespace

MessageExclusion exclusionOf(const CommConfig& config, MessagePath path,
                             const MessageQuestion& question) {
  switch (path) {
    case MessagePath::copyEngines:
      return copyEnginesExclusion(config, question);
    case MessagePath::directLl:
    case MessagePath::directLl128:
      return directExclusion(config, protocolOf(path), question);
    case MessagePath::fifoLl:
      return fifoLlExclusion(config, question);
    case MessagePath::fifoSimple:
      break;
  }
  return MessageExclusion::none;
}

std::string reasonOf(const CommConfig& config, MessagePath path, const MessageQuestion& question) {
  const tuning::DirectLimits& direct = config.model->facts.direct;
  switch (exclusionOf(config, path, question)) {
    case MessageExclusion::none:
      break;
    case MessageExclusion::operation:
      return "copy engines carry all-gather and all-to-all only";
    case MessageExclusion::otherNode:
      return std::string(reasonOf(tuning::Exclusion::severalNodes));
    case MessageExclusion::window:
      return fmt::format(
          "only with NCCL_CTA_POLICY=ZERO, into a window that all ranks have registered with "
          "NCCL_WIN_COLL_SYMMETRIC, from {} bytes of a block on",
          config.directBytes);
    case MessageExclusion::empty:
      return "there is nothing to send";
    case MessageExclusion::model: {
      if (config.ranks < 2) return std::string(reasonOf(tuning::Exclusion::oneRank));
      const tuning::Exclusion exclusion = config.model->messages[indexOf(protocolOf(path))];
      const bool isKnown = exclusion != tuning::Exclusion::none;
      return std::string(reasonOf(isKnown ? exclusion : tuning::Exclusion::unreachable));
    }
    case MessageExclusion::settings:
      return "excluded by NCCL_ALGO or NCCL_PROTO (messages follow what these say of all-reduce)";
    case MessageExclusion::threshold:
      return fmt::format("more than the {} bytes that NCCL_P2P_LL_THRESHOLD allows here",
                         direct.messageBytes);
    case MessageExclusion::slower:
      return fmt::format("slower from {} bytes on, by the times of UNISONO_TUNING_FILE",
                         direct.fasterBytes(protocolOf(path)) + 1);
    case MessageExclusion::tooSmall:
      return fmt::format("less than {} bytes", config.directBytes);
    case MessageExclusion::tooLarge:
      if (path == MessagePath::fifoLl) {
        return fmt::format("more than {} bytes on a channel", config.peerLineBytes);
      }
      return fmt::format("more than {} bytes", path == MessagePath::directLl
                                                   ? direct.shareBytes[indexOf(Protocol::ll)]
                                                   : mostWideBytes(config));
    case MessageExclusion::fasterByLl128:
      return fmt::format("more than {} bytes, which LL128 carries faster",
                         mostBytesOverLl(config, question.call));
    case MessageExclusion::noLines:
      return "only through memory of the host or networks, and if NCCL_PROTO allows LL";
  }
  return fmt::format("{} comes first", nameOf(messageChoice(config, question).path));
}

MessageChoice fifoChoice(const CommConfig& config, int from, int to, uint64_t bytes) {
  const MessageQuestion question{.from = from, .to = to, .bytes = bytes};
  const MessageSlots slots = messageSlots(config, from, to);
  MessageChoice choice;
  choice.partBytes = partOf(config, from, to, bytes);
  choice.channels = static_cast<int>(ceilDivide(bytes, choice.partBytes));
  if (fifoLlExclusion(config, question) == MessageExclusion::none) {
    choice.path = MessagePath::fifoLl;
    choice.sliceBytes = device::payloadOf(Protocol::ll, slots.lineBytes);
  } else {
    choice.sliceBytes = sliceOf(slots.bytes, choice.partBytes);
    choice.offered = from != to && bytes >= config.directBytes;
  }
  return choice;
}

MessageChoice messageChoice(const CommConfig& config, const MessageQuestion& question) {
  const uint64_t bytes = question.bytes;
  const auto can = [&](MessagePath path) {
    return exclusionOf(config, path, question) == MessageExclusion::none;
  };
  if (can(MessagePath::copyEngines)) return {.path = MessagePath::copyEngines};
  if (can(MessagePath::directLl)) {
    const uint32_t lines = device::linesOf(static_cast<uint32_t>(bytes));
    return {.path = MessagePath::directLl,
            .channels = tuning::directShape(lines, config.directBlocks).blocks};
  }
  if (can(MessagePath::directLl128)) {
    const int blocks = hasOwnLaunch(config, question.call)
                           ? tuning::wideCallShape(config.wide, {.kind = tuning::WideKind::message,
                                                                 .ranks = config.ranks,
                                                                 .bytes = bytes,
                                                                 .type = device::DataType::uint8})
                                 .blocks
                           : wideMessageShape(config, bytes).blocks;
    return {.path = MessagePath::directLl128, .channels = blocks};
  }
  return fifoChoice(config, question.from, question.to, bytes);
}

bool hasOwnLaunch(const CommConfig& config, Call call) {
  return config.nodes == nullptr &&
         (call == Call::allToAll || call == Call::gather || call == Call::scatter);
}

bool carries(const CommConfig& config, MessagePath path, uint64_t bytes, Call call) {
  for (const MessagePath earlier : {MessagePath::directLl, MessagePath::directLl128}) {
    const MessageQuestion question{.call = call, .bytes = bytes};
    const bool can = exclusionOf(config, earlier, question) == MessageExclusion::none;
    if (can || earlier == path) return can && earlier == path;
  }
  return false;
}

tuning::WideShape wideMessageShape(const CommConfig& config, uint64_t bytes) {
  // The streams of all peers run at the same time in each block, so with more peers fewer blocks
  // fill the links. On the host backend each stream of a block is a task with a stack of its own.
  constexpr int kFewestBlocks = 8, kMostBlocks = 64;
  const int most =
      std::clamp(2 * kMostBlocks / std::max(config.model->facts.maxRanksPerNode - 1, 1),
                 kFewestBlocks, kMostBlocks);
  return tuning::wideShape(config.wide, tuning::WideKind::message, bytes, most);
}

}  // namespace unisono::plan
