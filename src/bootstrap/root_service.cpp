#include "bootstrap/root_service.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/open_descriptor.h"
#include "base/thread.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// How long the root keeps trying to hand a rank its answer.
constexpr std::chrono::seconds kAnswerTimeout{10};
// How long ranks that come after a failed rendezvous are still told why.
constexpr std::chrono::seconds kFailureLinger{2};
// The same when the process of the root is on its way out.
constexpr std::chrono::seconds kExitTimeout{1};
constexpr uint32_t kMostRanks = 1u << 20;
constexpr int kNobody = -1;

struct Visitor {
  Socket socket;
  FrameReader reader;
  Clock::time_point deadline;  // to announce itself, or to take its answer
  int rank = kNobody;
  bool answering = false;
  size_t answered = 0;  // bytes of the answer that are sent
};

std::string rankList(const std::vector<int>& ranks) {
  constexpr size_t kMostNamed = 32;
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < kMostNamed; i++)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  if (ranks.size() > kMostNamed) text += fmt::format(" and {} more", ranks.size() - kMostNamed);
  return text;
}

}  // namespace

// The rendezvous itself. Used by the service's thread alone, but owned by the service: in a forked
// child, which has no such thread, it is then still held by someone.
class Rendezvous {
 public:
  Rendezvous(Listener listener, const Secret& secret, milliseconds timeout, int stop)
      : listener_(std::move(listener)), secret_(secret), timeout_(timeout), stop_(stop) {
    poller_.add(listener_.descriptor());
    poller_.add(stop_);
  }

  void run() {
    while (!done()) {
      for (int descriptor : poller_.wait(untilNextDeadline())) {
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
  // a failure, late ranks have had their chance to hear of it.
  bool done() const {
    if (phase_ == Phase::gathering) return false;
    if (listener_) return false;
    for (const auto& [descriptor, visitor] : visitors_)
      if (visitor.answering) return false;
    return true;
  }

  milliseconds untilNextDeadline() const {
    std::optional<Clock::time_point> next = deadline_;
    for (const auto& [descriptor, visitor] : visitors_) {
      const bool limited = visitor.rank == kNobody || visitor.answering;
      if (limited && (!next || visitor.deadline < *next)) next = visitor.deadline;
    }
    if (!next) return milliseconds(-1);
    auto left = std::chrono::ceil<milliseconds>(*next - Clock::now());
    return std::clamp(left, milliseconds(0), milliseconds(60000));
  }

  void acceptAll() {
    while (listener_) {
      std::optional<Socket> socket;
      try {
        socket = listener_.accept();
      } catch (const Error& error) {
        fail(ErrorCode::systemError, fmt::format("The root of the communicator: {}", error.what()));
        listener_.close();
        return;
      }
      if (!socket) return;
      makeRoom();
      const int descriptor = socket->descriptor();
      poller_.add(descriptor);
      visitors_.insert_or_assign(
          descriptor, Visitor{std::move(*socket),
                              FrameReader(secret_, {{FrameKind::announce, sizeof(Announcement)}}),
                              Clock::now() + std::min<milliseconds>(kStrangerTimeout, timeout_)});
      strangers_.push_back(descriptor);
    }
  }

  void makeRoom() {
    if (strangers_.size() < kMostStrangers) return;
    const int oldest = strangers_.front();
    refuse(oldest, "too many connections that say nothing");
  }

  void forget(int descriptor) {
    std::erase(strangers_, descriptor);
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
      if (visitor.rank != kNobody) {
        leave(descriptor, visitor.rank);
      } else if (status == FrameReader::Status::closed) {
        refuse(descriptor, "it closed the connection before it said who it is");
      } else {
        announce(descriptor, visitor);
      }
    } catch (const Error& error) {
      if (visitor.rank != kNobody)
        leave(descriptor, visitor.rank);
      else
        refuse(descriptor, error.what());
    }
  }

  // Nothing more is expected of a rank that waits for its answer.
  void leave(int descriptor, int rank) {
    const std::string from = visitors_.at(descriptor).socket.peerAddress().text();
    forget(descriptor);
    fail(ErrorCode::remoteError,
         fmt::format("Rank {} ({}) left before every rank had come", rank, from));
  }

  void announce(int descriptor, Visitor& visitor) {
    const Frame frame = visitor.reader.take();
    Announcement announcement;
    if (frame.payload.size() != sizeof(announcement)) {
      refuse(descriptor, "its announcement is too short");
      return;
    }
    std::memcpy(&announcement, frame.payload.data(), sizeof(announcement));
    const uint32_t rank = frame.header.sender;
    const AddressFamily family = announcement.listener.family;
    if (announcement.ranks == 0 || announcement.ranks > kMostRanks || rank >= announcement.ranks ||
        (family != AddressFamily::ipv4 && family != AddressFamily::ipv6)) {
      refuse(descriptor, "its announcement makes no sense");
      return;
    }
    visitor.rank = static_cast<int>(rank);
    std::erase(strangers_, descriptor);
    if (phase_ == Phase::answering) {
      startAnswer(descriptor, visitor);
      return;
    }
    if (holders_.empty()) {
      deadline_ = Clock::now() + timeout_;
      holders_.assign(announcement.ranks, kNobody);
      table_.resize(announcement.ranks);
      firstRank_ = visitor.rank;
    }
    if (announcement.ranks != holders_.size()) {
      fail(ErrorCode::invalidUsage,
           fmt::format("Rank {} says that there are {} ranks, but rank {} says {}: give every rank "
                       "the same number",
                       rank, announcement.ranks, firstRank_, holders_.size()));
      return;
    }
    if (holders_[rank] != kNobody) {
      fail(ErrorCode::invalidUsage,
           fmt::format("Two processes or threads claim rank {}, at {} and {}: give each its own",
                       rank, visitors_.at(holders_[rank]).socket.peerAddress().text(),
                       visitor.socket.peerAddress().text()));
      return;
    }
    holders_[rank] = descriptor;
    table_[rank] = announcement.listener;
    if (++arrived_ == holders_.size()) succeed();
  }

  void succeed() {
    const Secret session = randomSecret();
    std::vector<std::byte> payload(sizeof(session) + table_.size() * sizeof(Address));
    std::memcpy(payload.data(), &session, sizeof(session));
    std::memcpy(payload.data() + sizeof(session), table_.data(), table_.size() * sizeof(Address));
    answer_ = encodeFrame({.secret = secret_, .kind = FrameKind::table}, payload);
    logInfo("root: all {} ranks have come", table_.size());
    // Closed before anyone has an answer: rank 0 may want to listen here again at once.
    deadline_.reset();
    listener_.close();
    startAnswers();
  }

  void fail(ErrorCode code, const std::string& text) {
    if (phase_ == Phase::answering) return;
    logWarn("root: {}", text);
    const std::string_view shown = std::string_view(text).substr(0, kLongestText);
    answer_ = encodeFrame(
        {.secret = secret_, .kind = FrameKind::refusal, .tag = static_cast<uint64_t>(code)},
        std::as_bytes(std::span(shown)));
    deadline_ = Clock::now() + kFailureLinger;
    startAnswers();
  }

  void startAnswers() {
    phase_ = Phase::answering;
    std::vector<int> announced;
    for (const auto& [descriptor, visitor] : visitors_)
      if (visitor.rank != kNobody) announced.push_back(descriptor);
    for (int descriptor : announced) startAnswer(descriptor, visitors_.at(descriptor));
  }

  void startAnswer(int descriptor, Visitor& visitor) {
    visitor.answering = true;
    visitor.deadline = Clock::now() + kAnswerTimeout;
    poller_.setInterest(descriptor, Poller::Interest::write);
    answer(descriptor, visitor);
  }

  void answer(int descriptor, Visitor& visitor) {
    const Transfer transfer = visitor.socket.write(std::span(answer_).subspan(visitor.answered));
    visitor.answered += transfer.bytes;
    if (transfer.closed) {
      logWarn("root: rank {} left before it had the answer", visitor.rank);
      forget(descriptor);
    } else if (visitor.answered == answer_.size()) {
      forget(descriptor);
    }
  }

  void expire() {
    const Clock::time_point now = Clock::now();
    std::vector<int> late;
    for (const auto& [descriptor, visitor] : visitors_) {
      const bool limited = visitor.rank == kNobody || visitor.answering;
      if (limited && visitor.deadline <= now) late.push_back(descriptor);
    }
    for (int descriptor : late) {
      const int rank = visitors_.at(descriptor).rank;
      refuse(descriptor, rank == kNobody ? std::string("it said nothing for too long")
                                         : fmt::format("rank {} does not take its answer", rank));
    }
    if (!deadline_ || *deadline_ > now) return;
    if (phase_ == Phase::answering) {
      deadline_.reset();
      listener_.close();
      return;
    }
    std::vector<int> missing;
    for (size_t rank = 0; rank < holders_.size(); rank++)
      if (holders_[rank] == kNobody) missing.push_back(static_cast<int>(rank));
    fail(ErrorCode::timeout,
         fmt::format("{} of {} ranks did not come within {} s: rank{} {}", missing.size(),
                     holders_.size(), std::chrono::duration<double>(timeout_).count(),
                     missing.size() == 1 ? "" : "s", rankList(missing)));
  }

  void stop() {
    poller_.remove(stop_);
    // An id that nobody used ends in silence.
    if (!holders_.empty())
      fail(ErrorCode::remoteError,
           "The process of the communicator's root ended before every rank had come");
    phase_ = Phase::answering;
    deadline_.reset();
    listener_.close();
    const Clock::time_point limit = Clock::now() + kExitTimeout;
    for (auto& [descriptor, visitor] : visitors_)
      visitor.deadline = std::min(visitor.deadline, limit);
  }

  Poller poller_;
  Listener listener_;
  Secret secret_;
  milliseconds timeout_;
  int stop_;
  Phase phase_ = Phase::gathering;
  std::map<int, Visitor> visitors_;  // by descriptor
  std::vector<int> strangers_;       // visitors that have not announced themselves, oldest first
  std::vector<int> holders_;         // for each rank the descriptor of its visitor
  std::vector<Address> table_;
  size_t arrived_ = 0;
  int firstRank_ = kNobody;
  std::vector<std::byte> answer_;
  std::optional<Clock::time_point> deadline_;
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

RootService::RootService(Listener listener, const Secret& secret, milliseconds timeout)
    : stop_(openDescriptor([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }, "eventfd")) {
  rendezvous_ = std::make_unique<Rendezvous>(std::move(listener), secret, timeout, stop_.get());
  thread_ = startThread("unisono-root", [this] { run(); });
}

RootService::~RootService() {
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
}

void RootService::run() {
  try {
    rendezvous_->run();
  } catch (const std::exception& error) {
    logWarn("root: {}", error.what());
  }
  // Its sockets must not stay open until someone asks for the next id.
  rendezvous_.reset();
  finished_.store(true, std::memory_order_release);
}

void keepUntilExit(std::unique_ptr<RootService> service) {
  Keeper& keeper = keeperOfThisProcess();
  std::lock_guard lock(keeper.mutex);
  std::erase_if(keeper.services, [](const auto& entry) { return entry->finished(); });
  keeper.services.push_back(std::move(service));
}

}  // namespace unisono::bootstrap
