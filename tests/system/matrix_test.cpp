// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "collective_case.h"
#include "device/direct_work.h"
#include "support/fake_net.h"
#include "support/fake_verbs.h"
#include "support/pairwise.h"
#include "support/seed.h"
#include "tuning/direct.h"
#include "tuning/registry.h"

// Every algorithm and protocol with every call, type, operator, number of nodes and ranks per node,
// size around the borders of slices and chunks, in and out of place, over each network and through
// memory of the host: a cover of all pairs that the seed decides, and each axis whole with the
// others fixed. UNISONO_TEST_MATRIX=N takes N covers;
// without it a sample of one runs, under a sanitizer with up to 8 ranks.
namespace unisono::system_test {
namespace {

using tuning::Algorithm;
using tuning::Operation;
using tuning::Protocol;

// What NCCL_ALGO and NCCL_PROTO are set to. The list follows from the registry, so that an
// algorithm that is entered there is in the matrix.
struct Path {
  bool automatic = false;
  Algorithm algorithm = Algorithm::ring;
  Protocol protocol = Protocol::simple;

  std::string text() const {
    if (automatic) return "automatic";
    return std::string(tuning::nameOf(algorithm)) + " " + std::string(tuning::nameOf(protocol));
  }
};

bool hasCode(Operation operation, const Path& path) {
  const tuning::Registry& registry = tuning::libraryRegistry();
  return registry.has(operation, path.algorithm, path.protocol) ||
         registry.hasForced(operation, path.algorithm, path.protocol);
}

std::vector<Path> makePaths() {
  std::vector<Path> paths{{.automatic = true}};
  for (int a = 0; a < unisono::device::kAlgorithms; a++) {
    for (int p = 0; p < unisono::device::kProtocols; p++) {
      const Path path{false, static_cast<Algorithm>(a), static_cast<Protocol>(p)};
      bool any = false;
      for (int o = 0; o < tuning::kCollectives; o++) {
        any = any || hasCode(static_cast<Operation>(o), path);
      }
      if (any) paths.push_back(path);
    }
  }
  return paths;
}
const std::vector<Path> kPaths = makePaths();

// Returns -1 for messages.
int operationOf(Call call) {
  switch (call) {
    case Call::allReduce:
      return static_cast<int>(Operation::allReduce);
    case Call::allGather:
      return static_cast<int>(Operation::allGather);
    case Call::reduceScatter:
      return static_cast<int>(Operation::reduceScatter);
    case Call::broadcast:
      return static_cast<int>(Operation::broadcast);
    case Call::reduce:
      return static_cast<int>(Operation::reduce);
    default:
      return -1;
  }
}

// Messages are either direct or go through FIFOs, as with a list that only names rings.
bool carries(const Path& path, Call call) {
  if (path.automatic) return true;
  const int operation = operationOf(call);
  if (operation >= 0) return hasCode(static_cast<Operation>(operation), path);
  return path.algorithm == Algorithm::direct ||
         (path.algorithm == Algorithm::ring && path.protocol == Protocol::simple);
}

// On several nodes.
bool canUseCollNet(const Path& path) {
  return !path.automatic &&
         (path.algorithm == Algorithm::collNetChain || path.algorithm == Algorithm::collNetDirect ||
          path.algorithm == Algorithm::nvls);
}

bool hasRoot(Call call) {
  return call == Call::reduce || call == Call::broadcast || call == Call::gather ||
         call == Call::scatter;
}

// Bytes of a slot; 0: the default.
constexpr uint32_t kSlotBytes[] = {512, 2048, 0};
constexpr uint32_t kSlots = 8;           // of a FIFO of the host backend
constexpr uint32_t kSlicesPerChunk = 2;  // with protocol Simple
constexpr int kNodes[] = {1, 2, 3, 4, 8};
constexpr int kRanksPerNode[] = {1, 2, 4, 8};
constexpr int kChannels[] = {1, 0};       // 0: automatic, which is 2
constexpr size_t kOffsets[] = {0, 1, 3};  // of buffers, in elements
constexpr int kRoots = 3;

// A slice fills a slot, a chunk is what one step moves, and a round is what all ranks of a ring
// have on their way at once.
enum class Size {
  odd,
  zero,
  one,
  moderate,
  underSlice,
  slice,
  overSlice,
  underChunk,
  chunk,
  overChunk,
  underRound,
  round,
  overRound,
  beyondBuffers,
};
constexpr int kSizes = static_cast<int>(Size::beyondBuffers) + 1;
constexpr int kSizesOfDefaultBuffers = static_cast<int>(Size::moderate) + 1;

// What joins the simulated nodes.
struct Joint {
  const char* name;
  const char* network;  // NCCL_NET; null: each other's memory
  int plugin = 0;       // the version of the net plug-in
};
constexpr Joint kJoints[] = {{"memory", nullptr},
                             {"sockets", "Socket"},
                             {"verbs", "IB"},
                             {"a plug-in of version 6", "Fake6", 6},
                             {"a plug-in of version 8", "Fake8", 8},
                             {"a plug-in of version 10", "Fake10", 10},
                             {"a plug-in of version 11", "Fake11", 11},
                             {"a plug-in of version 12", "Fake12", 12}};
// What the ranks of a node have in place of peer-to-peer access.
struct HostMemory {
  const char *name, *locality, *copies;  // as the settings of NCCL; null: unset
};
constexpr HostMemory kHostMemory[] = {{"", nullptr, nullptr},
                                      {"memory of the receiver's host", nullptr, nullptr},
                                      {"memory of the sender's host", "1", nullptr},
                                      {"the sender's copy engine and host memory", nullptr, "1"},
                                      {"the receiver's copy engine and host memory", "1", "2"},
                                      {"the copy engines of both and host memory", nullptr, "3"}};
// A process has 20,000 descriptors where the tests run, and a connection of two of its ranks two.
constexpr int kMaxRanksPerNodeOnNetworks = 4;

enum Axis : int {
  pathAxis,
  callAxis,
  typeAxis,
  operatorAxis,
  nodesAxis,
  ranksAxis,
  sizeAxis,
  placeAxis,
  bufferAxis,
  channelAxis,
  rootAxis,
  offsetAxis,
  jointAxis,
  hostMemoryAxis,  // between the ranks of a node, of kHostMemory
  kAxes
};

int at(const test::Point& point, Axis axis) {
  return point[static_cast<size_t>(axis)];
}
const Path& pathOf(const test::Point& point) {
  return kPaths[static_cast<size_t>(at(point, pathAxis))];
}
const Joint& jointOf(const test::Point& point) {
  return kJoints[at(point, jointAxis)];
}
int nodesOf(const test::Point& point) {
  return kNodes[at(point, nodesAxis)];
}
int ranksPerNodeOf(const test::Point& point) {
  return kRanksPerNode[at(point, ranksAxis)];
}
int ranksOf(const test::Point& point) {
  return nodesOf(point) * ranksPerNodeOf(point);
}

test::Space makeSpace() {
  test::Space space;
  space.sizes = {static_cast<int>(kPaths.size()),
                 static_cast<int>(std::size(kCalls)),
                 bench::kElementTypes,
                 static_cast<int>(std::size(kOperators)),
                 static_cast<int>(std::size(kNodes)),
                 static_cast<int>(std::size(kRanksPerNode)),
                 kSizes,
                 2,
                 static_cast<int>(std::size(kSlotBytes)),
                 static_cast<int>(std::size(kChannels)),
                 kRoots,
                 static_cast<int>(std::size(kOffsets)),
                 static_cast<int>(std::size(kJoints)),
                 static_cast<int>(std::size(kHostMemory))};
  space.fits = [](int axisA, int valueA, int axisB, int valueB) {
    if (axisA > axisB) {
      std::swap(axisA, axisB);
      std::swap(valueA, valueB);
    }
    if (axisA == pathAxis && axisB == callAxis) {
      return carries(kPaths[static_cast<size_t>(valueA)], kCalls[valueB]);
    }
    if (axisA == callAxis && axisB == operatorAxis) return reduces(kCalls[valueA]) || valueB == 0;
    if (axisA == callAxis && axisB == placeAxis) return canBeInPlace(kCalls[valueA]) || valueB == 0;
    if (axisA == callAxis && axisB == rootAxis) return hasRoot(kCalls[valueA]) || valueB == 0;
    if (axisA == sizeAxis && axisB == bufferAxis) {
      return kSlotBytes[valueB] != 0 || valueA < kSizesOfDefaultBuffers;
    }
    if (axisA == ranksAxis && axisB == jointAxis) {
      return valueB == 0 || kRanksPerNode[valueA] <= kMaxRanksPerNodeOnNetworks;
    }
    if (axisA == pathAxis && axisB == jointAxis) {
      const Joint& joint = kJoints[valueB];
      return joint.network == nullptr || joint.plugin > 0 ||
             !canUseCollNet(kPaths[static_cast<size_t>(valueA)]);
    }
    return true;
  };
  return space;
}

// The bytes of a rank's share that fill a slice, a chunk and a round.
struct Borders {
  size_t slice, chunk, round;
};

Borders bordersOf(const test::Point& point) {
  const Path& path = pathOf(point);
  const Call call = kCalls[at(point, callAxis)];
  const int ranks = ranksOf(point);
  if (!path.automatic && path.algorithm == Algorithm::direct && nodesOf(point) == 1) {
    // A line, the lines of a block, and the most that the algorithm carries.
    const auto limits = tuning::directLimits(tuning::directLineBits(ranks));
    return {8, 8 * unisono::device::kDirectMaxThreads,
            limits.shareBytes[static_cast<size_t>(Protocol::ll)]};
  }
  const size_t slice = unisono::device::payloadOf(path.protocol, kSlotBytes[at(point, bufferAxis)]);
  const size_t chunk = path.protocol == Protocol::simple ? slice * kSlicesPerChunk : slice;
  const int channels = kChannels[at(point, channelAxis)];
  const size_t all = chunk * static_cast<size_t>(channels == 0 ? 2 : channels);
  return {slice, chunk, call == Call::allReduce ? all * static_cast<size_t>(ranks) : all};
}

size_t countOf(const test::Point& point) {
  const size_t bytes =
      bench::elementInfo(static_cast<bench::ElementType>(at(point, typeAxis))).bytes;
  const auto ranks = static_cast<size_t>(ranksOf(point));
  const Borders borders = bordersOf(point);
  const auto elements = [&](size_t border) { return std::max<size_t>(border / bytes, 1); };
  switch (static_cast<Size>(at(point, sizeAxis))) {
    case Size::zero:
      return 0;
    case Size::one:
      return 1;
    case Size::odd:
      return 333;
    case Size::moderate:
      return 5003;
    case Size::underSlice:
      return elements(borders.slice) - 1;
    case Size::slice:
      return elements(borders.slice);
    case Size::overSlice:
      return elements(borders.slice) + 1;
    case Size::underChunk:
      return elements(borders.chunk) - 1;
    case Size::chunk:
      return elements(borders.chunk);
    case Size::overChunk:
      return elements(borders.chunk) + 1;
    case Size::underRound:
      return elements(borders.round) - 1;
    case Size::round:
      return elements(borders.round);
    case Size::overRound:
      return elements(borders.round) + 1;
    case Size::beyondBuffers:
      break;
  }
  // More than all FIFOs of a rank hold; for messages, more than the FIFO of a peer.
  const size_t slot = kSlotBytes[at(point, bufferAxis)];
  const size_t ofPeer = slot * kSlots * 2 + 8, ofAll = ofPeer * 6;
  switch (kCalls[at(point, callAxis)]) {
    case Call::allGather:
    case Call::reduceScatter:
      return std::max(ofAll / ranks, ofPeer / 4) / bytes + 1;
    case Call::allToAll:
    case Call::gather:
    case Call::scatter:
      return ofPeer / bytes + 1;
    default:
      return ofAll / bytes + 1;
  }
}

Case caseOf(const test::Point& point) {
  const int ranks = ranksOf(point), root = at(point, rootAxis);
  Case result;
  result.call = kCalls[at(point, callAxis)];
  result.type = static_cast<bench::ElementType>(at(point, typeAxis));
  result.op = kOperators[at(point, operatorAxis)];
  result.inPlace = at(point, placeAxis) == 1;
  result.count = countOf(point);
  result.root = root == 0 ? 0 : root == 1 ? ranks - 1 : ranks / 2;
  result.offsetElements = kOffsets[at(point, offsetAxis)];
  return result;
}

// The part of a point that a communicator has.
std::vector<int> shapeOf(const test::Point& point) {
  return {at(point, nodesAxis),     at(point, ranksAxis),   at(point, pathAxis),
          at(point, bufferAxis),    at(point, channelAxis), at(point, jointAxis),
          at(point, hostMemoryAxis)};
}

std::string shapeText(const test::Point& point) {
  std::ostringstream text;
  text << pathOf(point).text() << " on " << nodesOf(point) << " nodes of " << ranksPerNodeOf(point)
       << " ranks, slots of " << kSlotBytes[at(point, bufferAxis)] << " bytes, "
       << kChannels[at(point, channelAxis)] << " channels (0: default), nodes joined by "
       << jointOf(point).name << (at(point, hostMemoryAxis) == 0 ? "" : ", ranks of a node by ")
       << kHostMemory[at(point, hostMemoryAxis)].name;
  return text.str();
}

bool needsCollNet(const test::Point& point) {
  return nodesOf(point) > 1 && canUseCollNet(pathOf(point));
}

// Lines of LL128 do not pass between ranks of a node through memory of the host.
bool canCarryLines128(const test::Point& point) {
  return ranksPerNodeOf(point) == 1 || at(point, hostMemoryAxis) == 0;
}

// The variables of a point, and its communicator.
class Shape {
 public:
  explicit Shape(const test::Point& point) {
    const Path& path = pathOf(point);
    if (!path.automatic) {
      set("NCCL_ALGO", std::string(tuning::nameOf(path.algorithm)));
      set("NCCL_PROTO", std::string(tuning::nameOf(path.protocol)));
      if (needsCollNet(point)) {
        for (const auto& [name, value] : testing::collNetVariables()) set(name.c_str(), value);
      }
    }
    if (const Joint& joint = jointOf(point); joint.network != nullptr) {
      set("NCCL_NET", joint.network);
      if (joint.plugin > 0) set("NCCL_NET_PLUGIN", testing::fakeNetPath(joint.plugin));
    }
    if (at(point, hostMemoryAxis) != 0) set("NCCL_P2P_DISABLE", "1");
    const HostMemory& memory = kHostMemory[at(point, hostMemoryAxis)];
    if (memory.locality != nullptr) set("NCCL_SHM_LOCALITY", memory.locality);
    if (memory.copies != nullptr) {
      set("NCCL_SHM_USE_CUDA_MEMCPY", "1");
      set("NCCL_SHM_MEMCPY_MODE", memory.copies);
    }
    if (const uint32_t slot = kSlotBytes[at(point, bufferAxis)]; slot != 0) {
      for (const char* name : {"NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"}) {
        set(name, std::to_string(slot * kSlots));
      }
    }
    if (const int channels = kChannels[at(point, channelAxis)]; channels != 0) {
      set("NCCL_MAX_NCHANNELS", std::to_string(channels));
    }
    ranks_ = std::make_unique<Ranks>(nodesOf(point), ranksPerNodeOf(point));
  }
  ~Shape() {
    ranks_.reset();
    // The last one first: a variable may be set twice.
    while (!settings_.empty()) settings_.pop_back();
  }
  Shape(const Shape&) = delete;
  const Ranks& ranks() const { return *ranks_; }

 private:
  void set(const char* name, const std::string& value) {
    settings_.push_back(std::make_unique<Setting>(name, value.c_str()));
  }

  std::vector<std::unique_ptr<Setting>> settings_;
  std::unique_ptr<Ranks> ranks_;
};

// `covers` covers of the matrix, and its axes.
std::vector<test::Point> makePoints(int covers, std::mt19937_64& random) {
  const test::Space space = makeSpace();
  std::vector<test::Point> points;
  for (int i = 0; i < covers; i++) {
    for (test::Point& point : test::pairwiseCover(space, random))
      points.push_back(std::move(point));
  }
  // Through 2 nodes of 4 ranks (or 1 where an algorithm needs it), one channel and the smallest
  // slots, for every algorithm.
  test::Point base(kAxes, 0);
  base[ranksAxis] = 2;
  base[typeAxis] = static_cast<int>(bench::ElementType::float32);
  for (size_t path = 0; path < kPaths.size(); path++) {
    base[pathAxis] = static_cast<int>(path);
    const Algorithm algorithm = kPaths[path].algorithm;
    const bool insideNode = algorithm == Algorithm::direct || algorithm == Algorithm::nvls;
    base[nodesAxis] = insideNode ? 0 : 1;
    for (test::Point& point : test::axesThrough(space, base)) points.push_back(std::move(point));
  }
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  return points;
}

// Of the collectives that were launched: "AllReduce of 5 elements with Ring LL, channels: 2".
std::set<std::string> protocolsOf(const std::vector<std::string>& lines) {
  std::set<std::string> protocols;
  for (const std::string& line : lines) {
    const size_t with = line.find(" elements with ");
    if (with == std::string::npos) continue;
    std::string algorithm, protocol;
    std::istringstream(line.substr(with + std::strlen(" elements with "))) >> algorithm >> protocol;
    protocols.insert(protocol.substr(0, protocol.find(',')));
  }
  return protocols;
}

// A machine with a NIC for each GPU, so that each can be a head of CollNet.
const bool topologySet = [] {
  ::setenv("UNISONO_HOST_TOPOLOGY", UNISONO_TOPOLOGY, 0);
  return true;
}();

TEST(Matrix, CasesAreRight) {
  testing::loadFakeVerbs();
  const char* covers = std::getenv("UNISONO_TEST_MATRIX");
  std::mt19937_64 random(test::seed());
  std::vector<test::Point> points = makePoints(covers == nullptr ? 1 : std::atoi(covers), random);
  const size_t all = points.size();
  if (covers == nullptr) {
    if (kSanitized) {
      std::erase_if(points, [](const test::Point& point) { return ranksOf(point) > 8; });
    }
#if defined(__SANITIZE_THREAD__)
    // It does not see the order that the network makes between the groups of a block, which only
    // matters in place. Between nodes direct trees reduce in place.
    std::erase_if(points, [](const test::Point& point) {
      const Path& path = pathOf(point);
      const bool hasNetwork = needsCollNet(point) || jointOf(point).network != nullptr;
      const bool isRing = !path.automatic && path.algorithm == Algorithm::ring;
      const bool isDirectTree = !path.automatic && path.algorithm == Algorithm::directTree;
      return nodesOf(point) > 1 && hasNetwork && !isRing && (caseOf(point).inPlace || isDirectTree);
    });
#endif
    std::shuffle(points.begin(), points.end(), random);
    points.resize(std::min<size_t>(points.size(), scaled(250, 100)));
  }
  std::sort(points.begin(), points.end(), [](const test::Point& a, const test::Point& b) {
    return std::pair(shapeOf(a), a) < std::pair(shapeOf(b), b);
  });
  std::printf("%zu of %zu cases\n", points.size(), all);
  static LaunchLog log;
  std::unique_ptr<Shape> shape;
  std::map<std::string, int> carried;
  std::map<std::pair<std::string, std::string>, int> joined;  // by joint and protocol
  int shapes = 0;
  for (size_t i = 0; i < points.size(); i++) {
    const test::Point& point = points[i];
    const Case call = caseOf(point);
    const auto context = [&] { return shapeText(point) + ": " + call.text(); };
    try {
      if (i == 0 || shape == nullptr || shapeOf(points[i - 1]) != shapeOf(point)) {
        shape.reset();
        shape = std::make_unique<Shape>(point);
        shapes++;
      }
      log.take();
      runCase(shape->ranks(), call);
    } catch (const std::exception& error) {
      ADD_FAILURE() << shapeText(point) << ": " << error.what();
      shape.reset();  // its ranks may no longer agree
      continue;
    }
    const std::vector<std::string> lines = log.take();
    if (call.count == 0) {
      EXPECT_TRUE(lines.empty()) << context() << ": launched " << lines.front();
      continue;
    }
    ASSERT_FALSE(lines.empty()) << context() << ": launched nothing";
    if (nodesOf(point) > 1) {
      for (const std::string& protocol : protocolsOf(lines)) {
        joined[{jointOf(point).name, protocol}]++;
      }
    }
    const Path& path = pathOf(point);
    const std::string with = " with " + path.text();
    const bool hit = std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find(with) != std::string::npos;
    });
    carried[path.text()] += hit ? 1 : 0;
    // Rings and trees carry whatever they have code for. Others have conditions.
    if (!path.automatic && ranksOf(point) > 1 && operationOf(call.call) >= 0 &&
        (path.algorithm == Algorithm::ring || path.algorithm == Algorithm::tree) &&
        (path.protocol != Protocol::ll128 || canCarryLines128(point))) {
      EXPECT_TRUE(hit) << context() << ": " << lines.front();
    }
  }
  std::printf("%d communicators\n", shapes);
  for (const Path& path : kPaths) {
    if (path.automatic) continue;
    std::printf("  %-16s carried %d cases\n", path.text().c_str(), carried[path.text()]);
    if (points.size() == all) {
      EXPECT_GT(carried[path.text()], 0) << path.text() << ": Shape has to set what it needs";
    }
  }
  for (const Joint& joint : kJoints) {
    std::map<std::string, int> with;
    for (int p = 0; p < unisono::device::kProtocols; p++) {
      const std::string protocol(tuning::nameOf(static_cast<Protocol>(p)));
      with[protocol] = joined[{joint.name, protocol}];
    }
    std::printf("  nodes joined by %s: %d collectives with LL, %d with LL128, %d with Simple\n",
                joint.name, with["LL"], with["LL128"], with["Simple"]);
    if (points.size() == all) {
      for (const auto& [protocol, cases] : with) EXPECT_GT(cases, 0) << joint.name << protocol;
    }
  }
  const int overVerbs = joined[std::pair("verbs", "Simple")];
  EXPECT_TRUE(overVerbs == 0 || testing::fakeVerbsCounter("fakeVerbsRequests") > 0);
}

}  // namespace
}  // namespace unisono::system_test
