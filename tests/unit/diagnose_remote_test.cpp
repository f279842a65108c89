// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "diagnose/journal.h"
#include "diagnose/remote_ranks.h"
#include "diagnose/watchdog.h"
#include "diagnose_testing.h"
#include "runtime/runtime.h"
#include "support/seed.h"

// What ranks that share no memory tell each other of their calls.
namespace unisono::diagnose {
namespace {

// The ranks of a communicator, all in this process. One of `near` reads only the tables of these,
// as its places are of another process.
class Job {
 public:
  explicit Job(int ranks, int ranksPerHost = 1) : ranksPerHost_(ranksPerHost) {
    for (int rank = 0; rank < ranks; rank++) {
      journals_.push_back(Journal::create());
      journals_.back()->start(7, rank, ranks, rank, 8, "test");
    }
  }
  Journal& journal(int rank) { return *journals_[static_cast<size_t>(rank)]; }
  std::shared_ptr<Journal> shared(int rank) { return journals_[static_cast<size_t>(rank)]; }
  std::shared_ptr<PeerTables> tablesAt(int host) const {
    std::vector<RankPlace> places;
    for (size_t rank = 0; rank < journals_.size(); rank++) {
      const int where = static_cast<int>(rank) / ranksPerHost_;
      const uint64_t process = where == host ? runtime::processToken() : 1000 + rank;
      places.push_back({process, journals_[rank]->place(), static_cast<uint64_t>(where + 1)});
    }
    auto tables = std::make_shared<PeerTables>(7, places);
    tables->map(steadyNow());
    return tables;
  }
  int hostOf(int rank) const { return rank / ranksPerHost_; }

 private:
  const int ranksPerHost_;
  std::vector<std::shared_ptr<Journal>> journals_;
};

Question questionFrom(std::span<const std::byte> message) {
  Question question;
  EXPECT_EQ(message.size(), sizeof(question));
  std::memcpy(&question, message.data(), sizeof(question));
  return question;
}

std::span<const std::byte> bytesOf(const Question& question) {
  return std::as_bytes(std::span(&question, 1));
}

RankView randomView(std::mt19937_64& random) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  const auto text = [&] { return std::string(below(30), static_cast<char>('a' + below(26))); };
  RankView view;
  view.isKnown = below(8) != 0;
  view.ranks = 1 + static_cast<int>(below(9));
  view.rank = static_cast<int>(below(static_cast<uint64_t>(view.ranks)));
  view.id = random();
  view.name = text();
  view.host = text();
  view.place = text();
  view.pid = static_cast<int64_t>(below(1 << 20));
  view.silentFor = static_cast<int64_t>(below(kSecond));
  view.entered = random();
  view.finished = random();
  view.changed = static_cast<int64_t>(below(1 << 30));
  view.counts[3] = random();
  view.reported = random();
  for (uint64_t i = below(5); i > 0; i--) {
    Call& call = view.calls.emplace_back();
    call.index = random();
    call.sequence = random();
    call.call = static_cast<plan::Call>(below(plan::kCallKinds));
    call.type = static_cast<device::DataType>(below(device::kDataTypes));
    call.peer = static_cast<int>(below(static_cast<uint64_t>(view.ranks)));
    call.count = random();
    call.entered = static_cast<int64_t>(below(1 << 30));
  }
  if (below(2) == 0 && !view.calls.empty()) view.replay = view.calls.front();
  for (uint64_t i = below(4); i > 0; i--) {
    view.links.push_back({static_cast<int>(below(static_cast<uint64_t>(view.ranks))), 3,
                          below(2) == 0, random(), random(), below(2) == 0, random()});
    view.links.back().kind = static_cast<Link::Kind>(below(5));
    view.links.back().all = random();
    view.links.back().waits = below(2) == 0;
  }
  for (uint64_t i = below(3); i > 0; i--) {
    view.flows.push_back({static_cast<int>(below(static_cast<uint64_t>(view.ranks))),
                          below(2) == 0,
                          random(),
                          random(),
                          {{random(), random(), random()}}});
  }
  for (uint64_t i = below(3); i > 0; i--) view.settings[text()] = text();
  return view;
}

TEST(RemoteViews, ArriveAsTheyWereSent) {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 100; round++) {
    const Question question{.kind = Question::Kind::ranks, .number = random()};
    const std::vector<RankView> views{randomView(random), randomView(random)};
    const int64_t now = steadyNow();
    const auto answer = decodeAnswer(encodeAnswer(question, views, 0), now);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->number, question.number);
    EXPECT_EQ(answer->next, 0u);
    ASSERT_EQ(answer->views.size(), 2u);
    for (size_t i = 0; i < 2; i++) {
      const RankView &sent = views[i], &got = answer->views[i];
      EXPECT_EQ(got.rank, sent.rank);
      EXPECT_EQ(got.name, sent.name);
      EXPECT_EQ(got.host, sent.host);
      EXPECT_EQ(got.place, sent.place);
      EXPECT_EQ(got.isKnown, sent.isKnown);
      EXPECT_EQ(got.counts, sent.counts);
      EXPECT_EQ(got.reported, sent.reported);
      EXPECT_EQ(got.settings, sent.settings);
      ASSERT_EQ(got.calls.size(), sent.calls.size());
      for (size_t c = 0; c < got.calls.size(); c++) {
        EXPECT_EQ(describe(got.calls[c]), describe(sent.calls[c]));
        EXPECT_EQ(got.calls[c].launch, sent.calls[c].launch);
        EXPECT_NEAR(static_cast<double>(got.calls[c].entered - sent.calls[c].entered), 0, kSecond);
      }
      EXPECT_EQ(got.replay.has_value(), sent.replay.has_value());
      ASSERT_EQ(got.flows.size(), sent.flows.size());
      for (size_t f = 0; f < got.flows.size(); f++) {
        EXPECT_EQ(got.flows[f].peer, sent.flows[f].peer);
        EXPECT_EQ(got.flows[f].replayed, sent.flows[f].replayed);
        ASSERT_EQ(got.flows[f].quiet.size(), 1u);
        EXPECT_EQ(got.flows[f].quiet[0].hash, sent.flows[f].quiet[0].hash);
      }
      ASSERT_EQ(got.links.size(), sent.links.size());
      for (size_t l = 0; l < got.links.size(); l++) {
        EXPECT_EQ(got.links[l].tail, sent.links[l].tail);
        EXPECT_EQ(got.links[l].sends, sent.links[l].sends);
        EXPECT_EQ(got.links[l].bytesInFlight, sent.links[l].bytesInFlight);
        EXPECT_EQ(got.links[l].kind, sent.links[l].kind);
        EXPECT_EQ(got.links[l].all, sent.links[l].all);
        EXPECT_EQ(got.links[l].waits, sent.links[l].waits);
      }
    }
  }
}

// Hosts whose clocks differ by any amount.
TEST(RemoteViews, HaveTheTimesOfThisHost) {
  RankView view;
  view.isKnown = true;
  view.ranks = 1;
  view.calls.emplace_back().index = 1;
  view.calls.back().entered = steadyNow() - 5 * kSecond;
  view.changed = steadyNow() - 6 * kSecond;
  const auto message = encodeAnswer({}, std::span(&view, 1), 0);
  for (const int64_t now : {int64_t{100} * kSecond, int64_t{1} << 60}) {
    const auto answer = decodeAnswer(message, now);
    ASSERT_TRUE(answer);
    const RankView& got = answer->views.front();
    EXPECT_NEAR(static_cast<double>(now - got.calls.front().entered) / kSecond, 5, 0.5);
    EXPECT_NEAR(static_cast<double>(now - got.changed) / kSecond, 6, 0.5);
  }
}

TEST(RemoteViews, AreRefusedWhereTheyMakeNoSense) {
  std::mt19937_64 random(test::seed());
  const auto below = [&](uint64_t limit) { return random() % limit; };
  size_t accepted = 0;
  constexpr int kRounds = 20'000;
  for (int round = 0; round < kRounds; round++) {
    const RankView view = randomView(random);
    std::vector<std::byte> message = encodeAnswer({}, std::span(&view, 1), 0);
    if (below(2) == 0) message.resize(below(message.size()));
    for (uint64_t i = below(4); i > 0 && !message.empty(); i--) {
      message[below(message.size())] = static_cast<std::byte>(below(256));
    }
    const auto answer = decodeAnswer(message, steadyNow());
    if (!answer) continue;
    accepted++;
    for (const RankView& got : answer->views) {
      for (const Call& call : got.calls) EXPECT_TRUE(isPossible(call, got.ranks));
      for (const Link& link : got.links) EXPECT_LT(link.peer, got.ranks);
    }
  }
  EXPECT_GT(accepted, 0u);
  EXPECT_LT(accepted, static_cast<size_t>(kRounds));
  const std::vector<std::byte> noise(sizeof(Question), std::byte{0xff});
  Job job(1);
  EXPECT_TRUE(answerQuestion(noise, *job.tablesAt(0), 0, 0).empty());
  EXPECT_TRUE(answerQuestion({}, *job.tablesAt(0), 0, 0).empty());
}

// More than one message holds.
TEST(RemoteViews, ComeInSeveralAnswers) {
  Job job(600);
  for (int rank = 0; rank < 600; rank++) {
    for (size_t i = 0; i < kCalls; i++) job.journal(rank).enter(task(plan::Call::allReduce, 8));
  }
  std::vector<RankPlace> places;
  for (int rank = 0; rank < 600; rank++) {
    places.push_back({runtime::processToken(), job.journal(rank).place()});
  }
  PeerTables tables(7, places);
  tables.map(steadyNow());
  Question question{.kind = Question::Kind::ranks};
  int next = 0, answers = 0;
  do {
    const auto message = answerQuestion(bytesOf(question), tables, 0, 1);
    EXPECT_LE(message.size(), kLongestAnswer);
    const auto answer = decodeAnswer(message, steadyNow());
    ASSERT_TRUE(answer);
    for (const RankView& view : answer->views) EXPECT_EQ(view.rank, next++);
    question.first = answer->next;
    answers++;
  } while (question.first != 0);
  EXPECT_EQ(next, 600);
  EXPECT_GT(answers, 1);
}

// Rank 1 is alone on its host and compares with rank 0.
TEST(RemoteRanks, CompareEachCallOnceAndAskNoMore) {
  Job job(2);
  const auto own = job.tablesAt(1), theirs = job.tablesAt(0);
  int asked = 0;
  RemoteRanks* remote = nullptr;
  RemoteRanks ranks(own, 1, 0, [&](int rank, std::span<const std::byte> question, bool connects) {
    EXPECT_EQ(rank, 0);
    EXPECT_FALSE(connects);
    asked++;
    remote->hear(answerQuestion(question, *theirs, 0, 1));
    return true;
  });
  remote = &ranks;
  int64_t now = steadyNow();
  const auto look = [&] {
    now += kSecond;
    return ranks.compare(own->view(1, now), own->calls(1), now);
  };
  EXPECT_TRUE(look().empty());
  EXPECT_EQ(asked, 0) << "no call";
  for (int i = 0; i < 3; i++) job.journal(1).enter(task(plan::Call::allReduce, 8));
  EXPECT_TRUE(look().empty());
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(ranks.isComparing(own->calls(1)));
  for (int i = 0; i < 3; i++) job.journal(0).enter(task(plan::Call::allReduce, 8));
  look();  // rank 0 had made no call when it was asked
  look();
  const auto answers = look();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].lastCollective(), 3u);
  look();
  const int before = asked;
  EXPECT_FALSE(ranks.isComparing(own->calls(1)));
  for (int i = 0; i < 5; i++) look();
  EXPECT_EQ(asked, before) << "everything was compared";
  job.journal(1).enter(task(plan::Call::allReduce, 8));
  job.journal(0).enter(task(plan::Call::allReduce, 9));
  look();
  const auto last = look();
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].calls.size(), 1u) << "only what was not compared";
  EXPECT_TRUE(findMismatch(own->view(1, now), last[0]));
}

// The other rank tells sums: the messages in graphs that it has received from the asker.
TEST(RemoteRanks, CompareTheMessagesOfGraphs) {
  Job job(2);
  const auto own = job.tablesAt(1), theirs = job.tablesAt(0);
  int asked = 0;
  RemoteRanks* remote = nullptr;
  RemoteRanks ranks(own, 1, -1, [&](int, std::span<const std::byte> question, bool) {
    asked++;
    remote->hear(answerQuestion(question, *theirs, 0, 1));
    return true;
  });
  remote = &ranks;
  int64_t now = steadyNow();
  const auto look = [&] {
    now += kSecond;
    return ranks.compare(own->view(1, now), own->calls(1), now);
  };
  const auto replay = [&](int rank, uint64_t bytes) {
    Replays replays;
    replays.messages[{1 - rank, rank == 1}].add(bytes);
    job.journal(rank).noteCapture();
    job.journal(rank).setReplays(replays, now);
    job.journal(rank).noteQuiet(replays, 0);
  };
  replay(1, 100);
  look();
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(ranks.isComparing(own->calls(1)));
  replay(0, 101);
  look();  // rank 0 had received nothing when it was asked
  look();
  const auto answers = look();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_TRUE(findReplayMismatch(own->view(1, now), answers[0]));
  look();
  const int before = asked;
  for (int i = 0; i < 3; i++) look();
  EXPECT_EQ(asked, before) << "everything was compared";
}

// Hosts of 4 ranks; rank 8 asks. Hosts 0 and 1 answer, of host 3 only its last rank.
TEST(RemoteRanks, AskOneRankOfEachHostFirst) {
  Job job(16, 4);
  const auto own = job.tablesAt(2);
  std::vector<int> asked;
  std::deque<std::pair<int, Question>> unanswered;
  RemoteRanks ranks(own, 8, 4, [&](int rank, std::span<const std::byte> question, bool connects) {
    EXPECT_TRUE(connects);
    asked.push_back(rank);
    unanswered.emplace_back(rank, questionFrom(question));
    return true;
  });
  const auto answer = [&] {
    for (; !unanswered.empty(); unanswered.pop_front()) {
      const auto& [rank, question] = unanswered.front();
      if (job.hostOf(rank) == 3 && rank != 15) continue;
      ranks.hear(answerQuestion(bytesOf(question), *job.tablesAt(job.hostOf(rank)), rank, 8));
    }
  };
  int64_t now = steadyNow();
  ranks.restart(now);
  EXPECT_FALSE(ranks.gather(now));
  EXPECT_EQ(asked, std::vector<int>{4});
  answer();
  EXPECT_FALSE(ranks.gather(now));
  EXPECT_EQ(asked, (std::vector<int>{4, 0, 12}));
  answer();
  EXPECT_FALSE(ranks.gather(now)) << "rank 12 may still answer";
  now += kSecond;
  EXPECT_FALSE(ranks.gather(now));
  EXPECT_EQ(asked, (std::vector<int>{4, 0, 12, 13, 14, 15})) << "one of each process";
  EXPECT_EQ(ranks.find(13), nullptr);
  answer();
  for (int i = 0; i < 3 && !ranks.gather(now); i++) now += kSecond;
  EXPECT_TRUE(ranks.gather(now));
  for (int rank = 0; rank < 16; rank++) {
    EXPECT_EQ(ranks.find(rank) != nullptr, job.hostOf(rank) != 2) << rank;
  }
}

TEST(RemoteRanks, WaitForNobodyWithoutEnd) {
  Job job(3);
  RemoteRanks ranks(job.tablesAt(2), 2, 0,
                    [](int, std::span<const std::byte>, bool) { return false; });
  int64_t now = steadyNow();
  ranks.restart(now);
  const int64_t begun = now;
  while (!ranks.gather(now)) now += kSecond / 4;
  EXPECT_LE(now - begun, 3 * kSecond);
  EXPECT_EQ(ranks.find(0), nullptr);
}

// The machine of the asker is paused just after it has asked. It asks again and hears the answer.
TEST(RemoteRanks, HaveTimeToAnswerAfterAPause) {
  Job job(2);
  const auto theirs = job.tablesAt(1);
  job.journal(0).enter(task(plan::Call::allReduce, 8));
  job.journal(0).launched(1, 1, 2);
  std::deque<Question> asked;
  SimulatedWatch watch(job.shared(0), job.tablesAt(0), 0,
                       [&](int, std::span<const std::byte> question, bool) {
                         asked.push_back(questionFrom(question));
                         return true;
                       });
  const auto lookUntilAsked = [&] {
    asked.clear();
    for (int i = 0; i < 1000 && asked.empty(); i++) watch.look();
    ASSERT_FALSE(asked.empty());
  };
  lookUntilAsked();
  watch.look(60 * kSecond);
  EXPECT_FALSE(watch.hasReported());
  lookUntilAsked();
  EXPECT_FALSE(watch.hasReported());
  // A pause that is too short to be noticed.
  watch.look(3 * SimulatedWatch::kInterval);
  EXPECT_FALSE(watch.hasReported());
  watch.watched().hear(answerQuestion(bytesOf(asked.back()), *theirs, 1, 0));
  watch.look();
  EXPECT_TRUE(watch.hasReported());
}

// What is asked belongs to the communicator, which ends when stop() returns.
TEST(RemoteRanks, AreNotBeingAskedOnceTheWatchHasStopped) {
  Job job(2);
  job.journal(0).enter(task(plan::Call::allReduce, 8));
  job.journal(0).launched(1, 1, 2);
  std::atomic<bool> hasStopped = false;
  std::thread stopper;
  Watched* watched = nullptr;
  SimulatedWatch watch(job.shared(0), job.tablesAt(0), 0,
                       [&](int, std::span<const std::byte>, bool) {
                         if (stopper.joinable()) return true;
                         stopper = std::thread([&] {
                           watched->stop();
                           hasStopped = true;
                         });
                         std::this_thread::sleep_for(std::chrono::milliseconds(50));
                         EXPECT_FALSE(hasStopped);
                         return true;
                       });
  watched = &watch.watched();
  for (int i = 0; i < 1000 && !stopper.joinable(); i++) watch.look();
  ASSERT_TRUE(stopper.joinable()) << "nothing was asked";
  stopper.join();
  EXPECT_TRUE(hasStopped);
}

}  // namespace
}  // namespace unisono::diagnose
