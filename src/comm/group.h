// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/registry.h"

namespace unisono::comm {

// The calls between ncclGroupStart and ncclGroupEnd of one thread; a call outside is a group of
// one.
//
//   start -> add ... -> end: check -> prepare -> initialize -> connect -> launch
//               |                |                  |
//               +-> refuse ------+-> nothing done   +-> every communicator of the calls has failed
class CallGroup {
 public:
  // This thread's.
  static CallGroup& current();

  void start() { depth_++; }
  // Closes one level; closing the last one runs the group: calls are planned, communicators are
  // initialized (each on a thread), peers are connected, and kernels are launched. Nonblocking
  // communicators are initialized and connected in the background; then it returns false.
  //
  // Throws the first error. An error before any peer was connected leaves the communicators of the
  // calls as they were. After one that occurs while the calls are connected or launched, some ranks
  // may have launched a call and others not, so all communicators of the calls have failed.
  // Communicators that the group was to initialize are gone in both cases.
  bool end();

  // Closes one level; the last one drops everything.
  void discard();

  int depth() const { return depth_; }

  // Adds a communicator to initialize. `id` is where the caller has its handle; it is cleared on
  // failure, and in any case if `init` returns no communicator (`isMember` false).
  void add(HandleId* id, Handle::InitFunction init, bool isMember = true);
  // Adds a call. `makeTask` checks its arguments for the communicator and returns the plan::Task.
  template <typename MakeTask>
  void add(HandleId communicator, runtime::Stream stream, MakeTask makeTask) {
    const Calls& calls = callsOf(communicator);
    add(communicator, makeTask(*calls.communicator), stream);
  }
  // Suspends or resumes a communicator, before the calls of the group.
  void addSuspend(HandleId communicator, bool suspends);
  // Registers a buffer of each rank, before the calls of the group. `done` gets what keeps it
  // registered and says where the buffers are, on any thread.
  using RegisteredFunction = std::function<void(std::shared_ptr<const plan::SymmetricWindow>)>;
  void addRegister(HandleId communicator, void* address, uint64_t bytes, bool isSymmetric,
                   RegisteredFunction done);

  // Runs `body`, a call of this group. If it throws, the group will fail with that error; inside
  // another group the level of the call is closed and the error thrown at once.
  template <typename Body>
  void attempt(Body&& body) {
    try {
      body();
    } catch (const std::exception& error) {
      refuse(asError(error));
    }
  }

 private:
  struct InitJob {
    HandleId* id;
    HandleId handleId;  // *id, which the caller may have changed since
    std::shared_ptr<Handle> handle;
    Handle::InitFunction init;
    bool isMember;
  };
  struct Calls {
    HandleId id = nullptr;
    std::shared_ptr<Handle> handle;
    std::shared_ptr<Communicator> communicator;
    Communicator::Prepared prepared;
  };

  class ProfiledReturn;

  // What all ranks of a communicator do together on the CPU.
  struct TogetherJob {
    std::shared_ptr<Handle> handle;
    bool isAlone;  // refuses other calls in its group
    std::function<void()> run;
  };

  // Those of a communicator, added if there are none yet.
  Calls& callsOf(HandleId communicator);
  void add(HandleId communicator, const plan::Task& task, runtime::Stream stream);
  // Keeps the memory of calls that have ended for the next group of this thread.
  void keepMemory(std::vector<Calls> calls);
  void refuse(const Error& error);
  static void drop(std::vector<InitJob>& initJobs);
  static void checkBlocking(const std::vector<InitJob>& initJobs,
                            const std::vector<TogetherJob>& togetherJobs,
                            const std::vector<Calls>& calls);
  static void checkTogether(const std::vector<InitJob>& initJobs,
                            const std::vector<TogetherJob>& togetherJobs,
                            const std::vector<Calls>& calls);
  static bool initAll(std::vector<InitJob>& initJobs);
  // Takes `calls` if it goes on in the background; then it returns false.
  static bool runAll(std::vector<Calls>& calls, const std::vector<TogetherJob>& togetherJobs);
  static void connectAll(std::vector<Calls>& calls);
  static void launchAll(std::vector<Calls>& calls);
  static Error failAll(std::vector<Calls>& calls, const Calls& cause, const Error& error);

  int depth_ = 0;
  std::optional<Error> error_;
  std::vector<InitJob> initJobs_;
  std::vector<TogetherJob> togetherJobs_;
  std::vector<Calls> calls_;
  std::vector<Calls> spare_;  // empty, or one of no communicator with memory of an earlier group
};

}  // namespace unisono::comm
