// SPDX-License-Identifier: Apache-2.0
#include "diagnose/remote_ranks.h"

#include <algorithm>
#include <set>

#include "diagnose/journal.h"
#include "diagnose/watchdog.h"

namespace unisono::diagnose {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
// Between an answer and the next question to that rank, and before one that is not answered is
// repeated. An answer may hold nothing of that rank.
constexpr int64_t kComparePause = 200 * kMillisecond, kCompareRetry = 500 * kMillisecond;
constexpr size_t kMostComparisons = 16;  // that are asked for at once
// What each stage waits for answers. A report is late by three of these at most.
constexpr int64_t kStageTime = 700 * kMillisecond;
constexpr size_t kMostHeard = 4096;

}  // namespace

RemoteRanks::RemoteRanks(std::shared_ptr<PeerTables> peers, int rank, int uplink, Ask ask)
    : peers_(std::move(peers)), rank_(rank), uplink_(uplink), ask_(std::move(ask)) {}

void RemoteRanks::hear(std::vector<std::byte> answer) {
  const std::lock_guard lock(mutex_);
  if (heard_.size() < kMostHeard) heard_.push_back({std::move(answer), steadyNow()});
}

bool RemoteRanks::ask(int rank, const Question& question, bool connects) const {
  return ask_ && ask_(rank, std::as_bytes(std::span(&question, 1)), connects);
}

void RemoteRanks::takeAnswers() {
  std::vector<Heard> heard;
  {
    const std::lock_guard lock(mutex_);
    heard.swap(heard_);
  }
  for (const Heard& each : heard) {
    if (auto answer = decodeAnswer(each.message, each.when)) takeAnswer(std::move(*answer));
  }
}

void RemoteRanks::takeAnswer(Answer answer) {
  const auto found = outstanding_.find(answer.number);
  if (found == outstanding_.end()) return;
  const int rank = found->second;
  outstanding_.erase(found);
  std::erase_if(answer.views, [&](const RankView& view) {
    return view.rank < 0 || view.rank >= peers_->ranks();
  });
  if (answer.kind == Question::Kind::calls) {
    for (RankView& view : answer.views) {
      if (view.rank == rank) compared_.push_back(std::move(view));
    }
    return;
  }
  const auto asked = asked_.find(rank);
  if (asked == asked_.end() || asked->second.question.number != answer.number) return;
  for (RankView& view : answer.views) {
    const int about = view.rank;
    if (!peers_->isMapped(about)) told_.insert_or_assign(about, std::move(view));
  }
  const bool hasMore = answer.next > asked->second.question.first;
  asked->second.isAnswered = !hasMore;
  asked->second.isSent = !hasMore;
  asked->second.question.first = answer.next;
}

std::vector<RankView> RemoteRanks::compare(const RankView& own, uint64_t ownCalls, int64_t now) {
  takeAnswers();
  std::vector<RankView> answers = std::exchange(compared_, {});
  const auto lastQuiet = [](const RankView& view) {
    return view.quietPoints.empty() ? 0 : view.quietPoints.back().collectives;
  };
  const auto lastQuietMessages = [](const Flow* flow) {
    uint64_t last = 0;
    if (flow == nullptr) return last;
    for (const MessageSum& sum : flow->quiet) last = std::max(last, sum.count);
    return last;
  };
  for (const RankView& theirs : answers) {
    Comparison& state = comparisons_[theirs.rank];
    state.quiet = std::max(state.quiet, std::min(lastQuiet(own), lastQuiet(theirs)));
    state.quietMessages =
        std::max(state.quietMessages, std::min(lastQuietMessages(own.findFlow(theirs.rank, true)),
                                               lastQuietMessages(theirs.findFlow(rank_, false))));
    state.hasCaptures = theirs.captures != 0;
    state.collectives =
        std::max(state.collectives, std::min(own.lastCollective(), theirs.lastCollective()));
    state.messages =
        std::max(state.messages, std::min(own.lastMessage(plan::Call::send, theirs.rank),
                                          theirs.lastMessage(plan::Call::receive, rank_)));
    state.due = now + kComparePause;
  }
  struct Wanted {
    bool collectives = false;
    uint64_t lastMessage = 0, quietMessages = 0;
  };
  std::map<int, Wanted> wanted;  // by rank
  if (uplink_ >= 0 && !peers_->isMapped(uplink_)) wanted[uplink_].collectives = true;
  for (const Call& call : own.calls) {
    if (call.call != plan::Call::send || peers_->isMapped(call.peer)) continue;
    wanted[call.peer].lastMessage = call.sequence;
  }
  for (const Flow& flow : own.flows) {
    if (!flow.sends || peers_->isMapped(flow.peer)) continue;
    wanted[flow.peer].quietMessages = lastQuietMessages(&flow);
  }
  comparedCalls_ = ownCalls;
  isPending_ = false;
  size_t asked = 0;
  for (const auto& [rank, what] : wanted) {
    Comparison& state = comparisons_[rank];
    const bool hasCaptures = own.captures != 0 || state.hasCaptures;
    const bool isPending = (what.collectives && (own.lastCollective() > state.collectives ||
                                                 (hasCaptures && lastQuiet(own) > state.quiet))) ||
                           what.lastMessage > state.messages ||
                           (hasCaptures && what.quietMessages > state.quietMessages);
    isPending_ = isPending_ || isPending;
    if (!isPending || now < state.due || asked == kMostComparisons) continue;
    const Question question{.kind = Question::Kind::calls,
                            .number = ++questions_,
                            .first = state.collectives + 1,
                            .firstMessage = state.messages + 1};
    if (!ask(rank, question, false)) continue;
    outstanding_[question.number] = rank;
    state.due = now + kCompareRetry;
    asked++;
  }
  // Those who never answer are not remembered for ever.
  while (outstanding_.size() > kMostHeard) outstanding_.erase(outstanding_.begin());
  return answers;
}

void RemoteRanks::restart(int64_t now) {
  stage_ = Stage::uplink;
  stageBegan_ = now;
  asked_.clear();
  told_.clear();
}

const RankView* RemoteRanks::find(int rank) const {
  const auto found = told_.find(rank);
  return found == told_.end() ? nullptr : &found->second;
}

// The ranks to ask in this stage.
std::vector<int> RemoteRanks::targets() const {
  if (stage_ == Stage::uplink) {
    return uplink_ >= 0 && !peers_->isMapped(uplink_) ? std::vector{uplink_} : std::vector<int>();
  }
  std::vector<int> ranks;
  std::set<uint64_t> seen;
  for (int rank = 0; rank < peers_->ranks(); rank++) {
    if (peers_->isMapped(rank) || told_.contains(rank)) continue;
    const RankPlace& place = peers_->place(rank);
    const uint64_t unit = stage_ == Stage::hosts ? place.host : place.process;
    if (seen.insert(unit).second) ranks.push_back(rank);
  }
  return ranks;
}

bool RemoteRanks::gather(int64_t now) {
  takeAnswers();
  while (stage_ != Stage::done) {
    for (const int rank : targets()) asked_.try_emplace(rank);
    bool isComplete = true;
    for (auto& [rank, asked] : asked_) {
      if (!asked.isSent && !asked.isAnswered) {
        asked.question.kind = Question::Kind::ranks;
        asked.question.number = ++questions_;
        asked.isSent = ask(rank, asked.question, true);
        if (asked.isSent) outstanding_[asked.question.number] = rank;
      }
      isComplete = isComplete && asked.isAnswered;
    }
    if (!isComplete && now < stageBegan_ + kStageTime) return false;
    stage_ = static_cast<Stage>(static_cast<int>(stage_) + 1);
    stageBegan_ = now;
  }
  return true;
}

}  // namespace unisono::diagnose
