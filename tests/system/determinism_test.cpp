// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "element_types.h"
#include "support/seed.h"
#include "testing.h"

// UNISONO_DETERMINISTIC: the bits of a result depend on the inputs, the operator and the number of
// ranks. They are compared with those of one call of all elements, under everything else that may
// differ.
namespace unisono::system_test {
namespace {

using bench::ElementType;

enum class Operation { allReduce, reduce, reduceScatter };
constexpr Operation kOperations[] = {Operation::allReduce, Operation::reduce,
                                     Operation::reduceScatter};

struct Shape {
  int nodes = 1, ranksPerNode = 1;
};

// How the elements are divided into calls.
struct Calls {
  size_t count = 0;      // elements of the result on a rank, from the first on
  int parts = 1;         // calls of one group
  bool inPlace = false;  // all-reduce and reduce
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
    const auto& values = values_[static_cast<size_t>(rank * ranks_ + target)];
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
    std::vector<std::byte> values(calls.count * static_cast<size_t>(targets) * width);
    std::byte* to = values.data();
    for (int part = 0; part < calls.parts; part++) {
      for (int target = 0; target < targets; target++) {
        inputs.copy(to, rank, target, static_cast<size_t>(part) * each, countOf(part));
        to += countOf(part) * width;
      }
    }
    const std::vector<std::byte> poison(calls.count * width, std::byte{0xa7});
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
      std::byte* to = (calls.inPlace ? in[r] : out[r]).as() + begin * width;
      const std::byte* from = in[r].as() + begin * width * static_cast<size_t>(targets);
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
    device::copy(result.data(), (calls.inPlace ? in : out)[static_cast<size_t>(rank)].as(),
                 result.size());
    results.insert(results.end(), result.begin(), result.end());
  }
  return results;
}

// Whether the first `count` elements on each rank are those of `all`, which has `allCount` on each.
bool isPrefix(const std::vector<std::byte>& some, size_t count, const std::vector<std::byte>& all,
              size_t allCount, size_t width) {
  const size_t ranks = all.size() / (allCount * width);
  if (some.size() != ranks * count * width) return false;
  for (size_t rank = 0; rank < ranks; rank++) {
    if (std::memcmp(some.data() + rank * count * width, all.data() + rank * allCount * width,
                    count * width) != 0) {
      return false;
    }
  }
  return true;
}

struct Environment {
  std::map<std::string, std::string> variables;
  Shape shape;
};

constexpr int kRanks = 4;
constexpr size_t kCount = scaled(60'000, 6'000);

struct Reduction {
  ElementType type;
  ncclRedOp_t op;
};

class Determinism : public ::testing::Test {
 protected:
  // Compares with the first environment's results of all elements, and returns how many calls
  // differ.
  int differences(const std::vector<Environment>& environments,
                  const std::vector<Reduction>& reductions) {
    std::vector<Inputs> inputs;
    for (const Reduction& reduction : reductions) {
      inputs.emplace_back(reduction.type, seed_, kRanks, kCount);
    }
    std::map<std::pair<size_t, Operation>, std::vector<std::byte>> expected;
    int differences = 0;
    for (const Environment& environment : environments) {
      std::vector<std::unique_ptr<Setting>> settings;
      std::string text;
      for (const auto& [name, value] : environment.variables) {
        settings.push_back(std::make_unique<Setting>(name.c_str(), value.c_str()));
        text += name + "=" + value + " ";
      }
      const Ranks ranks(environment.shape.nodes, environment.shape.ranksPerNode);
      for (size_t i = 0; i < reductions.size(); i++) {
        const auto [type, op] = reductions[i];
        for (const Operation operation : kOperations) {
          for (const Calls& calls : {Calls{kCount}, Calls{1}, Calls{1023}, Calls{kCount / 2 + 1, 3},
                                     Calls{kCount / 3, 1, true}}) {
            if (calls.inPlace && operation == Operation::reduceScatter) continue;
            const std::vector<std::byte> result = run(ranks, operation, type, op, inputs[i], calls);
            std::vector<std::byte>& all = expected[{i, operation}];
            if (all.empty()) all = result;
            if (isPrefix(result, calls.count, all, kCount, inputs[i].width())) continue;
            differences++;
            last_ = text + std::to_string(environment.shape.nodes) + "x" +
                    std::to_string(environment.shape.ranksPerNode) + " " +
                    bench::elementInfo(type).name + " operation " +
                    std::to_string(static_cast<int>(operation)) + " count " +
                    std::to_string(calls.count) + " calls " + std::to_string(calls.parts);
          }
        }
      }
    }
    return differences;
  }

  const uint64_t seed_ = test::seed();
  std::string last_;  // that differed
};

std::vector<Environment> environments(bool deterministic) {
  const std::map<std::string, std::string> base = {
      {"UNISONO_DETERMINISTIC", deterministic ? "1" : "0"}};
  const auto with = [&](std::map<std::string, std::string> more, Shape shape) {
    more.insert(base.begin(), base.end());
    return Environment{more, shape};
  };
  return {with({}, {1, 4}),
          with({}, {2, 2}),
          with({}, {4, 1}),
          with({{"NCCL_MAX_NCHANNELS", "1"}}, {1, 4}),
          with({{"NCCL_MIN_NCHANNELS", "5"}}, {2, 2}),
          with({{"NCCL_BUFFSIZE", "8192"}}, {1, 4}),
          with({{"NCCL_PROTO", "LL"}}, {1, 4}),
          with({{"NCCL_PROTO", "LL128"}}, {1, 4}),
          with({{"NCCL_PROTO", "Simple"}}, {2, 2}),
          with({{"NCCL_ALGO", "tree"}}, {4, 1}),
          with({{"UNISONO_ZERO_COPY", "0"}}, {1, 4})};
}

TEST_F(Determinism, ResultsDependOnTheInputsOnly) {
  std::vector<Reduction> reductions = {{ElementType::float32, ncclProd},
                                       {ElementType::float16, ncclAvg}};
  for (const bench::ElementInfo& info : bench::elementTypes()) {
    if (info.kind != bench::NumberKind::floating) continue;  // integers have one result
    reductions.push_back({info.type, ncclSum});
  }
  EXPECT_EQ(differences(environments(true), reductions), 0) << last_;
}

// Otherwise this test could not fail.
TEST_F(Determinism, WithoutItTheyDependOnMore) {
  EXPECT_GT(differences(environments(false), {{ElementType::float32, ncclSum}}), 0);
}

}  // namespace
}  // namespace unisono::system_test
