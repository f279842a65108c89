// SPDX-License-Identifier: Apache-2.0
#include "bench_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>

#include "library_table.h"

namespace unisono::bench {
namespace {

std::string operationNames() {
  std::vector<std::string> names;
  for (const OperationInfo& info : operations()) names.emplace_back(info.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string typeNames() {
  std::vector<std::string> names;
  for (const ElementInfo& info : elementTypes()) names.emplace_back(info.name);
  return fmt::format("{}, all", fmt::join(names, ", "));
}

std::string reductionNames() {
  std::vector<std::string> names;
  for (int i = 0; i < kReductions; i++) names.emplace_back(reductionName(BenchReduction{i}));
  return fmt::format("{}, all", fmt::join(names, ", "));
}

std::vector<std::string> splitList(std::string_view text) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (start <= text.size()) {
    size_t comma = std::min(text.find(',', start), text.size());
    parts.emplace_back(text.substr(start, comma - start));
    start = comma + 1;
  }
  return parts;
}

BenchOperation parseOperation(const std::string& text) {
  for (const OperationInfo& info : operations()) {
    if (text == info.name) return info.operation;
  }
  throw UsageError(
      fmt::format("unknown operation \"{}\"; expected one of {}", text, operationNames()));
}

std::vector<ElementType> parseTypes(const std::string& text) {
  std::vector<ElementType> types;
  for (const std::string& part : splitList(text)) {
    if (part == "all") {
      for (const ElementInfo& info : elementTypes()) types.push_back(info.type);
      continue;
    }
    const ElementInfo* info = findElementType(part);
    if (info == nullptr) {
      throw UsageError(
          fmt::format("-d: unknown type \"{}\"; expected one of {}", part, typeNames()));
    }
    types.push_back(info->type);
  }
  return types;
}

std::vector<BenchReduction> parseReductions(const std::string& text) {
  std::vector<BenchReduction> reductions;
  for (const std::string& part : splitList(text)) {
    bool found = false;
    for (int i = 0; i < kReductions; i++) {
      if (part != "all" && part != reductionName(BenchReduction{i})) continue;
      reductions.push_back(BenchReduction{i});
      found = true;
    }
    if (!found) {
      throw UsageError(
          fmt::format("-o: unknown reduction \"{}\"; expected one of {}", part, reductionNames()));
    }
  }
  return reductions;
}

template <typename T>
T parseWhole(const std::string& text, const char* option, const char* allowed) {
  T value{};
  auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size() || text.empty()) {
    throw UsageError(fmt::format("{}: \"{}\" is not {}", option, text, allowed));
  }
  return value;
}

void requireRange(const char* option, double value, double min, double max) {
  if (value >= min && value <= max) return;
  if (max >= std::numeric_limits<int>::max()) {
    throw UsageError(
        fmt::format("{}: {} is too small; it must be at least {}", option, value, min));
  }
  throw UsageError(
      fmt::format("{}: {} is out of range; it must be from {} to {}", option, value, min, max));
}

void checkCombinations(const BenchOptions& options) {
  if (options.minBytes && options.maxBytes && *options.minBytes > *options.maxBytes) {
    throw UsageError(fmt::format("-b {} is larger than -e {}", sizeText(*options.minBytes),
                                 sizeText(*options.maxBytes)));
  }
  const bool knownBackend =
      options.backend.empty() || options.backend == "host" || options.backend == "cuda";
  if (!knownBackend) {
    throw UsageError(
        fmt::format("--backend: unknown backend \"{}\"; expected host or cuda", options.backend));
  }
  if (options.backend == "cuda" && !options.topologyFile.empty()) {
    throw UsageError("--topo simulates a machine and needs --backend host");
  }
  const bool host = options.backend == "host" || !options.topologyFile.empty() ||
                    (options.nodes > 1 && options.backend.empty());
  if (host && options.graphLaunches > 0) {
    throw UsageError("-G: graphs need --backend cuda");
  }
  if (options.processPerGpu && options.threads > 1) {
    throw UsageError("--processes starts one process per GPU, so -t must be 1");
  }
  if (options.graphLaunches > 0 && options.blocking) {
    throw UsageError("-z 1 waits after each call, which a graph cannot record; omit -z 1 or -G");
  }
}

// Fails now rather than after hours of measuring.
void checkJsonFile(const std::string& path) {
  if (path.empty() || path == "-" || std::ofstream(path, std::ios::app)) return;
  throw UsageError(
      fmt::format("--json: cannot write {}; name a file in a writable directory", path));
}

}  // namespace

size_t parseSize(std::string_view text) {
  double number = 0;
  const char* end = text.data() + text.size();
  auto result = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  std::string_view suffix(result.ptr, static_cast<size_t>(end - result.ptr));
  const bool parsed = result.ec == std::errc() && number >= 0 && std::isfinite(number);
  int power = 0;
  bool known = parsed && (suffix.empty() || suffix == "B" || suffix == "b");
  if (parsed && !known) {
    size_t unit = std::string_view("kmgt").find(static_cast<char>(suffix[0] | 0x20));
    std::string_view rest = suffix.substr(1);
    known = unit != std::string_view::npos &&
            (rest.empty() || rest == "B" || rest == "b" || rest == "iB" || rest == "ib");
    power = known ? static_cast<int>(unit) + 1 : 0;
  }
  double bytes = std::ldexp(number, 10 * power);
  if (!known || bytes > 0x1p50 || bytes != std::floor(bytes)) {
    throw UsageError(fmt::format(
        "\"{}\" is not a size; expected a number of bytes, optionally with K, M, G or T (powers of "
        "1024), such as 8, 1K, 4M, 1G",
        text));
  }
  return static_cast<size_t>(bytes);
}

size_t parseSize(const char* option, std::string_view text) {
  try {
    return parseSize(text);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}", option, error.what()));
  }
}

std::string sizeText(size_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (unit < 4 && bytes >= 1024 && bytes % 1024 == 0) {
    bytes /= 1024;
    unit++;
  }
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

std::vector<size_t> benchSizes(const BenchOptions& options, size_t defaultMaxBytes) {
  size_t first = options.minBytes.value_or(std::min<size_t>(8, options.maxBytes.value_or(8)));
  size_t last = options.maxBytes.value_or(options.minBytes ? first : defaultMaxBytes);
  std::vector<size_t> sizes;
  for (size_t size = first; size <= last;) {
    sizes.push_back(size);
    if (options.stepBytes > 0) {
      size += options.stepBytes;
    } else {
      auto next = static_cast<size_t>(static_cast<double>(size) * options.factor);
      size = std::max(next, size + 1);
    }
  }
  return sizes;
}

CLI::App* addBenchCommand(CLI::App& app, BenchArguments& arguments) {
  BenchOptions& options = arguments.options;
  CLI::App* bench = app.add_subcommand(
      "bench",
      "Measure a collective and check its results. Exit status: 0 success, 1 wrong results, "
      "2 wrong options, 3 the library failed");
  // As in nccl-tests: scripts have defaults in front of what their user adds.
  bench->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  bench->add_option("operation", arguments.operation, "One of " + operationNames())->required();

  const char* sizes = "Sizes";
  bench->add_option("-b,--minbytes", arguments.minBytes, "Smallest size, such as 8, 1K, 4M (8)")
      ->group(sizes);
  bench
      ->add_option("-e,--maxbytes", arguments.maxBytes,
                   "Largest size (128M; 1M on the host backend; with -b alone the same as -b)")
      ->group(sizes);
  bench->add_option("-f,--stepfactor", options.factor, "Factor between sizes (2)")->group(sizes);
  bench
      ->add_option("-i,--stepbytes", arguments.stepBytes,
                   "Increment between sizes, instead of a factor")
      ->group(sizes);

  const char* ranks = "Ranks";
  bench
      ->add_option("-g,--ngpus", options.gpusPerThread,
                   "GPUs per thread, or per node with --processes (all of the machine)")
      ->group(ranks);
  bench->add_option("-t,--nthreads", options.threads, "Threads per process (1)")->group(ranks);
  bench->add_flag("--processes", options.processPerGpu, "One process per GPU")->group(ranks);
  bench
      ->add_option("--backend", options.backend,
                   "host (simulated GPUs) or cuda (the default if there is a GPU)")
      ->group(ranks);
  bench
      ->add_option("--topo", options.topologyFile,
                   "Host backend: simulate the machine in this topology file")
      ->group(ranks);
  bench
      ->add_option("--nodes", options.nodes,
                   "Number of nodes (1): simulated machines, or with --backend cuda parts of this "
                   "machine, which treat each other as remote hosts")
      ->group(ranks);

  const char* what = "What to run";
  bench
      ->add_option("-d,--datatype", arguments.types,
                   "Types, separated by commas: " + typeNames() + " (float)")
      ->group(what);
  bench
      ->add_option("-o,--op", arguments.reductions,
                   "Reductions, separated by commas: " + reductionNames() + " (sum)")
      ->group(what);
  bench->add_option("-r,--root", arguments.root, "Root rank; -1 or all: each rank in turn (0)")
      ->group(what);
  bench->add_option("-n,--iters", options.iterations, "Timed calls (20)")->group(what);
  bench->add_option("-w,--warmup_iters", options.warmup, "Calls before the timed ones (5)")
      ->group(what);
  bench->add_option("-c,--check", options.checks, "Number of checks of the results; 0: none (1)")
      ->group(what);
  bench
      ->add_option("-z,--blocking", arguments.blocking,
                   "1: wait for each call to complete before the next (0)")
      ->group(what);
  bench
      ->add_option(
          "-G,--cudagraph", options.graphLaunches,
          "CUDA: record the calls as a graph and launch it this many times; 0: no graph (0)")
      ->group(what);
  bench
      ->add_option("-R,--local_register", options.registration,
                   "Buffers: 0 plain, 1 registered, 2 symmetric windows (0)")
      ->group(what);
  bench
      ->add_option("-a,--average", arguments.averaging,
                   "Time to report: 0 rank 0, 1 mean, 2 minimum, 3 maximum of the threads (1)")
      ->group(what);
  bench
      ->add_option("-T,--timeout", options.timeoutSeconds,
                   "Give up after this many seconds without progress (300)")
      ->group(what);
  bench->add_option("--seed", arguments.seed, "Seed of the inputs (random; the table shows it)")
      ->group(what);

  const char* output = "Libraries and output";
  bench
      ->add_option("--library", options.library,
                   "The library to measure (../lib/libnccl.so.2 relative to this program)")
      ->group(output);
  bench
      ->add_option("--against", options.against,
                   "A second libnccl.so.2: measure both alternately and show the ratio")
      ->group(output);
  bench->add_option("--repeats", options.repeats, "Measurements per size (1; 5 with --against)")
      ->group(output);
  bench
      ->add_option(
          "--json", options.jsonPath,
          "Write the results as JSON to this file; -: to standard output, with the table on stderr")
      ->group(output);
  return bench;
}

BenchOptions finishOptions(const BenchArguments& arguments) {
  BenchOptions options = arguments.options;
  options.operation = parseOperation(arguments.operation);
  if (!arguments.minBytes.empty()) options.minBytes = parseSize("-b", arguments.minBytes);
  if (!arguments.maxBytes.empty()) options.maxBytes = parseSize("-e", arguments.maxBytes);
  if (!arguments.stepBytes.empty()) {
    options.stepBytes = parseSize("-i", arguments.stepBytes);
    if (options.stepBytes == 0) throw UsageError("-i: 0 is too small; it must be at least 1");
  }
  options.types = parseTypes(arguments.types);
  const OperationInfo& info = operationInfo(options.operation);
  std::vector<BenchReduction> reductions = parseReductions(arguments.reductions);
  options.reductions = info.reduces ? reductions : std::vector<BenchReduction>{BenchReduction::sum};
  options.root =
      arguments.root == "all" ? -1 : parseWhole<int>(arguments.root, "-r", "a rank, -1 or all");
  if (arguments.seed.empty()) {
    options.seed = std::random_device()();
  } else {
    options.seed = parseWhole<uint64_t>(arguments.seed, "--seed", "a non-negative integer");
  }

  constexpr double kMany = std::numeric_limits<int>::max();
  if (options.stepBytes == 0 && !(options.factor > 1 && options.factor <= kMany)) {
    throw UsageError(fmt::format(
        "-f: {} is out of range; it must be greater than 1, or use -i instead", options.factor));
  }
  requireRange("-g", options.gpusPerThread, 0, kMany);
  requireRange("-t", options.threads, 1, 1024);
  requireRange("--nodes", options.nodes, 1, 4096);
  requireRange("-n", options.iterations, 1, kMany);
  requireRange("-w", options.warmup, 0, kMany);
  requireRange("-c", options.checks, 0, kMany);
  requireRange("-r", options.root, -1, kMany);
  requireRange("-G", options.graphLaunches, 0, kMany);
  requireRange("-R", options.registration, 0, 2);
  requireRange("-z", arguments.blocking, 0, 1);
  requireRange("-a", arguments.averaging, 0, 3);
  requireRange("-T", options.timeoutSeconds, 1, kMany);
  requireRange("--repeats", options.repeats, 0, kMany);
  options.blocking = arguments.blocking == 1;
  options.averaging = Averaging{arguments.averaging};
  if (options.library.empty()) options.library = defaultLibraryPath();
  checkCombinations(options);
  checkJsonFile(options.jsonPath);
  return options;
}

}  // namespace unisono::bench
