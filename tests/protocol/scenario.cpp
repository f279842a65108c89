// SPDX-License-Identifier: Apache-2.0
#include "scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/math.h"

namespace unisono::protocol {
namespace {

using device::DataType;
using device::Reduction;
using plan::Call;
using plan::Task;

constexpr size_t kGuardBytes = 64;

bool isMessage(const Task& task) {
  return task.call == Call::send || task.call == Call::receive;
}
bool isCollective(const Task& task) {
  return task.call <= Call::reduce;
}

// Whether two neighbours in a rank's group may change places without another meaning.
bool commute(const Task& a, const Task& b) {
  if (isCollective(a) != isCollective(b)) return true;
  if (!isMessage(a) || !isMessage(b)) return false;
  return a.call != b.call || a.peer != b.peer;
}

device::ReductionSpec movement(DataType type) {
  return {type, Reduction::sum, false, 0};
}

}  // namespace

const char* nameOf(Call call) {
  static constexpr const char* kNames[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast",
                                           "Reduce",    "Send",      "Receive",       "AllToAll",
                                           "Gather",    "Scatter"};
  return kNames[static_cast<size_t>(call)];
}

RankMemory::RankMemory(int rank, size_t bytes)
    : memory_(testRuntime().allocate(rank, bytes)),
      base_(static_cast<std::byte*>(memory_->address())) {}

void RankMemory::clear(std::byte poison) {
  used_ = 0;
  pieces_.clear();
  expected_.assign(1, poison);
}

size_t RankMemory::take(size_t bytes, size_t alignment, Random& random) {
  const std::byte poison = expected_.front();
  size_t begin = (used_ + kGuardBytes + 255) / 256 * 256;
  if (below(random, 4) != 0) begin += alignment * below(random, 256 / alignment);
  used_ = begin + bytes + kGuardBytes;
  pieces_.emplace_back(begin, begin + bytes);
  if (used_ > memory_->bytes()) throw std::length_error("The test's device memory is full");
  const size_t before = expected_.size();
  expected_.resize(used_, poison);
  std::memset(base_ + (before == 1 ? 0 : before), std::to_integer<int>(poison),
              used_ - (before == 1 ? 0 : before));
  return begin;
}

void RankMemory::set(size_t offset, const void* from, size_t bytes) {
  if (bytes == 0) return;
  std::memcpy(at(offset), from, bytes);
  std::memcpy(expected(offset), from, bytes);
}

std::string RankMemory::compare() const {
  if (used_ == 0 || std::memcmp(base_, expected_.data(), used_) == 0) return {};
  size_t first = 0;
  while (base_[first] == expected_[first]) first++;
  size_t count = 0;
  for (size_t i = first; i < used_; i++) count += base_[i] != expected_[i];
  return fmt::format("{} bytes differ, the first at {:#x} ({:#04x} instead of {:#04x})", count,
                     first, std::to_integer<int>(base_[first]),
                     std::to_integer<int>(expected_[first]));
}

std::string RankMemory::compareGuards() const {
  size_t at = 0;
  for (size_t piece = 0; piece <= pieces_.size(); piece++) {
    const size_t end = piece < pieces_.size() ? pieces_[piece].first : used_;
    for (; at < end; at++) {
      if (base_[at] != expected_[at]) return fmt::format("a store to {:#x}", at);
    }
    if (piece < pieces_.size()) at = pieces_[piece].second;
  }
  return {};
}

Memories makeMemories(size_t bytes) {
  Memories memories;
  for (int rank = 0; rank < kMostRanks; rank++) memories.emplace_back(rank, bytes);
  return memories;
}

Scenario::Scenario(World& world, Memories& memories, Random& random, const ScenarioOptions& options)
    : world_(world), memories_(memories), random_(random), options_(options) {
  const Geometry& geometry = world.geometry();
  if (options_.mostBytes == 0) {
    options_.mostBytes = uint64_t{3} * geometry.slots * geometry.slotBytes *
                         static_cast<uint64_t>(geometry.channels);
  }
  for (size_t r = 0; r < rankCount(); r++) {
    memories_[r].clear(static_cast<std::byte>(below(random_, 256)));
  }
  static constexpr Call kCalls[] = {Call::allReduce, Call::allGather, Call::reduceScatter,
                                    Call::broadcast, Call::reduce,    Call::send,
                                    Call::allToAll,  Call::gather,    Call::scatter};
  for (int g = 0; g < options_.groups; g++) {
    Group group(rankCount());
    for (int c = 0; c < options_.calls; c++) addCall(options_.first, group);
    groups_.push_back(std::move(group));
  }
  if (isFixed()) return;
  const uint64_t groups = 1 + below(random_, static_cast<uint64_t>(options_.mostGroups));
  for (uint64_t g = 0; g < groups; g++) {
    Group group(rankCount());
    text_ += g == 0 ? "[" : " [";
    const uint64_t calls = 1 + below(random_, static_cast<uint64_t>(options_.mostCalls));
    for (uint64_t c = 0; c < calls; c++) {
      const bool any = c > 0 && below(random_, 2) == 0;
      addCall(any ? kCalls[below(random_, std::size(kCalls))] : options_.first, group);
    }
    text_ += "]";
    for (auto& tasks : group) shuffle(tasks);
    groups_.push_back(std::move(group));
  }
}

void Scenario::shuffle(std::vector<Task>& tasks) {
  for (size_t i = 0; tasks.size() > 1 && i < 3 * tasks.size(); i++) {
    const size_t at = below(random_, tasks.size() - 1);
    if (commute(tasks[at], tasks[at + 1])) std::swap(tasks[at], tasks[at + 1]);
  }
}

DataType Scenario::randomType() {
  if (isFixed()) return DataType::int32;
  return static_cast<DataType>(below(random_, device::kDataTypes));
}

uint64_t Scenario::randomCount(size_t elementSize, uint64_t ranks) {
  if (isFixed()) return options_.countsDiffer ? 1 + below(random_, options_.count) : options_.count;
  const uint64_t chunk =
      uint64_t{world_.geometry().slotBytes} * world_.geometry().slicesPerChunk / elementSize;
  const uint64_t most = options_.mostBytes / elementSize / ranks;
  switch (below(random_, 16)) {
    case 0:
      return 0;
    case 1:
      return 1;
    case 2:
    case 3:
    case 4:
      return 1 + below(random_, 40);
    case 5:
      return chunk * (1 + below(random_, 3));
    case 6:
      return chunk * world_.geometry().slots + below(random_, 3) - 1;
    case 7:
    case 8:
    case 9:
      return 1 + below(random_, 2 * chunk);
    default:
      return 1 + below(random_, std::max<uint64_t>(most, 1));
  }
}

Operator Scenario::randomOperator(DataType type, bool& isAverage) {
  static constexpr Reduction kReductions[] = {Reduction::sum,       Reduction::prod,
                                              Reduction::max,       Reduction::min,
                                              Reduction::preMulSum, Reduction::sumPostDivide};
  Operator op;
  op.type = type;
  if (isFixed()) {
    op.reduction = Reduction::sum;
    return op;
  }
  op.reduction = kReductions[below(random_, std::size(kReductions))];
  isAverage = op.reduction == Reduction::sumPostDivide;
  if (isAverage) {
    op.divisor = rankCount();
    if (device::isFloatingPoint(type)) {
      op.reduction = Reduction::preMulSum;
      op.factors.assign(rankCount(), {1.0 / static_cast<double>(rankCount()), 0});
    }
  } else if (op.reduction == Reduction::preMulSum) {
    static constexpr double kFactors[] = {1, 2, -2, 0.5};
    op.factors.assign(rankCount(), {kFactors[below(random_, 4)], random_()});
  }
  return op;
}

// Values whose reduction is exact whatever the order, and rounded nowhere on the way.
uint64_t Scenario::randomElement(const Operator& op, bool isAverage) {
  const DataType type = op.type;
  const int bits = 8 * device::elementBytes(type);
  if (!device::isFloatingPoint(type)) return random_() >> (64 - bits);
  const auto ranks = static_cast<double>(rankCount());
  const auto unit = static_cast<double>(below(random_, 3)) - 1;
  switch (op.reduction) {
    case Reduction::prod: {
      static constexpr double kValues[] = {1, -1, 2, 0.5};
      return fromDouble(type, kValues[below(random_, 4)]);
    }
    case Reduction::max:
    case Reduction::min: {
      // Only numbers: an 8-bit infinity stays one when it is copied, and not in arithmetic.
      const uint64_t code = random_() >> (64 - bits);
      const double value = toDouble(type, code);
      return !std::isfinite(value) || value == 0 ? fromDouble(type, 1) : code;
    }
    default:
      // Adding zero makes a positive zero of a negative one.
      return fromDouble(type, (isAverage ? unit * ranks : unit) + 0.0);
  }
}

void Scenario::fillRandom(int rank, size_t offset, size_t bytes) {
  std::vector<uint64_t> data(bytes / 8 + 1);
  uint64_t state = random_();
  for (uint64_t& word : data) {
    state += 0x9e3779b97f4a7c15u;
    word = (state ^ state >> 29) * 0xbf58476d1ce4e5b9u;
  }
  memories_[static_cast<size_t>(rank)].set(offset, data.data(), bytes);
}

device::ReductionSpec Scenario::specOf(const Operator& op, bool isAverage, bool onDevice,
                                       int rank) {
  device::ReductionSpec spec{op.type, op.reduction, false, 0};
  if (op.reduction == Reduction::sumPostDivide) {
    spec.scalar = op.divisor;
  } else if (op.reduction == Reduction::preMulSum) {
    const Operator::Factor& factor = op.factors[static_cast<size_t>(rank)];
    spec.scalar = scalarOf(op.type, factor);
    if (onDevice && !isAverage) {
      const auto size = device::elementBytes(op.type);
      const uint64_t bits =
          device::isFloatingPoint(op.type) ? fromDouble(op.type, factor.real) : factor.integer;
      RankMemory& memory = memories_[static_cast<size_t>(rank)];
      const size_t offset = memory.take(size, size, random_);
      memory.set(offset, &bits, size);
      spec.scalarIsPointer = true;
      spec.scalar = reinterpret_cast<uint64_t>(memory.at(offset));
    }
  }
  return spec;
}

void Scenario::addCall(Call call, Group& group) {
  switch (call) {
    case Call::allReduce:
    case Call::reduceScatter:
    case Call::reduce:
      return addReduction(call, group);
    case Call::send:
    case Call::receive:
      return addMessages(group);
    default:
      return addMovement(call, group);
  }
}

// Of the buffers of a call. Over LL128, ranks use each other's buffers where these, and the shares,
// consist of vectors; most calls are made so.
size_t Scenario::alignmentOf(size_t size, uint64_t& count) {
  constexpr size_t kVector = 16;
  const bool offers = world_.geometry().wideOfferBytes != ~uint64_t{0};
  if (!offers || (!isFixed() && below(random_, 4) == 0)) return size;
  if (isFixed() || below(random_, 4) != 0) count = roundUp(count, kVector / size);
  return kVector;
}
void Scenario::offerInput(size_t offset, plan::Task& task) {
  if (world_.geometry().wideOfferBytes == ~uint64_t{0}) return;
  task.inputIsOpen = isFixed() || below(random_, 4) != 0;
  task.inputWindow = windowOf(offset, task.inputIsOpen);
}

// All-reduce, reduce-scatter and reduce.
void Scenario::addReduction(Call call, Group& group) {
  const DataType type = randomType();
  const auto size = device::elementBytes(type);
  const size_t parts = call == Call::reduceScatter ? rankCount() : 1;
  uint64_t count = randomCount(size, parts);
  const size_t alignment = alignmentOf(size, count);
  const int root = static_cast<int>(below(random_, rankCount()));
  bool isAverage = false;
  Operator op = randomOperator(type, isAverage);
  const bool onDevice = below(random_, 2) == 0;
  if (onDevice && op.reduction == Reduction::preMulSum && !isAverage) {
    // Every rank may have a factor of its own.
    for (auto& factor : op.factors) {
      if (below(random_, 2) == 0) factor = {-factor.real, random_()};
    }
  }
  const bool inPlace = below(random_, 3) == 0;
  text_ += fmt::format(" {} {}x type {} op {}{}{} root {};", nameOf(call), count,
                       static_cast<int>(type), static_cast<int>(op.reduction),
                       isAverage ? " average" : "", inPlace ? " in place" : "", root);

  std::vector<size_t> inputs, outputs;
  std::vector<std::vector<uint64_t>> elements(rankCount());
  for (size_t r = 0; r < rankCount(); r++) {
    RankMemory& memory = memories_[r];
    const size_t all = count * parts;
    inputs.push_back(memory.take(all * size, alignment, random_));
    std::vector<std::byte> data(all * size);
    for (size_t i = 0; i < all; i++) {
      elements[r].push_back(randomElement(op, isAverage));
      writeElement(data.data(), i, size, elements[r].back());
    }
    memory.set(inputs[r], data.data(), data.size());
    const size_t own = call == Call::reduceScatter ? r * count * size : 0;
    const bool hasOutput = call != Call::reduce || static_cast<int>(r) == root;
    outputs.push_back(inPlace && hasOutput ? inputs[r] + own
                                           : memory.take(count * size, alignment, random_));
    Task task{};
    task.call = call;
    task.input = memory.at(inputs[r]);
    task.output = hasOutput || below(random_, 2) == 0 ? memory.at(outputs[r]) : nullptr;
    task.count = count;
    task.reduction = specOf(op, isAverage, onDevice, static_cast<int>(r));
    task.peer = root;
    task.outputIsOpen = task.output != nullptr && (isFixed() || below(random_, 2) == 0);
    task.window = windowOf(outputs[r], task.outputIsOpen);
    offerInput(inputs[r], task);
    group[r].push_back(task);
  }
  const bool approximate = isAverage && device::isFloatingPoint(type);
  std::vector<uint64_t> operands(rankCount());
  for (size_t r = 0; r < rankCount(); r++) {
    if (call == Call::reduce && static_cast<int>(r) != root) continue;
    const size_t first = call == Call::reduceScatter ? r * count : 0;
    if (call == Call::allReduce && r > 0) {
      std::memcpy(memories_[r].expected(outputs[r]), memories_[0].expected(outputs[0]),
                  count * size);
    } else {
      for (size_t i = 0; i < count; i++) {
        for (size_t s = 0; s < rankCount(); s++) operands[s] = elements[s][first + i];
        writeElement(memories_[r].expected(outputs[r]), i, size, reduceInOrder(op, operands));
      }
    }
    if (approximate) approximate_.push_back({static_cast<int>(r), outputs[r], count, type});
  }
}

// All-gather, broadcast, all-to-all, gather and scatter.
void Scenario::addMovement(Call call, Group& group) {
  const DataType type = randomType();
  const auto size = device::elementBytes(type);
  const size_t ranks = rankCount();
  uint64_t count = randomCount(size, call == Call::broadcast ? 1 : ranks);
  const size_t alignment = alignmentOf(size, count);
  const size_t bytes = count * size;
  const size_t root = below(random_, ranks);
  const bool inPlace = call != Call::allToAll && below(random_, 3) == 0;
  const bool rooted = call != Call::allGather && call != Call::allToAll;
  text_ += fmt::format(" {} {}x{}{} root {};", nameOf(call), count, size,
                       inPlace ? " in place" : "", root);

  const size_t inputParts = call == Call::allToAll || call == Call::scatter ? ranks : 1;
  const size_t outputParts =
      call == Call::allGather || call == Call::allToAll || call == Call::gather ? ranks : 1;
  std::vector<size_t> inputs(ranks), outputs(ranks);
  std::vector<bool> reads(ranks), writes(ranks);
  for (size_t r = 0; r < ranks; r++) {
    RankMemory& memory = memories_[r];
    reads[r] = !rooted || r == root || call == Call::gather;
    writes[r] = !rooted || r == root || call != Call::gather;
    inputs[r] = memory.take(inputParts * bytes, alignment, random_);
    if (inPlace && reads[r] && writes[r]) {
      if (inputParts > outputParts) {
        outputs[r] = inputs[r] + r * bytes;
      } else {
        outputs[r] = memory.take(outputParts * bytes, alignment, random_);
        inputs[r] = outputs[r] + (outputParts > 1 ? r * bytes : 0);
      }
    } else {
      outputs[r] = memory.take(outputParts * bytes, alignment, random_);
    }
    if (reads[r]) fillRandom(static_cast<int>(r), inputs[r], inputParts * bytes);
    const bool open = isFixed() || below(random_, 2) == 0;
    group[r].push_back({call, memory.at(inputs[r]), memory.at(outputs[r]), count, movement(type),
                        static_cast<int>(root), open, windowOf(outputs[r], open)});
  }
  // Reads go before writes: in place, an output overlaps an input.
  std::vector<std::vector<std::byte>> sent(ranks);
  for (size_t r = 0; r < ranks; r++) {
    const std::byte* from = memories_[r].at(inputs[r]);
    sent[r].assign(from, from + inputParts * bytes);
  }
  auto deliver = [&](size_t from, size_t inputPart, size_t to, size_t outputPart) {
    if (bytes == 0) return;
    std::memcpy(memories_[to].expected(outputs[to]) + outputPart * bytes,
                sent[from].data() + inputPart * bytes, bytes);
  };
  for (size_t r = 0; r < ranks; r++) {
    for (size_t s = 0; s < ranks; s++) {
      if (call == Call::allGather) deliver(s, 0, r, s);
      if (call == Call::allToAll) deliver(s, r, r, s);
    }
    if (call == Call::broadcast) deliver(root, 0, r, 0);
    if (call == Call::gather) deliver(r, 0, root, r);
    if (call == Call::scatter) deliver(root, r, r, 0);
  }
}

void Scenario::addMessage(int from, int to, Group& group) {
  const DataType type = randomType();
  const auto size = device::elementBytes(type);
  const uint64_t count = randomCount(size, 1);
  const bool open = isFixed() || below(random_, 2) == 0;
  text_ += fmt::format(" {}->{} {}x{}{};", from, to, count, size, open ? " open" : "");
  RankMemory& source = memories_[static_cast<size_t>(from)];
  RankMemory& destination = memories_[static_cast<size_t>(to)];
  const size_t input = source.take(count * size, size, random_);
  fillRandom(from, input, count * size);
  size_t output = input;
  if (from != to || below(random_, 4) != 0) {
    output = sharedOutput_ ? *sharedOutput_ : destination.take(count * size, size, random_);
    if (isFixed()) sharedOutput_ = output;
    std::memcpy(destination.expected(output), source.expected(input), count * size);
  }
  group[static_cast<size_t>(from)].push_back(
      {Call::send, source.at(input), nullptr, count, movement(type), to});
  group[static_cast<size_t>(to)].push_back({Call::receive, nullptr, destination.at(output), count,
                                            movement(type), from, open, windowOf(output, open)});
}

void Scenario::addMessages(Group& group) {
  const int ranks = world_.ranks();
  if (isFixed()) return addMessage(ranks > 2 && groups_.size() % 2 == 1 ? 2 : 0, 1, group);
  auto any = [&] { return static_cast<int>(below(random_, rankCount())); };
  switch (below(random_, 4)) {
    case 0: {  // everybody to a neighbour
      const int delta = any();
      for (int r = 0; r < ranks; r++) addMessage(r, (r + delta) % ranks, group);
      break;
    }
    case 1: {  // many between one pair, both ways
      const int a = any(), b = any();
      for (uint64_t i = 1 + below(random_, 12); i > 0; i--) {
        addMessage(below(random_, 2) == 0 ? a : b, below(random_, 2) == 0 ? a : b, group);
      }
      break;
    }
    default:
      for (uint64_t i = 1 + below(random_, 12); i > 0; i--) addMessage(any(), any(), group);
      break;
  }
}

// Every rank's memory is one window.
constexpr uint64_t kWindow = 5 * device::kWindowSlots + 9;

device::WindowReference Scenario::windowOf(size_t offset, bool open) const {
  return world_.geometry().windows && open ? device::WindowReference{kWindow, offset}
                                           : device::WindowReference{};
}

// Most pairs have mapped the windows, some do it or end it during the calls.
void Scenario::enqueueWindows() {
  if (!world_.geometry().windows) return;
  for (int rank = 0; rank < world_.ranks(); rank++) {
    for (int peer = 0; peer < world_.ranks(); peer++) {
      if (peer == rank || below(random_, 8) == 0) continue;
      std::byte* base = memories_[static_cast<size_t>(peer)].at(0);
      const auto delay = [&] { return below(random_, 2) == 0 ? 0 : below(random_, 3000); };
      world_.enqueueWindow(rank, peer, device::WindowChange::map, kWindow, base, delay());
      if (below(random_, 3) != 0) continue;
      world_.enqueueWindow(rank, peer, device::WindowChange::unmap, kWindow, base, delay());
    }
  }
}

void Scenario::enqueue() {
  enqueueWindows();
  std::vector<int> turns;
  for (int rank = 0; rank < world_.ranks(); rank++) turns.insert(turns.end(), groups_.size(), rank);
  std::shuffle(turns.begin(), turns.end(), random_);
  std::vector<size_t> next(rankCount());
  for (int rank : turns) {
    if (!isFixed() && below(random_, 8) == 0) world_.enqueueDelay(rank, below(random_, 2000));
    world_.enqueue(rank, groups_[next[static_cast<size_t>(rank)]++][static_cast<size_t>(rank)]);
  }
}

void Scenario::compareApproximate(std::string& wrong) {
  // Every rank's part of an average is rounded twice in float, and again at each hop.
  constexpr double kTolerance = 1e-5;
  for (const Approximate& output : approximate_) {
    RankMemory& memory = memories_[static_cast<size_t>(output.rank)];
    const auto size = device::elementBytes(output.type);
    for (size_t i = 0; i < output.count; i++) {
      const uint64_t actual = readElement(memory.at(output.offset), i, size);
      const double want =
          toDouble(output.type, readElement(memory.expected(output.offset), i, size));
      const double have = toDouble(output.type, actual);
      if (!(std::fabs(have - want) <= kTolerance)) {
        wrong += fmt::format(" rank {}: element {} of an average is {} instead of {};", output.rank,
                             i, have, want);
        break;
      }
      writeElement(memory.expected(output.offset), i, size, actual);
    }
  }
}

std::string Scenario::compareGuards() const {
  std::string wrong;
  for (size_t r = 0; r < rankCount(); r++) {
    const std::string store = memories_[r].compareGuards();
    if (!store.empty()) wrong += fmt::format(" rank {}: {};", r, store);
  }
  return wrong + world_.usersLeft();
}

std::string Scenario::run() {
  enqueue();
  std::string wrong;
  const std::vector<std::string> errors = world_.synchronize();
  for (size_t r = 0; r < errors.size(); r++) {
    if (!errors[r].empty()) wrong += fmt::format(" rank {}: {};", r, errors[r]);
  }
  if (!wrong.empty()) return wrong;
  compareApproximate(wrong);
  for (size_t r = 0; r < rankCount(); r++) {
    const std::string difference = memories_[r].compare();
    if (!difference.empty()) wrong += fmt::format(" rank {}: {};", r, difference);
  }
  return wrong + world_.usersLeft() + world_.unmarkedBlocks();
}

}  // namespace unisono::protocol
