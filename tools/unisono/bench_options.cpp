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
  for (int i = 0; i < kReductions; i++) names.emplace_back(reductionName(Reduction{i}));
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

Operation parseOperation(const std::string& text) {
  for (const OperationInfo& info : operations()) {
    if (text == info.name) return info.operation;
  }
  throw UsageError(fmt::format("\"{}\" is no operation; there are {}", text, operationNames()));
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
      throw UsageError(fmt::format("-d: \"{}\" is no type; there are {}", part, typeNames()));
    }
    types.push_back(info->type);
  }
  return types;
}

std::vector<Reduction> parseReductions(const std::string& text) {
  std::vector<Reduction> reductions;
  for (const std::string& part : splitList(text)) {
    bool found = false;
    for (int i = 0; i < kReductions; i++) {
      if (part != "all" && part != reductionName(Reduction{i})) continue;
      reductions.push_back(Reduction{i});
      found = true;
    }
    if (!found) {
      throw UsageError(
          fmt::format("-o: \"{}\" is no reduction; there are {}", part, reductionNames()));
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

void requireRange(const char* option, double value, double least, double most) {
  if (value >= least && value <= most) return;
  if (most >= std::numeric_limits<int>::max()) {
    throw UsageError(fmt::format("{}: {} is not allowed; at least {}", option, value, least));
  }
  throw UsageError(fmt::format("{}: {} is not allowed; from {} to {}", option, value, least, most));
}

void checkCombinations(const BenchOptions& options) {
  if (options.minBytes && options.maxBytes && *options.minBytes > *options.maxBytes) {
    throw UsageError(fmt::format("-b {} is more than -e {}", sizeText(*options.minBytes),
                                 sizeText(*options.maxBytes)));
  }
  const bool knownBackend =
      options.backend.empty() || options.backend == "host" || options.backend == "cuda";
  if (!knownBackend) {
    throw UsageError(
        fmt::format("--backend: \"{}\" is no backend; there are host, cuda", options.backend));
  }
  if (options.backend == "cuda" && (options.nodes > 1 || !options.topologyFile.empty())) {
    throw UsageError("--topo and --nodes simulate machines: they need --backend host");
  }
  const bool host = options.backend == "host" || options.nodes > 1 || !options.topologyFile.empty();
  if (host && options.graphLaunches > 0) {
    throw UsageError("-G: only --backend cuda has graphs");
  }
  if (options.processPerGpu && options.threads > 1) {
    throw UsageError("--processes gives each GPU a process of its own: -t must be 1");
  }
  if (options.graphLaunches > 0 && options.blocking) {
    throw UsageError("-z 1 waits after each call, which cannot be recorded in a graph: drop -G");
  }
}

// Said now, not when hours of measuring are to be written down.
void checkJsonFile(const std::string& path) {
  if (path.empty() || path == "-" || std::ofstream(path, std::ios::app)) return;
  throw UsageError(
      fmt::format("--json: {} cannot be written; name a file in a folder that can", path));
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
        "\"{}\" is no size: give whole bytes, or a number with K, M, G or T (powers of 1024), such "
        "as 8, 1K, 4M, 1G",
        text));
  }
  return static_cast<size_t>(bytes);
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
      "Measure a collective and check its results. Exit status: 0 all right, 1 a wrong "
      "result, 2 wrong options, 3 the library failed");
  bench->add_option("operation", arguments.operation, "One of " + operationNames())->required();

  const char* sizes = "Sizes";
  bench->add_option("-b,--minbytes", arguments.minBytes, "Smallest size, such as 8, 1K, 4M (8)")
      ->group(sizes);
  bench
      ->add_option("-e,--maxbytes", arguments.maxBytes,
                   "Largest size (128M; 1M on the host backend; with -b alone the same as -b)")
      ->group(sizes);
  bench->add_option("-f,--stepfactor", options.factor, "Each size is so many times the last (2)")
      ->group(sizes);
  bench
      ->add_option("-i,--stepbytes", arguments.stepBytes, "Each size is so much more than the last")
      ->group(sizes);

  const char* ranks = "Ranks";
  bench
      ->add_option("-g,--ngpus", options.gpusPerThread,
                   "GPUs of each thread; with --processes of each node (all of the machine)")
      ->group(ranks);
  bench->add_option("-t,--nthreads", options.threads, "Threads of each process (1)")->group(ranks);
  bench->add_flag("--processes", options.processPerGpu, "One process for each GPU")->group(ranks);
  bench->add_option("--backend", options.backend, "host (simulated GPUs) or cuda (if there is one)")
      ->group(ranks);
  bench->add_option("--topo", options.topologyFile, "Host backend: the machine in this XML file")
      ->group(ranks);
  bench->add_option("--nodes", options.nodes, "Host backend: so many of this machine (1)")
      ->group(ranks);

  const char* what = "What is run";
  bench
      ->add_option("-d,--datatype", arguments.types,
                   "Types, with commas: " + typeNames() + " (float)")
      ->group(what);
  bench
      ->add_option("-o,--op", arguments.reductions,
                   "Reductions, with commas: " + reductionNames() + " (sum)")
      ->group(what);
  bench->add_option("-r,--root", arguments.root, "Root, or -1 or all for each in turn (0)")
      ->group(what);
  bench->add_option("-n,--iters", options.iterations, "Calls that are timed (20)")->group(what);
  bench->add_option("-w,--warmup_iters", options.warmup, "Calls before the timed ones (5)")
      ->group(what);
  bench->add_option("-c,--check", options.checks, "How often results are checked; 0: never (1)")
      ->group(what);
  bench
      ->add_option("-z,--blocking", arguments.blocking, "1: wait for each call before the next (0)")
      ->group(what);
  bench
      ->add_option("-G,--cudagraph", options.graphLaunches,
                   "CUDA: record the calls as a graph and launch it so often (0: no graph)")
      ->group(what);
  bench
      ->add_option("-R,--local_register", options.registration,
                   "Buffers: 0 plain, 1 registered, 2 symmetric windows (0)")
      ->group(what);
  bench
      ->add_option("-a,--average", arguments.averaging,
                   "Time shown: 0 of rank 0, 1 mean, 2 least, 3 most of the threads (1)")
      ->group(what);
  bench
      ->add_option("-T,--timeout", options.timeoutSeconds,
                   "Give up after so many seconds without "
                   "progress (300)")
      ->group(what);
  bench->add_option("--seed", arguments.seed, "Seed of the inputs (random, printed)")->group(what);

  const char* output = "Libraries and output";
  bench->add_option("--library", options.library, "The library (lib/ beside this program's bin/)")
      ->group(output);
  bench
      ->add_option("--against", options.against,
                   "A second libnccl.so.2: measure both in turns and show the ratio")
      ->group(output);
  bench->add_option("--repeats", options.repeats, "Measurements of each size (1; 5 with --against)")
      ->group(output);
  bench
      ->add_option("--json", options.jsonPath,
                   "Write the results as JSON to this file; - is "
                   "standard output, the table then goes to stderr")
      ->group(output);
  return bench;
}

BenchOptions finishOptions(const BenchArguments& arguments) {
  BenchOptions options = arguments.options;
  options.operation = parseOperation(arguments.operation);
  if (!arguments.minBytes.empty()) options.minBytes = parseSize(arguments.minBytes);
  if (!arguments.maxBytes.empty()) options.maxBytes = parseSize(arguments.maxBytes);
  if (!arguments.stepBytes.empty()) {
    options.stepBytes = parseSize(arguments.stepBytes);
    if (options.stepBytes == 0) throw UsageError("-i: 0 is not allowed; at least 1");
  }
  options.types = parseTypes(arguments.types);
  const OperationInfo& info = operationInfo(options.operation);
  std::vector<Reduction> reductions = parseReductions(arguments.reductions);
  options.reductions = info.reduces ? reductions : std::vector<Reduction>{Reduction::sum};
  options.root =
      arguments.root == "all" ? -1 : parseWhole<int>(arguments.root, "-r", "a rank, -1 or all");
  if (arguments.seed.empty()) {
    options.seed = std::random_device()();
  } else {
    options.seed = parseWhole<uint64_t>(arguments.seed, "--seed", "a whole number from 0");
  }

  constexpr double kMany = std::numeric_limits<int>::max();
  if (options.stepBytes == 0 && !(options.factor > 1 && options.factor <= kMany)) {
    throw UsageError(
        fmt::format("-f: {} is not allowed; more than 1, or give -i instead", options.factor));
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
