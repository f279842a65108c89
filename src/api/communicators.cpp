// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "api/aliases.h"
#include "api/arguments.h"
#include "api/boundary.h"
#include "api/config.h"
#include "api/in_group.h"
#include "base/log.h"
#include "comm/group.h"
#include "comm/make.h"
#include "unisono/config.h"

using namespace unisono;
using api::inGroup;
using comm::CallGroup;
using comm::Handle;
using comm::HandleId;

namespace {

comm::Options optionsOf(const ncclConfig_t& config) {
  comm::Options options;
  if (config.minCTAs != NCCL_CONFIG_UNDEF_INT) options.minChannels = config.minCTAs;
  if (config.maxCTAs != NCCL_CONFIG_UNDEF_INT) options.maxChannels = config.maxCTAs;
  if (config.nChannelsPerNetPeer != NCCL_CONFIG_UNDEF_INT) {
    options.netPeerChannels = config.nChannelsPerNetPeer;
  }
  if (config.cgaClusterSize != NCCL_CONFIG_UNDEF_INT) {
    options.clusterBlocks = config.cgaClusterSize;
  }
  if (config.commName != nullptr) options.name = config.commName;
  if (config.netName != nullptr) options.network = config.netName;
  if (config.trafficClass != NCCL_CONFIG_UNDEF_INT) options.trafficClass = config.trafficClass;
  options.collnet = config.collnetEnable == 1;
  if (config.CTAPolicy != NCCL_CONFIG_UNDEF_INT) {
    options.copyEngines = (config.CTAPolicy & NCCL_CTA_POLICY_ZERO) != 0;
    options.deterministic = (config.CTAPolicy & UNISONO_CTA_POLICY_DETERMINISTIC) != 0;
  }
  return options;
}

// Of a communicator that is made from `parent`: without a configuration the same, with one nothing
// is inherited but the network.
comm::Options optionsOf(const comm::Options& parent, const ncclConfig_t* given,
                        const ncclConfig_t& config) {
  if (given == nullptr) return parent;
  comm::Options options = optionsOf(config);
  if (options.network.empty()) options.network = parent.network;
  if (options.trafficClass == comm::Options::kAnyTrafficClass) {
    options.trafficClass = parent.trafficClass;
  }
  return options;
}

// NCCL_COMM_BLOCKING wins over the configuration.
bool isBlocking(const Settings& settings, const ncclConfig_t& config) {
  return settings.blocking >= 0 ? settings.blocking != 0 : config.blocking != 0;
}

// The first call of a process that needs a runtime logs which library it is.
void logVersion() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (logLevel() < LogLevel::version) return;
    Dl_info library{};
    const bool found = ::dladdr(reinterpret_cast<const void*>(&logVersion), &library) != 0;
    writeLog(LogLevel::version,
             fmt::format("Unisono {} with the API of NCCL {}.{}.{}, loaded from {}",
                         UNISONO_VERSION, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH,
                         found && library.dli_fname != nullptr ? library.dli_fname : "?"));
  });
}

HandleId* slotOf(ncclComm_t* comm) {
  return reinterpret_cast<HandleId*>(comm);
}

// Adds the creation of a communicator to the thread's group. The handle is set immediately.
void addInit(ncclComm_t* comm, int device, bool blocking, Handle::InitFunction make,
             bool isMember = true) {
  auto& runtime = runtime::Runtime::get();
  *slotOf(comm) = comm::registerHandle(std::make_shared<Handle>(runtime, device, blocking));
  CallGroup::current().add(slotOf(comm), std::move(make), isMember);
}

bootstrap::UniqueId unpack(const ncclUniqueId& id) {
  return bootstrap::unpackUniqueId(
      std::as_bytes(std::span<const char, NCCL_UNIQUE_ID_BYTES>(id.internal)));
}

void copyId(const bootstrap::UniqueId& id, ncclUniqueId& to) {
  const auto packed = bootstrap::packUniqueId(id);
  static_assert(sizeof(packed) == sizeof(to.internal));
  std::memcpy(to.internal, packed.data(), packed.size());
}

void checkRankOf(int rank, int ranks) {
  if (ranks < 1) {
    throw invalidArgument("nranks must be at least 1, got {}", ranks)
        .remedy("Pass the number of ranks of the communicator");
  }
  if (rank < 0 || rank >= ranks) {
    throw invalidArgument("rank must be from 0 to {}, got {}", ranks - 1, rank)
        .remedy("Pass a rank that is less than nranks");
  }
}

std::vector<bootstrap::UniqueId> unpackAll(const ncclUniqueId* ids, int count) {
  std::vector<bootstrap::UniqueId> result;
  for (int i = 0; i < count; i++) {
    try {
      result.push_back(unpack(ids[i]));
    } catch (const Error& error) {
      if (count == 1) throw;
      throw Error(error.code(), fmt::format("commIds[{}]: {}", i, error.what()));
    }
  }
  return result;
}

ncclResult_t initRank(ncclComm_t* comm, int ranks, const ncclUniqueId* ids, int idCount, int rank,
                      const ncclConfig_t* given) {
  return inGroup([&] {
    logVersion();
    api::checkNotNull(comm, "comm");
    *comm = nullptr;
    checkRankOf(rank, ranks);
    api::checkNotNull(ids, "commIds");
    if (idCount < 1 || idCount > ranks) {
      throw invalidArgument("nId must be from 1 to nranks ({}), got {} unique ids", ranks, idCount)
          .remedy("Pass at least one unique id, at most one per rank, the same on all ranks");
    }
    const ncclConfig_t config = api::readConfig(given);
    auto& runtime = runtime::Runtime::get();
    const int device = runtime.currentDevice();
    const Settings settings = settingsFromEnvironment();
    addInit(comm, device, isBlocking(settings, config),
            comm::makeFromIds(runtime, unpackAll(ids, idCount), rank, ranks, device, settings,
                              optionsOf(config)));
  });
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
      return "a CUDA call failed (see ncclGetLastError)";
    case ncclSystemError:
      return "a system call or a call to another library failed (see ncclGetLastError)";
    case ncclInternalError:
      return "internal error (see ncclGetLastError)";
    case ncclInvalidArgument:
      return "invalid argument (see ncclGetLastError)";
    case ncclInvalidUsage:
      return "invalid usage (see ncclGetLastError)";
    case ncclRemoteError:
      return "another rank failed or has left (see ncclGetLastError)";
    case ncclInProgress:
      return "operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  static thread_local api::ErrorText text;  // until the thread's next call
  if (comm != nullptr) {
    try {
      std::snprintf(text, sizeof(text), "%s", comm::findHandle(comm)->lastError().c_str());
      if (text[0] != '\0') return text;
    } catch (const std::exception&) {
      // Not a communicator: the thread's own error says what went wrong.
    }
  }
  return api::lastError();
}

void ncclResetDebugInit(void) {
  resetLog();
}

// The name under which later versions of NCCL export the same function.
__attribute__((visibility("default"))) void ncclResetDebugInitInternal(void);
void ncclResetDebugInitInternal(void) {
  resetLog();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  return api::guarded([&] {
    logVersion();
    api::checkNotNull(uniqueId, "uniqueId");
    copyId(bootstrap::createUniqueId(settingsFromEnvironment()), *uniqueId);
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  return initRank(comm, nranks, &commId, 1, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  return initRank(comm, nranks, &commId, 1, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId* commIds, ncclConfig_t* config) {
  return initRank(newcomm, nranks, commIds, nId, myrank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  return inGroup([&] {
    logVersion();
    api::checkNotNull(comm, "comm");
    auto& runtime = runtime::Runtime::get();
    if (ndev < 1 || (devlist == nullptr && ndev > runtime.deviceCount())) {
      throw invalidArgument("ndev must be from 1 to the number of devices ({}), got {}",
                            runtime.deviceCount(), ndev)
          .remedy("Pass the number of ranks to create, one per device");
    }
    for (int i = 0; devlist != nullptr && i < ndev; i++) {
      if (devlist[i] < 0 || devlist[i] >= runtime.deviceCount()) {
        throw invalidArgument("devlist[{}] must be from 0 to {}, got {}", i,
                              runtime.deviceCount() - 1, devlist[i])
            .remedy("Pass the ordinals of devices of this process");
      }
    }
    const Settings settings = settingsFromEnvironment();
    Settings local = settings;
    local.commId.clear();
    const bootstrap::UniqueId id = bootstrap::createUniqueId(local);
    for (int rank = 0; rank < ndev; rank++) {
      const int device = devlist == nullptr ? rank : devlist[rank];
      addInit(comm + rank, device, settings.blocking != 0,
              comm::makeFromIds(runtime, {id}, rank, ndev, device, settings, {}));
    }
  });
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  return inGroup([&] {
    api::checkNotNull(newcomm, "newcomm");
    *newcomm = nullptr;
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
      throw invalidArgument("color must be 0 or more, or NCCL_SPLIT_NOCOLOR, got {}", color)
          .remedy("Pass NCCL_SPLIT_NOCOLOR for a rank that joins no new communicator");
    }
    auto handle = comm::findHandle(comm);
    auto parent = handle->getParent();
    const ncclConfig_t read = api::readConfig(config);
    const comm::Options options = optionsOf(parent->options(), config, read);
    const bool blocking = config == nullptr && parent->settings().blocking < 0
                              ? handle->blocking()
                              : isBlocking(parent->settings(), read);
    const int device = parent->device();
    addInit(newcomm, device, blocking, comm::makeFromSplit(parent, color, key, options),
            color != NCCL_SPLIT_NOCOLOR);
  });
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags) {
  return inGroup([&] {
    api::checkNotNull(newcomm, "newcomm");
    *newcomm = nullptr;
    api::checkNotNull(excludeRanksList, "excludeRanksList");
    if (excludeRanksCount < 1) {
      throw invalidArgument("excludeRanksCount must be at least 1, got {}", excludeRanksCount)
          .remedy("Use ncclCommSplit for a communicator of all ranks");
    }
    if (shrinkFlags != NCCL_SHRINK_DEFAULT && shrinkFlags != NCCL_SHRINK_ABORT) {
      throw invalidArgument("shrinkFlags must be NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT, got {}",
                            shrinkFlags);
    }
    auto handle = comm::findHandle(comm);
    const bool aborts = shrinkFlags == NCCL_SHRINK_ABORT;
    auto parent = handle->getParent(aborts);
    const ncclConfig_t read = api::readConfig(config);
    const comm::Options options = optionsOf(parent->options(), config, read);
    const bool blocking = config == nullptr && parent->settings().blocking < 0
                              ? handle->blocking()
                              : isBlocking(parent->settings(), read);
    const auto excluded = std::span(excludeRanksList, static_cast<size_t>(excludeRanksCount));
    auto make = comm::makeFromShrink(parent, excluded, options);
    if (aborts) handle->stop(true);
    addInit(newcomm, parent->device(), blocking, std::move(make));
  });
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId) {
  return api::guarded([&] {
    api::checkNotNull(uniqueId, "uniqueId");
    copyId(comm::findHandle(comm)->getActive()->createGrowId(), *uniqueId);
  });
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
                          ncclComm_t* newcomm, ncclConfig_t* config) {
  if (comm == nullptr && uniqueId != nullptr) {
    return initRank(newcomm, nRanks, uniqueId, 1, rank, config);
  }
  return inGroup([&] {
    api::checkNotNull(newcomm, "newcomm");
    *newcomm = nullptr;
    if (comm == nullptr) {
      throw invalidArgument("Neither comm nor uniqueId is given")
          .remedy(
              "Pass the communicator on ranks that have one, and on new ranks the id from "
              "ncclCommGetUniqueId");
    }
    if (rank != -1) {
      throw invalidArgument("rank must be -1 on ranks of the communicator, got {}", rank)
          .remedy("They keep their numbers");
    }
    auto handle = comm::findHandle(comm);
    auto parent = handle->getActive();
    const ncclConfig_t read = api::readConfig(config);
    const comm::Options options = optionsOf(parent->options(), config, read);
    const bool blocking = config == nullptr && parent->settings().blocking < 0
                              ? handle->blocking()
                              : isBlocking(parent->settings(), read);
    const auto id = uniqueId == nullptr ? std::nullopt : std::optional(unpack(*uniqueId));
    addInit(newcomm, parent->device(), blocking, comm::makeFromGrow(parent, nRanks, id, options));
  });
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
  return api::guarded([&] {
    if (comm == nullptr) return;
    if (revokeFlags != NCCL_REVOKE_DEFAULT) {
      throw invalidArgument("revokeFlags must be NCCL_REVOKE_DEFAULT, got {}", revokeFlags);
    }
    comm::findHandle(comm)->stop(false);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return api::guarded([&] {
    if (comm == nullptr) return ncclSuccess;
    return comm::findHandle(comm)->finalize() ? ncclSuccess : ncclInProgress;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return api::guarded([&] {
    if (comm == nullptr) return;
    const std::shared_ptr<Handle> handle = comm::releaseHandle(comm);
    logInfo("{}: destroy", handle->description());
    handle->destroy();
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return api::guarded([&] {
    // In a group, all aborts come before any wait.
    if (comm != nullptr) comm::abortHandle(comm, CallGroup::current().depth() > 0);
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
    *count = comm::communicatorOf(comm)->ranks();
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
    *rank = comm::communicatorOf(comm)->rank();
  });
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  return inGroup([&] {
    if ((flags & ~NCCL_SUSPEND_MEM) != 0) {
      throw invalidArgument("flags must be 0 or NCCL_SUSPEND_MEM, got {}", flags);
    }
    if (flags == 0) {
      comm::communicatorOf(comm);
    } else {
      CallGroup::current().addSuspend(comm, true);
    }
  });
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  return inGroup([&] { CallGroup::current().addSuspend(comm, false); });
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  return api::guarded([&] {
    api::checkNotNull(value, "value");
    const auto made = comm::communicatorOf(comm);
    switch (stat) {
      case ncclStatGpuMemSuspend:
        *value = made->suspendableBytes();
        return;
      case ncclStatGpuMemSuspended:
        *value = comm::findHandle(comm)->isSuspended() ? 1 : 0;
        return;
      case ncclStatGpuMemPersist:
        *value = made->deviceBytes() - made->suspendableBytes();
        return;
      case ncclStatGpuMemTotal:
        *value = made->deviceBytes();
        return;
    }
    throw invalidArgument("stat must be a value of ncclCommMemStat_t, got {}",
                          static_cast<int>(stat));
  });
}

}  // extern "C"

UNISONO_ALIAS(ncclGetVersion);
UNISONO_ALIAS(ncclGetErrorString);
UNISONO_ALIAS(ncclGetLastError);
UNISONO_ALIAS(ncclResetDebugInit);
UNISONO_ALIAS(ncclResetDebugInitInternal);
UNISONO_ALIAS(ncclGetUniqueId);
UNISONO_ALIAS(ncclCommInitRank);
UNISONO_ALIAS(ncclCommInitRankConfig);
UNISONO_ALIAS(ncclCommInitRankScalable);
UNISONO_ALIAS(ncclCommInitAll);
UNISONO_ALIAS(ncclCommSplit);
UNISONO_ALIAS(ncclCommShrink);
UNISONO_ALIAS(ncclCommRevoke);
UNISONO_ALIAS(ncclCommFinalize);
UNISONO_ALIAS(ncclCommDestroy);
UNISONO_ALIAS(ncclCommAbort);
UNISONO_ALIAS(ncclCommGetAsyncError);
UNISONO_ALIAS(ncclCommCount);
UNISONO_ALIAS(ncclCommCuDevice);
UNISONO_ALIAS(ncclCommUserRank);
UNISONO_ALIAS(ncclCommMemStats);
UNISONO_ALIAS(ncclCommSuspend);
UNISONO_ALIAS(ncclCommResume);
UNISONO_ALIAS(ncclCommGetUniqueId);
UNISONO_ALIAS(ncclCommGrow);
