#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "nccl.h"

// What the workers of a run (threads, in one process or several) share: a barrier, a board for
// their results, and the news that one of them has failed. Lies in memory that a fork shares.
namespace unisono::bench {

// Another worker failed; its error is kept in the coordinator.
class Aborted : public std::exception {
 public:
  const char* what() const noexcept override { return "another worker failed"; }
};

// What a worker tells all others at the end of a step.
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

  // Throws Aborted when a worker has failed. Workers may have come from any process.
  void barrier();
  // A barrier that hands everyone the contributions of all, in the order of the workers.
  std::vector<Contribution> exchange(int worker, const Contribution& mine);

  // One worker publishes, a barrier later all may read. `library`: 0 or 1.
  void publishId(int library, const ncclUniqueId& id);
  ncclUniqueId id(int library) const;

  // Keeps the first error of all workers; their waits end with Aborted.
  void abort(int errorStatus, const std::string& text);
  bool aborted() const;
  int errorStatus() const;  // 0: none
  std::string errorText() const;

  // Set by the reporting worker, read by the parent.
  void addWrong(uint64_t count);
  uint64_t totalWrong() const;

 private:
  struct Shared;
  int participants_;
  double timeoutSeconds_;
  size_t bytes_;
  Shared* shared_;
};

// Runs body(0) to body(processes - 1), each in a forked process of its own, and waits for them.
// When one ends with a status other than 0 or by a signal, the coordinator is told, and those that
// do not end by themselves within `graceSeconds` are ended. Call before the process has threads.
void runInProcesses(int processes, Coordinator& coordinator, double graceSeconds,
                    const std::function<int(int)>& body);

// Runs `body` in a forked process and returns what it returned. Throws unisono::Error with the text
// of the error that `body` threw, or with how the process ended.
std::string callInProcess(const std::function<std::string()>& body);

}  // namespace unisono::bench
