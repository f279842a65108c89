// SPDX-License-Identifier: Apache-2.0
#include "comm/call_description.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "base/system.h"
#include "diagnose/rank_view.h"

namespace unisono::comm {
namespace {

using plan::Call;

// As torch.distributed names them.
const char* torchNameOf(Call call) {
  static constexpr const char* kNames[] = {"allreduce", "allgather", "reduce_scatter", "broadcast",
                                           "reduce",    "send",      "recv",           "all_to_all",
                                           "gather",    "scatter"};
  return kNames[static_cast<size_t>(call)];
}
// As c10::ScalarType names them.
const char* torchNameOf(device::DataType type) {
  static constexpr const char* kNames[] = {"Char",   "Byte",     "Int",           "UInt32",
                                           "Long",   "UInt64",   "Half",          "Float",
                                           "Double", "BFloat16", "Float8_e4m3fn", "Float8_e5m2"};
  return kNames[static_cast<size_t>(type)];
}

bool isMessage(Call call) {
  return call == Call::send || call == Call::receive;
}

// The elements that a rank passes in and gets out, whatever its rank, as torch counts them.
struct Elements {
  uint64_t in, out;
};
Elements elementsOf(const plan::Task& task, int ranks) {
  const uint64_t all = task.count * static_cast<uint64_t>(ranks);
  switch (task.call) {
    case Call::allGather:
    case Call::gather:
      return {task.count, all};
    case Call::reduceScatter:
    case Call::scatter:
      return {all, task.count};
    case Call::allToAll:
      return {all, all};
    default:
      return {task.count, task.count};
  }
}

std::string ranksText(int ranks) {
  constexpr int kMost = 30;
  std::vector<std::string> numbers;
  for (int rank = 0; rank < std::min(ranks, kMost); rank++) numbers.push_back(std::to_string(rank));
  if (ranks > kMost) numbers.emplace_back("...");
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

}  // namespace

plugin::ProfiledCall profiledCall(const plan::CommConfig& config, const plan::Task& task) {
  plugin::ProfiledCall told;
  told.function = diagnose::nameOf(task.call);
  told.isMessage = isMessage(task.call);
  told.input = task.input;
  told.output = task.output;
  told.count = task.count;
  told.peer = task.peer;
  told.type = task.reduction.type;
  told.channels =
      told.isMessage ? plan::channelsBetween(config, config.rank, task.peer) : config.peerChannels;
  if (task.choice) {
    told.algorithm = task.choice->algorithm;
    told.protocol = task.choice->protocol;
    told.channels = task.choice->channels;
    told.threads = task.choice->threads;
  }
  return told;
}

std::string argumentsOf(const CallProfile::Subject& subject, const plan::Task& task,
                        const plugin::ProfiledCall& told) {
  const plan::CommConfig& config = subject.config;
  const Elements elements = elementsOf(task, config.ranks);
  std::string text = fmt::format(
      R"("Collective name": "{}", "In msg nelems": {}, "Out msg nelems": {}, "Group size": {}, )"
      R"("dtype": "{}", "Process Group Name": {}, "Process Group Description": {}, )"
      R"("Process Group Ranks": "{}", "Rank": {})",
      torchNameOf(task.call), elements.in, elements.out, config.ranks,
      torchNameOf(task.reduction.type), quoteJson(subject.name), quoteJson(subject.description),
      ranksText(config.ranks), config.rank);
  if (told.isMessage) {
    const bool sends = task.call == Call::send;
    text += fmt::format(R"(, "Src Rank": {}, "Dst Rank": {})", sends ? config.rank : task.peer,
                        sends ? task.peer : config.rank);
  }
  if (task.choice) {
    text +=
        fmt::format(R"(, "Algorithm": "{}", "Protocol": "{}", "Channels": {})",
                    tuning::nameOf(told.algorithm), tuning::nameOf(told.protocol), told.channels);
  }
  return text;
}

}  // namespace unisono::comm
