// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "element_types.h"
#include "support/fake_net.h"
#include "support/seed.h"
#include "testing.h"
#include "tuning/registry.h"
#include "unisono/config.h"

// UNISONO_DETERMINISTIC and the flag of ncclConfig_t.CTAPolicy: the bits of a result depend on the
// inputs, the operator and the number of ranks. They are compared with those of one call of all
// elements, under everything else that may differ: position and length of a call, alignment,
// channels, buffers, nodes and every algorithm.
namespace unisono::system_test {
namespace {

using bench::ElementType;

enum class Operation { allReduce, reduce, reduceScatter };
constexpr Operation kOperations[] = {Operation::allReduce, Operation::reduce,
                                     Operation::reduceScatter};

struct Shape {
  int nodes = 1, ranksPerNode = 1;
};

// Which elements of the result on a rank are computed, and how they are divided into calls.
struct Calls {
  size_t count = 0;
  int parts = 1;         // calls of one group
  bool inPlace = false;  // all-reduce and reduce
  size_t begin = 0;      // the first element
  size_t offset = 0;     // of the first call in its buffers, in elements
};

// What every rank contributes to the results of every rank (of reduce-scatter; otherwise of rank
// 0): numbers of magnitudes whose sums are rounded.
class Inputs {
 public:
  Inputs(ElementType type, uint64_t seed, int ranks, size_t count)
      : width_(bench::elementInfo(type).bytes), ranks_(ranks) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < ranks * ranks; i++) {
      std::vector<std::byte>& values = values_.emplace_back(count * width_);
      for (size_t at = 0; at < values.size(); at += width_) {
        const uint64_t bits = random();
        const double fraction = std::ldexp(static_cast<double>(random() >> 12), -52);
        const double magnitude = std::ldexp(1 + fraction, static_cast<int>(bits & 7) - 4);
        const uint64_t element =
            bench::encodeElement(type, (bits >> 3 & 1) == 0 ? magnitude : -magnitude);
        std::memcpy(values.data() + at, &element, width_);
      }
    }
  }
  size_t width() const { return width_; }
  // Copies elements begin .. begin + count - 1 of what `rank` contributes to `target`.
  void copy(std::byte* to, int rank, int target, size_t begin, size_t count) const {
    const int index = rank * ranks_ + target;
    const auto& values = values_[static_cast<size_t>(index)];
    std::memcpy(to, values.data() + begin * width_, count * width_);
  }

 private:
  const size_t width_;
  const int ranks_;
  std::vector<std::vector<std::byte>> values_;
};

// The results of all ranks, one after the other, by the elements of `calls`.
std::vector<std::byte> run(const Ranks& ranks, Operation operation, ElementType type,
                           ncclRedOp_t op, const Inputs& inputs, const Calls& calls) {
  const size_t width = inputs.width();
  const int n = ranks.size(), root = n / 2;
  const int targets = operation == Operation::reduceScatter ? n : 1;
  // The calls follow each other in the buffers; those of reduce-scatter have a share for each rank.
  const size_t each = calls.count / static_cast<size_t>(calls.parts);
  const auto countOf = [&](int part) {
    return part + 1 == calls.parts ? calls.count - static_cast<size_t>(part) * each : each;
  };
  std::vector<DeviceBuffer> in, out;
  for (int rank = 0; rank < n; rank++) {
    std::vector<std::byte> values((calls.offset + calls.count * static_cast<size_t>(targets)) *
                                  width);
    std::byte* to = values.data() + calls.offset * width;
    for (int part = 0; part < calls.parts; part++) {
      for (int target = 0; target < targets; target++) {
        inputs.copy(to, rank, target, calls.begin + static_cast<size_t>(part) * each,
                    countOf(part));
        to += countOf(part) * width;
      }
    }
    const std::vector<std::byte> poison((calls.offset + calls.count) * width, std::byte{0xa7});
    in.emplace_back(ranks.device(rank), values.size());
    out.emplace_back(ranks.device(rank), poison.size());
    device::copy(in.back().as(), values.data(), values.size());
    device::copy(out.back().as(), poison.data(), poison.size());
  }
  ranks.inGroup([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto ncclType = static_cast<ncclDataType_t>(type);
    for (int part = 0; part < calls.parts; part++) {
      const size_t begin = static_cast<size_t>(part) * each;
      const size_t count = countOf(part);
      std::byte* to = (calls.inPlace ? in[r] : out[r]).as() + (calls.offset + begin) * width;
      const std::byte* from =
          in[r].as() + (calls.offset + begin * static_cast<size_t>(targets)) * width;
      if (operation == Operation::allReduce) {
        check(ncclAllReduce(from, to, count, ncclType, op, ranks.comm(rank), ranks.stream(rank)));
      } else if (operation == Operation::reduce) {
        check(
            ncclReduce(from, to, count, ncclType, op, root, ranks.comm(rank), ranks.stream(rank)));
      } else {
        check(
            ncclReduceScatter(from, to, count, ncclType, op, ranks.comm(rank), ranks.stream(rank)));
      }
    }
  });
  ranks.synchronize();
  std::vector<std::byte> results;
  for (int rank = 0; rank < n; rank++) {
    if (operation == Operation::reduce && rank != root) continue;
    std::vector<std::byte> result(calls.count * width);
    device::copy(result.data(),
                 (calls.inPlace ? in : out)[static_cast<size_t>(rank)].as() + calls.offset * width,
                 result.size());
    results.insert(results.end(), result.begin(), result.end());
  }
  return results;
}

// Whether the elements of `calls` on each rank are those of `all`, which has `allCount` on each.
bool isPart(const std::vector<std::byte>& some, const Calls& calls,
            const std::vector<std::byte>& all, size_t allCount, size_t width) {
  const size_t ranks = all.size() / (allCount * width);
  if (some.size() != ranks * calls.count * width) return false;
  for (size_t rank = 0; rank < ranks; rank++) {
    if (std::memcmp(some.data() + rank * calls.count * width,
                    all.data() + (rank * allCount + calls.begin) * width,
                    calls.count * width) != 0) {
      return false;
    }
  }
  return true;
}

// 1 / 6 is not exact, so that means are rounded.
constexpr int kRanks = 6;
constexpr size_t kCount = scaled(30'000, 6'000);

struct Reduction {
  ElementType type;
  ncclRedOp_t op;
};

struct Environment {
  std::map<std::string, std::string> variables;
  Shape shape;
  int policy = NCCL_CONFIG_UNDEF_INT;  // ncclConfig_t.CTAPolicy

  std::string text() const {
    std::string result = policy == NCCL_CONFIG_UNDEF_INT ? "" : std::to_string(policy) + " ";
    for (const auto& [name, value] : variables) result.append(name).append("=" + value + " ");
    return result + std::to_string(shape.nodes) + "x" + std::to_string(shape.ranksPerNode);
  }
};

// An algorithm and protocol that the library has code for.
struct Path {
  tuning::Algorithm algorithm;
  tuning::Protocol protocol;

  std::string text() const {
    return std::string(tuning::nameOf(algorithm)) + " " + std::string(tuning::nameOf(protocol));
  }
};

std::vector<Path> reducingPaths() {
  const tuning::Registry& registry = tuning::libraryRegistry();
  std::vector<Path> paths;
  for (int a = 0; a < unisono::device::kAlgorithms; a++) {
    for (int p = 0; p < unisono::device::kProtocols; p++) {
      const Path path{static_cast<tuning::Algorithm>(a), static_cast<tuning::Protocol>(p)};
      bool any = false;
      for (const tuning::Operation operation :
           {tuning::Operation::allReduce, tuning::Operation::reduceScatter,
            tuning::Operation::reduce}) {
        any = any || registry.has(operation, path.algorithm, path.protocol) ||
              registry.hasForced(operation, path.algorithm, path.protocol);
      }
      if (any) paths.push_back(path);
    }
  }
  return paths;
}

std::vector<Environment> environmentsOf(const Path& path) {
  std::map<std::string, std::string> variables;
  if (path.algorithm == tuning::Algorithm::collNetChain ||
      path.algorithm == tuning::Algorithm::collNetDirect) {
    variables = testing::collNetVariables();
  }
  variables["NCCL_ALGO"] = tuning::nameOf(path.algorithm);
  variables["NCCL_PROTO"] = tuning::nameOf(path.protocol);
  return {{variables, {1, 6}}, {variables, {3, 2}}};
}

std::vector<Environment> mixedEnvironments() {
  return {{{}, {1, 6}},
          {{}, {2, 3}},
          {{}, {6, 1}},
          {{{"NCCL_MAX_NCHANNELS", "1"}}, {1, 6}},
          {{{"NCCL_MIN_NCHANNELS", "5"}}, {2, 3}},
          {{{"NCCL_BUFFSIZE", "8192"}}, {1, 6}},
          {{{"UNISONO_ZERO_COPY", "0"}}, {1, 6}}};
}

// A machine with a NIC for each GPU, so that each can be a head of CollNet.
const bool topologySet = [] {
  ::setenv("UNISONO_HOST_TOPOLOGY", UNISONO_TOPOLOGY, 0);
  return true;
}();

class Determinism : public ::testing::Test {
 protected:
  explicit Determinism(std::vector<Reduction> reductions = {{ElementType::float32, ncclSum},
                                                            {ElementType::float16, ncclAvg}})
      : reductions_(std::move(reductions)) {
    for (const Reduction& reduction : reductions_) {
      inputs_.emplace_back(reduction.type, seed_, kRanks, kCount);
    }
    log_.take();
  }

  // The results of all elements that others are compared with.
  void setExpected(const Environment& environment) {
    within(environment, [&](const Ranks& ranks) {
      for (size_t i = 0; i < reductions_.size(); i++) {
        for (const Operation operation : kOperations) {
          expected_[{i, operation}] = run(ranks, operation, reductions_[i].type, reductions_[i].op,
                                          inputs_[i], {.count = kCount});
        }
      }
    });
  }

  // Returns how many calls have other results.
  int differences(const Environment& environment) {
    int differences = 0;
    within(environment, [&](const Ranks& ranks) {
      for (size_t i = 0; i < reductions_.size(); i++) {
        const auto [type, op] = reductions_[i];
        const size_t width = inputs_[i].width();
        for (const Operation operation : kOperations) {
          for (const Calls& calls : divisions()) {
            if (calls.inPlace && operation == Operation::reduceScatter) continue;
            const std::vector<std::byte> result =
                run(ranks, operation, type, op, inputs_[i], calls);
            if (isPart(result, calls, expected_[{i, operation}], kCount, width)) continue;
            differences++;
            last_ = environment.text() + " " + bench::elementInfo(type).name + " operation " +
                    std::to_string(static_cast<int>(operation)) + " elements " +
                    std::to_string(calls.begin) + " to " +
                    std::to_string(calls.begin + calls.count) + " in " +
                    std::to_string(calls.parts) + " calls";
          }
        }
      }
    });
    return differences;
  }

  std::vector<Calls> divisions() {
    const size_t begin = random_() % (kCount / 2);
    return {{.count = kCount},
            {.count = 1},
            {.count = 1023, .begin = begin, .offset = 1},
            {.count = kCount / 2 + 1, .parts = 3, .offset = 3},
            {.count = kCount / 3, .inPlace = true, .begin = begin}};
  }

  const uint64_t seed_ = test::seed();
  std::mt19937_64 random_{seed_};
  std::vector<Reduction> reductions_;
  std::vector<Inputs> inputs_;
  std::map<std::pair<size_t, Operation>, std::vector<std::byte>> expected_;
  std::string last_;  // that differed
  static LaunchLog log_;

 private:
  void within(const Environment& environment, const std::function<void(const Ranks&)>& body) {
    std::vector<std::unique_ptr<Setting>> settings;
    for (const auto& [name, value] : environment.variables) {
      settings.push_back(std::make_unique<Setting>(name.c_str(), value.c_str()));
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = environment.policy;
    body(Ranks(environment.shape.nodes, environment.shape.ranksPerNode, &config));
  }
};
LaunchLog Determinism::log_;

class EveryType : public Determinism {
 protected:
  EveryType() : Determinism(everyType()) {}
  static std::vector<Reduction> everyType() {
    std::vector<Reduction> reductions = {{ElementType::float32, ncclProd},
                                         {ElementType::float32, ncclAvg}};
    for (const bench::ElementInfo& info : bench::elementTypes()) {
      if (info.kind != bench::NumberKind::floating) continue;  // integers have one result
      reductions.push_back({info.type, ncclSum});
    }
    return reductions;
  }
};

TEST_F(EveryType, ResultsDependOnTheInputsOnly) {
  const Setting deterministic("UNISONO_DETERMINISTIC", "1");
  setExpected({{}, {1, 6}});
  for (const Environment& environment : mixedEnvironments()) {
    EXPECT_EQ(differences(environment), 0) << last_;
  }
}

// An algorithm that reduces in another order must not be chosen, whatever the user forces.
TEST_F(Determinism, ResultsDoNotDependOnTheAlgorithm) {
  const Setting deterministic("UNISONO_DETERMINISTIC", "1");
  setExpected({{}, {1, 6}});
  for (const Path& path : reducingPaths()) {
    for (const Environment& environment : environmentsOf(path)) {
      EXPECT_EQ(differences(environment), 0) << last_;
    }
  }
}

TEST_F(Determinism, OfOneCommunicatorIsAFlagOfItsConfiguration) {
  {
    const Setting deterministic("UNISONO_DETERMINISTIC", "1");
    setExpected({{}, {1, 6}});
  }
  int differing = 0;
  for (const Shape shape : {Shape{1, 6}, Shape{2, 3}, Shape{6, 1}}) {
    Environment environment{{}, shape};
    environment.policy = NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO;
    differing += differences(environment);
    environment.policy |= UNISONO_CTA_POLICY_DETERMINISTIC;
    EXPECT_EQ(differences(environment), 0) << last_;
  }
  EXPECT_GT(differing, 0);
}

// The algorithm of a small all-reduce: a ring only where the order is fixed.
class Inheritance : public Determinism {
 protected:
  std::string algorithmOf(const std::vector<ncclComm_t>& comms) {
    std::vector<DeviceStream> streams;
    std::vector<DeviceBuffer> buffers;
    log_.take();
    check(ncclGroupStart());
    for (ncclComm_t comm : comms) {
      int device = -1;
      check(ncclCommCuDevice(comm, &device));
      float* buffer = buffers.emplace_back(device, 64 * sizeof(float)).as<float>();
      check(ncclAllReduce(buffer, buffer, 64, ncclFloat, ncclSum, comm,
                          streams.emplace_back(device)));
    }
    check(ncclGroupEnd());
    for (const DeviceStream& stream : streams) stream.synchronize();
    std::string lines;
    for (const std::string& line : log_.take()) lines += line + "\n";
    if (lines.find("Reduce of 64 elements with Ring ") != std::string::npos) return "ring";
    if (lines.find("with Direct LL") != std::string::npos) return "direct";
    return lines;
  }
  // What `make(rank, comm)` makes in a group for each of `ranks` ranks.
  template <typename Make>
  std::vector<ncclComm_t> madeBy(int ranks, Make make) {
    std::vector<ncclComm_t> comms(static_cast<size_t>(ranks));
    check(ncclGroupStart());
    for (int rank = 0; rank < ranks; rank++) {
      device::use(deviceOf(rank));
      check(make(rank, &comms[static_cast<size_t>(rank)]));
    }
    check(ncclGroupEnd());
    made_.insert(made_.end(), comms.begin(), comms.end());
    return comms;
  }
  ~Inheritance() override {
    for (ncclComm_t comm : made_) ncclCommDestroy(comm);
  }

 private:
  std::vector<ncclComm_t> made_;
};

TEST_F(Inheritance, IsThatOfOtherFields) {
  ncclConfig_t flagged = NCCL_CONFIG_INITIALIZER;
  flagged.CTAPolicy = UNISONO_CTA_POLICY_DETERMINISTIC;
  ncclConfig_t other = NCCL_CONFIG_INITIALIZER;
  const ncclUniqueId id = newId(), plainId = newId();
  const auto plain = madeBy(
      3, [&](int rank, ncclComm_t* comm) { return ncclCommInitRank(comm, 3, plainId, rank); });
  EXPECT_EQ(algorithmOf(plain), "direct");
  const auto parent = madeBy(3, [&](int rank, ncclComm_t* comm) {
    return ncclCommInitRankConfig(comm, 3, id, rank, &flagged);
  });
  EXPECT_EQ(algorithmOf(parent), "ring");
  const auto splitOf = [&](const std::vector<ncclComm_t>& of, ncclConfig_t* config) {
    return madeBy(3, [&](int rank, ncclComm_t* comm) {
      return ncclCommSplit(of[static_cast<size_t>(rank)], 0, rank, comm, config);
    });
  };
  const auto split = splitOf(parent, nullptr);
  EXPECT_EQ(algorithmOf(split), "ring");
  EXPECT_EQ(algorithmOf(splitOf(split, nullptr)), "ring");
  EXPECT_EQ(algorithmOf(splitOf(parent, &other)), "direct");
  EXPECT_EQ(algorithmOf(splitOf(plain, &flagged)), "ring");
  int excluded[] = {2};
  EXPECT_EQ(algorithmOf(madeBy(2,
                               [&](int rank, ncclComm_t* comm) {
                                 return ncclCommShrink(parent[static_cast<size_t>(rank)], excluded,
                                                       1, comm, nullptr, NCCL_SHRINK_DEFAULT);
                               })),
            "ring");
  // The new rank of a growth has nothing to inherit and must say so itself.
  ncclUniqueId growth;
  check(ncclCommGetUniqueId(parent[0], &growth));
  EXPECT_EQ(algorithmOf(madeBy(4,
                               [&](int rank, ncclComm_t* comm) {
                                 if (rank == 3) {
                                   return ncclCommGrow(nullptr, 4, &growth, rank, comm, &flagged);
                                 }
                                 return ncclCommGrow(parent[static_cast<size_t>(rank)], 4,
                                                     rank == 0 ? &growth : nullptr, -1, comm,
                                                     nullptr);
                               })),
            "ring");
  // It is not for the variable that overrides NCCL's policies to take it away.
  const Setting policy("NCCL_CTA_POLICY", "DEFAULT");
  EXPECT_EQ(algorithmOf(splitOf(plain, &flagged)), "ring");
}

// Otherwise the tests above could not fail: each algorithm runs in one of its environments, and
// some results differ.
TEST_F(Determinism, WithoutItResultsDependOnTheAlgorithm) {
  setExpected({{}, {1, 6}});
  int differing = 0;
  for (const Path& path : reducingPaths()) {
    bool ran = false;
    for (const Environment& environment : environmentsOf(path)) {
      differing += differences(environment);
      for (const std::string& line : log_.take()) {
        ran = ran || line.find(" with " + path.text()) != std::string::npos;
      }
    }
    EXPECT_TRUE(ran) << path.text();
  }
  EXPECT_GT(differing, 0);
}

}  // namespace
}  // namespace unisono::system_test
