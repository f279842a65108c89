#include "tuning/choice.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "base/error.h"

namespace unisono::tuning {

// Names that settings made for NCCL may hold. The calls that they would carry take the ring.
constexpr std::string_view kKnownElsewhere[] = {"tree", "collnetdirect", "collnetchain",
                                                "nvls", "nvlstree",      "pat"};

AllowedAlgorithms parseAlgorithms(std::string_view text) {
  AllowedAlgorithms result;
  if (text.empty()) return result;
  const bool exclude = text.starts_with('^');
  if (exclude) text.remove_prefix(1);
  std::fill(std::begin(result.allowed), std::end(result.allowed), exclude);
  while (true) {
    const size_t comma = text.find(',');
    std::string name(text.substr(0, comma));
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (name == "ring") {
      result.allowed[static_cast<int>(Algorithm::ring)] = !exclude;
    } else if (name == "direct") {
      result.allowed[static_cast<int>(Algorithm::oneShot)] = !exclude;
    } else if (std::find(std::begin(kKnownElsewhere), std::end(kKnownElsewhere), name) ==
               std::end(kKnownElsewhere)) {
      throw invalidArgument("NCCL_ALGO names \"{}\", which is not an algorithm", name)
          .remedy("Use ring and direct, separated by commas, or ^ and those to leave out");
    }
    if (comma == std::string_view::npos) return result;
    text.remove_prefix(comma + 1);
  }
}

Algorithm chooseAllReduce(const Situation& situation, size_t bytes) {
  const bool fits = bytes <= situation.oneShotMaxBytes;
  if (fits && situation.allowed[Algorithm::oneShot]) return Algorithm::oneShot;
  return Algorithm::ring;
}

int chooseChannels(const Situation& situation, size_t bytes) {
  const size_t useful = bytes / situation.minBytesPerChannel;
  return static_cast<int>(std::clamp<size_t>(useful, 1, static_cast<size_t>(situation.channels)));
}

}  // namespace unisono::tuning
