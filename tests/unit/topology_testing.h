// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "base/error.h"
#include "topology/graph_xml.h"
#include "topology/search.h"
#include "topology/validate.h"

// What the tests of the topology layer share: files, machines, and the text of expected errors.
namespace unisono::topology::testing {

inline std::string readFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  EXPECT_TRUE(in.good()) << path;
  return out.str();
}

// A file of this repository's tests/data/topologies.
inline std::string ownTopology(const std::string& name) {
  return readFile(std::filesystem::path(UNISONO_TEST_DATA) / "topologies" / name);
}

// Files that are not ours are next to the checkout, or where UNISONO_TEST_TOPOLOGIES says; nothing
// if they are not there.
inline std::optional<std::filesystem::path> foreignTopology(const std::string& name) {
  const char* folder = std::getenv("UNISONO_TEST_TOPOLOGIES");
  const std::filesystem::path path =
      (folder ? std::filesystem::path(folder)
              : std::filesystem::path(UNISONO_TEST_DATA) / "../../../shared/data/topologies") /
      name;
  if (!std::filesystem::exists(path)) return std::nullopt;
  return path;
}

// The text of the error that `call` throws; empty if it throws none.
template <typename Call>
std::string errorOf(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// A ring and a tree, and nothing in any graph that validate() finds wrong.
inline void expectValid(const GraphSet& graphs, const Machine& machine, const std::string& what) {
  EXPECT_FALSE(graphs.ring.channels.empty()) << what;
  EXPECT_FALSE(graphs.tree.channels.empty()) << what;
  for (const NamedGraph& graph : namedGraphs(graphs)) {
    for (const std::string& violation : validate(graph.graph, machine)) {
      ADD_FAILURE() << what << ": " << violation << "\n"
                    << describeGraph(graph.graph, machine.topology);
    }
  }
}

// As a communicator of `rankCount` ranks sees it.
inline Machine machineOf(const XmlTopology& file, int rankCount,
                         const PathSettings& settings = {}) {
  return trimMachine(buildTopology(file), settings, -1, rankCount);
}

}  // namespace unisono::topology::testing
