// SPDX-License-Identifier: Apache-2.0
#include "api/aliases.h"
#include "api/boundary.h"
#include "comm/group.h"

using namespace unisono;

extern "C" {

ncclResult_t ncclGroupStart(void) {
  return api::guarded([] { comm::CallGroup::current().start(); });
}

ncclResult_t ncclGroupEnd(void) {
  return api::guarded(
      [] { return comm::CallGroup::current().end() ? ncclSuccess : ncclInProgress; });
}

// Closes the group without running it, like NCCL, so that its calls do not run later.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  comm::CallGroup::current().discard();
  return api::notImplemented("ncclGroupSimulateEnd");
}

}  // extern "C"

UNISONO_ALIAS(ncclGroupStart);
UNISONO_ALIAS(ncclGroupEnd);
UNISONO_ALIAS(ncclGroupSimulateEnd);
