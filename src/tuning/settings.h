// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/settings.h"
#include "tuning/model.h"

// What the user set, in the terms of this layer.
namespace unisono::tuning {

TuningSettings tuningSettingsOf(const Settings& settings);

}  // namespace unisono::tuning
