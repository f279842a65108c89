// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <set>
#include <string>
#include <thread>

#include "testing.h"

// Ranks end with _exit() while threads of the library run, which is what a crash looks like.
// NOLINTNEXTLINE(bugprone-reserved-identifier): the sanitizer defines the name.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() {
  return "report_thread_leaks=0";
}

// Four ranks, each a process. One of them, the victim, fails in one of several manners at one of
// several points of a communicator's life: what do the others report, and how long after?
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4;
constexpr size_t kFewInts = 64, kManyInts = 300'000;

enum class Fault {
  killed,
  stopped,
  exits,
  aborts,
  late,
  closesSockets,
  logIsFull,      // of the victim
  noDescriptors,  // are left to the victim
  noMemory,       // is left to the victim
  otherSettings,  // of the victim
};
enum class Phase { init, firstCall, oneShot, ring, sendReceive, split, destroy };
constexpr const char* kFaultNames[] = {"Killed",   "Stopped",      "Exits",     "Aborts",
                                       "Late",     "Closed",       "LogIsFull", "NoDescriptors",
                                       "NoMemory", "OtherSettings"};
constexpr const char* kPhaseNames[] = {"Init",        "FirstCall", "OneShot", "Ring",
                                       "SendReceive", "Split",     "Destroy"};
constexpr int kExitStatus = 3;

// From the evidence of a failure to the report. Running calls may go on for the grace before that.
constexpr milliseconds kLimit{scaled(2000, 10000)};
constexpr const char* kGrace = "100";
// For how long a victim that does no harm is late.
constexpr milliseconds kLateness{300};
// The end of waits that only a failing test has.
constexpr milliseconds kPatience{30000};

int64_t nowNanoseconds() {
  return Clock::now().time_since_epoch().count();
}

// What the processes of a cell share.
struct Board {
  std::atomic<bool> hasId{false};
  ncclUniqueId id;
  std::atomic<int> warm{0}, calling{0};
  std::atomic<bool> victimIsReady{false}, victimIsDone{false}, victimFailed{false};
  std::atomic<int64_t> evidence{0};  // when the victim failed
  pid_t victimProcess = 0;
  struct Report {
    std::atomic<int64_t> time{0};  // when this rank knew
    char text[1024];
  } reports[kRanks];
};

template <typename Condition>
void waitUntil(const char* what, Condition condition) {
  const auto deadline = Clock::now() + kPatience;
  while (!condition()) {
    if (Clock::now() > deadline) throw std::runtime_error(std::string("waited for ") + what);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

bool isTcp(int descriptor, bool connected) {
  sockaddr_storage address;
  socklen_t length = sizeof(address);
  if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0) return false;
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return false;
  length = sizeof(address);
  return !connected ||
         ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0;
}

std::vector<int> connectedSockets() {
  std::vector<int> sockets;
  for (int descriptor = 3; descriptor < 1024; descriptor++) {
    if (isTcp(descriptor, true)) sockets.push_back(descriptor);
  }
  return sockets;
}

// One rank's process.
class Player {
 public:
  Player(Board& board, Fault fault, Phase phase, int rank, int victim)
      : board_(board), fault_(fault), phase_(phase), rank_(rank), victim_(victim) {}

  void play() {
    if (rank_ == victim_ && fault_ == Fault::logIsFull) {
      ::setenv("NCCL_DEBUG", "TRACE", 1);
      ::setenv("NCCL_DEBUG_FILE", "/dev/full", 1);
    }
    check(unisonoHostSetDevice(rank_));
    useOnce(Member(newId(), 0, 1).comm, 10);
    const int descriptors = openDescriptors(), threads = runningThreads();
    {
      const int idMaker = (victim_ + 1) % kRanks;
      if (rank_ == idMaker) {
        board_.id = newId();
        board_.hasId = true;
      }
      waitUntil("the id", [&] { return board_.hasId.load(); });
      buffer_ = DeviceBuffer(rank_, 2 * kManyInts * sizeof(int));
      const DeviceStream stream(rank_);
      stream_ = stream;
      if (rank_ == victim_) {
        beVictim();
      } else {
        survive(rank_ == idMaker);
      }
      buffer_ = {};
    }
    // The root goes on to tell those who are late why it has failed.
    const bool servesFailedRoot =
        (phase_ == Phase::init && !isHarmless() && rank_ == (victim_ + 1) % kRanks) ||
        (phase_ == Phase::split && isShortage() && rank_ == 0);
    if (servesFailedRoot) return;
    waitUntil("descriptors", [&] { return openDescriptors() <= descriptors; });
    waitUntil("threads", [&] { return runningThreads() <= threads; });
  }

 private:
  // These do everything in the end, and nobody may be told of an error.
  bool isHarmless() const {
    return fault_ == Fault::late || fault_ == Fault::stopped || fault_ == Fault::logIsFull;
  }
  // The victim goes on: if it fails, it says so, and the others hear of it.
  bool isShortage() const { return fault_ == Fault::noDescriptors || fault_ == Fault::noMemory; }

  ncclResult_t initialize() { return ncclCommInitRank(&comm_, kRanks, board_.id, rank_); }

  ncclResult_t call() {
    int* data = buffer_.as<int>();
    const int next = (rank_ + 1) % kRanks, previous = (rank_ + kRanks - 1) % kRanks;
    switch (phase_) {
      case Phase::ring:
        return ncclAllReduce(data, data, kManyInts, ncclInt, ncclSum, comm_, stream_);
      case Phase::sendReceive:
        check(ncclGroupStart());
        ncclSend(data, kManyInts, ncclInt, next, comm_, stream_);
        ncclRecv(data + kManyInts, kManyInts, ncclInt, previous, comm_, stream_);
        return ncclGroupEnd();
      case Phase::split:
        return ncclCommSplit(comm_, 0, rank_, &child_, nullptr);
      default:
        return ncclAllReduce(data, data, kFewInts, ncclInt, ncclSum, comm_, stream_);
    }
  }

  void prepare() {
    check(initialize());
    if (phase_ != Phase::firstCall && phase_ != Phase::split) {
      check(call());
      device::synchronize(stream_);
    }
    board_.warm++;
    waitUntil("the others", [&] { return board_.warm == kRanks; });
  }

  void beVictim() {
    board_.victimProcess = ::getpid();
    if (phase_ == Phase::init) return failInInit();
    prepare();
    waitUntil("calls of the others", [&] { return board_.calling == kRanks - 1; });
    std::this_thread::sleep_for(milliseconds(30));
    fail();
    if (fault_ == Fault::aborts) return;
    if (isShortage()) {
      const ncclResult_t result = phase_ == Phase::destroy ? ncclSuccess : outcomeOf(call());
      if (result != ncclSuccess) report(ncclGetLastError(nullptr));
      board_.victimFailed = result != ncclSuccess;
      board_.victimIsDone = true;
      endShortage();
      destroyAll();
      return;
    }
    if (fault_ == Fault::closesSockets) {
      // It is one of those who find the others dead.
      if (phase_ != Phase::destroy) {
        EXPECT_EQ(outcomeOf(call()), ncclRemoteError);
      }
      EXPECT_OK(ncclCommDestroy(comm_));
      return;
    }
    finishHarmless();
  }

  void failInInit() {
    if (isHarmless()) {
      fail();
      check(initialize());
      board_.calling++;
      EXPECT_OK(ncclCommDestroy(comm_));
      return;
    }
    if (fault_ == Fault::otherSettings) {
      ::setenv("UNISONO_DETERMINISTIC", "1", 1);
      fail();
      EXPECT_EQ(initialize(), ncclInvalidUsage);
      report(ncclGetLastError(nullptr));
      return;
    }
    std::thread failing([&] {
      // Connected to the root, and about to announce itself.
      waitUntil("a connection", [] { return !connectedSockets().empty(); });
      std::this_thread::sleep_for(milliseconds(100));
      fail();
    });
    const ncclResult_t result = initialize();
    failing.join();
    if (!isShortage()) {
      EXPECT_NE(result, ncclSuccess);
      return;
    }
    if (result != ncclSuccess) report(ncclGetLastError(nullptr));
    board_.victimFailed = result != ncclSuccess;
    board_.victimIsDone = true;
    endShortage();
    destroyAll();
  }

  void fail() {
    board_.evidence = nowNanoseconds();
    board_.victimIsReady = true;
    switch (fault_) {
      case Fault::killed:
        ::raise(SIGKILL);
        break;
      case Fault::stopped:
        ::raise(SIGSTOP);  // the parent lets it go on
        break;
      case Fault::exits:
        std::exit(kExitStatus);
      case Fault::aborts:
        EXPECT_OK(ncclCommAbort(comm_));
        break;
      case Fault::late:
        std::this_thread::sleep_for(kLateness);
        break;
      case Fault::closesSockets:
        for (int descriptor : connectedSockets()) ::shutdown(descriptor, SHUT_RDWR);
        break;
      case Fault::logIsFull:
      case Fault::otherSettings:
        break;
      case Fault::noDescriptors: {
        const int last = ::dup(STDERR_FILENO);
        const auto files = static_cast<rlim_t>(std::max(last + 1, 128));
        const rlimit limit = {files, files};
        ::setrlimit(RLIMIT_NOFILE, &limit);
        for (int more = last; more >= 0; more = ::dup(STDERR_FILENO)) taken_.push_back(more);
        break;
      }
      case Fault::noMemory: {
        std::ifstream status("/proc/self/statm");
        rlim_t pages = 0;
        status >> pages;
        const auto bytes = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (64 << 10);
        const rlimit limit = {bytes, RLIM_INFINITY};
        ::setrlimit(RLIMIT_AS, &limit);
        break;
      }
    }
  }

  // This rank had made the communicator before the victim failed to.
  void expectLateError(ncclComm_t comm) {
    waitUntil("the error of the victim", [&] {
      ncclResult_t state = ncclSuccess;
      check(ncclCommGetAsyncError(comm, &state));
      return state != ncclSuccess;
    });
    report(ncclGetLastError(comm));
    expectNamed(ncclGetLastError(comm));
  }

  void destroyAll() {
    EXPECT_OK(ncclCommDestroy(child_));
    EXPECT_OK(ncclCommDestroy(comm_));
  }

  void endShortage() {
    for (const int descriptor : taken_) ::close(descriptor);
    taken_.clear();
    const rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    if (fault_ == Fault::noMemory) ::setrlimit(RLIMIT_AS, &limit);
  }

  void survive(bool comesLast) {
    if (phase_ == Phase::init) return surviveInit(comesLast);
    prepare();
    board_.calling++;
    if (phase_ == Phase::destroy) {
      // Who leaves late finds others gone, which must not matter.
      waitUntil("the failure", [&] { return rank_ % 2 == 0 || board_.evidence != 0; });
      EXPECT_OK(ncclCommDestroy(comm_));
      if (!isHarmless()) report("destroyed");
      return;
    }
    if (isHarmless()) return finishHarmless();
    const ncclResult_t result = outcomeOf(call());
    if (isShortage() && result == ncclSuccess) {
      // The error of the victim may come after its part of the call.
      waitUntil("the victim", [&] { return board_.victimIsDone.load(); });
      if (board_.victimFailed && phase_ == Phase::split) {
        expectLateError(child_);
      } else {
        EXPECT_TRUE(!board_.victimFailed || phase_ == Phase::sendReceive);
        report("complete");
      }
      destroyAll();
      return;
    }
    const bool isNeighbour = (rank_ + 1) % kRanks == victim_ || (victim_ + 1) % kRanks == rank_;
    if (result == ncclSuccess && phase_ == Phase::sendReceive && !isNeighbour) {
      report("complete");
      EXPECT_OK(ncclCommDestroy(comm_));
      return;
    }
    EXPECT_EQ(result, ncclRemoteError);
    // A split that fails has no communicator that could tell.
    const std::string text =
        phase_ == Phase::split ? ncclGetLastError(nullptr) : ncclGetLastError(comm_);
    report(text);
    expectNamed(text);
    EXPECT_EQ(ncclAllReduce(buffer_.as(), buffer_.as(), 4, ncclInt, ncclSum, comm_, stream_),
              ncclRemoteError);
    EXPECT_OK(rank_ % 2 == 0 ? ncclCommDestroy(comm_) : ncclCommAbort(comm_));
    device::synchronize(stream_);
  }

  void surviveInit(bool comesLast) {
    if (comesLast) {
      waitUntil("the victim", [&] { return board_.victimIsReady.load(); });
      // The root is in this process. It hears of the victim's end before it hears of this rank.
      if (!isHarmless()) std::this_thread::sleep_for(milliseconds(100));
    }
    const ncclResult_t result = initialize();
    if (isHarmless()) {
      EXPECT_OK(result);
      board_.calling++;
      EXPECT_OK(ncclCommDestroy(comm_));
      return;
    }
    const std::string text = ncclGetLastError(nullptr);
    if (fault_ == Fault::otherSettings) {
      EXPECT_EQ(result, ncclInvalidUsage);
      EXPECT_NE(text.find("UNISONO_DETERMINISTIC"), std::string::npos) << text;
      report(text);
      return;
    }
    if (isShortage() && result == ncclSuccess) {
      waitUntil("the victim", [&] { return board_.victimIsDone.load(); });
      if (board_.victimFailed) {
        expectLateError(comm_);
      } else {
        report("complete");
      }
      destroyAll();
      return;
    }
    EXPECT_EQ(result, ncclRemoteError);
    report(text);
    expectNamed(text);
  }

  // Nothing has happened in the end.
  void finishHarmless() {
    if (phase_ != Phase::destroy) {
      EXPECT_OK(call());
      device::synchronize(stream_);
      ncclResult_t state = ncclInternalError;
      EXPECT_OK(ncclCommGetAsyncError(comm_, &state));
      EXPECT_EQ(state, ncclSuccess);
      if (child_ != nullptr) {
        useOnce(child_);
        EXPECT_OK(ncclCommDestroy(child_));
      }
      useOnce(comm_);
    }
    EXPECT_OK(ncclCommDestroy(comm_));
  }

  // The result of a call once it is complete: its own, or the state of the communicator. Its kernel
  // has ended by then.
  ncclResult_t outcomeOf(ncclResult_t result) {
    ncclResult_t state = ncclSuccess;
    waitUntil("the outcome of a call", [&] {
      check(ncclCommGetAsyncError(comm_, &state));
      // Who has lost only its sockets may still take part in the call.
      const bool mayComplete = fault_ != Fault::closesSockets && device::isIdle(stream_);
      return result != ncclSuccess || state != ncclSuccess || mayComplete;
    });
    if (result == ncclSuccess && state == ncclSuccess) {
      // The kernel has ended, and its error came first.
      check(ncclCommGetAsyncError(comm_, &state));
    }
    device::synchronize(stream_);
    return result == ncclSuccess ? state : result;
  }

  void report(const std::string& text) {
    Board::Report& mine = board_.reports[rank_];
    std::snprintf(mine.text, sizeof(mine.text), "%s", text.c_str());
    mine.time = nowNanoseconds();
  }

  void expectNamed(const std::string& text) {
    if (fault_ == Fault::closesSockets && phase_ != Phase::init) {
      // Both sides of such a cut find the other one dead, and either may be heard first.
      EXPECT_NE(text.find("has died"), std::string::npos) << text;
      return;
    }
    const std::string name = "Rank " + std::to_string(victim_);
    EXPECT_NE(text.find(name + (isShortage() ? " " : " (")), std::string::npos) << text;
    EXPECT_NE(text.find("process " + std::to_string(board_.victimProcess) + " on host "),
              std::string::npos)
        << text;
  }

  Board& board_;
  const Fault fault_;
  const Phase phase_;
  const int rank_, victim_;
  ncclComm_t comm_ = nullptr, child_ = nullptr;
  DeviceBuffer buffer_;
  cudaStream_t stream_ = nullptr;
  std::vector<int> taken_;  // descriptors
};

std::set<std::string> sharedMemoryFiles() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.insert(entry.path().filename());
  }
  return names;
}

class FaultMatrix : public ::testing::TestWithParam<std::tuple<Fault, Phase>> {};

TEST_P(FaultMatrix, EverySurvivorKnowsWhy) {
  const auto [fault, phase] = GetParam();
  const bool isShortage = fault == Fault::noDescriptors || fault == Fault::noMemory;
  if (isShortage && (kSanitized || std::getenv("UNISONO_TEST_FAULTS") == nullptr)) {
    GTEST_SKIP() << "UNISONO_TEST_FAULTS=all also runs this, without sanitizers";
  }
#ifdef __SANITIZE_THREAD__
  if (phase == Phase::init) {
    GTEST_SKIP() << "the victim reads its handle, or leaves through exit(), while another of its "
                    "threads is in ncclCommInitRank: a race of the test itself";
  }
#endif
  const int victim = (static_cast<int>(fault) + 3 * static_cast<int>(phase)) % kRanks;
  const auto files = sharedMemoryFiles();
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& board = *new (memory) Board;
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; rank++) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(250);
      ::setenv("UNISONO_FAILURE_GRACE", kGrace, 1);
      int status = 0;
      try {
        Player(board, fault, phase, rank, victim).play();
        status = HasFailure() ? 1 : 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status = 2;
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
    children.push_back(child);
  }
  const pid_t victimProcess = children[static_cast<size_t>(victim)];
  int status = 0;
  if (fault == Fault::stopped && ::waitpid(victimProcess, &status, WUNTRACED) == victimProcess) {
    ASSERT_TRUE(WIFSTOPPED(status));
    std::this_thread::sleep_for(kLateness);
    ::kill(victimProcess, SIGCONT);
  }
  for (int rank = 0; rank < kRanks; rank++) {
    ::waitpid(children[static_cast<size_t>(rank)], &status, 0);
    if (rank == victim && fault == Fault::killed) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    } else {
      EXPECT_TRUE(WIFEXITED(status)) << "rank " << rank << ": " << status;
      const int expected = rank == victim && fault == Fault::exits ? kExitStatus : 0;
      EXPECT_EQ(WEXITSTATUS(status), expected) << "rank " << rank;
    }
  }
  int64_t longest = 0;
  const char* text = "-";
  for (int rank = 0; rank < kRanks; rank++) {
    const int64_t time = board.reports[rank].time;
    if (time == 0) continue;
    longest = std::max(longest, time - board.evidence);
    if (rank == (victim + 1) % kRanks) text = board.reports[rank].text;
  }
  EXPECT_LT(longest, std::chrono::nanoseconds(kLimit).count());
  std::printf("%-8s %-12s rank %d, %4d ms: %s\n", kFaultNames[static_cast<int>(fault)],
              kPhaseNames[static_cast<int>(phase)], victim, static_cast<int>(longest / 1'000'000),
              text);
  EXPECT_EQ(::waitpid(-1, &status, WNOHANG), -1) << "a child is left";
  EXPECT_EQ(sharedMemoryFiles(), files);
  ::munmap(memory, sizeof(Board));
}

std::string nameOf(const ::testing::TestParamInfo<std::tuple<Fault, Phase>>& test) {
  return std::string(kFaultNames[static_cast<int>(std::get<0>(test.param))]) +
         kPhaseNames[static_cast<int>(std::get<1>(test.param))];
}

const auto kAllPhases =
    ::testing::Values(Phase::init, Phase::firstCall, Phase::oneShot, Phase::ring,
                      Phase::sendReceive, Phase::split, Phase::destroy);

INSTANTIATE_TEST_SUITE_P(
    Faults, FaultMatrix,
    ::testing::Combine(::testing::Values(Fault::killed, Fault::stopped, Fault::exits, Fault::aborts,
                                         Fault::late, Fault::closesSockets, Fault::logIsFull),
                       kAllPhases),
    nameOf);
INSTANTIATE_TEST_SUITE_P(Settings, FaultMatrix,
                         ::testing::Combine(::testing::Values(Fault::otherSettings),
                                            ::testing::Values(Phase::init)),
                         nameOf);
INSTANTIATE_TEST_SUITE_P(
    Shortages, FaultMatrix,
    ::testing::Combine(::testing::Values(Fault::noDescriptors, Fault::noMemory), kAllPhases),
    nameOf);

}  // namespace
}  // namespace unisono::system_test
