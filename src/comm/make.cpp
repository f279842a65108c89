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
#include "base/stage_times.h"
#include "bootstrap/connection_pool.h"

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

// The making of a communicator by ranks of `parent`, under a number that these have for it.
struct Attempt {
  Communicator* parent;
  uint64_t number;

  // Why it cannot succeed, if another rank has said so over the connections of the parent, or the
  // parent has failed. That may have the same cause, of which all ranks hear before.
  std::optional<Error> failure() const {
    std::optional<Error> parentsError = parent->health().error();
    if (auto cause = parent->bootstrap().attemptFailure(number)) return cause;
    return parentsError;
  }
};

// Returns what make() returns. When it throws, the failure of one rank becomes known to the others.
template <typename Make>
std::shared_ptr<Communicator> makeTogether(const Attempt& attempt, const Make& make) {
  try {
    return make();
  } catch (const Error& error) {
    // A rank that has failed closes its connections, and says why over those of the parent.
    const auto deadline = std::chrono::steady_clock::now() + kCauseDelay;
    for (;;) {
      if (const auto failure = attempt.failure()) throw *failure;
      const bool isConsequence = error.code() == ErrorCode::remoteError;
      if (!isConsequence || std::chrono::steady_clock::now() >= deadline) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    attempt.parent->bootstrap().failAttempt(attempt.number, error.what());
    throw;
  }
}

// Makes a communicator over the bootstrap that `connect` returns. A failure of `attempt`, if it is
// one, ends the wait for the other ranks.
template <typename Connect>
std::shared_ptr<Communicator> joinOver(const Connect& connect, runtime::Runtime& runtime,
                                       int device, const Settings& settings, const Options& options,
                                       uint64_t id, std::shared_ptr<Health> health,
                                       const std::optional<Attempt>& attempt) {
  const auto joining = std::make_shared<std::atomic<bool>>(true);
  const auto isGivenUp = [health, joining, attempt] {
    if (health->signal().raised()) return true;
    return joining->load() && attempt && attempt->failure().has_value();
  };
  StageTimes times;
  auto bootstrap = connect(isGivenUp, health);
  times.end("bootstrap");
  Options own = options;
  own.id = id;
  auto made = Communicator::create(runtime, std::move(bootstrap), device, settings, own,
                                   std::move(health), std::move(times));
  joining->store(false);
  return made;
}

std::shared_ptr<Communicator> join(runtime::Runtime& runtime,
                                   std::span<const bootstrap::UniqueId> ids, int rank, int ranks,
                                   int device, const Settings& settings, const Options& options,
                                   std::shared_ptr<Health> health,
                                   const std::optional<Attempt>& attempt = std::nullopt) {
  const auto connect = [&](const auto& isGivenUp, const std::shared_ptr<Health>& watcher) {
    return bootstrap::Bootstrap::connect(ids, rank, ranks, settings, isGivenUp, watcher);
  };
  return joinOver(connect, runtime, device, settings, options, hashOf(ids.front()),
                  std::move(health), attempt);
}

// What a rank says in a split.
struct SplitChoice {
  int32_t color, key;
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

// Messages about shrinks, numbered from here.
constexpr uint64_t kShrinkTag = uint64_t{0x736872696e6b} << 16;

// Ends a wait for other ranks when the new communicator is destroyed or aborted.
std::function<void()> checkOf(const std::shared_ptr<Health>& health) {
  return [health] {
    if (health->hasFailed()) throw *health->error();
    if (health->signal().raised()) {
      throw invalidUsage("The new communicator was aborted").remedy("Make another communicator");
    }
  };
}

// Returns when all of `members`, ranks of `parent`, have called this function, so that nobody waits
// for one who does not come. The first of them says so to the others, or why it is not so, over the
// connections of the parent, whose failure does not matter. `check` throws to end a wait.
void awaitMembers(Communicator& parent, std::span<const int> members, uint64_t tag,
                  const std::function<void()>& check) {
  bootstrap::Bootstrap& network = parent.bootstrap();
  const int first = members.front();
  if (network.rank() != first) {
    network.sendAfterFailure(first, tag, {}, check);
    const std::vector<std::byte> answer = network.receiveAfterFailure(first, tag, check);
    if (answer.empty()) return;
    const std::string_view text(reinterpret_cast<const char*>(answer.data()), answer.size());
    throw Error(ErrorCode::remoteError, fmt::format("Rank {} reports: {}", first, text));
  }
  std::string answer;
  std::optional<Error> failure;
  try {
    for (const int member : members.subspan(1)) network.receiveAfterFailure(member, tag, check);
  } catch (const Error& error) {
    failure = error;
    answer = error.what();
  }
  for (const int member : members.subspan(1)) {
    try {
      network.sendAfterFailure(member, tag, std::as_bytes(std::span(answer)), check);
    } catch (const Error& error) {
      if (!failure) failure = error;
    }
  }
  if (failure) throw *failure;
}

// Joins the new communicator of `members`, ranks of `parent` in the order of their new ones.
std::shared_ptr<Communicator> joinMembers(Communicator& parent,
                                          std::unique_ptr<bootstrap::Seat> seat,
                                          std::span<const int> members, const Options& options,
                                          std::shared_ptr<Health> health,
                                          const std::optional<Attempt>& attempt = std::nullopt) {
  const Settings& settings = parent.settings();
  const uint64_t id = seat->communicator()[1];
  const auto mine = std::ranges::find(members, parent.rank());
  const auto connect = [&](const auto& isGivenUp, const std::shared_ptr<Health>& watcher) {
    return parent.bootstrap().connectMembers(std::move(seat),
                                             static_cast<int>(mine - members.begin()), members,
                                             settings, isGivenUp, watcher);
  };
  return joinOver(connect, parent.runtime(), parent.device(), settings, options, id,
                  std::move(health), attempt);
}

}  // namespace

Handle::InitFunction makeFromIds(runtime::Runtime& runtime, std::vector<bootstrap::UniqueId> ids,
                                 int rank, int ranks, int device, const Settings& settings,
                                 const Options& options) {
  return [=, &runtime, ids = std::move(ids)](std::shared_ptr<Health> health) {
    return join(runtime, ids, rank, ranks, device, settings, options, std::move(health));
  };
}

Handle::InitFunction makeFromSplit(const std::shared_ptr<Communicator>& parent, int color, int key,
                                   const Options& options) {
  // Splits of one parent use its bootstrap one after the other, in the order of the calls.
  return [=, turn = parent->turns().announce()](
             std::shared_ptr<Health> health) -> std::shared_ptr<Communicator> {
    if (!turn->await([&] { return health->signal().raised() || parent->aborted(); })) {
      throw invalidUsage("The split was aborted, or its parent")
          .rank(parent->rank())
          .remedy("Make another communicator");
    }
    bootstrap::Bootstrap& network = parent->bootstrap();
    // One number for each new communicator, that of its first rank.
    const uint64_t firstAttempt = network.numberAttempts(static_cast<uint64_t>(network.size()));
    std::unique_ptr<bootstrap::Seat> seat;
    if (color != kNoColor) seat = network.takeSeat(firstAttempt, color);
    const auto choices = network.allGatherShared(SplitChoice{color, key}, checkOf(health));
    turn->end();
    if (color == kNoColor) return nullptr;
    std::vector<int> members;
    for (size_t rank = 0; rank < choices->size(); rank++) {
      if ((*choices)[rank].color == color) members.push_back(static_cast<int>(rank));
    }
    std::ranges::stable_sort(members, {},
                             [&](int rank) { return (*choices)[static_cast<size_t>(rank)].key; });
    const Attempt attempt{parent.get(), firstAttempt + static_cast<uint64_t>(members.front())};
    return makeTogether(attempt, [&] {
      return joinMembers(*parent, std::move(seat), members, options, std::move(health), attempt);
    });
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
      throw invalidUsage("The growth was aborted, or the communicator that grows")
          .rank(parent->rank())
          .remedy("Make another communicator");
    }
    // Before the others are asked, so that a growth that fails there is not taken for the next one.
    const Attempt attempt{parent.get(), parent->bootstrap().numberAttempts(1)};
    GrowChoice mine{ranks, own ? 1u : 0u, {}};
    if (own) mine.id = bootstrap::packUniqueId(*own);
    const bootstrap::UniqueId agreed =
        agreeOnGrowth(parent->bootstrap().allGather(mine, checkOf(health)));
    turn->end();
    if (own) parent->dropGrowId();  // it serves one rendezvous, also if that fails
    const Settings& settings = parent->settings();
    return makeTogether(attempt, [&] {
      return join(parent->runtime(), std::span(&agreed, 1), parent->rank(), ranks, parent->device(),
                  settings, options, std::move(health), attempt);
    });
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
  return [=, number = kShrinkTag + parent->beginShrink()](std::shared_ptr<Health> health) {
    auto seat = parent->bootstrap().takeSeat(number, 0);
    awaitMembers(*parent, members, number, checkOf(health));
    return joinMembers(*parent, std::move(seat), members, options, std::move(health));
  };
}

}  // namespace unisono::comm
