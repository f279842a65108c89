// SPDX-License-Identifier: Apache-2.0
// A libibverbs without hardware: reliable queue pairs between processes of this machine. It keeps
// to the rules of the specification for states of queue pairs, access rights, bounds of regions,
// receives that are not posted, and the order of completions, and ends the process where an
// object is used against the rules of the library.
//
// A thread of each process is the adapters. It executes the requests of a queue pair one after
// another: sends a request to the queue pair of the other end, through a socket that only
// adapters know, and waits for the answer, without which it sends the request again. No answer is
// what a broken link, a dead process and a queue pair that does not exist have in common.
//
// In the environment:
//   FAKE_VERBS         adapters, "NAME PORT...;NAME PORT...". A port is "ib" or "eth", and may have
//                      "-down", or "=GID,GID..." as table of GIDs, each 32 hexadecimal digits.
//                      Without it there is one adapter "fake0" with one InfiniBand port.
//   FAKE_VERBS_SYSFS   a folder that stands in for /sys/class/infiniband
//   FAKE_VERBS_DELAY   microseconds: requests wait up to as long, each queue pair on its own
//   FAKE_VERBS_DMABUF  0: the driver registers no DMA-BUFs
//   FAKE_VERBS_LATE    what is written to a region that may be read from afar is there only after
//                      such a read, as if the region were in memory of a GPU
//   FAKE_VERBS_FAULT   "KIND N": what happens with the N-th request that a process executes
//     pair             its queue pair breaks, with an asynchronous event
//     port, device     the port goes down, or the adapter breaks, with an event
//     status           it completes with the status IBV_WC_REM_OP_ERR and vendor error 0x5a
//     lose             it is never executed, nor any other one
//     drop             it is lost once, and the answer of the tenth after it
//     flap             the port goes down for 50 ms
//     NAME of a function such as reg_mr: it fails, N times after it has worked
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Contexts, domains, regions, queues and pairs that exist, requests that were executed, and the
// bytes of the largest with immediate data; regions with relaxed ordering, regions of DMA-BUFs,
// reads, and what the queue pair was given that was made ready last.
EXPORTED int fakeVerbsOpen, fakeVerbsRequests, fakeVerbsLargest, fakeVerbsRelaxed, fakeVerbsDmaBufs,
    fakeVerbsReads;
EXPORTED int fakeVerbsTrafficClass, fakeVerbsServiceLevel, fakeVerbsGidIndex, fakeVerbsTimeout,
    fakeVerbsRetries;
int fakeVerbsOpen = 0, fakeVerbsRequests = 0, fakeVerbsLargest = 0, fakeVerbsRelaxed = 0,
    fakeVerbsDmaBufs = 0, fakeVerbsReads = 0;
int fakeVerbsTrafficClass = 0, fakeVerbsServiceLevel = 0, fakeVerbsGidIndex = 0,
    fakeVerbsTimeout = 0, fakeVerbsRetries = 0;

namespace {

using Clock = std::chrono::steady_clock;

void require(bool condition, const char* rule) {
  if (condition) return;
  std::fprintf(stderr, "fake libibverbs: %s\n", rule);
  std::abort();
}

const char* variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

void count(int& counter, int change) {
  __atomic_fetch_add(&counter, change, __ATOMIC_SEQ_CST);
}

void set(int& counter, int value) {
  __atomic_store_n(&counter, value, __ATOMIC_SEQ_CST);
}

struct Fault {
  std::string kind;
  long after = 0;

  static const Fault& get() {
    static const Fault fault = [] {
      const std::string text = variable("FAKE_VERBS_FAULT", "");
      const size_t blank = text.find(' ');
      if (blank == std::string::npos) return Fault{text, 0};
      return Fault{text.substr(0, blank), std::atol(text.c_str() + blank)};
    }();
    return fault;
  }
};

// Whether a function is to fail now.
bool fails(const char* function) {
  static std::atomic<long> calls{0};
  if (Fault::get().kind != function || calls++ < Fault::get().after) return false;
  errno = ENOMEM;
  return true;
}

struct Port {
  bool isEthernet = false, isDown = false;
  std::vector<ibv_gid> gids;
};

struct Device {
  ibv_device base{};
  std::vector<Port> ports;
};

struct Context;
struct Domain {
  ibv_pd base{};
  int users = 0;
};
struct Region {
  ibv_mr base{};
  int access = 0;
  void* mapping = nullptr;  // of a DMA-BUF
  struct Write {
    char* to;
    std::vector<char> data;
  };
  std::vector<Write> late;

  char* at(uint64_t address) const {
    const auto offset = address - reinterpret_cast<uintptr_t>(base.addr);
    return static_cast<char*>(mapping == nullptr ? base.addr : mapping) + offset;
  }
};
struct Queue {
  ibv_cq base{};
  std::deque<ibv_wc> completions;
  int users = 0;
  bool overran = false;
};

// A request of a send queue.
struct Request {
  ibv_send_wr work{};
  ibv_sge part{};
  std::vector<char> data;
};
struct Receive {
  uint64_t id;
};

// On the wire: a header, then the data.
enum class Kind : uint32_t { request, done, notReady, accessError };
struct Header {
  Kind kind;
  uint32_t opcode, immediate, key, packet, to, lid, bytes, wanted;  // wanted: of a read
  uint64_t address, sequence;
  ibv_gid gid;
};

// One end of a connection between adapters.
struct Wire {
  int socket = -1;
  Header header{};  // of the message that is being read
  size_t read = 0;  // of the header and the data
  std::vector<char> in, out;
  size_t written = 0;
};

struct Pair {
  ibv_qp base{};
  ibv_qp_init_attr made{};
  ibv_qp_attr attributes{};
  uint32_t sendsInUse = 0, receivesInUse = 0;
  std::deque<Request> requests;  // the first may be under way
  std::deque<Receive> receives;
  uint64_t sequence = 0, expected = 0;  // of the first request, and of the next from the other end
  bool isUnderWay = false, losesRequest = false, losesAnswer = false;
  int attempts = 0;
  Clock::time_point deadline, notBefore;  // of the answer, and of the next try
  int listener = -1;
  Wire calls;                                 // to the other end: our requests and its answers
  std::vector<std::unique_ptr<Wire>> called;  // from it
  std::map<uint64_t, uint32_t> signaled;      // by number of the last: how many entries it frees
  uint32_t unsignaled = 0;
};

struct Context {
  ibv_context base{};
  Device* device = nullptr;
  int events[2] = {-1, -1};  // a pipe with a byte for each event
  std::deque<ibv_async_event> unread;
  int users = 0;
  bool isBroken = false;
};

// Never destroyed: the thread of the adapters may run until the process ends.
std::mutex& lock = *new std::mutex;
std::set<Pair*>& pairs = *new std::set<Pair*>;
std::map<uint32_t, Region*>& regions = *new std::map<uint32_t, Region*>;
std::set<Context*>& contexts = *new std::set<Context*>;
std::map<const void*, int>& unacknowledged = *new std::map<const void*, int>;  // events by object
std::set<int>& ready = *new std::set<int>;  // sockets, at the last look
uint32_t lastKey = 0x100;
std::atomic<int> wakeUp{-1};
long executed = 0;
bool losesAll = false;
std::pair<Context*, int> flapping;  // a port that is down until flapEnd; none without a context
Clock::time_point flapEnd;
std::mt19937 randomNumbers(std::random_device{}());

template <typename T, typename Base>
T* own(Base* base) {
  return reinterpret_cast<T*>(base);
}

Port& portOf(const Pair& pair) {
  return own<Context>(pair.base.context)
      ->device->ports[static_cast<size_t>(pair.attributes.port_num - 1)];
}

bool isOfPort(const ibv_async_event& event) {
  return event.event_type == IBV_EVENT_PORT_ERR || event.event_type == IBV_EVENT_PORT_ACTIVE;
}

void report(Context& context, const ibv_async_event& event) {
  context.unread.push_back(event);
  require(::write(context.events[1], "", 1) == 1, "too many events");
}

void report(Context& context, ibv_event_type type, void* element) {
  ibv_async_event event{};
  event.event_type = type;
  event.element.qp = static_cast<ibv_qp*>(element);
  report(context, event);
}

void complete(Queue& queue, const ibv_wc& completion) {
  if (static_cast<int>(queue.completions.size()) >= queue.base.cqe) {
    if (!std::exchange(queue.overran, true)) {
      report(*own<Context>(queue.base.context), IBV_EVENT_CQ_ERR, &queue);
    }
    return;
  }
  queue.completions.push_back(completion);
}

ibv_wc completionOf(const Pair& pair, uint64_t id, ibv_wc_status status) {
  ibv_wc completion{};
  completion.wr_id = id;
  completion.status = status;
  completion.qp_num = pair.base.qp_num;
  return completion;
}

void completeSend(Pair& pair, ibv_wc_status status, uint32_t vendor = 0) {
  Request request = std::move(pair.requests.front());
  pair.requests.pop_front();
  pair.isUnderWay = false;
  if (status == IBV_WC_SUCCESS && (request.work.send_flags & IBV_SEND_SIGNALED) == 0) return;
  ibv_wc completion = completionOf(pair, request.work.wr_id, status);
  completion.opcode = IBV_WC_RDMA_WRITE;
  completion.vendor_err = vendor;
  complete(*own<Queue>(pair.base.send_cq), completion);
}

// What is queued is flushed.
void fail(Pair& pair) {
  pair.base.state = IBV_QPS_ERR;
  while (!pair.requests.empty()) completeSend(pair, IBV_WC_WR_FLUSH_ERR);
  for (; !pair.receives.empty(); pair.receives.pop_front()) {
    complete(*own<Queue>(pair.base.recv_cq),
             completionOf(pair, pair.receives.front().id, IBV_WC_WR_FLUSH_ERR));
  }
}

void failSend(Pair& pair, ibv_wc_status status, uint32_t vendor) {
  completeSend(pair, status, vendor);
  fail(pair);
}

void closeWire(Wire& wire) {
  if (wire.socket >= 0) ::close(wire.socket);
  wire.socket = -1;
  wire.read = wire.written = 0;
  wire.out.clear();
}

sockaddr_un addressOf(uint32_t number, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int size = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1,
                                 "unisono-fake-verbs-%u", number);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(size));
  return address;
}

// The socket layer does not order accesses for ThreadSanitizer between ranks of one process.
std::atomic<int> order{0};

void put(Wire& wire, const Header& header, const std::vector<char>& data) {
  const char* bytes = reinterpret_cast<const char*>(&header);
  wire.out.insert(wire.out.end(), bytes, bytes + sizeof(header));
  wire.out.insert(wire.out.end(), data.begin(), data.end());
  order.fetch_add(1, std::memory_order_acq_rel);
}

// Writes what can be written.
void flush(Wire& wire) {
  while (wire.socket >= 0 && wire.written < wire.out.size()) {
    const ssize_t bytes = ::send(wire.socket, wire.out.data() + wire.written,
                                 wire.out.size() - wire.written, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (bytes < 0) {
      if (errno != EAGAIN) closeWire(wire);
      return;
    }
    wire.written += static_cast<size_t>(bytes);
  }
  wire.out.clear();
  wire.written = 0;
}

// Reads a message. Returns whether all of it is here.
bool fill(Wire& wire) {
  while (ready.count(wire.socket) > 0) {
    const bool inHeader = wire.read < sizeof(Header);
    if (!inHeader) wire.in.resize(wire.header.bytes);
    const size_t total = sizeof(Header) + (inHeader ? 0 : wire.in.size());
    if (!inHeader && wire.read == total) break;
    char* const into = inHeader ? reinterpret_cast<char*>(&wire.header) + wire.read
                                : wire.in.data() + wire.read - sizeof(Header);
    const ssize_t bytes = ::recv(wire.socket, into, total - wire.read, MSG_DONTWAIT);
    if (bytes <= 0) ready.erase(wire.socket);
    if (bytes == 0 || (bytes < 0 && errno != EAGAIN)) closeWire(wire);
    if (bytes <= 0) return false;
    wire.read += static_cast<size_t>(bytes);
  }
  if (wire.socket < 0 || wire.read < sizeof(Header)) return false;
  if (wire.read < sizeof(Header) + wire.header.bytes) return false;
  wire.read = 0;
  order.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

Region* findRegion(uint32_t key, const ibv_pd* domain, uint64_t address, size_t bytes, int access) {
  const auto found = regions.find(key);
  if (found == regions.end()) return nullptr;
  Region& region = *found->second;
  const auto begin = reinterpret_cast<uintptr_t>(region.base.addr);
  const bool fits = region.base.pd == domain && address >= begin && bytes <= region.base.length &&
                    address - begin <= region.base.length - bytes;
  return fits && (region.access & access) == access ? &region : nullptr;
}

// As an adapter does: kernels and proxies look at the words at any time.
void writeWords(char* to, const std::vector<char>& data) {
  size_t done = 0;
  if (reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) == 0) {
    for (; done + sizeof(uint64_t) <= data.size(); done += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, data.data() + done, sizeof(word));
      __atomic_store_n(reinterpret_cast<uint64_t*>(to + done), word, __ATOMIC_RELEASE);
    }
  }
  for (; done < data.size(); done++) __atomic_store_n(to + done, data[done], __ATOMIC_RELEASE);
}

// What the other end wants of this one. Returns the answer.
Kind execute(Pair& pair, const Header& header, const std::vector<char>& data,
             std::vector<char>& reply) {
  const bool tells = header.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  const bool reads = header.opcode == IBV_WR_RDMA_READ;
  const int access = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  const size_t bytes = reads ? header.wanted : data.size();
  Region* const region =
      bytes == 0 ? nullptr : findRegion(header.key, pair.base.pd, header.address, bytes, access);
  if ((pair.attributes.qp_access_flags & static_cast<unsigned int>(access)) == 0 ||
      (bytes > 0 && region == nullptr)) {
    report(*own<Context>(pair.base.context), IBV_EVENT_QP_ACCESS_ERR, &pair);
    fail(pair);
    return Kind::accessError;
  }
  char* const to = region == nullptr ? nullptr : region->at(header.address);
  if (reads) {
    count(fakeVerbsReads, 1);
    for (const Region::Write& write : region->late) {
      std::memcpy(write.to, write.data.data(), write.data.size());
    }
    region->late.clear();
    reply.assign(to, to + bytes);
    return Kind::done;
  }
  static const bool isLate = std::getenv("FAKE_VERBS_LATE") != nullptr;
  if (isLate && region != nullptr && (region->access & IBV_ACCESS_REMOTE_READ) != 0) {
    region->late.push_back({to, data});
  } else if (!data.empty()) {
    writeWords(to, data);
  }
  if (!tells) return Kind::done;
  if (pair.receives.empty()) return Kind::notReady;
  ibv_wc completion = completionOf(pair, pair.receives.front().id, IBV_WC_SUCCESS);
  pair.receives.pop_front();
  completion.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  completion.wc_flags = IBV_WC_WITH_IMM;
  completion.imm_data = header.immediate;
  completion.byte_len = header.bytes;
  complete(*own<Queue>(pair.base.recv_cq), completion);
  return Kind::done;
}

bool isConnected(const Pair& pair) {
  return (pair.base.state == IBV_QPS_RTR || pair.base.state == IBV_QPS_RTS) &&
         !portOf(pair).isDown && !own<Context>(pair.base.context)->isBroken && !losesAll;
}

// Whether a message was sent to this queue pair, by the one that it is connected with.
bool isFor(const Pair& pair, const Header& header) {
  const ibv_qp_attr& own = pair.attributes;
  const Port& port = portOf(pair);
  if (header.to != pair.base.qp_num || header.packet != own.rq_psn) return false;
  if (!port.isEthernet) return header.lid == 1;
  return std::any_of(port.gids.begin(), port.gids.end(), [&](const ibv_gid& gid) {
    return std::memcmp(&gid, &header.gid, sizeof(gid)) == 0;
  });
}

void answer(Pair& pair, Wire& wire) {
  flush(wire);
  while (wire.socket >= 0 && wire.out.empty() && fill(wire)) {
    if (!isConnected(pair) || !isFor(pair, wire.header)) continue;
    Header header{};
    header.sequence = wire.header.sequence;
    // What is executed already was sent again because the answer is late or lost.
    std::vector<char> reply;
    header.kind = header.sequence < pair.expected && wire.header.opcode != IBV_WR_RDMA_READ
                      ? Kind::done
                      : execute(pair, wire.header, wire.in, reply);
    if (header.sequence == pair.expected && header.kind == Kind::done) pair.expected++;
    header.bytes = static_cast<uint32_t>(reply.size());
    put(wire, header, reply);
    flush(wire);
  }
}

// What happens with a request instead of its execution.
bool strikes(Pair& pair) {
  const Fault& fault = Fault::get();
  executed++;
  count(fakeVerbsRequests, 1);
  if (fault.kind == "drop" && executed == fault.after + 11) pair.losesAnswer = true;
  if (executed != fault.after + 1) return false;
  Context& context = *own<Context>(pair.base.context);
  if (fault.kind == "pair") {
    report(context, IBV_EVENT_QP_FATAL, &pair);
    fail(pair);
  } else if (fault.kind == "port" || fault.kind == "flap") {
    portOf(pair).isDown = true;
    ibv_async_event event{};
    event.event_type = IBV_EVENT_PORT_ERR;
    event.element.port_num = pair.attributes.port_num;
    report(context, event);
    if (fault.kind == "flap") flapping = {&context, event.element.port_num};
    flapEnd = Clock::now() + std::chrono::milliseconds(50);
    return false;
  } else if (fault.kind == "drop") {
    pair.losesRequest = true;
    return false;
  } else if (fault.kind == "device") {
    context.isBroken = true;
    report(context, IBV_EVENT_DEVICE_FATAL, nullptr);
    for (Pair* other : pairs) {
      if (other->base.context == pair.base.context) fail(*other);
    }
  } else if (fault.kind == "status") {
    failSend(pair, IBV_WC_REM_OP_ERR, 0x5a);
  } else if (fault.kind == "lose") {
    losesAll = true;
    return false;
  } else {
    return false;
  }
  return true;
}

// How long a queue pair waits for an answer before it sends again.
Clock::duration patienceOf(const Pair& pair) {
  const ibv_qp_attr& attributes = pair.attributes;
  // Tests need not wait for what never comes.
  if (portOf(pair).isDown && flapping.first == nullptr) return std::chrono::milliseconds(5);
  if (attributes.timeout == 0) return std::chrono::hours(1000);
  return std::chrono::nanoseconds(4096) * (int64_t{1} << attributes.timeout);
}

// Sends the first request of a queue pair, maybe again.
void transmit(Pair& pair) {
  const Request& request = pair.requests.front();
  const ibv_send_wr& work = request.work;
  pair.isUnderWay = true;
  pair.deadline = Clock::now() + patienceOf(pair);
  if (!isConnected(pair) || std::exchange(pair.losesRequest, false)) return;  // nothing answers
  if (pair.calls.socket < 0) {
    socklen_t length = 0;
    const sockaddr_un address = addressOf(pair.attributes.dest_qp_num, length);
    pair.calls.socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (::connect(pair.calls.socket, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      closeWire(pair.calls);
      return;
    }
  }
  Header header{};
  header.kind = Kind::request;
  header.opcode = work.opcode;
  header.immediate = work.imm_data;
  header.key = work.wr.rdma.rkey;
  header.address = work.wr.rdma.remote_addr;
  header.sequence = pair.sequence;
  header.bytes = static_cast<uint32_t>(request.data.size());
  header.wanted = work.opcode == IBV_WR_RDMA_READ ? request.part.length : 0;
  header.to = pair.attributes.dest_qp_num;
  header.packet = pair.attributes.sq_psn;
  header.lid = pair.attributes.ah_attr.dlid;
  header.gid = pair.attributes.ah_attr.grh.dgid;
  put(pair.calls, header, request.data);
  flush(pair.calls);
}

// Begins the first request of a queue pair.
void start(Pair& pair) {
  Request& request = pair.requests.front();
  if (strikes(pair)) return;
  const ibv_send_wr& work = request.work;
  request.data.clear();
  if (work.num_sge > 0 && request.part.length > 0) {
    const ibv_sge& part = request.part;
    const bool reads = work.opcode == IBV_WR_RDMA_READ;
    const Region* const region = findRegion(part.lkey, pair.base.pd, part.addr, part.length,
                                            reads ? IBV_ACCESS_LOCAL_WRITE : 0);
    if (region == nullptr) {
      failSend(pair, IBV_WC_LOC_PROT_ERR, 0x51);
      return;
    }
    const char* from = region->at(part.addr);
    if (!reads) request.data.assign(from, from + part.length);
  }
  const auto bytes = static_cast<int>(request.data.size());
  if (work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM &&
      bytes > __atomic_load_n(&fakeVerbsLargest, __ATOMIC_SEQ_CST)) {
    set(fakeVerbsLargest, bytes);
  }
  pair.attempts = 0;
  transmit(pair);
}

// Moves the requests of a queue pair. Returns when it must be looked at again.
Clock::time_point advance(Pair& pair) {
  constexpr auto kNever = Clock::time_point::max();
  const Clock::time_point now = Clock::now();
  flush(pair.calls);
  const bool isAnswered = fill(pair.calls);
  if (pair.base.state != IBV_QPS_RTS) return kNever;
  if (pair.isUnderWay) {
    if (isAnswered && isConnected(pair) && pair.calls.header.sequence == pair.sequence &&
        !std::exchange(pair.losesAnswer, false)) {
      if (pair.calls.header.kind == Kind::done) {
        const Request& request = pair.requests.front();
        const Region* const into =
            request.work.opcode != IBV_WR_RDMA_READ
                ? nullptr
                : findRegion(request.part.lkey, pair.base.pd, request.part.addr,
                             request.part.length, IBV_ACCESS_LOCAL_WRITE);
        if (into != nullptr) {
          std::memcpy(into->at(request.part.addr), pair.calls.in.data(), request.part.length);
        }
        pair.sequence++;
        completeSend(pair, IBV_WC_SUCCESS);
      } else if (pair.calls.header.kind == Kind::accessError) {
        failSend(pair, IBV_WC_REM_ACCESS_ERR, 0x88);
      } else {
        pair.isUnderWay = false;
        pair.notBefore = now + std::chrono::microseconds(640);
      }
    } else if (now >= pair.deadline) {
      if (pair.attempts++ == pair.attributes.retry_cnt) {
        failSend(pair, IBV_WC_RETRY_EXC_ERR, 0x81);
        return kNever;
      }
      transmit(pair);
      return pair.deadline;
    } else {
      return pair.deadline;
    }
  }
  if (pair.requests.empty() || pair.isUnderWay) return kNever;
  static const long delay = std::atol(variable("FAKE_VERBS_DELAY", "0"));
  if (delay > 0 && pair.notBefore == Clock::time_point()) {
    pair.notBefore =
        now + std::chrono::microseconds(randomNumbers() % static_cast<uint32_t>(delay));
  }
  if (now < pair.notBefore) return pair.notBefore;
  pair.notBefore = {};
  start(pair);
  return pair.isUnderWay ? pair.deadline : now;
}

void accept(Pair& pair) {
  while (ready.count(pair.listener) > 0) {
    const int socket = ::accept4(pair.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      ready.erase(pair.listener);
      return;
    }
    pair.called.push_back(std::make_unique<Wire>());
    pair.called.back()->socket = socket;
  }
}

// Returns when the port that is down comes back.
Clock::time_point endFlap() {
  if (flapping.first == nullptr) return Clock::time_point::max();
  if (Clock::now() < flapEnd) return flapEnd;
  const auto [context, number] = std::exchange(flapping, {});
  context->device->ports[static_cast<size_t>(number - 1)].isDown = false;
  ibv_async_event event{};
  event.event_type = IBV_EVENT_PORT_ACTIVE;
  event.element.port_num = number;
  report(*context, event);
  return Clock::now();
}

// The adapters of this process. The thread ends with the last context.
void run(int wake) {
  std::vector<pollfd> waits;
  for (;;) {
    Clock::time_point next = Clock::time_point::max();
    waits.assign(1, {wake, POLLIN, 0});
    {
      const std::lock_guard guard(lock);
      if (contexts.empty()) return;
      next = std::min(next, endFlap());
      const auto wait = [&](const Wire& wire) {
        if (wire.socket < 0) return;
        const short events = wire.out.empty() ? POLLIN : POLLIN | POLLOUT;
        waits.push_back({wire.socket, events, 0});
      };
      for (Pair* pair : pairs) {
        accept(*pair);
        for (const auto& wire : pair->called) answer(*pair, *wire);
        std::erase_if(pair->called, [](const auto& wire) { return wire->socket < 0; });
        next = std::min(next, advance(*pair));
        waits.push_back({pair->listener, POLLIN, 0});
        for (const auto& wire : pair->called) wait(*wire);
        wait(pair->calls);
      }
    }
    timespec patience{0, 500'000'000};
    const auto left = next == Clock::time_point::max() ? std::chrono::nanoseconds(500'000'000)
                                                       : next - Clock::now();
    if (left < std::chrono::milliseconds(500)) {
      patience.tv_nsec = std::max<int64_t>(left.count(), 0);
    }
    ::ppoll(waits.data(), waits.size(), &patience, nullptr);
    {
      const std::lock_guard guard(lock);
      ready.clear();
      for (const pollfd& wait : waits) {
        if (wait.revents != 0) ready.insert(wait.fd);
      }
    }
    eventfd_t value = 0;
    if ((waits.front().revents & POLLIN) != 0) static_cast<void>(::eventfd_read(wake, &value));
  }
}

std::thread* adapters = nullptr;
std::mutex& adaptersLock = *new std::mutex;  // of starts and ends of the thread

void wake() {
  static_cast<void>(::eventfd_write(wakeUp, 1));
}

// ---- The functions of the context ----

int pollQueue(ibv_cq* base, int entries, ibv_wc* completions) {
  const std::lock_guard guard(lock);
  Queue& queue = *own<Queue>(base);
  if (queue.overran) return -1;
  int taken = 0;
  for (; taken < entries && !queue.completions.empty(); taken++) {
    completions[taken] = queue.completions.front();
    queue.completions.pop_front();
    const auto found = std::find_if(pairs.begin(), pairs.end(), [&](const Pair* pair) {
      return pair->base.qp_num == completions[taken].qp_num;
    });
    if (found == pairs.end()) continue;
    Pair& pair = **found;
    const bool isReceive = completions[taken].opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    if (completions[taken].status != IBV_WC_SUCCESS) continue;
    if (isReceive) {
      pair.receivesInUse--;
    } else {
      // Entries of requests without a completion are free with the next one that has one.
      pair.sendsInUse -= pair.signaled.begin()->second;
      pair.signaled.erase(pair.signaled.begin());
    }
  }
  return taken;
}

int postSend(ibv_qp* base, ibv_send_wr* work, ibv_send_wr** bad) {
  const std::lock_guard guard(lock);
  Pair& pair = *own<Pair>(base);
  static uint64_t number = 0;
  for (; work != nullptr; work = work->next) {
    *bad = work;
    if (pair.base.state != IBV_QPS_RTS && pair.base.state != IBV_QPS_ERR) return EINVAL;
    if (pair.sendsInUse == pair.made.cap.max_send_wr) return ENOMEM;
    if (work->num_sge > static_cast<int>(pair.made.cap.max_send_sge)) return EINVAL;
    if (work->opcode != IBV_WR_RDMA_WRITE && work->opcode != IBV_WR_RDMA_WRITE_WITH_IMM &&
        work->opcode != IBV_WR_RDMA_READ) {
      return EINVAL;
    }
    Request& request = pair.requests.emplace_back();
    request.work = *work;
    if (work->num_sge > 0) request.part = work->sg_list[0];
    pair.sendsInUse++;
    pair.unsignaled++;
    if ((work->send_flags & IBV_SEND_SIGNALED) != 0) {
      pair.signaled[number++] = std::exchange(pair.unsignaled, 0);
    }
    if (pair.base.state == IBV_QPS_ERR) completeSend(pair, IBV_WC_WR_FLUSH_ERR);
  }
  wake();
  return 0;
}

int postReceive(ibv_qp* base, ibv_recv_wr* work, ibv_recv_wr** bad) {
  const std::lock_guard guard(lock);
  Pair& pair = *own<Pair>(base);
  for (; work != nullptr; work = work->next) {
    *bad = work;
    if (pair.base.state == IBV_QPS_RESET) return EINVAL;
    if (pair.receivesInUse == pair.made.cap.max_recv_wr) return ENOMEM;
    pair.receivesInUse++;
    pair.receives.push_back({work->wr_id});
    if (pair.base.state == IBV_QPS_ERR) fail(pair);
  }
  return 0;
}

// ---- Devices ----

ibv_gid parseGid(const std::string& digits) {
  ibv_gid gid{};
  require(digits.size() == 32, "a GID has 32 digits");
  for (size_t i = 0; i < 16; i++) {
    gid.raw[i] = static_cast<uint8_t>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
  }
  return gid;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<std::unique_ptr<Device>> makeDevices() {
  std::vector<std::unique_ptr<Device>> devices;
  const std::string folder = variable("FAKE_VERBS_SYSFS", "/sys/class/infiniband");
  for (const std::string& text : split(variable("FAKE_VERBS", "fake0 ib"), ';')) {
    const std::vector<std::string> words = split(text, ' ');
    auto device = std::make_unique<Device>();
    device->base.node_type = IBV_NODE_CA;
    device->base.transport_type = IBV_TRANSPORT_IB;
    std::snprintf(device->base.name, sizeof(device->base.name), "%s", words[0].c_str());
    std::snprintf(device->base.ibdev_path, sizeof(device->base.ibdev_path), "%s/%s", folder.c_str(),
                  words[0].c_str());
    for (size_t i = 1; i < words.size(); i++) {
      const size_t equals = std::min(words[i].find('='), words[i].size());
      const std::string kind = words[i].substr(0, equals);
      Port& port = device->ports.emplace_back();
      port.isEthernet = kind.starts_with("eth");
      port.isDown = kind.ends_with("-down");
      for (const std::string& gid : split(words[i].substr(equals).erase(0, 1), ',')) {
        port.gids.push_back(parseGid(gid));
      }
      if (port.gids.empty())
        port.gids.push_back(parseGid("fe80000000000000000000000000000" + std::to_string(i % 10)));
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

std::vector<std::unique_ptr<Device>>& devices() {
  static auto& all = *new std::vector<std::unique_ptr<Device>>(makeDevices());
  return all;
}

// The attributes that a change of state must have, and those it may have, for reliable pairs.
struct Change {
  ibv_qp_state from, to;
  int required, optional;
};
constexpr Change kChanges[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT,
     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
         IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_ACCESS_FLAGS},
};

}  // namespace

EXPORTED int ibv_fork_init(void) {
  return 0;
}

EXPORTED ibv_device** ibv_get_device_list(int* number) {
  auto& all = devices();
  auto** list = new ibv_device*[all.size() + 1]();
  for (size_t i = 0; i < all.size(); i++) list[i] = &all[i]->base;
  *number = static_cast<int>(all.size());
  count(fakeVerbsOpen, 1);
  return list;
}

EXPORTED void ibv_free_device_list(ibv_device** list) {
  count(fakeVerbsOpen, -1);
  delete[] list;
}

EXPORTED ibv_context* ibv_open_device(ibv_device* device) {
  if (fails("open_device")) return nullptr;
  auto* context = new Context;
  require(::pipe2(context->events, O_CLOEXEC) == 0, "no pipe");
  context->device = own<Device>(device);
  context->base.device = device;
  context->base.async_fd = context->events[0];
  context->base.ops.poll_cq = pollQueue;
  context->base.ops.post_send = postSend;
  context->base.ops.post_recv = postReceive;
  const std::lock_guard start(adaptersLock);
  const std::lock_guard guard(lock);
  contexts.insert(context);
  if (adapters == nullptr) {
    wakeUp = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    adapters = new std::thread(run, wakeUp.load());
  }
  count(fakeVerbsOpen, 1);
  return &context->base;
}

EXPORTED int ibv_close_device(ibv_context* base) {
  Context* context = own<Context>(base);
  const std::lock_guard stop(adaptersLock);
  bool isLast = false;
  {
    const std::lock_guard guard(lock);
    require(context->users == 0, "close of a device that is in use");
    contexts.erase(context);
    if (flapping.first == context) flapping = {};
    isLast = contexts.empty();
  }
  if (isLast) {
    wake();
    adapters->join();
    delete std::exchange(adapters, nullptr);
    ::close(wakeUp.exchange(-1));
  }
  for (int& end : context->events) ::close(end);
  delete context;
  count(fakeVerbsOpen, -1);
  return 0;
}

EXPORTED int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  *attributes = {};
  attributes->phys_port_cnt = static_cast<uint8_t>(own<Context>(context)->device->ports.size());
  attributes->sys_image_guid = 0x77;
  attributes->max_qp = 1000;
  return 0;
}

// Fills what structures of the first version have.
EXPORTED int ibv_query_port(ibv_context* base, uint8_t number, _compat_ibv_port_attr* compatible) {
  auto* attributes = reinterpret_cast<ibv_port_attr*>(compatible);
  const auto& ports = own<Context>(base)->device->ports;
  if (number < 1 || number > ports.size()) return EINVAL;
  const Port& port = ports[number - 1u];
  attributes->state = port.isDown ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attributes->max_mtu = attributes->active_mtu = IBV_MTU_4096;
  attributes->gid_tbl_len = static_cast<int>(port.gids.size());
  attributes->max_msg_sz = 1u << 30;
  attributes->pkey_tbl_len = 1;
  attributes->lid = port.isEthernet ? 0 : 1;
  attributes->active_width = 2;    // 4 lanes
  attributes->active_speed = 128;  // of 100 Gb/s
  attributes->link_layer = port.isEthernet ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
  return 0;
}

EXPORTED int ibv_query_gid(ibv_context* base, uint8_t number, int index, ibv_gid* gid) {
  const auto& gids = own<Context>(base)->device->ports[number - 1u].gids;
  if (index < 0 || static_cast<size_t>(index) >= gids.size()) {
    errno = EINVAL;
    return -1;
  }
  *gid = gids[static_cast<size_t>(index)];
  return 0;
}

EXPORTED ibv_pd* ibv_alloc_pd(ibv_context* context) {
  if (fails("alloc_pd")) return nullptr;
  auto* domain = new Domain;
  domain->base.context = context;
  const std::lock_guard guard(lock);
  own<Context>(context)->users++;
  count(fakeVerbsOpen, 1);
  return &domain->base;
}

EXPORTED int ibv_dealloc_pd(ibv_pd* base) {
  const std::lock_guard guard(lock);
  require(own<Domain>(base)->users == 0, "end of a protection domain that is in use");
  own<Context>(base->context)->users--;
  count(fakeVerbsOpen, -1);
  delete own<Domain>(base);
  return 0;
}

static ibv_mr* registerMemory(ibv_pd* domain, void* data, size_t bytes, int access, void* mapping) {
  const bool isWritable = (access & IBV_ACCESS_LOCAL_WRITE) != 0;
  require(bytes > 0 && (isWritable || (access & IBV_ACCESS_REMOTE_WRITE) == 0),
          "region that only others may write");
  auto* region = new Region;
  region->mapping = mapping;
  const std::lock_guard guard(lock);
  region->base.context = domain->context;
  region->base.pd = domain;
  region->base.addr = data;
  region->base.length = bytes;
  region->base.lkey = region->base.rkey = lastKey += 0x101;
  region->access = access;
  regions[lastKey] = region;
  own<Domain>(domain)->users++;
  count(fakeVerbsOpen, 1);
  if ((access & IBV_ACCESS_RELAXED_ORDERING) != 0) count(fakeVerbsRelaxed, 1);
  return &region->base;
}

EXPORTED ibv_mr* ibv_reg_mr(ibv_pd* domain, void* data, size_t bytes, int access) {
  if (fails("reg_mr")) return nullptr;
  return registerMemory(domain, data, bytes, access, nullptr);
}

EXPORTED ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t offset, size_t bytes, uint64_t address,
                                   int descriptor, int access) {
  if (std::string(variable("FAKE_VERBS_DMABUF", "1")) == "0") {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  if (descriptor < 0) {
    errno = EBADF;
    return nullptr;
  }
  if (fails("reg_dmabuf_mr")) return nullptr;
  require(offset % 4096 == 0, "DMA-BUF that does not begin with a page");
  void* const mapping = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                               static_cast<off_t>(offset));
  if (mapping == MAP_FAILED) return nullptr;
  count(fakeVerbsDmaBufs, 1);
  return registerMemory(domain, reinterpret_cast<void*>(address), bytes, access, mapping);
}

EXPORTED ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* data, size_t bytes, uint64_t address,
                                  unsigned int access) {
  require(address == reinterpret_cast<uintptr_t>(data), "region with other addresses");
  return ibv_reg_mr(domain, data, bytes, static_cast<int>(access));
}

EXPORTED int ibv_dereg_mr(ibv_mr* base) {
  const std::lock_guard guard(lock);
  regions.erase(base->lkey);
  if (void* const mapping = own<Region>(base)->mapping) ::munmap(mapping, base->length);
  own<Domain>(base->pd)->users--;
  count(fakeVerbsOpen, -1);
  delete own<Region>(base);
  return 0;
}

EXPORTED ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel*,
                               int) {
  if (fails("create_cq")) return nullptr;
  auto* queue = new Queue;
  queue->base.context = context;
  queue->base.cqe = entries;
  queue->base.cq_context = user;
  const std::lock_guard guard(lock);
  own<Context>(context)->users++;
  count(fakeVerbsOpen, 1);
  return &queue->base;
}

// Events of an object that ends are forgotten, unless they were read: these must be acknowledged.
static void endEvents(std::unique_lock<std::mutex>& guard, Context& context, const void* object) {
  std::erase_if(context.unread, [object](const ibv_async_event& event) {
    return !isOfPort(event) && event.element.qp == object;
  });
  while (unacknowledged[object] > 0) {
    guard.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    guard.lock();
  }
  unacknowledged.erase(object);
}

EXPORTED int ibv_destroy_cq(ibv_cq* base) {
  std::unique_lock guard(lock);
  require(own<Queue>(base)->users == 0, "end of a completion queue that is in use");
  endEvents(guard, *own<Context>(base->context), base);
  own<Context>(base->context)->users--;
  count(fakeVerbsOpen, -1);
  delete own<Queue>(base);
  return 0;
}

EXPORTED ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  if (fails("create_qp")) return nullptr;
  require(attributes->qp_type == IBV_QPT_RC, "queue pair of another type");
  auto* pair = new Pair;
  pair->base.context = domain->context;
  pair->base.pd = domain;
  pair->base.qp_context = attributes->qp_context;
  pair->base.send_cq = attributes->send_cq;
  pair->base.recv_cq = attributes->recv_cq;
  pair->base.qp_type = IBV_QPT_RC;
  pair->base.state = IBV_QPS_RESET;
  pair->made = *attributes;
  pair->listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const std::lock_guard guard(lock);
  socklen_t length = 0;
  sockaddr_un address{};
  do {
    pair->base.qp_num = randomNumbers() & 0xffffff;
    address = addressOf(pair->base.qp_num, length);
  } while (::bind(pair->listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 &&
           errno == EADDRINUSE);
  require(::listen(pair->listener, 16) == 0, "no socket");
  pairs.insert(pair);
  own<Domain>(domain)->users++;
  own<Queue>(attributes->send_cq)->users++;
  own<Queue>(attributes->recv_cq)->users++;
  count(fakeVerbsOpen, 1);
  wake();
  return &pair->base;
}

EXPORTED int ibv_modify_qp(ibv_qp* base, ibv_qp_attr* attributes, int mask) {
  if (fails("modify_qp")) return ENOMEM;
  const std::lock_guard guard(lock);
  Pair& pair = *own<Pair>(base);
  const auto change = std::find_if(std::begin(kChanges), std::end(kChanges), [&](const Change& c) {
    return c.from == base->state && c.to == attributes->qp_state;
  });
  if (change == std::end(kChanges) || (mask & change->required) != change->required ||
      (mask & ~(change->required | change->optional)) != 0) {
    return EINVAL;
  }
  ibv_qp_attr& all = pair.attributes;
  const auto& ports = own<Context>(base->context)->device->ports;
  switch (attributes->qp_state) {
    case IBV_QPS_INIT:
      if (attributes->port_num < 1 || attributes->port_num > ports.size()) return EINVAL;
      if (attributes->pkey_index != 0) return EINVAL;
      all.port_num = attributes->port_num;
      all.qp_access_flags = attributes->qp_access_flags;
      break;
    case IBV_QPS_RTR: {
      const ibv_ah_attr& address = attributes->ah_attr;
      const Port& port = portOf(pair);
      if (address.port_num != all.port_num || attributes->path_mtu > IBV_MTU_4096) return EINVAL;
      if (port.isEthernet && address.is_global == 0) return EINVAL;
      if (!port.isEthernet && address.dlid == 0) return EINVAL;
      if (address.is_global != 0 && address.grh.sgid_index >= port.gids.size()) return EINVAL;
      if (address.sl > 15) return EINVAL;
      all.ah_attr = address;
      all.dest_qp_num = attributes->dest_qp_num;
      all.rq_psn = attributes->rq_psn;
      break;
    }
    default:
      all.sq_psn = attributes->sq_psn;
      all.timeout = attributes->timeout;
      all.retry_cnt = attributes->retry_cnt;
      set(fakeVerbsTrafficClass, all.ah_attr.grh.traffic_class);
      set(fakeVerbsServiceLevel, all.ah_attr.sl);
      set(fakeVerbsGidIndex, all.ah_attr.grh.sgid_index);
      set(fakeVerbsTimeout, all.timeout);
      set(fakeVerbsRetries, all.retry_cnt);
  }
  base->state = attributes->qp_state;
  wake();
  return 0;
}

EXPORTED int ibv_destroy_qp(ibv_qp* base) {
  std::unique_lock guard(lock);
  Pair* pair = own<Pair>(base);
  pairs.erase(pair);
  endEvents(guard, *own<Context>(base->context), base);
  closeWire(pair->calls);
  for (const auto& wire : pair->called) closeWire(*wire);
  ::close(pair->listener);
  own<Domain>(base->pd)->users--;
  own<Queue>(base->send_cq)->users--;
  own<Queue>(base->recv_cq)->users--;
  count(fakeVerbsOpen, -1);
  delete pair;
  return 0;
}

EXPORTED int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  char byte = 0;
  if (::read(context->async_fd, &byte, 1) != 1) return -1;
  const std::lock_guard guard(lock);
  auto& unread = own<Context>(context)->unread;
  if (unread.empty()) return -1;
  *event = unread.front();
  unread.pop_front();
  if (!isOfPort(*event)) unacknowledged[event->element.qp]++;
  return 0;
}

EXPORTED void ibv_ack_async_event(ibv_async_event* event) {
  const std::lock_guard guard(lock);
  if (isOfPort(*event)) return;
  require(unacknowledged[event->element.qp]-- > 0, "event that is acknowledged twice");
}

EXPORTED const char* ibv_event_type_str(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_CQ_ERR:
      return "CQ error";
    case IBV_EVENT_QP_FATAL:
      return "local work queue catastrophic error";
    case IBV_EVENT_QP_ACCESS_ERR:
      return "local access violation work queue error";
    case IBV_EVENT_PORT_ERR:
      return "port error";
    case IBV_EVENT_PORT_ACTIVE:
      return "port active";
    case IBV_EVENT_DEVICE_FATAL:
      return "local catastrophic error";
    default:
      return "another event";
  }
}

EXPORTED const char* ibv_wc_status_str(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
      return "Work Request Flushed Error";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error";
    case IBV_WC_REM_OP_ERR:
      return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR:
      return "transport retry counter exceeded";
    default:
      return "another status";
  }
}
