// SPDX-License-Identifier: Apache-2.0
#include "comm/make.h"

#include <algorithm>
#include <cstring>

namespace unisono::comm {
namespace {

std::shared_ptr<Communicator> join(runtime::Runtime& runtime, const bootstrap::UniqueId& id,
                                   int rank, int ranks, int device, const Settings& settings,
                                   const Options& options, std::shared_ptr<Health> health) {
  auto bootstrap = bootstrap::Bootstrap::connect(
      id, rank, ranks, settings, [health] { return health->signal().raised(); }, health);
  return Communicator::create(runtime, std::move(bootstrap), device, settings, options,
                              std::move(health));
}

struct SplitChoice {
  int32_t color, key, rank;
};

}  // namespace

Handle::InitFunction makeFromId(runtime::Runtime& runtime, const bootstrap::UniqueId& id, int rank,
                                int ranks, int device, const Settings& settings,
                                const Options& options) {
  return [=, &runtime](std::shared_ptr<Health> health) {
    return join(runtime, id, rank, ranks, device, settings, options, std::move(health));
  };
}

Handle::InitFunction makeFromSplit(const std::shared_ptr<Communicator>& parent, int color, int key,
                                   const Options& options) {
  // Splits of one parent use its bootstrap one after the other, in the order of the calls.
  return [=, turn = parent->turns().announce()](
             std::shared_ptr<Health> health) -> std::shared_ptr<Communicator> {
    if (!turn->await([&] { return health->signal().raised() || parent->aborted(); })) {
      throw invalidUsage("The split was aborted").rank(parent->rank());
    }
    bootstrap::Bootstrap& network = parent->bootstrap();
    std::vector<SplitChoice> members = network.allGather(SplitChoice{color, key, network.rank()});
    std::erase_if(members, [color](const SplitChoice& choice) { return choice.color != color; });
    if (color == kNoColor) {
      turn->end();
      return nullptr;
    }
    std::stable_sort(members.begin(), members.end(),
                     [](const SplitChoice& a, const SplitChoice& b) { return a.key < b.key; });
    const auto mine = std::find_if(members.begin(), members.end(), [&](const SplitChoice& choice) {
      return choice.rank == network.rank();
    });
    const int rank = static_cast<int>(mine - members.begin());

    // The first member creates the id and sends it to the others.
    constexpr uint64_t kSplitTag = uint64_t{0x73706c6974} << 16;
    Settings settings = parent->settings();
    settings.commId.clear();
    bootstrap::UniqueId id;
    if (rank == 0) {
      id = bootstrap::createUniqueId(settings);
      const auto packed = bootstrap::packUniqueId(id);
      for (size_t m = 1; m < members.size(); m++) {
        network.send(members[m].rank, kSplitTag, packed);
      }
    } else {
      const std::vector<std::byte> packed = network.receive(members.front().rank, kSplitTag);
      std::array<std::byte, bootstrap::kUniqueIdBytes> bytes{};
      std::memcpy(bytes.data(), packed.data(), std::min(packed.size(), bytes.size()));
      id = bootstrap::unpackUniqueId(bytes);
    }
    turn->end();
    return join(parent->runtime(), id, rank, static_cast<int>(members.size()), parent->device(),
                settings, options, std::move(health));
  };
}

}  // namespace unisono::comm
