// SPDX-License-Identifier: Apache-2.0
#include "diagnose/remote_views.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/system.h"
#include "diagnose/journal.h"
#include "diagnose/watchdog.h"

namespace unisono::diagnose {
namespace {

constexpr size_t kLongestString = 4096, kMostSettings = 256;

// Appends numbers and strings to a message.
class Writer {
 public:
  explicit Writer(std::vector<std::byte>& message) : message_(message) {}

  template <typename T>
  void operator()(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    const auto bytes = std::as_bytes(std::span(&value, 1));
    message_.insert(message_.end(), bytes.begin(), bytes.end());
  }
  void operator()(bool value) { (*this)(static_cast<uint8_t>(value ? 1 : 0)); }
  void operator()(const std::string& text) {
    const size_t length = std::min(text.size(), kLongestString);
    (*this)(static_cast<uint32_t>(length));
    const auto bytes = std::as_bytes(std::span(text.data(), length));
    message_.insert(message_.end(), bytes.begin(), bytes.end());
  }
  template <typename T, typename Visit>
  void list(const std::vector<T>& values, size_t most, Visit visit) {
    const size_t count = std::min(values.size(), most);
    (*this)(static_cast<uint32_t>(count));
    for (size_t i = 0; i < count; i++) visit(*this, values[i]);
  }

 private:
  std::vector<std::byte>& message_;
};

// Takes them out again. Whatever it is given, it reads no more than there is.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> message) : rest_(message) {}

  bool isValid() const { return valid_; }
  bool isAtEnd() const { return rest_.empty(); }

  template <typename T>
  void operator()(T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    if (!has(sizeof(T))) return;
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
  }
  void operator()(bool& value) {
    uint8_t byte = 0;
    (*this)(byte);
    value = byte != 0;
  }
  void operator()(std::string& text) {
    uint32_t length = 0;
    (*this)(length);
    if (length > kLongestString || !has(length)) return fail();
    text.assign(reinterpret_cast<const char*>(rest_.data()), length);
    rest_ = rest_.subspan(length);
  }
  template <typename T, typename Visit>
  void list(std::vector<T>& values, size_t most, Visit visit) {
    uint32_t count = 0;
    (*this)(count);
    if (count > most) return fail();
    for (uint32_t i = 0; valid_ && i < count; i++) visit(*this, values.emplace_back());
  }

 private:
  bool has(size_t bytes) {
    if (rest_.size() < bytes) fail();
    return valid_;
  }
  void fail() { valid_ = false; }

  std::span<const std::byte> rest_;
  bool valid_ = true;
};

// The fields of each, for both directions.
template <typename Archive, typename C>
void visitCall(Archive& archive, C& call) {
  archive(call.index);
  archive(call.sequence);
  archive(call.call);
  archive(call.type);
  archive(call.reduction);
  archive(call.peer);
  archive(call.count);
  archive(call.entered);
  archive(call.launch);
  archive(call.replay);
}

template <typename Archive, typename L>
void visitLink(Archive& archive, L& link) {
  archive(link.peer);
  archive(link.channel);
  archive(link.sends);
  archive(link.tail);
  archive(link.head);
  archive(link.network);
  archive(link.bytesInFlight);
  archive(link.lines);
  archive(link.port);
  archive(link.kind);
  archive(link.all);
  archive(link.waits);
}

template <typename Archive, typename Q>
void visitQuietPoint(Archive& archive, Q& point) {
  archive(point.collectives);
  archive(point.hash);
}

template <typename Archive, typename F>
void visitFlow(Archive& archive, F& flow) {
  archive(flow.peer);
  archive(flow.sends);
  archive(flow.entered);
  archive(flow.replayed);
  archive.list(flow.quiet, kFlowPoints, [](auto& to, auto& sum) {
    to(sum.count);
    to(sum.bytes);
    to(sum.hash);
  });
}

template <typename Archive, typename View>
void visitView(Archive& archive, View& view) {
  archive(view.isKnown);
  archive(view.rank);
  archive(view.hasLeft);
  archive(view.ranks);
  archive(view.device);
  archive(view.slots);
  archive(view.id);
  archive(view.name);
  archive(view.network);
  archive(view.host);
  archive(view.address);
  archive(view.place);
  archive(view.pid);
  archive(view.processState);
  archive(view.silentFor);
  archive(view.entered);
  archive(view.launched);
  archive(view.started);
  archive(view.finished);
  archive(view.changed);
  archive(view.captures);
  archive(view.replayed);
  for (auto& count : view.counts) archive(count);
  archive(view.error);
  archive(view.isAborted);
  archive(view.isFinalized);
  archive(view.reported);
  archive(view.elsewhere);
  archive.list(view.calls, kCalls, [](auto& to, auto& call) { visitCall(to, call); });
  archive.list(view.links, kLinks, [](auto& to, auto& link) { visitLink(to, link); });
  archive.list(view.quietPoints, kQuietPoints,
               [](auto& to, auto& point) { visitQuietPoint(to, point); });
  archive.list(view.captured, kCapturedKinds, [](auto& to, auto& call) { visitCall(to, call); });
  archive.list(view.flows, kFlows, [](auto& to, auto& flow) { visitFlow(to, flow); });
}

using Setting = std::pair<std::string, std::string>;

void write(Writer& writer, const RankView& view) {
  visitView(writer, view);
  writer(view.replay.has_value());
  if (view.replay) visitCall(writer, *view.replay);
  const std::vector<Setting> settings(view.settings.begin(), view.settings.end());
  writer.list(settings, kMostSettings, [](auto& to, const Setting& setting) {
    to(setting.first);
    to(setting.second);
  });
}

RankView readOne(Reader& reader) {
  RankView view;
  visitView(reader, view);
  bool hasReplay = false;
  reader(hasReplay);
  if (hasReplay) visitCall(reader, view.replay.emplace());
  std::vector<Setting> settings;
  reader.list(settings, kMostSettings, [](auto& from, Setting& setting) {
    from(setting.first);
    from(setting.second);
  });
  view.settings.insert(settings.begin(), settings.end());
  return view;
}

bool isPossible(const RankView& view) {
  if (view.ranks < 1 || view.ranks > kMaxRanks || view.rank < 0 || view.rank >= view.ranks) {
    return view.hasLeft;
  }
  const auto isCall = [&](const Call& call) { return isPossible(call, view.ranks); };
  const auto hasPeer = [&](const auto& of) { return of.peer >= 0 && of.peer < view.ranks; };
  const auto isLink = [&](const Link& link) {
    return hasPeer(link) && link.kind <= Link::Kind::heads;
  };
  return std::ranges::all_of(view.calls, isCall) && std::ranges::all_of(view.captured, isCall) &&
         (!view.replay || isCall(*view.replay)) && std::ranges::all_of(view.links, isLink) &&
         std::ranges::all_of(view.flows, hasPeer);
}

// What clients of RAS are told of a rank.
void keepForRas(RankView& view) {
  view.links.clear();
  view.flows.clear();
  const Call* current = view.current();
  const uint64_t index = current == nullptr ? 0 : current->index;
  const uint64_t last = view.lastCollective();
  std::erase_if(view.calls, [&](const Call& call) {
    return call.index != index && call.index != view.entered &&
           (call.isMessage() || call.sequence != last);
  });
}

}  // namespace

std::vector<std::byte> encodeAnswer(const Question& question, std::span<const RankView> views,
                                    uint64_t first, size_t longest) {
  std::vector<std::byte> message;
  Writer head(message);
  head(question.kind);
  head(question.number);
  head(steadyNow());
  const size_t place = message.size();
  head(uint64_t{0});  // the next one
  head(uint32_t{0});  // how many there are
  uint32_t count = 0;
  uint64_t next = 0;
  std::vector<std::byte> one;
  for (const RankView& view : views) {
    one.clear();
    Writer writer(one);
    write(writer, view);
    if (message.size() + one.size() > longest) {
      next =
          question.kind == Question::Kind::ranks ? static_cast<uint64_t>(view.rank) : first + count;
      break;
    }
    message.insert(message.end(), one.begin(), one.end());
    count++;
  }
  std::memcpy(message.data() + place, &next, sizeof(next));
  std::memcpy(message.data() + place + sizeof(next), &count, sizeof(count));
  return message;
}

std::optional<Answer> decodeAnswer(std::span<const std::byte> message, int64_t now) {
  Answer answer;
  int64_t then = 0;
  uint32_t count = 0;
  Reader reader(message);
  reader(answer.kind);
  reader(answer.number);
  reader(then);
  reader(answer.next);
  reader(count);
  for (uint32_t i = 0; reader.isValid() && i < count; i++) {
    RankView view = readOne(reader);
    if (view.hasLeft) {
      view.calls.clear();
      view.captured.clear();
      view.links.clear();
      view.flows.clear();
      view.replay.reset();
    }
    if (!reader.isValid() || !isPossible(view)) return std::nullopt;
    // Unsigned, as a time may be anything.
    const auto shift = [&](int64_t& time) {
      time = static_cast<int64_t>(static_cast<uint64_t>(time) - static_cast<uint64_t>(then) +
                                  static_cast<uint64_t>(now));
    };
    shift(view.changed);
    for (Call& call : view.calls) shift(call.entered);
    if (view.replay) shift(view.replay->entered);
    answer.views.push_back(std::move(view));
  }
  if (!reader.isValid() || !reader.isAtEnd()) return std::nullopt;
  return answer;
}

std::vector<std::byte> answerQuestion(std::span<const std::byte> message, const PeerTables& peers,
                                      int self, int asker) {
  Question question;
  if (message.size() != sizeof(question)) return {};
  std::memcpy(&question, message.data(), sizeof(question));
  const int64_t now = steadyNow();
  std::vector<RankView> views;
  switch (question.kind) {
    case Question::Kind::calls: {
      RankView view = peers.view(self, now);
      std::erase_if(view.calls, [&](const Call& call) {
        if (!call.isMessage()) return call.sequence < question.first;
        return call.call != plan::Call::receive || call.peer != asker ||
               call.sequence < question.firstMessage;
      });
      view.links.clear();
      std::erase_if(view.flows, [&](const Flow& flow) { return flow.sends || flow.peer != asker; });
      views.push_back(std::move(view));
      break;
    }
    case Question::Kind::ranks:
      for (int rank = static_cast<int>(
               std::min<uint64_t>(question.first, static_cast<uint64_t>(peers.ranks())));
           rank < peers.ranks(); rank++) {
        if (!peers.isMapped(rank)) continue;
        views.push_back(peers.view(rank, now));
        for (Flow& flow : views.back().flows) flow.quiet.clear();
        peers.addProcess(views.back(), now);
      }
      break;
    case Question::Kind::job:
    case Question::Kind::everything: {
      views = readAllTables(question.kind == Question::Kind::everything);
      views.erase(views.begin(), views.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(
                                                     question.first, views.size())));
      if (question.kind == Question::Kind::job) std::ranges::for_each(views, keepForRas);
      break;
    }
    default:
      return {};
  }
  for (RankView& view : views) view.host = hostName();
  return encodeAnswer(question, views, question.first);
}

}  // namespace unisono::diagnose
