// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

namespace unisono::doctor {

struct DoctorArguments {
  int pid = 0;
  bool json = false;
};

// Adds `doctor` to the program's commands. Parsing fills `arguments`.
CLI::App* addDoctorCommand(CLI::App& app, DoctorArguments& arguments);

// Prints which copies of NCCL a process has loaded and what its communicators do. Returns the exit
// status: 0; 1 if the process uses no NCCL; 2 if it does not exist or cannot be inspected.
int runDoctor(const DoctorArguments& arguments);

}  // namespace unisono::doctor
