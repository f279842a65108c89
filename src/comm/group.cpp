// SPDX-License-Identifier: Apache-2.0
#include "comm/group.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/thread.h"

namespace unisono::comm {
namespace {

// Runs `jobs` at once, each on a thread of its own, and throws the first error when all have ended.
void runTogether(const std::vector<std::function<void()>>& jobs) {
  if (jobs.empty()) return;
  std::mutex mutex;
  std::optional<Error> first;
  auto run = [&](const std::function<void()>& job) {
    try {
      job();
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      if (!first) first = asError(error);
    }
  };
  // The jobs wait for each other, so none begins before every thread has started.
  std::promise<bool> started;
  std::shared_future<bool> mayRun = started.get_future().share();
  std::vector<std::thread> threads;
  threads.reserve(jobs.size());
  try {
    for (size_t i = 1; i < jobs.size(); i++) {
      threads.push_back(startThread("unisono-init", [&run, &mayRun, &job = jobs[i]] {
        if (mayRun.get()) run(job);
      }));
    }
  } catch (const Error& error) {
    first = error;
  }
  started.set_value(!first);
  if (!first) run(jobs.front());
  for (std::thread& thread : threads) thread.join();
  if (first) throw *first;
}

}  // namespace

// Tells the profiles of a group that its end begins, and that it returns to the user.
class CallGroup::ProfiledReturn {
 public:
  explicit ProfiledReturn(const std::vector<Calls>& calls) {
    for (const Calls& entry : calls) {
      if (entry.prepared.profile != nullptr) profiles_.push_back(entry.prepared.profile);
    }
    for (const auto& profile : profiles_) profile->ending();
  }
  ~ProfiledReturn() {
    for (const auto& profile : profiles_) profile->returned();
  }
  ProfiledReturn(const ProfiledReturn&) = delete;
  ProfiledReturn& operator=(const ProfiledReturn&) = delete;

 private:
  std::vector<std::shared_ptr<GroupProfile>> profiles_;
};

// Destructors of static objects may still make calls when the main thread's thread-local objects
// have been destroyed: those get another group.
CallGroup& CallGroup::current() {
  static thread_local CallGroup* group = nullptr;
  struct Owner {
    ~Owner() { delete std::exchange(group, nullptr); }
  };
  if (group == nullptr) {
    static thread_local Owner owner;
    group = new CallGroup;
  }
  return *group;
}

void CallGroup::add(HandleId* id, Handle::InitFunction init, bool isMember) {
  initJobs_.push_back({id, *id, findHandle(*id), std::move(init), isMember});
}

CallGroup::Calls& CallGroup::callsOf(HandleId communicator) {
  const auto entry = std::ranges::find(calls_, communicator, &Calls::id);
  if (entry != calls_.end()) return *entry;
  auto handle = findHandle(communicator);
  auto made = handle->getActive();
  if (calls_.empty()) std::swap(calls_, spare_);
  if (calls_.empty() || calls_.front().id != nullptr) calls_.emplace_back();
  Calls& calls = calls_.back();
  calls.id = communicator;
  calls.handle = std::move(handle);
  calls.communicator = std::move(made);
  return calls;
}

void CallGroup::add(HandleId communicator, const plan::Task& task, runtime::Stream stream) {
  Calls& calls = callsOf(communicator);
  Communicator::Prepared& prepared = calls.prepared;
  if (prepared.tasks.empty()) prepared.profile = calls.communicator->beginProfile();
  prepared.add(calls.communicator->choose(task), stream);
  if (prepared.profile != nullptr) prepared.profile->add(prepared.tasks.back(), stream, depth_);
}

void CallGroup::keepMemory(std::vector<Calls> calls) {
  constexpr size_t kMostLaunches = 16;  // of several KiB each
  if (calls.empty()) return;
  calls.erase(calls.begin() + 1, calls.end());
  Calls& first = calls.front();
  if (first.prepared.plan.launches.capacity() > kMostLaunches) return;
  first.id = nullptr;
  first.handle.reset();
  first.communicator.reset();
  first.prepared.clear();
  spare_ = std::move(calls);
}

void CallGroup::addSuspend(HandleId communicator, bool suspends) {
  auto handle = findHandle(communicator);
  togetherJobs_.push_back({handle, true, [handle, suspends, turn = handle->beginSuspend(suspends)] {
                             handle->finishSuspend(suspends, *turn);
                           }});
}

void CallGroup::addRegister(HandleId communicator, void* address, uint64_t bytes, bool isSymmetric,
                            RegisteredFunction done) {
  auto handle = findHandle(communicator);
  togetherJobs_.push_back(
      {handle, false, [=, turn = handle->beginRegister(), done = std::move(done)] {
         done(handle->finishRegister(address, bytes, isSymmetric, *turn));
       }});
}

void CallGroup::refuse(const Error& error) {
  if (!error_) error_ = error;
  if (depth_ == 1) return;
  depth_--;
  throw error;
}

bool CallGroup::end() {
  if (depth_ == 0) {
    throw invalidUsage("ncclGroupEnd without ncclGroupStart")
        .remedy("Call ncclGroupStart once for every ncclGroupEnd, on the same thread");
  }
  if (--depth_ > 0) return true;
  // Whatever happens, the next group of this thread starts empty.
  auto initJobs = std::exchange(initJobs_, {});
  auto togetherJobs = std::exchange(togetherJobs_, {});
  auto calls = std::exchange(calls_, {});
  auto error = std::exchange(error_, {});
  const ProfiledReturn profiledReturn(calls);
  try {
    if (error) throw *error;
    checkBlocking(initJobs, togetherJobs, calls);
    checkTogether(initJobs, togetherJobs, calls);
    // One of them may have been aborted since its call was added.
    for (const Calls& entry : calls) entry.handle->getActive();
    for (Calls& entry : calls) {
      const GroupProfile::Step step(entry.prepared.profile.get(), "plan");
      entry.communicator->prepare(entry.prepared);
    }
    const bool initialized = initAll(initJobs);
    for (Calls& entry : calls) entry.communicator->enter(entry.prepared);
    const bool isDone = runAll(calls, togetherJobs);
    if (isDone) keepMemory(std::move(calls));
    return isDone && initialized;
  } catch (...) {
    drop(initJobs);
    throw;
  }
}

void CallGroup::drop(std::vector<InitJob>& initJobs) {
  for (InitJob& job : initJobs) {
    if (const auto handle = releaseIfLive(job.handleId)) handle->destroy();
    *job.id = nullptr;
  }
}

void CallGroup::discard() {
  if (depth_ == 0 || --depth_ > 0) return;
  drop(initJobs_);
  initJobs_.clear();
  togetherJobs_.clear();
  calls_.clear();
  error_.reset();
}

// A nonblocking communicator must not wait for what a blocking one waits for.
void CallGroup::checkBlocking(const std::vector<InitJob>& initJobs,
                              const std::vector<TogetherJob>& togetherJobs,
                              const std::vector<Calls>& calls) {
  bool blocking = false, nonblocking = false;
  for (const auto& entry : initJobs) (entry.handle->blocking() ? blocking : nonblocking) = true;
  for (const auto& entry : togetherJobs) (entry.handle->blocking() ? blocking : nonblocking) = true;
  for (const auto& entry : calls) (entry.handle->blocking() ? blocking : nonblocking) = true;
  if (blocking && nonblocking) {
    throw invalidArgument("The group has both blocking and nonblocking communicators")
        .remedy("Use one group for each kind, or set ncclConfig_t.blocking to the same value");
  }
}

// A call on a communicator that the same group suspends has no connections. A split would wait for
// what comes after it.
void CallGroup::checkTogether(const std::vector<InitJob>& initJobs,
                              const std::vector<TogetherJob>& togetherJobs,
                              const std::vector<Calls>& calls) {
  for (const TogetherJob& job : togetherJobs) {
    const auto isSame = [&](const auto& other) { return other.handle == job.handle; };
    if (job.isAlone && (!initJobs.empty() || std::ranges::any_of(calls, isSame) ||
                        std::ranges::count_if(togetherJobs, isSame) > 1)) {
      throw invalidUsage(
          "A group suspends or resumes a communicator, and makes other calls on it or makes others")
          .remedy("Call ncclCommSuspend and ncclCommResume in groups of their own");
    }
    if (!initJobs.empty()) {
      throw invalidUsage("A group registers a window and makes communicators")
          .remedy("Call ncclCommWindowRegister in another group");
    }
  }
}

bool CallGroup::initAll(std::vector<InitJob>& initJobs) {
  bool complete = true;
  std::vector<std::function<void()>> jobs;
  for (InitJob& job : initJobs) {
    if (job.handle->blocking()) {
      jobs.emplace_back([&job] {
        job.handle->initialize(std::exchange(job.init, {}));
        job.handle->communicator();  // throws the error of the initialization
      });
    } else {
      job.handle->initAsync(std::exchange(job.init, {}));
      complete = false;
    }
  }
  runTogether(jobs);
  for (InitJob& job : initJobs) {
    if (job.isMember) continue;
    releaseIfLive(job.handleId);
    *job.id = nullptr;
  }
  return complete;
}

bool CallGroup::runAll(std::vector<Calls>& calls, const std::vector<TogetherJob>& togetherJobs) {
  if (calls.empty() && togetherJobs.empty()) return true;
  const bool connected = std::all_of(calls.begin(), calls.end(), [](const Calls& entry) {
    return entry.communicator->isConnected(entry.prepared);
  });
  const bool blocking =
      (calls.empty() ? togetherJobs.front().handle : calls.front().handle)->blocking();
  if (connected && togetherJobs.empty()) {
    launchAll(calls);
    return true;
  }
  std::vector<std::shared_ptr<Handle>> handles;
  for (const TogetherJob& job : togetherJobs) handles.push_back(job.handle);
  for (const Calls& entry : calls) handles.push_back(entry.handle);
  if (blocking) {
    std::vector<Handle::Busy> busy(handles.begin(), handles.end());
    std::vector<std::function<void()>> jobs;
    for (const TogetherJob& job : togetherJobs) jobs.push_back(job.run);
    runTogether(jobs);
    if (!connected) connectAll(calls);
    launchAll(calls);
    return true;
  }
  const auto operation =
      Background::start("unisono-connect", [calls = std::move(calls), togetherJobs]() mutable {
        try {
          std::vector<std::function<void()>> jobs;
          for (const TogetherJob& job : togetherJobs) {
            jobs.emplace_back([&job] {
              try {
                job.run();
              } catch (const std::exception& error) {
                throw job.handle->fail(asError(error));
              }
            });
          }
          runTogether(jobs);
          connectAll(calls);
          launchAll(calls);
        } catch (const std::exception& error) {
          for (Calls& entry : calls) entry.handle->fail(asError(error));
        }
      });
  for (const auto& handle : handles) handle->setBackground(operation);
  return false;
}

void CallGroup::connectAll(std::vector<Calls>& calls) {
  std::mutex mutex;
  std::optional<Error> cause;
  std::vector<std::function<void()>> jobs;
  for (Calls& entry : calls) {
    if (entry.communicator->isConnected(entry.prepared)) continue;
    jobs.emplace_back([&mutex, &cause, &calls, &entry] {
      try {
        entry.communicator->connect(entry.prepared);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (cause) throw;
        cause = failAll(calls, entry, asError(error));
        throw;
      }
    });
  }
  try {
    runTogether(jobs);
  } catch (const Error&) {
    if (cause) throw *cause;
    throw;
  }
}

void CallGroup::launchAll(std::vector<Calls>& calls) {
  const auto launch = [&calls](Calls& entry) {
    try {
      entry.handle->launch(entry.prepared);
    } catch (const std::exception& error) {
      throw failAll(calls, entry, asError(error));
    }
  };
  // A launch waits while about 1024 others are pending on its GPU. Those may wait for other
  // communicators of the group, which then have threads of their own.
  constexpr size_t kNeverWait = 512;
  const bool mayWait = std::ranges::any_of(calls, [](const Calls& entry) {
    return !entry.prepared.captured && entry.prepared.plan.launches.size() > kNeverWait;
  });
  std::vector<std::function<void()>> jobs;
  for (Calls& entry : calls) {
    if (mayWait) {
      jobs.emplace_back([&launch, &entry] { launch(entry); });
    } else {
      launch(entry);
    }
  }
  runTogether(jobs);
}

// Returns the first error of `cause`, the communicator that has failed. Ends the waits of the
// others too, as none of them can be used any more.
Error CallGroup::failAll(std::vector<Calls>& calls, const Calls& cause, const Error& error) {
  Error first = cause.handle->fail(error);
  for (Calls& entry : calls) {
    entry.handle->fail(
        Error(first.code(),
              fmt::format("Another communicator of the same group failed: {}", first.what())));
  }
  return first;
}

}  // namespace unisono::comm
