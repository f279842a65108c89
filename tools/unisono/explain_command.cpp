// SPDX-License-Identifier: Apache-2.0
#include "explain_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strings.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "bench_run.h"
#include "call_model.h"
#include "detect/detect.h"
#include "explain_messages.h"
#include "explain_report.h"
#include "library_table.h"
#include "plugin/collnet.h"
#include "plugin/tuner.h"
#include "temporary_file.h"

namespace unisono::explain {
namespace {

using bench::BenchOperation;
using bench::BenchReduction;
using bench::UsageError;

constexpr int kExitShown = 0;
constexpr double kRunFactor = 4;  // between the sizes of a run over a range

std::string operationNames() {
  std::vector<std::string> names;
  for (const bench::OperationInfo& info : bench::operations()) names.emplace_back(info.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

// The first operations of the bench are the collectives, in the order of the cost model.
BenchOperation parseOperation(const std::string& text) {
  const int collective = tuning::findOperation(text);
  if (collective >= 0) return static_cast<BenchOperation>(collective);
  for (const bench::OperationInfo& info : bench::operations()) {
    if (text == info.name) return info.operation;
  }
  throw UsageError(
      fmt::format("unknown operation \"{}\"; expected one of {}", text, operationNames()));
}

const bench::ElementInfo& parseType(const std::string& text) {
  if (const bench::ElementInfo* info = bench::findElementType(text)) return *info;
  std::vector<std::string> names;
  for (const bench::ElementInfo& info : bench::elementTypes()) names.emplace_back(info.name);
  throw UsageError(
      fmt::format("--type: unknown type \"{}\"; expected one of {}", text, fmt::join(names, ", ")));
}

BenchReduction parseReduction(const std::string& text) {
  std::vector<std::string> names;
  for (int i = 0; i < bench::kReductions; i++) {
    names.emplace_back(bench::reductionName(BenchReduction{i}));
    if (text == names.back()) return BenchReduction{i};
  }
  throw UsageError(fmt::format("--op: unknown operator \"{}\"; expected one of {}", text,
                               fmt::join(names, ", ")));
}

// What kernels compute for an operator of the API.
device::Reduction deviceReduction(BenchReduction reduction, const bench::ElementInfo& type) {
  switch (reduction) {
    case BenchReduction::avg:
      return type.kind == bench::NumberKind::floating ? device::Reduction::preMulSum
                                                      : device::Reduction::sumPostDivide;
    case BenchReduction::preMulSum:
      return device::Reduction::preMulSum;
    default:
      return static_cast<device::Reduction>(reduction);
  }
}

// What to run: `bytes`, or with --min or --max the sizes of the range.
struct RunRequest {
  BenchOperation operation;
  bench::ElementType type;
  uint64_t bytes, minBytes, maxBytes;
  int nodes, ranks;
};
struct RunRow {
  uint64_t bytes;
  double us;
  uint64_t wrong;
};
struct RunResult {
  int status;  // of the command
  std::string backend;
  std::vector<RunRow> rows;
  bool failed() const { return status != kExitShown && status != bench::kExitWrongResult; }
};

// Runs the call through the bench: on this machine's GPUs, or on the host backend with the machine
// that was asked for.
RunResult measure(const ExplainArguments& arguments, const topology::XmlTopology& file,
                  const RunRequest& request) {
  const bench::TemporaryFile results(".json"), machine(".xml");
  bench::BenchOptions options;
  options.operation = request.operation;
  options.types = {request.type};
  options.reductions = {parseReduction(arguments.reduction)};
  options.minBytes = arguments.rangeGiven ? request.minBytes : request.bytes;
  options.maxBytes = arguments.rangeGiven ? request.maxBytes : request.bytes;
  options.factor = kRunFactor;
  options.nodes = request.nodes;
  options.gpusPerThread = request.ranks / request.nodes;
  options.seed = 1;
  options.library = bench::defaultLibraryPath();
  options.jsonPath = results.path();
  options.quiet = true;
  if (!arguments.machine.file.empty() || !arguments.machine.preset.empty()) {
    detect::writeFile(machine.path(), topology::writeTopologyXml(file));
    options.backend = "host";
    options.topologyFile = machine.path();
  } else {
    options.backend = "cuda";
    // Graphs, because predicted times do not include launches by the CPU.
    options.graphLaunches = 3;
  }
  RunResult result{bench::runBench(options), "", {}};
  if (result.failed()) return result;
  const auto json = nlohmann::json::parse(detect::readFile(results.path(), "the results"));
  result.backend = json.at("backend");
  for (const auto& row : json.at("rows")) {
    const auto& ours = row.at("out_of_place").at("ours");
    const double seconds = ours.at("time").at("median");
    result.rows.push_back({row.at("bytes"), seconds * 1e6, ours.at("wrong")});
  }
  return result;
}

// Writes what the user asked for.
template <typename Report>
void write(const ExplainArguments& arguments, const Report& report) {
  if (!arguments.svgFile.empty()) detect::writeFile(arguments.svgFile, svgOf(report));
  if (!arguments.jsonFile.empty() && arguments.jsonFile != "-") {
    detect::writeFile(arguments.jsonFile, jsonOf(report));
  }
  topo::print(arguments.jsonFile == "-" ? jsonOf(report) : topo::printableLines(textOf(report)));
}

// Explains messages, of which `call` has the size and the machine.
int showMessages(const ExplainArguments& arguments, const Settings& settings,
                 const topo::View& view, const topology::XmlTopology& file,
                 const bench::ElementInfo& type, const tuning::ModelInput& input,
                 const ExplainReport& call) {
  MessageReport report;
  report.source = call.source;
  report.nodes = call.nodes;
  report.ranks = call.ranks;
  report.network = call.network;
  report.operation = call.operation;
  report.typeName = call.typeName;
  report.typeBytes = type.bytes;
  report.count = call.count;
  report.bytes = call.question.bytes;
  report.messageBytes = call.count * type.bytes;
  report.minBytes = call.minBytes;
  report.maxBytes = call.maxBytes;
  report.warnings = call.warnings;
  report.config = messageConfigOf(settings, view, input);
  report.measured = measurementsOf(settings).messages;
  const int ranksPerNode = report.ranks / report.nodes;
  if (report.ranks == 1) addRoute({"to oneself", 0, 0, "memory of the device", {}, 1, 1}, report);
  if (ranksPerNode > 1) {
    addRoute({"inside a node", 0, 1,
              reachOf(view).hostMemory
                  ? "memory of GPUs, or of the host where they do not reach each other"
                  : "memory of GPUs",
              linkInside(view), ranksPerNode, 1},
             report);
  }
  if (report.nodes > 1) {
    addRoute(
        {"between nodes", 0, ranksPerNode, input.facts.network ? "the network" : "shared memory",
         linkBetween(view, input.facts, messageOperation(report.operation)), report.ranks,
         report.nodes},
        report);
  }
  int status = kExitShown;
  if (arguments.run) {
    const RunResult result = measure(arguments, file,
                                     {report.operation, type.type, report.bytes, report.minBytes,
                                      report.maxBytes, report.nodes, report.ranks});
    status = result.status;
    if (result.failed()) return status;
    report.backend = result.backend;
    for (const RunRow& row : result.rows) {
      MessageRow& shown = report.run.emplace_back(predict(report, row.bytes));
      shown.measuredUs = row.us;
      shown.wrong = row.wrong;
    }
  }
  write(arguments, report);
  return status;
}

// Loads the tuner plug-in as a communicator of these ranks does.
void loadTuner(const Settings& settings, const topo::View& view, tuning::ModelInput& input,
               ExplainReport& report) {
  if (report.ranks == 1) return;
  const auto library = plugin::TunerLibrary::open(
      settings.tunerPlugin,
      [&report](const std::string& problem) { report.warnings.push_back(problem); });
  if (library == nullptr) return;
  plugin::TunedCommunicator communicator;
  communicator.id = 1;
  communicator.ranks = report.ranks;
  communicator.nodes = view.joined.nodes();
  communicator.minRanksPerNode = communicator.maxRanksPerNode = report.ranks / communicator.nodes;
  report.advisor = plugin::TunerPlugin::create(library, communicator, input.constants);
  if (report.advisor != nullptr) report.tunerName = library->name();
}

// What joins the nodes: the network that a communicator opens with these settings. A simulation
// joins them through shared memory, unless the user or a plug-in says otherwise.
void findNetwork(const ExplainArguments& arguments, const Settings& settings, Assumptions& assumed,
                 ExplainReport& report) {
  if (report.nodes == 1) return;
  const bool simulated =
      arguments.run && !(arguments.machine.file.empty() && arguments.machine.preset.empty());
  const auto net =
      plugin::Net::open(settings.netPlugin, settings.network, {.communicator = 1},
                        [&](const std::string& warning) { report.warnings.push_back(warning); });
  assumed.network = net != nullptr || !settings.network.empty() || !simulated;
  assumed.sockets = net == nullptr && ::strcasecmp(settings.network.c_str(), "Socket") == 0;
  if (!assumed.network) return;
  report.network = net != nullptr             ? net->name()
                   : settings.network.empty() ? "InfiniBand, RoCE or sockets"
                                              : settings.network;
  if (net == nullptr) return;
  const auto reachesGpus = [&](const plugin::NetPort& port) {
    return port.reachesGpus || (port.takesDmaBufs && settings.dmaBuf);
  };
  if (std::ranges::any_of(net->ports(), reachesGpus)) {
    report.network += ", with GPUDirect where topo --why allows it";
  }
  if (settings.collnet <= 0) return;
  const auto collNet = plugin::CollNet::open(
      *net, [&](const std::string& warning) { report.warnings.push_back(warning); });
  if (collNet == nullptr) return;
  report.network += fmt::format(", which reduces through {}", collNet->name());
  assumed.collnet = report.nodes >= settings.collnetNodes;
  assumed.collnetReductions = tuning::collnetBits([&](device::DataType type,
                                                      device::Reduction reduction) {
    int can = 0;
    return collNet->functions().canReduce(type, reduction, &can) == plugin::kSuccess && can != 0;
  });
  assumed.collnetAllGather = collNet->functions().hasAllGather();
  assumed.collnetReduceScatter = collNet->functions().hasReduceScatter();
}

int show(const ExplainArguments& arguments) {
  const BenchOperation operation = parseOperation(arguments.operation);
  const bench::ElementInfo& type = parseType(arguments.type);
  const BenchReduction reduction = parseReduction(arguments.reduction);
  ExplainReport report;
  report.minBytes = bench::parseSize("--min", arguments.minSize);
  report.maxBytes = bench::parseSize("--max", arguments.maxSize);
  const uint64_t bytes = bench::parseSize("--size", arguments.size);
  if (report.minBytes > report.maxBytes) {
    throw UsageError(fmt::format("--min {} is larger than --max {}", bytesText(report.minBytes),
                                 bytesText(report.maxBytes)));
  }
  if (arguments.run && arguments.asNccl) {
    throw UsageError("--run runs this library, not NCCL; omit it or --as-nccl");
  }
  if (arguments.asNccl && isMessages(operation)) {
    throw UsageError(fmt::format(
        "--as-nccl compares algorithms of collectives, and {} consists of messages; omit it",
        bench::operationInfo(operation).name));
  }
  topo::MachineOptions machine = arguments.machine;
  if (arguments.ranks % machine.nodes != 0) {
    throw UsageError(
        fmt::format("--ranks: {} ranks do not divide by {} nodes", arguments.ranks, machine.nodes));
  }
  machine.ranksPerNode = arguments.ranks / machine.nodes;

  const Settings settings = settingsFromEnvironment();
  report.nodes = machine.nodes;
  Assumptions assumed{
      .asNccl = arguments.asNccl, .multicast = arguments.multicast, .collnet = arguments.collnet};
  findNetwork(arguments, settings, assumed, report);
  topo::ViewSettings viewSettings = topo::viewSettings(settings, machine);
  viewSettings.search.collnet |= assumed.collnet;
  const topology::XmlTopology file = topo::readMachine(machine, settings, viewSettings.paths);
  const topo::View view = topo::makeView(file, viewSettings);

  report.source = view.source;
  report.ranks = view.joined.ranks();
  report.asNccl = arguments.asNccl;
  report.operation = operation;
  report.typeName = type.name;
  report.reductionName = bench::reductionName(reduction);
  report.count = bench::countForBytes(operation, bytes, type.bytes, report.ranks);
  report.question = {isMessages(operation) ? tuning::Operation::allReduce
                                           : static_cast<tuning::Operation>(operation),
                     bench::bytesForCount(operation, report.count, type.bytes, report.ranks),
                     static_cast<device::DataType>(type.type), deviceReduction(reduction, type), 1};
  tuning::ModelInput input = modelInputOf(settings, view, assumed);
  if (isMessages(operation)) {
    return showMessages(arguments, settings, view, file, type, input, report);
  }
  loadTuner(settings, view, input, report);
  report.model = tuning::makeModel(input);
  for (std::string& warning : tuning::warningsOf(input, report.model)) {
    report.warnings.push_back(std::move(warning));
  }
  report.explanation = tuning::explain(report.model, report.question, report.advisor.get());
  report.ranges = tuning::choicesBySize(report.model, report.question, report.minBytes,
                                        report.maxBytes, report.advisor.get());

  int status = kExitShown;
  if (arguments.run) {
    const RunResult result = measure(arguments, file,
                                     {operation, type.type, report.question.bytes, report.minBytes,
                                      report.maxBytes, report.nodes, report.ranks});
    status = result.status;
    if (result.failed()) return status;
    report.backend = result.backend;
    tuning::Question question = report.question;
    for (const RunRow& row : result.rows) {
      question.bytes = row.bytes;
      report.run.push_back({row.bytes, tuning::choose(report.model, question, report.advisor.get()),
                            row.us, row.wrong});
    }
  }
  write(arguments, report);
  return status;
}

}  // namespace

CLI::App* addExplainCommand(CLI::App& app, ExplainArguments& arguments) {
  CLI::App* explain = app.add_subcommand(
      "explain",
      "Explain how a call is carried: the choice of algorithm and protocol (of messages: the path "
      "through kernels, FIFOs or copy engines), its predicted time, every candidate with the "
      "reason why it lost or is excluded, and how the choice changes over "
      "sizes, as a communicator with the NCCL_* variables of this environment sees them. Exit "
      "status: 0 explained, 1 a run had wrong results, 2 wrong options or an unusable file, 3 a "
      "run "
      "failed");
  const char* call = "Which call";
  explain
      ->add_option("OPERATION", arguments.operation,
                   fmt::format("One of {} (all_reduce)", operationNames()))
      ->group(call);
  explain
      ->add_option("-s,--size", arguments.size,
                   "Bytes of a rank's input or output, the larger one (1M)")
      ->group(call);
  explain->add_option("-d,--type", arguments.type, "Type of the elements, as in bench (float)")
      ->group(call);
  explain->add_option("-o,--op", arguments.reduction, "Operator, as in bench (sum)")->group(call);
  explain
      ->add_option("--ranks", arguments.ranks, "Ranks in all, equally many on each node (all GPUs)")
      ->check(CLI::Range(1, 1 << 20))
      ->group(call);
  topo::addMachineOptions(*explain, arguments.machine);

  const char* assume = "Assumptions";
  explain
      ->add_flag("--as-nccl", arguments.asNccl,
                 "Choose among NCCL's algorithms, as if all were implemented, and none of ours")
      ->group(assume);
  explain->add_flag("--multicast", arguments.multicast, "The GPUs have NVLink multicast (NVLS)")
      ->group(assume);
  explain->add_flag("--collnet", arguments.collnet, "The network reduces (CollNet)")->group(assume);

  const char* output = "Output (default: text)";
  const auto range = [&](const std::string&) { arguments.rangeGiven = true; };
  explain->add_option("-b,--min", arguments.minSize, "Smallest size of the table and the plot (8)")
      ->each(range)
      ->group(output);
  explain->add_option("-e,--max", arguments.maxSize, "Largest size of the table and the plot (1G)")
      ->each(range)
      ->group(output);
  explain
      ->add_flag(
          "--run", arguments.run,
          "Run the call (with --min or --max: sizes of that range) and show predicted next to "
          "measured: on this machine's GPUs, or simulated for --file and --preset")
      ->group(output);
  explain->add_option("--json", arguments.jsonFile, "Write JSON to this file or to standard output")
      ->expected(0, 1)
      ->default_str("-")
      ->group(output);
  explain->add_option("--svg", arguments.svgFile, "Plot predicted times over sizes to this file")
      ->group(output);
  return explain;
}

int runExplain(const ExplainArguments& arguments) {
  try {
    return show(arguments);
  } catch (const UsageError& error) {
    fmt::print(stderr, "unisono explain: {}\nRun unisono explain --help to see all options.\n",
               topo::printableLines(error.what()));
  } catch (const Error& error) {
    fmt::print(stderr, "unisono explain: {}\n", topo::printableLines(error.what()));
  }
  return bench::kExitUsage;
}

}  // namespace unisono::explain
