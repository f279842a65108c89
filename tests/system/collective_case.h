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

// One rank's buffers for a case, filled and with guards around them, and the bytes that they must
// hold afterwards.
//
// Inputs are small numbers, so that results are exact in every type whatever the order of
// evaluation, but for the average of floats: that is compared with one computed in double, within
// the roundings that a sum of so many terms may have.
class CaseBuffers {
 public:
  CaseBuffers(const Case& call, int rank, int ranks, int device);
  ~CaseBuffers();
  CaseBuffers(const CaseBuffers&) = delete;

  // Makes the call; one in which a rank both sends and receives is a group.
  ncclResult_t enqueue(ncclComm_t comm, cudaStream_t stream);
  // When the stream has passed it: throws std::runtime_error that says what is wrong.
  void verify() const;

 private:
  std::byte* at(size_t element) const;
  double input(int rank, size_t index) const;
  double expected(size_t index, double* tolerance) const;
  void put(std::byte* where, double value) const;
  std::string describe(size_t byte) const;

  const Case case_;
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
