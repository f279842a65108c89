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
  auto bootstrap = connect(isGivenUp, health);
  Options own = options;
  own.id = id;
  auto made =
      Communicator::create(runtime, std::move(bootstrap), device, settings, own, std::move(health));
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

// What a rank says in a split. The seat is nothing where it has no color, or could not listen.
struct SplitChoice {
  int32_t color, key, rank;
  uint32_t hasSeat;
  bootstrap::Bootstrap::Seat seat;
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

// Returns the id of a new communicator of `members`, ranks of `parent`. The first of them makes it
// and sends it to the others, or why there is none, over the connections of the parent, whose
// failure does not matter. It does so only when all have called this function, so that nobody waits
// at a rendezvous for one who does not come. `check` throws to end a wait.
bootstrap::UniqueId agreeOnId(Communicator& parent, std::span<const int> members, uint64_t tag,
                              const std::function<void()>& check) {
  bootstrap::Bootstrap& network = parent.bootstrap();
  const int first = members.front();
  if (network.rank() != first) {
    network.sendAfterFailure(first, tag, {}, check);
    const std::vector<std::byte> answer = network.receiveAfterFailure(first, tag, check);
    if (answer.size() == bootstrap::kUniqueIdBytes) {
      return bootstrap::unpackUniqueId(
          std::span<const std::byte, bootstrap::kUniqueIdBytes>(answer.data(), answer.size()));
    }
    const std::string_view text(reinterpret_cast<const char*>(answer.data()), answer.size());
    throw Error(ErrorCode::remoteError, fmt::format("Rank {} reports: {}", first, text));
  }
  bootstrap::UniqueId id;
  std::vector<std::byte> answer;
  std::optional<Error> failure;
  try {
    for (const int member : members.subspan(1)) network.receiveAfterFailure(member, tag, check);
    Settings settings = parent.settings();
    settings.commId.clear();
    id = bootstrap::createUniqueId(settings);
    answer = asBytes(bootstrap::packUniqueId(id));
  } catch (const Error& error) {
    failure = error;
    answer = asBytes(std::string_view(error.what()));
  }
  for (const int member : members.subspan(1)) {
    try {
      network.sendAfterFailure(member, tag, answer, check);
    } catch (const Error& error) {
      if (!failure) failure = error;
    }
  }
  if (failure) throw *failure;
  return id;
}

// Joins the new communicator of `members` under the id that they agree on.
std::shared_ptr<Communicator> joinMembers(Communicator& parent, std::span<const int> members,
                                          const bootstrap::UniqueId& id, const Options& options,
                                          std::shared_ptr<Health> health) {
  Settings settings = parent.settings();
  settings.commId.clear();
  const auto mine = std::find(members.begin(), members.end(), parent.rank());
  return join(parent.runtime(), std::span(&id, 1), static_cast<int>(mine - members.begin()),
              static_cast<int>(members.size()), parent.device(), settings, options,
              std::move(health));
}

// Joins the members of a split, who have told each other where they listen.
std::shared_ptr<Communicator> joinSeats(Communicator& parent,
                                        std::span<const SplitChoice* const> members,
                                        bootstrap::Listener listener, const Options& options,
                                        std::shared_ptr<Health> health, const Attempt& attempt) {
  std::vector<bootstrap::Bootstrap::Seat> seats;
  int rank = 0;
  for (const SplitChoice* member : members) {
    if (member->hasSeat == 0) {
      throw Error(ErrorCode::remoteError,
                  fmt::format("Rank {} cannot take part in the split", member->rank))
          .rank(parent.rank())
          .peer(member->rank);
    }
    if (member->rank == parent.rank()) rank = static_cast<int>(seats.size());
    seats.push_back(member->seat);
  }
  Settings settings = parent.settings();
  settings.commId.clear();
  const auto connect = [&](const auto& isGivenUp, const std::shared_ptr<Health>& watcher) {
    return parent.bootstrap().connectMembers(std::move(listener), rank, seats, settings, isGivenUp,
                                             watcher);
  };
  Fnv id;
  for (const uint64_t part : seats.front().secret) id.add(part);
  return joinOver(connect, parent.runtime(), parent.device(), settings, options, id.value(),
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
      throw invalidUsage("The split was aborted").rank(parent->rank());
    }
    bootstrap::Bootstrap& network = parent->bootstrap();
    SplitChoice mine{color, key, network.rank(), 0, {}};
    bootstrap::Listener listener;
    std::optional<Error> failure;  // for later, as the others wait for this rank
    if (color != kNoColor) {
      try {
        listener = network.openSeat([health] { return health->signal().raised(); });
        mine.seat = {listener.address(), bootstrap::randomSecret()};
        mine.hasSeat = 1;
      } catch (const Error& error) {
        failure = error;
      }
    }
    const auto choices = network.allGatherShared(mine, checkOf(health));
    // One number for each new communicator, that of its first rank.
    const uint64_t firstAttempt = network.numberAttempts(choices->size());
    turn->end();
    if (color == kNoColor) return nullptr;
    std::vector<const SplitChoice*> members;
    for (const SplitChoice& choice : *choices) {
      if (choice.color == color) members.push_back(&choice);
    }
    std::ranges::stable_sort(members, {}, [](const SplitChoice* choice) { return choice->key; });
    const Attempt attempt{parent.get(),
                          firstAttempt + static_cast<uint64_t>(members.front()->rank)};
    return makeTogether(attempt, [&] {
      if (failure) throw *failure;
      return joinSeats(*parent, members, std::move(listener), options, std::move(health), attempt);
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
      throw invalidUsage("The growth was aborted").rank(parent->rank());
    }
    GrowChoice mine{ranks, own ? 1u : 0u, {}};
    if (own) mine.id = bootstrap::packUniqueId(*own);
    const bootstrap::UniqueId agreed =
        agreeOnGrowth(parent->bootstrap().allGather(mine, checkOf(health)));
    const Attempt attempt{parent.get(), parent->bootstrap().numberAttempts(1)};
    turn->end();
    if (own) parent->dropGrowId();  // it serves one rendezvous, also if that fails
    Settings settings = parent->settings();
    settings.commId.clear();
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
  return [=, number = parent->beginShrink()](std::shared_ptr<Health> health) {
    const bootstrap::UniqueId id =
        agreeOnId(*parent, members, kShrinkTag + number, checkOf(health));
    return joinMembers(*parent, members, id, options, std::move(health));
  };
}

}  // namespace unisono::comm
