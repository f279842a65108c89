// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "plan/plan.h"

namespace unisono::plan {
namespace {

struct Describe {
  std::vector<std::string>& lines;

  void operator()(const CollectiveLaunch& launch) const {
    for (int w = 0; w < launch.arguments.works; w++) {
      const device::CollectiveWork& work = launch.arguments.work[w];
      if (work.operation == device::Operation::local) {
        lines.push_back(fmt::format("{} elements on this rank alone", work.count));
        continue;
      }
      lines.push_back(fmt::format("{} of {} elements with {} {}, channels: {}, threads: {}",
                                  tuning::nameOf(work.operation), work.count,
                                  tuning::nameOf(work.algorithm), tuning::nameOf(work.protocol),
                                  work.channels, launch.threads));
    }
  }
  void operator()(const BarrierLaunch&) const { lines.emplace_back("a barrier"); }
  void operator()(const CopyLaunch& launch) const {
    uint64_t bytes = 0;
    for (const Copy& copy : launch.copies) bytes += copy.bytes;
    lines.push_back(fmt::format("{} bytes by copy engines", bytes));
  }
  void operator()(const SendReceiveLaunch& launch) const {
    lines.push_back(fmt::format("messages through FIFOs, blocks: {}", launch.blocks));
  }
  void operator()(const DirectLaunch& launch) const {
    lines.push_back(fmt::format("calls with Direct LL: {}, blocks: {}, threads: {}",
                                launch.arguments.works, launch.blocks, launch.threads));
  }
  void operator()(const WideLaunch& launch) const {
    const bool twoShot = launch.arguments.twoShot;
    lines.push_back(fmt::format("a call with {} LL128, blocks: {}, threads: {}",
                                twoShot ? "TwoShot" : "Direct", launch.blocks, launch.threads));
  }
  void operator()(const MessagesLaunch& launch) const {
    const device::MessagesArguments& arguments = *launch.arguments;
    lines.push_back(
        fmt::format("messages with Direct LL and LL128: {}, rounds of messages through FIFOs: {}, "
                    "blocks: {}",
                    arguments.messages, arguments.works, launch.blocks()));
  }
  void operator()(const WideMessagesLaunch& launch) const {
    lines.push_back(fmt::format("messages with Direct LL128: {}, blocks: {}, threads: {}",
                                launch.arguments.messages, launch.arguments.wide.launchBlocks(),
                                launch.arguments.threads()));
  }
};

}  // namespace

std::vector<std::string> describe(const Launch& launch) {
  std::vector<std::string> lines;
  std::visit(Describe{lines}, launch);
  return lines;
}

std::vector<std::string> describe(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Launch& launch : plan.launches) std::visit(Describe{lines}, launch);
  return lines;
}

}  // namespace unisono::plan
