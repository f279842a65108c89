// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <unistd.h>

#include <barrier>
#include <chrono>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "network_testing.h"
#include "support/fake_net.h"
#include "support/seed.h"

// Profiler plug-ins: the one of fake_profiler.c, one library for each version of the interface. It
// stays loaded and notes everything, so every test uses versions of its own or counts from where
// the notes end.
namespace unisono::system_test {
namespace {

using ::testing::HasSubstr;

constexpr int kCollective = 2, kMessage = 4, kOperation = 8, kStep = 16, kControl = 32,
              kChannel = 64, kNetwork = 128, kAll = 0xfff;

std::string pathOf(int version) {
  return std::string(UNISONO_FAKE_PROFILERS) + "/libnccl-profiler-fake" + std::to_string(version) +
         ".so";
}

// What a plug-in has noted since this was made.
class Notes {
 public:
  explicit Notes(int version) : library_(::dlopen(pathOf(version).c_str(), RTLD_NOW | RTLD_LOCAL)) {
    text_ = static_cast<const char*>(::dlsym(library_, "fakeProfilerNotes"));
    used_ = reinterpret_cast<size_t (*)()>(::dlsym(library_, "fakeProfilerUsed"));
    begin_ = used_();
  }
  ~Notes() { ::dlclose(library_); }
  Notes(const Notes&) = delete;
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    std::istringstream all(std::string(text_ + begin_, used_() - begin_));
    for (std::string line; std::getline(all, line);) lines.push_back(line);
    return lines;
  }
  // Those that begin with `start`.
  std::vector<std::string> of(const std::string& start) const {
    std::vector<std::string> found;
    for (const std::string& line : lines()) {
      if (line.starts_with(start)) found.push_back(line);
    }
    return found;
  }

 private:
  void* library_;
  const char* text_;
  size_t (*used_)();
  size_t begin_ = 0;
};

// The number that follows a word of a note.
long numberIn(const std::string& line, const std::string& word) {
  const size_t at = line.find(" " + word + " ");
  EXPECT_NE(at, std::string::npos) << word << " in: " << line;
  return at == std::string::npos ? -1 : std::atol(line.c_str() + at + word.size() + 2);
}

// Every event that was started was stopped once, after it was started.
void expectAllStopped(const Notes& notes) {
  std::map<long, int> open;
  for (const std::string& line : notes.lines()) {
    if (line.starts_with("start ")) open[numberIn(line, "event")] = 1;
    const bool stops = line.starts_with("stop ");
    EXPECT_TRUE(!stops || open[numberIn(line, "event")]-- == 1) << line;
  }
  for (const auto& [event, count] : open) EXPECT_EQ(count, 0) << "event " << event;
}

// Makes a communicator of two ranks with an all-reduce and a message.
void run(const std::string& plugins, int events) {
  const Setting names("NCCL_PROFILER_PLUGIN", plugins.c_str());
  const Setting wanted("FAKE_PROFILER_EVENTS", std::to_string(events).c_str());
  const Ranks ranks(2);
  const DeviceBuffer buffers[] = {{0, 4000}, {1, 4000}};
  ranks.inGroup([&](int rank) {
    check(ncclAllReduce(buffers[rank].as(), buffers[rank].as(), 1000, ncclFloat, ncclSum,
                        ranks.comm(rank), ranks.stream(rank)));
  });
  ranks.inGroup([&](int rank) {
    check(rank == 0 ? ncclSend(buffers[0].as(), 7, ncclInt8, 1, ranks.comm(0), ranks.stream(0))
                    : ncclRecv(buffers[1].as(), 7, ncclInt8, 0, ranks.comm(1), ranks.stream(1)));
  });
  ranks.synchronize();
}

class Profiler : public ::testing::TestWithParam<int> {};

TEST_P(Profiler, IsToldOfCallsAndWhatTheyBelongTo) {
  const int version = GetParam();
  const Notes notes(version);
  run(pathOf(version), kAll);
  EXPECT_EQ(notes.of("init ").size(), 2u);
  EXPECT_EQ(notes.of("finalize ").size(), 2u);
  EXPECT_THAT(notes.of("init ")[1],
              HasSubstr(version >= 4 ? "nodes 1 ranks 2" : "nodes 0 ranks 0 rank 0"));
  expectAllStopped(notes);

  const auto collectives = notes.of("start 2 ");
  ASSERT_EQ(collectives.size(), 2u);
  for (const std::string& line : collectives) {
    EXPECT_EQ(numberIn(line, "sequence"), 0);
    EXPECT_EQ(numberIn(line, "count"), 1000);
    EXPECT_THAT(line, HasSubstr(version == 1 ? "function 4 algorithm 7"
                                             : "function AllReduce algorithm DIRECT"));
    // Up to version 4 it belongs to a group, from then on to a call of the API, and that to one.
    const std::string parent = " event " + std::to_string(numberIn(line, "parent")) + " ";
    const auto owners = notes.of(version <= 4 ? "start 1" + parent : "start 512" + parent);
    ASSERT_EQ(owners.size(), 1u) << line;
    EXPECT_EQ(numberIn(owners[0], "context"), numberIn(line, "context"));
    if (version <= 4) continue;
    EXPECT_THAT(owners[0], HasSubstr("function AllReduce"));
    const std::string group = " event " + std::to_string(numberIn(owners[0], "parent")) + " ";
    ASSERT_EQ(notes.of("start 256" + group).size(), 1u);
    EXPECT_EQ(numberIn(notes.of("start 256" + group)[0], "depth"), 2);
  }
  const auto messages = notes.of("start 4 ");
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(numberIn(messages[0], "rank") + numberIn(messages[0], "peer"), 1);
  EXPECT_THAT(messages[0], HasSubstr(version == 1 ? "function 6" : "function Send"));
  EXPECT_THAT(messages[1], HasSubstr(version == 1 ? "function 7" : "function Recv"));

  if (version >= 5) {
    EXPECT_EQ(notes.of("start 2048 ").size(), 4u) << "a launch of each call";
    EXPECT_EQ(notes.of("state 23 ").size(), 4u);
    EXPECT_EQ(notes.of("state 24 ").size(), 4u);
  }
  const auto channels = notes.of("start 64 ");
  EXPECT_EQ(channels.empty(), version <= 2) << "an event of version 3";
  if (version < 4) return;
  const auto ends = notes.of("state 22 ");
  ASSERT_EQ(ends.size(), channels.size());
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  for (size_t i = 0; i < ends.size(); i++) {
    EXPECT_GE(numberIn(ends[i], "time"), numberIn(channels[i], "time"));
    EXPECT_LE(numberIn(ends[i], "time"), now.count());
    EXPECT_GT(numberIn(channels[i], "time"), now.count() - 600'000'000'000);
  }
}

INSTANTIATE_TEST_SUITE_P(Versions, Profiler, ::testing::Range(1, 7));

TEST(Profilers, AreToldNothingThatTheyDoNotWant) {
  const Notes notes(4);
  run(pathOf(4), 0);
  EXPECT_EQ(notes.of("init ").size(), 2u);
  EXPECT_TRUE(notes.of("start ").empty()) << notes.of("start ")[0];
  run(pathOf(4), kMessage);
  EXPECT_EQ(notes.of("start 4 ").size(), 2u);
  EXPECT_TRUE(notes.of("start 2 ").empty() && notes.of("start 64 ").empty());
}

// Which gives the channels a parent.
TEST(Profilers, AreToldOfTheCallOfAChannelThatTheyWant) {
  const Notes notes(4);
  run(pathOf(4), kChannel);
  EXPECT_EQ(notes.of("start 2 ").size(), 2u);
  EXPECT_FALSE(notes.of("start 64 ").empty());
}

TEST(Profilers, SeveralAtOnce) {
  const Notes first(2), second(6);
  run(pathOf(2) + ",/nowhere/profiler.so," + pathOf(6), kCollective);
  for (const Notes* notes : {&first, &second}) {
    EXPECT_EQ(notes->of("init ").size(), 2u);
    EXPECT_EQ(notes->of("start 2 ").size(), 2u);
    EXPECT_EQ(notes->of("finalize ").size(), 2u);
    expectAllStopped(*notes);
  }
}

TEST(Profilers, ThatDoNotStartAreLeftOut) {
  const Notes notes(3);
  const Setting names("NCCL_PROFILER_PLUGIN", pathOf(3).c_str());
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  EXPECT_TRUE(notes.lines().empty());
}

// What a plug-in was told of an event.
struct Event {
  long type = 0, parent = 0, context = 0;
  std::string start;
  std::vector<std::string> states;
  size_t started = 0, stopped = 0;  // among all notes
  std::vector<long> numbers() const {
    std::vector<long> result;
    for (const std::string& state : states) result.push_back(std::atol(state.c_str() + 6));
    return result;
  }
};
std::map<long, Event> eventsOf(const Notes& notes) {
  std::map<long, Event> events;
  size_t place = 0;
  for (const std::string& line : notes.lines()) {
    place++;
    if (line.starts_with("start ")) {
      events[numberIn(line, "event")] = {std::atol(line.c_str() + 6),
                                         numberIn(line, "parent"),
                                         numberIn(line, "context"),
                                         line,
                                         {},
                                         place,
                                         0};
    } else if (line.starts_with("state ")) {
      events.at(numberIn(line, "event")).states.push_back(line);
    } else if (line.starts_with("stop ")) {
      events.at(numberIn(line, "event")).stopped = place;
    }
  }
  return events;
}

// Two ranks that reach each other over sockets only.
struct OverSockets {
  explicit OverSockets(const std::string& plugins, int wanted, const char* algorithm = "ring",
                       const char* protocol = "Simple")
      : settings{{"NCCL_PROFILER_PLUGIN", plugins.c_str()},
                 {"FAKE_PROFILER_EVENTS", std::to_string(wanted).c_str()},
                 {"NCCL_P2P_DISABLE", "1"},
                 {"NCCL_SHM_DISABLE", "1"},
                 {"NCCL_ALGO", algorithm},
                 {"NCCL_PROTO", protocol},
                 {"NCCL_BUFFSIZE", "262144"}} {}
  const Setting settings[7];
};

// The steps of each operation.
std::map<long, std::vector<Event>> stepsOf(const std::map<long, Event>& events) {
  std::map<long, std::vector<Event>> steps;
  for (const auto& [number, event] : events) {
    if (event.type == kStep) steps[event.parent].push_back(event);
  }
  return steps;
}

// The bytes that steps have passed, as their state `state` says.
uint64_t bytesOf(const std::vector<Event>& steps, long state) {
  uint64_t bytes = 0;
  for (const Event& step : steps) {
    for (const std::string& each : step.states) {
      if (std::atol(each.c_str() + 6) == state) {
        bytes += static_cast<uint64_t>(numberIn(each, "bytes"));
      }
    }
  }
  return bytes;
}

// Each operation belongs to a call of its rank, and its steps are in order.
void expectWholeOperations(const std::map<long, Event>& events, int version) {
  const bool isOld = version < 4;
  std::map<long, std::vector<Event>> steps = stepsOf(events);
  for (const auto& [number, event] : events) {
    if (event.type != kOperation) continue;
    ASSERT_TRUE(events.contains(event.parent)) << event.start;
    const Event& call = events.at(event.parent);
    EXPECT_TRUE(call.type == kCollective || call.type == kMessage) << call.start;
    EXPECT_EQ(call.context, event.context);
    EXPECT_LT(call.started, event.started);
    EXPECT_LT(event.started, call.stopped) << "a plug-in may forget the call then";
    EXPECT_EQ(numberIn(event.start, "process"), ::getpid());
    EXPECT_NE(numberIn(event.start, "rank"), numberIn(event.start, "peer"));
    EXPECT_EQ(event.numbers(), isOld ? std::vector<long>{} : std::vector<long>{19});
    const bool sends = numberIn(event.start, "sends") != 0;
    long next = 0;
    for (const Event& step : steps[number]) {
      EXPECT_EQ(numberIn(step.start, "step"), next++) << step.start;
      const std::vector<long> sent = isOld ? std::vector<long>{8, 9} : std::vector<long>{8, 20, 9};
      EXPECT_EQ(step.numbers(), sends ? sent : (std::vector<long>{10, 11, 12})) << step.start;
      EXPECT_LT(step.stopped, event.stopped);
      for (const std::string& state : step.states) {
        EXPECT_LE(numberIn(state, "bytes"), isOld ? 0 : numberIn(event.start, "bytes")) << state;
      }
    }
    EXPECT_EQ(next, numberIn(event.start, "steps")) << event.start;
  }
}

class ProfilerOfNetwork
    : public ::testing::TestWithParam<std::tuple<int, const char*, const char*>> {};

// Calls of random sizes, of which several are queued at once.
TEST_P(ProfilerOfNetwork, IsToldWhatProxiesMoveForEachCall) {
  const auto& [version, algorithm, protocol] = GetParam();
  const Notes notes(version);
  std::mt19937_64 random(test::seed());
  const auto draw = [&] { return std::uniform_int_distribution<size_t>(1, 300'000)(random); };
  std::vector<size_t> sums, messages;
  {
    const OverSockets settings(pathOf(version), kAll, algorithm, protocol);
    const Ranks ranks(2);
    // Not in place: ThreadSanitizer does not see the order that the network makes between the
    // groups of a tree.
    constexpr size_t kPart = 2 << 20;
    const DeviceBuffer buffers[] = {{0, 4 * kPart}, {1, 4 * kPart}};
    for (int i = 0; i < 3; i++) {
      const size_t count = draw(), other = draw(), bytes = draw(), back = draw();
      sums.insert(sums.end(), {count, other});
      messages.insert(messages.end(), {bytes, back});
      ranks.inGroup([&](int rank) {
        char* at = buffers[rank].as<char>();
        char* to = at;
        for (const size_t each : {count, other}) {
          to += kPart;
          check(ncclAllReduce(at, to, each, ncclFloat, ncclSum, ranks.comm(rank),
                              ranks.stream(rank)));
        }
      });
      ranks.inGroup([&](int rank) {
        char* at = buffers[rank].as<char>();
        check(ncclSend(at, rank == 0 ? bytes : back, ncclInt8, 1 - rank, ranks.comm(rank),
                       ranks.stream(rank)));
        check(ncclRecv(at + 3 * kPart, rank == 0 ? back : bytes, ncclInt8, 1 - rank,
                       ranks.comm(rank), ranks.stream(rank)));
      });
    }
    ranks.synchronize();
  }
  expectAllStopped(notes);
  const std::map<long, Event> events = eventsOf(notes);
  expectWholeOperations(events, version);
  // What each call has sent and received.
  std::map<long, uint64_t> sent, received;
  std::map<long, std::vector<Event>> steps = stepsOf(events);
  for (const auto& [number, event] : events) {
    if (event.type != kOperation) continue;
    sent[event.parent] += bytesOf(steps[number], 9);
    received[event.parent] += bytesOf(steps[number], 12);
  }
  std::multiset<uint64_t> foundSums, foundSent, foundReceived;
  for (const auto& [number, event] : events) {
    if (event.type != kCollective && event.type != kMessage) continue;
    const bool isOne = sent.contains(number) || received.contains(number);
    EXPECT_TRUE(isOne) << "no operation of " << event.start;
    if (event.type == kCollective) {
      foundSums.insert(sent[number]);
    } else if (event.start.find(version == 1 ? "function 6" : "Send") != std::string::npos) {
      foundSent.insert(sent[number]);
      EXPECT_EQ(received[number], 0u);
    } else {
      foundReceived.insert(received[number]);
      EXPECT_EQ(sent[number], 0u);
    }
  }
  EXPECT_EQ(foundSums.size(), 2 * sums.size());
  EXPECT_EQ(foundSent.size(), messages.size());
  EXPECT_EQ(foundReceived.size(), messages.size());
  if (version < 4) return;  // steps have no sizes
  // With two ranks each sends as much as there is, in a ring half of it twice.
  std::multiset<uint64_t> wantedSums;
  for (const size_t count : sums) {
    for (int rank = 0; rank < 2; rank++) wantedSums.insert(count * sizeof(float));
  }
  EXPECT_EQ(foundSums, wantedSums);
  EXPECT_EQ(foundSent, std::multiset<uint64_t>(messages.begin(), messages.end()));
  // Lines of LL arrive whole.
  for (auto found = foundReceived.begin();
       const size_t bytes : std::set(messages.begin(), messages.end())) {
    EXPECT_GE(*found, bytes);
    EXPECT_LE(*found++, bytes + 7 * 300);
  }

  // The proxy itself.
  bool hasAppended = false;
  for (const auto& [number, event] : events) {
    if (event.type != kControl) continue;
    const std::vector<long> states = event.numbers();
    ASSERT_FALSE(states.empty());
    if (states.front() == 15 && states.size() == 2) {
      EXPECT_EQ(states[1], 16);
    }
    if (states.front() != 17) {
      EXPECT_TRUE(states.size() == 1 || states.front() == 15) << event.start;
      continue;
    }
    EXPECT_EQ(states, (std::vector<long>{17, 18}));
    EXPECT_EQ(numberIn(event.states[0], "appended"), 0);
    hasAppended |= numberIn(event.states[1], "appended") > 0;
  }
  EXPECT_TRUE(hasAppended);
}
INSTANTIATE_TEST_SUITE_P(All, ProfilerOfNetwork,
                         ::testing::Values(std::tuple(1, "ring", "Simple"),
                                           std::tuple(2, "tree", "LL"), std::tuple(3, "ring", "LL"),
                                           std::tuple(4, "ring", "Simple"),
                                           std::tuple(5, "tree", "Simple"),
                                           std::tuple(6, "ring", "LL"),
                                           std::tuple(6, "tree", "LL")));

// With `aborts` rank 0 makes one more call, which rank 1 leaves out.
void runOverSockets(const std::string& plugins, int wanted, int calls = 1, bool aborts = false) {
  const OverSockets settings(plugins, wanted);
  const ncclUniqueId id = newId();
  std::barrier<> haveCalled(2);
  onThreads(2, [&](int rank) {
    Member member(id, rank, 2);
    const DeviceStream stream(rank);
    const DeviceBuffer buffer(rank, 1 << 20);
    const auto reduce = [&] {
      check(ncclAllReduce(buffer.as(), buffer.as(), 1 << 18, ncclFloat, ncclSum, member.comm,
                          stream));
    };
    for (int i = 0; i < calls; i++) reduce();
    device::synchronize(stream);
    if (!aborts) return;
    if (rank == 0) reduce();
    haveCalled.arrive_and_wait();
    check(ncclCommAbort(std::exchange(member.comm, nullptr)));
    device::synchronize(stream);
  });
}

TEST(ProfilersOfNetworks, AreToldWhatTheyWant) {
  const Notes notes(6);
  std::map<int, std::set<long>> told;
  size_t seen = 0;
  for (const int wanted : {kOperation, kStep, kControl, kNetwork, kCollective}) {
    runOverSockets(pathOf(6), wanted);
    const std::vector<std::string> lines = notes.of("start ");
    for (; seen < lines.size(); seen++) told[wanted].insert(std::atol(lines[seen].c_str() + 6));
  }
  EXPECT_EQ(told[kOperation], (std::set<long>{1, 2, 8, 256, 512}));
  EXPECT_EQ(told[kStep], (std::set<long>{1, 2, 8, 16, 256, 512}));
  EXPECT_EQ(told[kControl], (std::set<long>{32}));
  EXPECT_EQ(told[kNetwork], (std::set<long>{1, 2, 8, 16, 256, 512})) << "sockets have none";
  EXPECT_EQ(told[kCollective], (std::set<long>{1, 2, 256, 512}));
  expectAllStopped(notes);
}

TEST(ProfilersOfNetworks, SeveralAtOnce) {
  const Notes old(2), recent(5);
  runOverSockets(pathOf(2) + "," + pathOf(5), kAll, 3);
  for (const auto& [notes, version] : {std::pair(&old, 2), std::pair(&recent, 5)}) {
    expectAllStopped(*notes);
    expectWholeOperations(eventsOf(*notes), version);
    EXPECT_FALSE(notes->of("start 8 ").empty());
  }
  EXPECT_EQ(old.of("start 8 ").size(), recent.of("start 8 ").size());
  EXPECT_EQ(old.of("start 16 ").size(), recent.of("start 16 ").size());
}

// Replays have no events, nor what follows over the same connections, whose slots nobody counts any
// more. Other connections go on, and those that are made once more, as after a suspension, too.
TEST(ProfilersOfNetworks, AreToldOnlyWhatIsKnown) {
  const Notes notes(6);
  {
    const OverSockets settings(pathOf(6), kAll);
    const ncclUniqueId id = newId();
    onThreads(2, [&](int rank) {
      const Member member(id, rank, 2);
      const DeviceStream stream(rank);
      const DeviceBuffer buffer(rank, 4000);
      const auto reduce = [&] {
        check(
            ncclAllReduce(buffer.as(), buffer.as(), 1000, ncclFloat, ncclSum, member.comm, stream));
      };
      reduce();
      check(ncclCommSuspend(member.comm, NCCL_SUSPEND_MEM));
      check(ncclCommResume(member.comm));
      reduce();
      unisonoHostGraph_t graph = nullptr;
      check(unisonoHostStreamBeginCapture(stream));
      reduce();
      check(unisonoHostStreamEndCapture(stream, &graph));
      reduce();
      for (int i = 0; i < 3; i++) check(unisonoHostGraphLaunch(graph, stream));
      reduce();
      check(ncclGroupStart());
      check(ncclSend(buffer.as(), 100, ncclInt8, 1 - rank, member.comm, stream));
      check(ncclRecv(buffer.as<char>() + 100, 100, ncclInt8, 1 - rank, member.comm, stream));
      check(ncclGroupEnd());
      device::synchronize(stream);
      unisonoHostGraphDestroy(graph);
    });
  }
  expectAllStopped(notes);
  const std::map<long, Event> events = eventsOf(notes);
  expectWholeOperations(events, 6);
  std::map<long, std::map<long, int>> calls;  // with operations, by type and context
  std::set<long> parents;
  for (const auto& [number, event] : events) {
    if (event.type != kOperation || !parents.insert(event.parent).second) continue;
    calls[events.at(event.parent).type][event.context]++;
  }
  for (const auto& [type, count] : {std::pair(kCollective, 2), std::pair(kMessage, 2)}) {
    ASSERT_EQ(calls[type].size(), 2u);
    for (const auto& [context, found] : calls[type]) EXPECT_EQ(found, count) << "type " << type;
  }
}

// The communicator ends when its kernels have ended.
TEST(ProfilersOfNetworks, SeeTheEndOfAnAbort) {
  using namespace std::chrono_literals;
  const Notes notes(6);
  runOverSockets(pathOf(6), kAll, 1, true);
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (notes.of("finalize ").size() < 2 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(notes.of("finalize ").size(), 2u);
  EXPECT_EQ(notes.of("start 2 ").size(), 3u);
  EXPECT_FALSE(notes.of("start 8 ").empty());
  expectAllStopped(notes);
}

class ProfilerOfNetPlugin : public ::testing::TestWithParam<int> {};

TEST_P(ProfilerOfNetPlugin, IsToldOfItsEvents) {
  const int version = GetParam();
  const Notes notes(version);
  const Setting settings[] = {{"NCCL_PROFILER_PLUGIN", pathOf(version).c_str()},
                              {"FAKE_PROFILER_EVENTS", std::to_string(kAll).c_str()},
                              {"NCCL_NET_PLUGIN", testing::fakeNetPath(11).c_str()},
                              {"FAKE_NET", ""},
                              {"NCCL_ALGO", "ring"},
                              {"NCCL_PROTO", "Simple"}};
  {
    const Ranks ranks(2, 1);
    everyCall(ranks, {60'001});
  }
  expectAllStopped(notes);
  const std::map<long, Event> events = eventsOf(notes);
  expectWholeOperations(events, version);
  std::map<long, int> ofStep;
  for (const auto& [number, event] : events) {
    if (event.type != kNetwork) continue;
    EXPECT_EQ(numberIn(event.start, "plugin"), 2 << 16 | 1);
    EXPECT_GT(numberIn(event.start, "data"), 0);
    ASSERT_TRUE(events.contains(event.parent)) << event.start;
    EXPECT_EQ(events.at(event.parent).type, kStep);
    EXPECT_LT(events.at(event.parent).started, event.started);
    EXPECT_LT(event.stopped, events.at(event.parent).stopped);
    EXPECT_EQ(event.numbers(), version < 4 ? std::vector<long>{} : std::vector<long>{21});
    ofStep[event.parent]++;
  }
  size_t sent = 0;
  for (const auto& [number, event] : events) {
    if (event.type != kStep) continue;
    const bool sends = numberIn(events.at(event.parent).start, "sends") != 0;
    sent += sends ? 1 : 0;
    const int found = ofStep.contains(number) ? ofStep.at(number) : 0;
    // Receives may have been posted before the call was made.
    EXPECT_TRUE(version < 3 || !sends || found == 1) << event.start;
    EXPECT_LE(found, 1);
  }
  EXPECT_GT(sent, 0u);
  EXPECT_EQ(ofStep.empty(), version < 3);
}
INSTANTIATE_TEST_SUITE_P(Versions, ProfilerOfNetPlugin, ::testing::Values(2, 3, 6));

// Every call over rings, trees and the trees of heads: slots are counted as the kernels do.
class ProfilerOfCalls : public ::testing::TestWithParam<std::tuple<const char*, int, int>> {};

TEST_P(ProfilerOfCalls, IsToldOfEverySlot) {
  const auto& [algorithm, nodes, ranksPerNode] = GetParam();
  const Notes notes(4);
  const Setting settings[] = {{"NCCL_PROFILER_PLUGIN", pathOf(4).c_str()},
                              {"FAKE_PROFILER_EVENTS", std::to_string(kStep).c_str()},
                              {"NCCL_NET", "Socket"},
                              {"NCCL_ALGO", algorithm},
                              {"NCCL_BUFFSIZE", "65536"}};
  std::mt19937_64 random(test::seed());
  const auto count = std::uniform_int_distribution<size_t>(1, 40'000)(random);
  {
    const Ranks ranks(nodes, ranksPerNode);
    everyCall(ranks, {count, 1});
  }
  expectAllStopped(notes);
  const std::map<long, Event> events = eventsOf(notes);
  expectWholeOperations(events, 4);
  EXPECT_FALSE(notes.of("start 8 ").empty());
}
INSTANTIATE_TEST_SUITE_P(All, ProfilerOfCalls,
                         ::testing::Values(std::tuple("ring", 3, 2), std::tuple("tree", 5, 1),
                                           std::tuple("nvlstree", 3, 2)));

// The kernels of the launches of a group note when each of their blocks runs.
TEST(Profilers, AreToldWhenChannelsRun) {
  const Notes notes(6);
  {
    const Setting names("NCCL_PROFILER_PLUGIN", pathOf(6).c_str());
    const Setting wanted("FAKE_PROFILER_EVENTS", std::to_string(kChannel).c_str());
    const Ranks ranks(2);
    const DeviceBuffer buffers[] = {{0, 4000}, {1, 4000}};
    for (int i = 0; i < 3; i++) {
      ranks.inGroup([&](int rank) {
        std::byte* data = buffers[rank].as();
        const ncclComm_t comm = ranks.comm(rank);
        check(ncclAllReduce(data, data, 100, ncclFloat, ncclSum, comm, ranks.stream(rank)));
        check(ncclSend(data + 1000, 100, ncclInt8, 1 - rank, comm, ranks.stream(rank)));
        check(ncclRecv(data + 2000, 100, ncclInt8, 1 - rank, comm, ranks.stream(rank)));
      });
      ranks.synchronize();
    }
  }
  expectAllStopped(notes);
  const std::map<long, Event> events = eventsOf(notes);
  struct Span {
    long begin = std::numeric_limits<long>::max(), end = 0;
  };
  std::map<long, Span> spans;  // by call
  for (const auto& [number, event] : events) {
    if (event.type != kChannel) continue;
    Span& span = spans[event.parent];
    ASSERT_EQ(event.states.size(), 1u);
    span.begin = std::min(span.begin, numberIn(event.start, "time"));
    span.end = std::max(span.end, numberIn(event.states[0], "time"));
  }
  std::map<long, std::vector<Span>> calls;  // by context, in order
  for (const auto& [number, event] : events) {
    if (event.type != kCollective && event.type != kMessage) continue;
    ASSERT_TRUE(spans.contains(number)) << event.start;
    calls[event.context].push_back(spans.at(number));
  }
  ASSERT_EQ(calls.size(), 2u);
  for (const auto& [context, all] : calls) {
    ASSERT_EQ(all.size(), 9u);
    for (size_t i = 0; i < all.size(); i += 3) {
      EXPECT_LT(all[i].begin, all[i].end);
      for (const size_t message : {i + 1, i + 2}) {
        EXPECT_LE(all[i].end, all[message].begin) << "the launch of messages comes later";
      }
    }
  }
}

// A group that fails before its launches.
TEST(Profilers, SeeTheEndOfAGroupThatFails) {
  const Notes notes(5);
  {
    const Setting names("NCCL_PROFILER_PLUGIN", pathOf(5).c_str());
    const Setting wanted("FAKE_PROFILER_EVENTS", "4095");
    const Ranks ranks(2);
    const DeviceBuffer buffer(0, 4000);
    check(ncclGroupStart());
    EXPECT_OK(ncclSend(buffer.as(), 7, ncclInt8, 0, ranks.comm(0), ranks.stream(0)));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage) << "no receive";
    int notAStream = 0;
    EXPECT_EQ(ncclSend(buffer.as(), 7, ncclInt8, 1, ranks.comm(0),
                       reinterpret_cast<cudaStream_t>(&notAStream)),
              ncclInvalidArgument);
  }
  EXPECT_EQ(notes.of("start 1024 ").size(), 2u);
  EXPECT_TRUE(notes.of("start 4 ").empty());
  expectAllStopped(notes);
}

}  // namespace
}  // namespace unisono::system_test
