// SPDX-License-Identifier: Apache-2.0
#include "plugin/tuner.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstring>

#include "topology/join.h"

namespace unisono::plugin {
namespace {

// The binary interface, as NCCL's public plug-in headers define it. Results are ncclResult_t.
struct NvlinkDomains {
  int domains, minRanks, maxRanks;
};
// Twice seven by three latencies and five tables of four by three bandwidths.
static_assert(sizeof(tuning::CostConstants) == (21 + 3 * 21 + 5 * 12) * sizeof(double));

struct TunerV2 {
  const char* name;
  int (*init)(size_t ranks, size_t nodes, Logger logger, void** context);
  int (*getCollInfo)(void* context, int operation, size_t bytes, int collnet, int nvls, int calls,
                     int* algorithm, int* protocol, int* channels);
  int (*destroy)(void* context);
};
struct TunerV3 {
  const char* name;
  int (*init)(size_t ranks, size_t nodes, Logger logger, void** context);
  int (*getCollInfo)(void* context, int operation, size_t bytes, int calls, float** times,
                     int algorithms, int protocols, int* channels);
  int (*destroy)(void* context);
};
struct TunerV4 {
  const char* name;
  int (*init)(size_t ranks, size_t nodes, Logger logger, void** context);
  int (*getCollInfo)(void* context, int operation, size_t bytes, int calls, float** times,
                     int algorithms, int protocols, int registered, int* channels);
  int (*destroy)(void* context);
};
struct TunerV5 {
  const char* name;
  int (*init)(void** context, uint64_t id, size_t ranks, size_t nodes, Logger logger,
              NvlinkDomains* domains, tuning::CostConstants* constants);
  int (*getCollInfo)(void* context, int operation, size_t bytes, int calls, float** times,
                     int algorithms, int protocols, int registered, int* channels);
  int (*finalize)(void* context);
};
struct TunerV6 {
  TunerV5 v5;
  int (*getChunkSize)(void* context, int operation, size_t bytes, int algorithm, int protocol,
                      int channels, size_t* chunk);
};

// ncclFunc_t, by device::Operation.
constexpr int kOperationNumbers[tuning::kCollectives] = {4, 2, 3, 0, 1};

int numberOf(tuning::Operation operation) {
  return kOperationNumbers[static_cast<size_t>(operation)];
}

void logOfTuner(int level, unsigned long, const char*, int, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  writePluginLog("tuner", level, format, arguments);
  va_end(arguments);
}

}  // namespace

// One of these is not null.
struct TunerInterface {
  const TunerV2* v2 = nullptr;
  const TunerV3* v3 = nullptr;
  const TunerV4* v4 = nullptr;
  const TunerV5* v5 = nullptr;  // also the first part of version 6
  const TunerV6* v6 = nullptr;

  bool found() const { return v2 || v3 || v4 || v5; }
  bool complete() const {
    if (v2) return v2->init && v2->getCollInfo && v2->destroy;
    if (v3) return v3->init && v3->getCollInfo && v3->destroy;
    if (v4) return v4->init && v4->getCollInfo && v4->destroy;
    return v5->init && v5->getCollInfo && v5->finalize;
  }
  const char* name() const { return v2 ? v2->name : v3 ? v3->name : v4 ? v4->name : v5->name; }
  int version() const { return v2 ? 2 : v3 ? 3 : v4 ? 4 : v6 ? 6 : 5; }
};

namespace {

// The newest version that a library has.
TunerInterface findInterface(const OpenLibrary& library) {
  TunerInterface result;
  const auto find = [&](const char* symbol, auto*& entry) {
    entry = static_cast<std::remove_reference_t<decltype(entry)>>(findSymbol(library, symbol));
    return entry != nullptr;
  };
  if (find("ncclTunerPlugin_v6", result.v6)) {
    result.v5 = &result.v6->v5;
    return result;
  }
  find("ncclTunerPlugin_v5", result.v5) || find("ncclTunerPlugin_v4", result.v4) ||
      find("ncclTunerPlugin_v3", result.v3) || find("ncclTunerPlugin_v2", result.v2);
  return result;
}

}  // namespace

std::shared_ptr<const TunerLibrary> TunerLibrary::open(const std::string& setting, Warn warn) {
  OpenLibrary handle = openPlugin("tuner", setting, warn, "ncclTunerPlugin_v");
  if (handle == nullptr) return nullptr;
  const std::string name = setting.empty() ? "libnccl-tuner.so" : setting;
  std::shared_ptr<TunerLibrary> library(new TunerLibrary);
  library->warn_ = std::move(warn);
  library->handle_ = std::move(handle);
  library->interface_ = std::make_unique<TunerInterface>(findInterface(library->handle_));
  if (!library->interface_->found() || !library->interface_->complete()) {
    library->warn(fmt::format("The tuner plug-in {} is ignored: it {}", name,
                              library->interface_->found()
                                  ? "lacks a function of its interface"
                                  : "has none of ncclTunerPlugin_v2 to ncclTunerPlugin_v6"));
    return nullptr;
  }
  const char* own = library->interface_->name();
  library->name_ =
      fmt::format("{} (v{})", own == nullptr ? name : own, library->interface_->version());
  return library;
}

TunerLibrary::~TunerLibrary() = default;

std::shared_ptr<const TunerPlugin> TunerPlugin::create(std::shared_ptr<const TunerLibrary> library,
                                                       const TunedCommunicator& communicator,
                                                       tuning::CostConstants& constants) {
  const TunerInterface& interface = library->interface();
  std::shared_ptr<TunerPlugin> plugin(new TunerPlugin(std::move(library)));
  const auto ranks = static_cast<size_t>(communicator.ranks);
  const auto nodes = static_cast<size_t>(communicator.nodes);
  tuning::CostConstants changed = constants;
  int result = kSuccess;
  if (interface.v5 != nullptr) {
    NvlinkDomains domains{communicator.nodes, communicator.minRanksPerNode,
                          communicator.maxRanksPerNode};
    result = interface.v5->init(&plugin->context_, communicator.id, ranks, nodes, logOfTuner,
                                &domains, &changed);
  } else {
    const auto init = interface.v4   ? interface.v4->init
                      : interface.v3 ? interface.v3->init
                                     : interface.v2->init;
    result = init(ranks, nodes, logOfTuner, &plugin->context_);
  }
  if (result != kSuccess) {
    plugin->reject(fmt::format("its init returned error {}", result));
    plugin->library_ = nullptr;  // nothing to finalize
    return nullptr;
  }
  std::array<double, sizeof(changed) / sizeof(double)> values;
  static_assert(sizeof(values) == sizeof(changed));
  std::memcpy(values.data(), &changed, sizeof(changed));
  const bool sensible = std::all_of(values.begin(), values.end(),
                                    [](double v) { return std::isfinite(v) && v >= 0; });
  if (!sensible) {
    plugin->reject("its init set numbers of the cost model that are negative or not finite");
    return nullptr;
  }
  constants = changed;
  return plugin;
}

TunerPlugin::~TunerPlugin() {
  if (library_ == nullptr) return;
  const TunerInterface& interface = library_->interface();
  const auto end = interface.v5   ? interface.v5->finalize
                   : interface.v4 ? interface.v4->destroy
                   : interface.v3 ? interface.v3->destroy
                                  : interface.v2->destroy;
  end(context_);
}

void TunerPlugin::reject(const std::string& problem) const {
  rejected_ = true;
  library_->warn(fmt::format("The tuner plug-in {} is ignored: {}", library_->name(), problem));
}

int TunerPlugin::advise(const tuning::Question& question, tuning::TimeTable& times) const {
  if (rejected_) return 0;
  const TunerInterface& interface = library_->interface();
  const int operation = numberOf(question.operation);
  constexpr int kRows = device::kNcclAlgorithms, kColumns = device::kNcclProtocols;
  tuning::TimeTable answer = times;
  // The interface passes the table as one block.
  auto** table = reinterpret_cast<float**>(answer.data());
  int channels = 0, result = kSuccess;
  if (interface.v2 != nullptr) {
    const auto offered = [&](tuning::Algorithm algorithm) {
      return times[static_cast<size_t>(algorithm)][static_cast<size_t>(tuning::Protocol::simple)] !=
             tuning::kExcluded;
    };
    int algorithm = -1, protocol = -1;
    result = interface.v2->getCollInfo(
        context_, operation, question.bytes, offered(tuning::Algorithm::collNetChain) ? 1 : 0,
        offered(tuning::Algorithm::nvls) || offered(tuning::Algorithm::nvlsTree) ? 1 : 0,
        question.calls, &algorithm, &protocol, &channels);
    if (algorithm >= kRows || protocol >= kColumns) {
      reject(fmt::format("it chose algorithm {} and protocol {}, which do not exist", algorithm,
                         protocol));
      return 0;
    }
    if (algorithm >= 0 && protocol >= 0) {
      float& time = answer[static_cast<size_t>(algorithm)][static_cast<size_t>(protocol)];
      if (time != tuning::kExcluded) time = 0;
    }
  } else if (interface.v3 != nullptr) {
    result = interface.v3->getCollInfo(context_, operation, question.bytes, question.calls, table,
                                       kRows, kColumns, &channels);
  } else {
    const auto ask = interface.v4 ? interface.v4->getCollInfo : interface.v5->getCollInfo;
    result = ask(context_, operation, question.bytes, question.calls, table, kRows, kColumns, 0,
                 &channels);
  }
  // Not nonsense: it leaves this call to the library.
  if (result != kSuccess) return 0;
  for (size_t a = 0; a < answer.size(); a++) {
    for (size_t p = 0; p < answer[a].size(); p++) {
      const float time = answer[a][p];
      const bool excluded = time == tuning::kExcluded;
      if (!excluded && (!std::isfinite(time) || time < 0)) {
        reject(fmt::format("it set the time of {} {} to {}", tuning::nameOf(tuning::Algorithm(a)),
                           tuning::nameOf(tuning::Protocol(p)), time));
        return 0;
      }
      if (!excluded && times[a][p] == tuning::kExcluded) {
        reject(fmt::format("it chose {} {}, which cannot run here",
                           tuning::nameOf(tuning::Algorithm(a)),
                           tuning::nameOf(tuning::Protocol(p))));
        return 0;
      }
    }
  }
  if (channels < 0 || channels > topology::kMostChannels) {
    reject(fmt::format("it asked for {} channels", channels));
    return 0;
  }
  times = answer;
  return channels;
}

uint64_t TunerPlugin::adviseChunk(const tuning::Question& question,
                                  const tuning::Choice& choice) const {
  const TunerV6* v6 = library_->interface().v6;
  const bool ours = static_cast<int>(choice.algorithm) >= device::kNcclAlgorithms;
  if (rejected_ || v6 == nullptr || v6->getChunkSize == nullptr || ours) return choice.chunkBytes;
  size_t chunk = choice.chunkBytes;
  const int result = v6->getChunkSize(context_, numberOf(question.operation), question.bytes,
                                      static_cast<int>(choice.algorithm),
                                      static_cast<int>(choice.protocol), choice.channels, &chunk);
  if (result != kSuccess) return choice.chunkBytes;
  if (chunk == 0) {
    reject("it asked for chunks of 0 bytes");
    return choice.chunkBytes;
  }
  return chunk;
}

}  // namespace unisono::plugin
