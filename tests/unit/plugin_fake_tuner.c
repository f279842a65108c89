// SPDX-License-Identifier: Apache-2.0
// A tuner plug-in of the version TUNER_VERSION. FAKE_TUNER in the environment says what it does
// wrong.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Logger)(int, unsigned long, const char*, int, const char*, ...);
typedef struct {
  int domains, minRanks, maxRanks;
} Domains;

enum { kRing = 1, kNvls = 4, kSimple = 2, kWarn = 2 };

// Counted by the test.
int fakeTunerOpen = 0, fakeTunerRanks = 0, fakeTunerNodes = 0, fakeTunerOperation = -1;
size_t fakeTunerBytes = 0;

static int does(const char* mode) {
  const char* wanted = getenv("FAKE_TUNER");
  return wanted != NULL && strcmp(wanted, mode) == 0;
}

static int start(void** context, size_t ranks, size_t nodes, Logger logger) {
  static int state;
  if (does("init fails")) return 3;
  logger(kWarn, 0, "fake", 1, "%s for %d ranks", "hello", (int)ranks);
  *context = &state;
  fakeTunerOpen++;
  fakeTunerRanks = (int)ranks;
  fakeTunerNodes = (int)nodes;
  return 0;
}

static int end(void* context) {
  fakeTunerOpen -= context != NULL;
  return 0;
}

static int answer(int operation, size_t bytes, float** table, int protocols, int* channels) {
  float* times = (float*)table;
  fakeTunerOperation = operation;
  fakeTunerBytes = bytes;
  if (does("call fails")) {
    times[kRing * protocols + kSimple] = 0;
    return 2;
  }
  if (does("nan")) times[kRing * protocols + kSimple] = NAN;
  if (does("negative")) times[kRing * protocols + kSimple] = -7;
  if (does("excluded")) times[kNvls * protocols + kSimple] = 0;
  if (does("channels")) *channels = 1000;
  if (getenv("FAKE_TUNER") != NULL) return 0;
  if (times[kRing * protocols + kSimple] >= 0) times[kRing * protocols + kSimple] = 0;
  *channels = 2;
  return 0;
}

#define EXPORT __attribute__((visibility("default")))

#if TUNER_VERSION <= 4
static int init(size_t ranks, size_t nodes, Logger logger, void** context) {
  return start(context, ranks, nodes, logger);
}
#else
static int init(void** context, uint64_t id, size_t ranks, size_t nodes, Logger logger,
                Domains* domains, double* constants) {
  // The base latency of a ring with Simple.
  constants[kRing * 3 + kSimple] = does("constants") ? NAN : 1000 * domains->maxRanks;
  return id == 77 ? start(context, ranks, nodes, logger) : 4;
}
#endif

#if TUNER_VERSION == 2
static int ask(void* context, int operation, size_t bytes, int collnet, int nvls, int calls,
               int* algorithm, int* protocol, int* channels) {
  float table[7 * 3] = {0};
  (void)context, (void)collnet, (void)nvls, (void)calls;
  *algorithm = does("excluded") ? 17 : kRing;
  *protocol = kSimple;
  return answer(operation, bytes, (float**)table, 3, channels);
}
#elif TUNER_VERSION == 3
static int ask(void* context, int operation, size_t bytes, int calls, float** table, int algorithms,
               int protocols, int* channels) {
  (void)context, (void)calls, (void)algorithms;
  return answer(operation, bytes, table, protocols, channels);
}
#else
static int ask(void* context, int operation, size_t bytes, int calls, float** table, int algorithms,
               int protocols, int registered, int* channels) {
  (void)context, (void)calls, (void)algorithms, (void)registered;
  return answer(operation, bytes, table, protocols, channels);
}
#endif

#if TUNER_VERSION == 6
static int chunk(void* context, int operation, size_t bytes, int algorithm, int protocol,
                 int channels, size_t* size) {
  (void)context, (void)operation, (void)bytes, (void)algorithm, (void)protocol, (void)channels;
  *size = does("chunk") ? 0 : *size / 2;
  return 0;
}
#endif

#define NAME_OF(version) ncclTunerPlugin_v##version
#define NAME(version) NAME_OF(version)
EXPORT const struct {
  const char* name;
  void *init, *ask, *end;
#if TUNER_VERSION == 6
  void* chunk;
#endif
} NAME(TUNER_VERSION) = {"Fake", (void*)init, (void*)ask, (void*)end
#if TUNER_VERSION == 6
                         ,
                         (void*)chunk
#endif
};
