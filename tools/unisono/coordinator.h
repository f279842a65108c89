// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "nccl.h"

// Shared state of the workers of a run, which are threads of one or several processes: a barrier,
// an exchange of results, and the first error. It is in memory that forked processes share.
namespace unisono::bench {

using Clock = std::chrono::steady_clock;
double secondsSince(Clock::time_point start);

// Another worker failed. The coordinator has its error.
class Aborted : public std::exception {
 public:
  const char* what() const noexcept override { return "another worker failed"; }
};

// What a worker reports to all others at the end of a step.
struct Contribution {
  double seconds = 0;
  uint64_t wrong = 0;
  uint64_t checked = 0;    // bytes
  bool sampled = false;    // not every byte was checked
  char message[464] = {};  // of the first wrong element
};

class Coordinator {
 public:
  // `timeoutSeconds`: how long a barrier waits for the others before it throws unisono::Error.
  Coordinator(int participants, double timeoutSeconds);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  int participants() const { return participants_; }

  // Waits for all workers of all processes. Throws Aborted if one has failed.
  void barrier();
  // A barrier that returns the contributions of all workers, in their order.
  std::vector<Contribution> exchange(int worker, const Contribution& mine);

  // One worker publishes; after a barrier all may read. `library`: 0 or 1.
  void publishId(int library, const ncclUniqueId& id);
  ncclUniqueId id(int library) const;

  // Records the first error of all workers and ends their waits with Aborted.
  void abort(int errorStatus, const std::string& text);
  bool aborted() const;
  int errorStatus() const;  // 0: none
  std::string errorText() const;

  // Updated by the reporting worker, read by the parent.
  void addWrong(uint64_t count);
  uint64_t totalWrong() const;

 private:
  struct Shared;
  int participants_;
  double timeoutSeconds_;
  size_t bytes_;
  Shared* shared_;
};

// Runs body(0) to body(processes - 1), each in a forked process, and waits for them. If one exits
// with a status other than 0 or by a signal, aborts the coordinator and kills those that have not
// exited after `graceSeconds`. Call before the process has threads.
void runInProcesses(int processes, Coordinator& coordinator, double graceSeconds,
                    const std::function<int(int)>& body);

// Runs `body` in a forked process and returns its result. Throws unisono::Error with the text of
// the error that `body` threw, or with the cause of the process's end.
std::string callInProcess(const std::function<std::string()>& body);

}  // namespace unisono::bench
