// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/settings.h"
#include "topology/paths.h"
#include "topology/search.h"

// What the user set, in the terms of this layer.
namespace unisono::topology {

// Throws Error(invalidArgument) for a value that is not a path type.
PathSettings pathSettingsOf(const Settings& settings);

// Without the graphs of Settings::graphFile, which name the GPUs of a machine (parseGraphs).
SearchSettings searchSettingsOf(const Settings& settings);

}  // namespace unisono::topology
