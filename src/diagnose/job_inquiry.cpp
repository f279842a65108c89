// SPDX-License-Identifier: Apache-2.0
#include "diagnose/job_inquiry.h"

#include <algorithm>
#include <cstring>

#include "diagnose/journal.h"
#include "diagnose/watchdog.h"

namespace unisono::diagnose {
namespace {

// Those that run, which answers are for, by the numbers of their questions.
struct Inquiries {
  std::mutex mutex;
  uint64_t questions = 0;
  std::map<uint64_t, std::weak_ptr<JobInquiry>> byQuestion;

  static Inquiries& get() {
    static auto* instance = new Inquiries;
    return *instance;
  }
};

// After this time, in ns, each process of a host that has not answered is asked itself.
constexpr int64_t kPatienceWithHosts = 350'000'000;

}  // namespace

std::shared_ptr<JobInquiry> JobInquiry::begin(int64_t now, int64_t limit, Question::Kind kind) {
  auto inquiry = std::make_shared<JobInquiry>();
  inquiry->began_ = now;
  inquiry->limit_ = limit;
  inquiry->kind_ = kind;
  for (RankView& view : readAllTables(kind == Question::Kind::everything))
    inquiry->add(std::move(view));
  std::set<uint64_t> ids;
  for (const auto& watched : Watchdog::get().all()) {
    if (!watched->isStopped() && ids.insert(watched->peers()->id()).second)
      inquiry->communicators_.push_back(watched);
  }
  std::ranges::stable_sort(inquiry->communicators_, std::ranges::greater(),
                           [](const auto& watched) { return watched->peers()->ranks(); });
  inquiry->findTargets();
  return inquiry;
}

void JobInquiry::add(RankView&& view) {
  views_.try_emplace({view.id, view.rank}, std::move(view));
}

bool JobInquiry::isCovered(const Watched& communicator, int rank) const {
  return communicator.peers()->isMapped(rank) ||
         views_.contains({communicator.peers()->id(), rank});
}

void JobInquiry::findTargets() {
  for (const auto& communicator : communicators_) {
    const PeerTables& peers = *communicator->peers();
    for (int rank = 0; rank < peers.ranks(); rank++) {
      if (isCovered(*communicator, rank)) continue;
      const RankPlace& place = peers.place(rank);
      if (!units_.insert(asksProcesses_ ? place.process : place.host).second) continue;
      asked_.push_back({communicator, rank, {.kind = kind_}});
    }
  }
  Inquiries& all = Inquiries::get();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.byQuestion, [](const auto& entry) { return entry.second.expired(); });
  for (Asked& asked : asked_) {
    if (asked.question.number != 0) continue;
    asked.question.number = ++all.questions;
    all.byQuestion[asked.question.number] = weak_from_this();
  }
}

bool JobInquiry::hear(std::span<const std::byte> answer) {
  // The head of every answer.
  struct Head {
    Question::Kind kind;
    uint64_t number;
  } head{};
  if (answer.size() < sizeof(head.kind) + sizeof(head.number)) return false;
  std::memcpy(&head.kind, answer.data(), sizeof(head.kind));
  std::memcpy(&head.number, answer.data() + sizeof(head.kind), sizeof(head.number));
  if (head.kind != Question::Kind::job && head.kind != Question::Kind::everything) return false;
  std::shared_ptr<JobInquiry> inquiry;
  {
    Inquiries& all = Inquiries::get();
    const std::lock_guard lock(all.mutex);
    const auto found = all.byQuestion.find(head.number);
    if (found != all.byQuestion.end()) inquiry = found->second.lock();
  }
  if (inquiry == nullptr) return true;
  const std::lock_guard lock(inquiry->mutex_);
  inquiry->heard_.push_back({{answer.begin(), answer.end()}, steadyNow()});
  return true;
}

void JobInquiry::takeAnswers() {
  std::vector<Heard> heard;
  {
    const std::lock_guard lock(mutex_);
    heard.swap(heard_);
  }
  for (const Heard& each : heard) {
    auto answer = decodeAnswer(each.message, each.when);
    if (!answer) continue;
    const auto asked = std::ranges::find_if(
        asked_, [&](const Asked& one) { return one.question.number == answer->number; });
    if (asked == asked_.end()) continue;
    for (RankView& view : answer->views) add(std::move(view));
    const bool hasMore = answer->next > asked->question.first;
    asked->isAnswered = !hasMore;
    asked->isSent = !hasMore;
    asked->question.first = answer->next;
  }
}

bool JobInquiry::proceed(int64_t now) {
  takeAnswers();
  const auto isAnswered = [](const Asked& asked) { return asked.isAnswered; };
  const bool isLate = now >= began_ + std::min(limit_ / 2, kPatienceWithHosts);
  if (!asksProcesses_ && (isLate || std::ranges::all_of(asked_, isAnswered))) {
    asksProcesses_ = true;
    units_.clear();
    for (const Asked& asked : asked_) {
      units_.insert(asked.by->peers()->place(asked.rank).process);
    }
    findTargets();
  }
  for (Asked& asked : asked_) {
    if (!asked.isSent && !asked.isAnswered)
      asked.isSent = asked.by->askNow(asked.rank, asked.question);
  }
  return now >= began_ + limit_ || std::ranges::all_of(asked_, isAnswered);
}

JobState JobInquiry::job(int64_t now) const {
  JobState job;
  job.seconds = static_cast<double>(now - began_) / 1e9;
  job.timeouts = static_cast<int>(
      std::ranges::count_if(asked_, [](const Asked& asked) { return !asked.isAnswered; }));
  for (const auto& [place, view] : views_) job.views.push_back(view);
  for (const auto& communicator : communicators_) {
    const PeerTables& peers = *communicator->peers();
    for (int rank = 0; rank < peers.ranks(); rank++) {
      if (views_.contains({peers.id(), rank})) continue;
      RankView& view = job.views.emplace_back();
      const RankPlace& place = peers.place(rank);
      view.id = peers.id();
      view.rank = rank;
      view.ranks = peers.ranks();
      view.device = place.device;
      view.pid = place.pid;
      view.host = place.hostName;
      view.address = place.address;
      if (communicator->hasDied(rank)) view.processState = "ended";
      if (kind_ == Question::Kind::job) continue;
      view.place = place.text();
      view.isKnown = view.hasLeft = peers.isMapped(rank) || communicator->hasLeft(rank);
    }
  }
  return job;
}

}  // namespace unisono::diagnose
