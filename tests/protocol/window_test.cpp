// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "device/kernels.h"
#include "runtime/host/explorer.h"
#include "scenario.h"
#include "seeds.h"

// Messages into a window that is mapped and unmapped while they are on their way
// (docs/decisions/0009-windows.md). A window's place and the receiver's buffer are two different
// ranges here, so that a message shows where it went, and so that the place may be freed, for this
// test, as soon as the window is unmapped.
namespace unisono::protocol {
namespace {

using device::ChangeWindowArguments;
using device::WindowChange;
using runtime::HostGroupContext;
using runtime::host::Explorer;
using runtime::host::Schedule;

struct WindowCase {
  const char* name;
  int messages;    // one launch each
  uint64_t bytes;  // of a message
  int rounds;      // of mapping and unmapping; each has a window of its own
};

constexpr int kMostRounds = 2;
constexpr uint64_t kFirstWindow = 7 * device::kWindowSlots + 3;
constexpr uint64_t windowOf(int round) {
  return kFirstWindow + static_cast<uint64_t>(round) * device::kWindowSlots;
}

// Messages take turns with the windows.
constexpr int roundOf(int message, int rounds) {
  return message % rounds;
}
constexpr std::byte contentOf(int message) {
  return static_cast<std::byte>('a' + message);
}

// The mapper's work, as a task: maps a window, unmaps it, and frees the memory when nobody uses it.
struct MapperArguments {
  device::MappedWindow* entry;
  uint64_t* users;
  uint64_t* strange;  // bytes of other messages in a window
  std::byte* place[kMostRounds];
  uint64_t bytes;
  int messages;
  uint64_t delay;  // before the first mapping, and twice as long before the end of each
  int rounds;
};

void pause(uint64_t steps) {
  for (uint64_t i = 0; i < steps; i++) runtime::host::schedulePoint();
}

void mapAndUnmap(const void* raw, const HostGroupContext& context) {
  if (context.role != 0) return;
  const auto& work = *static_cast<const MapperArguments*>(raw);
  // As launches of the kernel would.
  const auto change = [&](WindowChange what, int round) {
    const ChangeWindowArguments arguments{work.entry, what, windowOf(round), work.place[round],
                                          work.users};
    device::changeWindowKernel().hostFunction(&arguments, context);
    runtime::host::noteRead(work.users, sizeof(*work.users));
    return *work.users;
  };
  for (int round = 0; round < work.rounds; round++) {
    pause(work.delay);
    change(WindowChange::map, round);
    pause(2 * work.delay);
    uint64_t users = change(WindowChange::unmap, round);
    while (users != 0) {
      runtime::host::poll({"users of a window", -1, -1, -1, 0, users});
      users = change(WindowChange::look, round);
    }
    runtime::host::progress();
    std::byte* place = work.place[round];
    runtime::host::noteWrite(place, work.bytes);
    for (uint64_t i = 0; i < work.bytes; i++) {
      bool known = place[i] == std::byte{0};
      for (int m = 0; m < work.messages; m++) {
        known |= roundOf(m, work.rounds) == round && place[i] == contentOf(m);
      }
      *work.strange += known ? 0 : 1;
    }
    std::memset(place, 0xff, work.bytes);
  }
}

class WindowMessages {
 public:
  explicit WindowMessages(const WindowCase& tested) : case_(tested) {
    mapper_ = testRuntime().createStream(0);
    abort_ = testRuntime().createStream(0);
    users_ = testRuntime().allocatePinned(sizeof(uint64_t));
  }

  // Returns what was wrong. Counts the messages that went into the window.
  std::string run(const Schedule& schedule, uint64_t delay, uint64_t abortAfter = 0) {
    static const Geometry kGeometry{
        .name = "one window", .directBytes = 1, .oneProcess = false, .windows = true};
    World& world = worldOf(kGeometry, 2);
    Random random = randomOf(static_cast<uint64_t>(schedule.seed), case_.name);
    world.reset(random);
    RankMemory& sender = memories()[0];
    RankMemory& receiver = memories()[1];
    sender.clear(std::byte{0x11});
    receiver.clear(std::byte{0x22});
    std::vector<size_t> inputs, outputs;
    for (int m = 0; m < case_.messages; m++) {
      inputs.push_back(sender.take(case_.bytes, 1, random));
      std::memset(sender.at(inputs.back()), std::to_integer<int>(contentOf(m)), case_.bytes);
      outputs.push_back(receiver.take(case_.bytes, 1, random));
      std::memset(receiver.at(outputs.back()), 0, case_.bytes);
    }
    MapperArguments arguments{};
    for (int round = 0; round < case_.rounds; round++) {
      arguments.place[round] = receiver.at(receiver.take(case_.bytes, 1, random));
      std::memset(arguments.place[round], 0, case_.bytes);
    }

    startSchedule(schedule);
    const auto spec =
        device::ReductionSpec{device::DataType::uint8, device::Reduction::sum, false, 0};
    for (int m = 0; m < case_.messages; m++) {
      const size_t at = static_cast<size_t>(m);
      plan::Task send{plan::Call::send, sender.at(inputs[at]), nullptr, case_.bytes, spec, 1};
      plan::Task receive{plan::Call::receive, nullptr, receiver.at(outputs[at]),
                         case_.bytes,         spec,    0};
      receive.window = {windowOf(roundOf(m, case_.rounds)), 0};
      world.enqueue(0, {send});
      world.enqueue(1, {receive});
    }
    strange_ = 0;
    arguments.entry = world.windowEntry(0, 1, windowOf(0));
    arguments.users = static_cast<uint64_t*>(users_->hostAddress());
    arguments.strange = &strange_;
    arguments.bytes = case_.bytes;
    arguments.messages = case_.messages;
    arguments.delay = delay;
    arguments.rounds = case_.rounds;
    static const runtime::Kernel kKernel{"mapper", nullptr, mapAndUnmap};
    runtime::LaunchShape shape;
    shape.argumentBytes = sizeof(arguments);
    testRuntime().launch(kKernel, shape, &arguments, mapper_.get());
    if (abortAfter > 0) {
      for (int rank : {0, 1}) world.enqueueAbort(rank, abortAfter, abort_.get());
    }
    std::string wrong;
    for (const std::string& error : world.synchronize()) wrong += error;
    for (const auto& stream : {mapper_, abort_}) {
      try {
        testRuntime().synchronize(stream.get());
      } catch (const std::exception& error) {
        wrong += error.what();
      }
    }
    if (!wrong.empty() || abortAfter > 0) return wrong;
    for (int m = 0; m < case_.messages; m++) {
      const std::byte* output = receiver.at(outputs[static_cast<size_t>(m)]);
      const bool copied = isFilled(output, contentOf(m));
      if (!copied && !isFilled(output, std::byte{0})) {
        wrong += fmt::format(" message {} was copied in part;", m);
      }
      direct_ += copied ? 0 : 1;
      staged_ += copied ? 1 : 0;
    }
    for (int round = 0; round < case_.rounds; round++) {
      if (!isFilled(arguments.place[round], std::byte{0xff}))
        wrong += " a store after the removal;";
    }
    if (strange_ > 0) wrong += " a message in another window;";
    if (world.windowEntry(0, 1, windowOf(0))->state != 0) wrong += " the entry has users left;";
    return wrong;
  }

  uint64_t direct() const { return direct_; }
  uint64_t staged() const { return staged_; }

 private:
  bool isFilled(const std::byte* bytes, std::byte value) const {
    return std::all_of(bytes, bytes + case_.bytes, [value](std::byte b) { return b == value; });
  }

  WindowCase case_;
  std::shared_ptr<void> mapper_, abort_;
  std::shared_ptr<runtime::PinnedMemory> users_;
  uint64_t strange_ = 0;
  uint64_t direct_ = 0, staged_ = 0;
};

class WindowProof : public testing::TestWithParam<WindowCase> {
 protected:
  void SetUp() override {
    if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
    discardWorlds();
  }
};

// Random and priority schedules, with the memory model of docs/proof.md.
TEST_P(WindowProof, WeakMemory) {
  WindowMessages messages(GetParam());
  forEachSeed(1000, GetParam().name, [&](uint64_t seed, Random& random) {
    Schedule schedule{.seed = static_cast<int64_t>(seed), .memory = Schedule::Memory::weak};
    schedule.depth = seed % 3 == 0 ? 0 : static_cast<int>(1 + seed % 3);
    schedule.steps = 300;
    schedule.splitsGroups = seed % 4 != 0;
    return messages.run(schedule, below(random, 60));
  });
  fmt::print("{}: {} messages into the window, {} copied\n", GetParam().name, messages.direct(),
             messages.staged());
  if (seedRange(1000).count >= 100) {
    EXPECT_GT(messages.direct(), 0u);
    EXPECT_GT(messages.staged(), 0u);
  }
}

TEST_P(WindowProof, Abort) {
  forEachSeed(60, GetParam().name, [&](uint64_t seed, Random& random) {
    discardWorlds();
    WindowMessages messages(GetParam());
    const Schedule schedule{
        .seed = static_cast<int64_t>(seed), .memory = Schedule::Memory::weak, .splitsGroups = true};
    return messages.run(schedule, below(random, 60), 1 + below(random, 200));
  });
}

INSTANTIATE_TEST_SUITE_P(All, WindowProof,
                         testing::Values(WindowCase{"Message", 1, 64, 1},
                                         WindowCase{"LongMessage", 1, 1200, 1},
                                         WindowCase{"ThreeMessages", 3, 64, 1},
                                         WindowCase{"TwoWindows", 3, 64, 2}),
                         [](const auto& tested) { return tested.param.name; });

class WindowCore : public WindowProof {};

// All schedules of one message and one removal.
TEST_P(WindowCore, EverySchedule) {
  WindowMessages messages(GetParam());
  Explorer explorer;
  bool more = true;
  while (more && explorer.runs() < 100000) {
    const std::string wrong =
        messages.run({.seed = 0, .explorer = &explorer, .memory = Schedule::Memory::sequential}, 0);
    ASSERT_EQ(wrong, "") << "run " << explorer.runs();
    more = explorer.next();
  }
  EXPECT_FALSE(more);
  fmt::print(
      "{}: all {} schedules, {} of them found to repeat others; {} into the window, {} "
      "copied\n",
      GetParam().name, explorer.runs(), explorer.repeatedRuns(), messages.direct(),
      messages.staged());
  EXPECT_GT(messages.direct(), 0u);
  EXPECT_GT(messages.staged(), 0u);
}

TEST_P(WindowCore, EveryScheduleAndLoad) {
  WindowMessages messages(GetParam());
  Explorer explorer;
  bool more = true;
  while (more && explorer.runs() < seedRange(2000).count) {
    const std::string wrong =
        messages.run({.seed = 0, .explorer = &explorer, .memory = Schedule::Memory::weak}, 0);
    ASSERT_EQ(wrong, "") << "run " << explorer.runs();
    more = explorer.next();
  }
}

INSTANTIATE_TEST_SUITE_P(All, WindowCore, testing::Values(WindowCase{"Message", 1, 64, 1}),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace unisono::protocol
