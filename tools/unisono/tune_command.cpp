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
#include "temporary_file.h"
#include "tuning/choice.h"

namespace unisono::tune {
namespace {

using bench::UsageError;
using tuning::MeasuredCurve;
using tuning::MeasuredTable;
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
    tuning::Operation operation;
    tuning::Algorithm algorithm;
    tuning::Protocol protocol;
    uint64_t maxBytes;
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
// that `algorithm` carries, 0 if there is none.
uint64_t largestSize(const tuning::CommFacts& facts, const Plan::Part& part, uint64_t minBytes,
                     uint64_t limit) {
  const bool direct =
      part.algorithm == tuning::Algorithm::direct || part.algorithm == tuning::Algorithm::twoShot;
  uint64_t largest = 0;
  for (uint64_t bytes = minBytes; bytes <= limit; bytes *= 2) {
    const uint64_t share = tuning::shareOf(part.operation, bytes, facts.ranks);
    if (direct && !facts.direct.fits(part.protocol, share)) break;
    largest = bytes;
  }
  return largest;
}

Plan planFor(const Settings& settings, const topology::XmlTopology& file, topo::ViewSettings view,
             int ranks, uint64_t minBytes, uint64_t maxBytes) {
  view.ranksPerNode = ranks / view.nodes;
  Plan plan{ranks, explain::modelInputOf(settings, topo::makeView(file, view), {}), {}};
  const tuning::CostModel model = tuning::makeModel(plan.input);
  for (int o = 0; o < tuning::kCollectives; o++) {
    for (const auto& candidate : model.candidates[static_cast<size_t>(o)]) {
      Plan::Part part{static_cast<tuning::Operation>(o), candidate.algorithm, candidate.protocol,
                      0};
      part.maxBytes = largestSize(model.facts, part, minBytes, maxBytes);
      if (part.maxBytes > 0) plan.parts.push_back(part);
    }
  }
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

  MeasuredCurve measure(const Plan& plan, const Plan::Part& part, uint64_t minBytes) const {
    const std::string name = fmt::format("{} {} {}", nameOf(part.operation), nameOf(part.algorithm),
                                         nameOf(part.protocol));
    const std::vector<std::string> environment = environmentWith(
        {fmt::format("NCCL_ALGO={}", nameOf(part.algorithm)),
         fmt::format("NCCL_PROTO={}", nameOf(part.protocol)), "UNISONO_TUNING_FILE="});
    const int status =
        runProgram(benchArguments(plan, part, minBytes), environment, errors_.path());
    if (status != bench::kExitSuccess) {
      const std::string text = fmt::format("{} with {} ranks: {}", name, plan.ranks,
                                           detect::readFile(errors_.path(), "the errors"));
      if (status == bench::kExitWrongResult) throw WrongResult("wrong results of " + text);
      throw FailedRun(text);
    }
    MeasuredCurve curve{part.operation,           part.algorithm, part.protocol,
                        arguments_.machine.nodes, plan.ranks,     {}};
    const auto json = nlohmann::json::parse(detect::readFile(results_.path(), "the results"));
    for (const auto& row : json.at("rows")) {
      const double seconds = row.at("out_of_place").at("ours").at("time").at("median");
      curve.points.push_back({row.at("bytes"), seconds * 1e6});
    }
    tuning::limitToLargerSizes(curve.points);
    return curve;
  }

 private:
  std::vector<std::string> benchArguments(const Plan& plan, const Plan::Part& part,
                                          uint64_t minBytes) const {
    const auto operation = static_cast<bench::BenchOperation>(part.operation);
    std::vector<std::string> result = {"bench",
                                       bench::operationInfo(operation).name,
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
std::string choicesText(Plan plan, const MeasuredTable& table, uint64_t minBytes,
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
  MeasuredTable table;
  for (const Plan& plan : plans) {
    for (const Plan::Part& part : plan.parts) {
      table.push_back(tuner.measure(plan, part, minBytes));
      const MeasuredCurve& curve = table.back();
      fmt::print(stderr, "[{}/{}] {} {} {}, {} ranks: {} {:.1f} us, {} {:.1f} us\n", table.size(),
                 parts, nameOf(part.operation), nameOf(part.algorithm), nameOf(part.protocol),
                 plan.ranks, explain::bytesText(curve.points.front().bytes),
                 curve.points.front().timeUs, explain::bytesText(curve.points.back().bytes),
                 curve.points.back().timeUs);
    }
  }
  const std::string source = topo::makeView(file, view).source;
  detect::writeFile(
      arguments.output,
      fmt::format("# Written by unisono tune {} on {}: {}{}, float, sum, out of place,\n"
                  "# one process per GPU{}\n"
                  "# operation algorithm protocol nodes ranks bytes microseconds\n{}",
                  UNISONO_VERSION, today(), source,
                  simulates ? " simulated by a CPU, whose times say nothing about GPUs" : "",
                  simulates ? "" : ", CUDA graphs", tuning::formatMeasurements(table)));
  std::string text;
  for (const Plan& plan : plans) text += choicesText(plan, table, minBytes, maxBytes);
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
      "write a table of their times, by which communicators choose where UNISONO_TUNING_FILE names "
      "it. Exit status: 0 written, 1 a result was wrong, 2 wrong options or an unusable file, 3 a "
      "run failed");
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
