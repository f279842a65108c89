// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "element_types.h"
#include "testing.h"

// One call on all ranks with inputs of which the result is known.
namespace unisono::system_test {

enum class Call {
  allReduce,
  reduce,
  reduceScatter,
  broadcast,
  allGather,
  allToAll,
  gather,
  scatter,
  sendReceive,  // each rank sends to the next and receives from the one before; one: to itself
};
inline constexpr Call kCalls[] = {Call::allReduce, Call::reduce,    Call::reduceScatter,
                                  Call::broadcast, Call::allGather, Call::allToAll,
                                  Call::gather,    Call::scatter,   Call::sendReceive};

enum class Operator { sum, prod, max, min, avg, scaledByHost, scaledByDevice };
inline constexpr Operator kOperators[] = {
    Operator::sum, Operator::prod,         Operator::max,           Operator::min,
    Operator::avg, Operator::scaledByHost, Operator::scaledByDevice};

constexpr bool reduces(Call call) {
  return call == Call::allReduce || call == Call::reduce || call == Call::reduceScatter;
}
constexpr bool canBeInPlace(Call call) {
  return call != Call::sendReceive;
}

struct Case {
  Call call = Call::allReduce;
  bench::ElementType type = bench::ElementType::float32;
  Operator op = Operator::sum;
  bool inPlace = false;
  size_t count = 0;
  int root = 0;
  // Of the buffers' starts: not aligned to more than an element.
  size_t offsetElements = 0;

  std::string text() const;
};

// The inputs and the results of a case on all ranks, as numbers.
//
// Inputs are small numbers, of which at most 8 ranks have one that changes the result of an
// element, so that results are exact in every type whatever the order of evaluation. The exception
// is the average of floats where 1/n is not a power of two: that is compared with one computed in
// double, within the roundings that a sum of so many terms may have.
class CaseValues {
 public:
  CaseValues(const Case& call, int ranks);
  double input(int rank, size_t index) const;
  // Sets `tolerance` where the result is not exact.
  double expected(int rank, size_t index, double* tolerance) const;

 private:
  double term(int rank, size_t index) const;
  void reduce(size_t index);

  const Case case_;
  const int ranks_;
  const bench::ElementInfo& info_;
  std::vector<double> results_, tolerances_;  // of reductions; no tolerances: all are exact
};

// One rank's buffers for a case, filled and with guards around them, and the bytes that they must
// hold afterwards.
class CaseBuffers {
 public:
  CaseBuffers(const Case& call, int rank, int ranks, int device)
      : CaseBuffers(call, std::make_shared<CaseValues>(call, ranks), rank, ranks, device) {}
  CaseBuffers(const Case& call, std::shared_ptr<const CaseValues> values, int rank, int ranks,
              int device);
  ~CaseBuffers();
  CaseBuffers(const CaseBuffers&) = delete;

  // Makes the call; one in which a rank both sends and receives is a group.
  ncclResult_t enqueue(ncclComm_t comm, cudaStream_t stream);
  // When the stream has passed it: throws std::runtime_error that says what is wrong.
  void verify() const;

 private:
  std::byte* at(size_t element) const;
  void put(std::byte* where, double value) const;
  std::string describe(size_t byte) const;

  const Case case_;
  const std::shared_ptr<const CaseValues> values_;
  const int rank_, ranks_, device_;
  const bench::ElementInfo& info_;
  size_t inputStart_ = 0, inputCount_ = 0;    // elements of the allocation
  size_t outputStart_ = 0, outputCount_ = 0;  // 0: this rank gets nothing
  DeviceBuffer memory_;
  std::vector<std::byte> image_;  // what memory_ must hold
  DeviceBuffer scalar_;
  ncclComm_t operatorOf_ = nullptr;
  ncclRedOp_t operator_ = ncclSum;
};

// All ranks, in one group of one thread.
void runCase(const Ranks& ranks, const Case& call);

}  // namespace unisono::system_test
