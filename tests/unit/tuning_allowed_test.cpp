// SPDX-License-Identifier: Apache-2.0
#include "tuning/allowed.h"

#include "tuning_testing.h"

namespace unisono::tuning {
namespace {

using testing::expectRefused;

std::string algorithmsOf(Operation operation, std::string_view text) {
  const Allowed allowed = parseAllowed(text, "");
  std::string names;
  for (int a = 0; a < device::kAlgorithms; a++) {
    const auto algorithm = static_cast<Algorithm>(a);
    if (allowed.allows(operation, algorithm)) names += std::string(nameOf(algorithm)) + " ";
  }
  return names;
}

std::string protocolsOf(Operation operation, std::string_view text) {
  const Allowed allowed = parseAllowed("", text);
  std::string names;
  for (int p = 0; p < device::kProtocols; p++) {
    const auto protocol = static_cast<Protocol>(p);
    if (!allowed.allows(operation, protocol)) continue;
    names += std::string(nameOf(protocol)) + (allowed.forces(operation, protocol) ? "! " : " ");
  }
  return names;
}

constexpr const char* kAll =
    "Tree Ring CollNetDirect CollNetChain NVLS NVLSTree PAT Direct TwoShot DirectTree ";

TEST(Allowed, ListsApplyToAllOperations) {
  for (const Operation operation : {Operation::allReduce, Operation::broadcast}) {
    EXPECT_EQ(algorithmsOf(operation, ""), kAll);
    EXPECT_EQ(algorithmsOf(operation, "ring"), "Ring ");
    EXPECT_EQ(algorithmsOf(operation, "RING,Tree"), "Tree Ring ");
    EXPECT_EQ(algorithmsOf(operation, "^nvls,nvlstree,pat,direct,twoshot,directtree"),
              "Tree Ring CollNetDirect CollNetChain ");
    EXPECT_EQ(protocolsOf(operation, ""), "LL LL128 Simple ");
    EXPECT_EQ(protocolsOf(operation, "ll,SIMPLE"), "LL! Simple! ");
    EXPECT_EQ(protocolsOf(operation, "^LL"), "LL128 Simple ") << "LL128 stays automatic";
  }
}

// The examples of NCCL's documentation.
TEST(Allowed, ListsOfOneOperationReplaceTheFirst) {
  const char* algorithms = "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring";
  EXPECT_EQ(algorithmsOf(Operation::allReduce, algorithms), "Tree CollNetDirect ");
  EXPECT_EQ(algorithmsOf(Operation::broadcast, algorithms), "Ring ");
  EXPECT_EQ(algorithmsOf(Operation::reduce, algorithms), "Ring CollNetDirect ");
  const char* protocols = "LL,Simple;allreduce:^LL";
  EXPECT_EQ(protocolsOf(Operation::allReduce, protocols), "LL128 Simple ");
  EXPECT_EQ(protocolsOf(Operation::allGather, protocols), "LL! Simple! ");
  const char* forced = "^LL128;allreduce:LL128";
  EXPECT_EQ(protocolsOf(Operation::allReduce, forced), "LL128! ");
  EXPECT_EQ(protocolsOf(Operation::reduceScatter, forced), "LL Simple ");
  EXPECT_EQ(algorithmsOf(Operation::reduce, "AllReduce:ring"), kAll);
}

// As NCCL, which splits with strtok.
TEST(Allowed, SkipsEmptyNames) {
  EXPECT_EQ(algorithmsOf(Operation::reduce, "ring,"), "Ring ");
  EXPECT_EQ(algorithmsOf(Operation::reduce, ",,ring"), "Ring ");
  EXPECT_EQ(algorithmsOf(Operation::reduce, "^"), kAll);
  EXPECT_EQ(algorithmsOf(Operation::reduce, ";"), kAll);
  EXPECT_EQ(algorithmsOf(Operation::reduce, "ring;;allreduce:tree;"), "Ring ");
}

TEST(Allowed, UnknownNamesAreErrorsThatListTheAcceptedOnes) {
  for (const char* text : {"fast", "ring direct", "^^ring", "ring,fast", "allreduce:fast",
                           "broadcast:fast", "allreduce:ring:direct", "LL"}) {
    expectRefused([&] { parseAllowed(text, ""); }, text, "Use Tree, Ring, CollNetDirect");
  }
  expectRefused([] { parseAllowed("alltoall:ring", ""); }, "alltoall", "AllReduce, AllGather");
  expectRefused([] { parseAllowed("allreduce:ring;tree", ""); }, "tree", "without an operation");
  expectRefused([] { parseAllowed("allreduce:", ""); }, "allreduce:", "has no list");
  expectRefused([] { parseAllowed("", "LL256"); }, "LL256", "Use LL, LL128, Simple");
  expectRefused([] { parseAllowed("", "ring"); }, "ring", "NCCL_PROTO=ring");
}

TEST(Allowed, RanksUseWhatAllOfThemAllow) {
  const Allowed both = intersect(parseAllowed("ring,tree", "LL128"), parseAllowed("^ring", ""));
  EXPECT_TRUE(both.allows(Operation::reduce, Algorithm::tree));
  EXPECT_FALSE(both.allows(Operation::reduce, Algorithm::ring));
  EXPECT_FALSE(both.allows(Operation::reduce, Protocol::ll));
  EXPECT_TRUE(both.allows(Operation::reduce, Protocol::ll128));
  EXPECT_FALSE(both.forces(Operation::reduce, Protocol::ll128));
}

}  // namespace
}  // namespace unisono::tuning
