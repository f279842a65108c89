// SPDX-License-Identifier: Apache-2.0
#include "child_processes.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>

namespace unisono::system_test {

std::vector<int> runChildren(int processes, const std::function<void(int)>& body) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int process = 0; process < processes; process++) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(static_cast<unsigned>(scaled(250, 800)));  // does not outlive the test for long
#ifdef __SANITIZE_THREAD__
      // It does not see the order that another process makes between the groups of a tree.
      ::setenv("NCCL_ALGO", "^tree", 0);
#endif
      try {
        body(process);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "process %d: %s\n", process, error.what());
        std::exit(2);
      }
      std::exit(::testing::Test::HasFailure() ? 1 : 0);  // with the library's own end
    }
    children.push_back(child);
  }
  std::vector<int> results;
  for (pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    results.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status));
  }
  return results;
}

void expectAllPass(const std::vector<int>& results) {
  EXPECT_EQ(results, std::vector<int>(results.size(), 0));
}

ncclUniqueId sharedId(const Pipe& pipe, int process, int processes) {
  if (process != 0) return pipe.read<ncclUniqueId>();
  const ncclUniqueId id = newId();
  for (int other = 1; other < processes; other++) pipe.write(id);
  return id;
}

ncclComm_t joinTwo(const Pipe& pipe, int process) {
  check(unisonoHostSetDevice(process));
  ncclComm_t comm = nullptr;
  check(ncclCommInitRank(&comm, 2, sharedId(pipe, process, 2), process));
  return comm;
}

}  // namespace unisono::system_test
