// SPDX-License-Identifier: Apache-2.0
#include "coordinator.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "base/error.h"
#include "base/unique_descriptor.h"

namespace unisono::bench {
namespace {

void copyText(char* target, size_t capacity, const std::string& text) {
  size_t bytes = std::min(text.size(), capacity - 1);
  std::memcpy(target, text.data(), bytes);
  target[bytes] = '\0';
}

// The status of the child when it has ended: its exit status, or 128 + the signal.
int exitStatus(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string howItEnded(int process, int status) {
  if (WIFSIGNALED(status)) {
    return fmt::format("process {} was ended by signal {} ({})", process, WTERMSIG(status),
                       strsignal(WTERMSIG(status)));
  }
  return fmt::format("process {} ended with status {}", process, WEXITSTATUS(status));
}

}  // namespace

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Coordinator::Shared {
  std::atomic<int> arrived;
  std::atomic<uint32_t> generation;
  std::atomic<int> errorState;  // 0 none, 1 being written, 2 there
  int errorStatus;
  char errorText[4096];
  std::atomic<uint64_t> wrong;
  ncclUniqueId ids[2];
  Contribution board[1];  // participants() of them
};

Coordinator::Coordinator(int participants, double timeoutSeconds)
    : participants_(participants),
      timeoutSeconds_(timeoutSeconds),
      bytes_(sizeof(Shared) + sizeof(Contribution) * static_cast<size_t>(participants)) {
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw systemError(errno, "mmap");
  shared_ = new (memory) Shared{};
}

Coordinator::~Coordinator() {
  ::munmap(shared_, bytes_);
}

void Coordinator::barrier() {
  const uint32_t generation = shared_->generation.load();
  if (shared_->arrived.fetch_add(1) + 1 == participants_) {
    shared_->arrived.store(0);
    shared_->generation.fetch_add(1);
  } else {
    const Clock::time_point start = Clock::now();
    while (shared_->generation.load() == generation && !aborted()) {
      double waited = secondsSince(start);
      if (waited > timeoutSeconds_) {
        throw Error(
            ErrorCode::timeout,
            fmt::format("only {} of {} workers of the bench reached a barrier within {:.0f} s",
                        shared_->arrived.load(), participants_, waited))
            .remedy("Raise the limit with -T if the machine is that slow");
      }
      // Workers should leave a barrier close together, so they only sleep in long waits.
      if (waited < 2e-3) {
        ::sched_yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }
  if (aborted()) throw Aborted();
}

std::vector<Contribution> Coordinator::exchange(int worker, const Contribution& mine) {
  shared_->board[worker] = mine;
  barrier();
  std::vector<Contribution> all(shared_->board, shared_->board + participants_);
  barrier();  // until all have read, nobody may write the next step's
  return all;
}

void Coordinator::publishId(int library, const ncclUniqueId& id) {
  shared_->ids[library] = id;
}

ncclUniqueId Coordinator::id(int library) const {
  return shared_->ids[library];
}

void Coordinator::abort(int errorStatus, const std::string& text) {
  int none = 0;
  if (!shared_->errorState.compare_exchange_strong(none, 1)) return;
  shared_->errorStatus = errorStatus;
  copyText(shared_->errorText, sizeof(shared_->errorText), text);
  shared_->errorState.store(2);
}

bool Coordinator::aborted() const {
  return shared_->errorState.load() != 0;
}

int Coordinator::errorStatus() const {
  return shared_->errorState.load() == 2 ? shared_->errorStatus : 0;
}

std::string Coordinator::errorText() const {
  return shared_->errorState.load() == 2 ? shared_->errorText : "";
}

void Coordinator::addWrong(uint64_t count) {
  shared_->wrong.fetch_add(count);
}

uint64_t Coordinator::totalWrong() const {
  return shared_->wrong.load();
}

void runInProcesses(int processes, Coordinator& coordinator, double graceSeconds,
                    const std::function<int(int)>& body) {
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  std::vector<pid_t> children;
  for (int process = 0; process < processes; process++) {
    pid_t child = ::fork();
    if (child == 0) {
      // A child must not outlive a parent that is killed.
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(3);
      std::exit(body(process));
    }
    if (child < 0) {
      coordinator.abort(3, systemError(errno, "fork").what());
      break;
    }
    children.push_back(child);
  }

  size_t running = children.size();
  bool killed = false;
  Clock::time_point abortedAt;
  bool sawAbort = false;
  while (running > 0) {
    for (size_t i = 0; i < children.size(); i++) {
      int status = 0;
      if (children[i] <= 0 || ::waitpid(children[i], &status, WNOHANG) != children[i]) continue;
      children[i] = 0;
      running--;
      if (exitStatus(status) != 0) {
        coordinator.abort(3, howItEnded(static_cast<int>(i), status));
      }
    }
    if (coordinator.aborted() && !sawAbort) {
      sawAbort = true;
      abortedAt = Clock::now();
    }
    if (sawAbort && !killed && secondsSince(abortedAt) > graceSeconds) {
      for (pid_t child : children) {
        if (child > 0) ::kill(child, SIGKILL);
      }
      killed = true;
    }
    if (running > 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::string callInProcess(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) throw systemError(errno, "pipe");
  UniqueDescriptor readEnd(ends[0]);
  UniqueDescriptor writeEnd(ends[1]);
  std::fflush(nullptr);
  pid_t child = ::fork();
  if (child < 0) throw systemError(errno, "fork");
  if (child == 0) {
    std::string answer(1, '+');
    try {
      answer.append(body());
    } catch (const std::exception& error) {
      answer.assign(1, '-').append(error.what());
    }
    size_t done = 0;
    while (done < answer.size()) {
      ssize_t written = ::write(writeEnd.get(), answer.data() + done, answer.size() - done);
      if (written <= 0) break;
      done += static_cast<size_t>(written);
    }
    ::_exit(0);
  }
  writeEnd.reset();
  std::string answer;
  char buffer[4096];
  for (;;) {
    ssize_t got = ::read(readEnd.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    answer.append(buffer, static_cast<size_t>(got));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (answer.empty()) throw Error(ErrorCode::systemError, howItEnded(0, status));
  if (answer[0] == '-') throw Error(ErrorCode::systemError, answer.substr(1));
  return answer.substr(1);
}

}  // namespace unisono::bench
