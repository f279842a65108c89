// SPDX-License-Identifier: Apache-2.0
#include "seeds.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "base/error.h"
#include "support/seed.h"

namespace unisono::protocol {
namespace {

std::map<std::pair<std::string, int>, std::unique_ptr<World>>& worlds() {
  testRuntime();  // lives longer
  static std::map<std::pair<std::string, int>, std::unique_ptr<World>> kWorlds;
  return kWorlds;
}

}  // namespace

SeedRange seedRange(uint64_t count) {
  if (const char* one = std::getenv("UNISONO_TEST_SEED")) {
    return {std::strtoull(one, nullptr, 10), 1};
  }
  if (const char* many = std::getenv("UNISONO_TEST_SEEDS")) {
    return {0, std::strtoull(many, nullptr, 10)};
  }
#ifdef __SANITIZE_THREAD__
  constexpr uint64_t kSlower = 64;
#else
  constexpr uint64_t kSlower = 16;
#endif
  return {0, kSanitized || !runsFibers() ? (count + kSlower - 1) / kSlower : count};
}

Random randomOf(uint64_t seed, const std::string& test) {
  uint64_t state = seed;
  for (const char letter : test) state = mix64(state * 31 + static_cast<unsigned char>(letter));
  return Random(state);
}

const std::vector<Geometry>& geometries() {
  static const std::vector<Geometry> kGeometries = {
      // As few slots as the ring allows.
      {.name = "narrow"},
      // Several channels a call and a message; direct calls, offers and FIFO side by side.
      {.name = "mixed",
       .channels = 2,
       .slots = 4,
       .slotBytes = 512,
       .slicesPerChunk = 2,
       .peerChannels = 2,
       .channelsPerPeer = 2,
       .minBytesPerChannel = 1024,
       .minBytesPerPart = 1024,
       .directBytes = 1024,
       .directLineBits = 10},
      // As a communicator has them, but small.
      {.name = "usual",
       .channels = 3,
       .slots = 8,
       .slotBytes = 1024,
       .slicesPerChunk = 2,
       .peerChannels = 4,
       .channelsPerPeer = 1,
       .minBytesPerChannel = 2048,
       .minBytesPerPart = 4096,
       .directBytes = 4096,
       .directLineBits = 7},
      // Ranks that cannot offer their buffers, and slices that do not divide the slots.
      {.name = "apart",
       .channels = 2,
       .slots = 4,
       .slotBytes = 1536,
       .slicesPerChunk = 3,
       .peerChannels = 4,
       .channelsPerPeer = 2,
       .minBytesPerChannel = 4096,
       .minBytesPerPart = 512,
       .oneProcess = false},
      // Buffers in windows.
      {.name = "windows",
       .channels = 2,
       .slots = 4,
       .slotBytes = 512,
       .peerChannels = 2,
       .channelsPerPeer = 2,
       .minBytesPerChannel = 4096,
       .minBytesPerPart = 1024,
       .directBytes = 256,
       .oneProcess = false,
       .windows = true},
      // Pairs of ranks that reach each other in different ways.
      {.name = "links",
       .channels = 3,
       .slots = 4,
       .slotBytes = 512,
       .slicesPerChunk = 2,
       .peerChannels = 4,
       .channelsPerPeer = 2,
       .minBytesPerChannel = 1024,
       .minBytesPerPart = 512,
       .directBytes = 2048,
       .links = true},
      // The other algorithms and protocols, alone and in turns.
      {.name = "LL", .protocols = "LL"},
      {.name = "LL128 on links",
       .channels = 2,
       .slots = 4,
       .minBytesPerChannel = 1024,
       .protocols = "LL128",
       .links = true},
      {.name = "in turns",
       .channels = 3,
       .slots = 4,
       .slotBytes = 1024,
       .slicesPerChunk = 2,
       .minBytesPerChannel = 1024,
       .lowLatencyMaxBytes = 1500},
      {.name = "tree Simple",
       .channels = 2,
       .slots = 4,
       .slicesPerChunk = 2,
       .minBytesPerChannel = 512,
       .algorithms = "tree",
       .protocols = "Simple"},
      {.name = "tree LL",
       .channels = 3,
       .minBytesPerChannel = 512,
       .algorithms = "tree",
       .protocols = "LL",
       .links = true},
      {.name = "tree LL128",
       .channels = 3,
       .minBytesPerChannel = 512,
       .algorithms = "tree",
       .protocols = "LL128"},
      {.name = "direct LL128",
       .directLineBits = 4,
       .wide = {.blocks = 3, .slotLines = 2},
       .algorithms = "Direct",
       .protocols = "LL128"},
      {.name = "two-shot LL128",
       .slots = 4,
       .directLineBits = 4,
       .wide = {.blocks = 2, .slotLines = 5},
       .algorithms = "TwoShot",
       .protocols = "LL128"},
      // Ranks that use each other's buffers: by address, and in windows.
      {.name = "direct in place",
       .directLineBits = 4,
       .wide = {.blocks = 3, .slotLines = 2},
       .wideOfferBytes = 1,
       .algorithms = "Direct,TwoShot",
       .protocols = "LL128"},
      {.name = "direct in windows",
       .directLineBits = 4,
       .wide = {.blocks = 2, .slotLines = 4},
       .wideOfferBytes = 256,
       .algorithms = "TwoShot,Direct",
       .protocols = "LL128",
       .oneProcess = false,
       .windows = true},
      {.name = "NVLS", .multicast = true, .algorithms = "NVLS"},
      {.name = "NVLS tree", .multicast = true, .ranksPerNode = 2, .algorithms = "NVLSTree,NVLS"},
      // Most nodes have ranks that are no heads.
      {.name = "NVLS tree on links",
       .channels = 2,
       .slots = 4,
       .minBytesPerChannel = 512,
       .multicast = true,
       .ranksPerNode = 3,
       .algorithms = "NVLSTree,NVLS",
       .links = true},
      {.name = "CollNet chain", .collnet = true, .ranksPerNode = 1, .algorithms = "CollNetChain"},
      {.name = "NVLS and network",
       .slots = 4,
       .multicast = true,
       .collnet = true,
       .ranksPerNode = 3,
       .algorithms = "NVLS"},
      // Every rank is a head; then few are, and they combine more than they can at once.
      {.name = "CollNet direct",
       .slots = 4,
       .collnet = true,
       .ranksPerNode = 2,
       .algorithms = "CollNetDirect"},
      {.name = "CollNet direct on links",
       .channels = 2,
       .slots = 4,
       .slotBytes = 1024,
       .minBytesPerChannel = 512,
       .collnet = true,
       .ranksPerNode = 5,
       .algorithms = "CollNetDirect",
       .links = true},
      {.name = "CollNet chains on links",
       .channels = 2,
       .slots = 4,
       .slotBytes = 1024,
       .slicesPerChunk = 2,
       .minBytesPerChannel = 512,
       .collnet = true,
       .ranksPerNode = 3,
       .algorithms = "CollNetChain",
       .links = true},
      // Between nodes, of one rank and of two. Messages over LL and Simple in turns.
      {.name = "network",
       .channels = 2,
       .slots = 4,
       .slicesPerChunk = 2,
       .peerChannels = 2,
       .channelsPerPeer = 2,
       .minBytesPerChannel = 512,
       .minBytesPerPart = 512,
       .network = true,
       .peerLineBytes = 600,
       .ranksPerNode = 1,
       .lowLatencyMaxBytes = 1500},
      {.name = "network LL",
       .network = true,
       .peerLineBytes = 4000,
       .ranksPerNode = 2,
       .protocols = "LL"},
      {.name = "network tree LL",
       .channels = 2,
       .minBytesPerChannel = 512,
       .network = true,
       .peerLineBytes = 100,
       .ranksPerNode = 1,
       .algorithms = "tree",
       .protocols = "LL"},
      {.name = "network LL128",
       .slots = 4,
       .slotBytes = 512,
       .network = true,
       .ranksPerNode = 2,
       .protocols = "LL128"},
      {.name = "network tree LL128",
       .channels = 2,
       .slotBytes = 256,
       .minBytesPerChannel = 512,
       .network = true,
       .ranksPerNode = 1,
       .algorithms = "tree",
       .protocols = "LL128"},
      // Messages inside nodes go over the lines of the direct family.
      {.name = "network and lines",
       .slots = 4,
       .peerChannels = 2,
       .minBytesPerPart = 512,
       .directLineBits = 6,
       .wide = {.blocks = 2, .slotLines = 3},
       .wideOfferBytes = 1500,
       .network = true,
       .ranksPerNode = 3},
      // More channels between nodes than inside them, and fewer.
      {.name = "network of more channels",
       .channels = 2,
       .slots = 4,
       .peerChannels = 4,
       .channelsPerPeer = 1,
       .remoteChannelsPerPeer = 2,
       .minBytesPerPart = 512,
       .network = true,
       .peerLineBytes = 600,
       .ranksPerNode = 3},
      {.name = "network of fewer channels",
       .channels = 2,
       .slots = 4,
       .peerChannels = 4,
       .channelsPerPeer = 4,
       .remoteChannelsPerPeer = 1,
       .minBytesPerPart = 512,
       .network = true,
       .ranksPerNode = 2},
      // Direct inside nodes and trees between them. Other numbers of ranks have no rails.
      {.name = "rails",
       .channels = 2,
       .slots = 4,
       .minBytesPerChannel = 512,
       .directLineBits = 8,
       .wide = {.blocks = 2, .slotLines = 3},
       .ranksPerNode = 2,
       .algorithms = "DirectTree"},
      {.name = "rails over a network",
       .channels = 2,
       .slots = 4,
       .slotBytes = 512,
       .slicesPerChunk = 2,
       .minBytesPerChannel = 512,
       .directLineBits = 8,
       .wide = {.blocks = 3, .slotLines = 2},
       .network = true,
       .ranksPerNode = 3,
       .algorithms = "DirectTree",
       .protocols = "Simple"},
      // What NVLS cannot do goes over trees and rings.
      {.name = "NVLS and others",
       .channels = 3,
       .slots = 4,
       .slotBytes = 1536,
       .slicesPerChunk = 2,
       .minBytesPerChannel = 1024,
       .multicast = true,
       .algorithms = "NVLS,tree,ring"},
  };
  return kGeometries;
}

const Geometry& geometryOf(const std::string& name) {
  for (const Geometry& geometry : geometries()) {
    if (geometry.name == name) return geometry;
  }
  throw std::invalid_argument(name);
}

World& worldOf(const Geometry& geometry, int ranks) {
  auto& world = worlds()[{geometry.name, ranks}];
  if (world == nullptr) world = std::make_unique<World>(geometry, ranks);
  return *world;
}

void discardWorlds() {
  worlds().clear();
}

Memories& memories() {
  testRuntime();
  constexpr size_t kBytes = 8 << 20;
  static Memories kMemories = makeMemories(kBytes);
  return kMemories;
}

void setSchedule(uint64_t seed) {
  startSchedule({.seed = static_cast<int64_t>(seed)});
}

void forEachSeed(uint64_t count, const std::string& test,
                 const std::function<std::string(uint64_t seed, Random& random)>& body) {
  const SeedRange range = seedRange(count);
  int failures = 0;
  for (uint64_t seed = range.first; seed < range.first + range.count && failures < 3; seed++) {
    Random random = randomOf(seed, test);
    std::string wrong;
    try {
      wrong = body(seed, random);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    if (wrong.empty()) continue;
    failures++;
    ADD_FAILURE() << "seed " << seed << ": " << wrong
                  << "\nTo repeat: " << test::replayCommand(seed);
    discardWorlds();
  }
}

}  // namespace unisono::protocol
