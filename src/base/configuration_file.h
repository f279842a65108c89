// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

// The files that set variables for every process: NCCL_CONF_FILE or ~/.nccl.conf, and
// /etc/nccl.conf. The syntax is NCCL's: a line NAME=VALUE sets a variable, other lines and lines
// that begin with # are skipped, and the first line for a name is the one that counts. Nothing is
// trimmed.
//
// Unlike NCCL, which calls setenv() for each line, the values are kept apart from the environment:
// setenv() is not safe while other threads read it, and child processes must not inherit them.
namespace unisono {

struct Configuration {
  std::map<std::string, std::string, std::less<>> values;
  std::vector<std::string> problems;  // full sentences, to be logged
};

// Adds the settings of the file at `path`; names that `configuration` has already keep their value.
// Anything but a regular file of at most 1 MiB is a problem and is not read. So is a missing file
// if it is `required`.
void addConfigurationFile(Configuration& configuration, const std::string& path, bool required);

// The files of this process. `userFile` is the value of NCCL_CONF_FILE, or "" for ~/.nccl.conf.
Configuration readConfigurationFiles(const std::string& userFile);

}  // namespace unisono
