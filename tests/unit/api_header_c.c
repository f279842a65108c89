// SPDX-License-Identifier: Apache-2.0
// nccl.h as the first header of a C program.
#include <nccl.h>

#include "api_header_facts.h"

// What C makes of the initializers; api_header_test.cpp compares it with C++.
extern const ncclConfig_t cConfig;
extern const ncclSimInfo_t cSimInfo;
const ncclConfig_t cConfig = NCCL_CONFIG_INITIALIZER;
const ncclSimInfo_t cSimInfo = NCCL_SIM_INFO_INITIALIZER;

ncclComm_t noCommunicator(void);
ncclComm_t noCommunicator(void) {
  return NCCL_COMM_NULL;
}
