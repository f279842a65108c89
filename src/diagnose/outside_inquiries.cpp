// SPDX-License-Identifier: Apache-2.0
#include "diagnose/outside_inquiries.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/log.h"

namespace unisono::diagnose {
namespace {

struct AnswerHead {
  std::atomic<uint64_t> number;  // 0 while the rest is being written
  uint64_t bytes;                // that follow: a message of encodeAnswer()
};

}  // namespace

bool OutsideInquiries::proceed(ProcessHead& head, int64_t now) {
  if (file_ != nullptr && now > until_) file_.reset();
  try {
    const uint64_t asked = head.inquiries.load(kAcquire);
    if (inquiry_ == nullptr) {
      if (asked == answered_) return false;
      number_ = asked;
      inquiry_ = JobInquiry::begin(now, kLongestInquiry, Question::Kind::everything);
    }
    if (inquiry_->proceed(now)) answer(now);
  } catch (const std::exception& error) {
    logInfo("`unisono doctor` gets no answer: {}", error.what());
    inquiry_.reset();
    answered_ = number_;
  }
  return inquiry_ != nullptr;
}

void OutsideInquiries::answer(int64_t now) {
  const JobState job = inquiry_->job(now);
  const std::vector<std::byte> message =
      encodeAnswer({.kind = Question::Kind::everything}, job.views, 0, SIZE_MAX);
  file_ = std::make_unique<runtime::host::MemorySegment>(sizeof(AnswerHead) + message.size(),
                                                         kAnswerFile);
  auto& head = *reinterpret_cast<AnswerHead*>(file_->address());
  head.bytes = message.size();
  std::memcpy(file_->address() + sizeof(AnswerHead), message.data(), message.size());
  head.number.store(number_, std::memory_order_release);
  until_ = now + kKept;
  answered_ = number_;
  inquiry_.reset();
}

std::optional<std::vector<RankView>> readAnswerFile(std::span<const std::byte> file,
                                                    uint64_t number, int64_t now) {
  if (file.size() < sizeof(AnswerHead)) return std::nullopt;
  const auto& head = *reinterpret_cast<const AnswerHead*>(file.data());
  if (head.number.load(kAcquire) < number) return std::nullopt;
  const uint64_t bytes = head.bytes;
  if (bytes > file.size() - sizeof(AnswerHead)) return std::nullopt;
  auto answer = decodeAnswer(file.subspan(sizeof(AnswerHead), bytes), now);
  if (!answer) return std::nullopt;
  return std::move(answer->views);
}

}  // namespace unisono::diagnose
