// SPDX-License-Identifier: Apache-2.0
#include "tune_command.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "base/error.h"
#include "bench_options.h"
#include "bench_run.h"
#include "call_model.h"
#include "detect/detect.h"
#include "explain_report.h"
#include "operations.h"
#include "plan/message_choice.h"
#include "temporary_file.h"
#include "tuning/choice.h"

namespace unisono::tune {
namespace {

using bench::UsageError;
using tuning::MeasuredPoint;
using tuning::MessagePath;
using tuning::nameOf;

// A result that was wrong: exit status 1.
class WrongResult : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A run of the bench that failed: exit status 3.
class FailedRun : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What to measure with one number of ranks.
struct Plan {
  struct Part {
    std::string name;  // the first words of its lines: operation, algorithm, protocol
    bench::BenchOperation operation;
    // What forces it.
    std::string algorithm, protocol;
    int64_t messageBytes;  // NCCL_P2P_LL_THRESHOLD; -1: automatic
    uint64_t maxBytes;     // 0: it does not carry the smallest size
  };
  int ranks;
  tuning::ModelInput input;
  std::vector<Part> parts;
};

std::vector<int> parseRanks(const std::string& text, int nodes, int all) {
  if (text.empty()) return {all};
  std::vector<int> result;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    int ranks = 0;
    const auto [next, problem] = std::from_chars(at, end, ranks);
    if (problem != std::errc() || (next != end && *next != ',')) {
      throw UsageError(fmt::format("--ranks: \"{}\" is not a list of numbers such as 2,4,8", text));
    }
    if (ranks < 2 || ranks > all || ranks % nodes != 0) {
      throw UsageError(fmt::format(
          "--ranks: {} is not from 2 to the {} GPUs{}", ranks, all,
          nodes > 1 ? fmt::format(", or does not divide by {} nodes", nodes) : std::string()));
    }
    result.push_back(ranks);
    if (next == end) return result;
    at = next + 1;
  }
}

// The sizes of a run: those from `minBytes` on by doubling. Returns the largest one up to `limit`
// that is carried, 0 if there is none.
template <typename Carries>
uint64_t largestSize(uint64_t minBytes, uint64_t limit, const Carries& carries) {
  uint64_t largest = 0;
  for (uint64_t bytes = minBytes; bytes <= limit && carries(bytes); bytes *= 2) largest = bytes;
  return largest;
}

void addCollectives(const tuning::CostModel& model, uint64_t minBytes, uint64_t maxBytes,
                    Plan& plan) {
  for (int o = 0; o < tuning::kCollectives; o++) {
    const auto operation = static_cast<tuning::Operation>(o);
    for (const auto& [algorithm, protocol, preferred, allowedAlgorithm, allowedProtocol] :
         model.candidates[static_cast<size_t>(o)]) {
      const bool direct =
          algorithm == tuning::Algorithm::direct || algorithm == tuning::Algorithm::twoShot;
      const auto carries = [&, protocol = protocol](uint64_t bytes) {
        return !direct || model.facts.direct.fits(
                              protocol, tuning::shareOf(operation, bytes, model.facts.ranks));
      };
      plan.parts.push_back(
          {fmt::format("{} {} {}", nameOf(operation), nameOf(algorithm), nameOf(protocol)),
           static_cast<bench::BenchOperation>(o), std::string(nameOf(algorithm)),
           std::string(nameOf(protocol)), -1, largestSize(minBytes, maxBytes, carries)});
    }
  }
}

// What makes messages take a path, as far as it can carry them.
Plan::Part partOf(MessagePath path) {
  constexpr int64_t kMostLineBytes = 64 << 10;
  const bool direct = path == MessagePath::directLl || path == MessagePath::directLl128;
  const char* const protocol = path == MessagePath::fifoSimple    ? "Simple"
                               : path == MessagePath::directLl128 ? "LL128"
                                                                  : "LL";
  return {"",
          {},
          direct ? "Direct" : "Ring",
          protocol,
          path == MessagePath::fifoLl ? kMostLineBytes : -1,
          0};
}

void addMessages(Settings settings, const topo::View& view, uint64_t minBytes, uint64_t maxBytes,
                 Plan& plan) {
  constexpr plan::Call kCalls[tuning::kMessageOperations] = {
      plan::Call::send, plan::Call::allToAll, plan::Call::gather, plan::Call::scatter};
  for (const MessagePath path : {MessagePath::directLl, MessagePath::directLl128,
                                 MessagePath::fifoLl, MessagePath::fifoSimple}) {
    Plan::Part part = partOf(path);
    settings.algorithm = part.algorithm;
    settings.protocol = part.protocol;
    settings.p2pLlThreshold = part.messageBytes;
    const plan::CommConfig config =
        explain::messageConfigOf(settings, view, explain::modelInputOf(settings, view, {}));
    for (int o = 0; o < tuning::kMessageOperations; o++) {
      part.operation = static_cast<bench::BenchOperation>(
          static_cast<int>(bench::BenchOperation::sendReceive) + o);
      part.name =
          fmt::format("{} {}", nameOf(static_cast<tuning::MessageOperation>(o)), nameOf(path));
      part.maxBytes = largestSize(minBytes, maxBytes, [&](uint64_t bytes) {
        const uint64_t message = bench::countForBytes(part.operation, bytes, 1, plan.ranks);
        return plan::messageChoice(config, {.call = kCalls[o], .to = 1, .bytes = message}).path ==
               path;
      });
      plan.parts.push_back(part);
    }
  }
}

Plan planFor(const Settings& settings, const topology::XmlTopology& file, topo::ViewSettings view,
             int ranks, uint64_t minBytes, uint64_t maxBytes) {
  view.ranksPerNode = ranks / view.nodes;
  const topo::View shown = topo::makeView(file, view);
  Plan plan{ranks, explain::modelInputOf(settings, shown, {}), {}};
  addCollectives(tuning::makeModel(plan.input), minBytes, maxBytes, plan);
  addMessages(settings, shown, minBytes, maxBytes, plan);
  std::erase_if(plan.parts, [](const Plan::Part& part) { return part.maxBytes == 0; });
  return plan;
}

// The environment of this process, where `variables` ("NAME=value") replace those with their names.
std::vector<std::string> environmentWith(const std::vector<std::string>& variables) {
  std::vector<std::string> result = variables;
  for (char** variable = environ; *variable != nullptr; variable++) {
    const std::string_view text = *variable;
    const std::string_view name = text.substr(0, text.find('=') + 1);
    const bool replaced = std::any_of(variables.begin(), variables.end(),
                                      [&](const auto& other) { return other.starts_with(name); });
    if (!replaced) result.emplace_back(text);
  }
  return result;
}

std::vector<char*> pointersTo(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Runs this program with other arguments and other variables, in a process of its own because the
// driver's library must not be shared with processes that are forked off. What it writes to
// standard error goes to `errors`. Returns its exit status, -1 if it was ended by a signal.
int runProgram(std::vector<std::string> arguments, std::vector<std::string> environment,
               const std::string& errors) {
  arguments.insert(arguments.begin(), std::filesystem::read_symlink("/proc/self/exe").string());
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_addopen(&files, STDERR_FILENO, errors.c_str(), O_WRONLY | O_TRUNC, 0);
  pid_t process = -1;
  const int problem = ::posix_spawn(&process, arguments.front().c_str(), &files, nullptr,
                                    pointersTo(arguments).data(), pointersTo(environment).data());
  ::posix_spawn_file_actions_destroy(&files);
  if (problem != 0) throw systemError(problem, "posix_spawn of " + arguments.front());
  int status = 0;
  while (::waitpid(process, &status, 0) < 0) {
    if (errno != EINTR) throw systemError(errno, "waitpid");
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class Tuner {
 public:
  Tuner(const TuneArguments& arguments, const topology::XmlTopology& file)
      : arguments_(arguments), simulates_(isSimulated(arguments)) {
    if (simulates_) detect::writeFile(machine_.path(), topology::writeTopologyXml(file));
  }

  // Whether the machine is simulated by the host backend.
  static bool isSimulated(const TuneArguments& arguments) {
    return !arguments.machine.file.empty() || !arguments.machine.preset.empty();
  }

  std::vector<MeasuredPoint> measure(const Plan& plan, const Plan::Part& part,
                                     uint64_t minBytes) const {
    const std::string threshold =
        part.messageBytes < 0 ? std::string() : fmt::format("{}", part.messageBytes);
    const std::vector<std::string> environment =
        environmentWith({"NCCL_ALGO=" + part.algorithm, "NCCL_PROTO=" + part.protocol,
                         "NCCL_P2P_LL_THRESHOLD=" + threshold, "UNISONO_TUNING_FILE="});
    const int status =
        runProgram(benchArguments(plan, part, minBytes), environment, errors_.path());
    if (status != bench::kExitSuccess) {
      const std::string text = fmt::format("{} with {} ranks: {}", part.name, plan.ranks,
                                           detect::readFile(errors_.path(), "the errors"));
      if (status == bench::kExitWrongResult) throw WrongResult("wrong results of " + text);
      throw FailedRun(text);
    }
    std::vector<MeasuredPoint> points;
    const auto json = nlohmann::json::parse(detect::readFile(results_.path(), "the results"));
    for (const auto& row : json.at("rows")) {
      const double seconds = row.at("out_of_place").at("ours").at("time").at("median");
      points.push_back({row.at("bytes"), seconds * 1e6});
    }
    tuning::limitToLargerSizes(points);
    return points;
  }

 private:
  std::vector<std::string> benchArguments(const Plan& plan, const Plan::Part& part,
                                          uint64_t minBytes) const {
    std::vector<std::string> result = {"bench",
                                       bench::operationInfo(part.operation).name,
                                       "--processes",
                                       "-g",
                                       fmt::format("{}", plan.ranks / arguments_.machine.nodes),
                                       "-b",
                                       fmt::format("{}", minBytes),
                                       "-e",
                                       fmt::format("{}", part.maxBytes),
                                       "--seed",
                                       "1",
                                       "--json",
                                       results_.path()};
    // Graphs, so that the time of a launch by the CPU is not measured.
    const std::vector<std::string> more =
        simulates_
            ? std::vector<std::string>{"--backend", "host",
                                       "--topo",    machine_.path(),
                                       "--nodes",   fmt::format("{}", arguments_.machine.nodes),
                                       "-n",        "5",
                                       "-w",        "1"}
            : std::vector<std::string>{"--backend", "cuda", "-n",        "10",
                                       "-G",        "3",    "--repeats", "3"};
    result.insert(result.end(), more.begin(), more.end());
    return result;
  }

  const TuneArguments& arguments_;
  const bool simulates_;
  const bench::TemporaryFile machine_{".xml"}, results_{".json"}, errors_{".txt"};
};

// Fails now rather than after everything has been measured.
void checkOutput(const std::string& path) {
  const bool exists = std::filesystem::exists(path);
  const bool writable = std::ofstream(path, std::ios::app).good();
  std::error_code ignored;
  if (writable && !exists) std::filesystem::remove(path, ignored);
  if (!writable) {
    throw UsageError(fmt::format("cannot write {}; name a file in a writable directory", path));
  }
}

// "2026-11-22", in UTC.
std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d", ::gmtime_r(&now, &parts));
  return text.data();
}

// What a communicator with this table chooses.
std::string choicesText(Plan plan, const tuning::MeasuredTable& table, uint64_t minBytes,
                        uint64_t maxBytes) {
  plan.input.measured = tuning::replaceCurves(tuning::builtinMeasurements(), table);
  const tuning::CostModel model = tuning::makeModel(plan.input);
  std::string text = fmt::format("\nChoices with {} ranks\n", plan.ranks);
  for (int o = 0; o < tuning::kCollectives; o++) {
    tuning::Question question;
    question.operation = static_cast<tuning::Operation>(o);
    std::string name(nameOf(question.operation));
    for (const auto& range : tuning::choicesBySize(model, question, minBytes, maxBytes)) {
      text += fmt::format("  {:<14} {:>10} to {:>10}  {} {}\n", name,
                          explain::bytesText(range.firstBytes), explain::bytesText(range.lastBytes),
                          nameOf(range.algorithm), nameOf(range.protocol));
      name.clear();
    }
  }
  return text;
}

void tune(const TuneArguments& arguments) {
  const bool simulates = Tuner::isSimulated(arguments);
  const topo::MachineOptions& machine = arguments.machine;
  if (!simulates && (machine.nodes > 1 || machine.root != "/")) {
    throw UsageError(
        "--nodes and --root need --file or --preset: only this machine can be measured, as one "
        "node");
  }
  const uint64_t minBytes = bench::parseSize("--min", arguments.minSize);
  const uint64_t maxBytes = bench::parseSize("--max", !arguments.maxSize.empty() ? arguments.maxSize
                                                      : simulates                ? "256K"
                                                                                 : "64M");
  if (minBytes == 0 || minBytes > maxBytes) {
    throw UsageError(fmt::format("--min {} is not from 1 B to --max {}",
                                 explain::bytesText(minBytes), explain::bytesText(maxBytes)));
  }
  checkOutput(arguments.output);

  Settings settings = settingsFromEnvironment();
  settings.algorithm.clear();
  settings.protocol.clear();
  settings.p2pLlThreshold = -1;
  settings.tuningFile.clear();
  topo::ViewSettings view = topo::viewSettings(settings, arguments.machine);
  const topology::XmlTopology file = topo::readMachine(arguments.machine, settings, view.paths);
  const int gpus = static_cast<int>(topology::gpusOf(file).size());
  std::vector<Plan> plans;
  size_t parts = 0;
  for (const int ranks :
       parseRanks(arguments.ranks, arguments.machine.nodes, gpus * arguments.machine.nodes)) {
    plans.push_back(planFor(settings, file, view, ranks, minBytes, maxBytes));
    parts += plans.back().parts.size();
  }

  const auto start = std::chrono::steady_clock::now();
  const Tuner tuner(arguments, file);
  size_t measured = 0;
  std::string lines;
  for (const Plan& plan : plans) {
    for (const Plan::Part& part : plan.parts) {
      const std::vector<MeasuredPoint> points = tuner.measure(plan, part, minBytes);
      for (const MeasuredPoint& point : points) {
        lines += fmt::format("{} {} {} {} {:.3f}\n", part.name, arguments.machine.nodes, plan.ranks,
                             point.bytes, point.timeUs);
      }
      measured++;
      fmt::print(stderr, "[{}/{}] {}, {} ranks: {} {:.1f} us, {} {:.1f} us\n", measured, parts,
                 part.name, plan.ranks, explain::bytesText(points.front().bytes),
                 points.front().timeUs, explain::bytesText(points.back().bytes),
                 points.back().timeUs);
    }
  }
  const tuning::Measurements table = tuning::parseMeasurements(lines, arguments.output);
  const std::string source = topo::makeView(file, view).source;
  detect::writeFile(
      arguments.output,
      fmt::format("# Written by unisono tune {} on {}: {}{}, float, sum, out of place,\n"
                  "# one process per GPU{}\n"
                  "# operation algorithm protocol nodes ranks bytes microseconds\n{}",
                  UNISONO_VERSION, today(), source,
                  simulates ? " simulated by a CPU, whose times say nothing about GPUs" : "",
                  simulates ? "" : ", CUDA graphs", lines));
  std::string text;
  for (const Plan& plan : plans) text += choicesText(plan, table.collectives, minBytes, maxBytes);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  text +=
      fmt::format("\nMeasured in {:.0f} s. To use it, set UNISONO_TUNING_FILE={} on all ranks.\n",
                  taken.count(), std::filesystem::absolute(arguments.output).string());
  topo::print(topo::printableLines(text));
}

}  // namespace

CLI::App* addTuneCommand(CLI::App& app, TuneArguments& arguments) {
  CLI::App* tune = app.add_subcommand(
      "tune",
      "Measure every collective with every algorithm and protocol that runs on this machine, and "
      "messages with every path, and write a table of their times, which communicators use to "
      "choose if UNISONO_TUNING_FILE names the file. Exit status: 0 written, 1 a result was wrong, "
      "2 wrong options or an unusable file, 3 a run failed");
  tune->add_option("FILE", arguments.output, "Where to write the table")->required();
  tune->add_option("--ranks", arguments.ranks,
                   "Numbers of ranks in all, separated by commas (all GPUs)");
  tune->add_option("-b,--min", arguments.minSize, "Smallest size (1K)");
  tune->add_option("-e,--max", arguments.maxSize, "Largest size (64M; 256K if simulated)");
  topo::addMachineOptions(*tune, arguments.machine);
  return tune;
}

int runTune(const TuneArguments& arguments) {
  const auto fail = [](const char* text, const char* hint, int status) {
    fmt::print(stderr, "unisono tune: {}\n{}", topo::printableLines(text), hint);
    return status;
  };
  try {
    tune(arguments);
    return bench::kExitSuccess;
  } catch (const WrongResult& error) {
    return fail(error.what(), "", bench::kExitWrongResult);
  } catch (const FailedRun& error) {
    return fail(error.what(), "", bench::kExitLibraryError);
  } catch (const UsageError& error) {
    return fail(error.what(), "Run unisono tune --help to see all options.\n", bench::kExitUsage);
  } catch (const Error& error) {
    return fail(error.what(), "", bench::kExitUsage);
  }
}

}  // namespace unisono::tune
