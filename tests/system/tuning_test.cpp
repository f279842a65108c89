// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "collective_case.h"

// The variables that change what carries a call, each seen in the launches of a communicator.
namespace unisono::system_test {
namespace {

struct Variable {
  const char* name;
  const char* value;
};

struct Effect {
  std::vector<Variable> variables;
  Call call;
  size_t bytes;
  const char* launch;  // a part of the line that the log has for the launch
};

TEST(TuningVariables, ChangeWhatCarriesACall) {
  static LaunchLog log;
  constexpr size_t kLarge = 1 << 20;
  const Variable rings{"NCCL_ALGO", "Ring"}, simple{"NCCL_PROTO", "Simple"};
  const Effect effects[] = {
      {{}, Call::allReduce, 1000, "calls with Direct LL: 1"},
      {{{"NCCL_ALGO", "^Direct,TwoShot"}}, Call::allReduce, 1000, "with Tree LL128,"},
      {{{"NCCL_ALGO", "TwoShot"}}, Call::allReduce, 1000, "with TwoShot LL128,"},
      {{{"NCCL_PROTO", "LL128"}}, Call::broadcast, 1000, "with Direct LL128,"},
      {{}, Call::allGather, kLarge, "with Direct LL128,"},
      {{{"NCCL_ALGO", "Tree"}, {"NCCL_PROTO", "LL128"}}, Call::allReduce, 1000, "with Tree LL128,"},
      {{{"NCCL_ALGO", "Ring;broadcast:Direct"}}, Call::broadcast, 1000, "with Direct LL"},
      {{rings, simple}, Call::allReduce, kLarge, "with Ring Simple, channels: 2, threads: 320"},
      {{rings, simple, {"NCCL_MAX_NCHANNELS", "1"}}, Call::allReduce, kLarge, "channels: 1,"},
      {{rings, simple, {"NCCL_MIN_NCHANNELS", "5"}}, Call::allReduce, kLarge, "channels: 5,"},
      {{rings, simple, {"NCCL_MAX_CTAS", "1"}}, Call::allReduce, kLarge, "channels: 1,"},
      {{rings, simple, {"NCCL_MIN_CTAS", "3"}}, Call::allReduce, kLarge, "channels: 3,"},
      {{rings, simple, {"NCCL_NTHREADS", "128"}}, Call::allReduce, kLarge, "threads: 192"},
      {{rings, {"NCCL_PROTO", "LL128"}, {"NCCL_LL128_NTHREADS", "160"}},
       Call::allReduce,
       kLarge,
       "with Ring LL128, channels: 2, threads: 160"},
      {{rings, simple, {"NCCL_THREAD_THRESHOLDS", "1 1 1 1 1 1000000"}},
       Call::allReduce,
       kLarge,
       "channels: 1,"},
      {{{"NCCL_TUNER_PLUGIN", UNISONO_TUNER_EXAMPLE}, {"NCCL_ALGO", "^Direct"}},
       Call::allReduce,
       256 << 10,
       "with Tree LL128,"},
      {{{"NCCL_TUNER_PLUGIN", UNISONO_TUNER_EXAMPLE}, {"NCCL_ALGO", "^Direct"}},
       Call::allReduce,
       (256 << 10) + 1,
       "with TwoShot LL128,"},
      {{{"NCCL_ALGO", "^Direct,TwoShot"}, {"NCCL_PROTO", "^LL128"}},
       Call::allReduce,
       64 << 10,
       "with Ring LL,"},
      {{}, Call::sendReceive, 1000, "calls with Direct LL: 1"},
      {{}, Call::sendReceive, kLarge, "messages through FIFOs, blocks: 2"},
      {{{"NCCL_P2P_LL_THRESHOLD", "0"}}, Call::sendReceive, 1000, "messages through FIFOs"},
      {{{"NCCL_P2P_LL_THRESHOLD", "1000"}}, Call::sendReceive, 1000, "calls with Direct LL: 1"},
      {{{"NCCL_MAX_P2P_NCHANNELS", "1"}}, Call::sendReceive, kLarge, "FIFOs, blocks: 1"},
      {{{"NCCL_MIN_P2P_NCHANNELS", "8"}}, Call::sendReceive, kLarge, "FIFOs, blocks: 4"},
  };
  for (const Effect& effect : effects) {
    std::vector<std::unique_ptr<Setting>> settings;
    std::string text;
    for (const Variable& variable : effect.variables) {
      settings.push_back(std::make_unique<Setting>(variable.name, variable.value));
      text += std::string(variable.name) + "=" + variable.value + " ";
    }
    const Ranks ranks(4);
    log.take();
    Case call;
    call.call = effect.call;
    call.type = bench::ElementType::uint8;
    call.count = effect.bytes;
    ASSERT_NO_THROW(runCase(ranks, call)) << text << call.text();
    const std::vector<std::string> lines = log.take();
    ASSERT_FALSE(lines.empty()) << text << call.text();
    EXPECT_NE(lines.front().find(effect.launch), std::string::npos)
        << text << call.text() << ": " << lines.front() << ", without " << effect.launch;
  }
}

}  // namespace
}  // namespace unisono::system_test
