// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "device/simt/host.h"
#include "runtime/host/explorer.h"
#include "world.h"

// The memory model of the weak executor, by the programs that tell memory models apart. Each lists
// every outcome that it may have: exploring all its runs must give exactly these, and so must many
// random ones. docs/proof.md compares them with PTX.
namespace unisono::protocol {
namespace {

using namespace device::host_target;
using runtime::HostGroupContext;
using runtime::host::Explorer;
using runtime::host::fence;
using runtime::host::Schedule;

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;
constexpr auto kBoth = std::memory_order_acq_rel;
constexpr auto kTotal = std::memory_order_seq_cst;

struct Variables {
  alignas(64) uint64_t x;
  alignas(64) uint64_t y;
  uint64_t result[4];  // not shared: each is written by one thread and read when all have ended
};
using Thread = std::function<void(Variables&)>;
struct Program {
  std::vector<Thread> threads;
  std::function<std::string(const Variables&)> outcome;
};
using Outcomes = std::set<std::string>;

struct LaunchArguments {
  const Program* program;
  Variables* variables;
};

void runThread(const void* raw, const HostGroupContext& context) {
  const auto& arguments = *static_cast<const LaunchArguments*>(raw);
  arguments.program->threads[static_cast<size_t>(context.block)](*arguments.variables);
}

std::string run(const Program& program, const Schedule& schedule) {
  static const runtime::Kernel kKernel{"litmus", nullptr, runThread};
  static const auto kStream = testRuntime().createStream(0);
  static const auto kMemory = testRuntime().allocate(0, sizeof(Variables));
  auto* variables = new (kMemory->address()) Variables{};
  startSchedule(schedule);
  const LaunchArguments arguments{&program, variables};
  runtime::LaunchShape shape;
  shape.blocks = static_cast<int>(program.threads.size());
  shape.argumentBytes = sizeof(arguments);
  runtime::DeviceScope scope(testRuntime(), 0);
  testRuntime().launch(kKernel, shape, &arguments, kStream.get());
  testRuntime().synchronize(kStream.get());
  return program.outcome(*variables);
}

std::string results(const Variables& variables, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; i++) text += std::to_string(variables.result[i]);
  return text;
}

Program reads(size_t count, std::vector<Thread> threads) {
  return {std::move(threads), [count](const Variables& v) { return results(v, count); }};
}

// All strings of `length` digits below `values`.
Outcomes all(size_t length, int values = 2) {
  Outcomes outcomes{""};
  for (size_t i = 0; i < length; i++) {
    Outcomes longer;
    for (const std::string& one : outcomes) {
      for (int value = 0; value < values; value++) longer.insert(one + std::to_string(value));
    }
    outcomes = std::move(longer);
  }
  return outcomes;
}
Outcomes allBut(size_t length, const std::string& forbidden) {
  Outcomes outcomes = all(length);
  outcomes.erase(forbidden);
  return outcomes;
}

void expectOutcomes(const Program& program, const Outcomes& allowed) {
  if (!runsFibers()) GTEST_SKIP() << "threads have the machine's memory";
  Explorer explorer;
  Outcomes seen;
  do {
    seen.insert(run(program, {.seed = 0, .explorer = &explorer, .memory = Schedule::Memory::weak}));
  } while (explorer.next());
  EXPECT_EQ(seen, allowed) << "of " << explorer.runs() << " runs, which are all";
  Outcomes random;
  for (int64_t seed = 0; seed < 2000 && random != allowed; seed++) {
    random.insert(run(program, {.seed = seed, .memory = Schedule::Memory::weak}));
  }
  EXPECT_EQ(random, allowed) << "of 2000 random runs";
}

// All outcomes of all schedules when every load returns the newest store.
Outcomes sequentialOutcomes(const Program& program, uint64_t& runs) {
  Explorer explorer;
  Outcomes seen;
  do {
    seen.insert(
        run(program, {.seed = 0, .explorer = &explorer, .memory = Schedule::Memory::sequential}));
  } while (explorer.next());
  runs = explorer.runs() - explorer.repeatedRuns();
  return seen;
}

void expectRace(const Program& program, bool races) {
  if (!runsFibers()) GTEST_SKIP() << "threads have the machine's memory";
  Explorer explorer;
  std::string report;
  do {
    try {
      run(program, {.seed = 0, .explorer = &explorer, .memory = Schedule::Memory::weak});
    } catch (const std::exception& error) {
      report = error.what();
    }
  } while (explorer.next());
  EXPECT_EQ(report.find("Data race") != std::string::npos, races) << report;
}

// Message passing: data in x, the flag in y.
Program messagePassing(std::memory_order store, std::memory_order load) {
  return reads(2, {[=](Variables& v) {
                     runtime::host::store(&v.x, uint64_t{1}, kRelaxed);
                     runtime::host::store(&v.y, uint64_t{1}, store);
                   },
                   [=](Variables& v) {
                     v.result[0] = runtime::host::load(&v.y, load);
                     v.result[1] = runtime::host::load(&v.x, kRelaxed);
                   }});
}
Program messagePassingWithFences(std::memory_order before, std::memory_order after) {
  return reads(2, {[=](Variables& v) {
                     storeRelaxed(&v.x, uint64_t{1});
                     fence(before);
                     storeRelaxed(&v.y, uint64_t{1});
                   },
                   [=](Variables& v) {
                     v.result[0] = loadRelaxed(&v.y);
                     fence(after);
                     v.result[1] = loadRelaxed(&v.x);
                   }});
}

TEST(Litmus, MessagePassing) {
  expectOutcomes(messagePassing(kRelease, kAcquire), allBut(2, "10"));
  expectOutcomes(messagePassing(kRelease, kRelaxed), all(2));
  expectOutcomes(messagePassing(kRelaxed, kAcquire), all(2));
  expectOutcomes(messagePassing(kRelaxed, kRelaxed), all(2));
}

TEST(Litmus, MessagePassingWithFences) {
  expectOutcomes(messagePassingWithFences(kRelease, kAcquire), allBut(2, "10"));
  expectOutcomes(messagePassingWithFences(kBoth, kBoth), allBut(2, "10"));
  expectOutcomes(messagePassingWithFences(kRelease, kRelease), all(2));
  expectOutcomes(messagePassingWithFences(kAcquire, kAcquire), all(2));
}

// As SimpleProtocol waits: relaxed polls, then one load that acquires.
TEST(Litmus, AnAcquireAfterARelaxedPoll) {
  expectOutcomes(reads(2, {[](Variables& v) {
                             storeRelaxed(&v.x, uint64_t{1});
                             storeRelease(&v.y, uint64_t{1});
                           },
                           [](Variables& v) {
                             v.result[0] = loadRelaxed(&v.y);
                             loadAcquire(&v.y);
                             v.result[1] = loadRelaxed(&v.x);
                           }}),
                 allBut(2, "10"));
}

// Store buffering: each thread stores, then looks for the other's store.
Program storeBuffering(std::memory_order store, std::memory_order load, std::memory_order between) {
  const auto thread = [=](uint64_t Variables::*mine, uint64_t Variables::*theirs, size_t result) {
    return [=](Variables& v) {
      runtime::host::store(&(v.*mine), uint64_t{1}, store);
      if (between != kRelaxed) fence(between);
      v.result[result] = runtime::host::load(&(v.*theirs), load);
    };
  };
  return reads(2,
               {thread(&Variables::x, &Variables::y, 0), thread(&Variables::y, &Variables::x, 1)});
}

TEST(Litmus, StoreBuffering) {
  expectOutcomes(storeBuffering(kRelaxed, kRelaxed, kRelaxed), all(2));
  expectOutcomes(storeBuffering(kRelease, kAcquire, kRelaxed), all(2));
  expectOutcomes(storeBuffering(kRelaxed, kRelaxed, kBoth), all(2));
  expectOutcomes(storeBuffering(kRelaxed, kRelaxed, kTotal), allBut(2, "00"));
}

// Independent reads of independent writes: whether two readers agree on the order of two stores.
Program independentReads(std::memory_order store, std::memory_order load,
                         std::memory_order between) {
  const auto writer = [=](uint64_t Variables::*variable) {
    return [=](Variables& v) { runtime::host::store(&(v.*variable), uint64_t{1}, store); };
  };
  const auto reader = [=](uint64_t Variables::*first, uint64_t Variables::*second, size_t result) {
    return [=](Variables& v) {
      v.result[result] = runtime::host::load(&(v.*first), load);
      if (between != kRelaxed) fence(between);
      v.result[result + 1] = runtime::host::load(&(v.*second), load);
    };
  };
  return reads(
      4, {writer(&Variables::x), writer(&Variables::y), reader(&Variables::x, &Variables::y, 0),
          reader(&Variables::y, &Variables::x, 2)});
}

TEST(Litmus, IndependentReadsOfIndependentWrites) {
  expectOutcomes(independentReads(kRelaxed, kRelaxed, kRelaxed), all(4));
  expectOutcomes(independentReads(kRelease, kAcquire, kRelaxed), all(4));
  expectOutcomes(independentReads(kRelaxed, kRelaxed, kTotal), allBut(4, "1010"));
}

// Coherence: two reads of one location never go back, under any order.
TEST(Litmus, CoherenceOfTwoReads) {
  for (const std::memory_order order : {kRelaxed, kAcquire}) {
    expectOutcomes(reads(2, {[](Variables& v) {
                               storeRelaxed(&v.x, uint64_t{1});
                               storeRelaxed(&v.x, uint64_t{2});
                             },
                             [=](Variables& v) {
                               v.result[0] = runtime::host::load(&v.x, order);
                               v.result[1] = runtime::host::load(&v.x, order);
                             }}),
                   {"00", "01", "02", "11", "12", "22"});
  }
}

// Nor does a read return less than what its own thread wrote or read.
TEST(Litmus, CoherenceOfWriteAndRead) {
  expectOutcomes(reads(1, {[](Variables& v) { storeRelaxed(&v.x, uint64_t{1}); },
                           [](Variables& v) {
                             storeRelaxed(&v.x, uint64_t{2});
                             v.result[0] = loadRelaxed(&v.x);
                           }}),
                 {"1", "2"});
}

// Causality is passed on: what the middle thread has seen, the last one sees.
TEST(Litmus, WriteToReadCausality) {
  const auto program = [](std::memory_order store, std::memory_order load) {
    return reads(3, {[](Variables& v) { storeRelaxed(&v.x, uint64_t{1}); },
                     [=](Variables& v) {
                       v.result[0] = loadRelaxed(&v.x);
                       runtime::host::store(&v.y, uint64_t{1}, store);
                     },
                     [=](Variables& v) {
                       v.result[1] = runtime::host::load(&v.y, load);
                       v.result[2] = loadRelaxed(&v.x);
                     }});
  };
  expectOutcomes(program(kRelease, kAcquire), allBut(3, "110"));
  expectOutcomes(program(kRelaxed, kAcquire), all(3));
  expectOutcomes(program(kRelease, kRelaxed), all(3));
}

// Read-modify-writes read the newest store, and pass on the release that they read.
TEST(Litmus, ReadModifyWrite) {
  expectOutcomes(reads(2, {[](Variables& v) {
                             v.result[0] = runtime::host::fetchAdd(&v.x, uint64_t{1}, kRelaxed);
                           },
                           [](Variables& v) {
                             v.result[1] = runtime::host::exchange(&v.x, uint64_t{1}, kRelaxed);
                           }}),
                 {"01", "10"});
  expectOutcomes(
      reads(2, {[](Variables& v) {
                  storeRelaxed(&v.x, uint64_t{1});
                  storeRelease(&v.y, uint64_t{1});
                },
                [](Variables& v) { runtime::host::fetchAdd(&v.y, uint64_t{1}, kRelaxed); },
                [](Variables& v) {
                  v.result[0] = loadAcquire(&v.y);
                  v.result[1] = loadRelaxed(&v.x);
                }}),
      // The middle thread may come first: 1 is its own, and orders nothing.
      {"00", "01", "10", "11", "21"});
}

// What PTX allows and this executor never shows, for a store that was not made cannot be read and
// stores to a location are ordered as they are made (docs/proof.md).
TEST(Litmus, StricterThanPtx) {
  const auto loadBuffering = [](uint64_t Variables::*from, uint64_t Variables::*to, size_t result) {
    return [=](Variables& v) {
      v.result[result] = loadRelaxed(&(v.*from));
      storeRelaxed(&(v.*to), uint64_t{1});
    };
  };
  expectOutcomes(reads(2, {loadBuffering(&Variables::x, &Variables::y, 0),
                           loadBuffering(&Variables::y, &Variables::x, 1)}),
                 allBut(2, "11"));
  const auto twoStores = [](uint64_t Variables::*first, uint64_t Variables::*second) {
    return [=](Variables& v) {
      storeRelaxed(&(v.*first), uint64_t{1});
      storeRelaxed(&(v.*second), uint64_t{2});
    };
  };
  expectOutcomes(
      {{twoStores(&Variables::x, &Variables::y), twoStores(&Variables::y, &Variables::x)},
       [](const Variables& v) { return fmt::format("{}{}", v.x, v.y); }},
      {"12", "21", "22"});
}

TEST(Exploration, SequentialConsistency) {
  if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
  uint64_t runs = 0;
  EXPECT_EQ(sequentialOutcomes(messagePassing(kRelaxed, kRelaxed), runs), allBut(2, "10"));
  EXPECT_EQ(sequentialOutcomes(storeBuffering(kRelaxed, kRelaxed, kRelaxed), runs),
            allBut(2, "00"));
  EXPECT_EQ(runs, 3u);
  EXPECT_EQ(sequentialOutcomes(independentReads(kRelaxed, kRelaxed, kRelaxed), runs),
            allBut(4, "1010"));
}

// Every order of steps that depend on each other, and one order of such as do not.
TEST(Exploration, EveryOrderOnce) {
  if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
  const auto takeTicket = [](size_t result) {
    return [=](Variables& v) {
      v.result[result] = runtime::host::fetchAdd(&v.x, uint64_t{1}, kRelaxed);
    };
  };
  uint64_t runs = 0;
  EXPECT_EQ(sequentialOutcomes(
                reads(4, {takeTicket(0), takeTicket(1), takeTicket(2), takeTicket(3)}), runs)
                .size(),
            24u);
  EXPECT_EQ(runs, 24u);
  const auto storeTo = [](size_t result) {
    return [=](Variables& v) { storeRelaxed(&v.result[result], uint64_t{1}); };
  };
  sequentialOutcomes(reads(4, {storeTo(0), storeTo(1), storeTo(2), storeTo(3)}), runs);
  EXPECT_EQ(runs, 1u);
}

// Plain accesses: ordered by release and acquire or a race.
TEST(Litmus, RacesOfPlainAccesses) {
  const auto program = [](std::memory_order store, std::memory_order load) {
    return reads(0, {[=](Variables& v) {
                       noteWrite(&v.x, sizeof(v.x));
                       v.x = 1;
                       runtime::host::store(&v.y, uint64_t{1}, store);
                     },
                     [=](Variables& v) {
                       if (runtime::host::load(&v.y, load) == 0) return;
                       noteRead(&v.x, sizeof(v.x));
                       v.result[0] = v.x;
                     }});
  };
  expectRace(program(kRelease, kAcquire), false);
  expectRace(program(kRelaxed, kAcquire), true);
  expectRace(program(kRelease, kRelaxed), true);
}

TEST(Litmus, RacesOfWritesAfterReads) {
  // As a slot that is written again: the reader must have released it.
  const auto program = [](std::memory_order store, std::memory_order load) {
    return reads(0, {[=](Variables& v) {
                       noteRead(&v.x, sizeof(v.x));
                       v.result[0] = v.x;
                       runtime::host::store(&v.y, uint64_t{1}, store);
                     },
                     [=](Variables& v) {
                       if (runtime::host::load(&v.y, load) == 0) return;
                       noteWrite(&v.x, sizeof(v.x));
                       v.x = 1;
                     }});
  };
  expectRace(program(kRelease, kAcquire), false);
  expectRace(program(kRelaxed, kAcquire), true);
  expectRace(program(kRelease, kRelaxed), true);
}

TEST(Litmus, RacesAreFoundByTheByte) {
  const auto program = [](size_t second) {
    const auto writer = [](size_t begin) {
      return [=](Variables& v) { noteWrite(reinterpret_cast<std::byte*>(&v.x) + begin, 4); };
    };
    return reads(0, {writer(0), writer(second)});
  };
  expectRace(program(4), false);
  expectRace(program(3), true);
}

TEST(Litmus, RacesOfPlainAndAtomicAccesses) {
  expectRace(reads(0, {[](Variables& v) { storeRelaxed(&v.x, uint64_t{1}); },
                       [](Variables& v) { noteRead(&v.x, sizeof(v.x)); }}),
             true);
  expectRace(reads(0, {[](Variables& v) { storeRelaxed(&v.x, uint64_t{1}); },
                       [](Variables& v) { loadRelaxed(&v.x); }}),
             false);
}

// The barriers of a group order what its roles do, as bar.sync does.
TEST(Litmus, BarriersOfAGroup) {
  if (!runsFibers()) GTEST_SKIP() << "threads have the machine's memory";
  static uint64_t shared;
  const auto run = [](void (*function)(const void*, const HostGroupContext&)) {
    std::string report;
    for (int64_t seed = 0; seed < 50 && report.empty(); seed++) {
      startSchedule({.seed = seed, .memory = Schedule::Memory::weak, .splitsGroups = true});
      const runtime::Kernel kernel{"barriers", nullptr, function};
      const auto stream = testRuntime().createStream(0);
      runtime::DeviceScope scope(testRuntime(), 0);
      testRuntime().launch(kernel, {}, nullptr, stream.get());
      try {
        testRuntime().synchronize(stream.get());
      } catch (const std::exception& error) {
        report = error.what();
      }
    }
    return report;
  };
  const std::string ordered = run([](const void*, const HostGroupContext& context) {
    ThreadGroup group(context);
    for (int round = 0; round < 3; round++) {
      if (group.isWaiter()) noteWrite(&shared, sizeof(shared));
      group.syncReady();
      if (group.isWorker()) noteRead(&shared, sizeof(shared));
      group.syncDone();
      if (group.isPoster()) noteRead(&shared, sizeof(shared));
      group.syncAll();
    }
  });
  EXPECT_EQ(ordered, "");
  const std::string unordered = run([](const void*, const HostGroupContext& context) {
    ThreadGroup group(context);
    if (group.isWaiter()) noteWrite(&shared, sizeof(shared));
    group.syncDone();  // not the waiter's
    if (group.isWorker()) noteRead(&shared, sizeof(shared));
  });
  EXPECT_NE(unordered.find("Data race"), std::string::npos) << unordered;
  const std::string stuck = run([](const void*, const HostGroupContext& context) {
    ThreadGroup group(context);
    if (group.isWorker()) group.syncAll();
  });
  EXPECT_NE(stuck.find("the other roles of its group"), std::string::npos) << stuck;
}

}  // namespace
}  // namespace unisono::protocol
