// SPDX-License-Identifier: Apache-2.0
#include "tuning/choice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <span>
#include <string>

#include "base/error.h"

namespace unisono::tuning {

namespace {

constexpr std::string_view kCollectives[] = {"broadcast", "reduce", "allgather", "reducescatter",
                                             "allreduce"};
constexpr std::string_view kAllReduce = "allreduce";

constexpr std::string_view kDirect = "direct", kRing = "ring";
// The names from the third on are NCCL's, which are not implemented.
constexpr std::string_view kAlgorithmNames[] = {
    kRing, kDirect, "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"};
constexpr std::string_view kProtocolNames[] = {"ll", "ll128", "simple"};

using Names = std::span<const std::string_view>;

std::string lowerCase(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

// Splits off the part of `text` in front of the next `separator`.
std::string_view takePart(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(text.size(), part.size() + 1));
  return part;
}

void checkName(std::string_view variable, std::string_view value, std::string_view kind,
               std::string_view name, Names names) {
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  throw invalidUsage("{}={} names \"{}\", which is not {}", variable, value, name, kind)
      .remedy(fmt::format("Use {}, separated by commas, or a leading ^ to exclude some",
                          fmt::join(names, ", ")));
}

// The subset of `names` that `value` allows for all-reduce.
std::set<std::string_view> parseLists(std::string_view variable, std::string_view value,
                                      std::string_view kind, Names names) {
  std::set<std::string_view> allowed(names.begin(), names.end());
  std::string_view rest = value;
  for (bool first = true; !rest.empty(); first = false) {
    std::string_view list = takePart(rest, ';');
    if (list.empty()) continue;
    bool forAllReduce = true;
    if (const size_t colon = list.find(':'); colon != std::string_view::npos) {
      const std::string collective = lowerCase(list.substr(0, colon));
      checkName(variable, value, "a collective", collective, kCollectives);
      forAllReduce = collective == kAllReduce;
      list.remove_prefix(colon + 1);
    } else if (!first) {
      throw invalidUsage("{}={} has a list without a collective after the first one", variable,
                         value)
          .remedy("Put the name of a collective and a colon in front of each later list");
    }
    const bool exclude = list.starts_with('^');
    if (exclude) list.remove_prefix(1);
    std::set<std::string_view> chosen;
    if (exclude) chosen.insert(names.begin(), names.end());
    while (!list.empty()) {
      const std::string name = lowerCase(takePart(list, ','));
      if (name.empty()) continue;
      checkName(variable, value, kind, name, names);
      const std::string_view known = *std::find(names.begin(), names.end(), name);
      if (exclude) {
        chosen.erase(known);
      } else {
        chosen.insert(known);
      }
    }
    if (forAllReduce) allowed = std::move(chosen);
  }
  return allowed;
}

}  // namespace

AllowedAlgorithms parseAlgorithms(std::string_view text) {
  const auto names = parseLists("NCCL_ALGO", text, "an algorithm", kAlgorithmNames);
  AllowedAlgorithms result;
  result.allowed[static_cast<int>(Algorithm::ring)] = names.contains(kRing);
  result.allowed[static_cast<int>(Algorithm::oneShot)] = names.contains(kDirect);
  return result;
}

void checkProtocols(std::string_view text) {
  parseLists("NCCL_PROTO", text, "a protocol", kProtocolNames);
}

Algorithm chooseAllReduce(const TuningInput& tuningInput, size_t bytes) {
  const bool fits = bytes <= tuningInput.oneShotMaxBytes;
  if (fits && tuningInput.allowed[Algorithm::oneShot]) return Algorithm::oneShot;
  return Algorithm::ring;
}

int chooseChannels(const TuningInput& tuningInput, size_t bytes) {
  const size_t useful = bytes / tuningInput.minBytesPerChannel;
  return static_cast<int>(std::clamp<size_t>(useful, 1, static_cast<size_t>(tuningInput.channels)));
}

}  // namespace unisono::tuning
