// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "child_processes.h"

// `unisono doctor` looks at processes from outside.
namespace unisono::system_test {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

struct Output {
  int status = -1;
  std::string text;  // of both outputs
};

Output doctor(const std::string& arguments, const std::string& prefix = "") {
  const std::string command = prefix + UNISONO_PROGRAM + " doctor " + arguments + " 2>&1";
  std::FILE* output = ::popen(command.c_str(), "r");
  Output run;
  char part[512];
  while (std::fgets(part, sizeof(part), output) != nullptr) run.text += part;
  const int status = ::pclose(output);
  run.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return run;
}

// Asks until the answer has this text: what a process does is known to its watchdog a moment later.
Output doctorUntil(const std::string& text, const std::string& arguments) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  Output run = doctor(arguments);
  while (run.text.find(text) == std::string::npos && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    run = doctor(arguments);
  }
  return run;
}

// A process of another program that runs until the test ends.
class Sleeper {
 public:
  Sleeper() : pid_(::fork()) {
    if (pid_ == 0) {
      ::execlp("sleep", "sleep", "600", nullptr);
      ::_exit(1);
    }
    const std::string link = "/proc/" + std::to_string(pid_) + "/exe";
    const std::string own = target("/proc/self/exe");
    while (target(link) == own) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Sleeper() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  static std::string target(const std::string& link) {
    std::error_code error;
    return std::filesystem::read_symlink(link, error).string();
  }

  pid_t pid_;
};

TEST(Doctor, ShowsWhoHoldsUpACall) {
  const Pipe pipe, first, mayGo;
  const std::vector<int> results = runChildren(3, [&](int process) {
    if (process == 2) {
      const auto waiting = first.read<pid_t>();
      const Output run = doctorUntil("not arrived: rank 1\n", std::to_string(waiting));
      EXPECT_EQ(run.status, 0);
      EXPECT_THAT(run.text, ContainsRegex("has loaded .*libnccl\\.so[^ ]* \\(Unisono\\)"));
      EXPECT_THAT(run.text, AllOf(HasSubstr("not arrived: rank 1\n"), HasSubstr("0 -> 1\n"),
                                  HasSubstr("AllReduce #2 (count 1000, int32, sum) of rank 0")));
      const Output json = doctor(std::to_string(waiting) + " --json");
      EXPECT_THAT(json.text, testing::StartsWith("{\"unisono_hang\":{\"verdict\":\"not_arrived\""));
      mayGo.write(1);
      return;
    }
    const ncclComm_t comm = joinTwo(pipe, process);
    useOnce(comm);
    if (process == 1) mayGo.read<int>();
    if (process == 0) first.write(::getpid());
    useOnce(comm);
    check(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0, 0}));
}

// Hosts of one rank each; the last process looks. Rank 1 is late or, with `stops`, stopped, so that
// nobody tells of it. `asked` is the rank that is looked at.
std::string doctorOfSeveralHosts(bool stops, int asked, const std::string& expected) {
  std::string file = testing::TempDir() + "unisono_doctor_" + std::to_string(::getpid());
  const Pipe pipe, pids[3], mayGo;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) {
      pid_t ranks[3];
      for (int rank = 0; rank < 3; rank++) ranks[rank] = pids[rank].read<pid_t>();
      if (stops) {
        // Its watchdog sees that the call is done.
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        ::kill(ranks[1], SIGSTOP);
      }
      std::ofstream(file) << doctorUntil(expected, std::to_string(ranks[asked])).text;
      if (stops) ::kill(ranks[1], SIGCONT);
      mayGo.write(1);
      return;
    }
    ::setenv("NCCL_HOSTID", std::to_string(process).c_str(), 1);
    ::setenv("NCCL_NET", "Socket", 1);
    check(unisonoHostSetDevice(process));
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 3, sharedId(pipe, process, 3), process));
    useOnce(comm);
    pids[process].write(::getpid());
    if (process == 1) mayGo.read<int>();
    useOnce(comm);
    check(ncclCommDestroy(comm));
  }));
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  ::unlink(file.c_str());
  return text.str();
}

TEST(Doctor, ShowsTheRanksOfSeveralHosts) {
  const std::string text = doctorOfSeveralHosts(false, 2, "not arrived: rank 1\n");
  EXPECT_THAT(text, AllOf(HasSubstr("not arrived: rank 1\n"),
                          HasSubstr("waiting:      ranks 0, 2\n"), HasSubstr("0 -> 1, 2 -> 1\n"),
                          HasSubstr("has finished AllReduce #1"), Not(HasSubstr("No answer"))));
}

TEST(Doctor, SaysWhichHostsDoNotAnswer) {
  const std::string text = doctorOfSeveralHosts(true, 0, "waiting:      ranks 0, 2\n");
  EXPECT_THAT(text,
              AllOf(HasSubstr("no answer from rank 1, for which the others may wait\n"),
                    HasSubstr("waiting:      ranks 0, 2\n"),
                    ContainsRegex("No answer from rank 1 \\(process [0-9]+ on host .*:[0-9]+\\)")));
}

// The process that is looked at is stopped, and has no neighbour: what can be read is shown.
TEST(Doctor, ShowsWhatItCanReadOfAStoppedProcess) {
  const std::string text = doctorOfSeveralHosts(true, 1, "in no call; the last was AllReduce #1");
  EXPECT_THAT(text, HasSubstr("rank 1 of 3 on device 1: in no call; the last was AllReduce #1"));
}

// Rank 1 is late with its second replay.
TEST(Doctor, ShowsTheReplayThatIsHeldUp) {
  const Pipe pipe, first, mayGo;
  const std::vector<int> results = runChildren(3, [&](int process) {
    if (process == 2) {
      const auto waiting = first.read<pid_t>();
      const Output run = doctorUntil("not arrived: rank 1\n", std::to_string(waiting));
      EXPECT_THAT(run.text,
                  AllOf(HasSubstr("not arrived: rank 1\n"),
                        HasSubstr("AllReduce(count 8, int32, sum), replay 2 of captured call 1")));
      mayGo.write(1);
      return;
    }
    const ncclComm_t comm = joinTwo(pipe, process);
    const DeviceBuffer buffer(process, 8 * sizeof(int));
    const DeviceStream stream(process);
    unisonoHostGraph_t graph = nullptr;
    check(unisonoHostStreamBeginCapture(stream));
    check(ncclAllReduce(buffer.as(), buffer.as(), 8, ncclInt, ncclSum, comm, stream));
    check(unisonoHostStreamEndCapture(stream, &graph));
    check(unisonoHostGraphLaunch(graph, stream));
    stream.synchronize();
    if (process == 1) mayGo.read<int>();
    if (process == 0) first.write(::getpid());
    check(unisonoHostGraphLaunch(graph, stream));
    stream.synchronize();
    check(unisonoHostGraphDestroy(graph));
    check(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0, 0}));
}

TEST(Doctor, SaysThatAProcessIsIdle) {
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  const Output run = doctorUntil("rank 1 of 2 on device 1: in no call", std::to_string(::getpid()));
  EXPECT_EQ(run.status, 0);
  EXPECT_THAT(run.text,
              HasSubstr("rank 0 of 2 on device 0: in no call; the last was AllReduce #1"));
  EXPECT_THAT(run.text, HasSubstr("rank 1 of 2 on device 1: in no call"));
}

TEST(Doctor, SaysWhatItCannotShow) {
  const Sleeper sleeper;
  const Output other = doctor(std::to_string(sleeper.pid()));
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.text, HasSubstr("uses no NCCL"));

  const Output none = doctor("4194304");
  EXPECT_EQ(none.status, 2);
  EXPECT_THAT(none.text, HasSubstr("does not exist"));

  if (::geteuid() != 0 || std::system("command -v setpriv >/dev/null") != 0) return;
  const Output refused =
      doctor(std::to_string(sleeper.pid()), "setpriv --reuid=65534 --regid=65534 --clear-groups ");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.text, HasSubstr("cannot inspect process"));
}

}  // namespace
}  // namespace unisono::system_test
