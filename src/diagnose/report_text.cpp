// SPDX-License-Identifier: Apache-2.0
// A report as text and as JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/system.h"
#include "diagnose/report.h"

namespace unisono::diagnose {
namespace {

// What a report shows of what grows with the number of ranks.
constexpr size_t kMaxWaitsText = 16, kMaxWaitsJson = 1024;

const char* nameOf(Verdict verdict) {
  static constexpr const char* kNames[] = {"different_calls", "not_arrived", "no_answer",
                                           "not_connected",   "outside",     "in_network",
                                           "in_kernel"};
  return kNames[static_cast<size_t>(verdict)];
}

std::string communicatorText(const RankView& self) {
  return self.name.empty() ? fmt::format("of {} ranks", self.ranks)
                           : fmt::format("{} of {} ranks", self.name, self.ranks);
}

std::string waitsText(const Report& report) {
  std::vector<std::string> edges;
  for (const auto& [waiter, peer] : report.waits) {
    if (edges.size() == kMaxWaitsText) break;
    edges.push_back(fmt::format("{} -> {}", waiter, peer));
  }
  std::string text = fmt::format("{}", fmt::join(edges, ", "));
  if (report.waits.size() > kMaxWaitsText) {
    text += fmt::format(" and {} more", report.waits.size() - kMaxWaitsText);
  }
  return text;
}

}  // namespace

std::string Report::text(const RankView& self) const {
  std::string text = fmt::format("No progress for {:.1f} s: {}\n", seconds, headline);
  auto line = [&](const char* label, const std::string& value) {
    text += fmt::format("  {:<14}{}\n", label, value);
  };
  line("call:", fmt::format("{}{} of rank {}, communicator {}",
                            isOverrun ? "one of more than 64 that are queued, before " : "",
                            describe(call), rank, communicatorText(self)));
  line("not arrived:", rankList(missing));
  line("waiting:", rankList(waiting));
  line("finished:", rankList(finished));
  if (!silent.empty()) line("no answer:", rankList(silent));
  if (!waits.empty()) line("who for whom:", waitsText(*this));
  if (!cycle.empty()) line("cycle:", fmt::format("ranks {}", fmt::join(cycle, " -> ")));
  for (const std::string& detail : details) line("", detail);
  for (const std::string& setting : settings) line("differs:", setting);
  line("next:", next);
  text.pop_back();
  return text;
}

std::string Report::json(const RankView& self) const {
  std::vector<std::string> edges;
  for (const auto& [waiter, peer] : waits) {
    if (edges.size() == kMaxWaitsJson) break;
    edges.push_back(fmt::format("[{},{}]", waiter, peer));
  }
  const auto quoted = [](const std::vector<std::string>& lines) {
    std::vector<std::string> result;
    for (const std::string& each : lines) result.push_back(quoteJson(each));
    return result;
  };
  return fmt::format(
      "{{\"unisono_hang\":{{\"verdict\":\"{}\",\"headline\":{},\"communicator\":{},\"id\":\"{:x}\","
      "\"ranks\":{},\"rank\":{},\"call\":\"{}\",\"sequence\":{},\"count\":{},\"type\":\"{}\","
      "\"reduction\":{},\"peer\":{},\"replay\":{},\"seconds\":{:.1f},\"not_arrived\":[{}],"
      "\"waiting\":[{}],"
      "\"finished\":[{}],\"no_answer\":[{}],\"waits\":[{}],\"cycle\":[{}],\"details\":[{}],"
      "\"settings\":[{}],"
      "\"next\":{}}}}}",
      nameOf(verdict), quoteJson(headline), quoteJson(self.name), self.id, self.ranks, rank,
      diagnose::nameOf(call.call), call.sequence, call.count, diagnose::nameOf(call.type),
      call.reduces() ? quoteJson(diagnose::nameOf(call.reduction)) : "null",
      call.isMessage() || call.hasRoot() ? fmt::format("{}", call.peer) : "null",
      call.isReplay() ? fmt::format("{}", call.replay) : "null", seconds, fmt::join(missing, ","),
      fmt::join(waiting, ","), fmt::join(finished, ","), fmt::join(silent, ","),
      fmt::join(edges, ","), fmt::join(cycle, ","), fmt::join(quoted(details), ","),
      fmt::join(quoted(settings), ","), quoteJson(next));
}

}  // namespace unisono::diagnose
