// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "testing.h"

// Ranks in several processes. The parent forks before it uses the library, and children run
// programs of their own, so nothing is shared but the unique id, which comes through a pipe.
namespace unisono::system_test {

class Pipe {
 public:
  Pipe() {
    if (::pipe(ends_) != 0) throw std::runtime_error("pipe");
  }
  ~Pipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  template <typename T>
  void write(const T& value) const {
    if (::write(ends_[1], &value, sizeof(value)) != sizeof(value)) ::_exit(9);
  }
  template <typename T>
  T read() const {
    T value;
    if (::read(ends_[0], &value, sizeof(value)) != sizeof(value)) ::_exit(9);
    return value;
  }

 private:
  int ends_[2];
};

// Two processes wait for each other here, any number of times.
class Meeting {
 public:
  void wait(int process) const {
    arrived_[process].write(process);
    arrived_[1 - process].read<int>();
  }

 private:
  Pipe arrived_[2];
};

// The same for any number of processes.
class Gathering {
 public:
  explicit Gathering(int processes) : processes_(processes), go_(new Pipe[processes]) {}
  void wait(int process) const {
    arrived_.write(process);
    for (int i = 0; process == 0 && i < processes_; i++) arrived_.read<int>();
    for (int i = 0; process == 0 && i < processes_; i++) go_[i].write(i);
    go_[process].read<int>();
  }

 private:
  const int processes_;
  const Pipe arrived_;
  const std::unique_ptr<Pipe[]> go_;
};

// Runs `body(process)` in a child each; its status is 0 if no expectation failed there.
std::vector<int> runChildren(int processes, const std::function<void(int)>& body);
void expectAllPass(const std::vector<int>& results);
// A test in a process of its own.
inline void inChild(const std::function<void()>& body) {
  EXPECT_EQ(runChildren(1, [&](int) { body(); }), std::vector<int>({0}));
}

// The id that process 0 makes, in each of `processes`.
ncclUniqueId sharedId(const Pipe& pipe, int process, int processes);

// A communicator of two processes; each is one rank, on the device of its number.
ncclComm_t joinTwo(const Pipe& pipe, int process);

}  // namespace unisono::system_test
