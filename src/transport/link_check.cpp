// SPDX-License-Identifier: Apache-2.0
#include "transport/link_check.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/math.h"
#include "transport/transport.h"

namespace unisono::transport {
namespace {

constexpr size_t kWords = 512;
constexpr size_t kBytes = kWords * sizeof(uint64_t);

std::array<uint64_t, kWords> dataOf(uint64_t seed) {
  std::array<uint64_t, kWords> data;
  for (size_t i = 0; i < kWords; i++) data[i] = mix64(seed + i);
  return data;
}
// What the other side writes, after it has read the owner's data.
constexpr uint64_t replyTo(uint64_t seed) {
  return ~seed;
}

// The links of this process that were found to be right.
class KnownLinks {
 public:
  static KnownLinks& get() {
    static auto* instance = new KnownLinks;
    return *instance;
  }
  bool has(uint64_t link) {
    const std::lock_guard lock(mutex_);
    return links_.contains(link);
  }
  void add(uint64_t link) {
    const std::lock_guard lock(mutex_);
    links_.insert(link);
  }

 private:
  std::mutex mutex_;
  std::set<uint64_t> links_;
};

Error wrongData(const char* how, const char* mapperGpu, int mapper, const char* ownerGpu, int owner,
                uint64_t wrongBytes) {
  return Error(ErrorCode::systemError,
               fmt::format("The link between two GPUs does not work: of {} bytes that GPU {} (rank "
                           "{}) {} the memory of GPU {} (rank {}), {} were wrong",
                           kBytes, mapperGpu, mapper, how, ownerGpu, owner, wrongBytes))
      .remedy(
          "Check the link (nvidia-smi nvlink -s, dmesg) and that no IOMMU or PCIe switch "
          "redirects transfers between GPUs. NCCL_P2P_DISABLE=1 uses host memory instead, and "
          "UNISONO_VERIFY_LINKS=0 does not look");
}

}  // namespace

uint64_t LinkCheck::linkTo(int peer) const {
  Fnv link;
  link.add(context_.own().deviceHash);
  link.add(context_.places[static_cast<size_t>(peer)].deviceHash);
  return link.value();
}

const std::array<char, 32>& LinkCheck::busId() {
  if (busId_[0] == '\0') {
    const std::string text = context_.runtime.properties(context_.own().device).busId;
    std::memcpy(busId_.data(), text.data(), std::min(text.size(), busId_.size() - 1));
  }
  return busId_;
}

void LinkCheck::copy(void* to, const void* from) {
  if (stream_ == nullptr) stream_ = context_.runtime.createStream(context_.own().device);
  context_.runtime.copyAsync(to, from, kBytes, stream_.get());
  context_.runtime.synchronize(stream_.get());
}

uint64_t LinkCheck::countWrong(const std::byte* deviceAddress, uint64_t seed) {
  std::array<uint64_t, kWords> found;
  copy(found.data(), deviceAddress);
  const auto expected = dataOf(seed);
  const auto foundBytes = std::as_bytes(std::span(found));
  const auto expectedBytes = std::as_bytes(std::span(expected));
  uint64_t wrong = 0;
  for (size_t i = 0; i < kBytes; i++) wrong += foundBytes[i] != expectedBytes[i] ? 1 : 0;
  return wrong;
}

LinkCheck::Request LinkCheck::begin(int peer) {
  const PeerPlace& place = context_.places[static_cast<size_t>(peer)];
  const bool isLink =
      context_.linkBetween(context_.config.rank, peer).transport == TransportKind::peer &&
      place.deviceHash != context_.own().deviceHash;
  if (!context_.options.verifiesLinks || !isLink || pending_.contains(peer) ||
      KnownLinks::get().has(linkTo(peer))) {
    return {};
  }
  const memory::Block block = context_.arena.allocate(2 * kBytes);
  const auto own = reinterpret_cast<uint64_t>(block.address);
  const uint64_t seed = mix64(context_.own().process ^ own) | 1;
  const auto data = dataOf(seed);
  copy(block.address, data.data());
  pending_[peer] = {seed, block.address + kBytes};
  return {seed, block.shared, busId()};
}

LinkCheck::Answer LinkCheck::answer(const Request& request) {
  // The first half holds what is read, the second what is written.
  if (scratch_ == nullptr) scratch_ = context_.arena.allocate(2 * kBytes).address;
  std::byte* theirs = mappings_.map(request.block);
  copy(scratch_, theirs);
  const Answer answer{countWrong(scratch_, request.seed), busId()};
  const auto reply = dataOf(replyTo(request.seed));
  copy(scratch_ + kBytes, reply.data());
  copy(theirs + kBytes, scratch_ + kBytes);
  return answer;
}

void LinkCheck::throwIfWrong(int peer, const Request& request, const Answer& answer) const {
  if (answer.wrongBytes == 0) return;
  throw wrongData("read from", answer.busId.data(), context_.config.rank, request.busId.data(),
                  peer, answer.wrongBytes);
}

std::vector<int> LinkCheck::pendingPeers() const {
  std::vector<int> peers;
  for (const auto& [peer, check] : pending_) peers.push_back(peer);
  return peers;
}

void LinkCheck::finish(int peer, const Answer& answer) {
  const Pending check = pending_.at(peer);
  pending_.erase(peer);
  const int rank = context_.config.rank;
  if (answer.wrongBytes != 0) {
    throw wrongData("read from", answer.busId.data(), peer, busId().data(), rank,
                    answer.wrongBytes);
  }
  const uint64_t wrong = countWrong(check.address, replyTo(check.seed));
  if (wrong != 0) {
    throw wrongData("wrote to", answer.busId.data(), peer, busId().data(), rank, wrong);
  }
  KnownLinks::get().add(linkTo(peer));
  logInfo("rank {}: the link of GPU {} to GPU {} (rank {}) was verified", rank, busId().data(),
          answer.busId.data(), peer);
}

}  // namespace unisono::transport
