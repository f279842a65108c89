// SPDX-License-Identifier: Apache-2.0
// Built for ThreadSanitizer alone. Runs one game between two tasks of the default executor and
// exits with ThreadSanitizer's status, so that it can be seen whether a race of two fibers of one
// thread is reported:
//   runtime_host_race_test published   data, then a flag with release and acquire: no race
//   runtime_host_race_test relaxed     the same with a relaxed flag: a race
//   runtime_host_race_test plain       no flag at all: a race
//   runtime_host_race_test launches    two devices' launches, one after the other in time: a race.
//                                      A task that gets the stack of one that ended comes after
//                                      it, so this goes through schedules: in some both live at
//                                      once
#include <atomic>
#include <cstdio>
#include <string>

#include "runtime_host_testing.h"

namespace unisono::runtime::host {
namespace {

struct Game {
  uint64_t* data;
  uint64_t* flag;
  std::memory_order store;
  std::memory_order load;
};

void play(const void* raw, const HostGroupContext& context) {
  const auto& game = *static_cast<const Game*>(raw);
  std::atomic_ref<uint64_t> flag(*game.flag);
  if (context.group == 0) {
    // The reader polls for a while first: the switches between them order nothing.
    for (int i = 0; i < 3; i++) poll({.what = "turn"});
    progress();
    *game.data = 7;
    flag.store(1, game.store);
  } else {
    while (flag.load(game.load) == 0) poll({.what = "flag"});
    progress();
    if (*game.data != 7) std::puts("wrong data");
  }
}

void writeData(const void* raw, const HostGroupContext&) {
  *static_cast<const Game*>(raw)->data += 1;
}

int run(const std::string& mode) {
  HostRuntime runtime(hostSettings("fibers", mode == "launches" ? 0 : -1));
  auto memory = runtime.allocate(0, 1024);
  auto* words = static_cast<uint64_t*>(memory->address());
  Game game{words, words + 64, std::memory_order_release, std::memory_order_acquire};
  auto first = runtime.createStream(0);
  auto second = runtime.createStream(1);
  if (mode == "published" || mode == "relaxed") {
    if (mode == "relaxed") game.store = game.load = std::memory_order_relaxed;
    launch(runtime, first.get(), "game", play, game, 1, 2);
  } else if (mode == "plain") {
    launch(runtime, first.get(), "write", writeData, game, 1, 2);
  } else if (mode == "launches") {
    for (int64_t seed = 0; seed < 20; seed++) {
      runtime.setScheduleSeed(seed);
      launch(runtime, first.get(), "write", writeData, game);
      launch(runtime, second.get(), "write", writeData, game);
      runtime.synchronize(first.get());
      runtime.synchronize(second.get());
    }
  } else {
    std::printf("unknown mode %s\n", mode.c_str());
    return 2;
  }
  runtime.synchronize(first.get());
  runtime.synchronize(second.get());
  return 0;
}

}  // namespace
}  // namespace unisono::runtime::host

int main(int argc, char** argv) {
  return unisono::runtime::host::run(argc > 1 ? argv[1] : "");
}
