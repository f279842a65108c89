// SPDX-License-Identifier: Apache-2.0
// What the two parts of the network plug-in for tests share, fake_net.c and fake_collnet.c.
// FAKE_NET in the environment says what it does wrong, FAKE_NET_SENDS after how many operations,
// FAKE_NET_POINTERS which memory it takes (the sum of NCCL_PTR_*). With FAKE_NET_LATE what arrives
// in memory of the GPU is there only after a flush.
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { kSuccess = 0, kSystemError = 2, kInternalError = 3, kWarn = 2, kInfo = 3 };
enum { kHost = 1, kGpu = 2, kDmaBuf = 4 };  // NCCL_PTR_*
enum { kRequests = 32 };
typedef void (*Logger)(int, unsigned long, const char*, int, const char*, ...);

#if NET_VERSION >= 9
typedef size_t Bytes;
#else
typedef int Bytes;
#endif
#if NET_VERSION >= 8
typedef size_t RegionBytes;
#else
typedef int RegionBytes;
#endif

typedef struct {
  char *name, *pciPath;
  uint64_t guid;
  int ptrSupport;
#if NET_VERSION >= 8
  int regIsGlobal;
#endif
#if NET_VERSION >= 9
  int forceFlush;
#endif
  int speed, port;
  float latency;
  int maxComms, maxRecvs;
#if NET_VERSION >= 7
  int netDeviceType, netDeviceVersion;
#endif
#if NET_VERSION >= 9
  int deviceCount, devices[NET_VERSION >= 12 ? 8 : 4];
  size_t maxP2pBytes, maxCollBytes;
#endif
#if NET_VERSION >= 11
  int maxMultiRequestSize;
#endif
#if NET_VERSION >= 12
  int16_t railId, planeId;
#endif
} Properties;

#define CONCAT2(a, b) a##b
#define CONCAT(a, b) CONCAT2(a, b)
#define STRING2(a) #a
#define STRING(a) STRING2(a)

// Counted by tests: contexts, connections, listeners, regions and requests that are open.
extern int fakeNetOpen;

// As many devices as FAKE_NET_PORTS lists PCI addresses, or two.
int fakeNetDevices(void);
int fakeNetProperties(int device, Properties* properties);

// Ends the process where the plug-in is called against the rules.
static inline void require(int condition, const char* rule) {
  if (condition) return;
  fprintf(stderr, "fake net plug-in v%d: %s\n", NET_VERSION, rule);
  abort();
}

static inline int does(const char* mode) {
  const char* wanted = getenv("FAKE_NET");
  return wanted != NULL && strcmp(wanted, mode) == 0;
}

static inline void count(int change) {
  __atomic_fetch_add(&fakeNetOpen, change, __ATOMIC_SEQ_CST);
}
