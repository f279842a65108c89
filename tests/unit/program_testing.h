// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace unisono::testing {

inline std::string read(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// Runs the program in a folder of its own, which is removed at the end.
class Program : public ::testing::Test {
 protected:
  struct Run {
    int status = -1;
    std::string out, err;
  };

  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "unisono-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }

  // `environment`: "NAME=value ...".
  Run run(const std::string& arguments, const std::string& environment = "") {
    const std::string command = "env " + environment + " " UNISONO_PROGRAM " " + arguments + " >" +
                                at("out") + " 2>" + at("err");
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(at("out")), read(at("err"))};
  }
  std::string at(const std::string& name) const { return (folder_ / name).string(); }

 private:
  std::filesystem::path folder_;
};

}  // namespace unisono::testing
