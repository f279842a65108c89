#include <cstddef>
#include <cstring>
#include <vector>

#include "api/arguments.h"
#include "api/boundary.h"
#include "api/twins.h"
#include "base/log.h"
#include "comm/group.h"
#include "comm/make.h"

using namespace unisono;
using comm::Group;
using comm::Handle;
using comm::HandleId;

namespace {

constexpr unsigned kConfigMagic = 0xcafebeef;

// The caller's configuration as one of this version: fields that its version did not have yet, and
// those it left undefined, keep the default.
ncclConfig_t readConfig(const ncclConfig_t* given) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (given == nullptr) return config;
  // The first version with a configuration, 2.14, ended after `blocking`.
  constexpr size_t kSmallest = offsetof(ncclConfig_t, blocking) + sizeof(int);
  if (given->magic != kConfigMagic || given->size < kSmallest) {
    throw invalidArgument("The ncclConfig_t was not initialized")
        .remedy("Initialize it with NCCL_CONFIG_INITIALIZER");
  }
  std::memcpy(&config, given, std::min(given->size, sizeof(config)));
  auto check = [](int value, bool good, const char* name, const char* allowed) {
    if (value != NCCL_CONFIG_UNDEF_INT && !good) {
      throw invalidArgument("ncclConfig_t.{} is {}", name, value)
          .remedy(fmt::format("Set it to {}, or leave it undefined", allowed));
    }
  };
  check(config.blocking, config.blocking == 0 || config.blocking == 1, "blocking", "0 or 1");
  check(config.minCTAs, config.minCTAs > 0, "minCTAs", "a positive number");
  check(config.maxCTAs, config.maxCTAs > 0, "maxCTAs", "a positive number");
  check(config.cgaClusterSize, config.cgaClusterSize >= 0 && config.cgaClusterSize <= 8,
        "cgaClusterSize", "0 to 8");
  if (config.minCTAs != NCCL_CONFIG_UNDEF_INT && config.maxCTAs != NCCL_CONFIG_UNDEF_INT &&
      config.minCTAs > config.maxCTAs) {
    throw invalidArgument("ncclConfig_t.minCTAs is {}, more than maxCTAs, {}", config.minCTAs,
                          config.maxCTAs)
        .remedy("Make minCTAs the smaller one");
  }
  return config;
}

comm::Options optionsOf(const ncclConfig_t& config) {
  comm::Options options;
  if (config.minCTAs != NCCL_CONFIG_UNDEF_INT) options.minChannels = config.minCTAs;
  if (config.maxCTAs != NCCL_CONFIG_UNDEF_INT) options.maxChannels = config.maxCTAs;
  if (config.commName != nullptr) options.name = config.commName;
  return options;
}

// NCCL_COMM_BLOCKING wins over the configuration.
bool isBlocking(const Settings& settings, const ncclConfig_t& config) {
  return settings.blocking >= 0 ? settings.blocking != 0 : config.blocking != 0;
}

HandleId* slotOf(ncclComm_t* comm) {
  return reinterpret_cast<HandleId*>(comm);
}

// Puts the making of a communicator into the thread's group; the handle is there at once.
void addMaking(ncclComm_t* comm, int device, bool blocking, Handle::Maker make,
               std::shared_ptr<Handle> keeper = nullptr) {
  auto& runtime = runtime::Runtime::get();
  *slotOf(comm) = comm::registerHandle(std::make_shared<Handle>(runtime, device, blocking));
  Group::current().add(slotOf(comm), std::move(make), std::move(keeper));
}

// Runs `body`, which adds to the group, as a group of its own or inside the caller's.
template <typename Body>
ncclResult_t inGroup(Body body) {
  return api::guarded([&]() -> ncclResult_t {
    Group& group = Group::current();
    group.start();
    group.attempt(body);
    return group.end() ? ncclSuccess : ncclInProgress;
  });
}

bootstrap::UniqueId unpack(const ncclUniqueId& id) {
  return bootstrap::unpackUniqueId(
      std::as_bytes(std::span<const char, NCCL_UNIQUE_ID_BYTES>(id.internal)));
}

void checkRankOf(int rank, int ranks) {
  if (ranks < 1) {
    throw invalidArgument("A communicator of {} ranks cannot be", ranks).remedy("Use 1 or more");
  }
  if (rank < 0 || rank >= ranks) {
    throw invalidArgument("The rank is {}, but {} ranks were announced", rank, ranks)
        .remedy(fmt::format("Use a rank from 0 to {}", ranks - 1));
  }
}

ncclResult_t initRank(ncclComm_t* comm, int ranks, const ncclUniqueId& id, int rank,
                      const ncclConfig_t* given) {
  return inGroup([&] {
    api::checkNotNull(comm, "comm");
    *comm = nullptr;
    checkRankOf(rank, ranks);
    const ncclConfig_t config = readConfig(given);
    auto& runtime = runtime::Runtime::get();
    const int device = runtime.currentDevice();
    const Settings settings = settingsFromEnvironment();
    addMaking(
        comm, device, isBlocking(settings, config),
        comm::makeFromId(runtime, unpack(id), rank, ranks, device, settings, optionsOf(config)));
  });
}

std::shared_ptr<comm::Communicator> communicatorOf(ncclComm_t comm) {
  return comm::findHandle(comm)->communicator();
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return api::guarded([&] {
    api::checkNotNull(version, "version");
    *version = NCCL_VERSION_CODE;
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "a CUDA call failed (ncclGetLastError tells which)";
    case ncclSystemError:
      return "a system call failed (ncclGetLastError tells which)";
    case ncclInternalError:
      return "internal error (ncclGetLastError tells more)";
    case ncclInvalidArgument:
      return "invalid argument (ncclGetLastError tells which)";
    case ncclInvalidUsage:
      return "invalid usage (ncclGetLastError tells what to do)";
    case ncclRemoteError:
      return "another rank failed or is gone (ncclGetLastError tells which)";
    case ncclInProgress:
      return "the operation is in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  static thread_local std::string text;  // until the thread's next call
  if (comm != nullptr) {
    try {
      text = comm::findHandle(comm)->lastError();
      if (!text.empty()) return text.c_str();
    } catch (const std::exception&) {
      // Not a communicator: the thread's own error says what went wrong.
    }
  }
  return api::lastError();
}

void ncclResetDebugInit(void) {
  resetLog();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  return api::guarded([&] {
    api::checkNotNull(uniqueId, "uniqueId");
    const auto packed =
        bootstrap::packUniqueId(bootstrap::createUniqueId(settingsFromEnvironment()));
    static_assert(sizeof(packed) == sizeof(uniqueId->internal));
    std::memcpy(uniqueId->internal, packed.data(), packed.size());
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  return initRank(comm, nranks, commId, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  return initRank(comm, nranks, commId, rank, config);
}

// One root serves any number of ranks, so the first id is enough.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId* commIds, ncclConfig_t* config) {
  if (nId < 1 || commIds == nullptr) {
    return api::guarded([&] {
      throw invalidArgument("{} unique ids were passed", commIds == nullptr ? 0 : nId)
          .remedy("Pass one or more, the same on all ranks");
    });
  }
  return initRank(newcomm, nranks, commIds[0], myrank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  return inGroup([&] {
    api::checkNotNull(comm, "comm");
    auto& runtime = runtime::Runtime::get();
    if (ndev < 1 || (devlist == nullptr && ndev > runtime.deviceCount())) {
      throw invalidArgument("{} devices were asked for, there are {}", ndev, runtime.deviceCount())
          .remedy("Ask for at least 1 and at most as many as there are");
    }
    for (int i = 0; devlist != nullptr && i < ndev; i++) {
      if (devlist[i] < 0 || devlist[i] >= runtime.deviceCount()) {
        throw invalidArgument("Device {} does not exist: there are {}", devlist[i],
                              runtime.deviceCount())
            .remedy("Pass device ordinals");
      }
    }
    const Settings settings = settingsFromEnvironment();
    Settings local = settings;
    local.commId.clear();
    const bootstrap::UniqueId id = bootstrap::createUniqueId(local);
    for (int rank = 0; rank < ndev; rank++) {
      const int device = devlist == nullptr ? rank : devlist[rank];
      addMaking(comm + rank, device, settings.blocking != 0,
                comm::makeFromId(runtime, id, rank, ndev, device, settings, {}));
    }
  });
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  return inGroup([&] {
    api::checkNotNull(newcomm, "newcomm");
    *newcomm = nullptr;
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
      throw invalidArgument("The color is {}", color)
          .remedy("Use 0 or more, or NCCL_SPLIT_NOCOLOR to take no part");
    }
    auto handle = comm::findHandle(comm);
    auto parent = handle->usable();
    // Without a configuration the new communicator has the parent's, with one nothing is inherited.
    const ncclConfig_t read = readConfig(config);
    const comm::Options options = config == nullptr ? parent->options() : optionsOf(read);
    const bool blocking = config == nullptr && parent->settings().blocking < 0
                              ? handle->blocking()
                              : isBlocking(parent->settings(), read);
    const int device = parent->device();
    addMaking(newcomm, device, blocking, comm::makeFromSplit(parent, color, key, options),
              color == NCCL_SPLIT_NOCOLOR ? std::move(handle) : nullptr);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return api::guarded([&] { comm::findHandle(comm)->finalize(); });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return api::guarded([&] {
    if (comm != nullptr) comm::releaseHandle(comm);
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return api::guarded([&] {
    if (comm != nullptr) comm::releaseHandle(comm)->abort();
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  return api::guarded([&] {
    api::checkNotNull(asyncError, "asyncError");
    *asyncError = resultOf(comm::findHandle(comm)->state());
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return api::guarded([&] {
    api::checkNotNull(count, "count");
    *count = communicatorOf(comm)->ranks();
  });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return api::guarded([&] {
    api::checkNotNull(device, "device");
    *device = comm::findHandle(comm)->device();
  });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return api::guarded([&] {
    api::checkNotNull(rank, "rank");
    *rank = communicatorOf(comm)->rank();
  });
}

}  // extern "C"

UNISONO_TWIN(ncclGetVersion);
UNISONO_TWIN(ncclGetErrorString);
UNISONO_TWIN(ncclGetLastError);
UNISONO_TWIN(ncclResetDebugInit);
UNISONO_TWIN(ncclGetUniqueId);
UNISONO_TWIN(ncclCommInitRank);
UNISONO_TWIN(ncclCommInitRankConfig);
UNISONO_TWIN(ncclCommInitRankScalable);
UNISONO_TWIN(ncclCommInitAll);
UNISONO_TWIN(ncclCommSplit);
UNISONO_TWIN(ncclCommFinalize);
UNISONO_TWIN(ncclCommDestroy);
UNISONO_TWIN(ncclCommAbort);
UNISONO_TWIN(ncclCommGetAsyncError);
UNISONO_TWIN(ncclCommCount);
UNISONO_TWIN(ncclCommCuDevice);
UNISONO_TWIN(ncclCommUserRank);
