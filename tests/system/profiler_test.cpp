// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <chrono>
#include <map>
#include <sstream>

#include "testing.h"

// Profiler plug-ins: the one of fake_profiler.c, one library for each version of the interface. It
// stays loaded and notes everything, so every test uses versions of its own or counts from where
// the notes end.
namespace unisono::system_test {
namespace {

using testing::HasSubstr;

constexpr int kCollective = 2, kMessage = 4, kChannel = 64, kAll = 0xfff;

std::string pathOf(int version) {
  return std::string(UNISONO_FAKE_PROFILERS) + "/libnccl-profiler-fake" + std::to_string(version) +
         ".so";
}

// What a plug-in has noted since this was made.
class Notes {
 public:
  explicit Notes(int version) : library_(::dlopen(pathOf(version).c_str(), RTLD_NOW | RTLD_LOCAL)) {
    text_ = static_cast<const char*>(::dlsym(library_, "fakeProfilerNotes"));
    begin_ = std::string(text_).size();
  }
  ~Notes() { ::dlclose(library_); }
  Notes(const Notes&) = delete;
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    std::istringstream all(text_ + begin_);
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
