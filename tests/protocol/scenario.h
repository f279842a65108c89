// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"
#include "world.h"

// Random groups of calls on all ranks of a world, with the expected content of memory afterwards.
namespace unisono::protocol {

// A rank's buffers: pieces of one range of its device, with guard zones in between. `expected` is
// what the range must hold when the calls are done, so that one comparison sees wrong results,
// stray stores and changed inputs.
class RankMemory {
 public:
  RankMemory(int rank, size_t bytes);

  void clear(std::byte poison);
  // A piece of `bytes` bytes whose address is aligned to `alignment` and to nothing more, most of
  // the time. Returns its offset.
  size_t take(size_t bytes, size_t alignment, Random& random);
  std::byte* at(size_t offset) const { return base_ + offset; }
  std::byte* expected(size_t offset) { return expected_.data() + offset; }
  // Sets the bytes of an input, in memory and as expected.
  void set(size_t offset, const void* from, size_t bytes);

  // Empty, or where the first difference is.
  std::string compare() const;
  size_t used() const { return used_; }
  // Looks at the guard zones only.
  std::string compareGuards() const;

 private:
  std::shared_ptr<runtime::DeviceMemory> memory_;
  std::byte* base_;
  std::vector<std::byte> expected_;
  std::vector<std::pair<size_t, size_t>> pieces_;  // begin and end
  size_t used_ = 0;
};

// The buffers of every rank, kept from one scenario to the next.
using Memories = std::vector<RankMemory>;
Memories makeMemories(size_t bytes);

struct ScenarioOptions {
  plan::Call first = plan::Call::allReduce;  // what the first group begins with; send: messages
  uint64_t mostBytes = 0;                    // of a rank's share of one call; 0: from the geometry
  int mostGroups = 3;
  int mostCalls = 4;  // of one group

  // If not 0: exactly so many groups of `calls` calls of `count` 4-byte integers, or each of up to
  // `count`, summed where it reduces. Messages go to rank 1, all into one buffer: from rank 0, and
  // every second one from rank 2 if there is one.
  int groups = 0;
  int calls = 1;
  uint64_t count = 0;
  bool countsDiffer = false;
};

class Scenario {
 public:
  Scenario(World& world, Memories& memories, Random& random, const ScenarioOptions& options);

  // Enqueues everything, waits and compares. Empty, or what is wrong.
  std::string run();
  // Enqueues everything: ranks in any order, each in the order of its groups.
  void enqueue();
  // After an aborted run: empty, or which store was outside of the buffers.
  std::string compareGuards() const;
  // The calls, for the report of a failure.
  const std::string& text() const { return text_; }

 private:
  struct Approximate {  // an output that is compared by value
    int rank;
    size_t offset;
    size_t count;
    device::DataType type;
  };
  using Group = std::vector<std::vector<plan::Task>>;  // [rank]

  bool isFixed() const { return options_.groups > 0; }
  size_t rankCount() const { return static_cast<size_t>(world_.ranks()); }
  void addCall(plan::Call call, Group& group);
  void addMessages(Group& group);
  void addMessage(int from, int to, Group& group);
  size_t alignmentOf(size_t size, uint64_t& count);
  void offerInput(size_t offset, plan::Task& task);
  void addReduction(plan::Call call, Group& group);
  void addMovement(plan::Call call, Group& group);
  void shuffle(std::vector<plan::Task>& tasks);

  void enqueueWindows();
  device::WindowReference windowOf(size_t offset, bool open) const;

  device::DataType randomType();
  uint64_t randomCount(size_t elementSize, uint64_t ranks);
  Operator randomOperator(device::DataType type, bool& isAverage);
  uint64_t randomElement(const Operator& op, bool isAverage);
  void fillRandom(int rank, size_t offset, size_t bytes);
  device::ReductionSpec specOf(const Operator& op, bool isAverage, bool onDevice, int rank);
  void compareApproximate(std::string& wrong);

  World& world_;
  Memories& memories_;
  Random& random_;
  ScenarioOptions options_;
  std::vector<Group> groups_;
  std::vector<Approximate> approximate_;
  std::optional<size_t> sharedOutput_;  // of the messages of a fixed scenario
  std::string text_;
};

const char* nameOf(plan::Call call);

}  // namespace unisono::protocol
