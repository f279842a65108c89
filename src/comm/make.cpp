// SPDX-License-Identifier: Apache-2.0
#include "comm/make.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <span>
#include <string_view>
#include <thread>

#include "base/fnv.h"

namespace unisono::comm {
namespace {

uint64_t hashOf(const bootstrap::UniqueId& id) {
  const auto bytes = bootstrap::packUniqueId(id);
  Fnv hash;
  hash.add(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  return hash.value();
}

// How long a rank waits to hear why another one could not join the same communicator.
constexpr std::chrono::milliseconds kCauseDelay{500};

std::shared_ptr<Communicator> join(runtime::Runtime& runtime,
                                   std::span<const bootstrap::UniqueId> ids, int rank, int ranks,
                                   int device, const Settings& settings, const Options& options,
                                   std::shared_ptr<Health> health, Communicator* parent,
                                   std::optional<uint64_t> attempt = std::nullopt) {
  // While it waits for the others, the end or failure of one of them may be known to the parent
  // alone.
  const auto joining = std::make_shared<std::atomic<bool>>(true);
  const auto isGivenUp = [health, joining, parent, attempt] {
    if (health->signal().raised()) return true;
    if (!joining->load() || parent == nullptr) return false;
    return parent->health().hasFailed() ||
           (attempt && parent->bootstrap().attemptFailure(*attempt).has_value());
  };
  try {
    auto bootstrap = bootstrap::Bootstrap::connect(ids, rank, ranks, settings, isGivenUp, health);
    Options own = options;
    own.id = hashOf(ids.front());
    auto made = Communicator::create(runtime, std::move(bootstrap), device, settings, own,
                                     std::move(health));
    joining->store(false);
    return made;
  } catch (const Error& error) {
    // A rank that has failed closes its connections, and says why over those of the parent.
    const auto deadline = std::chrono::steady_clock::now() + kCauseDelay;
    for (;;) {
      if (parent != nullptr && parent->health().hasFailed()) throw *parent->health().error();
      if (!attempt) throw;
      if (const auto failure = parent->bootstrap().attemptFailure(*attempt)) throw *failure;
      const bool isConsequence = error.code() == ErrorCode::remoteError;
      if (!isConsequence || std::chrono::steady_clock::now() >= deadline) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    parent->bootstrap().failAttempt(*attempt, error.what());
    throw;
  }
}

struct SplitChoice {
  int32_t color, key, rank;
};

// What a rank knows of a growth.
struct GrowChoice {
  int32_t ranks;
  uint32_t ids;  // 1 on the rank that has made the id, else 0
  std::array<std::byte, bootstrap::kUniqueIdBytes> id;
};

// The id of the one rank that has made it. Throws the same Error on all ranks.
bootstrap::UniqueId agreeOnGrowth(const std::vector<GrowChoice>& choices) {
  const GrowChoice* maker = nullptr;
  for (size_t rank = 0; rank < choices.size(); rank++) {
    if (choices[rank].ranks != choices.front().ranks) {
      throw invalidArgument("nRanks of ncclCommGrow is {} on rank 0 and {} on rank {}",
                            choices.front().ranks, choices[rank].ranks, rank)
          .remedy("Pass the same number on all ranks");
    }
    if (choices[rank].ids == 0) continue;
    if (maker != nullptr) {
      throw invalidUsage("Ranks {} and {} have both called ncclCommGetUniqueId",
                         maker - choices.data(), rank)
          .remedy("Call it on one rank");
    }
    maker = &choices[rank];
  }
  if (maker == nullptr) {
    throw invalidUsage("No rank has called ncclCommGetUniqueId before ncclCommGrow")
        .remedy("Call it on one rank, and pass the id to the new ranks");
  }
  return bootstrap::unpackUniqueId(maker->id);
}

// Messages about new communicators, numbered from here.
constexpr uint64_t kSplitTag = uint64_t{0x73706c6974} << 16;
constexpr uint64_t kShrinkTag = uint64_t{0x736872696e6b} << 16;

template <typename Range>
std::vector<std::byte> asBytes(const Range& range) {
  const auto bytes = std::as_bytes(std::span(range));
  return {bytes.begin(), bytes.end()};
}

// Ends a wait for other ranks when the new communicator is destroyed or aborted.
std::function<void()> checkOf(const std::shared_ptr<Health>& health) {
  return [health] {
    if (health->hasFailed()) throw *health->error();
    if (health->signal().raised()) throw invalidUsage("The new communicator was aborted");
  };
}

// Reads the id that the first rank of a new communicator has sent, or why there is none.
bootstrap::UniqueId readId(const std::vector<std::byte>& answer, int from) {
  if (answer.size() != bootstrap::kUniqueIdBytes) {
    throw Error(
        ErrorCode::remoteError,
        fmt::format("Rank {} reports: {}", from,
                    std::string_view(reinterpret_cast<const char*>(answer.data()), answer.size())));
  }
  return bootstrap::unpackUniqueId(
      std::span<const std::byte, bootstrap::kUniqueIdBytes>(answer.data(), answer.size()));
}

}  // namespace

Handle::InitFunction makeFromIds(runtime::Runtime& runtime, std::vector<bootstrap::UniqueId> ids,
                                 int rank, int ranks, int device, const Settings& settings,
                                 const Options& options) {
  return [=, &runtime, ids = std::move(ids)](std::shared_ptr<Health> health) {
    return join(runtime, ids, rank, ranks, device, settings, options, std::move(health), nullptr);
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
    std::vector<SplitChoice> members =
        network.allGather(SplitChoice{color, key, network.rank()}, checkOf(health));
    // One number for each new communicator, that of its first rank.
    uint64_t attempt = network.numberAttempts(members.size());
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
    attempt += static_cast<uint64_t>(members.front().rank);

    // The first member creates the id and sends it to the others.
    const uint64_t tag = kSplitTag + network.collectivesBegun();
    Settings settings = parent->settings();
    settings.commId.clear();
    bootstrap::UniqueId id;
    if (rank == 0) {
      std::vector<std::byte> answer;
      std::optional<Error> failure;
      try {
        id = bootstrap::createUniqueId(settings);
        answer = asBytes(bootstrap::packUniqueId(id));
      } catch (const Error& error) {
        failure = error;
        answer = asBytes(std::string_view(error.what()));
      }
      for (size_t m = 1; m < members.size(); m++) network.send(members[m].rank, tag, answer);
      if (failure) throw *failure;
    } else {
      id = readId(network.receive(members.front().rank, tag), members.front().rank);
    }
    turn->end();
    return join(parent->runtime(), std::span(&id, 1), rank, static_cast<int>(members.size()),
                parent->device(), settings, options, std::move(health), parent.get(), attempt);
  };
}

Handle::InitFunction makeFromGrow(const std::shared_ptr<Communicator>& parent, int ranks,
                                  const std::optional<bootstrap::UniqueId>& id,
                                  const Options& options) {
  if (ranks <= parent->ranks()) {
    throw invalidArgument("nRanks must be more than the {} ranks of the communicator, got {}",
                          parent->ranks(), ranks)
        .remedy("Pass the number of existing and new ranks together");
  }
  const std::optional<bootstrap::UniqueId> own = parent->growId();
  if (own && id && *own != *id) {
    throw invalidArgument("uniqueId is not the one that this rank has from ncclCommGetUniqueId")
        .rank(parent->rank())
        .remedy("Pass that one, or NULL");
  }
  return [=, turn = parent->turns().announce()](std::shared_ptr<Health> health) {
    if (!turn->await([&] { return health->signal().raised() || parent->aborted(); })) {
      throw invalidUsage("The growth was aborted").rank(parent->rank());
    }
    GrowChoice mine{ranks, own ? 1u : 0u, {}};
    if (own) mine.id = bootstrap::packUniqueId(*own);
    const bootstrap::UniqueId agreed =
        agreeOnGrowth(parent->bootstrap().allGather(mine, checkOf(health)));
    const uint64_t attempt = parent->bootstrap().numberAttempts(1);
    turn->end();
    if (own) parent->dropGrowId();  // it serves one rendezvous, also if that fails
    Settings settings = parent->settings();
    settings.commId.clear();
    return join(parent->runtime(), std::span(&agreed, 1), parent->rank(), ranks, parent->device(),
                settings, options, std::move(health), parent.get(), attempt);
  };
}

Handle::InitFunction makeFromShrink(const std::shared_ptr<Communicator>& parent,
                                    std::span<const int> excluded, const Options& options) {
  std::vector<bool> isOut(static_cast<size_t>(parent->ranks()));
  for (const int rank : excluded) {
    if (rank < 0 || rank >= parent->ranks() || rank == parent->rank()) {
      throw invalidArgument("excludeRanksList has rank {}, and this is rank {} of {}", rank,
                            parent->rank(), parent->ranks())
          .remedy("List ranks of the communicator that do not call ncclCommShrink");
    }
    isOut[static_cast<size_t>(rank)] = true;
  }
  std::vector<int> members;
  for (int rank = 0; rank < parent->ranks(); rank++) {
    if (!isOut[static_cast<size_t>(rank)]) members.push_back(rank);
  }
  return [=, number = parent->beginShrink()](std::shared_ptr<Health> health) {
    const std::function<void()> check = checkOf(health);
    const uint64_t tag = kShrinkTag + number;
    const auto mine = std::find(members.begin(), members.end(), parent->rank());
    const int rank = static_cast<int>(mine - members.begin());
    const int first = members.front();
    bootstrap::Bootstrap& network = parent->bootstrap();
    Settings settings = parent->settings();
    settings.commId.clear();
    bootstrap::UniqueId id;
    if (rank == 0) {
      // Only when all are there is anybody told to join: who is told waits for all of them.
      std::vector<std::byte> answer;
      std::optional<Error> failure;
      try {
        for (size_t m = 1; m < members.size(); m++) {
          network.receiveAfterFailure(members[m], tag, check);
        }
        id = bootstrap::createUniqueId(settings);
        answer = asBytes(bootstrap::packUniqueId(id));
      } catch (const Error& error) {
        failure = error;
        answer = asBytes(std::string_view(error.what()));
      }
      for (size_t m = 1; m < members.size(); m++) {
        try {
          network.sendAfterFailure(members[m], tag, answer, check);
        } catch (const Error& error) {
          if (!failure) failure = error;
        }
      }
      if (failure) throw *failure;
    } else {
      network.sendAfterFailure(first, tag, {}, check);
      id = readId(network.receiveAfterFailure(first, tag, check), first);
    }
    return join(parent->runtime(), std::span(&id, 1), rank, static_cast<int>(members.size()),
                parent->device(), settings, options, std::move(health), nullptr);
  };
}

}  // namespace unisono::comm
