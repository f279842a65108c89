// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/launch.h"

#include <fmt/format.h>

#include <cstring>

#include "base/math.h"
#include "runtime/host/schedule.h"

namespace unisono::runtime::host {
namespace {

constexpr int kMaxGroups = 1 << 20;

const LaunchShape& checked(const Kernel& kernel, const LaunchShape& shape, const void* arguments) {
  if (kernel.hostFunction == nullptr) {
    throw internalError("Kernel {} has no host form", kernel.name);
  }
  if (shape.blocks < 1 || shape.groupsPerBlock < 1 ||
      shape.blocks > kMaxGroups / shape.groupsPerBlock) {
    throw invalidArgument("Kernel {} cannot run with {} blocks of {} groups", kernel.name,
                          shape.blocks, shape.groupsPerBlock);
  }
  if (arguments == nullptr && shape.argumentBytes > 0) {
    throw invalidArgument("Kernel {} was launched without its arguments", kernel.name);
  }
  return shape;
}

}  // namespace

Failure currentFailure() {
  try {
    throw;
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const std::exception& error) {
    return {ErrorCode::internalError, error.what()};
  } catch (...) {
    return {ErrorCode::internalError, "An exception of an unknown type ended a task"};
  }
}

AlignedStorage::AlignedStorage(size_t bytes) {
  if (bytes == 0) return;
  data_.reset(static_cast<std::byte*>(::operator new[](bytes, kAlignment)));
  std::memset(data_.get(), 0, bytes);
}

Launch::Launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments,
               int rolesPerGroup)
    : kernel_(kernel),
      shape_(checked(kernel, shape, arguments)),
      sharedStride_((shape.sharedBytes + 63) / 64 * 64),
      arguments_(shape.argumentBytes),
      shared_(sharedStride_ * static_cast<size_t>(shape.blocks)),
      roles_(rolesPerGroup),
      groupShared_(groupSharedBytes()),
      ended_(static_cast<uint32_t>(shape.blocks * shape.groupsPerBlock * rolesPerGroup)) {
  if (shape.argumentBytes > 0) std::memcpy(arguments_.data(), arguments, shape.argumentBytes);
}

uint64_t Launch::run(Executor& executor, int device, uint64_t clock) {
  clock_ = clock;
  executor.forgetMemory(groupShared_.data(), groupSharedBytes());
  for (int block = 0; block < shape_.blocks; block++) {
    for (int group = 0; group < shape_.groupsPerBlock; group++) {
      if (roles_ > 1) {
        executor.nameMemory(groupShared(block, group), kGroupSharedBytes,
                            fmt::format("barriers of {} block {} group {} on device {}",
                                        kernel_.name, block, group, device));
      }
      for (int role = 0; role < roles_; role++) {
        try {
          executor.spawn({.info = {kernel_.name, device, block, group, roles_ > 1 ? role : -1},
                          .clock = clock,
                          .body = [this, block, group, role] { runGroup(block, group, role); },
                          .afterEnd = {}});
        } catch (...) {
          // The groups that run may wait for this one for ever, but they look at the abort flag.
          {
            std::lock_guard lock(mutex_);
            if (!failure_) failure_ = currentFailure();
          }
          ended_.arrive();
        }
      }
    }
  }
  ended_.wait();
  executor.forgetMemory(groupShared_.data(), groupSharedBytes());
  return clock_;
}

size_t Launch::groupSharedBytes() const {
  if (roles_ == 1) return 0;
  return kGroupSharedBytes * static_cast<size_t>(shape_.blocks * shape_.groupsPerBlock);
}

void* Launch::groupShared(int block, int group) const {
  if (roles_ == 1) return nullptr;
  return groupShared_.data() +
         kGroupSharedBytes * static_cast<size_t>(block * shape_.groupsPerBlock + group);
}

void Launch::runGroup(int block, int group, int role) {
  HostGroupContext context{
      .block = block,
      .blocks = shape_.blocks,
      .group = group,
      .groups = shape_.groupsPerBlock,
      .blockShared =
          sharedStride_ > 0 ? shared_.data() + sharedStride_ * static_cast<size_t>(block) : nullptr,
      .role = role,
      .roles = roles_,
      .groupShared = groupShared(block, group),
  };
  try {
    kernel_.hostFunction(arguments_.data(), context);
  } catch (...) {
    Failure failure = currentFailure();
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }
  atomicMax(clock_, virtualClock());
  ended_.arrive();
}

}  // namespace unisono::runtime::host
