// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "plan/plan.h"

// Collectives over channels: rings, trees and algorithms with heads.
namespace unisono::plan {

// A collective and what carries it.
struct ChosenCall {
  const Task* task;
  tuning::Choice choice;
};

// Says whether the receivers of a call's result offer their outputs to an algorithm over Simple.
// The exchange takes 7 us with 2 ranks and 9 to 34 us with 4, which rings make up for from
// `resultBytes` of each rank's part on, and trees earlier. Broadcasts are faster without at every
// size (docs/results/2026-11-27-small-blocks.md).
bool offersOutput(const CommConfig& config, const Task& task, device::Algorithm algorithm);

// Whether two collectives over channels have the same kernel.
bool canShareLaunch(const ChosenCall& a, const ChosenCall& b);
// Appends the launches of collectives that can share them.
void planCollectives(const CommConfig& config, std::span<const ChosenCall> run, Plan& plan);

}  // namespace unisono::plan
