// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "diagnose/job_inquiry.h"
#include "runtime/host/segment.h"

namespace unisono::diagnose {

// What `unisono doctor` asks a process: the ranks of all hosts. It raises ProcessHead::inquiries,
// and finds the answer among the descriptors of the process, a file whose head has this number or a
// later one. So nobody listens for it, and whoever may read the tables of a process may ask it.
inline constexpr char kAnswerFile[] = "unisono-answer";

class OutsideInquiries {
 public:
  // Called by the watchdog's thread. Returns whether it is to be called again soon. Takes
  // `kLongestInquiry` for an answer at most, which stays for `kKept`.
  bool proceed(ProcessHead& head, int64_t now);
  static constexpr int64_t kLongestInquiry = 1'000'000'000, kKept = 10'000'000'000;

 private:
  void answer(int64_t now);

  uint64_t answered_ = 0, number_ = 0;
  std::shared_ptr<JobInquiry> inquiry_;
  std::unique_ptr<runtime::host::MemorySegment> file_;
  int64_t until_ = 0;
};

// The ranks in an answer file; nothing if it is not one to inquiry `number` or a later one.
std::optional<std::vector<RankView>> readAnswerFile(std::span<const std::byte> file,
                                                    uint64_t number, int64_t now);

}  // namespace unisono::diagnose
