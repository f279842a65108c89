// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "diagnose/rank_view.h"

namespace unisono::diagnose {

class PeerTables;

// What a rank asks another one whose memory its process cannot map: a question and its answer are a
// message each, over the connections of the bootstrap.
struct Question {
  enum class Kind : uint32_t {
    calls,  // the calls of the rank itself that are to be compared with those of the asker
    ranks,  // the ranks of the communicator whose tables its process reads
    job,    // all tables that its process reads, of any communicator, as clients of RAS need them
    everything,  // the same with all that reports need
  };
  Kind kind = Kind::calls;
  uint32_t unused = 0;
  uint64_t number = 0;  // repeated in the answer
  // calls: the first collective, and the first message from the asker. ranks: the first rank. job,
  // everything: the first table.
  uint64_t first = 0, firstMessage = 0;
};
inline constexpr size_t kLongestAnswer = size_t{1} << 20;

struct Answer {
  Question::Kind kind = Question::Kind::calls;
  uint64_t number = 0;
  uint64_t next = 0;  // what to ask for as `first` for the rest; 0: this was all
  std::vector<RankView> views;
};

// The answer of rank `self`, one of this process, to rank `asker`; empty if it is not a question.
// At most kLongestAnswer bytes.
std::vector<std::byte> answerQuestion(std::span<const std::byte> question, const PeerTables& peers,
                                      int self, int asker);

// `views` as a message, as many as fit into `longest` bytes from `first` on. Times are those of
// this host.
std::vector<std::byte> encodeAnswer(const Question& question, std::span<const RankView> views,
                                    uint64_t first, size_t longest = kLongestAnswer);
// Nothing if `message` is not an answer. Times become those of this host, as if it had been sent
// at `now`.
std::optional<Answer> decodeAnswer(std::span<const std::byte> message, int64_t now);

}  // namespace unisono::diagnose
