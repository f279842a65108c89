// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/settings.h"
#include "diagnose/timeline.h"
#include "plan/plan.h"
#include "runtime/runtime.h"

namespace unisono::comm {

class GroupProfile;

// Tells the timeline of UNISONO_TRACE what one rank of a communicator does and when.
class CallProfile : public std::enable_shared_from_this<CallProfile> {
 public:
  // What is told of the communicator.
  struct Subject {
    int device = 0;
    std::string name, description;
    plan::CommConfig config;
    int64_t created = 0;  // when its creation began
  };
  // Null if nobody wants to know.
  static std::shared_ptr<CallProfile> create(runtime::Runtime& runtime, const Settings& settings,
                                             const Subject& subject);

  // The profile of a group of calls that begins now.
  std::shared_ptr<GroupProfile> beginGroup();
  // Looks which launches have ended since. May be called from any thread.
  void collect();
  // Nothing is told after it. The device must be done, unless calls were aborted.
  void close();

 private:
  friend class GroupProfile;

  // The points before and after the launches of a group.
  struct Running {
    std::shared_ptr<GroupProfile> group;
    std::unique_ptr<runtime::TimedPoint> start, end;
  };

  CallProfile(runtime::Runtime& runtime, const Subject& subject);
  std::unique_ptr<runtime::TimedPoint> takePoint();
  void addRunning(Running running);
  void report(const GroupProfile& group, int64_t start, int64_t end);

  runtime::Runtime& runtime_;
  const Subject subject_;
  std::shared_ptr<diagnose::Timeline> timeline_;

  std::mutex collectMutex_;             // taken before mutex_
  std::vector<uint64_t> namedStreams_;  // collectMutex_ protects it
  std::mutex mutex_;
  std::vector<Running> running_;
  std::vector<std::unique_ptr<runtime::TimedPoint>> points_;  // that can be used again
  bool closed_ = false;
};

// What is told of one group of calls on one communicator. Used by the thread of the group, and then
// by the one that connects and launches it, if that is another one.
class GroupProfile : public std::enable_shared_from_this<GroupProfile> {
 public:
  explicit GroupProfile(std::shared_ptr<CallProfile> profile) : profile_(std::move(profile)) {}

  // A call was made.
  void add(const plan::Task& task, runtime::Stream stream);
  // The function that ends the group returns to the user.
  void returned();

  // A part of the group's work on the CPU, until it is destroyed.
  class Step {
   public:
    Step(GroupProfile* group, const char* name);  // nothing if `group` is null
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    GroupProfile* group_;
    const char* name_;
    int64_t start_;
  };

  // Around the launches of the group on `stream`.
  void beginLaunches(runtime::Stream stream, bool captured);
  void endLaunches(runtime::Stream stream);

 private:
  friend class CallProfile;

  struct Call {
    plan::Task task;
    int64_t start;
    std::string arguments;
  };

  std::shared_ptr<CallProfile> profile_;
  std::vector<Call> calls_;
  diagnose::Timeline::Track caller_;
  uint64_t stream_ = 0;
  diagnose::Timeline::Track launcher_;
  int64_t launched_ = 0;  // when the launches began
  std::unique_ptr<runtime::TimedPoint> start_;
};

}  // namespace unisono::comm
