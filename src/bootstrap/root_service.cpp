// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/root_service.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/open_descriptor.h"
#include "base/thread.h"
#include "bootstrap/rank_tree.h"
#include "bootstrap/reactor.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// How long the root keeps trying to hand a rank its answer.
constexpr std::chrono::seconds kAnswerTimeout{10};
// The same when the process of the root is exiting.
constexpr std::chrono::seconds kExitTimeout{1};
// How long after its timeout a root waits for another one to name ranks that are missing.
constexpr std::chrono::seconds kOthersGrace{2};
constexpr uint32_t kMaxRanks = 1u << 20;
constexpr int kNobody = -1;

struct Visitor {
  Socket socket;
  FrameReader reader;
  Clock::time_point deadline;  // to announce itself, or to read its answer
  std::unique_ptr<Stranger> stranger = std::make_unique<Stranger>();  // until it announces itself
  int rank = kNobody;
  bool answering = false;
  std::vector<std::byte> answer = {};
  size_t answered = 0;       // bytes of the answer that are sent
  std::string process = {};  // as it names itself
};

// A rank that the root serves.
struct Place {
  int rank;
  int holder = kNobody;  // descriptor of its visitor
  Address listener = {};
  bool hasJoined = false;  // with all that its own root serves
};

std::string rankList(const std::vector<int>& ranks) {
  constexpr size_t kMaxNamed = 32;
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < kMaxNamed; i++) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  }
  if (ranks.size() > kMaxNamed) text += fmt::format(" and {} more", ranks.size() - kMaxNamed);
  return text;
}

}  // namespace

// The rendezvous itself. Only the service's thread uses it, but the service owns it: a forked child
// has no such thread, and its copy then still has an owner.
class Rendezvous {
 public:
  Rendezvous(Listener listener, const Secret& secret, const RootTimes& times, int stop)
      : listener_(std::move(listener)), secret_(secret), times_(times), stop_(stop) {
    poller_.add(listener_.descriptor());
    poller_.add(stop_);
  }

  void run() {
    while (!done()) {
      for (const auto& [descriptor, owner] : poller_.wait(untilNextDeadline())) {
        if (descriptor == stop_) {
          stop();
        } else if (descriptor == listener_.descriptor()) {
          acceptAll();
        } else {
          serve(descriptor);
        }
      }
      expire();
    }
  }

 private:
  enum class Phase { gathering, answering };

  // Once the answer is known, the root ends when all who announced themselves have it and, after
  // a failure, late ranks have had time to be told of it.
  bool done() const { return phase_ == Phase::answering && !listener_ && answering_.empty(); }

  milliseconds untilNextDeadline() const {
    std::optional<Clock::time_point> next = deadline_;
    auto include = [&next](Clock::time_point time) { next = next ? std::min(*next, time) : time; };
    if (phase_ == Phase::gathering && reminder_) include(reminder_->next());
    if (resumeAt_) include(*resumeAt_);
    for (const int descriptor : limited()) include(visitors_.at(descriptor).deadline);
    if (!next) return milliseconds(-1);
    auto left = std::chrono::ceil<milliseconds>(*next - Clock::now());
    return std::clamp(left, milliseconds(0), milliseconds(60000));
  }

  // The visitors that have a deadline.
  std::vector<int> limited() const {
    std::vector<int> result = strangers_;
    result.insert(result.end(), answering_.begin(), answering_.end());
    return result;
  }

  void acceptAll() {
    while (listener_) {
      std::optional<Socket> socket;
      try {
        socket = listener_.accept();
      } catch (const Error& error) {
        if (!strangers_.empty()) {
          makeRoom();
          continue;
        }
        if (!resumeAt_) logWarn("root: {}", error.what());
        // The connection stays in the queue, and so do those of ranks.
        poller_.remove(listener_.descriptor());
        resumeAt_ = Clock::now() + Reactor::kTick;
        return;
      }
      if (!socket) return;
      if (Stranger::count() >= Stranger::max()) makeRoom();
      const int descriptor = socket->descriptor();
      poller_.add(descriptor);
      visitors_.insert_or_assign(
          descriptor,
          Visitor{std::move(*socket),
                  FrameReader(secret_, {{FrameKind::announce, kMaxAnnouncement},
                                        {FrameKind::refusal, kLongestText},
                                        {FrameKind::joined, 0}}),
                  Clock::now() + std::min<milliseconds>(
                                     kStrangerTimeout, times_.timeout.value_or(kStrangerTimeout))});
      strangers_.push_back(descriptor);
      // Ranks announce themselves at once, so most are never counted as strangers for long.
      serve(descriptor);
    }
  }

  // Closes the oldest stranger, unless it proves to be a rank.
  void makeRoom() {
    if (strangers_.empty()) return;
    const int oldest = strangers_.front();
    serve(oldest);
    if (!strangers_.empty() && strangers_.front() == oldest) {
      refuse(oldest, "there are too many connections that send nothing");
    }
  }

  void forget(int descriptor) {
    std::erase(strangers_, descriptor);
    answering_.erase(descriptor);
    poller_.remove(descriptor);
    visitors_.erase(descriptor);
  }

  void refuse(int descriptor, std::string_view reason) {
    logWarn("root: refused the connection from {}: {}",
            visitors_.at(descriptor).socket.peerAddress().text(), reason);
    forget(descriptor);
  }

  void serve(int descriptor) {
    auto found = visitors_.find(descriptor);
    if (found == visitors_.end()) return;
    Visitor& visitor = found->second;
    if (visitor.answering) {
      answer(descriptor, visitor);
      return;
    }
    try {
      const FrameReader::Status status = visitor.reader.read(visitor.socket);
      if (status == FrameReader::Status::incomplete) return;
      const bool complete = status == FrameReader::Status::complete;
      if (complete && visitor.reader.kind() == FrameKind::refusal) {
        hearFailure(descriptor, visitor.reader.take());
      } else if (complete && visitor.reader.kind() == FrameKind::joined) {
        visitor.reader.take();
        hearJoined(descriptor, visitor.rank);
      } else if (visitor.rank != kNobody) {
        leave(descriptor, visitor.rank);
      } else if (status == FrameReader::Status::closed) {
        refuse(descriptor, "it closed the connection before it sent anything");
      } else {
        announce(descriptor, visitor);
      }
    } catch (const Error& error) {
      if (visitor.rank != kNobody) {
        leave(descriptor, visitor.rank);
        return;
      }
      if (error.code() == ErrorCode::invalidUsage) tellOfWrongSecret(visitor.socket);
      refuse(descriptor, error.what());
    }
  }

  // A rank of this job that was given another key, or of another job, then knows why it is refused.
  static void tellOfWrongSecret(const Socket& socket) {
    std::array<std::byte, kMaxAnnouncement> rest;  // unread data would reset the connection
    socket.read(rest);
    socket.write(encodeFrame({.kind = FrameKind::wrongSecret}, {}));
  }

  // A rank that has announced itself and waits closed its connection, or sent what it should not.
  void leave(int descriptor, int rank) {
    const Visitor& visitor = visitors_.at(descriptor);
    const std::string text = fmt::format("Rank {} ({}, {}) left before every rank had joined", rank,
                                         visitor.socket.peerAddress().text(), visitor.process);
    forget(descriptor);
    fail(ErrorCode::remoteError, text);
  }

  // From a head: of another block, or that all ranks have joined.
  void hearJoined(int descriptor, int rank) {
    Place* place = find(rank);
    if (place == nullptr || place->holder != descriptor) {
      refuse(descriptor, "it speaks for ranks that it does not belong to");
    } else if (!place->hasJoined) {
      noteJoined(*place);
    } else if (rank == places_.front().rank && joined_ == places_.size()) {
      succeed();
    }
  }

  void noteJoined(Place& place) {
    place.hasJoined = true;
    if (++joined_ < places_.size()) return;
    if (first_.root == 0) {
      succeed();
      return;
    }
    visitors_.at(places_.front().holder)
        .socket.write(encodeFrame({.secret = secret_, .kind = FrameKind::joined}, {}));
  }

  // From a rank that another root serves as well.
  void hearFailure(int descriptor, const Frame& frame) {
    forget(descriptor);
    fail(static_cast<ErrorCode>(frame.header.tag), frame.text());
  }

  void announce(int descriptor, Visitor& visitor) {
    const Frame frame = visitor.reader.take();
    Announcement announcement = {};
    constexpr size_t kCommonBytes = offsetof(Announcement, listener);
    if (frame.payload.size() < kCommonBytes) {
      refuse(descriptor, "its announcement is too short");
      return;
    }
    std::memcpy(&announcement, frame.payload.data(),
                std::min(frame.payload.size(), sizeof(announcement)));
    const bool isOurVersion = announcement.version == kProtocolVersion;
    if (isOurVersion && frame.payload.size() != sizeof(announcement)) {
      refuse(descriptor, "its announcement has a wrong length");
      return;
    }
    const uint32_t rank = frame.header.sender;
    const AddressFamily family = announcement.listener.family;
    const bool isListening = family == AddressFamily::ipv4 || family == AddressFamily::ipv6;
    const bool hasRoots = announcement.roots > 0 && announcement.roots <= announcement.ranks &&
                          announcement.root < announcement.roots;
    if (announcement.ranks == 0 || announcement.ranks > kMaxRanks || rank >= announcement.ranks ||
        (isOurVersion && !(isListening && hasRoots))) {
      refuse(descriptor, "its announcement makes no sense");
      return;
    }
    visitor.rank = static_cast<int>(rank);
    announcement.process.back() = '\0';
    visitor.process = announcement.process.data();
    visitor.stranger.reset();
    std::erase(strangers_, descriptor);
    if (phase_ == Phase::answering) {
      startAnswer(descriptor, visitor, failure_);
      return;
    }
    if (!isOurVersion) {
      fail(ErrorCode::invalidUsage,
           fmt::format(
               "Rank {} ({}) uses another version of the library (protocol {}) than the process "
               "that made the unique id (protocol {}): load the same libnccl.so.2 everywhere",
               rank, visitor.socket.peerAddress().text(), announcement.version, kProtocolVersion));
      return;
    }
    if (places_.empty()) {
      makePlaces(announcement);
      firstRank_ = visitor.rank;
    }
    if (announcement.ranks != first_.ranks) {
      fail(
          ErrorCode::invalidUsage,
          fmt::format("Rank {} was started with {} ranks, but rank {} with {}: give every rank the "
                      "same number",
                      rank, announcement.ranks, firstRank_, first_.ranks));
      return;
    }
    Place* place = find(visitor.rank);
    if (announcement.roots != first_.roots || announcement.root != first_.root ||
        announcement.ids != first_.ids || place == nullptr) {
      fail(ErrorCode::invalidUsage,
           fmt::format("Ranks {} and {} were given different lists of unique ids: give every rank "
                       "the same ids in the same order",
                       firstRank_, rank));
      return;
    }
    if (place->holder != kNobody) {
      fail(ErrorCode::invalidUsage,
           fmt::format("Two processes or threads claim rank {}, at {} and {}: give each a rank of "
                       "its own",
                       rank, visitors_.at(place->holder).socket.peerAddress().text(),
                       visitor.socket.peerAddress().text()));
      return;
    }
    place->holder = descriptor;
    place->listener = announcement.listener;
    arrived_++;
    if (place < places_.data() + ranksOfBlock_) noteJoined(*place);
  }

  RankTree treeOf(int rank) const {
    return {rank, static_cast<int>(first_.ranks), static_cast<int>(first_.roots)};
  }

  // The ranks of this root's block, and the heads below its own.
  void makePlaces(const Announcement& announcement) {
    first_ = announcement;
    if (times_.timeout) deadline_ = Clock::now() + *times_.timeout;
    reminder_.emplace(times_.reportInterval);
    const int block = static_cast<int>(announcement.root);
    const RankTree head = treeOf(treeOf(0).headOf(block));
    for (int rank = head.rank; rank < head.headOf(block + 1); rank++) places_.push_back({rank});
    ranksOfBlock_ = places_.size();
    for (const int rank : head.headsOfChildren()) places_.push_back({rank});
  }

  Place* find(int rank) {
    const auto found = std::lower_bound(places_.begin(), places_.end(), rank,
                                        [](const Place& a, int r) { return a.rank < r; });
    return found == places_.end() || found->rank != rank ? nullptr : &*found;
  }

  void succeed() {
    logInfo("root: all {} ranks have joined", places_.size());
    // Closed before anyone has an answer: rank 0 may want to listen here again at once.
    deadline_.reset();
    listener_.close();
    phase_ = Phase::answering;
    const Secret session = randomSecret();
    for (size_t i = 0; i < places_.size(); i++) {
      const int holder = places_[i].holder;
      startAnswer(holder, visitors_.at(holder), tableOf(i, session));
    }
  }

  // The neighbours of a rank that this root knows: all, but for heads, which hear of some from
  // another root.
  std::vector<std::byte> tableOf(size_t place, const Secret& session) {
    const RankTree tree = treeOf(places_[place].rank);
    std::vector<int> ranks;
    if (place < ranksOfBlock_) ranks = tree.children();
    if (const Place* parent = find(tree.parent())) ranks.push_back(parent->rank);
    std::vector<std::byte> payload(sizeof(session));
    std::memcpy(payload.data(), &session, sizeof(session));
    for (const int rank : ranks) {
      const Neighbour neighbour = {static_cast<uint32_t>(rank), find(rank)->listener};
      const auto bytes = std::as_bytes(std::span(&neighbour, 1));
      payload.insert(payload.end(), bytes.begin(), bytes.end());
    }
    return encodeFrame({.secret = secret_, .kind = FrameKind::table}, payload);
  }

  void fail(ErrorCode code, const std::string& text) {
    if (phase_ == Phase::answering) return;
    logWarn("root: {}", text);
    const std::string_view shown = std::string_view(text).substr(0, kLongestText);
    failure_ = encodeFrame(
        {.secret = secret_, .kind = FrameKind::refusal, .tag = static_cast<uint64_t>(code)},
        std::as_bytes(std::span(shown)));
    deadline_ = Clock::now() + times_.linger;
    phase_ = Phase::answering;
    std::vector<int> announced;
    for (const auto& [descriptor, visitor] : visitors_) {
      if (visitor.rank != kNobody) announced.push_back(descriptor);
    }
    for (int descriptor : announced) startAnswer(descriptor, visitors_.at(descriptor), failure_);
  }

  void startAnswer(int descriptor, Visitor& visitor, std::vector<std::byte> frame) {
    visitor.answering = true;
    visitor.answer = std::move(frame);
    visitor.deadline = Clock::now() + kAnswerTimeout;
    answering_.insert(descriptor);
    poller_.setInterest(descriptor, Poller::Interest::write);
    answer(descriptor, visitor);
  }

  void answer(int descriptor, Visitor& visitor) {
    const Transfer transfer =
        visitor.socket.write(std::span(visitor.answer).subspan(visitor.answered));
    visitor.answered += transfer.bytes;
    if (transfer.closed) {
      logWarn("root: rank {} left before it had read its answer", visitor.rank);
      forget(descriptor);
    } else if (visitor.answered == visitor.answer.size()) {
      forget(descriptor);
    }
  }

  void expire() {
    const Clock::time_point now = Clock::now();
    if (resumeAt_ && *resumeAt_ <= now && listener_) {
      poller_.add(listener_.descriptor());
      acceptAll();
      if (resumeAt_ <= now) resumeAt_.reset();
    }
    std::vector<int> late;
    for (const int descriptor : limited()) {
      if (visitors_.at(descriptor).deadline <= now) late.push_back(descriptor);
    }
    for (int descriptor : late) {
      const int rank = visitors_.at(descriptor).rank;
      refuse(descriptor, rank == kNobody ? std::string("it sent nothing for too long")
                                         : fmt::format("rank {} does not read its answer", rank));
    }
    if (phase_ == Phase::gathering && reminder_ && reminder_->isDue()) reportMissing();
    if (!deadline_ || *deadline_ > now) return;
    if (phase_ == Phase::answering) {
      deadline_.reset();
      listener_.close();
      return;
    }
    const double seconds = std::chrono::duration<double>(*times_.timeout).count();
    if (arrived_ < places_.size()) {
      fail(ErrorCode::timeout,
           fmt::format("{} of {} ranks did not join within {} s: {}", places_.size() - arrived_,
                       places_.size(), seconds, missingRanks()));
    } else if (std::exchange(waitsForOthers_, true)) {
      fail(ErrorCode::timeout,
           fmt::format("Ranks of other unique ids did not join within {} s", seconds));
    } else {
      // Their own root, which can name them, comes first.
      deadline_ = now + kOthersGrace;
    }
  }

  // "rank 3" or "ranks 1, 3".
  std::string missingRanks() const {
    std::vector<int> missing;
    for (const Place& place : places_) {
      if (place.holder == kNobody) missing.push_back(place.rank);
    }
    return fmt::format("rank{} {}", missing.size() == 1 ? "" : "s", rankList(missing));
  }

  void reportMissing() {
    const std::string text = fmt::format("{} of {} ranks have not joined yet: {}",
                                         places_.size() - arrived_, places_.size(), missingRanks());
    const std::vector<std::byte> frame =
        encodeFrame({.secret = secret_, .kind = FrameKind::report}, std::as_bytes(std::span(text)));
    for (const Place& place : places_) {
      const int descriptor = place.holder;
      if (descriptor == kNobody || phase_ != Phase::gathering) continue;
      const Visitor& visitor = visitors_.at(descriptor);
      if (visitor.socket.write(frame).bytes != frame.size()) leave(descriptor, visitor.rank);
    }
  }

  void stop() {
    poller_.remove(stop_);
    // An id that nobody used ends without a message.
    if (!places_.empty()) {
      fail(ErrorCode::remoteError,
           "The process of the communicator's root ended before every rank had joined");
    }
    phase_ = Phase::answering;
    deadline_.reset();
    listener_.close();
    const Clock::time_point limit = Clock::now() + kExitTimeout;
    for (auto& [descriptor, visitor] : visitors_) {
      visitor.deadline = std::min(visitor.deadline, limit);
    }
  }

  Poller poller_;
  Listener listener_;
  Secret secret_;
  RootTimes times_;
  int stop_;
  Phase phase_ = Phase::gathering;
  std::map<int, Visitor> visitors_;  // by descriptor
  std::vector<int> strangers_;       // visitors that have not announced themselves, oldest first
  std::set<int> answering_;          // visitors that do not have their answer yet
  Announcement first_;               // of the rank that came first
  int firstRank_ = kNobody;
  std::vector<Place> places_;  // by rank: those of this root's block, then heads of others
  size_t ranksOfBlock_ = 0;
  size_t arrived_ = 0, joined_ = 0;
  bool waitsForOthers_ = false;     // and has waited for its timeout
  std::vector<std::byte> failure_;  // the answer after a failure
  std::optional<Clock::time_point> deadline_;
  std::optional<Reminder> reminder_;           // since the first rank joined
  std::optional<Clock::time_point> resumeAt_;  // when to accept again
};

namespace {

// The services of this process. A forked child starts with none of its own: its parent's threads
// do not exist there, and must be neither joined nor freed.
struct Keeper {
  pid_t process = ::getpid();
  std::mutex mutex;
  std::vector<std::unique_ptr<RootService>> services;
  Keeper* inherited = nullptr;
};

std::atomic<Keeper*> currentKeeper{nullptr};

struct StopAtExit {
  ~StopAtExit() {
    Keeper* keeper = currentKeeper.load();
    if (keeper == nullptr || keeper->process != ::getpid()) return;
    std::lock_guard lock(keeper->mutex);
    keeper->services.clear();
  }
} stopAtExit;

Keeper& keeperOfThisProcess() {
  Keeper* keeper = currentKeeper.load();
  while (keeper == nullptr || keeper->process != ::getpid()) {
    auto fresh = std::make_unique<Keeper>();
    fresh->inherited = keeper;
    if (currentKeeper.compare_exchange_strong(keeper, fresh.get())) return *fresh.release();
  }
  return *keeper;
}

}  // namespace

RootService::RootService(Listener listener, const Secret& secret, const RootTimes& times)
    : stop_(openDescriptor([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }, "eventfd")) {
  rendezvous_ = std::make_unique<Rendezvous>(std::move(listener), secret, times, stop_.get());
  thread_ = startThread("unisono-root", [this] { run(); });
}

RootService::~RootService() {
  {
    const std::lock_guard lock(stopMutex_);
    if (stop_) ::eventfd_write(stop_.get(), 1);
  }
  thread_.join();
}

void RootService::run() {
  try {
    rendezvous_->run();
  } catch (const std::exception& error) {
    logWarn("root: {}", error.what());
  }
  // Otherwise its descriptors would stay open until the next id is made.
  rendezvous_.reset();
  const std::lock_guard lock(stopMutex_);
  stop_.reset();
  finished_.store(true, std::memory_order_release);
}

void keepUntilExit(std::unique_ptr<RootService> service) {
  Keeper& keeper = keeperOfThisProcess();
  std::lock_guard lock(keeper.mutex);
  std::erase_if(keeper.services, [](const auto& entry) { return entry->finished(); });
  keeper.services.push_back(std::move(service));
}

}  // namespace unisono::bootstrap
