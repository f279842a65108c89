// SPDX-License-Identifier: Apache-2.0
/* A tuner plug-in: all-reduce up to 256 KiB uses trees with LL128. */
#include <stddef.h>
#include <stdlib.h>

enum { kSuccess = 0, kSystemError = 2 }; /* ncclResult_t */
enum { kInfo = 3, kTuning = 0x40 };      /* ncclDebugLogLevel, a subsystem */
enum { kAllReduce = 4 };                 /* ncclFunc_t: broadcast, reduce, all-gather, ... */
enum { kTree = 0, kLl128 = 1 };          /* rows and columns of the table of times */

typedef void (*Logger)(int level, unsigned long subsystems, const char* file, int line,
                       const char* format, ...);

struct Tuner {
  size_t largest;
};

/* Once for each communicator. */
static int init(size_t ranks, size_t nodes, Logger logger, void** context) {
  struct Tuner* tuner = malloc(sizeof(*tuner));
  if (tuner == NULL) return kSystemError;
  tuner->largest = 256 << 10;
  *context = tuner;
  logger(kInfo, kTuning, __FILE__, __LINE__, "example for %zu ranks on %zu nodes", ranks, nodes);
  return kSuccess;
}

/* Before each call, so it must be fast. The times are microseconds; a negative one means that the
 * algorithm cannot run here, and must stay as it is. */
static int getCollInfo(void* context, int operation, size_t bytes, int calls, float** table,
                       int algorithms, int protocols, int registered, int* channels) {
  const struct Tuner* tuner = context;
  float* time = (float*)table + kTree * protocols + kLl128;
  (void)calls, (void)algorithms, (void)registered, (void)channels;
  if (operation == kAllReduce && bytes <= tuner->largest && *time >= 0) *time = 0;
  return kSuccess;
}

static int destroy(void* context) {
  free(context);
  return kSuccess;
}

/* ncclTuner_v4_t of NCCL's plug-in headers. */
__attribute__((visibility("default"))) const struct {
  const char* name;
  int (*init)(size_t, size_t, Logger, void**);
  int (*getCollInfo)(void*, int, size_t, int, float**, int, int, int, int*);
  int (*destroy)(void*);
} ncclTunerPlugin_v4 = {"Example", init, getCollInfo, destroy};
