// SPDX-License-Identifier: Apache-2.0
// A network plug-in of the version NET_VERSION, over TCP on the loopback interface.
#include "fake_net_part.h"

#include <sys/mman.h>

typedef struct {
  int trafficClass;
} Config;

// Counted by tests: contexts, connections, listeners, regions and requests that are open.
__attribute__((visibility("default"))) int fakeNetOpen = 0;
__attribute__((visibility("default"))) int fakeNetInits = 0, fakeNetTrafficClass = 0;
__attribute__((visibility("default"))) int fakeNetFlushes = 0;
// Whether calls that hang do not even return, against the interface, and how many have not.
__attribute__((visibility("default"))) int fakeNetHolds = 0, fakeNetHeld = 0;
// Regions in memory of the GPU, by address and by DMA-BUF.
__attribute__((visibility("default"))) int fakeNetGpuRegions = 0, fakeNetDmaBufs = 0;

static Logger logger_;
typedef int (*Profiler)(void**, int, void*, int64_t, void*);
// Of versions 10 and later: events of type 0 start, 1 stop, 2 change, 3 change and stop.
__attribute__((unused)) static Profiler profiler_;
enum { kEventsOfFake = 2 << 16 | 1 };

typedef struct Connection Connection;
typedef struct Request {
  Connection* connection;
  char* data;
  uint32_t bytes, moved;  // moved: of the header and the data
  uint32_t header;
  int inUse, complete;
  char *late, *place;  // where data wait for a flush, and where they belong; or null
  char word[8];        // of which not all bytes have been received
  void* event;         // of the profiler, or null
  long told;           // what the event says
} Request;

struct Connection {
  int socket, sends, regions, turns;
  long number;  // of the last message
  Request requests[kRequests];
  unsigned first, last;  // requests that are not complete: in order
  struct {               // received, and not in memory of the GPU yet
    char *data, *place;
    uint32_t bytes;
  } late[kRequests];
  Request flush;
  char* flushed;
};
typedef struct {
  int socket, turns;
} Listener;
typedef struct {
  Connection* connection;
  char *data, *mapped;  // mapped: the same memory at the address of the plug-in's own
  size_t bytes;
  int isGpu;
  void* mapping;
  size_t mappingBytes;
} Region;
// State of a connection that is being made.
typedef struct {
  struct sockaddr_in address;
  int turns, socket;
} Handle;

static int newSocket(void) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int one = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

static Connection* newConnection(int socket, int sends) {
  Connection* connection = calloc(1, sizeof(*connection));
  connection->socket = socket;
  connection->sends = sends;
  count(1);
  return connection;
}

// Returns the folder of the device of that number in FAKE_NET_PORTS; null if there is none.
static char* pathOf(int device) {
  static __thread char path[64];
  const char* at = getenv("FAKE_NET_PORTS");
  for (int i = 0; at != NULL && i < device; i++) {
    at = strchr(at, ',');
    if (at != NULL) at++;
  }
  if (at == NULL) return NULL;
  snprintf(path, sizeof(path), "/sys/devices/pci0000:00/%.12s", at);
  return path;
}

int fakeNetDevices(void) {
  int number = 0;
  if (getenv("FAKE_NET_PORTS") == NULL) return 2;
  while (pathOf(number) != NULL) number++;
  return number;
}

static int devices(int* number) {
  *number = does("no devices") ? 0 : fakeNetDevices();
  return kSuccess;
}

int fakeNetProperties(int device, Properties* properties) {
  static char* names[] = {"fake0", "fake1", "fake2", "fake3", "fake4", "fake5", "fake6", "fake7"};
  if (does("properties fail")) return kSystemError;
  require(device >= 0 && device < fakeNetDevices(), "device out of range");
  memset(properties, 0, sizeof(*properties));
  properties->name = names[device];
  properties->pciPath = pathOf(device);
  if (properties->pciPath == NULL && device == 0) {
    properties->pciPath = "/sys/devices/pci0000:00/0000:0a:00.0";
  }
  properties->guid = 70 + (uint64_t)device;
  const char* pointers = getenv("FAKE_NET_POINTERS");
  properties->ptrSupport = pointers == NULL ? kHost : atoi(pointers);
  properties->speed = 100000;
  properties->port = 1;
  properties->latency = 2.5f;
  properties->maxComms = 1000;
  properties->maxRecvs = device == 0 ? 1 : 8;
#if NET_VERSION >= 7
  properties->netDeviceType = does("on the device") ? 1 : 0;
#endif
#if NET_VERSION >= 9
  properties->forceFlush = 1;
  properties->deviceCount = 1;
  properties->devices[0] = device;
  properties->maxP2pBytes = does("small messages") ? 100 : (size_t)1 << 30;
  properties->maxCollBytes = (size_t)1 << 30;
#endif
  return kSuccess;
}

static int doListen(int device, void* handle, void** listener) {
  Handle* own = handle;
  socklen_t length = sizeof(own->address);
  require(device >= 0 && device < fakeNetDevices(), "device out of range");
  if (does("listen fails")) return kSystemError;
  memset(own, 0, sizeof(*own));
  own->socket = -1;
  own->address.sin_family = AF_INET;
  own->address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = newSocket();
  if (fd < 0 || bind(fd, (struct sockaddr*)&own->address, length) != 0 || listen(fd, 4) != 0 ||
      getsockname(fd, (struct sockaddr*)&own->address, &length) != 0) {
    return kSystemError;
  }
  Listener* made = calloc(1, sizeof(*made));
  made->socket = fd;
  count(1);
  *listener = made;
  return kSuccess;
}

// Takes several calls, and an accept of the receiver in between.
static int doConnect(int device, void* handle, void** sender) {
  Handle* own = handle;
  char byte;
  require(device >= 0 && device < fakeNetDevices(), "device out of range");
  *sender = NULL;
  if (does("connect fails")) return kSystemError;
  if (does("never connects") || own->turns++ == 0) return kSuccess;
  if (own->socket < 0) {
    own->socket = newSocket();
    if (own->socket < 0) return kSystemError;
    if (connect(own->socket, (struct sockaddr*)&own->address, sizeof(own->address)) != 0 &&
        errno != EINPROGRESS) {
      return kSystemError;
    }
  }
  ssize_t got = recv(own->socket, &byte, 1, 0);
  if (got == 0) return kSystemError;
  if (got < 0) return errno == EAGAIN || errno == ENOTCONN ? kSuccess : kSystemError;
  *sender = newConnection(own->socket, 1);
  return kSuccess;
}

static int doAccept(void* listener, void** receiver) {
  Listener* own = listener;
  *receiver = NULL;
  if (does("accept fails")) return kSystemError;
  if (own->turns++ == 0) return kSuccess;
  int fd = accept4(own->socket, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) return errno == EAGAIN ? kSuccess : kSystemError;
  if (send(fd, "", 1, MSG_NOSIGNAL) != 1) return kSystemError;
  *receiver = newConnection(fd, 0);
  return kSuccess;
}

static int takes(int pointers) {
  Properties properties;
  fakeNetProperties(0, &properties);
  return (properties.ptrSupport & pointers) == pointers;
}

static Region* newRegion(Connection* connection, char* data, size_t bytes, int isGpu) {
  Region* made = calloc(1, sizeof(*made));
  made->connection = connection;
  made->data = made->mapped = data;
  made->bytes = bytes;
  made->isGpu = isGpu;
  connection->regions++;
  count(1);
  return made;
}

static int regMr(void* connection, void* data, RegionBytes bytes, int type, void** region) {
  require(type == kHost || (type == kGpu && takes(kGpu)), "memory that it does not take");
  require(bytes > 0, "region without bytes");
  if (does("regMr fails") || (does("regMr of a GPU fails") && type == kGpu)) return kSystemError;
  if (type == kGpu) __atomic_fetch_add(&fakeNetGpuRegions, 1, __ATOMIC_SEQ_CST);
  *region = newRegion(connection, data, (size_t)bytes, type == kGpu);
  return kSuccess;
}

// Maps the memory by its descriptor, as adapters do.
static int regMrDmaBuf(void* connection, void* data, size_t bytes, int type, uint64_t offset,
                       int descriptor, void** region) {
  require(type == kGpu && takes(kDmaBuf), "DMA-BUF that it does not take");
  require(bytes > 0 && offset % 4096 == 0, "DMA-BUF that does not begin with a page");
  if (does("regMrDmaBuf fails") || does("regMr of a GPU fails")) return kSystemError;
  void* mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, (off_t)offset);
  if (mapping == MAP_FAILED) return kSystemError;
  Region* made = newRegion(connection, data, bytes, 1);
  made->mapped = made->mapping = mapping;
  made->mappingBytes = bytes;
  __atomic_fetch_add(&fakeNetDmaBufs, 1, __ATOMIC_SEQ_CST);
  *region = made;
  return kSuccess;
}

static int deregMr(void* connection, void* region) {
  Region* own = region;
  require(own->connection == connection, "region of another connection");
  own->connection->regions--;
  count(-1);
  if (own->mapping != NULL) munmap(own->mapping, own->mappingBytes);
  free(own);
  return kSuccess;
}

// Keeps what a request has received until a flush. What was there before gives way to it.
static void keepLate(Connection* connection, Request* request) {
  int i = 0;
  while (i < kRequests && connection->late[i].data != NULL &&
         connection->late[i].place != request->place) {
    i++;
  }
  require(i < kRequests, "more slots than a connection has");
  free(connection->late[i].data);
  connection->late[i].data = request->late;
  connection->late[i].place = request->place;
  connection->late[i].bytes = request->header;
  request->late = NULL;
}

// Stores what was received as adapters do, in whole words: kernels look at them at any time.
static void deliver(Request* request, const char* from, size_t bytes) {
  const size_t end = request->header;
  size_t at = request->moved - sizeof(request->header);
  for (size_t i = 0; i < bytes; i++, at++) {
    request->word[at % 8] = from[i];
    if (at % 8 == 7 && (uintptr_t)request->data % 8 == 0) {
      uint64_t word;
      memcpy(&word, request->word, sizeof(word));
      __atomic_store_n((uint64_t*)(request->data + at - 7), word, __ATOMIC_RELEASE);
    } else if (at % 8 == 7 || at + 1 == end) {
      for (size_t b = 0; b <= at % 8; b++) {
        __atomic_store_n(request->data + at / 8 * 8 + b, request->word[b], __ATOMIC_RELEASE);
      }
    }
  }
}

// Moves the requests of a connection in their order. Returns an ncclResult_t.
static int progress(Connection* connection) {
  while (connection->first != connection->last) {
    Request* request = &connection->requests[connection->first % kRequests];
    uint32_t total = sizeof(request->header);
    if (connection->sends || request->moved >= sizeof(request->header)) total += request->header;
    while (request->moved < total) {
      int inHeader = request->moved < sizeof(request->header);
      char received[4096];
      char* at = inHeader            ? (char*)&request->header + request->moved
                 : connection->sends ? request->data + request->moved - sizeof(request->header)
                                     : received;
      size_t bytes = (inHeader ? sizeof(request->header) : total) - request->moved;
      if (at == received && bytes > sizeof(received)) bytes = sizeof(received);
      ssize_t moved = connection->sends ? send(connection->socket, at, bytes, MSG_NOSIGNAL)
                                        : recv(connection->socket, at, bytes, 0);
      if (moved == 0) return kSystemError;
      if (moved < 0) return errno == EAGAIN ? kSuccess : kSystemError;
      if (at == received) deliver(request, received, (size_t)moved);
      request->moved += (uint32_t)moved;
      if (!connection->sends && request->moved == sizeof(request->header)) {
        require(request->header <= request->bytes, "message larger than the receive");
        total += request->header;
      }
    }
    request->complete = 1;
    if (request->late != NULL) keepLate(connection, request);
    connection->first++;
  }
  return kSuccess;
}

static int post(Connection* connection, void* data, size_t bytes, Region* region, void** request) {
  require(*request == NULL, "request that is not null");
  require(region->connection == connection, "region of another connection");
  require((char*)data >= region->data && (char*)data + bytes <= region->data + region->bytes,
          "data outside of their region");
  // It has to be called again.
  if (connection->turns++ % 5 == 4) return kSuccess;
  Request* made = &connection->requests[connection->last % kRequests];
  require(!made->inUse, "more requests than a connection has");
  char* mapped = region->mapped + ((char*)data - region->data);
  *made = (Request){connection, mapped, (uint32_t)bytes, 0,   0,    1,
                    0,          NULL,   mapped,          {0}, NULL, (long)bytes};
  if (!connection->sends && region->isGpu && getenv("FAKE_NET_LATE") != NULL) {
    made->data = made->late = malloc(bytes);
  }
  if (connection->sends) made->header = (uint32_t)bytes;
  connection->last++;
  count(1);
  *request = made;
  return kSuccess;
}

static int doSend(void* connection, void* data, Bytes bytes, int tag, void* region,
                  void** request) {
  static long sends = 0;
  const char* limit = getenv("FAKE_NET_SENDS");
  require(((Connection*)connection)->sends && tag == 0, "send at the receiver's end");
  if (does("send fails") &&
      __atomic_fetch_add(&sends, 1, __ATOMIC_SEQ_CST) >= (limit == NULL ? 0 : atol(limit))) {
    return kSystemError;
  }
  return post(connection, data, (size_t)bytes, region, request);
}

static int doReceive(void* connection, int number, void** data, Bytes* bytes, int* tags,
                     void** regions, void** request) {
  require(!((Connection*)connection)->sends, "receive at the sender's end");
  require(number == 1 && tags[0] == 0, "receives in a group");
  if (does("receive fails")) return kSystemError;
  return post(connection, data[0], (size_t)bytes[0], regions[0], request);
}

// Complete at once where nothing is late.
static int iflush(void* connection, int number, void** data, int* bytes, void** regions,
                  void** request) {
  Connection* own = connection;
  Region* region = regions[0];
  require(number == 1 && bytes[0] > 0 && data[0] != NULL, "flush of nothing");
  require(region->connection == own, "region of another connection");
  require(region->isGpu, "flush of memory of the host");
  require(!own->flush.inUse, "two flushes at once");
  __atomic_fetch_add(&fakeNetFlushes, 1, __ATOMIC_SEQ_CST);
  *request = NULL;
  if (getenv("FAKE_NET_LATE") == NULL) return kSuccess;
  own->flush = (Request){.connection = own, .inUse = 1};
  own->flushed = region->mapped + ((char*)data[0] - region->data);
  count(1);
  *request = &own->flush;
  return kSuccess;
}

// Complete at the third look.
static int testFlush(Request* flush, int* done) {
  Connection* own = flush->connection;
  if (flush->moved++ < 2) return kSuccess;
  for (int i = 0; i < kRequests; i++) {
    if (own->late[i].data == NULL || own->late[i].place != own->flushed) continue;
    memcpy(own->flushed, own->late[i].data, own->late[i].bytes);
    free(own->late[i].data);
    own->late[i].data = NULL;
  }
  flush->inUse = 0;
  *done = 1;
  count(-1);
  return kSuccess;
}

static int test(void* request, int* done, int* bytes) {
  Request* own = request;
  require(own->inUse, "test of a request that has ended");
  *done = 0;
  if (does("hangs")) {
    __atomic_fetch_add(&fakeNetHeld, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&fakeNetHolds, __ATOMIC_SEQ_CST)) usleep(1000);
    __atomic_fetch_sub(&fakeNetHeld, 1, __ATOMIC_SEQ_CST);
    return kSuccess;
  }
  if (does("test fails")) return kSystemError;
  if (own == &own->connection->flush) return testFlush(own, done);
  int result = own->complete ? kSuccess : progress(own->connection);
  if (result != kSuccess || !own->complete) return result;
  *done = 1;
#if NET_VERSION >= 10
  own->told = (long)own->header;
  if (own->event != NULL && own->connection->sends) {
    profiler_(&own->event, 3, NULL, 0, &own->told);
  } else if (own->event != NULL) {
    profiler_(&own->event, 2, NULL, 0, &own->told);
    profiler_(&own->event, 1, NULL, 0, NULL);
  }
#endif
  if (bytes != NULL && !does("no sizes")) *bytes = (int)own->header;
  own->inUse = 0;
  count(-1);
  return kSuccess;
}

static int closeConnection(void* connection) {
  Connection* own = connection;
  require(own->regions == 0, "close of a connection that has regions");
  for (int i = 0; i < kRequests; i++) {
    count(own->requests[i].inUse ? -1 : 0);
    free(own->requests[i].late);
    free(own->late[i].data);
  }
  count(own->flush.inUse ? -1 : 0);
  close(own->socket);
  count(-1);
  free(own);
  return kSuccess;
}

static int closeListen(void* listener) {
  close(((Listener*)listener)->socket);
  count(-1);
  free(listener);
  return kSuccess;
}

static int start(Logger logger) {
  logger_ = logger;
  if (does("init fails")) return kSystemError;
  if (does("needs Simple")) setenv("NCCL_PROTO", "Simple", 0);
  __atomic_fetch_add(&fakeNetInits, 1, __ATOMIC_SEQ_CST);
  logger_(kInfo, 16, "fake", 1, "%s %d", "starts, version", NET_VERSION);
  return kSuccess;
}

typedef void* Unused;

#if NET_VERSION >= 11
static int init(void** context, uint64_t communicator, Config* config, Logger logger,
                Profiler profiler) {
  require(communicator != 0 && profiler != NULL, "communicator without an id");
  __atomic_store_n(&profiler_, profiler, __ATOMIC_SEQ_CST);
  *context = malloc(1);
  int result = start(logger);
  __atomic_store_n(&fakeNetTrafficClass, config->trafficClass, __ATOMIC_SEQ_CST);
  if (result != kSuccess) {
    free(*context);
    *context = NULL;
  } else {
    count(1);
  }
  return result;
}
static int finalize(void* context) {
  require(context != NULL, "finalize without a context");
  count(-1);
  free(context);
  return kSuccess;
}
static int listenOf(void* context, int device, void* handle, void** listener) {
  require(context != NULL, "listen without a context");
  return doListen(device, handle, listener);
}
static int connectOf(void* context, int device, void* handle, void** sender, void** onDevice) {
  require(context != NULL, "connect without a context");
  require(onDevice != NULL && *onDevice == NULL, "a handle for the GPU");
  return doConnect(device, handle, sender);
}
#else
#if NET_VERSION == 10
static int init(Logger logger, Profiler profiler) {
  require(profiler != NULL, "no profiler callback");
  profiler_ = profiler;
  return start(logger);
}
static int connectOf(int device, Config* config, void* handle, void** sender, void** onDevice) {
  require(onDevice != NULL && *onDevice == NULL, "a handle for the GPU");
  __atomic_store_n(&fakeNetTrafficClass, config->trafficClass, __ATOMIC_SEQ_CST);
  return doConnect(device, handle, sender);
}
#else
#define init start
#if NET_VERSION >= 7
static int connectOf(int device, void* handle, void** sender, void** onDevice) {
  require(onDevice != NULL && *onDevice == NULL, "a handle for the GPU");
  return doConnect(device, handle, sender);
}
#else
#define connectOf doConnect
#endif
#endif
#define listenOf doListen
#endif

#if NET_VERSION >= 7
static int acceptOf(void* listener, void** receiver, void** onDevice) {
  require(onDevice != NULL && *onDevice == NULL, "a handle for the GPU");
  return doAccept(listener, receiver);
}
#else
#define acceptOf doAccept
#endif

#if NET_VERSION >= 10
static int begin(int result, void* request, void* parent) {
  Request* own = request;
  if (own != NULL) profiler_(&own->event, 0, parent, kEventsOfFake, &own->told);
  return result;
}
static int sendOf(void* connection, void* data, Bytes bytes, int tag, void* region, void* parent,
                  void** request) {
  int result = doSend(connection, data, bytes, tag, region, request);
  return begin(result, *request, parent);
}
static int receiveOf(void* connection, int number, void** data, Bytes* bytes, int* tags,
                     void** regions, void** parents, void** request) {
  require(parents != NULL, "no events");
  int result = doReceive(connection, number, data, bytes, tags, regions, request);
  return begin(result, *request, parents[0]);
}
#else
#define sendOf doSend
#define receiveOf doReceive
#endif

typedef struct {
  const char* name;
  void* functions[16];
#if NET_VERSION >= 7
  Unused getDeviceMr, irecvConsumed;
#endif
#if NET_VERSION >= 9
  Unused makeVDevice;
#endif
#if NET_VERSION >= 11
  void* finalize;
  Unused setNetAttr;
#endif
} Table;

__attribute__((visibility("default"))) Table CONCAT(ncclNetPlugin_v, NET_VERSION) = {
    .name = "Fake" STRING(NET_VERSION),
    .functions = {(void*)init, (void*)devices, (void*)fakeNetProperties, (void*)listenOf,
                  (void*)connectOf, (void*)acceptOf, (void*)regMr, (void*)regMrDmaBuf,
                  (void*)deregMr, (void*)sendOf, (void*)receiveOf, (void*)iflush, (void*)test,
                  (void*)closeConnection, (void*)closeConnection, (void*)closeListen},
#if NET_VERSION >= 11
    .finalize = (void*)finalize,
#endif
};
