// SPDX-License-Identifier: Apache-2.0
#include "bench_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/settings.h"
#include "bench_report.h"
#include "coordinator.h"
#include "machine.h"
#include "rank_set.h"
#include "reference.h"

namespace unisono::bench {
namespace {

constexpr size_t kDefaultMaxBytesCuda = size_t{128} << 20;
// A CPU simulates the GPUs, so larger sizes show nothing new.
constexpr size_t kDefaultMaxBytesHost = size_t{1} << 20;
// How long the other processes may take to exit after one has failed.
constexpr double kGraceSeconds = 10;

// Shared by the workers of one process.
struct Run {
  const BenchOptions& options;
  const BenchMachine& machine;
  const Placement& placement;
  Coordinator& coordinator;
};

RunDescription describeRun(const Run& run) {
  RunDescription description;
  description.libraries.push_back({run.machine.libraryPath, run.machine.libraryVersion});
  if (!run.options.against.empty()) {
    description.libraries.push_back({run.machine.otherPath, run.machine.otherVersion});
  }
  description.backend = run.machine.backend;
  description.ranks = run.placement.ranks();
  description.nodes = run.placement.nodes;
  description.processes = run.placement.processes();
  for (int worker = 0; worker < run.placement.workers(); worker++) {
    const int process = worker / run.placement.threads;
    for (const LocalRank& local : run.placement.ranksOf(worker)) {
      description.rankTexts.push_back(
          fmt::format("node {}, process {}, thread {}, device {} ({})",
                      run.placement.nodeOf(process), process, worker % run.placement.threads,
                      local.device, run.machine.deviceNames[static_cast<size_t>(local.device)]));
    }
  }
  return description;
}

double combineSeconds(const std::vector<Contribution>& all, Averaging averaging) {
  double first = all.front().seconds;
  double sum = 0, min = first, max = first;
  for (const Contribution& each : all) {
    sum += each.seconds;
    min = std::min(min, each.seconds);
    max = std::max(max, each.seconds);
  }
  switch (averaging) {
    case Averaging::firstRank:
      return first;
    case Averaging::min:
      return min;
    case Averaging::max:
      return max;
    default:
      return sum / static_cast<double>(all.size());
  }
}

// One thread with its ranks. All workers take the same steps in the same order.
class Worker {
 public:
  Worker(const Run& run, const std::vector<Side>& sides, int worker)
      : run_(run), options_(run.options), sides_(sides), worker_(worker) {
    unsigned cores = std::max(std::thread::hardware_concurrency(), 1u);
    helpers_ = std::max(static_cast<int>(cores) / run.placement.workers(), 1);
  }

  void work() {
    sizes_ = benchSizes(
        options_, run_.machine.backend == "cuda" ? kDefaultMaxBytesCuda : kDefaultMaxBytesHost);
    connect();
    const OperationInfo& info = operationInfo(options_.operation);
    if (worker_ == 0) {
      std::FILE* table = options_.jsonPath == "-" ? stderr : stdout;
      if (options_.quiet) {
        nowhere_.reset(std::fopen("/dev/null", "w"));
        table = nowhere_.get();
      }
      report_.emplace(options_, describeRun(run_), table);
      report_->header();
    }
    int firstRoot = info.hasRoot ? std::max(options_.root, 0) : 0;
    int lastRoot = info.hasRoot && options_.root < 0 ? run_.placement.ranks() - 1 : firstRoot;
    for (ElementType type : options_.types) {
      for (BenchReduction reduction : options_.reductions) {
        Reference reference = makeReference(type, reduction, 0);
        for (auto& set : sets_) {
          if (info.reduces) set->prepareReduction(reference, reduction);
        }
        for (int root = firstRoot; root <= lastRoot; root++) {
          runSizes(type, reduction, root, reference);
        }
      }
    }
    for (auto& set : sets_) set->finish();
    if (report_) {
      report_->footer();
      report_->writeJson();
    }
  }

 private:
  void connect() {
    const bool cuda = run_.machine.backend == "cuda";
    RankSet::Config config;
    config.ranks = run_.placement.ranksOf(worker_);
    config.totalRanks = run_.placement.ranks();
    config.registration = options_.registration;
    config.stopwatch = cuda;
    config.timeoutSeconds = options_.timeoutSeconds;
    for (ElementType type : options_.types) {
      size_t width = elementInfo(type).bytes;
      size_t count = countForBytes(options_.operation, sizes_.back(), width, config.totalRanks);
      config.bufferBytes = std::max(
          config.bufferBytes, bytesForCount(options_.operation, count, width, config.totalRanks));
    }
    for (size_t i = 0; i < sides_.size(); i++) {
      const Library& library = *sides_[i].library;
      if (worker_ == 0) {
        ncclUniqueId id;
        library.check(library.ncclGetUniqueId(&id), "ncclGetUniqueId");
        run_.coordinator.publishId(static_cast<int>(i), id);
      }
      run_.coordinator.barrier();
      sets_.push_back(std::make_unique<RankSet>(library, *sides_[i].device, run_.coordinator,
                                                config, run_.coordinator.id(static_cast<int>(i))));
      run_.coordinator.barrier();
    }
  }

  Reference makeReference(ElementType type, BenchReduction reduction, int variant) const {
    uint64_t seed = mixBits(options_.seed, static_cast<uint64_t>(variant), 0);
    if (!operationInfo(options_.operation).reduces) {
      return Reference(seed, type, run_.placement.ranks());
    }
    return Reference(seed, type, reduction, run_.placement.ranks());
  }

  void runSizes(ElementType type, BenchReduction reduction, int root, const Reference& reference) {
    std::optional<size_t> last;
    for (size_t size : sizes_) {
      CallSpec call;
      call.type = type;
      call.reduction = reduction;
      call.shape.operation = options_.operation;
      call.shape.ranks = run_.placement.ranks();
      call.shape.root = root;
      call.shape.elementBytes = elementInfo(type).bytes;
      call.shape.count =
          countForBytes(options_.operation, size, call.shape.elementBytes, call.shape.ranks);
      if (last == call.shape.count) continue;  // rounded to the same number of elements
      last = call.shape.count;

      Row row;
      row.count = call.shape.count;
      row.bytes =
          bytesForCount(options_.operation, row.count, call.shape.elementBytes, call.shape.ranks);
      row.type = type;
      row.reduction = reduction;
      row.root = root;
      call.shape.inPlace = false;
      row.outOfPlace = runPlacement(call, reference, row);
      if (operationInfo(options_.operation).hasInPlace) {
        call.shape.inPlace = true;
        row.inPlace = runPlacement(call, reference, row);
      }
      if (report_) report_->add(row);
    }
  }

  // Out of place, each call has the same result, so the result of the timed calls is checked. In
  // place, timed calls reduce their own results again, so single calls are checked before them.
  std::vector<Measurement> runPlacement(const CallSpec& call, const Reference& reference,
                                        Row& row) {
    std::vector<Measurement> results(sets_.size());
    const bool inPlace = call.shape.inPlace;
    for (int check = inPlace ? 0 : 1; check < options_.checks; check++) {
      const Reference fresh = makeReference(call.type, call.reduction, check);
      for (size_t i = 0; i < sets_.size(); i++) {
        sets_[i]->fill(call, fresh, helpers_);
        sets_[i]->measure(call, 1, false, 0);
        collect(verify(i, call, fresh), results[i], row);
      }
    }
    for (size_t i = 0; i < sets_.size(); i++) {
      if (!inPlace) sets_[i]->fill(call, reference, helpers_);
      if (options_.warmup > 0) sets_[i]->measure(call, options_.warmup, false, 0);
    }
    for (int repeat = 0; repeat < options_.repeatCount(); repeat++) {
      for (size_t turn = 0; turn < sets_.size(); turn++) {
        // Each library goes first in half of the repeats, so that the order favours neither.
        size_t i = repeat % 2 == 0 ? turn : sets_.size() - 1 - turn;
        Contribution mine;
        mine.seconds =
            sets_[i]->measure(call, options_.iterations, options_.blocking, options_.graphLaunches);
        results[i].seconds.push_back(
            combineSeconds(run_.coordinator.exchange(worker_, mine), options_.averaging));
      }
    }
    if (!inPlace && options_.checks > 0) {
      for (size_t i = 0; i < sets_.size(); i++) {
        collect(verify(i, call, reference), results[i], row);
      }
    }
    return results;
  }

  std::vector<Contribution> verify(size_t library, const CallSpec& call,
                                   const Reference& reference) {
    Contribution mine;
    sets_[library]->verify(call, reference, helpers_, mine);
    return run_.coordinator.exchange(worker_, mine);
  }

  void collect(const std::vector<Contribution>& all, Measurement& result, Row& row) {
    for (const Contribution& each : all) {
      if (result.wrong == 0 && each.wrong > 0) result.firstWrong = each.message;
      result.wrong += each.wrong;
      row.sampled = row.sampled || each.sampled;
      if (worker_ == 0) run_.coordinator.addWrong(each.wrong);
    }
  }

  const Run& run_;
  const BenchOptions& options_;
  const std::vector<Side>& sides_;
  int worker_;
  int helpers_;
  std::vector<size_t> sizes_;
  std::vector<std::unique_ptr<RankSet>> sets_;
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Closer> nowhere_;
  std::optional<Report> report_;
};

// Runs the threads of one process and returns its exit status. Errors go to the coordinator.
int runProcess(const Run& run, const std::vector<Side>& sides, int process) {
  auto body = [&](int worker) {
    try {
      Worker(run, sides, worker).work();
    } catch (const Aborted&) {
    } catch (const std::exception& error) {
      run.coordinator.abort(kExitLibraryError, error.what());
    }
  };
  const int first = process * run.placement.threads;
  {
    std::vector<std::jthread> others;
    for (int thread = 1; thread < run.placement.threads; thread++) {
      others.emplace_back(body, first + thread);
    }
    body(first);
  }
  return run.coordinator.aborted() ? kExitLibraryError : kExitSuccess;
}

int runManyProcesses(const Run& run) {
  runInProcesses(run.placement.processes(), run.coordinator, kGraceSeconds, [&](int process) {
    try {
      setEnvironment(run.options, run.placement.nodeOf(process));
      std::string backend;
      std::vector<Side> sides = loadSides(run.options, &backend);
      return runProcess(run, sides, process);
    } catch (const std::exception& error) {
      run.coordinator.abort(kExitLibraryError, error.what());
      return kExitLibraryError;
    }
  });
  return run.coordinator.aborted() ? kExitLibraryError : kExitSuccess;
}

bool devicesAreShared() {
  return settingsFromEnvironment().multiRankDevice;
}

}  // namespace

int runBench(const BenchOptions& options) {
  try {
    setEnvironment(options, 0);
    const bool several = options.nodes > 1 || options.processPerGpu;
    std::vector<Side> sides;
    BenchMachine machine;
    if (several) {
      // A device runtime does not survive a fork, so this process must not start one.
      machine = machineFromText(callInProcess([&] {
        std::string backend;
        std::vector<Side> probed = loadSides(options, &backend);
        return toText(describe(probed, backend));
      }));
    } else {
      std::string backend;
      sides = loadSides(options, &backend);
      machine = describe(sides, backend);
    }
    const Placement placement = place(options, machine, devicesAreShared());
    // Longer than the limit of a call, so that the worker whose call hangs reports it.
    Coordinator coordinator(placement.workers(), 2 * options.timeoutSeconds);
    const Run run{options, machine, placement, coordinator};
    int status = several ? runManyProcesses(run) : runProcess(run, sides, 0);
    if (status != kExitSuccess) {
      fmt::print(stderr, "unisono bench: {}\n", coordinator.errorText());
      return status;
    }
    return coordinator.totalWrong() > 0 ? kExitWrongResult : kExitSuccess;
  } catch (const Error& error) {
    fmt::print(stderr, "unisono bench: {}\n", error.what());
    return kExitLibraryError;
  }
}

}  // namespace unisono::bench
