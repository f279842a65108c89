// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "comm/call_profile.h"

// What timelines and profiler plug-ins are told of a call.
namespace unisono::comm {

plugin::ProfiledCall profiledCall(const plan::CommConfig& config, const plan::Task& task);
// The arguments of a call in the timeline, with the names that PyTorch's profiler uses, then ours.
std::string argumentsOf(const CallProfile::Subject& subject, const plan::Task& task,
                        const plugin::ProfiledCall& told);

}  // namespace unisono::comm
