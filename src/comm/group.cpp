#include "comm/group.h"

#include <algorithm>
#include <future>

#include "base/thread.h"

namespace unisono::comm {
namespace {

// Runs `jobs` at once, each on a thread of its own, and throws the first error when all have ended.
void runTogether(const std::vector<std::function<void()>>& jobs) {
  std::mutex mutex;
  std::optional<Error> first;
  auto run = [&](const std::function<void()>& job) {
    try {
      job();
    } catch (const Error& error) {
      std::lock_guard lock(mutex);
      if (!first) first = error;
    } catch (const std::exception& error) {
      std::lock_guard lock(mutex);
      if (!first) first = internalError("{}", error.what());
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
  if (!first && !jobs.empty()) run(jobs.front());
  for (std::thread& thread : threads) thread.join();
  if (first) throw *first;
}

}  // namespace

Group& Group::current() {
  thread_local Group group;
  return group;
}

void Group::add(HandleId* id, Handle::Maker make, std::shared_ptr<Handle> keeper) {
  makings_.push_back({id, *id, findHandle(*id), std::move(make), std::move(keeper)});
}

void Group::add(HandleId communicator, const StreamTask& task) {
  auto entry = std::find_if(calls_.begin(), calls_.end(),
                            [&](const Calls& calls) { return calls.id == communicator; });
  if (entry == calls_.end()) {
    auto handle = findHandle(communicator);
    auto made = handle->usable();
    calls_.push_back({communicator, std::move(handle), std::move(made), {}});
    entry = calls_.end() - 1;
  }
  entry->tasks.push_back(task);
}

void Group::refuse(const Error& error) {
  if (!error_) error_ = error;
  if (depth_ == 1) return;
  depth_--;
  throw error;
}

bool Group::end() {
  if (depth_ == 0) {
    throw invalidUsage("ncclGroupEnd without ncclGroupStart")
        .remedy("Call ncclGroupStart once for every ncclGroupEnd, on the same thread");
  }
  if (--depth_ > 0) return true;
  // Whatever happens, the next group of this thread starts empty.
  auto makings = std::move(makings_);
  auto calls = std::move(calls_);
  auto error = std::move(error_);
  makings_.clear();
  calls_.clear();
  error_.reset();
  if (error) {
    drop(makings);
    throw *error;
  }
  const bool allMade = makeAll(makings);
  runAll(calls);
  return allMade;
}

void Group::forget(Making& making) {
  releaseIfLive(making.handleId);
  *making.id = nullptr;
}

void Group::drop(std::vector<Making>& makings) {
  for (Making& making : makings) forget(making);
}

void Group::discard() {
  if (depth_ == 0 || --depth_ > 0) return;
  drop(makings_);
  makings_.clear();
  calls_.clear();
  error_.reset();
}

bool Group::makeAll(std::vector<Making>& makings) {
  bool allMade = true;
  std::vector<std::function<void()>> jobs;
  for (Making& making : makings) {
    if (making.handle->blocking()) {
      jobs.emplace_back([&making] {
        making.handle->build(making.make);
        making.handle->communicator();  // throws what the making threw
      });
    } else {
      making.handle->buildInBackground(making.make);
      if (making.keeper != nullptr) {
        making.keeper->keep(making.handle);
        forget(making);
      }
      allMade = false;
    }
  }
  try {
    runTogether(jobs);
  } catch (const Error&) {
    drop(makings);
    throw;
  }
  for (Making& making : makings) {
    if (making.keeper != nullptr && making.handle->blocking()) forget(making);
  }
  return allMade;
}

void Group::runAll(std::vector<Calls>& calls) {
  std::vector<Communicator::Prepared> prepared;
  prepared.reserve(calls.size());
  for (Calls& entry : calls) prepared.push_back(entry.communicator->prepare(entry.tasks));

  std::vector<std::function<void()>> connections;
  for (size_t i = 0; i < calls.size(); i++) {
    if (calls[i].communicator->isConnected(prepared[i])) continue;
    connections.emplace_back([&entry = calls[i], &plan = prepared[i]] {
      try {
        entry.communicator->connect(plan);
      } catch (const Error& error) {
        // Peers may have connected half: nothing that follows would fit theirs.
        entry.handle->fail(error);
        throw;
      }
    });
  }
  runTogether(connections);
  for (size_t i = 0; i < calls.size(); i++) {
    try {
      calls[i].communicator->launch(prepared[i]);
    } catch (const Error& error) {
      calls[i].handle->fail(error);
      throw;
    }
  }
}

}  // namespace unisono::comm
