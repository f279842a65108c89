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

  // A communicator to make. `id` is where the caller has its handle; it is cleared on failure. With
  // `keeper`, `make` gives none, so that the handle is cleared in any case; a making in the
  // background then belongs to `keeper`.
  void add(HandleId* id, Handle::Maker make, std::shared_ptr<Handle> keeper = nullptr);
  void add(HandleId communicator, const StreamTask& task);

  // Runs `body`, a call of this group. If it throws, the group will fail with that error; inside
  // another group the level of the call is closed and the error thrown at once.
  template <typename Body>
  void attempt(Body&& body) {
    try {
      body();
    } catch (const Error& error) {
      refuse(error);
    } catch (const std::exception& error) {
      refuse(Error(ErrorCode::systemError, error.what()));
    }
  }

 private:
  struct Making {
    HandleId* id;
    HandleId handleId;  // *id, which the caller may have changed since
    std::shared_ptr<Handle> handle;
    Handle::Maker make;
    std::shared_ptr<Handle> keeper;
  };
  struct Calls {
    HandleId id;
    std::shared_ptr<Handle> handle;
    std::shared_ptr<Communicator> communicator;
    std::vector<StreamTask> tasks;
  };

  void refuse(const Error& error);
  static void forget(Making& making);
  static void drop(std::vector<Making>& makings);
  static bool makeAll(std::vector<Making>& makings);
  static void runAll(std::vector<Calls>& calls);

  int depth_ = 0;
  std::optional<Error> error_;
  std::vector<Making> makings_;
  std::vector<Calls> calls_;
};

}  // namespace unisono::comm
