// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "diagnose/journal.h"
#include "diagnose/report.h"
#include "diagnose/segment_view.h"
#include "diagnose/watchdog.h"
#include "diagnose_testing.h"
#include "runtime/runtime.h"

namespace unisono::diagnose {
namespace {

std::shared_ptr<Journal> startedJournal(uint64_t id, int rank = 0, int ranks = 2) {
  auto journal = Journal::create();
  journal->start(id, rank, ranks, rank, 8, "test");
  return journal;
}

// The table of a rank of this process, as another rank sees it.
std::shared_ptr<PeerTables> tablesOf(uint64_t id, const std::vector<std::shared_ptr<Journal>>& of) {
  std::vector<RankPlace> places;
  for (const auto& journal : of) places.push_back({runtime::processToken(), journal->place()});
  auto tables = std::make_shared<PeerTables>(id, places);
  tables->map(steadyNow());
  return tables;
}

TEST(Journal, ShowsCallsWithTheirNumbers) {
  const auto journal = startedJournal(1);
  EXPECT_TRUE(journal->isIdle());
  EXPECT_EQ(journal->enter(task(plan::Call::allReduce, 10)), 1u);
  EXPECT_EQ(journal->enter(task(plan::Call::send, 20, 1)), 2u);
  EXPECT_EQ(journal->enter(task(plan::Call::broadcast, 30, 1)), 3u);
  journal->launched(1, 2, 2);
  EXPECT_FALSE(journal->isIdle());

  const RankView view = tablesOf(1, {journal})->view(0, steadyNow());
  EXPECT_TRUE(view.isKnown);
  EXPECT_FALSE(view.hasLeft);
  EXPECT_EQ(view.name, "test");
  ASSERT_EQ(view.calls.size(), 3u);
  EXPECT_EQ(describe(view.calls[0]), "AllReduce #1 (count 10, int32, sum)");
  EXPECT_EQ(describe(view.calls[1]), "Send #1 to rank 1 (count 20, int32)");
  EXPECT_EQ(describe(view.calls[2]), "Broadcast #2 (count 30, int32, root 1)");
  EXPECT_EQ(view.calls[1].launch, 2u);
  EXPECT_EQ(view.calls[2].launch, 0u);
  EXPECT_EQ(view.current()->index, 1u);

  journal->launched(3, 3, 3);
  journal->setProgress(3, 3, steadyNow());
  EXPECT_TRUE(journal->isIdle());
}

TEST(Journal, KeepsTheLastCalls) {
  const auto journal = startedJournal(1);
  for (uint64_t count = 1; count <= 3 * kCalls + 5; count++) {
    journal->enter(task(plan::Call::allReduce, count));
  }
  const RankView view = tablesOf(1, {journal})->view(0, steadyNow());
  ASSERT_EQ(view.calls.size(), kCalls);
  EXPECT_EQ(view.calls.front().sequence, 2 * kCalls + 6);
  EXPECT_EQ(view.calls.back().sequence, 3 * kCalls + 5);
}

// A table that went on to another communicator says nothing about the one before: its calls have
// the same numbers.
TEST(PeerTables, TellWhoHasLeft) {
  auto journal = startedJournal(1);
  journal->enter(task(plan::Call::allReduce, 10));
  const uint32_t slot = journal->place().slot;
  const auto tables = tablesOf(1, {journal});
  EXPECT_EQ(tables->view(0, steadyNow()).calls.size(), 1u);

  journal.reset();
  EXPECT_TRUE(tables->view(0, steadyNow()).hasLeft);
  journal = startedJournal(2);
  ASSERT_EQ(journal->place().slot, slot);
  journal->enter(task(plan::Call::allReduce, 99));
  const RankView view = tables->view(0, steadyNow());
  EXPECT_TRUE(view.hasLeft);
  EXPECT_TRUE(view.calls.empty());
}

TEST(PeerTables, DropWhatNoRankOfTheJobHasWritten) {
  const auto journal = startedJournal(1);
  journal->enter(task(plan::Call::broadcast, 1, 2));  // from a rank that does not exist
  const uint64_t unknown = journal->enter(task(plan::Call::allReduce, 1));
  const_cast<CallTable&>(journal->table()).calls[unknown % kCalls].kind.store(77);
  plan::Task wrongType = task(plan::Call::allReduce, 1);
  wrongType.reduction.type = static_cast<device::DataType>(200);
  journal->enter(wrongType);
  journal->enter(task(plan::Call::receive, 4, 1));
  std::vector<Link> links{{-1, 0, true, 1, 1}, {2, 0, true, 1, 1}, {1, 3, false, 5, 4}};
  links.back().kind = Link::Kind::heads;
  links.back().all = 9;
  links.back().waits = true;
  journal->setLinks(links);
  const RankView view = tablesOf(1, {journal})->view(0, steadyNow());
  ASSERT_EQ(view.calls.size(), 1u);
  EXPECT_EQ(view.calls[0].call, plan::Call::receive);
  ASSERT_EQ(view.links.size(), 1u);
  EXPECT_EQ(view.links[0].channel, 3);
  EXPECT_EQ(view.links[0].kind, Link::Kind::heads);
  EXPECT_EQ(view.links[0].all, 9u);
  EXPECT_TRUE(view.links[0].waits);
}

TEST(PeerTables, TellTheSettingsOfAProcess) {
  const auto journal = startedJournal(1);
  const auto tables = tablesOf(1, {journal});
  using Settings = std::map<std::string, std::string>;
  const auto told = [&] {
    RankView view = tables->view(0, steadyNow());
    tables->addProcess(view, steadyNow());
    return view.settings;
  };
  noteSettings({{"NCCL_ALGO", "allreduce:ring;=tree"}, {"NCCL_PROTO", "LL"}});
  EXPECT_EQ(told(), (Settings{{"NCCL_ALGO", "allreduce:ring;=tree"}, {"NCCL_PROTO", "LL"}}));
  noteSettings({{"NCCL_ALGO", std::string(kSettingsBytes, 'x')}, {"NCCL_PROTO", "Simple"}});
  EXPECT_EQ(told(), (Settings{{"NCCL_PROTO", "Simple"}}));
  noteSettings({});
  EXPECT_EQ(told(), Settings{});
}

// Readers see whole settings, or none.
TEST(PeerTables, TellSettingsWhileTheyChange) {
  const auto journal = startedJournal(1);
  const auto segment = segmentOfThisProcess();
  std::atomic<bool> done{false};
  std::jthread writer([&] {
    for (int i = 0; i < 2000; i++) noteSettings({{"A", std::string(i % 7 * 9, 'a' + i % 26)}});
    noteSettings({});
    done = true;
  });
  while (!done) {
    for (const auto& [name, value] : readSettings(headOf(segment->address()))) {
      EXPECT_EQ(name, "A");
      EXPECT_EQ(value.find_first_not_of(value.front()), std::string::npos) << value;
    }
  }
}

// Readers see whole calls only, and none of a communicator that had the table before or has it
// after. No two communicators have the same id.
TEST(PeerTables, AreReadWhileTheyAreWritten) {
  constexpr uint64_t kLives = 200;
  std::atomic<bool> done{false};
  auto journal = startedJournal(1);
  const std::shared_ptr<runtime::host::MemorySegment> segment = segmentOfThisProcess();
  const CallTable& table = journal->table();
  std::jthread writer([&] {
    for (uint64_t id = 2; id < kLives; id++) {
      journal.reset();
      journal = startedJournal(id);
      for (uint64_t i = 1; i <= 200; i++) {
        journal->enter(task(plan::Call::allReduce, i * kLives + id));
      }
    }
    done = true;
  });
  uint64_t seen = 0;
  while (!done) {
    const RankView view = readView(headOf(segment->address()), table, steadyNow());
    if (view.hasLeft) continue;  // between two communicators
    for (const Call& call : view.calls) {
      ASSERT_EQ(call.count, call.sequence * kLives + view.id);
      ASSERT_EQ(call.index, call.sequence);
      seen++;
    }
  }
  writer.join();
  RecordProperty("calls", static_cast<int>(seen));
}

Call call(plan::Call kind, uint64_t count, device::DataType type,
          device::Reduction reduction = device::Reduction::sum, int peer = -1) {
  Call made;
  made.call = kind;
  made.count = count;
  made.type = type;
  made.reduction = reduction;
  made.peer = peer;
  return made;
}

TEST(Calls, FitTogetherWhereResultsAreTheSame) {
  using device::DataType;
  using device::Reduction;
  using plan::Call;
  const auto sum = [](uint64_t count, DataType type, Reduction op = Reduction::sum) {
    return call(Call::allReduce, count, type, op);
  };
  EXPECT_TRUE(fitTogether(sum(8, DataType::int32), sum(8, DataType::int32)));
  EXPECT_TRUE(fitTogether(sum(8, DataType::int32), sum(8, DataType::uint32)));
  EXPECT_FALSE(fitTogether(sum(8, DataType::int32), sum(9, DataType::int32)));
  EXPECT_FALSE(fitTogether(sum(8, DataType::int32), sum(8, DataType::float32)));
  EXPECT_FALSE(fitTogether(sum(8, DataType::int32), sum(4, DataType::int64)));
  EXPECT_FALSE(fitTogether(sum(8, DataType::int32), sum(8, DataType::int32, Reduction::max)));
  EXPECT_FALSE(fitTogether(sum(8, DataType::int32, Reduction::max),
                           sum(8, DataType::uint32, Reduction::max)));
  const auto copy = [](Call kind, uint64_t count, DataType type, int peer = -1) {
    return call(kind, count, type, Reduction::sum, peer);
  };
  EXPECT_TRUE(fitTogether(copy(Call::broadcast, 8, DataType::int32, 1),
                          copy(Call::broadcast, 32, DataType::int8, 1)));
  EXPECT_FALSE(fitTogether(copy(Call::broadcast, 8, DataType::int32, 1),
                           copy(Call::broadcast, 8, DataType::int32, 0)));
  EXPECT_FALSE(fitTogether(copy(Call::allGather, 8, DataType::int32),
                           copy(Call::allReduce, 8, DataType::int32)));
  EXPECT_TRUE(fitTogether(copy(Call::send, 8, DataType::int32, 1),
                          copy(Call::receive, 4, DataType::int64, 0)));
  EXPECT_FALSE(fitTogether(copy(Call::send, 8, DataType::int32, 1),
                           copy(Call::receive, 8, DataType::int64, 0)));
}

// A rank that launches a graph where another one makes the call has fewer calls in its table.
TEST(Calls, AreNotComparedAfterACapture) {
  const auto captures = startedJournal(1, 0), other = startedJournal(1, 1);
  const auto tables = tablesOf(1, {captures, other});
  const auto mismatch = [&] {
    return findMismatch(tables->view(1, steadyNow()), tables->view(0, steadyNow()));
  };
  other->enter(task(plan::Call::allReduce, 10));
  captures->enter(task(plan::Call::allReduce, 10));
  EXPECT_FALSE(mismatch());
  other->enter(task(plan::Call::allReduce, 10));  // the other rank's is in a graph
  other->enter(task(plan::Call::allReduce, 20));
  captures->enter(task(plan::Call::allReduce, 20));
  EXPECT_TRUE(mismatch());
  captures->noteCapture();
  EXPECT_FALSE(mismatch());
}

// The collectives of a rank: calls, and captured kinds with the numbers of their replays.
Replays replaysOf(const std::vector<std::pair<Call, uint64_t>>& kinds) {
  Replays replays;
  for (const auto& [kind, times] : kinds) {
    replays.collectives += times;
    replays.hash += times * hashOfKind(kind);
    replays.kinds.push_back(kind);
    replays.kinds.back().index = replays.kinds.size();
    replays.kinds.back().replay = times;
  }
  return replays;
}

TEST(Calls, OfGraphsAreComparedWhereRanksHaveFinishedAsMany) {
  const auto first = startedJournal(1, 0), second = startedJournal(1, 1);
  const auto tables = tablesOf(1, {first, second});
  const auto mismatch = [&] {
    return findReplayMismatch(tables->view(0, steadyNow()), tables->view(1, steadyNow()));
  };
  const auto done = [](Journal& journal, const plan::Task& made) {
    const uint64_t index = journal.enter(made);
    journal.launched(index, index, index + 1);
    journal.setProgress(index + 1, index + 1, steadyNow());
  };
  const Call large = call(plan::Call::allReduce, 64, device::DataType::int32);
  const Call small = call(plan::Call::allReduce, 8, device::DataType::int32);
  for (const auto& journal : {first, second}) journal->noteCapture();
  first->noteQuiet(replaysOf({{large, 2}, {small, 1}}), 0);
  second->noteQuiet(replaysOf({{small, 1}, {large, 1}}), 0);
  EXPECT_FALSE(mismatch()) << "not as many";
  second->noteQuiet(replaysOf({{small, 1}, {large, 2}}), 0);
  EXPECT_FALSE(mismatch()) << "the same, captured in another order";
  // The first makes a call where the second replays one.
  done(*first, task(plan::Call::allReduce, 8));
  first->noteQuiet(replaysOf({{large, 2}, {small, 1}}), 1);
  second->noteQuiet(replaysOf({{small, 2}, {large, 2}}), 0);
  EXPECT_FALSE(mismatch());
  first->noteQuiet(replaysOf({{large, 3}, {small, 1}}), 0);
  second->noteQuiet(replaysOf({{small, 3}, {large, 2}}), 0);
  EXPECT_FALSE(mismatch()) << "a call has been entered, so that nothing is noted";
  first->noteQuiet(replaysOf({{large, 3}, {small, 1}}), 1);
  EXPECT_EQ(mismatch(),
            "Calls in CUDA graphs differ between ranks 0 and 1: each has finished 5 collective "
            "calls, and these are not the same; rank 0 has run the captured AllReduce(count 64, "
            "int32, sum) 3 times, rank 1 2 times; rank 1 has run the captured AllReduce(count 8, "
            "int32, sum) 3 times, rank 0 1 times");
}

// Two messages of rank 0 to rank 1, one of them in a graph. What rank 1 receives is captured, or
// not.
TEST(Calls, OfGraphsAreComparedWhereAsManyMessagesHaveFinished) {
  for (const bool bothCapture : {true, false}) {
    const auto first = startedJournal(1, 0), second = startedJournal(1, 1);
    const auto tables = tablesOf(1, {first, second});
    const auto mismatch = [&] {
      return findReplayMismatch(tables->view(0, steadyNow()), tables->view(1, steadyNow()));
    };
    const auto done = [](Journal& journal, const plan::Task& made) {
      const uint64_t index = journal.enter(made);
      journal.launched(index, index, index + 1);
      journal.setProgress(index + 1, index + 1, steadyNow());
      return index;
    };
    Replays sent, received;
    sent.messages[{1, true}].add(400);
    first->noteCapture();
    first->setReplays(sent, steadyNow());
    first->noteQuiet(sent, 0);
    uint64_t entered = 0;
    if (bothCapture) {
      second->noteCapture();
      received.messages[{0, false}].add(400);
      second->setReplays(received, steadyNow());
    } else {
      entered = done(*second, task(plan::Call::receive, 100, 0));
    }
    EXPECT_FALSE(mismatch()) << "nothing was noted";
    second->noteQuiet(received, entered);
    EXPECT_FALSE(mismatch()) << "the same";
    EXPECT_FALSE(findReplayMismatch(tables->view(1, steadyNow()), tables->view(0, steadyNow())));

    const uint64_t index = done(*first, task(plan::Call::send, 8, 1));
    first->noteQuiet(sent, index);
    EXPECT_FALSE(mismatch()) << "not as many";
    entered = done(*second, task(plan::Call::receive, 9, 0));
    second->noteQuiet(received, entered);
    EXPECT_EQ(mismatch(),
              "Messages in CUDA graphs differ between ranks 0 and 1: rank 0 has sent 2 messages to "
              "rank 1, of 432 bytes in all, and rank 1 has received as many of other sizes, of 436 "
              "bytes in all");
    const RankView view = tables->view(0, steadyNow());
    ASSERT_NE(view.findFlow(1, true), nullptr);
    EXPECT_EQ(view.findFlow(1, true)->entered, 1u);
    EXPECT_EQ(view.findFlow(1, true)->replayed, 1u);
    EXPECT_EQ(view.begunMessages(*view.findFlow(1, true)), 2u);
  }
}

// With more peers than a table has room for, the first are compared.
TEST(Calls, OfManyPeersAreNumbered) {
  const auto journal = startedJournal(1, 0, 3 * static_cast<int>(kFlows));
  for (int round = 1; round <= 2; round++) {
    for (int peer = 0; peer < 3 * static_cast<int>(kFlows); peer++) {
      journal->enter(task(plan::Call::send, 1, peer));
    }
  }
  const RankView view = tablesOf(1, {journal})->view(0, steadyNow());
  EXPECT_EQ(view.flows.size(), kFlows);
  EXPECT_EQ(view.findFlow(3, true)->entered, 2u);
  EXPECT_EQ(view.calls.back().sequence, 2u);
}

TEST(Calls, HaveTheSameHashWhereTheyFit) {
  using plan::Call;
  const diagnose::Call calls[] = {
      call(Call::allReduce, 8, device::DataType::int32),
      call(Call::allReduce, 8, device::DataType::uint32),
      call(Call::allReduce, 8, device::DataType::float32),
      call(Call::allReduce, 9, device::DataType::int32),
      call(Call::allReduce, 8, device::DataType::int32, device::Reduction::max),
      call(Call::allReduce, 8, device::DataType::uint32, device::Reduction::max),
      call(Call::reduce, 8, device::DataType::int32, device::Reduction::sum, 0),
      call(Call::reduce, 8, device::DataType::int32, device::Reduction::sum, 1),
      call(Call::broadcast, 8, device::DataType::int32, device::Reduction::sum, 1),
      call(Call::broadcast, 32, device::DataType::int8, device::Reduction::max, 1),
      call(Call::allGather, 8, device::DataType::int32),
      call(Call::allGather, 8, device::DataType::float32),
  };
  for (const auto& a : calls) {
    for (const auto& b : calls) {
      EXPECT_EQ(hashOfKind(a) == hashOfKind(b), fitTogether(a, b))
          << describeArguments(a) << ", " << describeArguments(b);
    }
  }
}

// Rank 0 has called Send and replays a group of messages to ranks 1 and 2. Rank 2 makes the calls
// that belong to them and is complete; rank 1 has replayed one message.
TEST(Report, NumbersMessagesOfReplays) {
  std::vector<std::shared_ptr<Journal>> journals;
  for (int rank = 0; rank < 3; rank++) journals.push_back(startedJournal(1, rank, 3));
  journals[0]->enter(task(plan::Call::send, 5, 2));
  journals[0]->launched(1, 1, 2);
  journals[0]->setProgress(2, 2, steadyNow());
  journals[0]->noteCapture();
  Call captured = callOf(task(plan::Call::send, 10, 2));
  captured.index = captured.launch = captured.replay = 1;
  Replays running{0, captured};
  running.messages[{2, true}].add(40);
  running.messages[{1, true}].add(40, 2);
  journals[0]->setReplays(running, steadyNow());
  journals[0]->enter(task(plan::Call::send, 6, 2));  // comes after the replay
  for (const uint64_t count : {5, 10}) journals[2]->enter(task(plan::Call::receive, count, 0));
  journals[2]->launched(1, 2, 2);
  journals[2]->setProgress(2, 1, steadyNow());
  journals[1]->noteCapture();
  Replays ended;
  ended.messages[{0, false}].add(40);
  journals[1]->setReplays(ended, steadyNow());

  const auto tables = tablesOf(1, journals);
  std::vector<RankView> views;
  for (int rank = 0; rank < 3; rank++) views.push_back(tables->view(rank, steadyNow()));
  const int64_t later = steadyNow() + 5'000'000'000;
  auto report = explain(views, 0, later);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::notArrived);
  EXPECT_EQ(report->missing, std::vector<int>{1});
  EXPECT_EQ(report->call.sequence, 2u);
  EXPECT_EQ(report->waits, (std::vector<std::pair<int, int>>{{0, 1}}));
  ASSERT_EQ(report->details.size(), 2u);
  EXPECT_EQ(
      report->details[1],
      "rank 1 has begun 1 message from rank 0, with those of replays; rank 0 is in message 2");
  // Rank 2 waits in its second message, which rank 0 sends in the replay.
  report = explain(views, 2, later);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->missing, std::vector<int>());

  ended.messages[{0, false}].add(40);
  journals[1]->setReplays(ended, steadyNow());
  views[1] = tables->view(1, steadyNow());
  report = explain(views, 0, later);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->missing, std::vector<int>());
}

// Ranks 0 and 1 run the second replay of their only captured call, rank 2 has run the first.
TEST(Report, FollowsReplays) {
  std::vector<std::shared_ptr<Journal>> journals;
  for (int rank = 0; rank < 3; rank++) {
    const auto journal = journals.emplace_back(startedJournal(1, rank, 3));
    journal->enter(task(plan::Call::allGather, 5));
    journal->launched(1, 1, 2);
    journal->setProgress(1, 1, steadyNow());
    journal->noteCapture();
    Call captured = callOf(task(plan::Call::allReduce, 10));
    captured.index = captured.launch = 1;
    captured.replay = captured.sequence = rank == 2 ? 1 : 2;
    const Replays running{captured.sequence, captured}, ended{captured.sequence, std::nullopt};
    const int64_t now = steadyNow();
    EXPECT_FALSE(journal->setReplays(rank == 2 ? ended : running, now));
    EXPECT_EQ(journal->setReplays(rank == 2 ? ended : running, now + 1), rank != 2);
    EXPECT_FALSE(journal->isIdle());
  }
  const auto tables = tablesOf(1, journals);
  std::vector<RankView> views;
  for (int rank = 0; rank < 3; rank++) views.push_back(tables->view(rank, steadyNow()));
  const int64_t later = steadyNow() + 5'000'000'000;
  auto report = explain(views, 1, later);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::notArrived);
  EXPECT_EQ(describe(report->call), "AllReduce(count 10, int32, sum), replay 2 of captured call 1");
  EXPECT_EQ(report->missing, std::vector<int>{2});
  EXPECT_EQ(report->waiting, (std::vector<int>{0, 1}));
  EXPECT_GE(report->seconds, 5.0) << "since it was first seen";

  // It comes, and they are stuck together; then rank 0 is done with it.
  journals[2]->setReplays({2, views[0].replay}, steadyNow());
  views[2] = tables->view(2, steadyNow());
  EXPECT_EQ(explain(views, 1, later)->verdict, Verdict::inKernel);
  journals[0]->setReplays({2, std::nullopt}, steadyNow());
  views[0] = tables->view(0, steadyNow());
  EXPECT_EQ(explain(views, 1, later)->finished, std::vector<int>{0});

  // It replays another call.
  Call other = callOf(task(plan::Call::allReduce, 11));
  other.index = other.launch = 1;
  other.replay = other.sequence = 2;
  journals[2]->setReplays({2, std::nullopt}, steadyNow());
  journals[2]->setReplays({2, other}, steadyNow());
  views[2] = tables->view(2, steadyNow());
  EXPECT_EQ(explain(views, 1, later)->verdict, Verdict::differentCalls);
}

// Rank 0 has launched two calls and its device does not answer; rank 1 has finished the first and
// not made the second.
TEST(Report, SaysWhoHasNotArrivedAlsoWhereTheDeviceDoesNotAnswer) {
  std::vector<RankView> views(2);
  for (size_t rank = 0; rank < views.size(); rank++) {
    views[rank].rank = static_cast<int>(rank);
    views[rank].ranks = 2;
    views[rank].isKnown = true;
    for (uint64_t index = 1; index <= 2 - rank; index++) {
      Call made = call(plan::Call::allReduce, 8, device::DataType::int32);
      made.index = made.sequence = made.launch = index;
      views[rank].calls.push_back(made);
    }
    views[rank].entered = views[rank].launched = 2 - rank;
  }
  views[1].started = views[1].finished = 1;
  assumeProgress(views, 0);
  EXPECT_EQ(views[0].finished, 1u);
  const auto report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::notArrived);
  EXPECT_EQ(report->missing, std::vector<int>{1});

  // What another rank has not finished may be what rank 0 is in.
  views[0].finished = views[1].finished = 0;
  assumeProgress(views, 0);
  EXPECT_EQ(views[0].finished, 0u);
}

// Ranks whose kernels of an all-reduce, their call `number`, have begun.
std::vector<RankView> viewsInCall(int ranks, uint64_t number) {
  std::vector<RankView> views(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; rank++) {
    RankView& view = views[static_cast<size_t>(rank)];
    view.rank = rank;
    view.ranks = ranks;
    view.isKnown = true;
    Call made = call(plan::Call::allReduce, 8, device::DataType::int32);
    made.index = made.sequence = made.launch = number;
    view.calls = {made};
    view.entered = view.launched = view.started = number;
  }
  return views;
}

// The kernel of rank 1 waits in a queue of the GPU, which rank 2 or nobody else uses.
TEST(Report, SaysWhichRanksShareAGpu) {
  std::vector<RankView> views = viewsInCall(3, 1);
  for (RankView& view : views) {
    view.pid = 7;
    view.device = view.rank;
  }
  views[1].started = 0;
  auto report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::outside);
  EXPECT_EQ(report->next.find("share GPU"), std::string::npos) << report->next;
  views[2].device = 1;
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::outside);
  EXPECT_NE(report->next.find("Ranks 1 and 2 of process 7 share GPU 1"), std::string::npos)
      << report->next;
  // The same number of another process may be another GPU.
  views[2].pid = 8;
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->next.find("share GPU"), std::string::npos) << report->next;
}

TEST(Report, SaysThatDataDoNotLeaveAHost) {
  std::vector<RankView> views = viewsInCall(2, 1);
  for (RankView& view : views) {
    view.slots = 2;
    view.network = "Fabric (v11)";
  }
  views[0].links = {{1, 3, true, 7, 5, true, 4096}};
  views[1].links = {{0, 3, false, 5, 5, true}};
  auto report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::inNetwork);
  EXPECT_EQ(report->headline,
            "waiting for the network: 4096 bytes from rank 0 to rank 1 on channel 3 do not leave "
            "through Fabric (v11)");
  views[0].links[0].port = "mlx5_0";
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_TRUE(report->headline.ends_with("through Fabric (v11) (mlx5_0)")) << report->headline;
  // The receiver has not used what it has: that is not the network's fault.
  views[1].links[0].tail = 7;
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::inKernel);
  // Nobody knows what a rank of another machine does.
  views[1] = {};
  views[1].rank = 1;
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_NE(report->headline.find("or for rank 1 on another host"), std::string::npos)
      << report->headline;
  EXPECT_TRUE(report->details.empty());
  // It was asked, and did not answer.
  views[1].place = "process 7 on host b";
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::noAnswer);
  const std::vector<std::string> expected{
      "rank 1 (process 7 on host b) did not answer",
      "4096 bytes from rank 0 to rank 1 do not leave over mlx5_0"};
  EXPECT_EQ(report->details, expected);
  views[0].links[0] = {1, 3, false, 7, 7, true, 0, false, "mlx5_1"};
  report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report && report->details.size() == 2);
  EXPECT_EQ(report->details.back(), "rank 0 has no data from rank 1 over mlx5_1");
}

// Ranks 0 and 2 are the heads of two nodes.
TEST(Report, SaysThatANetworkThatReducesReturnsNothing) {
  std::vector<RankView> views = viewsInCall(4, 3);
  const auto linkOf = [](uint64_t tail, uint64_t head, uint64_t bytes, uint64_t which = 1) {
    Link link{0, 3, true, tail, head, true, bytes, false, "mlx5_0 of SHARP (v11)"};
    link.kind = Link::Kind::heads;
    link.all = which;
    return link;
  };
  const auto expect = [&](Verdict verdict, const std::string& headline) {
    const auto report = explain(views, 0, 5'000'000'000);
    ASSERT_TRUE(report);
    EXPECT_EQ(report->verdict, verdict) << report->headline;
    EXPECT_EQ(report->headline, headline);
  };
  const std::string stuck =
      ": 8192 bytes of rank 0 on channel 3 do not come back from mlx5_0 of SHARP (v11), which "
      "reduces for ranks 0, 2";
  views[0].links = {linkOf(7, 5, 8192), linkOf(4, 4, 0, 2)};
  views[2].links = {linkOf(6, 5, 4096), linkOf(4, 4, 0, 2)};
  expect(Verdict::inNetwork, "waiting for the network" + stuck);
  views[3].isKnown = false;
  expect(Verdict::inNetwork, "waiting for the network or for rank 3 on another host" + stuck);

  // Rank 2 has not sent its part, or does not run.
  const std::string late =
      "stuck in the kernel: rank 0 waits for step 6 of channel 3, which mlx5_0 of SHARP (v11) "
      "reduces with rank 2";
  views = viewsInCall(4, 3);
  views[0].links = {linkOf(7, 5, 8192), linkOf(4, 4, 0, 2)};
  views[2].links = {linkOf(5, 5, 0), linkOf(9, 9, 0, 2)};
  expect(Verdict::inKernel, late);
  EXPECT_EQ(explain(views, 0, 5'000'000'000)->waits, (std::vector<std::pair<int, int>>{{0, 2}}));
  views[2].links = {linkOf(6, 5, 4096)};
  views[2].processState = "stopped";
  expect(Verdict::inKernel, late);
  // Nothing is on its way.
  views = viewsInCall(4, 3);
  views[0].links = views[2].links = {linkOf(5, 5, 0)};
  expect(Verdict::inKernel, "stuck in the kernel: ranks 0-3");
}

// Three ranks whose kernels run, in the direct family.
TEST(Report, NamesTheStepsOfTheDirectFamily) {
  std::vector<RankView> views = viewsInCall(3, 2);
  const auto link = [](int peer, Link::Kind kind, uint64_t tail, uint64_t head = 0,
                       uint64_t all = 0, bool waits = false) {
    Link made{peer, 5, false, tail, head};
    made.kind = kind;
    made.all = all;
    made.waits = waits;
    return made;
  };
  using Kind = Link::Kind;
  using Waits = std::vector<std::pair<int, int>>;
  const auto expect = [&](const Waits& waits, const std::string& where) {
    const auto report = explain(views, 0, 5'000'000'000);
    ASSERT_TRUE(report);
    EXPECT_EQ(report->verdict, Verdict::inKernel);
    EXPECT_EQ(report->waits, waits);
    EXPECT_EQ(report->headline, "stuck in the kernel: " + where);
  };

  views[0].links = {link(1, Kind::lines, 37, 0, 128, true), link(2, Kind::lines, 128, 0, 128)};
  views[2].links = {link(0, Kind::lines, 128, 0, 128), link(1, Kind::lines, 0, 0, 128, true)};
  expect({{0, 1}, {2, 1}}, "rank 0 waits for line 38 of 128 from rank 1");

  views[0].links = {link(1, Kind::steps, 2, 2, 8, true), link(2, Kind::steps, 3, 2, 8)};
  views[2].links = {link(1, Kind::steps, 3, 3, 0, true)};
  expect({{0, 1}, {2, 1}}, "rank 0 waits for step 3 of 8 of block 5 from rank 1");
  views[0].links.clear();
  expect({{2, 1}}, "rank 2 waits for step 4 of block 5 from rank 1");

  // A rank that takes nothing: only it knows how much there is.
  views[2].links.clear();
  views[1].links = {link(2, Kind::steps, 6, 2, 8)};
  expect({{2, 1}}, "rank 2 waits for rank 1 to take step 3 of block 5");
  views[1].links = {link(2, Kind::steps, 8, 4, 8)};  // all that there is
  expect({}, "ranks 0-2");
  views[1].links = {link(2, Kind::steps, 5, 2, 8)};  // there is room
  expect({}, "ranks 0-2");

  // Rank 1 has not offered its buffers, and the others take none before they have all offers.
  views[0].links = {link(1, Kind::buffers, 0), link(2, Kind::buffers, 1)};
  views[1].links = {link(0, Kind::buffers, 1), link(2, Kind::buffers, 1)};
  views[2].links = {link(0, Kind::buffers, 1), link(1, Kind::buffers, 0)};
  expect({{0, 1}, {2, 1}},
         "rank 0 waits for rank 1 to offer its buffers (zero copy: nothing counts how far a rank "
         "is)");
  // Rank 1 has the answers of the others and uses their buffers still.
  views[0].links = {link(1, Kind::buffers, 0), link(2, Kind::buffers, 0, 1)};
  views[1].links = {link(0, Kind::buffers, 0, 1), link(2, Kind::buffers, 0, 1)};
  views[2].links = {link(0, Kind::buffers, 0), link(1, Kind::buffers, 0)};
  expect({{0, 1}, {2, 1}},
         "rank 0 waits for rank 1 to be done with its buffers (zero copy: nothing counts how far a "
         "rank is)");
}

TEST(Report, NamesSettingsThatDiffer) {
  std::vector<RankView> views(3);
  for (size_t rank = 0; rank < views.size(); rank++) {
    views[rank].rank = static_cast<int>(rank);
    views[rank].ranks = 3;
    views[rank].isKnown = rank < 2;
    views[rank].settings = {{"NCCL_ALGO", "ring"}, {"NCCL_HOSTID", std::to_string(rank)}};
  }
  Call made = call(plan::Call::allReduce, 8, device::DataType::int32);
  made.index = made.sequence = 1;
  views[0].calls = {made};
  EXPECT_TRUE(explain(views, 0, 5'000'000'000)->settings.empty());
  views[1].settings["NCCL_P2P_DISABLE"] = "1";
  EXPECT_EQ(explain(views, 0, 5'000'000'000)->settings,
            std::vector<std::string>{"NCCL_P2P_DISABLE is 1 on rank 1, its default on rank 0"});
}

// 600 ranks, of which half have not made the call.
TEST(Report, StaysShortWithManyRanks) {
  std::vector<RankView> views(600);
  for (size_t rank = 0; rank < views.size(); rank++) {
    views[rank].rank = static_cast<int>(rank);
    views[rank].ranks = 600;
    views[rank].isKnown = true;
    if (rank % 300 >= 100) continue;
    Call made = call(plan::Call::allReduce, 8, device::DataType::int32);
    made.index = made.sequence = 1;
    views[rank].calls = {made};
  }
  const auto report = explain(views, 0, 5'000'000'000);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->verdict, Verdict::notArrived);
  EXPECT_EQ(report->missing.size(), 400u);
  const std::string text = report->text(views[0]);
  EXPECT_NE(text.find("not arrived:  ranks 100-299, 400-599\n"), std::string::npos) << text;
  EXPECT_NE(text.find("waiting:      ranks 0-99, 300-399\n"), std::string::npos) << text;
  EXPECT_LT(text.size(), 4096u);
  EXPECT_LT(report->json(views[0]).size(), 32'768u);
}

// Rank 0 is in a call that rank 1 has not made.
struct LateRank {
  explicit LateRank(bool hasLaunched = true) {
    journals[0]->enter(task(plan::Call::allReduce, 8));
    if (hasLaunched) journals[0]->launched(1, 1, 2);
  }
  std::vector<std::shared_ptr<Journal>> journals{startedJournal(1, 0), startedJournal(1, 1)};
  SimulatedWatch watch{journals[0], tablesOf(1, journals), 0};
};

TEST(Watchdog, ReportsAfterItsPatience) {
  LateRank rank;
  const int64_t after = rank.watch.lookUntilReport(60 * kSecond);
  EXPECT_TRUE(rank.watch.hasReported());
  EXPECT_GE(after, SimulatedWatch::kPatience);
  EXPECT_LE(after, SimulatedWatch::kPatience + kSecond);
}

// The machine is paused for a minute just before the report: afterwards the ranks have time to go
// on, and what the report says of the kernels is read after the pause.
TEST(Watchdog, DoesNotCountPauses) {
  LateRank rank;
  EXPECT_EQ(rank.watch.lookUntilReport(SimulatedWatch::kPatience - kSecond),
            SimulatedWatch::kPatience - kSecond);
  const int before = rank.watch.measurements();
  rank.watch.look(60 * kSecond);
  const int64_t after = rank.watch.lookUntilReport(60 * kSecond);
  EXPECT_TRUE(rank.watch.hasReported());
  EXPECT_GE(after, SimulatedWatch::kPatience / 4);
  EXPECT_LE(after, SimulatedWatch::kPatience / 2);
  EXPECT_GE(rank.watch.measurements(), before + 2);
}

// The pause begins in the moment after the call.
TEST(Watchdog, DoesNotCountAPauseBeforeItsFirstLook) {
  LateRank rank(false);
  rank.watch.look(60 * kSecond);
  EXPECT_FALSE(rank.watch.hasReported());
  EXPECT_GE(rank.watch.lookUntilReport(60 * kSecond), SimulatedWatch::kPatience - kSecond);
  EXPECT_TRUE(rank.watch.hasReported());
}

TEST(Watchdog, IsSilentWhereTheCallGoesOnAfterAPause) {
  LateRank rank;
  rank.watch.lookUntilReport(SimulatedWatch::kPatience - kSecond);
  rank.watch.look(60 * kSecond);
  rank.watch.look();
  rank.watch.finish();
  rank.watch.lookUntilReport(60 * kSecond);
  EXPECT_FALSE(rank.watch.hasReported());
}

// A machine on which the watchdog gets to run every three seconds only.
TEST(Watchdog, ReportsLateWhereItSeldomRuns) {
  LateRank rank;
  for (int i = 0; i < 40 && !rank.watch.hasReported(); i++) rank.watch.look(3 * kSecond);
  EXPECT_TRUE(rank.watch.hasReported());
}

TEST(Watchdog, CountsPausesOfTheSameLengthOnce) {
  WaitClock clock(8 * kSecond);
  EXPECT_FALSE(clock.look(100 * kSecond));
  EXPECT_EQ(clock.waited({1, 0}, 100 * kSecond), 0);
  EXPECT_TRUE(clock.look(110 * kSecond));
  EXPECT_FALSE(clock.look(120 * kSecond));
  EXPECT_TRUE(clock.look(141 * kSecond));
  EXPECT_EQ(clock.waited({1, 0}, 100 * kSecond), 3 * kSecond / 2);
  EXPECT_EQ(clock.waited({2, 0}, 141 * kSecond), 0) << "another call";
  EXPECT_TRUE(clock.look(143 * kSecond));
}

}  // namespace
}  // namespace unisono::diagnose
