// SPDX-License-Identifier: Apache-2.0
#include "api/config.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>

#include "base/error.h"
#include "unisono/config.h"

namespace unisono::api {
namespace {

constexpr unsigned kConfigMagic = 0xcafebeef;
constexpr int kMaxChannels = 64;
constexpr int kPolicies =
    NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO | UNISONO_CTA_POLICY_DETERMINISTIC;

// Sets the fields that the structure of the caller's version does not have to undefined. Its size
// does not tell, because padding at its end has the offset of a later field.
void dropUnknownFields(ncclConfig_t& config) {
  const ncclConfig_t undefined = NCCL_CONFIG_INITIALIZER;
  const unsigned version = config.version;
  if (version < NCCL_VERSION(2, 14, 0)) config.blocking = undefined.blocking;
  if (version < NCCL_VERSION(2, 17, 0)) {
    config.cgaClusterSize = undefined.cgaClusterSize;
    config.minCTAs = undefined.minCTAs;
    config.maxCTAs = undefined.maxCTAs;
    config.netName = undefined.netName;
  }
  if (version < NCCL_VERSION(2, 18, 0)) config.splitShare = undefined.splitShare;
  if (version < NCCL_VERSION(2, 25, 0)) config.trafficClass = undefined.trafficClass;
  if (version < NCCL_VERSION(2, 27, 0)) {
    config.commName = undefined.commName;
    config.collnetEnable = undefined.collnetEnable;
    config.CTAPolicy = undefined.CTAPolicy;
    config.shrinkShare = undefined.shrinkShare;
    config.nvlsCTAs = undefined.nvlsCTAs;
  }
  if (version < NCCL_VERSION(2, 28, 0)) {
    config.nChannelsPerNetPeer = undefined.nChannelsPerNetPeer;
    config.nvlinkCentricSched = undefined.nvlinkCentricSched;
  }
}

struct AllowedRange {
  const char* name;
  int ncclConfig_t::*field;
  int lowest, highest;
};

// The ranges are NCCL's.
constexpr AllowedRange kAllowedRanges[] = {
    {"blocking", &ncclConfig_t::blocking, 0, 1},
    {"cgaClusterSize", &ncclConfig_t::cgaClusterSize, 0, INT_MAX},
    {"minCTAs", &ncclConfig_t::minCTAs, 1, INT_MAX},
    {"maxCTAs", &ncclConfig_t::maxCTAs, 1, INT_MAX},
    {"splitShare", &ncclConfig_t::splitShare, 0, 1},
    {"collnetEnable", &ncclConfig_t::collnetEnable, 0, 1},
    {"shrinkShare", &ncclConfig_t::shrinkShare, 0, 1},
    {"nvlsCTAs", &ncclConfig_t::nvlsCTAs, 1, INT_MAX},
    {"nChannelsPerNetPeer", &ncclConfig_t::nChannelsPerNetPeer, 1, kMaxChannels},
    {"nvlinkCentricSched", &ncclConfig_t::nvlinkCentricSched, 0, 1},
};

Error notAllowed(const char* name, int value, const std::string& allowed) {
  return invalidArgument("ncclConfig_t.{} is {}, which is not allowed", name, value)
      .remedy(fmt::format("Set it to {}, or leave it undefined", allowed));
}

void checkRange(const ncclConfig_t& config, const AllowedRange& range) {
  const int value = config.*range.field;
  if (value == NCCL_CONFIG_UNDEF_INT) return;
  if (value >= range.lowest && value <= range.highest) return;
  throw notAllowed(range.name, value,
                   range.highest == INT_MAX ? fmt::format("{} or more", range.lowest)
                                            : fmt::format("{} to {}", range.lowest, range.highest));
}

void checkPolicy(int policy) {
  if (policy == NCCL_CONFIG_UNDEF_INT || (policy & ~kPolicies) == 0) return;
  throw notAllowed("CTAPolicy", policy,
                   "a combination of NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO and "
                   "UNISONO_CTA_POLICY_DETERMINISTIC");
}

}  // namespace

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
  dropUnknownFields(config);
  for (const AllowedRange& range : kAllowedRanges) checkRange(config, range);
  checkPolicy(config.CTAPolicy);
  if (config.minCTAs != NCCL_CONFIG_UNDEF_INT && config.maxCTAs != NCCL_CONFIG_UNDEF_INT &&
      config.minCTAs > config.maxCTAs) {
    throw invalidArgument("ncclConfig_t.minCTAs is {}, more than maxCTAs, which is {}",
                          config.minCTAs, config.maxCTAs)
        .remedy("Set minCTAs to at most maxCTAs");
  }
  return config;
}

}  // namespace unisono::api
