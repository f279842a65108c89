// SPDX-License-Identifier: Apache-2.0
// What Unisono adds to ncclConfig_t; include it after nccl.h, NVIDIA's or Unisono's. NVIDIA's
// library refuses it with ncclInvalidArgument.
#ifndef UNISONO_CONFIG_H_
#define UNISONO_CONFIG_H_

// A flag of ncclConfig_t.CTAPolicy, which can be combined with NCCL's by `|`: does for one
// communicator, and for those that inherit its configuration, what UNISONO_DETERMINISTIC=1 does for
// all. NCCL numbers its flags from 1 up.
#define UNISONO_CTA_POLICY_DETERMINISTIC 0x01000000

#endif  // UNISONO_CONFIG_H_
