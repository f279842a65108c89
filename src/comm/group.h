#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/registry.h"

namespace unisono::comm {

// The calls between ncclGroupStart and ncclGroupEnd of one thread; a call outside is a group of
// one.
class Group {
 public:
  // This thread's.
  static Group& current();

  void start() { depth_++; }
  // Closes one level; the last one runs everything, in this order: communicators are made (at
  // once, each on a thread), then calls are planned, peers connected, kernels launched. Throws the
  // first error of the group, which then did nothing: no call of it was launched, and what it made
  // is gone. Returns false when nonblocking communicators are still being made.
  bool end();

  // Closes one level; the last one drops everything.
  void discard();

  int depth() const { return depth_; }

  // A communicator to make. `id` is where the caller has its handle; it is cleared on failure.
  void add(HandleId* id, Handle::Maker make);
  void add(HandleId communicator, const StreamTask& task);
  // A call of this group was refused: the group will fail with this error.
  void fail(const Error& error);

 private:
  struct Making {
    HandleId* id;
    std::shared_ptr<Handle> handle;
    Handle::Maker make;
  };
  struct Calls {
    HandleId id;
    std::shared_ptr<Handle> handle;
    std::shared_ptr<Communicator> communicator;
    std::vector<StreamTask> tasks;
  };

  static void drop(std::vector<Making>& makings);
  static bool makeAll(std::vector<Making>& makings);
  static void runAll(std::vector<Calls>& calls);

  int depth_ = 0;
  std::optional<Error> error_;
  std::vector<Making> makings_;
  std::vector<Calls> calls_;
};

}  // namespace unisono::comm
