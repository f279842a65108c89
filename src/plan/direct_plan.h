// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>

#include "device/algorithm.h"
#include "plan/plan.h"

// The direct family: how its calls are put into launches.
namespace unisono::plan {

// Of the node.
device::DirectPeers everyPeer(const CommConfig& config);

// The bytes of a share of a call: what one rank sends to another.
uint64_t shareBytes(const Task& task);

// A call among the ranks of a node, but for send and receive, as this rank's part of it.
device::DirectWork directWork(const CommConfig& config, const Task& task);

// Messages to and from one rank each, of which one may be missing.
struct DirectMessages {
  std::optional<int> to, from;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  uint64_t inputBytes = 0, outputBytes = 0;
};
device::DirectWork directWork(const CommConfig& config, const DirectMessages& messages);

// Whether messages inside a node may go over LL128, and whether one of `bytes` bytes does: the same
// on both ends.
bool sendsWide(const CommConfig& config);
bool isWideMessage(const CommConfig& config, uint64_t bytes);
// Whether an all-to-all, a gather or a scatter is a launch over LL128, as a collective is.
bool isWideMessages(const CommConfig& config, const Task& task);
// Whether such a call in place sends every part before another one takes its place.
bool canBeInPlace(const CommConfig& config, const Task& task);

// The launch of a collective among the ranks of a node over LL128, by Algorithm::direct or twoShot.
WideLaunch wideLaunch(const CommConfig& config, const Task& task, device::Algorithm algorithm);

// Starts a launch without works, and adds a work for whose lines and arguments there is room. With
// several works `launch.blocks` may exceed what a launch has.
void beginDirect(const CommConfig& config, DirectLaunch& launch);
void addDirect(const CommConfig& config, const device::DirectWork& work, DirectLaunch& launch);

// Puts works into as few launches as their lines and the arguments allow, in order.
class DirectPacker {
 public:
  explicit DirectPacker(const CommConfig& config) : config_(config) {}
  void add(const device::DirectWork& work);
  // The launches, which the packer is left without.
  std::vector<DirectLaunch> take();

 private:
  void begin();

  const CommConfig& config_;
  std::vector<DirectLaunch> launches_;
  std::vector<device::DirectPosition> lines_;  // of the last launch, by peer
};

// A message over LL128. `peer`: see device::WideStreams.
device::DirectMessage wideMessage(const CommConfig& config, int peer, bool sends, std::byte* buffer,
                                  uint64_t bytes);
// The streams of messages over LL128 among `messages`, for blocks of at most `threads` threads.
device::WideStreams wideStreamsOf(const CommConfig& config,
                                  std::span<const device::DirectMessage> messages, int threads);

// What `launches`, which copy only, do: as messages for launches in which none waits for one of
// another peer or direction, after launches of calls in place and of what ranks send to themselves.
struct DirectStreams {
  std::vector<DirectLaunch> first;
  std::vector<device::DirectMessage> messages;
};
DirectStreams streamsOf(const CommConfig& config, const std::vector<DirectLaunch>& launches);

// A launch that only sends what `launch` sends, and one that does the rest.
std::pair<std::optional<DirectLaunch>, std::optional<DirectLaunch>> splitDirections(
    const DirectLaunch& launch);

}  // namespace unisono::plan
