// SPDX-License-Identifier: Apache-2.0
#include "plugin/collnet.h"

#include <cstdarg>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "plugin/net_properties.h"

namespace unisono::plugin {
namespace {

using device::DataType;
using device::Reduction;

// ncclNetSGE_t. Its size has 32 bits in version 8, whose collectives are smaller than that.
struct Segment {
  void *region, *address;
  size_t bytes;
};

// A table of functions; those of the first group begin alike in all versions, but for the types of
// some arguments.
template <int kVersion>
struct TableStart {
  using RegionBytes = Since<8, kVersion, size_t, int>;
  using Count = Since<9, kVersion, size_t, int>;
  using Init = Since<11, kVersion, int (*)(void**, uint64_t, Logger), int (*)(Logger)>;
  using Listen = Since<11, kVersion, int (*)(void* context, int device, void* handle, void**),
                       int (*)(int device, void* handle, void**)>;

  const char* name;
  Init init;
  int (*devices)(int*);
  int (*getProperties)(int device, PropertiesOf<kVersion>*);
  Listen listen;
  int (*connect)(void* handles[], int ranks, int rank, void* listener, void** connection);
  int (*reduceSupport)(int type, int reduction, int* supported);
  int (*regMr)(void* connection, void* data, RegionBytes, int type, void** region);
  int (*regMrDmaBuf)(void*, void*, size_t, int, uint64_t, int, void**);
  int (*deregMr)(void* connection, void* region);
  int (*iallreduce)(void* connection, void* from, void* to, Count, int type, int reduction,
                    void* fromRegion, void* toRegion, void** request);
};
struct ScatterFunctions {
  int (*iallgather)(void* connection, void* from, int parts, Segment* to, size_t bytesPerRank,
                    size_t windowOffset, size_t windowBytes, void* fromRegion, void** request);
  int (*ireducescatter)(void* connection, int parts, Segment* from, void* to, size_t bytesPerRank,
                        size_t windowOffset, size_t windowBytes, int type, int reduction,
                        void* toRegion, void** request);
};
struct TableEnd {
  int (*iflush)(void* connection, void* data, int bytes, void* region, void** request);
  int (*test)(void* request, int* done, int* bytes);
  int (*closeColl)(void*);
  int (*closeListen)(void*);
};
struct ContextFunctions {
  void* makeVDevice;
  int (*finalize)(void* context);
};

template <int kVersion>
struct OldTable : TableStart<kVersion> {
  TableEnd end;
};
template <int kVersion>
struct MiddleTable : TableStart<kVersion> {
  ScatterFunctions scatter;
  TableEnd end;
};
template <int kVersion>
struct NewTable : MiddleTable<kVersion> {
  ContextFunctions contexts;
};
template <int kVersion>
using CollNetTable = Since<11, kVersion, NewTable<kVersion>,
                           Since<8, kVersion, MiddleTable<kVersion>, OldTable<kVersion>>>;
static_assert(sizeof(CollNetTable<7>) == 15 * sizeof(void*) &&
              sizeof(CollNetTable<8>) == 17 * sizeof(void*) &&
              sizeof(CollNetTable<11>) == 19 * sizeof(void*));

// ncclRedOp_t numbers sum, prod, max and min as Reduction does. What scales is a sum here: ranks
// scale their operands, or the result.
int reductionOf(Reduction reduction) {
  return reduction <= Reduction::min ? static_cast<int>(reduction)
                                     : static_cast<int>(Reduction::sum);
}

void logOfCollNet(int level, unsigned long, const char*, int, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  writePluginLog("CollNet", level, format, arguments);
  va_end(arguments);
}

template <int kVersion>
class CollNetFunctionsOf final : public CollNetFunctions {
 public:
  CollNetFunctionsOf(OpenLibrary library, const void* table)
      : library_(std::move(library)), table_(*static_cast<const CollNetTable<kVersion>*>(table)) {}

  int version() const override { return kVersion; }
  const char* name() const override { return table_.name; }
  bool isComplete() const override {
    return table_.init && table_.devices && table_.getProperties && table_.listen &&
           table_.connect && table_.reduceSupport && table_.regMr && table_.deregMr &&
           table_.iallreduce && table_.end.test && table_.end.closeColl && table_.end.closeListen;
  }

  int init(void** context, uint64_t communicator) const override {
    if constexpr (kVersion >= 11)
      return table_.init(context, communicator, logOfCollNet);
    else
      return table_.init(logOfCollNet);
  }
  int finalize(void* context) const override {
    if constexpr (kVersion >= 11) {
      if (table_.contexts.finalize != nullptr) return table_.contexts.finalize(context);
    }
    return kSuccess;
  }
  int devices(int* count) const override { return table_.devices(count); }
  int describe(int device, NetPort& port) const override {
    PropertiesOf<kVersion> found{};
    const int result = table_.getProperties(device, &found);
    if (result == kSuccess) describePort<kVersion>(found, port);
    return result;
  }
  int listen(void* context, int device, NetHandle& handle, void** listener) const override {
    if constexpr (kVersion >= 11)
      return table_.listen(context, device, &handle, listener);
    else
      return table_.listen(device, &handle, listener);
  }
  int connect(std::span<NetHandle> handles, int rank, void* listener,
              void** connection) const override {
    std::vector<void*> addresses;
    for (NetHandle& handle : handles) addresses.push_back(&handle);
    return table_.connect(addresses.data(), static_cast<int>(addresses.size()), rank, listener,
                          connection);
  }
  int canReduce(DataType type, Reduction reduction, int* can) const override {
    return table_.reduceSupport(static_cast<int>(type), reductionOf(reduction), can);
  }
  bool hasAllGather() const override {
    if constexpr (kVersion >= 8)
      return table_.scatter.iallgather != nullptr;
    else
      return false;
  }
  bool hasReduceScatter() const override {
    if constexpr (kVersion >= 8)
      return table_.scatter.ireducescatter != nullptr;
    else
      return false;
  }
  int registerMemory(void* connection, void* data, size_t bytes, int type,
                     void** region) const override {
    using RegionBytes = typename TableStart<kVersion>::RegionBytes;
    return table_.regMr(connection, data, static_cast<RegionBytes>(bytes), type, region);
  }
  int registerDmaBuf(void* connection, void* data, size_t bytes, uint64_t offset, int descriptor,
                     void** region) const override {
    if (table_.regMrDmaBuf == nullptr) return kInternalError;
    return table_.regMrDmaBuf(connection, data, bytes, kDeviceMemory, offset, descriptor, region);
  }
  int deregisterMemory(void* connection, void* region) const override {
    return table_.deregMr(connection, region);
  }
  int allReduce(void* connection, const CollNetBuffer& from, const CollNetBuffer& to,
                size_t elements, DataType type, Reduction reduction,
                void** request) const override {
    using Count = typename TableStart<kVersion>::Count;
    return table_.iallreduce(connection, from.data, to.data, static_cast<Count>(elements),
                             static_cast<int>(type), reductionOf(reduction), from.region, to.region,
                             request);
  }
  int allGather(void* connection, const CollNetBuffer& from, const CollNetBuffer& to, size_t bytes,
                size_t ranks, void** request) const override {
    if constexpr (kVersion >= 8) {
      Segment all{to.region, to.data, ranks * bytes};
      return table_.scatter.iallgather(connection, from.data, 1, &all, bytes, 0, ranks * bytes,
                                       from.region, request);
    }
    return kInternalError;
  }
  int reduceScatter(void* connection, const CollNetBuffer& from, const CollNetBuffer& to,
                    size_t bytes, size_t ranks, DataType type, Reduction reduction,
                    void** request) const override {
    if constexpr (kVersion >= 8) {
      Segment all{from.region, from.data, ranks * bytes};
      return table_.scatter.ireducescatter(connection, 1, &all, to.data, bytes, 0, ranks * bytes,
                                           static_cast<int>(type), reductionOf(reduction),
                                           to.region, request);
    }
    return kInternalError;
  }
  int flush(void* connection, const CollNetBuffer& data, int bytes, void** request) const override {
    if (table_.end.iflush == nullptr) return kSuccess;
    return table_.end.iflush(connection, data.data, bytes, data.region, request);
  }
  int test(void* request, int* done) const override {
    int bytes = 0;
    return table_.end.test(request, done, &bytes);
  }
  int closeConnection(void* connection) const override { return table_.end.closeColl(connection); }
  int closeListener(void* listener) const override { return table_.end.closeListen(listener); }

 private:
  static constexpr int kInternalError = 3;

  const OpenLibrary library_;
  const CollNetTable<kVersion>& table_;
};

// What is known of a library.
struct Known {
  bool isRead = false;
  std::shared_ptr<const CollNetFunctions> functions;  // null: none that can be used
  bool initialized = false;                           // init() has succeeded once
};

}  // namespace

std::string CollNet::start(uint64_t communicator, bool& initialized) {
  if (functions_->hasContexts() || !initialized) {
    const int result = functions_->init(&context_, communicator);
    if (result != kSuccess) return fmt::format("its init returned {}", describeResult(result));
    initialized = true;
  }
  started_ = true;
  int count = 0;
  if (const int result = functions_->devices(&count); result != kSuccess) {
    return fmt::format("its devices returned {}", describeResult(result));
  }
  if (count <= 0) return "it has no devices";
  for (int device = 0; device < count; device++) {
    NetPort& port = ports_.emplace_back();
    if (const int result = functions_->describe(device, port); result != kSuccess) {
      return fmt::format("its getProperties of device {} returned {}", device,
                         describeResult(result));
    }
    if (port.name.empty()) port.name = fmt::format("device {}", device);
  }
  return "";
}

std::shared_ptr<const CollNet> CollNet::open(const Net& net, const Warn& warn) {
  // Never destroyed: a communicator may outlive the end of main().
  static auto& byLibrary = *new std::map<const void*, Known>;
  static std::mutex mutex;
  // Held during init(): plug-ins were written for NCCL, which starts one at a time.
  const std::lock_guard lock(mutex);
  Known& known = byLibrary[net.library().get()];
  if (!std::exchange(known.isRead, true)) {
    known.functions =
        findFunctions<CollNetFunctions, CollNetFunctionsOf>(net.library(), "ncclCollNetPlugin_v");
    if (known.functions != nullptr && !known.functions->isComplete()) {
      warn(
          fmt::format("CollNet of the net plug-in {} is ignored: it lacks a function of its "
                      "interface",
                      net.name()));
      known.functions = nullptr;
    }
  }
  if (known.functions == nullptr) return nullptr;
  std::shared_ptr<CollNet> made(new CollNet(known.functions));
  const char* own = known.functions->name();
  made->name_ =
      fmt::format("{} (v{})", own == nullptr ? net.name() : own, known.functions->version());
  const std::string problem = made->start(net.member().communicator, known.initialized);
  if (problem.empty()) return made;
  // As with NCCL, what has failed once is not tried by later communicators.
  known.functions = nullptr;
  warn(fmt::format("The CollNet plug-in {} is ignored: {}", made->name_, problem));
  return nullptr;
}

CollNet::~CollNet() {
  if (!started_ || !functions_->hasContexts()) return;
  if (const int result = functions_->finalize(context_); result != kSuccess) {
    logWarn("finalize of the CollNet plug-in {} returned {}", name_, describeResult(result));
  }
}

}  // namespace unisono::plugin
