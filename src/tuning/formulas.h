// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tuning/model.h"

namespace unisono::tuning {

template <typename Enum>
constexpr size_t at(Enum value) {
  return static_cast<size_t>(value);
}

// The graph whose channels an algorithm uses.
const topology::GraphFacts& graphOf(const CommFacts& facts, Algorithm algorithm);

// The costs by NCCL's formulas, for one communicator. `input` must outlive it.
class Formulas {
 public:
  explicit Formulas(const ModelInput& input);

  // Sets the bandwidth and the latency.
  void estimate(Operation operation, Algorithm algorithm, Protocol protocol,
                Estimate& result) const;

 private:
  // Steps that the data of one rank make around a ring.
  int steps(Operation operation) const;
  double channelSpeed(Operation operation, Algorithm algorithm,
                      const topology::GraphFacts& graph) const;
  // What passes each link, in GB/s.
  double busBandwidth(Operation operation, Algorithm algorithm, Protocol protocol) const;
  // Bytes of the call by time.
  double algorithmBandwidth(Operation operation, Algorithm algorithm, Protocol protocol) const;
  double llMax() const;
  // What the proxies of a node move over LL through sockets, in GB/s: they take the data out of
  // lines and put them into others. Measured (docs/results/2026-11-23-clusters.md, all-reduces of 4
  // and 32 KB).
  double proxyLines(const topology::GraphFacts& graph) const;
  double networkOverhead() const;
  double latency(Operation operation, Algorithm algorithm, Protocol protocol) const;

  const CommFacts& facts_;
  CostConstants constants_;
  const TuningSettings& settings_;
  size_t generation_, scale_;
  double ranksPerNode_;
};

}  // namespace unisono::tuning
