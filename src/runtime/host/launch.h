// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>

#include "base/error.h"
#include "runtime/host/executor.h"
#include "runtime/runtime.h"

namespace unisono::runtime::host {

// An error of a task, kept until somebody asks.
struct Failure {
  ErrorCode code;
  std::string text;
};

// The exception that is being handled. Call inside a handler.
Failure currentFailure();

// Zeroed storage on a cache line's boundary.
class AlignedStorage {
 public:
  explicit AlignedStorage(size_t bytes);
  std::byte* data() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
  };
  static constexpr std::align_val_t kAlignment{64};
  std::unique_ptr<std::byte[], Delete> data_;
};

// One launch of a kernel: a task, or one for each role, for each group of each block.
class Launch {
 public:
  // Copies the arguments. Throws invalidArgument for a shape that cannot run.
  Launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments, int rolesPerGroup);

  // Runs all groups to their end; called by a task. Returns the latest virtual clock of the groups
  // (ns), which start at `clock`.
  uint64_t run(Executor& executor, int device, uint64_t clock);

  // The first error of a group, if any; after run().
  std::optional<Failure>& failure() { return failure_; }

 private:
  void runGroup(int block, int group, int role);
  size_t groupSharedBytes() const;
  void* groupShared(int block, int group) const;

  Kernel kernel_;
  LaunchShape shape_;
  size_t sharedStride_;
  AlignedStorage arguments_;
  AlignedStorage shared_;
  int roles_;
  AlignedStorage groupShared_;
  Latch ended_;
  std::atomic<uint64_t> clock_{0};
  std::mutex mutex_;
  std::optional<Failure> failure_;
};

}  // namespace unisono::runtime::host
