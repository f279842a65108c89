// SPDX-License-Identifier: Apache-2.0
// The CollNet part of the network plug-in: rank 0 of a connection is the server that reduces, over
// TCP on the loopback interface.
#include <poll.h>
#include <sys/mman.h>

#include "fake_net_part.h"

enum { kAllReduce, kAllGather, kReduceScatter };
enum { kTimeoutMs = 20000, kBfloat16 = 9, kTypes = 10 };

// How many operations were complete in this process.
__attribute__((visibility("default"))) int fakeCollNetOperations = 0;
__attribute__((visibility("default"))) int fakeCollNetFlushes = 0;
// Regions in memory of the GPU, by address and by DMA-BUF.
__attribute__((visibility("default"))) int fakeCollNetGpuRegions = 0, fakeCollNetDmaBufs = 0;

typedef struct {
  uint32_t kind, type, reduction;
  uint64_t bytes;  // of a rank's piece
} Header;

typedef struct Collective Collective;
typedef struct {
  Collective* connection;
  Header header;
  const char* from;
  char *to, *place;  // place: where the result belongs, if it waits for a flush in `to`; or null
  int inUse, complete;
} Operation;

// A rank that the server talks to.
typedef struct {
  int socket;
  Header header;
  char* data;
  size_t received, sent;  // of the operation that is under way
} Client;

struct Collective {
  int rank, ranks, regions, turns;
  Operation operations[kRequests];
  unsigned first, last;  // operations that are not complete: in order
  Client* clients;       // of rank 0, by rank
  int reduced;           // rank 0: the first operation is
  int socket;            // of the others
  unsigned sending;      // others: the operation that is being sent to the server
  size_t sent, received;
  struct {  // results that are not in memory of the GPU yet
    char *data, *place;
    size_t bytes;
  } late[kRequests];
  Operation flush;  // of the result at its `place`
  int looks;        // at the flush
};
typedef struct {
  Collective* connection;
  char *data, *mapped;  // mapped: the same memory at the address of the plug-in's own
  size_t bytes;
  int isGpu;
  void* mapping;
} Region;
typedef struct {
  int socket;
} Listener;

static size_t sizeOf(uint32_t type) {
  static const size_t sizes[kTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}
static size_t sentBytes(const Collective* all, const Header* header) {
  return header->kind == kReduceScatter ? header->bytes * (size_t)all->ranks : header->bytes;
}
static size_t resultBytes(const Collective* all, const Header* header) {
  return header->kind == kAllGather ? header->bytes * (size_t)all->ranks : header->bytes;
}

static float fromBfloat16(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}
static uint16_t toBfloat16(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof(word));
  if (value != value) return 0x7fc0;
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// `Wide`: where sums and products do not overflow, or do so as defined.
#define COMBINE(Type, Wide)                            \
  for (size_t i = 0; i < bytes / sizeof(Type); i++) {  \
    Type a, b, r;                                      \
    memcpy(&a, into + i * sizeof(Type), sizeof(Type)); \
    memcpy(&b, from + i * sizeof(Type), sizeof(Type)); \
    r = reduction == 0   ? (Type)((Wide)a + (Wide)b)   \
        : reduction == 1 ? (Type)((Wide)a * (Wide)b)   \
        : reduction == 2 ? (a < b ? b : a)             \
                         : (b < a ? b : a);            \
    memcpy(into + i * sizeof(Type), &r, sizeof(Type)); \
  }                                                    \
  break

static void combine(const Header* header, char* into, const char* from, size_t bytes) {
  const uint32_t reduction = header->reduction;
  switch (header->type) {
    case 0:
      COMBINE(int8_t, uint32_t);
    case 1:
      COMBINE(uint8_t, uint32_t);
    case 2:
      COMBINE(int32_t, uint32_t);
    case 3:
      COMBINE(uint32_t, uint32_t);
    case 4:
      COMBINE(int64_t, uint64_t);
    case 5:
      COMBINE(uint64_t, uint64_t);
    case 6:
      COMBINE(_Float16, float);
    case 7:
      COMBINE(float, float);
    case 8:
      COMBINE(double, double);
    case kBfloat16:
      for (size_t i = 0; i < bytes / 2; i++) {
        uint16_t a, b;
        memcpy(&a, into + 2 * i, 2);
        memcpy(&b, from + 2 * i, 2);
        const float x = fromBfloat16(a), y = fromBfloat16(b);
        const float r = reduction == 0   ? x + y
                        : reduction == 1 ? x * y
                        : reduction == 2 ? (x < y ? y : x)
                                         : (y < x ? y : x);
        a = toBfloat16(r);
        memcpy(into + 2 * i, &a, 2);
      }
      break;
    default:
      require(0, "reduction of a type that is not supported");
  }
}

static int devices(int* number) {
  *number = does("collnet has no devices") ? 0 : fakeNetDevices();
  return kSuccess;
}

static int doListen(int device, void* handle, void** listener) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  socklen_t length = sizeof(address);
  require(device >= 0 && device < fakeNetDevices(), "device out of range");
  if (does("collnet listen fails")) return kSystemError;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, (struct sockaddr*)&address, length) != 0 || listen(fd, 64) != 0 ||
      getsockname(fd, (struct sockaddr*)&address, &length) != 0) {
    return kSystemError;
  }
  memcpy(handle, &address, sizeof(address));
  Listener* made = calloc(1, sizeof(*made));
  made->socket = fd;
  count(1);
  *listener = made;
  return kSuccess;
}

static int closeListen(void* listener) {
  close(((Listener*)listener)->socket);
  count(-1);
  free(listener);
  return kSuccess;
}

static int waitFor(int fd) {
  struct pollfd ready = {.fd = fd, .events = POLLIN};
  return poll(&ready, 1, kTimeoutMs) == 1;
}
static void makeReady(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  fcntl(fd, F_SETFL, O_NONBLOCK);
}

static int acceptClients(Collective* made, int listener) {
  made->clients = calloc((size_t)made->ranks, sizeof(Client));
  for (int i = 1; i < made->ranks; i++) {
    int32_t rank = 0;
    int fd = waitFor(listener) ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
    if (fd < 0) return kSystemError;
    if (!waitFor(fd) || recv(fd, &rank, sizeof(rank), MSG_WAITALL) != sizeof(rank)) {
      close(fd);
      return kSystemError;
    }
    require(rank > 0 && rank < made->ranks && made->clients[rank].socket == 0,
            "rank that is there");
    makeReady(fd);
    made->clients[rank].socket = fd;
  }
  for (int i = 1; i < made->ranks; i++) {
    if (send(made->clients[i].socket, "", 1, MSG_NOSIGNAL) != 1) return kSystemError;
  }
  return kSuccess;
}

static int callServer(Collective* made, const void* handle) {
  struct sockaddr_in address;
  char byte;
  int32_t rank = made->rank;
  memcpy(&address, handle, sizeof(address));
  made->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (made->socket < 0 || connect(made->socket, (struct sockaddr*)&address, sizeof(address)) != 0 ||
      does("collnet connect fails") ||
      send(made->socket, &rank, sizeof(rank), MSG_NOSIGNAL) != sizeof(rank) ||
      !waitFor(made->socket) || recv(made->socket, &byte, 1, 0) != 1) {
    return kSystemError;
  }
  makeReady(made->socket);
  return kSuccess;
}

static int closeColl(void* connection) {
  Collective* own = connection;
  require(own->regions == 0, "close of a connection that has regions");
  for (int i = 0; i < kRequests; i++) {
    count(own->operations[i].inUse ? -1 : 0);
    if (own->operations[i].place != NULL) free(own->operations[i].to);
    free(own->late[i].data);
  }
  count(own->flush.inUse ? -1 : 0);
  for (int i = 1; own->clients != NULL && i < own->ranks; i++) {
    if (own->clients[i].socket > 0) close(own->clients[i].socket);
    free(own->clients[i].data);
  }
  free(own->clients);
  if (own->socket > 0) close(own->socket);
  count(-1);
  free(own);
  return kSuccess;
}

// Waits for the other ranks. A failure closes the listener, so that these need not wait.
static int doConnect(void* handles[], int ranks, int rank, void* listener, void** connection) {
  require(ranks > 1 && rank >= 0 && rank < ranks && listener != NULL, "connection of one rank");
  Collective* made = calloc(1, sizeof(*made));
  made->rank = rank;
  made->ranks = ranks;
  count(1);
  int result = rank != 0                       ? callServer(made, handles[0])
               : does("collnet connect fails") ? kSystemError
                                               : acceptClients(made, ((Listener*)listener)->socket);
  if (result != kSuccess) {
    closeColl(made);
    closeListen(listener);
    return result;
  }
  *connection = made;
  return kSuccess;
}

static int reduceSupport(int type, int reduction, int* supported) {
  require(type >= 0 && reduction >= 0 && reduction < 4, "operator that is not of NCCL");
  *supported = does("collnet sums int32") ? type == 2 && reduction == 0 : type < kTypes;
  return kSuccess;
}

static int takes(int pointers) {
  Properties properties;
  fakeNetProperties(0, &properties);
  return (properties.ptrSupport & pointers) == pointers;
}

static Region* newRegion(Collective* connection, char* data, size_t bytes, int isGpu) {
  Region* made = calloc(1, sizeof(*made));
  made->connection = connection;
  made->data = made->mapped = data;
  made->bytes = bytes;
  made->isGpu = isGpu;
  __atomic_fetch_add(&connection->regions, 1, __ATOMIC_SEQ_CST);
  count(1);
  return made;
}

static int regMr(void* connection, void* data, RegionBytes bytes, int type, void** region) {
  require(type == kHost || (type == kGpu && takes(kGpu)), "memory that it does not take");
  require(bytes > 0, "region without bytes");
  if (does("collnet regMr fails") || (does("collnet regMr of a GPU fails") && type == kGpu)) {
    return kSystemError;
  }
  if (type == kGpu) __atomic_fetch_add(&fakeCollNetGpuRegions, 1, __ATOMIC_SEQ_CST);
  *region = newRegion(connection, data, (size_t)bytes, type == kGpu);
  return kSuccess;
}

// Maps the memory by its descriptor, as adapters do.
static int regMrDmaBuf(void* connection, void* data, size_t bytes, int type, uint64_t offset,
                       int descriptor, void** region) {
  require(type == kGpu && takes(kDmaBuf), "DMA-BUF that it does not take");
  require(bytes > 0 && offset % 4096 == 0, "DMA-BUF that does not begin with a page");
  if (does("collnet regMrDmaBuf fails") || does("collnet regMr of a GPU fails"))
    return kSystemError;
  void* mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, (off_t)offset);
  if (mapping == MAP_FAILED) return kSystemError;
  Region* made = newRegion(connection, data, bytes, 1);
  made->mapped = made->mapping = mapping;
  __atomic_fetch_add(&fakeCollNetDmaBufs, 1, __ATOMIC_SEQ_CST);
  *region = made;
  return kSuccess;
}

static int deregMr(void* connection, void* region) {
  Region* own = region;
  require(own->connection == connection, "region of another connection");
  __atomic_fetch_sub(&own->connection->regions, 1, __ATOMIC_SEQ_CST);
  count(-1);
  if (own->mapping != NULL) munmap(own->mapping, own->bytes);
  free(own);
  return kSuccess;
}

// Moves bytes from `done` on until `total` are done. Returns an ncclResult_t.
static int receiveUpTo(int fd, char* data, size_t total, size_t* done) {
  while (*done < total) {
    ssize_t moved = recv(fd, data + *done, total - *done, 0);
    if (moved == 0) return kSystemError;
    if (moved < 0) return errno == EAGAIN ? kSuccess : kSystemError;
    *done += (size_t)moved;
  }
  return kSuccess;
}
static int sendUpTo(int fd, const char* data, size_t total, size_t* done) {
  while (*done < total) {
    ssize_t moved = send(fd, data + *done, total - *done, MSG_NOSIGNAL);
    if (moved < 0) return errno == EAGAIN ? kSuccess : kSystemError;
    *done += (size_t)moved;
  }
  return kSuccess;
}

// Reduces, or appends, what the clients have sent.
static void reduce(Collective* all, Operation* own) {
  const Header* header = &own->header;
  const size_t bytes = header->bytes;
  if (header->kind == kAllGather) {
    memmove(own->to, own->from, bytes);
    for (int i = 1; i < all->ranks; i++)
      memcpy(own->to + (size_t)i * bytes, all->clients[i].data, bytes);
    return;
  }
  const size_t total = sentBytes(all, header);
  char* sum = malloc(total);
  memcpy(sum, own->from, total);
  for (int i = 1; i < all->ranks; i++) combine(header, sum, all->clients[i].data, total);
  memcpy(own->to, sum, bytes);
  for (int i = 1; i < all->ranks; i++) {
    memcpy(all->clients[i].data, sum + (header->kind == kReduceScatter ? (size_t)i * bytes : 0),
           bytes);
  }
  free(sum);
}

// Keeps the result of an operation until a flush. What was there before gives way to it.
static void keepLate(Collective* all, Operation* operation) {
  int i = 0;
  while (i < kRequests && all->late[i].data != NULL && all->late[i].place != operation->place) i++;
  require(i < kRequests, "more slots than a connection has");
  free(all->late[i].data);
  all->late[i].data = operation->to;
  all->late[i].place = operation->place;
  all->late[i].bytes = resultBytes(all, &operation->header);
  operation->place = NULL;
}

static void end(Collective* all, Operation* operation) {
  operation->complete = 1;
  if (operation->place != NULL) keepLate(all, operation);
  all->first++;
  __atomic_fetch_add(&fakeCollNetOperations, 1, __ATOMIC_SEQ_CST);
}

// Of rank 0. Returns an ncclResult_t.
static int serve(Collective* all) {
  while (all->first != all->last) {
    Operation* own = &all->operations[all->first % kRequests];
    const Header* header = &own->header;
    int missing = 0;
    for (int i = 1; i < all->ranks && !all->reduced; i++) {
      Client* client = &all->clients[i];
      if (client->received < sizeof(Header)) {
        int result =
            receiveUpTo(client->socket, (char*)&client->header, sizeof(Header), &client->received);
        if (result != kSuccess) return result;
        if (client->received < sizeof(Header)) {
          missing = 1;
          continue;
        }
        require(memcmp(&client->header, header, sizeof(Header)) == 0, "ranks that differ");
        free(client->data);
        client->data = malloc(sentBytes(all, header));
      }
      size_t data = client->received - sizeof(Header);
      int result = receiveUpTo(client->socket, client->data, sentBytes(all, header), &data);
      if (result != kSuccess) return result;
      client->received = data + sizeof(Header);
      missing |= data < sentBytes(all, header);
    }
    if (missing) return kSuccess;
    if (!all->reduced) reduce(all, own);
    all->reduced = 1;
    for (int i = 1; i < all->ranks; i++) {
      Client* client = &all->clients[i];
      const char* result = header->kind == kAllGather ? own->to : client->data;
      if (sendUpTo(client->socket, result, resultBytes(all, header), &client->sent) != kSuccess) {
        return kSystemError;
      }
      missing |= client->sent < resultBytes(all, header);
    }
    if (missing) return kSuccess;
    for (int i = 1; i < all->ranks; i++) all->clients[i].received = all->clients[i].sent = 0;
    all->reduced = 0;
    end(all, own);
  }
  return kSuccess;
}

// Of the other ranks.
static int exchange(Collective* all) {
  while (all->sending != all->last) {
    Operation* own = &all->operations[all->sending % kRequests];
    const size_t total = sizeof(Header) + sentBytes(all, &own->header);
    if (all->sent < sizeof(Header) &&
        sendUpTo(all->socket, (const char*)&own->header, sizeof(Header), &all->sent) != kSuccess) {
      return kSystemError;
    }
    if (all->sent < sizeof(Header)) break;
    size_t data = all->sent - sizeof(Header);
    if (sendUpTo(all->socket, own->from, total - sizeof(Header), &data) != kSuccess) {
      return kSystemError;
    }
    all->sent = data + sizeof(Header);
    if (all->sent < total) break;
    all->sent = 0;
    all->sending++;
  }
  while (all->first != all->sending) {
    Operation* own = &all->operations[all->first % kRequests];
    const size_t total = resultBytes(all, &own->header);
    int result = receiveUpTo(all->socket, own->to, total, &all->received);
    if (result != kSuccess || all->received < total) return result;
    all->received = 0;
    end(all, own);
  }
  return kSuccess;
}

static void requireInside(const Collective* all, const Region* region, const char* data,
                          size_t bytes) {
  require(region->connection == all, "region of another connection");
  require(data >= region->data && data + bytes <= region->data + region->bytes,
          "data outside of their region");
}

static int begin(Collective* all, Header header, const char* from, Region* fromRegion, char* to,
                 Region* toRegion, void** request) {
  static long operations = 0;
  const char* limit = getenv("FAKE_NET_SENDS");
  require(*request == NULL && header.bytes > 0, "operation on nothing");
  require(header.type < kTypes && header.bytes % sizeOf(header.type) == 0, "part of an element");
  requireInside(all, fromRegion, from, sentBytes(all, &header));
  requireInside(all, toRegion, to, resultBytes(all, &header));
  if (does("collnet operation fails") &&
      __atomic_fetch_add(&operations, 1, __ATOMIC_SEQ_CST) >= (limit == NULL ? 0 : atol(limit))) {
    return kSystemError;
  }
  // It has to be called again.
  if (all->turns++ % 5 == 4) return kSuccess;
  Operation* made = &all->operations[all->last % kRequests];
  require(!made->inUse, "more requests than a connection has");
  *made = (Operation){all,
                      header,
                      fromRegion->mapped + (from - fromRegion->data),
                      toRegion->mapped + (to - toRegion->data),
                      NULL,
                      1,
                      0};
  if (toRegion->isGpu && getenv("FAKE_NET_LATE") != NULL) {
    made->place = made->to;
    made->to = malloc(resultBytes(all, &header));
  }
  all->last++;
  count(1);
  *request = made;
  return kSuccess;
}

static int iallreduce(void* connection, void* from, void* to, Bytes elements, int type,
                      int reduction, void* fromRegion, void* toRegion, void** request) {
  Header header;
  memset(&header, 0, sizeof(header));
  header.kind = kAllReduce;
  header.type = (uint32_t)type;
  header.reduction = (uint32_t)reduction;
  require(type >= 0 && type < kTypes, "type that is not supported");
  header.bytes = (uint64_t)elements * sizeOf(header.type);
  return begin(connection, header, from, fromRegion, to, toRegion, request);
}

#if NET_VERSION >= 8
typedef struct {
  void *region, *address;
#if NET_VERSION == 8
  uint32_t size;
#else
  size_t size;
#endif
} Segment;

static int iallgather(void* connection, void* from, int parts, Segment* to, size_t bytes,
                      size_t windowOffset, size_t windowBytes, void* region, void** request) {
  const size_t all = bytes * (size_t)((Collective*)connection)->ranks;
  Header header;
  memset(&header, 0, sizeof(header));
  header.kind = kAllGather;
  header.bytes = bytes;
  require(parts == 1 && windowOffset == 0 && windowBytes == all && to->size == all, "window");
  return begin(connection, header, from, region, to->address, to->region, request);
}

static int ireducescatter(void* connection, int parts, Segment* from, void* to, size_t bytes,
                          size_t windowOffset, size_t windowBytes, int type, int reduction,
                          void* region, void** request) {
  const size_t all = bytes * (size_t)((Collective*)connection)->ranks;
  Header header;
  memset(&header, 0, sizeof(header));
  header.kind = kReduceScatter;
  header.type = (uint32_t)type;
  header.reduction = (uint32_t)reduction;
  header.bytes = bytes;
  require(parts == 1 && windowOffset == 0 && windowBytes == all && from->size == all, "window");
  return begin(connection, header, from->address, from->region, to, region, request);
}
#endif

// Complete at once where nothing is late.
static int iflush(void* connection, void* data, int bytes, void* region, void** request) {
  Collective* own = connection;
  Region* flushed = region;
  require(bytes > 0 && data != NULL, "flush of nothing");
  requireInside(own, flushed, data, (size_t)bytes);
  require(flushed->isGpu, "flush of memory of the host");
  require(!own->flush.inUse, "two flushes at once");
  __atomic_fetch_add(&fakeCollNetFlushes, 1, __ATOMIC_SEQ_CST);
  *request = NULL;
  if (getenv("FAKE_NET_LATE") == NULL) return kSuccess;
  own->flush.connection = own;
  own->flush.place = flushed->mapped + ((char*)data - flushed->data);
  own->flush.inUse = 1;
  own->looks = 0;
  count(1);
  *request = &own->flush;
  return kSuccess;
}

// Complete at the third look.
static int testFlush(Collective* own, int* done) {
  if (own->looks++ < 2) return kSuccess;
  for (int i = 0; i < kRequests; i++) {
    if (own->late[i].data == NULL || own->late[i].place != own->flush.place) continue;
    memcpy(own->flush.place, own->late[i].data, own->late[i].bytes);
    free(own->late[i].data);
    own->late[i].data = NULL;
  }
  own->flush.inUse = 0;
  *done = 1;
  count(-1);
  return kSuccess;
}

static int test(void* request, int* done, int* bytes) {
  Operation* own = request;
  require(own->inUse, "test of a request that has ended");
  *done = 0;
  if (does("collnet hangs")) return kSuccess;
  if (does("collnet test fails")) return kSystemError;
  Collective* all = own->connection;
  if (own == &all->flush) return testFlush(all, done);
  int result = own->complete ? kSuccess : all->rank == 0 ? serve(all) : exchange(all);
  if (result != kSuccess || !own->complete) return result;
  *done = 1;
  if (bytes != NULL) *bytes = (int)resultBytes(all, &own->header);
  own->inUse = 0;
  count(-1);
  return kSuccess;
}

static int start(Logger logger) {
  if (does("collnet init fails")) return kSystemError;
  logger(kInfo, 16, "fake", 1, "%s %d", "CollNet starts, version", NET_VERSION);
  return kSuccess;
}

#if NET_VERSION >= 11
static int init(void** context, uint64_t communicator, Logger logger) {
  require(communicator != 0, "communicator without an id");
  int result = start(logger);
  if (result != kSuccess) return result;
  *context = malloc(1);
  count(1);
  return kSuccess;
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
#else
#define init start
#define listenOf doListen
#endif

typedef struct {
  const char* name;
  void* functions[NET_VERSION >= 8 ? 16 : 14];
#if NET_VERSION >= 9
  void* makeVDevice;
#endif
#if NET_VERSION >= 11
  void* finalize;
#endif
} Table;

__attribute__((visibility("default"))) Table CONCAT(ncclCollNetPlugin_v, NET_VERSION) = {
    .name = "Sum" STRING(NET_VERSION),
    .functions = {(void*)init, (void*)devices, (void*)fakeNetProperties, (void*)listenOf,
                  (void*)doConnect, (void*)reduceSupport, (void*)regMr, (void*)regMrDmaBuf,
                  (void*)deregMr, (void*)iallreduce,
#if NET_VERSION >= 8
                  (void*)iallgather, (void*)ireducescatter,
#endif
                  (void*)iflush, (void*)test, (void*)closeColl, (void*)closeListen},
#if NET_VERSION >= 11
    .finalize = (void*)finalize,
#endif
};
