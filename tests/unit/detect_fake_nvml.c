// SPDX-License-Identifier: Apache-2.0
// A stand-in for the driver's library: two GPUs with two NVLinks between them, of which one is
// down on the first GPU, and one more to a switch that is hidden. Built from NVML's documentation.
#include <stdio.h>
#include <string.h>

typedef struct {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
} PciInfo;

typedef struct {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  unsigned long long value;
} FieldValue;

typedef struct {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
} FabricInfo;

enum { kSuccess, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6 };

static const char* const kBusIds[] = {"00000000:41:00.0", "00000000:42:00.0"};
static int gpus[2] = {0, 1};
static int users;

static int number(void* gpu) {
  return *(int*)gpu;
}
static void name(PciInfo* info, const char* bus_id) {
  memset(info, 0, sizeof(*info));
  snprintf(info->bus_id, sizeof(info->bus_id), "%s", bus_id);
}

int nvmlInit_v2(void) {
  return users++ ? kInvalidArgument : kSuccess;
}
int nvmlShutdown(void) {
  return users-- ? kSuccess : kInvalidArgument;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 3;  // the third one fell off the bus
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) {
  if (index > 1) return kNotFound;
  *gpu = &gpus[index];
  return kSuccess;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** gpu) {
  for (int i = 0; i < 2; i++) {
    if (strcmp(bus_id, kBusIds[i] + 4) == 0) {
      *gpu = &gpus[i];
      return kSuccess;
    }
  }
  return kNotFound;
}
int nvmlDeviceGetPciInfo_v3(void* gpu, PciInfo* info) {
  name(info, kBusIds[number(gpu)]);
  return kSuccess;
}
int nvmlDeviceGetNvLinkCapability(void* gpu, unsigned link, int capability, unsigned* result) {
  (void)gpu;
  if (link > 3 || capability != 0) return kInvalidArgument;
  *result = link != 3;  // link 3 carries no memory traffic
  return kSuccess;
}
int nvmlDeviceGetNvLinkState(void* gpu, unsigned link, int* active) {
  *active = !(number(gpu) == 0 && link == 1);
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* gpu, unsigned link, PciInfo* info) {
  name(info, link == 2 ? "FFFFFFFF:FF:FF.0" : kBusIds[1 - number(gpu)]);
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* gpu, unsigned link, int* type) {
  (void)gpu;
  *type = link == 2 ? 2 : 0;
  return kSuccess;
}
int nvmlDeviceGetP2PStatus(void* a, void* b, int operation, int* status) {
  *status = number(a) != number(b) && operation == 1 ? 1 : 0;  // writes are refused
  return kSuccess;
}
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) {
  *major = 8 + number(gpu);
  *minor = 6 * !number(gpu);
  return kSuccess;
}
int nvmlDeviceGetGpuFabricInfoV(void* gpu, FabricInfo* info) {
  if (info->version != (sizeof(FabricInfo) | 2u << 24)) return kInvalidArgument;
  info->state = number(gpu) == 0 ? 3 : 2;  // the second one has not joined yet
  info->status = 0;
  info->cluster[15] = 9;
  info->clique = 5;
  return kSuccess;
}
int nvmlDeviceGetFieldValues(void* gpu, int count, FieldValue* values) {
  for (int i = 0; i < count; i++) {
    values[i].result = number(gpu) == 0 ? kSuccess : kNotSupported;
    if (values[i].field == 170) values[i].value = 3;
    if (values[i].field == 171) values[i].value = values[i].scope != 1;
    if (values[i].field == 172) values[i].value = 40000;
  }
  return kSuccess;
}
