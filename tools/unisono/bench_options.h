// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "element_types.h"
#include "operations.h"

namespace CLI {
class App;
}

namespace unisono::bench {

// A wrong option. The text says which one and what is allowed. Exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How to combine the times of the workers into one (-a).
enum class Averaging : int { firstRank = 0, mean = 1, min = 2, max = 3 };

struct BenchOptions {
  BenchOperation operation = BenchOperation::allReduce;
  std::optional<size_t> minBytes, maxBytes;  // default: 8 B up to a maximum of the backend
  double factor = 2;
  size_t stepBytes = 0;   // not 0: sizes grow by this much instead of by `factor`
  int gpusPerThread = 0;  // 0: all GPUs of the machine, divided among the threads
  int threads = 1;        // of each process
  int iterations = 20;
  int warmup = 5;
  int checks = 1;
  std::vector<ElementType> types = {ElementType::float32};
  std::vector<BenchReduction> reductions = {BenchReduction::sum};
  int root = 0;  // -1: each rank in turn
  int graphLaunches = 0;
  int registration = 0;  // 0: none, 1: ncclCommRegister, 2: windows on ncclMemAlloc memory
  bool blocking = false;
  Averaging averaging = Averaging::mean;
  double timeoutSeconds = 300;

  std::string backend;  // host, cuda; empty: UNISONO_BACKEND, or cuda if there is a GPU
  std::string topologyFile;
  int nodes = 1;
  bool processPerGpu = false;

  std::string jsonPath;  // "-": standard output
  bool quiet = false;    // print no table
  std::string library;
  std::string against;
  int repeats = 0;  // 0: 1, or 5 with `against`
  uint64_t seed = 0;

  int repeatCount() const { return repeats > 0 ? repeats : (against.empty() ? 1 : 5); }
};

// Parses "8", "1K", "4M", "1G" (powers of 1024; also "4MB", "4MiB" and lower case). Throws
// UsageError.
size_t parseSize(std::string_view text);
// The same for the value of `option`, which errors name.
size_t parseSize(const char* option, std::string_view text);

// Formats a size for messages and table headings: "1 KiB".
std::string sizeText(size_t bytes);

// The sizes to run, in ascending order without repetition. `defaultMaxBytes` is the default of -e.
std::vector<size_t> benchSizes(const BenchOptions& options, size_t defaultMaxBytes);

// The arguments as parsed, before they are checked.
struct BenchArguments {
  std::string operation;
  std::string minBytes, maxBytes, stepBytes;
  std::string types = "float";
  std::string reductions = "sum";
  std::string root = "0";
  std::string seed;
  int averaging = 1;
  int blocking = 0;
  BenchOptions options;
};

// Adds `bench` to the program. `arguments` must outlive the parsing.
CLI::App* addBenchCommand(CLI::App& app, BenchArguments& arguments);

// Checks the arguments. Throws UsageError that names the option and the allowed values.
BenchOptions finishOptions(const BenchArguments& arguments);

}  // namespace unisono::bench
