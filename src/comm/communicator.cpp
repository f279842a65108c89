// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include "base/cpu_affinity.h"
#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/math.h"
#include "base/system.h"
#include "bootstrap/wait.h"
#include "comm/identity.h"
#include "comm/mapper.h"
#include "comm/node_channels.h"
#include "comm/node_machine.h"
#include "comm/ras_service.h"
#include "comm/reaper.h"
#include "detect/detect.h"
#include "device/kernels.h"
#include "plan/direct_plan.h"
#include "runtime/descriptor_service.h"
#include "tuning/settings.h"

namespace unisono::comm {
namespace {

constexpr size_t kSlabBytes = 2 << 20;  // the granularity of CUDA's virtual memory

template <size_t kSize>
void copyText(std::array<char, kSize>& to, const std::string& from) {
  const size_t length = std::min(from.size(), kSize - 1);
  std::memcpy(to.data(), from.data(), length);
  to[length] = '\0';
}

std::vector<transport::PeerPlace> placesOf(const std::vector<RankFacts>& ranks) {
  const bool network = usesNetwork(ranks);
  std::vector<transport::PeerPlace> places;
  for (const RankFacts& peer : ranks) {
    Fnv device;
    device.add(std::string_view(reinterpret_cast<const char*>(peer.deviceUuid.data()),
                                peer.deviceUuid.size()));
    places.push_back({peer.process, peer.device, device.value(), network ? peer.host : 0});
  }
  return places;
}

// The table of UNISONO_TUNING_FILE; empty without one.
tuning::MeasuredTable measurements(const Settings& settings) {
  if (settings.tuningFile.empty()) return {};
  return tuning::parseMeasurements(detect::readFile(settings.tuningFile, "UNISONO_TUNING_FILE"),
                                   settings.tuningFile);
}

// The ports of a network for the topology.
Ports portsOf(const transport::NetworkDriver& network) {
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
    // Data pass through memory of the host, whatever the port can reach.
    added.gdr = false;
  }
  return ports;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::create(runtime::Runtime& runtime,
                                                   std::unique_ptr<bootstrap::Bootstrap> bootstrap,
                                                   int device, const Settings& settings,
                                                   const Options& options,
                                                   std::shared_ptr<Health> health) {
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
  announceFailure(
      [&] { ranks = communicator->bootstrap_->allGatherShared(communicator->facts()); });
  // Not announced: every process finds the same by itself, and each rank reports it as its own
  // error.
  communicator->bootstrap_->share([&] {
    checkFacts(*ranks);
    return true;
  });
  announceFailure([&] { communicator->agree(std::move(ranks)); });
  startRasService(settings);
  communicator->profile_ =
      CallProfile::create(runtime, settings,
                          {device, communicator->id_, communicator->decision_->nodes, options.name,
                           communicator->description(), communicator->config_, begin});
  return communicator;
}

Communicator::Communicator(runtime::Runtime& runtime,
                           std::unique_ptr<bootstrap::Bootstrap> bootstrap, int device,
                           const Settings& settings, const Options& options,
                           std::shared_ptr<Health> health)
    : runtime_(runtime),
      health_(std::move(health)),
      abort_(&health_->signal()),
      settings_(settings),
      options_(options),
      device_(device),
      bootstrap_(std::move(bootstrap)) {
  if (settings.hangSeconds > 0) journal_ = diagnose::Journal::create();
}

void Communicator::release(Communicator* communicator) noexcept {
  if (communicator->abort_->aborted()) communicator->stopWatching();
  if (!communicator->abort_->aborted() || (!communicator->launched_ && !communicator->captured_)) {
    delete communicator;
    return;
  }
  if (communicator->windows_ != nullptr) communicator->windows_->close(true);
  if (communicator->connector_ != nullptr) communicator->connector_->close();
  // Peers that wait for this rank find out now, not when the device has finished.
  communicator->bootstrap_.reset();
  Reaper::get().add([communicator, stream = std::shared_ptr<void>()]() mutable {
    try {
      runtime::DeviceScope scope(communicator->runtime_, communicator->device_);
      if (stream == nullptr) stream = communicator->streamBehindLaunches();
      if (!communicator->runtime_.query(stream.get())) return false;
    } catch (const std::exception& error) {
      logWarn("{} was aborted, and its device reported: {}", communicator->description(),
              error.what());
    }
    stream.reset();
    delete communicator;
    return true;
  });
}

Communicator::~Communicator() {
  if (windows_ != nullptr) windows_->close(abort_->aborted());
  if (abort_->aborted()) {
    if (profile_ != nullptr) profile_->close();
    stopWatching();
    return;
  }
  try {
    finish();
  } catch (const Error& error) {
    logWarn("{} was destroyed, and its device reported: {}", description(), error.what());
  }
  try {
    if (connector_ != nullptr) {
      connector_->drain();
      connector_->waitUntilMapped();
    }
  } catch (const Error& error) {
    logInfo("A communicator ended before all its peers were connected: {}", error.what());
  }
  if (profile_ != nullptr) profile_->close();
  stopWatching();
  if (connector_ != nullptr) connector_->close();
  leave("was destroyed");
}

void Communicator::leave(std::string_view how) noexcept {
  bootstrap_->leave(how, [this](int peer) {
    // Nobody counts how often a graph is launched.
    return captured_ ? bootstrap::DepartureCounts{} : health_->countsFor(peer);
  });
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
  const std::string& network = settings_.network.empty() ? options_.network : settings_.network;
  network_ = transport::openNetwork(settings_, network, {options_.id, options_.trafficClass});
  facts.network = network.empty() && !network_->joinsSimulatedHosts() ? 0 : 1;
  copyText(facts.networkName, network_->name());
  facts.networkNamespace = runtime::networkNamespace();
  facts.user = ::geteuid();
  facts.deviceUuid = properties.uuid;
  copyText(facts.hostName, hostName());
  copyText(facts.busId, properties.busId);
  facts.sharedMemory = sharedMemoryDevice();
  if (runtime_.backend() == runtime::Backend::cuda) facts.fabric = fabricOf(properties.busId);
  facts.multicast = settings_.nvls != 0 && runtime_.supportsMulticast(device_) ? 1 : 0;
  if (settings_.collnet && runtime_.hasReducingNetwork()) {
    facts.collnetNodes = static_cast<int32_t>(settings_.collnetNodes);
  }
  facts.multiRankDevice = settings_.multiRankDevice ? 1 : 0;
  const ChannelBounds bounds =
      channelBounds(settings_, {options_.minChannels, options_.maxChannels});
  facts.minChannels = bounds.min;
  facts.maxChannels = bounds.max;
  facts.minPeerChannels = settings_.minPeerChannels;
  facts.maxPeerChannels = settings_.maxPeerChannels;
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
  facts.measurements = settings_.tuningFile.empty() ? 0 : tuning::hashOf(measurements(settings_));
  if (journal_ != nullptr) facts.calls = journal_->place();
  return facts;
}

void Communicator::agree(AllFacts ranks) {
  // Whether this device reaches every other one can be said only now. A device that this process
  // does not see is left to the attempt to map its memory.
  Reach reach{.peers = 1, .transports = 0};
  for (int device = 0; device < runtime_.deviceCount(); device++) {
    if (device == device_ || runtime_.canAccessPeer(device_, device)) continue;
    const auto uuid = runtime_.properties(device).uuid;
    const auto isThere = [&](const RankFacts& peer) { return peer.deviceUuid == uuid; };
    if (std::ranges::any_of(*ranks, isThere)) reach.peers = 0;
  }
  const auto shareReach = [&] {
    const auto all = bootstrap_->allGatherShared(reach);
    ranks = bootstrap_->share([&] {
      std::vector<RankFacts> result = *ranks;
      for (size_t r = 0; r < result.size(); r++) result[r].reach = (*all)[r];
      return result;
    });
  };
  const auto hosts = bootstrap_->share([&] { return hostsOf(*ranks); });
  shareReach();
  // Only the node's topology shows which pairs meet on a third GPU or in host memory: they do not
  // reach each other, and the decision must know it on every rank.
  NodePlace found = findPlace(*ranks, *hosts, bootstrap_->rank(), settings_, portsOf(*network_));
  // Host memory and threads of this communicator belong near its GPU. The host backend simulates
  // GPUs of another machine.
  const bool hasGpu = runtime_.backend() == runtime::Backend::cuda;
  if (hasGpu) cpuAffinity_ = found.cpuAffinity;
  const ScopedCpuAffinity nearGpu(cpuAffinity_, settings_.ignoreCpuAffinity);
  const int rank = bootstrap_->rank();
  for (const auto& [pair, link] : found.links) {
    if (pair.first != rank && pair.second != rank && link.through != rank) continue;
    if (link.through >= 0 || link.transport != transport::TransportKind::peer) reach.peers = 0;
    reach.transports |= 1u << static_cast<int>(link.transport);
  }
  shareReach();
  const auto places = bootstrap_->allGatherShared(found.place);
  tuning::CostConstants constants = tuning::defaultConstants();
  const auto advisor = makeTuner(*ranks, *places, constants);
  decision_ = bootstrap_->share([&] { return decide(*ranks, *places, {measurements(settings_)}); });
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
  // Where ranks differ, all of them know it and look for the field.
  const auto hashes = bootstrap_->allGatherShared(hashOf(summary));
  if (std::ranges::adjacent_find(*hashes, std::ranges::not_equal_to()) != hashes->end()) {
    checkSummaries(bootstrap_->allGather(summary));
  }
  if (bootstrap_->rank() == 0) {
    for (const std::string& warning : decision_->warnings) warnOnce(warning);
  }

  for (const runtime::Kernel* kernel : device::kernelsOf(config_.ranks)) {
    runtime_.prepare(*kernel, device_);
  }
  arena_ = std::make_shared<memory::Arena>(runtime_, device_, kSlabBytes);
  peerPlaces_ = bootstrap_->share([&] { return placesOf(*ranks); });
  peerLinks_ = std::move(found.links);
  if (const auto ports = network_->ports()) {
    // A topology file can have other ports.
    const auto isKnown = [&](int port) { return port < static_cast<int>(ports->size()); };
    if (std::ranges::all_of(found.ports, isKnown)) netPorts_ = std::move(found.ports);
  }
  makeWindows();
  kept_ = arena_->mark();
  lastLaunch_ = runtime_.createEvent(device_);
  makeConnector();
  join_ = runtime_.createEvent(device_);
  health_->start(description(), this->ranks(),
                 std::chrono::milliseconds(settings_.failureGraceMilliseconds));
  logInfo("{}: on device {} ({}), {} node(s), {} channels", description(), device_,
          runtime_.properties(device_).busId, decision_->nodes, config_.channels);
  watch(*ranks);
}

// Makes the tables of kernels and what connects them to peers. Collective.
void Communicator::makeConnector() {
  const plan::CommConfig& config = config_;
  device::DeviceCommunicator head{};
  head.rank = config.rank;
  head.ranks = config.ranks;
  std::copy(config.slotBytes.begin(), config.slotBytes.end(), head.slotBytes);
  head.peerSlotBytes = config.peerSlotBytes;
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
    if (health->signal().raised()) throw invalidUsage("The communicator was aborted");
  };
  options.fail = [this](const Error& error) { bootstrap_->fail(health_->fail(error).what()); };
  options.hasLeft = [health = health_](int peer) { return health->hasLeft(peer); };
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
  options.network = network_;
  options.ports = netPorts_;
  options.verifiesLinks = settings_.verifyLinks;
  return options;
}

void Communicator::watch(const std::vector<RankFacts>& ranks) {
  Fnv id;
  id.add(ranks.front().process);
  id.add(ranks.front().nonce);
  id_ = id.value();
  const auto tables = bootstrap_->share([&] {
    std::vector<diagnose::RankPlace> places;
    for (const RankFacts& peer : ranks) places.push_back({peer.process, peer.calls});
    return diagnose::PeerTables::get(id_, places);
  });
  if (journal_ == nullptr) return;
  diagnose::noteSettings(changedSettings(settings_));
  journal_->start(id_, rank(), this->ranks(), device_, decision_->slots, options_.name,
                  network_->name());
  runtime_.prepareToReadWords(device_);
  diagnose::Questions questions;
  questions.findFailure = [this]() -> std::optional<diagnose::Questions::Failure> {
    if (!health_->hasFailed() && !abort_->aborted()) return std::nullopt;
    const auto error = health_->error();
    return diagnose::Questions::Failure{error ? static_cast<int>(error->code()) : 0,
                                        abort_->aborted()};
  };
  questions.isDone = [this] {
    // Without a current device CUDA would make a context on device 0.
    const runtime::DeviceScope scope(runtime_, device_);
    return isIdle();
  };
  questions.readProgress = [this] { return readProgress(); };
  questions.readLinks = [this] { return readLinks(); };
  questions.fail = [this](const Error& error) { bootstrap_->fail(health_->fail(error).what()); };
  watched_ = std::make_shared<diagnose::Watched>(journal_, *tables, rank(), description(),
                                                 std::chrono::seconds(settings_.hangSeconds),
                                                 std::move(questions));
  diagnose::Watchdog::get().add(watched_);
}

void Communicator::stopWatching() {
  if (watched_ != nullptr) watched_->stop();
}

std::optional<diagnose::Progress> Communicator::readProgress() {
  std::vector<const uint64_t*> addresses(device::kMarkWords);
  std::iota(addresses.begin(), addresses.end(), tables_->marks());
  std::vector<uint64_t> marks(addresses.size());
  if (!runtime_.readWords(device_, addresses, marks)) return std::nullopt;
  const uint64_t started = std::max<uint64_t>(*std::max_element(marks.begin(), marks.end()) / 2, 1);
  const bool runs = std::find(marks.begin(), marks.end(), 2 * started) != marks.end();
  return diagnose::Progress{started, runs ? started - 1 : started};
}

std::optional<std::vector<diagnose::Link>> Communicator::readLinks() {
  std::vector<diagnose::Link> links;
  std::vector<const uint64_t*> addresses;
  {
    const std::lock_guard lock(countersMutex_);
    for (const auto& fifo : counters_) {
      if (links.size() == diagnose::kLinks) break;
      links.push_back({fifo.peer, fifo.channel, fifo.sends, 0, 0, fifo.network});
      addresses.push_back(fifo.tail);
      addresses.push_back(fifo.head);
    }
    for (size_t i = 0; i < links.size(); i++) {
      if (!links[i].network || !links[i].sends) continue;
      for (uint32_t slot = 0; slot < decision_->slots; slot++) {
        addresses.push_back(counters_[i].tail + device::kSizesWord + slot);
      }
    }
  }
  std::vector<uint64_t> values(addresses.size());
  if (!runtime_.readWords(device_, addresses, values)) return std::nullopt;
  for (size_t i = 0; i < links.size(); i++) {
    links[i].tail = values[2 * i];
    links[i].head = values[2 * i + 1];
  }
  // The counters and sizes may have changed in between; they are those of a call that hangs.
  auto sizes = values.begin() + static_cast<ptrdiff_t>(2 * links.size());
  for (diagnose::Link& link : links) {
    if (!link.network || !link.sends) continue;
    const uint64_t slots = std::min<uint64_t>(link.tail - link.head, decision_->slots);
    for (uint64_t step = link.tail - slots; step < link.tail; step++) {
      link.bytesInFlight += sizes[static_cast<ptrdiff_t>(step % decision_->slots)];
    }
    sizes += decision_->slots;
  }
  return links;
}

void Communicator::enter(const std::vector<StreamTask>& tasks, Prepared& prepared) {
  if (journal_ == nullptr) return;
  if (prepared.captured) {
    // Nobody can say how often a graph is launched.
    journal_->noteCapture();
    return;
  }
  for (const StreamTask& task : tasks) {
    if (task.task.count == 0) continue;  // other ranks need not make calls of nothing
    prepared.lastCall = journal_->enter(task.task);
    if (prepared.firstCall == 0) prepared.firstCall = prepared.lastCall;
  }
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

std::shared_ptr<void> Communicator::registerMemory(const void* address, uint64_t bytes) {
  const uint64_t window = windows_ == nullptr ? 0 : windows_->registerMemory(address, bytes);
  if (window == 0) return nullptr;
  return std::shared_ptr<void>(windows_.get(), [weak = std::weak_ptr(windows_), window](void*) {
    if (const auto windows = weak.lock()) windows->unregisterMemory(window);
  });
}

// Finds the windows of the buffers that large messages and results are received in.
void Communicator::findWindows(std::vector<plan::Task>& calls, bool captured) {
  if (windows_ == nullptr) return;
  for (plan::Task& call : calls) {
    const uint64_t bytes = call.count * device::elementBytes(call.reduction.type);
    const auto all = static_cast<uint64_t>(ranks()) * bytes;
    if (plan::offersOutput(config_, call)) {
      if (call.call == plan::Call::broadcast && call.peer == rank()) continue;
      call.window = windows_->find(call.output, call.call == plan::Call::allGather ? all : bytes,
                                   -1, captured);
    }
    if (bytes < config_.directBytes) continue;
    switch (call.call) {
      case plan::Call::receive:
        if (call.peer == rank()) break;
        call.window = windows_->find(call.output, bytes, call.peer, captured);
        break;
      case plan::Call::allToAll:
        call.window = windows_->find(call.output, all, -1, captured);
        break;
      case plan::Call::gather:
        if (call.peer == rank()) call.window = windows_->find(call.output, all, -1, captured);
        break;
      case plan::Call::scatter:
        if (call.peer == rank()) break;
        call.window = windows_->find(call.output, bytes, call.peer, captured);
        break;
      default:
        break;
    }
  }
}

Communicator::Prepared Communicator::prepare(const std::vector<StreamTask>& tasks) {
  Prepared prepared;
  std::vector<plan::Task> calls;
  calls.reserve(tasks.size());
  for (const StreamTask& task : tasks) {
    calls.push_back(task.task);
    if (std::find(prepared.streams.begin(), prepared.streams.end(), task.stream) ==
        prepared.streams.end()) {
      prepared.streams.push_back(task.stream);
    }
  }
  // Also refuses, before anything is done, what is not a stream.
  runtime::DeviceScope scope(runtime_, device_);
  for (runtime::Stream stream : prepared.streams) {
    prepared.captured |= runtime_.captureState(stream) != runtime::CaptureState::none;
  }
  findWindows(calls, prepared.captured);
  stageInPlace(calls, prepared);
  prepared.plan = plan::makePlan(config_, calls);
  if (logLevel() >= LogLevel::trace) {
    for (const std::string& line : plan::describe(prepared.plan)) {
      writeLog(LogLevel::trace, fmt::format("rank {}: {}", rank(), line));
    }
  }
  prepared.needs.messages = prepared.plan.needs.peers;
  prepared.needs.collectives =
      static_cast<uint64_t>(std::count_if(tasks.begin(), tasks.end(), [](const StreamTask& task) {
        return task.task.count != 0 && task.task.call != plan::Call::send &&
               task.task.call != plan::Call::receive;
      }));
  return prepared;
}

// An all-to-all in place that is not direct sends a block of the buffer in one round and receives
// into it in another, so the input is copied first.
void Communicator::stageInPlace(std::vector<plan::Task>& calls, Prepared& prepared) {
  auto bytesOf = [this](const plan::Task& call) {
    const bool inPlace = call.call == plan::Call::allToAll && call.input == call.output &&
                         !tuning::sendsDirectly(*config_.model, plan::shareBytes(call));
    return inPlace && ranks() > 1 ? call.count * static_cast<uint64_t>(ranks()) *
                                        device::elementBytes(call.reduction.type)
                                  : 0;
  };
  uint64_t total = 0;
  for (const plan::Task& call : calls) total += bytesOf(call);
  if (total == 0) return;
  std::byte* next = stagingBuffer(total, prepared.captured);
  for (plan::Task& call : calls) {
    const uint64_t bytes = bytesOf(call);
    if (bytes == 0) continue;
    prepared.copies.push_back({next, call.input, bytes});
    call.input = next;
    next += bytes;
  }
}

// A buffer that is too small is replaced by one of at least twice its size, so that few are made.
// Graphs that may be launched again keep those of captured calls in use.
std::byte* Communicator::stagingBuffer(size_t bytes, bool captured) {
  std::shared_ptr<runtime::DeviceMemory>& buffer = captured ? capturedStaging_ : staging_;
  if (buffer == nullptr || buffer->bytes() < bytes) {
    const size_t before = buffer == nullptr ? 0 : buffer->bytes();
    auto old = std::exchange(buffer, runtime_.allocate(device_, std::max(bytes, 2 * before)));
    if (captured) {
      earlierCapturedStaging_.push_back(std::move(old));
    } else {
      releaseAfterLaunches(std::move(old));
    }
  }
  return static_cast<std::byte*>(buffer->address());
}

// Releases memory when everything that has been launched is done, without waiting for it here.
void Communicator::releaseAfterLaunches(std::shared_ptr<runtime::DeviceMemory> memory) {
  if (memory == nullptr || (!launched_ && !captured_)) return;
  Reaper::get().add([&runtime = runtime_, device = device_, memory = std::move(memory),
                     stream = streamBehindLaunches()]() mutable {
    try {
      const runtime::DeviceScope scope(runtime, device);
      if (!runtime.query(stream.get())) return false;
    } catch (const std::exception& error) {
      logWarn("The device reported while memory was to be released: {}", error.what());
    }
    stream.reset();
    memory.reset();
    return true;
  });
}

bool Communicator::isConnected(const Prepared& prepared) const {
  return connector_->isConnected(prepared.plan.needs);
}

void Communicator::connect(const Prepared& prepared) {
  health_->check(prepared.needs);
  const GroupProfile::Step step(prepared.profile.get(), "connect");
  runtime::DeviceScope scope(runtime_, device_);
  const ScopedCpuAffinity nearGpu(cpuAffinity_, settings_.ignoreCpuAffinity);
  connector_->connect(prepared.plan.needs);
  const std::lock_guard lock(countersMutex_);
  counters_ = connector_->fifoCounters();
}

void Communicator::launch(Prepared& prepared) {
  health_->begin(prepared.needs);
  const bool counts = !prepared.plan.launches.empty() && !prepared.captured;
  const uint64_t launchNumber = counts ? ++launches_ : launches_;
  const auto note = [&] {
    if (prepared.lastCall != 0) {
      journal_->launched(prepared.firstCall, prepared.lastCall, launchNumber);
    }
  };
  if (prepared.plan.launches.empty()) return note();
  const GroupProfile::Step step(prepared.profile.get(), "launch");
  runtime::DeviceScope scope(runtime_, device_);
  const runtime::Stream stream = prepared.streams.front();
  // Launches of one communicator share counters and buffers, so they run in call order, also when
  // the calls are made on different streams, and when graphs that hold some are launched between.
  const uint64_t number = prepared.captured ? 0 : runtime_.streamNumber(stream);
  if (!prepared.captured && (captured_ || (launched_ && lastStream_ != number))) {
    lastLaunch_->makeWait(stream);
  }
  for (size_t i = 1; i < prepared.streams.size(); i++) {
    join_->record(prepared.streams[i]);
    join_->makeWait(stream);
  }
  // Only now are all streams of a capture in it.
  if (prepared.captured) lastLaunch_->makeGraphWait(stream);
  const transport::LaunchContext context = launchContext(counts ? launchNumber : 0);
  if (prepared.profile != nullptr) prepared.profile->beginLaunches(stream, prepared.captured);
  for (const Prepared::Copy& copy : prepared.copies) {
    // A kernel, which looks for an abort first: the user may have freed the memory by the time that
    // a copy of the stream would begin.
    plan::Launch launch = plan::planCopy(config_.channels, copy.to, copy.from, copy.bytes);
    transport::launch(runtime_, context, launch, stream);
  }
  for (plan::Launch& launch : prepared.plan.launches) {
    transport::launch(runtime_, context, launch, stream);
  }
  if (prepared.profile != nullptr) prepared.profile->endLaunches(stream);
  if (prepared.streams.size() > 1) {
    join_->record(stream);
    for (size_t i = 1; i < prepared.streams.size(); i++) join_->makeWait(prepared.streams[i]);
  }
  if (prepared.captured) {
    lastLaunch_->recordInGraph(stream);
    captured_ = true;
    captures_ = true;
  } else {
    lastLaunch_->record(stream);
    launched_ = true;
    lastStream_ = number;
  }
  connector_->noteLaunch();
  note();
}

// `launch` is its number, or 0 if it is not counted.
transport::LaunchContext Communicator::launchContext(uint64_t launch) const {
  return {tables_->address(),
          abort_->waitFlag(),
          abort_->launchFlag(),
          &connector_->direct(),
          &connector_->wide(),
          {launch == 0 || journal_ == nullptr ? nullptr : tables_->marks(), launch}};
}

// A stream that is idle once everything that was launched is done.
std::shared_ptr<void> Communicator::streamBehindLaunches() {
  std::shared_ptr<void> stream = runtime_.createStream(device_);
  lastLaunch_->makeWait(stream.get());
  return stream;
}

void Communicator::finish() {
  constexpr std::chrono::microseconds kShortNap{10}, kLongNap{1000};
  if (!launched_ && !captured_) return;
  runtime::DeviceScope scope(runtime_, device_);
  const std::shared_ptr<void> stream = streamBehindLaunches();
  for (auto nap = kShortNap; !runtime_.query(stream.get()); nap = std::min(2 * nap, kLongNap)) {
    if (abort_->aborted()) return;
    std::this_thread::sleep_for(nap);
  }
}

bool Communicator::isIdle() {
  return lastLaunch_->isReached();
}

void Communicator::prepareToSuspend() {
  finish();
  const std::vector<int32_t> captured = bootstrap_->allGather(int32_t{captured_ ? 1 : 0});
  const auto found = std::ranges::find(captured, 1);
  if (found == captured.end()) return;
  throw invalidUsage("Calls of rank {} were captured into a CUDA graph, which uses its memory",
                     found - captured.begin())
      .rank(rank())
      .remedy("Destroy the communicator and make it again in place of ncclCommSuspend");
}

// Peers have mapped the memory, so that it is free when all of them have come to the end.
void Communicator::suspend() {
  connector_->drain();
  connector_->waitUntilMapped();
  bootstrap_->barrier();
  {
    const runtime::DeviceScope scope(runtime_, device_);
    const auto pause = watched_ == nullptr ? std::unique_lock<std::mutex>() : watched_->pause();
    const std::lock_guard lock(countersMutex_);
    counters_.clear();
    connector_.reset();
    tables_.reset();
    mappings_.reset();
    staging_.reset();
    arena_->release(kept_);
  }
  bootstrap_->barrier();
}

void Communicator::resume() {
  const runtime::DeviceScope scope(runtime_, device_);
  const ScopedCpuAffinity nearGpu(cpuAffinity_, settings_.ignoreCpuAffinity);
  bootstrap_->barrier();
  makeConnector();
}

bootstrap::UniqueId Communicator::createGrowId() {
  const std::lock_guard lock(growMutex_);
  if (growId_) {
    throw invalidUsage("The communicator has an id from ncclCommGetUniqueId that was not used yet")
        .rank(rank())
        .remedy("Call ncclCommGetUniqueId once on one rank, then ncclCommGrow on all ranks");
  }
  Settings settings = settings_;
  settings.commId.clear();
  growId_ = bootstrap::createUniqueId(settings);
  return *growId_;
}

std::optional<bootstrap::UniqueId> Communicator::growId() const {
  const std::lock_guard lock(growMutex_);
  return growId_;
}

void Communicator::dropGrowId() {
  const std::lock_guard lock(growMutex_);
  growId_.reset();
}

uint64_t Communicator::deviceBytes() const {
  uint64_t bytes = arena_->bytes();
  for (const auto* buffer : {&staging_, &capturedStaging_}) {
    if (*buffer != nullptr) bytes += (*buffer)->bytes();
  }
  for (const auto& buffer : earlierCapturedStaging_) {
    if (buffer != nullptr) bytes += buffer->bytes();
  }
  return bytes;
}

std::string Communicator::description() const {
  return fmt::format("communicator{}{}, rank {} of {}", options_.name.empty() ? "" : " ",
                     options_.name, config_.rank, config_.ranks);
}

int Communicator::addReduction(const CustomReduction& reduction) {
  static std::atomic<int> made{0};
  const int number = made++;
  std::lock_guard lock(reductionsMutex_);
  reductions_.emplace(number, reduction);
  return number;
}

void Communicator::removeReduction(int number) {
  reduction(number);
  std::lock_guard lock(reductionsMutex_);
  reductions_.erase(number);
}

CustomReduction Communicator::reduction(int number) const {
  std::lock_guard lock(reductionsMutex_);
  const auto entry = reductions_.find(number);
  if (entry == reductions_.end()) {
    throw invalidArgument("The reduction operator is not one of this communicator")
        .rank(rank())
        .remedy(
            "Use ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg or an operator that "
            "ncclRedOpCreatePreMulSum made on the same communicator and that still exists");
  }
  return entry->second;
}

}  // namespace unisono::comm
