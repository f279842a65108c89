// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "base/cpu_affinity.h"
#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/result.h"
#include "comm/direct_links.h"
#include "comm/reaper.h"

namespace unisono::comm {
namespace {

// Whether the word of a line that has its flag, as lineFlagWord() says, was stored in `step`.
bool isOfStep(device::Protocol protocol, uint64_t word, uint64_t step) {
  return protocol == device::Protocol::ll ? word >> 32 == device::lineFlagOf(step)
                                          : word == step + 1;
}
size_t lineFlagWord(device::Protocol protocol) {
  return protocol == device::Protocol::ll ? 0 : device::kWideLineData / sizeof(uint64_t);
}
// Whether only the flags in the slots of a FIFO tell which steps are there.
bool hasFlagsOnly(const diagnose::Link& link) {
  return link.lines && !link.network && !link.sends;
}

// The number of the launch that runs, as its kernel has marked it; 0: none.
uint64_t runningOf(const std::vector<uint64_t>& marks) {
  const auto running =
      std::ranges::find_if(marks, [](uint64_t mark) { return mark != 0 && mark % 2 == 0; });
  return running == marks.end() ? 0 : *running / 2;
}

}  // namespace

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
  if (connector_ != nullptr) {
    for (const auto& service : connector_->handOver()) {
      Reaper::get().add([service] { return service->isOver(); }, Reaper::AtExit::finish);
    }
    connector_->close();
  }
  leave("was destroyed");
}

// The other ranks are told first: as soon as the error is visible here, the user may abort, and
// nobody tells them if no call is in progress.
void Communicator::fail(const Error& error) {
  const Error first = health_->reserve(error);
  bootstrap_->fail(first.what());
  health_->fail(first);
}

void Communicator::leave(std::string_view how) noexcept {
  bool isCounted = !captured_;
  try {
    isCounted = isCounted || (journal_ != nullptr && readReplays());
  } catch (const std::exception& error) {
    logInfo("{}: the device does not say how often graphs ran: {}", description(), error.what());
  }
  bootstrap_->leave(how, [&](int peer) {
    return isCounted ? health_->countsFor(peer) : bootstrap::DepartureCounts{};
  });
}

void Communicator::watch(const std::vector<RankFacts>& ranks) {
  Fnv id;
  id.add(ranks.front().process);
  id.add(ranks.front().nonce);
  id_ = id.value();
  const auto tables = bootstrap_->share([&] {
    std::vector<diagnose::RankPlace> places;
    const bool network = usesNetwork(ranks);
    for (const RankFacts& peer : ranks) {
      const auto [address, port] = bootstrap_->addressOf(static_cast<int>(places.size()));
      places.push_back({peer.process, peer.calls, network ? peer.host : 0, peer.pid, peer.device,
                        peer.hostName.data(), address, port});
    }
    return diagnose::PeerTables::get(id_, places);
  });
  // Other hosts ask what the ranks of this one do.
  bootstrap::QuestionHandlers handlers;
  handlers.answer = [tables = *tables, self = rank()](int peer,
                                                      std::span<const std::byte> question) {
    return diagnose::answerQuestion(question, *tables, self, peer);
  };
  if (journal_ == nullptr) {
    bootstrap_->handleQuestions(std::move(handlers));
    return;
  }
  diagnose::noteSettings(changedSettings(settings_));
  journal_->start(id_, rank(), this->ranks(), device_, decision_->slots, options_.name,
                  network_->name(), bootstrap_->addressOf(rank()).first,
                  usesNetwork(ranks) ? ranks[static_cast<size_t>(rank())].host : 0);
  runtime_.prepareToReadWords(device_);
  diagnose::Questions questions;
  questions.findFailure = [this]() -> std::optional<diagnose::Questions::Failure> {
    if (!health_->hasFailed() && !abort_->aborted()) return std::nullopt;
    const auto error = health_->error();
    return diagnose::Questions::Failure{error ? static_cast<int>(resultOf(error->code())) : 0,
                                        health_->wasAborted()};
  };
  questions.isDone = [this] {
    // Without a current device CUDA would make a context on device 0.
    const runtime::DeviceScope scope(runtime_, device_);
    return isIdle();
  };
  questions.readProgress = [this] { return readProgress(); };
  questions.readLinks = [this] { return readLinks(); };
  questions.readReplays = [this] { return readReplays(); };
  questions.hasAnyoneLeft = [this] { return health_->hasAnyoneLeft(); };
  questions.fail = [this](const Error& error) { fail(error); };
  questions.ask = [this](int peer, std::span<const std::byte> question, bool connects) {
    return bootstrap_->ask(peer, question, connects);
  };
  questions.hasLeft = [this](int peer) { return health_->hasLeft(peer); };
  questions.hasDied = [this](int peer) { return bootstrap_->hasDied(peer); };
  questions.uplink = bootstrap_->uplink();
  watched_ = std::make_shared<diagnose::Watched>(journal_, *tables, rank(), description(),
                                                 std::chrono::seconds(settings_.hangSeconds),
                                                 std::move(questions));
  handlers.hear = [watched = watched_](int, std::vector<std::byte> answer) {
    watched->hear(std::move(answer));
  };
  bootstrap_->handleQuestions(std::move(handlers));
  diagnose::Watchdog::get().add(watched_);
}

void Communicator::stopWatching() {
  if (watched_ != nullptr) watched_->stop();
}

std::optional<std::vector<uint64_t>> Communicator::readMarks(const uint64_t* words) {
  std::vector<const uint64_t*> addresses(device::kMarkWords);
  std::iota(addresses.begin(), addresses.end(), words);
  std::vector<uint64_t> marks(addresses.size());
  if (!runtime_.readWords(device_, addresses, marks)) return std::nullopt;
  return marks;
}

std::optional<diagnose::Progress> Communicator::readProgress() {
  const auto marks = readMarks(tables_->marks());
  if (!marks) return std::nullopt;
  const uint64_t last = std::ranges::max(*marks) / 2;
  const uint64_t started = std::max<uint64_t>(planOf(last), 1);
  const bool isDone = runningOf(*marks) == 0 && (last == 0 || isLastOfPlan(last));
  return diagnose::Progress{started, isDone ? started : started - 1};
}

std::optional<Communicator::Running> Communicator::findRunning() {
  for (const bool isReplay : {false, true}) {
    if (isReplay && !captures_) continue;
    auto marks = readMarks(isReplay ? tables_->capturedMarks() : tables_->marks());
    if (!marks) return std::nullopt;
    const uint64_t number = runningOf(*marks);
    if (number == 0) continue;
    const auto note = isReplay ? replays_->findLaunch(number) : notes_.find(number);
    if (!note) return std::nullopt;
    return Running{*note, std::move(*marks)};
  }
  return std::nullopt;
}

std::optional<std::vector<diagnose::Link>> Communicator::readLinks() {
  std::vector<diagnose::Link> links;
  std::vector<device::Protocol> protocols;
  std::vector<const uint64_t*> addresses, perSlot;
  const std::optional<Running> running = findRunning();
  const uint32_t inUse = running ? running->note.protocols : ~uint32_t{0};
  device::DirectMemory directLines;
  device::WideMemory wide;
  {
    const std::lock_guard lock(countersMutex_);
    directLines = lines_;
    wide = wide_;
    for (const auto& fifo : counters_) {
      if (links.size() == diagnose::kLinks) break;
      if ((inUse >> static_cast<int>(fifo.protocol) & 1) == 0) continue;
      links.push_back(
          {fifo.peer, fifo.channel, fifo.sends, 0, 0, fifo.network, 0, fifo.lines, fifo.port});
      if (fifo.reducer != 0) {
        links.back().kind = diagnose::Link::Kind::heads;
        links.back().all = static_cast<uint64_t>(-fifo.reducer);
      }
      protocols.push_back(fifo.protocol);
      addresses.push_back(hasFlagsOnly(links.back()) ? fifo.head : fifo.tail);
      addresses.push_back(fifo.head);
      addresses.push_back(fifo.reducer != 0 ? fifo.used : fifo.head);
      for (uint32_t slot = 0; slot < decision_->slots; slot++) {
        if (fifo.network && fifo.sends) {
          perSlot.push_back(fifo.tail + device::kReportsWord + slot);
        } else if (hasFlagsOnly(links.back())) {
          const std::byte* line = fifo.slots + size_t{slot} * fifo.slotBytes;
          perSlot.push_back(reinterpret_cast<const uint64_t*>(line) + lineFlagWord(fifo.protocol));
        }
      }
    }
  }
  addresses.insert(addresses.end(), perSlot.begin(), perSlot.end());
  std::vector<uint64_t> values(addresses.size());
  if (!runtime_.readWords(device_, addresses, values)) return std::nullopt;
  for (size_t i = 0; i < links.size(); i++) {
    links[i].tail = values[3 * i];
    links[i].head = values[3 * i + 1];
    const uint64_t room = values[3 * i + 2] + decision_->slots;
    if (links[i].kind == diagnose::Link::Kind::heads) links[i].tail = std::min(links[i].tail, room);
  }
  // The counters and reports may have changed in between; they are those of a call that hangs.
  auto reports = values.begin() + static_cast<ptrdiff_t>(3 * links.size());
  for (size_t i = 0; i < links.size(); i++) {
    diagnose::Link& link = links[i];
    if (hasFlagsOnly(link)) {
      link.tail = link.head;
      const auto isThere = [&] {
        const uint64_t word = reports[static_cast<ptrdiff_t>(link.tail % decision_->slots)];
        return link.tail < link.head + decision_->slots && isOfStep(protocols[i], word, link.tail);
      };
      while (isThere()) link.tail++;
      reports += decision_->slots;
      continue;
    }
    if (!link.network || !link.sends) continue;
    if (link.lines) {
      link.tail = link.head;
      const auto isReported = [&] {
        const uint64_t report = reports[static_cast<ptrdiff_t>(link.tail % decision_->slots)];
        return link.tail < link.head + decision_->slots &&
               device::isLineReportOf(report, link.tail);
      };
      while (isReported()) link.tail++;
    }
    const uint64_t slots = std::min<uint64_t>(link.tail - link.head, decision_->slots);
    for (uint64_t step = link.tail - slots; step < link.tail; step++) {
      const uint64_t report = reports[static_cast<ptrdiff_t>(step % decision_->slots)];
      link.bytesInFlight += device::unpackReport(report).bytes;
    }
    reports += decision_->slots;
  }
  if (!running) return links;
  const auto read = [this](std::span<const uint64_t* const> from, std::span<uint64_t> to) {
    return runtime_.readWords(device_, from, to);
  };
  const auto direct =
      DirectLinks(config_, directLines, wide, running->note, running->marks, read).run();
  if (!direct) return std::nullopt;
  links.insert(links.begin(), direct->begin(), direct->end());
  return links;
}

std::optional<diagnose::Replays> Communicator::readReplays() {
  Replays::Counts counts;
  auto replays = replays_->read(counts);
  if (replays) health_->noteReplays(counts);
  return replays;
}

std::shared_ptr<void> Communicator::registerMemory(const void* address, uint64_t bytes) {
  return keepWindow(windows_ == nullptr ? 0 : windows_->registerMemory(address, bytes));
}

std::shared_ptr<void> Communicator::keepWindow(uint64_t window) {
  if (window == 0) return nullptr;
  return std::shared_ptr<void>(windows_.get(), [weak = std::weak_ptr(windows_), window](void*) {
    if (const auto windows = weak.lock()) windows->unregisterMemory(window);
  });
}

std::shared_ptr<const plan::SymmetricWindow> Communicator::registerTogether(void* address,
                                                                            uint64_t bytes,
                                                                            bool isSymmetric) {
  const runtime::DeviceScope scope(runtime_, device_);
  const auto ended = [this] { return health_->hasFailed() || abort_->raised(); };
  const uint64_t own = windows_ == nullptr ? 0 : windows_->registerMemory(address, bytes);
  std::shared_ptr<void> memory = keepWindow(own);
  const bool isShared = own != 0 && windows_->awaitAnnounced(own, ended);
  WindowOffer offer{};
  offer.window = isShared ? own : 0;
  offer.address = reinterpret_cast<uint64_t>(address);
  offer.offset = offer.address - runtime_.findRun(address, bytes).base;
  offer.bytes = bytes;
  offer.isOpen = runtime_.inspect(address).openToPeers ? 1 : 0;
  offer.usesCopyEngines = isSymmetric && copyEngines_ != nullptr ? 1 : 0;
  const std::vector<WindowOffer> offers = bootstrap_->allGather(offer);
  for (size_t peer = 0; windows_ != nullptr && peer < offers.size(); peer++) {
    if (offers[peer].window != 0) {
      windows_->awaitMapped(static_cast<int>(peer), offers[peer].window, ended);
    }
  }
  const std::shared_ptr<SymmetricMemory> buffers = findBuffers(offers);
  buffers->own = std::move(memory);
  const std::vector<uint32_t> suits = bootstrap_->allGather(uint32_t{buffers->suitsCopyEngines});
  buffers->suitsCopyEngines = decision_->config.model->facts.reachAll &&
                              std::ranges::all_of(suits, [](uint32_t one) { return one != 0; });
  logInfo("{}: window of {} bytes at {}, {}{}", description(), bytes, address,
          isShared ? "mapped by its peers" : "not mapped by other processes",
          buffers->suitsCopyEngines ? ", for copy engines" : "");
  {
    const std::lock_guard lock(symmetricMutex_);
    symmetric_.push_back(buffers);
  }
  // The mappings end with the communicator even if the window is never deregistered, but copies of
  // copy engines that were queued before an abort may still run.
  return {new plan::SymmetricWindow(buffers->window),
          [kept = buffers->suitsCopyEngines ? buffers : nullptr, buffers = std::weak_ptr(buffers),
           weak = weak_from_this()](const plan::SymmetricWindow* window) {
            delete window;
            if (const auto communicator = weak.lock()) communicator->dropSymmetric(buffers.lock());
          }};
}

// Finds where this rank sees the buffers that all ranks have registered.
std::shared_ptr<Communicator::SymmetricMemory> Communicator::findBuffers(
    const std::vector<WindowOffer>& offers) const {
  auto memory = std::make_shared<SymmetricMemory>();
  memory->window.bytes = offers.front().bytes;
  memory->suitsCopyEngines = true;
  const std::vector<transport::PeerPlace>& places = *peerPlaces_;
  for (size_t peer = 0; peer < offers.size(); peer++) {
    const WindowOffer& offer = offers[peer];
    const bool isSameProcess = places[peer].process == places[static_cast<size_t>(rank())].process;
    std::byte* base = nullptr;
    if (static_cast<int>(peer) == rank() || (isSameProcess && offer.isOpen != 0)) {
      base = reinterpret_cast<std::byte*>(offer.address);
    } else if (windows_ != nullptr && offer.window != 0) {
      if (auto mapped = windows_->mapped(static_cast<int>(peer), offer.window)) {
        base = static_cast<std::byte*>(mapped->address()) + offer.offset;
        memory->mapped.push_back(std::move(mapped));
      }
    }
    memory->window.bases.push_back(base);
    memory->window.bytes = std::min(memory->window.bytes, offer.bytes);
    if (base == nullptr || offer.usesCopyEngines == 0) memory->suitsCopyEngines = false;
  }
  return memory;
}

Communicator::LoadStoreTeam Communicator::loadStoreTeam() const {
  const tuning::CommFacts& facts = config_.model->facts;
  const LoadStoreTeam alone{rank(), 1};
  if (!settings_.zeroCopy || !facts.reachNode) return alone;
  if (config_.nodes == nullptr) return {0, ranks()};
  const int each = plan::localRanks(config_);
  int expected = 0;
  for (const std::vector<int>& node : config_.nodes->ranks) {
    if (static_cast<int>(node.size()) != each) return alone;
    for (const int rank : node) {
      if (rank != expected++) return alone;
    }
  }
  return {rank() - plan::localRank(config_), each};
}

void Communicator::dropSymmetric(const std::shared_ptr<SymmetricMemory>& window) {
  {
    const std::lock_guard lock(symmetricMutex_);
    std::erase(symmetric_, window);
  }
  window->own.reset();
  if (window->suitsCopyEngines) releaseAfterLaunches(window);  // copies may still be queued
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

bool Communicator::isReplaying() {
  if (!captured_ || journal_ == nullptr) return false;
  const auto replays = readReplays();
  return !replays || replays->running;
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
    lines_ = {};
    wide_ = {};
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
  uint64_t bytes = arena_->bytes() + *connectionBytes_;
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
