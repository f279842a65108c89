// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/local_ranks.h"

namespace unisono::bootstrap {

std::shared_ptr<LocalRanks> LocalRanks::join(const Secret& session, int rank) {
  static std::mutex mutex;
  // Never destroyed: the process may exit while another thread makes a communicator.
  static auto& communicators = *new std::map<Secret, std::weak_ptr<LocalRanks>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<LocalRanks> ranks;
  if (const auto found = communicators.find(session); found != communicators.end()) {
    ranks = found->second.lock();
  }
  if (ranks == nullptr) {
    std::erase_if(communicators, [](const auto& entry) { return entry.second.expired(); });
    ranks = std::make_shared<LocalRanks>();
    communicators.insert_or_assign(session, ranks);
  }
  const std::lock_guard ranksLock(ranks->mutex_);
  ranks->ranks_.insert(rank);
  return ranks;
}

bool LocalRanks::contains(int rank) const {
  const std::lock_guard lock(mutex_);
  return ranks_.contains(rank);
}

// Called with the lock held. By the first end of an all-gather every rank has joined.
LocalRanks::Bytes LocalRanks::take(uint64_t number) {
  const auto found = results_.find(number);
  if (found == results_.end()) return nullptr;
  Bytes bytes = found->second.bytes;
  if (++found->second.taken == ranks_.size()) results_.erase(found);
  return bytes;
}

LocalRanks::Bytes LocalRanks::add(uint64_t number, std::vector<std::byte> result) {
  auto bytes = std::make_shared<const std::vector<std::byte>>(std::move(result));
  const std::lock_guard lock(mutex_);
  results_.try_emplace(number, Result{std::move(bytes)});
  return take(number);
}

LocalRanks::Bytes LocalRanks::find(uint64_t number) {
  const std::lock_guard lock(mutex_);
  return take(number);
}

LocalRanks::Value LocalRanks::makeOnce(uint64_t number, std::type_index type,
                                       const std::function<Value()>& make) {
  std::shared_ptr<Made> made;
  {
    const std::lock_guard lock(mutex_);
    auto& entry = made_[number];
    if (entry == nullptr) entry = std::make_shared<Made>(type);
    if (entry->type != type) throw internalError("Ranks of one process share different things");
    made = entry;
    if (++made->taken == ranks_.size()) made_.erase(number);
  }
  const std::lock_guard lock(made->mutex);
  if (made->error) throw Error(*made->error);
  if (made->value != nullptr) return made->value;
  try {
    made->value = make();
  } catch (const Error& error) {
    made->error = error;
    throw;
  }
  return made->value;
}

}  // namespace unisono::bootstrap
