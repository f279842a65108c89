// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <string>
#include <vector>

#include "bench_options.h"
#include "bench_run.h"
#include "doctor_command.h"
#include "explain_command.h"
#include "library_table.h"
#include "topo_command.h"
#include "tune_command.h"

namespace {

// The version of the program and of the library that it loads.
std::string versionText() {
  using unisono::bench::Library;
  std::string text = fmt::format("unisono {}\n", UNISONO_VERSION);
  try {
    Library library(unisono::bench::defaultLibraryPath());
    text += fmt::format("library {} (NCCL API {})", library.path(), library.versionText());
  } catch (const std::exception& error) {
    text += fmt::format("no library: {}", error.what());
  }
  return text;
}

// What is wrong with the arguments, and what is accepted.
std::string usageErrorText(const CLI::App* app, const CLI::Error& error) {
  const std::vector<const CLI::App*> parsed = [&] {
    const auto commands = app->get_subcommands();
    return std::vector<const CLI::App*>(commands.begin(), commands.end());
  }();
  std::string accepted, command = "unisono";
  const auto add = [&](const std::string& name) {
    accepted += (accepted.empty() ? "" : ", ") + name;
  };
  if (parsed.empty()) {
    for (const CLI::App* each : app->get_subcommands({})) add(each->get_name());
  } else {
    command += " " + parsed.front()->get_name();
    for (const CLI::Option* option : parsed.front()->get_options()) {
      add(option->get_name(option->get_positional()));
    }
  }
  return fmt::format("{}: {}\nAccepted are {}.\nRun {} --help to see what they mean.\n", command,
                     error.what(), accepted, command);
}

int run(int argc, char** argv) {
  using namespace unisono::bench;
  CLI::App app("Unisono: collective communication for GPUs, real or simulated", "unisono");
  app.failure_message(usageErrorText);
  bool wantsVersion = false;
  app.add_flag("--version", wantsVersion, "Print the versions of this program and of its library");
  BenchArguments arguments;
  CLI::App* bench = addBenchCommand(app, arguments);
  unisono::topo::TopoOptions topoOptions;
  CLI::App* topo = unisono::topo::addTopoCommand(app, topoOptions);
  unisono::explain::ExplainArguments explainArguments;
  CLI::App* explain = unisono::explain::addExplainCommand(app, explainArguments);
  unisono::tune::TuneArguments tuneArguments;
  CLI::App* tune = unisono::tune::addTuneCommand(app, tuneArguments);
  unisono::doctor::DoctorArguments doctorArguments;
  CLI::App* doctor = unisono::doctor::addDoctorCommand(app, doctorArguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help is not an error; everything else is a wrong option.
    return app.exit(error) == 0 ? kExitSuccess : kExitUsage;
  }
  if (wantsVersion) {
    fmt::print("{}\n", versionText());
    return kExitSuccess;
  }
  if (topo->parsed()) return unisono::topo::runTopo(topoOptions);
  if (doctor->parsed()) return unisono::doctor::runDoctor(doctorArguments);
  if (explain->parsed()) return unisono::explain::runExplain(explainArguments);
  if (tune->parsed()) return unisono::tune::runTune(tuneArguments);
  if (bench->parsed()) return runBench(finishOptions(arguments));
  fmt::print("{}", app.help());
  return kExitUsage;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const unisono::bench::UsageError& error) {
    fmt::print(stderr, "unisono bench: {}\nRun unisono bench --help to see all options.\n",
               error.what());
    return unisono::bench::kExitUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "unisono: {}\n", error.what());
    return unisono::bench::kExitLibraryError;
  }
}
