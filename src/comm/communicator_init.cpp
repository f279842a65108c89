// SPDX-License-Identifier: Apache-2.0
// How the ranks of a communicator make it together.
#include "comm/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <map>
#include <set>

#include "base/cpu_affinity.h"
#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/math.h"
#include "base/stage_times.h"
#include "base/system.h"
#include "base/thread.h"
#include "bootstrap/wait.h"
#include "comm/identity.h"
#include "comm/mapper.h"
#include "comm/node_channels.h"
#include "comm/node_machine.h"
#include "comm/ras_service.h"
#include "comm/reaper.h"
#include "detect/detect.h"
#include "device/kernels.h"
#include "runtime/descriptor_service.h"
#include "tuning/settings.h"

namespace unisono::comm {
namespace {

constexpr int kMostClusterBlocks = 8;   // that every GPU with clusters allows
constexpr size_t kSlabBytes = 2 << 20;  // the granularity of CUDA's virtual memory

template <size_t kSize>
void copyText(std::array<char, kSize>& to, const std::string& from) {
  const size_t length = std::min(from.size(), kSize - 1);
  std::memcpy(to.data(), from.data(), length);
  to[length] = '\0';
}

// Of ranks plus 1, where 0 is none. Empty if all are none.
template <size_t kSize>
std::vector<int> listOf(const std::array<int32_t, kSize>& ranks) {
  std::vector<int> list;
  if (std::ranges::all_of(ranks, [](int32_t rank) { return rank == 0; })) return list;
  for (const int32_t rank : ranks) list.push_back(rank - 1);
  return list;
}

std::vector<transport::PeerPlace> placesOf(const std::vector<RankFacts>& ranks,
                                           const std::vector<topology::RankPlace>& inChannels) {
  const bool network = usesNetwork(ranks);
  std::vector<transport::PeerPlace> places;
  for (const RankFacts& peer : ranks) {
    const topology::RankPlace& inNode = inChannels[places.size()];
    Fnv device;
    device.add(std::string_view(reinterpret_cast<const char*>(peer.deviceUuid.data()),
                                peer.deviceUuid.size()));
    transport::PeerPlace& place = places.emplace_back(
        transport::PeerPlace{peer.process, peer.device, device.value(), network ? peer.host : 0});
    place.forwarders = listOf(inNode.forwarders);
    place.messageForwarders = listOf(inNode.messageForwarders);
    for (const int32_t port : inNode.messagePorts) {
      if (port > 0) place.messagePorts.push_back(port - 1);
    }
  }
  return places;
}

// The ranks whose processes this one can look at.
std::vector<RankProcess> otherProcesses(const std::vector<RankFacts>& ranks, int rank) {
  const RankFacts& own = ranks.at(static_cast<size_t>(rank));
  std::vector<RankProcess> found;
  for (size_t r = 0; r < ranks.size(); r++) {
    const RankFacts& other = ranks[r];
    if (own.pidNamespace != 0 && other.pidNamespace == own.pidNamespace &&
        other.machine == own.machine && other.process != own.process) {
      found.push_back({static_cast<int>(r), static_cast<pid_t>(other.pid)});
    }
  }
  return found;
}

// The table of UNISONO_TUNING_FILE; empty without one.
tuning::Measurements measurements(const Settings& settings) {
  if (settings.tuningFile.empty()) return {};
  return tuning::parseMeasurements(detect::readFile(settings.tuningFile, "UNISONO_TUNING_FILE"),
                                   settings.tuningFile);
}

// The CollNet device of a port; -1: none.
int collectiveDevice(const plugin::CollNet& collNet, const std::string& port) {
  const auto& devices = collNet.ports();
  const auto found = std::ranges::find(devices, port, &plugin::NetPort::name);
  return found == devices.end() ? -1 : static_cast<int>(found - devices.begin());
}

// The ports of a network for the topology. `dmaBuf`: whether the GPU's memory can be had as one.
Ports portsOf(const transport::NetworkDriver& network, const plugin::CollNet* collNet,
              bool dmaBuf) {
  const auto known = network.ports();
  if (!known) return std::nullopt;
  std::vector<detect::NicPort> ports;
  for (const plugin::NetPort& port : *known) {
    detect::NicPort& added = ports.emplace_back();
    added.name = port.name;
    added.dev = static_cast<int>(ports.size()) - 1;
    if (!port.pciPath.empty()) {
      std::error_code error;
      added.device = std::filesystem::weakly_canonical(port.pciPath, error);
      if (error) added.device = port.pciPath;
    }
    added.megabits = port.megabits;
    added.port = port.number;
    added.guid = port.guid;
    added.latency = port.latency;
    added.connections = port.connections;
    added.gdr = port.reachesGpus || (port.takesDmaBufs && dmaBuf);
    added.collective = collNet != nullptr && collectiveDevice(*collNet, port.name) >= 0;
  }
  return ports;
}

// Loads the kernels of a communicator in a thread of its own: the first time in a process that
// takes tens of milliseconds, as long as the detection of the machine.
class KernelLoading {
 public:
  // `runtime` must outlive this object.
  KernelLoading(runtime::Runtime& runtime, int device, int localRanks)
      : load_([&runtime, device, localRanks] {
          for (const runtime::Kernel* kernel : device::kernelsOf(localRanks)) {
            runtime.prepare(*kernel, device);
          }
        }),
        loaded_(load_.get_future()) {
    if (runtime.backend() == runtime::Backend::cuda) {
      thread_ = startThread("unisono-load", [this] { load_(); });
    } else {
      load_();
    }
  }
  ~KernelLoading() {
    if (thread_.joinable()) thread_.join();
  }
  KernelLoading(const KernelLoading&) = delete;
  KernelLoading& operator=(const KernelLoading&) = delete;

  // Waits for the thread; throws what went wrong in it.
  void finish() { loaded_.get(); }

 private:
  std::packaged_task<void()> load_;
  std::future<void> loaded_;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Communicator> Communicator::create(runtime::Runtime& runtime,
                                                   std::unique_ptr<bootstrap::Bootstrap> bootstrap,
                                                   int device, const Settings& settings,
                                                   const Options& options,
                                                   std::shared_ptr<Health> health,
                                                   StageTimes times) {
  const int64_t begin = diagnose::steadyNow();
  runtime::DeviceScope scope(runtime, device);
  std::shared_ptr<Communicator> communicator(
      new Communicator(runtime, std::move(bootstrap), device, settings, options, std::move(health)),
      &Communicator::release);
  auto announceFailure = [&](auto step) {
    try {
      step();
    } catch (const std::exception& error) {
      // The others wait for this rank, and would otherwise learn no more than that it has ended.
      communicator->bootstrap_->fail(error.what());
      throw;
    }
  };
  AllFacts ranks;
  announceFailure([&] {
    const RankFacts facts = communicator->facts();
    times.end("device and network");
    ranks = communicator->bootstrap_->allGatherShared(facts);
    times.end("exchange");
  });
  // Not announced: every process finds the same by itself, and each rank reports it as its own
  // error.
  communicator->bootstrap_->share([&] {
    checkFacts(*ranks);
    return true;
  });
  announceFailure([&] { communicator->agree(std::move(ranks), times); });
  logInfo("{}: initialized in {}", communicator->description(), times.describe());
  startRasService(settings);
  if (communicator->profile_ != nullptr) communicator->profile_->created(begin);
  return communicator;
}

RankFacts Communicator::facts() {
  const runtime::DeviceProperties properties = runtime_.properties(device_);
  RankFacts facts{};
  facts.layout = kRankFactsLayout;
  facts.backend = static_cast<int32_t>(runtime_.backend());
  facts.device = device_;
  facts.computeCapability = properties.computeCapability;
  facts.multiprocessors = properties.multiprocessors;
  facts.process = runtime::processToken();
  facts.machine = machineHash();
  facts.host = hostHash(settings_);
  const std::string network = settings_.network.empty() ? options_.network : settings_.network;
  network_ = transport::openNetwork(settings_, network, {options_.id, options_.trafficClass});
  // When it starts, a net plug-in may set what its platform needs, such as NCCL_PROTO.
  if (network_->isPlugin()) settings_ = settingsFromEnvironment();
  facts.network = network.empty() && !network_->isPlugin() ? 0 : 1;
  copyText(facts.networkName, network_->name());
  facts.networkNamespace = runtime::networkNamespace();
  facts.user = ::geteuid();
  facts.pidNamespace = pidNamespace();
  facts.pid = ::getpid();
  facts.deviceUuid = properties.uuid;
  copyText(facts.hostName, hostName());
  copyText(facts.busId, properties.busId);
  facts.sharedMemory = sharedMemoryDevice();
  if (runtime_.backend() == runtime::Backend::cuda) {
    facts.fabric = fabricOf(properties.busId);
    facts.links = linksOf(properties.busId);
  }
  facts.multicast = settings_.nvls != 0 && runtime_.supportsMulticast(device_) ? 1 : 0;
  if (settings_.collnet >= 0 ? settings_.collnet > 0 : options_.collnet) {
    facts.collnet.nodes = static_cast<int32_t>(settings_.collnetNodes);
    facts.collnet.ignoresMismatch = settings_.ignoreCollnetMismatch ? 1 : 0;
    collNet_ = network_->openCollNet();
    if (collNet_ != nullptr) copyText(facts.collnet.plugin, collNet_->name());
  }
  facts.collnet.reductions = ~uint64_t{0};
  facts.collnet.allGather = facts.collnet.reduceScatter = 1;
  facts.multiRankDevice = settings_.multiRankDevice ? 1 : 0;
  facts.sharesNetBuffers = settings_.netSharedBuffers ? 1 : 0;
  const ChannelBounds bounds =
      channelBounds(settings_, {options_.minChannels, options_.maxChannels});
  facts.minChannels = bounds.min;
  facts.maxChannels = bounds.max;
  facts.minPeerChannels = settings_.minPeerChannels;
  facts.maxPeerChannels = settings_.maxPeerChannels;
  facts.netPeerChannels =
      settings_.netPeerChannels > 0 ? settings_.netPeerChannels : options_.netPeerChannels;
  facts.bufferBytes = settings_.bufferBytes;
  facts.llBufferBytes = settings_.llBufferBytes;
  facts.ll128BufferBytes = settings_.ll128BufferBytes;
  facts.allowed = tuning::parseAllowed(settings_.algorithm, settings_.protocol);
  tunerLibrary_ = plugin::TunerLibrary::open(settings_.tunerPlugin);
  if (tunerLibrary_ != nullptr) {
    Fnv name;
    name.add(tunerLibrary_->name());
    facts.tuner = name.value();
  }
  static std::atomic<uint64_t> communicators = 0;
  facts.nonce = mix64(facts.process + communicators++);
  facts.tuning = tuning::tuningSettingsOf(settings_);
  if (options_.deterministic) facts.tuning.deterministic = 1;
  facts.measurements = settings_.tuningFile.empty() ? 0 : tuning::hashOf(measurements(settings_));
  if (journal_ != nullptr) facts.calls = journal_->place();
  return facts;
}

void Communicator::agree(AllFacts ranks, StageTimes& times) {
  // Whether this device reaches every other one can be said only now. A device that this process
  // does not see is left to the attempt to map its memory.
  const uint64_t host = (*ranks)[static_cast<size_t>(bootstrap_->rank())].host;
  Reach reach{.peers = 1, .sees = 1, .transports = 0};
  std::set<std::array<std::byte, 16>> unseen;  // of this host
  for (const RankFacts& peer : *ranks) {
    if (peer.host == host) unseen.insert(peer.deviceUuid);
  }
  for (int device = 0; device < runtime_.deviceCount(); device++) {
    const auto uuid = runtime_.properties(device).uuid;
    unseen.erase(uuid);
    if (device == device_ || runtime_.canAccessPeer(device_, device)) continue;
    const auto isThere = [&](const RankFacts& peer) { return peer.deviceUuid == uuid; };
    if (std::ranges::any_of(*ranks, isThere)) reach.peers = 0;
  }
  if (!unseen.empty()) reach.sees = 0;
  const auto shareReach = [&] {
    const auto all = bootstrap_->allGatherShared(reach);
    ranks = bootstrap_->share([&] {
      std::vector<RankFacts> result = *ranks;
      for (size_t r = 0; r < result.size(); r++) result[r].reach = (*all)[r];
      return result;
    });
  };
  const auto hosts = bootstrap_->share([&] { return hostsOf(*ranks); });
  KernelLoading kernels(runtime_, device_, static_cast<int>(hosts->ranks.at(host).size()));
  shareReach();
  times.end("exchange");
  // Only the node's topology shows which pairs meet on a third GPU or in host memory: they do not
  // reach each other, and the decision must know it on every rank.
  Settings ofSearch = settings_;
  ofSearch.collnet = collNet_ == nullptr ? 0 : 1;
  const bool dmaBuf = settings_.dmaBuf && runtime_.supportsDmaBuf(device_);
  NodePlace found = findPlace(*ranks, *hosts, bootstrap_->rank(), ofSearch,
                              portsOf(*network_, collNet_.get(), dmaBuf));
  times.end("topology");
  // Host memory and threads of this communicator belong near its GPU. The host backend simulates
  // GPUs of another machine.
  const bool hasGpu = runtime_.backend() == runtime::Backend::cuda;
  if (hasGpu) {
    cpuAffinity_ = found.cpuAffinity;
    portAffinity_ = found.portAffinity;
  }
  const ScopedCpuAffinity nearGpu(cpuAffinity_, settings_.ignoreCpuAffinity);
  const int rank = bootstrap_->rank();
  for (const auto& [pair, link] : found.links) {
    if (pair.first != rank && pair.second != rank && link.through != rank) continue;
    if (link.through >= 0 || link.transport != transport::TransportKind::peer) reach.peers = 0;
    reach.transports |= 1u << static_cast<int>(link.transport);
  }
  shareReach();
  if (const auto ports = network_->ports()) {
    // A topology file can have other ports.
    const auto isKnown = [&](int port) { return port < static_cast<int>(ports->size()); };
    if (std::ranges::all_of(found.ports, isKnown)) netPorts_ = std::move(found.ports);
  }
  if (netPorts_.empty()) {
    found.place.forwarders = {};
    found.place.messagePorts = {};
    found.place.messageForwarders = {};
  }
  const auto places = bootstrap_->allGatherShared(found.place);
  times.end("exchange");
  tuning::CostConstants constants = tuning::defaultConstants();
  const auto advisor = makeTuner(*ranks, *places, constants);
  const auto shareDecision = [&] {
    decision_ =
        bootstrap_->share([&] { return decide(*ranks, *places, {measurements(settings_)}); });
  };
  shareDecision();
  if (decision_->config.model->facts.collnet) {
    ranks = connectCollNet(ranks, found.headPorts);
    shareDecision();
  }
  DecisionSummary summary = *bootstrap_->share([&] { return summarize(*decision_); });
  // Each rank has a tuner of its own, which may have changed the constants.
  if (advisor != nullptr) {
    decision_ = std::make_shared<const Decision>(
        decide(*ranks, *places, {measurements(settings_), constants}));
    summary = summarize(*decision_);
    summary.advised = 1;
  }
  config_ = decision_->config;
  config_.rank = rank;
  config_.advisor = advisor;
  config_.choices = std::make_shared<tuning::ChoiceCache>();
  times.end("choices");
  // Where ranks differ, all of them know it and look for the field.
  const auto hashes = bootstrap_->allGatherShared(hashOf(summary));
  if (std::ranges::adjacent_find(*hashes, std::ranges::not_equal_to()) != hashes->end()) {
    checkSummaries(bootstrap_->allGather(summary));
  }
  if (bootstrap_->rank() == 0) {
    for (const std::string& warning : decision_->warnings) warnOnce(warning);
  }
  times.end("exchange");

  // Blocks of clusters move data between GPUs faster (docs/results/2026-11-23-clusters.md). But a
  // GPU holds fewer of them at once, as a cluster does not extend over parts of it (GPCs), and
  // ranks that share a GPU wait for each other's blocks.
  const bool shareDevices = static_cast<size_t>(hosts->devices) < ranks->size();
  const bool isHopperOrLater = runtime_.properties(device_).computeCapability >= 90;
  if (isHopperOrLater && !shareDevices) {
    const int64_t blocks =
        settings_.clusterBlocks >= 0 ? settings_.clusterBlocks : options_.clusterBlocks;
    clusterBlocks_ = static_cast<int>(std::clamp<int64_t>(blocks, 1, kMostClusterBlocks));
  }
  kernels.finish();
  times.end("kernels");
  arena_ = std::make_shared<memory::Arena>(runtime_, device_, kSlabBytes);
  replays_ = std::make_unique<Replays>(runtime_, device_, arena_);
  peerPlaces_ = bootstrap_->share([&] { return placesOf(*ranks, *places); });
  otherProcesses_ = otherProcesses(*ranks, rank);
  peerLinks_ = std::move(found.links);
  directAccess_ = std::move(found.direct);
  makeWindows();
  kept_ = arena_->mark();
  lastLaunch_ = runtime_.createEvent(device_);
  // Before there are connections, whose threads tell it what they do.
  profile_ = CallProfile::create(
      runtime_, settings_, {device_, id_, decision_->nodes, options_.name, description(), config_},
      {decision_, &decision_->graphs});
  makeConnector();
  join_ = runtime_.createEvent(device_);
  health_->start(description(), this->ranks(),
                 std::chrono::milliseconds(settings_.failureGraceMilliseconds), otherProcesses_);
  logInfo("{}: on device {} ({}), {} node(s), {} channels", description(), device_,
          runtime_.properties(device_).busId, decision_->nodes, config_.channels);
  watch(*ranks);
  times.end("memory");
}

// Connects the heads of CollNet. Returns what ranks know afterwards: where it fails on one, all do
// without, as with NCCL. `ports`: of the network, those of this rank.
Communicator::AllFacts Communicator::connectCollNet(const AllFacts& ranks,
                                                    const std::vector<int>& ports) {
  std::vector<int> devices;
  for (const int port : ports) {
    const auto known = network_->ports();
    if (!known || port >= static_cast<int>(known->size())) continue;
    const int device = collectiveDevice(*collNet_, (*known)[static_cast<size_t>(port)].name);
    if (device >= 0) devices.push_back(device);
  }
  const plan::CommConfig& config = decision_->config;
  const auto groups = bootstrap_->share(
      [&] { return transport::CollNetConnections::groupsOf(decision_->graphs, config); });
  auto connections = std::make_shared<transport::CollNetConnections>(collNet_, std::move(devices));
  const std::string problem = connections->connect(
      *bootstrap_, *groups, config.slotBytes[plan::indexOf(device::Protocol::simple)]);
  if (!problem.empty()) {
    warnOnce(fmt::format("CollNet is not used: {} (rank {}). Other algorithms carry the calls",
                         problem, bootstrap_->rank()));
  }
  struct Outcome {
    uint64_t reductions;
    int32_t works, allGather, reduceScatter;
  };
  const auto& functions = collNet_->functions();
  const auto canReduce = [&](device::DataType type, device::Reduction reduction) {
    int can = 0;
    return functions.canReduce(type, reduction, &can) == plugin::kSuccess && can != 0;
  };
  const auto all = bootstrap_->allGatherShared(
      Outcome{tuning::collnetBits(canReduce), problem.empty() ? 1 : 0,
              functions.hasAllGather() ? 1 : 0, functions.hasReduceScatter() ? 1 : 0});
  const auto works = [](const Outcome& outcome) { return outcome.works != 0; };
  if (std::ranges::all_of(*all, works)) reducer_ = std::move(connections);
  return bootstrap_->share([&] {
    std::vector<RankFacts> result = *ranks;
    for (size_t r = 0; r < result.size(); r++) {
      CollNetFacts& facts = result[r].collnet;
      const Outcome& outcome = (*all)[r];
      if (outcome.works == 0) facts.nodes = 0;
      facts.reductions = outcome.reductions;
      facts.allGather = outcome.allGather;
      facts.reduceScatter = outcome.reduceScatter;
    }
    return result;
  });
}

// Makes the tables of kernels and what connects them to peers. Collective.
void Communicator::makeConnector() {
  const plan::CommConfig& config = config_;
  device::DeviceCommunicator head{};
  head.rank = config.rank;
  head.ranks = config.ranks;
  std::copy(config.slotBytes.begin(), config.slotBytes.end(), head.slotBytes);
  head.peerLineSlotBytes = config.peerSlots.lineBytes;
  head.slots = decision_->slots;
  head.abortFlag = abort_->waitFlag();
  head.windows = windows_ == nullptr ? nullptr : windows_->table();
  mappings_ = std::make_unique<memory::MappingCache>(runtime_, device_);
  tables_ = std::make_unique<transport::DeviceTables>(
      runtime_, device_, *arena_,
      transport::DeviceTables::Sizes{config.ranks, config.channels, config.peerChannels}, head);
  connector_ = std::make_unique<transport::Connector>(
      runtime_, *bootstrap_, *arena_, *mappings_, *tables_, config, decision_->slots, *peerPlaces_,
      peerLinks_, decision_->graphs, transportOptions());
  connector_->connectThrough();
}

transport::TransportOptions Communicator::transportOptions() {
  transport::TransportOptions options;
  options.check = [health = health_] {
    if (health->hasFailed()) throw *health->error();
    if (health->signal().raised()) {
      throw invalidUsage("The communicator was aborted").remedy("Make another communicator");
    }
  };
  options.fail = [this](const Error& error) { fail(error); };
  options.hasLeft = [health = health_](int peer) { return health->hasLeft(peer); };
  options.hasEnded = [processes = otherProcesses_, places = peerPlaces_,
                      rank = this->rank()](int other) {
    const auto processOf = [&](int of) { return places->at(static_cast<size_t>(of)).process; };
    if (processOf(other) == processOf(rank)) return Reaper::get().exits();
    const auto found = std::ranges::find(processes, other, &RankProcess::rank);
    return found != processes.end() && hasEnded(found->process);
  };
  options.isIdle = [this] {
    if (captures_) return false;
    const runtime::DeviceScope scope(runtime_, device_);
    return isIdle();
  };
  options.timeout = bootstrap::timeoutOf(settings_);
  options.socketInterface = settings_.socketInterface;
  options.socketFamily = settings_.socketFamily;
  options.networkTimeout = std::chrono::seconds(settings_.networkTimeoutSeconds);
  options.socketThreads = settings_.socketThreads;
  options.socketsPerThread = settings_.socketsPerThread;
  options.proxyCores = portAffinity_;
  options.ignoresOwnCores = settings_.ignoreCpuAffinity;
  options.network = network_;
  options.ports = netPorts_;
  options.direct = directAccess_;
  options.dmaBuf = settings_.dmaBuf && runtime_.supportsDmaBuf(device_);
  options.reducer = reducer_;
  options.verifiesLinks = settings_.verifyLinks;
  options.deviceBytes = connectionBytes_;
  if (!settings_.traceFile.empty()) {
    options.noteTransfer = [this](const transport::Transfer& transfer) {
      if (profile_ != nullptr) profile_->addTransfer(transfer);
    };
  }
  options.observeStream = [this](const transport::NetworkEnd& end) {
    NetworkProfile* const network = profile_ == nullptr ? nullptr : profile_->network();
    return network == nullptr ? nullptr : network->observe(end);
  };
  options.noteProxy = [this](transport::ProxyActivity activity) {
    NetworkProfile* const network = profile_ == nullptr ? nullptr : profile_->network();
    if (network != nullptr) network->note(activity);
  };
  return options;
}

// Ranks that are advised differently would choose differently and hang.
std::shared_ptr<const tuning::Advisor> Communicator::makeTuner(
    const std::vector<RankFacts>& ranks, const std::vector<topology::RankPlace>& places,
    tuning::CostConstants& constants) const {
  if (tunerLibrary_ == nullptr || ranks.size() == 1) return nullptr;
  for (size_t r = 0; r < ranks.size(); r++) {
    if (ranks[r].tuner == ranks.front().tuner && ranks.front().tuner != 0) continue;
    warnOnce(fmt::format("The tuner plug-in {} is ignored: rank {} does not have the one of rank 0",
                         tunerLibrary_->name(), r));
    return nullptr;
  }
  plugin::TunedCommunicator facts;
  facts.id = ranks.front().nonce;
  facts.ranks = static_cast<int>(ranks.size());
  std::map<uint64_t, int> ranksOf;
  for (const topology::RankPlace& place : places) ranksOf[place.node]++;
  facts.nodes = static_cast<int>(ranksOf.size());
  facts.minRanksPerNode = facts.maxRanksPerNode = ranksOf.begin()->second;
  for (const auto& [node, count] : ranksOf) {
    facts.minRanksPerNode = std::min(facts.minRanksPerNode, count);
    facts.maxRanksPerNode = std::max(facts.maxRanksPerNode, count);
  }
  return plugin::TunerPlugin::create(tunerLibrary_, facts, constants);
}

// Windows are for the ranks of other processes. Those of this one exchange addresses.
void Communicator::makeWindows() {
  const bool usesCopyEngines =
      settings_.ctaPolicy.empty() ? options_.copyEngines : settings_.ctaPolicy == "ZERO";
  if (usesCopyEngines) copyEngines_ = runtime_.createParallelCopies(device_);
  if (!settings_.zeroCopy) return;
  memory::Windows::WindowOptions options{
      bootstrap_->rank(), {}, static_cast<uint64_t>(settings_.zeroCopyBytes)};
  const std::vector<transport::PeerPlace>& places = *peerPlaces_;
  const uint64_t process = places[static_cast<size_t>(options.rank)].process;
  const auto canShare = [&](int peer) {
    if (places[static_cast<size_t>(peer)].process == process) return false;
    const transport::PeerLink link = transport::linkBetween(peerLinks_, places, options.rank, peer);
    return link.through < 0 && link.atomics && link.transport == transport::TransportKind::peer;
  };
  for (int peer = 0; peer < static_cast<int>(places.size()); peer++) {
    if (!canShare(peer)) continue;
    options.peers.resize(places.size());
    options.peers[static_cast<size_t>(peer)] = true;
  }
  if (options.peers.empty()) return;
  windows_ = memory::Windows::create(
      runtime_, device_, arena_, *bootstrap_, options,
      [](const std::shared_ptr<memory::Windows>& windows) { Mapper::get().schedule(windows); });
}

}  // namespace unisono::comm
