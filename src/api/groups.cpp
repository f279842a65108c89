#include "api/boundary.h"
#include "api/twins.h"
#include "comm/group.h"

using namespace unisono;

extern "C" {

ncclResult_t ncclGroupStart(void) {
  return api::guarded([] { comm::Group::current().start(); });
}

ncclResult_t ncclGroupEnd(void) {
  return api::guarded([] { return comm::Group::current().end() ? ncclSuccess : ncclInProgress; });
}

// Closes the group without running it, as the real one does, so that no call is left behind.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  comm::Group::current().discard();
  return api::notImplemented("ncclGroupSimulateEnd");
}

}  // extern "C"

UNISONO_TWIN(ncclGroupStart);
UNISONO_TWIN(ncclGroupEnd);
UNISONO_TWIN(ncclGroupSimulateEnd);
