// SPDX-License-Identifier: Apache-2.0
// A profiler plug-in of the version PROFILER_VERSION that notes what it is told, a line for each
// call. It reads events at the places where NCCL's plug-in headers of that version have them.
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if PROFILER_VERSION <= 3
enum { kSequence = 40, kFunction = 48, kCount = 72, kMessageFunction = 40, kPeer = 72 };
#else
enum { kSequence = 24, kFunction = 32, kCount = 56, kMessageFunction = 24, kPeer = 56 };
#endif
#if PROFILER_VERSION == 1
enum { kAlgorithm = 106 };
#elif PROFILER_VERSION == 2
enum { kAlgorithm = 112 };
#elif PROFILER_VERSION == 3
enum { kAlgorithm = 104 };
#else
enum { kAlgorithm = 88 };
#endif
enum { kParent = 8, kRank = 16, kUnion = 24 };

#define EXPORT __attribute__((visibility("default")))
typedef void (*Logger)(int, unsigned long, const char*, int, const char*, ...);

// The test reads the first fakeProfilerUsed() bytes, which do not change any more.
EXPORT char fakeProfilerNotes[1 << 25];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t used;
static long events;

EXPORT size_t fakeProfilerUsed(void) {
  pthread_mutex_lock(&mutex);
  const size_t bytes = used;
  pthread_mutex_unlock(&mutex);
  return bytes;
}

static void note(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length =
      vsnprintf(fakeProfilerNotes + used, sizeof(fakeProfilerNotes) - used, format, arguments);
  va_end(arguments);
  if (length < 0 || used + (size_t)length >= sizeof(fakeProfilerNotes)) abort();  // too small
  used += (size_t)length;
}

static int start(void* context, void** handle, void* event) {
  const char* bytes = event;
#if PROFILER_VERSION <= 4
  const long type = (unsigned char)bytes[0];
#else
  const long type = *(const long*)bytes;
#endif
  pthread_mutex_lock(&mutex);
  *handle = (void*)++events;
  note("start %ld event %ld parent %ld rank %d context %ld", type, events,
       *(const long*)(bytes + kParent), *(const int*)(bytes + kRank), (long)context);
  if (type == 2) {
    note(" sequence %ld count %ld", *(const long*)(bytes + kSequence),
         *(const long*)(bytes + kCount));
#if PROFILER_VERSION == 1
    note(" function %d algorithm %d", bytes[kFunction], bytes[kAlgorithm]);
#else
    note(" function %s algorithm %s", *(const char**)(bytes + kFunction),
         *(const char**)(bytes + kAlgorithm));
#endif
  } else if (type == 4) {
    note(" peer %d", *(const int*)(bytes + kPeer));
#if PROFILER_VERSION == 1
    note(" function %d", bytes[kMessageFunction]);
#else
    note(" function %s", *(const char**)(bytes + kMessageFunction));
#endif
  } else if (type == 64) {
    note(" channel %d", bytes[kUnion]);
#if PROFILER_VERSION >= 4
    note(" time %ld", *(const long*)(bytes + kUnion + 8));
#endif
  } else if (type == 8) {
    note(" process %d channel %d peer %d steps %d bytes %d sends %d", *(const int*)(bytes + kUnion),
         bytes[kUnion + 4], *(const int*)(bytes + kUnion + 8), *(const int*)(bytes + kUnion + 12),
         *(const int*)(bytes + kUnion + 16), *(const int*)(bytes + kUnion + 20));
  } else if (type == 16) {
    note(" step %d", *(const int*)(bytes + kUnion));
  } else if (type == 128) {
    note(" plugin %ld data %ld", *(const long*)(bytes + kUnion),
         **(const long**)(bytes + kUnion + 8));
  } else if (type == 256) {
    note(" depth %d", *(const int*)(bytes + kUnion + 4));
  } else if (type == 512 || type == 1024) {
    note(" function %s", *(const char**)(bytes + kUnion));
  }
  note("\n");
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int stop(void* handle) {
  pthread_mutex_lock(&mutex);
  note("stop event %ld\n", (long)handle);
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int record(void* handle, int state, void* arguments) {
  pthread_mutex_lock(&mutex);
  note("state %d event %ld", state, (long)handle);
  if (state == 22) note(" time %ld", *(const long*)arguments);
  if (state >= 13 && state <= 18) note(" appended %d", *(const int*)arguments);
  if ((state >= 8 && state <= 12) || state == 20) note(" bytes %ld", *(const long*)arguments);
  if (state == 21) note(" data %ld", **(const long**)arguments);
  note("\n");
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int finalize(void* context) {
  pthread_mutex_lock(&mutex);
  note("finalize %ld\n", (long)context);
  pthread_mutex_unlock(&mutex);
  return 0;
}

// FAKE_PROFILER_EVENTS in the environment says what it wants.
static int begin(void** context, int* wanted, const char* name, int nodes, int ranks, int rank) {
  static long contexts;
  const char* events_wanted = getenv("FAKE_PROFILER_EVENTS");
  if (events_wanted == NULL) return 3;
  *wanted = atoi(events_wanted);
  pthread_mutex_lock(&mutex);
  *context = (void*)++contexts;
  note("init %ld name %s nodes %d ranks %d rank %d\n", contexts, name, nodes, ranks, rank);
  pthread_mutex_unlock(&mutex);
  return 0;
}

#if PROFILER_VERSION <= 3
static int init(void** context, int* wanted) {
  return begin(context, wanted, "?", 0, 0, 0);
}
#elif PROFILER_VERSION == 4
static int init(void** context, int* wanted, const char* name, uint64_t id, int nodes, int ranks,
                int rank, Logger logger) {
  logger(3, 0, "fake", 1, "communicator %lx", (long)id);
  return begin(context, wanted, name, nodes, ranks, rank);
}
#else
static int init(void** context, uint64_t id, int* wanted, const char* name, int nodes, int ranks,
                int rank, Logger logger) {
  logger(3, 0, "fake", 1, "communicator %lx", (long)id);
  return begin(context, wanted, name, nodes, ranks, rank);
}
#endif

#define NAME_OF(version) ncclProfiler_v##version
#define NAME(version) NAME_OF(version)
EXPORT const struct {
  const char* name;
  void *init, *start, *stop, *record, *finalize;
} NAME(PROFILER_VERSION) = {"Fake",      (void*)init,   (void*)start,
                            (void*)stop, (void*)record, (void*)finalize};
