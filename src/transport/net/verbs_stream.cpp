// SPDX-License-Identifier: Apache-2.0
#include "transport/net/verbs_stream.h"

#include <arpa/inet.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace unisono::transport {
namespace {

// What splits the data of a slot.
constexpr size_t kPartAlignment = 128;
// With adaptive routing the data of a slot and its immediate data are two writes.
constexpr uint32_t kWritesOfSlot = 2;
// The field wr_id; others are queue pairs or steps.
constexpr uint64_t kCreditRequest = ~uint64_t{0}, kFlushRequest = kCreditRequest - 1;
// The word of the page of credits that flushes read into.
constexpr size_t kFlushWord = PageMemory::kBytes / sizeof(uint64_t) - 1;
static_assert(device::kMaxReportedSlots < kFlushWord);

ibv_sge partOf(const ibv_mr& region, const void* data, size_t bytes) {
  return {reinterpret_cast<uintptr_t>(data), static_cast<uint32_t>(bytes), region.lkey};
}

}  // namespace

PageMemory::PageMemory()
    : memory_(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  if (memory_ == MAP_FAILED) throw systemError(errno, "mmap");
}

PageMemory::~PageMemory() {
  ::munmap(memory_, kBytes);
}

void VerbsStream::connect(const VerbsEndpoint& remote) {
  remote_ = remote;
  connection_.connect(remote);
}

bool VerbsStream::isUsable() {
  if (const std::string& failure = connection_.failure(); !failure.empty()) failure_ = failure;
  return failure_.empty();
}

VerbsSendStream::VerbsSendStream(const VerbsPort& port, const VerbsOptions& options,
                                 size_t queuePairs, const StreamMemory& memory, VerbsRegion slots)
    : VerbsStream(port, options, {queuePairs, kWritesOfSlot * memory.slotCount, 1}, memory),
      unwritten_(memory.slotCount),
      slots_(slots != nullptr ? connection_.keep(std::move(slots))
                              : connection_.registerMemory(memory.slots, memory.bytes(), 0)) {
  const ibv_mr& credits = connection_.registerMemory(
      credits_.words(), PageMemory::kBytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  endpoint_ = connection_.endpoint();
  endpoint_.address = reinterpret_cast<uintptr_t>(credits_.words());
  endpoint_.key = credits.rkey;
  endpoint_.slots = memory.slotCount;
  endpoint_.slotBytes = memory.slotBytes;
  endpoint_.serviceLevel = options.serviceLevel;
  endpoint_.trafficClass = options.trafficClass;
  endpoint_.splitsData = options.splitsData ? 1 : 0;
}

bool VerbsSendStream::isPending() const {
  return failure_.empty() && (step_ < posted_ || isBegun(posted_));
}

// Returns whether the adapter has taken it.
bool VerbsSendStream::write(uint64_t step) {
  const size_t bytes = filledBytes(step);
  const size_t pairs = connection_.queuePairs();
  if (!connection_.options().splitsData) {
    unwritten_[step % memory_.slotCount] = 1;
    return write(step % pairs, step, 0, bytes, bytes);
  }
  unwritten_[step % memory_.slotCount] = static_cast<uint32_t>(pairs);
  const size_t part = roundUp((bytes + pairs - 1) / pairs, kPartAlignment);
  for (size_t pair = 0; pair < pairs; pair++) {
    const size_t begin = std::min(bytes, pair * part);
    if (!write(pair, step, begin, std::min(bytes - begin, part), bytes)) return false;
  }
  return true;
}

bool VerbsSendStream::write(size_t pair, uint64_t step, size_t begin, size_t bytes, size_t total) {
  const size_t offset = (step & (memory_.slotCount - 1)) * size_t{memory_.slotBytes} + begin;
  ibv_sge part = partOf(slots_, memory_.slots + offset, bytes);
  ibv_send_wr data{};
  data.wr_id = step;
  data.opcode = IBV_WR_RDMA_WRITE;
  data.sg_list = &part;
  data.num_sge = bytes > 0 ? 1 : 0;
  data.wr.rdma.remote_addr = remote_.address + offset;
  data.wr.rdma.rkey = remote_.key;
  ibv_send_wr last = data;
  last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  last.imm_data = htonl(static_cast<uint32_t>(total));
  last.send_flags = IBV_SEND_SIGNALED;
  // Packets of large writes may take several routes. The immediate data then come after them.
  if (!connection_.adaptsRoutes() || bytes <= connection_.options().adaptiveRoutingThreshold) {
    return connection_.post(pair, last);
  }
  last.num_sge = 0;
  data.next = &last;
  return connection_.post(pair, data);
}

StreamProgress VerbsSendStream::progress() {
  StreamProgress progress;
  for (const ibv_wc& completion : connection_.poll()) {
    unwritten_[completion.wr_id % memory_.slotCount]--;
  }
  if (!isUsable()) return progress;
  while (step_ < posted_ && unwritten_[step_ % memory_.slotCount] == 0) {
    release(step_++);
    progress.moved = true;
  }
  const uint64_t credits = std::atomic_ref(*credits_.words()).load(std::memory_order_acquire);
  for (int i = 0; i < kSlotsAtOnce && posted_ < credits && isFilled(posted_); i++) {
    if (!write(posted_)) break;
    posted_++;
    progress.moved = true;
  }
  isUsable();
  progress.mustLook = isPending();
  return progress;
}

int VerbsReceiveStream::accessOf(const VerbsOptions& options, bool onDevice) {
  int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (options.relaxedOrdering) access |= IBV_ACCESS_RELAXED_ORDERING;
  if (onDevice) access |= IBV_ACCESS_REMOTE_READ;  // of flushes
  return access;
}

VerbsReceiveStream::VerbsReceiveStream(const VerbsPort& port, const VerbsOptions& options,
                                       const StreamMemory& memory, VerbsRegion slots, bool flushes)
    : VerbsStream(port, options, {options.queuePairs, memory.slotCount, memory.slotCount, flushes},
                  memory),
      arrived_(options.queuePairs),
      flushes_(flushes),
      words_(connection_.registerMemory(credits_.words(), PageMemory::kBytes,
                                        IBV_ACCESS_LOCAL_WRITE)) {
  const ibv_mr& region = slots != nullptr ? connection_.keep(std::move(slots))
                                          : connection_.registerMemory(memory.slots, memory.bytes(),
                                                                       accessOf(options, false));
  endpoint_ = connection_.endpoint();
  endpoint_.address = reinterpret_cast<uintptr_t>(memory.slots);
  endpoint_.key = region.rkey;
  endpoint_.slots = memory.slotCount;
  endpoint_.slotBytes = memory.slotBytes;
}

// Returns whether there may be room for another one.
bool VerbsReceiveStream::post() {
  if (!isFree(posted_)) return false;
  const size_t pairs = connection_.queuePairs();
  for (size_t pair = 0; pair < pairs; pair++) {
    if (remote_.splitsData == 0 && pair != posted_ % pairs) continue;
    ibv_recv_wr request{};
    request.wr_id = pair;
    if (!connection_.post(pair, request)) return false;
  }
  posted_++;
  return true;
}

// Each value has a word of its own, which the adapter has read before its turn comes again.
bool VerbsReceiveStream::sendCredits() {
  if (told_ == posted_ || unsent_ == memory_.slotCount) return false;
  uint64_t* const word = credits_.words() + posted_ % memory_.slotCount;
  *word = posted_;
  ibv_sge part = partOf(words_, word, sizeof(*word));
  ibv_send_wr request{};
  request.wr_id = kCreditRequest;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  request.sg_list = &part;
  request.num_sge = 1;
  request.wr.rdma.remote_addr = remote_.address;
  request.wr.rdma.rkey = remote_.key;
  if (!connection_.post(0, request)) return false;
  told_ = posted_;
  unsent_++;
  return true;
}

bool VerbsReceiveStream::isComplete(uint64_t step) const {
  if (remote_.splitsData != 0) {
    return std::all_of(arrived_.begin(), arrived_.end(),
                       [step](uint64_t count) { return count > step; });
  }
  return arrived_[step % arrived_.size()] > step / arrived_.size();
}

// Begins a flush of the slots that have arrived, if there are any.
bool VerbsReceiveStream::flushArrived() {
  uint64_t arrived = step_;
  while (arrived < posted_ && isComplete(arrived)) arrived++;
  if (arrived == step_) return false;
  ibv_sge part = partOf(words_, credits_.words() + kFlushWord, sizeof(uint64_t));
  ibv_send_wr request{};
  request.wr_id = kFlushRequest;
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = IBV_SEND_SIGNALED;
  request.sg_list = &part;
  request.num_sge = 1;
  request.wr.rdma.remote_addr = endpoint_.address;
  request.wr.rdma.rkey = endpoint_.key;
  if (connection_.flush(request)) flushedTo_ = arrived;
  return true;
}

StreamProgress VerbsReceiveStream::progress() {
  StreamProgress progress;
  for (const ibv_wc& completion : connection_.poll()) {
    if (completion.wr_id == kCreditRequest) {
      unsent_--;
      continue;
    }
    if (completion.wr_id == kFlushRequest) {
      step_ = flushedTo_;
      setTail(step_);
      progress.moved = true;
      continue;
    }
    const uint64_t pairs = remote_.splitsData != 0 ? 1 : arrived_.size();
    const uint64_t pair = remote_.splitsData != 0 ? 0 : completion.wr_id;
    noteBytes(arrived_[completion.wr_id]++ * pairs + pair, ntohl(completion.imm_data));
    if (ntohl(completion.imm_data) > memory_.slotBytes) {
      failure_ = "its data are not those of this connection";
      return progress;
    }
  }
  if (!isUsable()) return progress;
  while (!flushes_ && step_ < posted_ && isComplete(step_)) {
    setTail(++step_);
    progress.moved = true;
  }
  if (flushes_ && flushedTo_ == step_) progress.moved |= flushArrived();
  while (post()) {
  }
  progress.moved |= sendCredits();
  isUsable();
  return progress;
}

}  // namespace unisono::transport
