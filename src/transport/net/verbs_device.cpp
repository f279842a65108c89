// SPDX-License-Identifier: Apache-2.0
#include "transport/net/verbs_device.h"

#include <endian.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "base/log.h"

namespace unisono::transport {
namespace {

// The one line of a file; empty if it cannot be read.
std::string readLine(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

int firstBit(unsigned int bits, size_t count) {
  for (size_t i = 0; i + 1 < count; i++) {
    if ((bits >> i & 1) != 0) return static_cast<int>(i);
  }
  return static_cast<int>(count) - 1;
}

// In megabits per second, from the codes of the InfiniBand specification.
int speedOf(const ibv_port_attr& port) {
  constexpr int kLanes[] = {1, 4, 8, 12, 2};
  constexpr int kLaneSpeeds[] = {2500, 5000, 10000, 10000, 14000, 25000, 50000, 100000, 200000};
  return kLanes[firstBit(port.active_width, std::size(kLanes))] *
         kLaneSpeeds[firstBit(port.active_speed, std::size(kLaneSpeeds))];
}

// The folder of the adapter's PCI device. The functions of an adapter that has one for each port
// share the link of the first.
std::string pciPathOf(const VerbsDevice& device) {
  std::error_code error;
  std::string path = std::filesystem::canonical(device.folder() + "/device", error).string();
  if (error) return "";
  if (path.size() < 2 || path[path.size() - 2] != '.') return path;
  std::string first = path;
  first.back() = '0';
  return std::filesystem::exists(first, error) ? first : path;
}

}  // namespace

void FailureNote::set(const std::string& failure) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = failure;
  isSet_.store(true, std::memory_order_release);
}

std::string FailureNote::get() const {
  if (!isSet_.load(std::memory_order_acquire)) return "";
  const std::lock_guard lock(mutex_);
  return failure_;
}

PortFilter::PortFilter(std::string_view text) {
  const auto take = [&](char mark) {
    if (!text.starts_with(mark)) return false;
    text.remove_prefix(1);
    return true;
  };
  excludes_ = take('^');
  isExact_ = take('=');
  while (!text.empty()) {
    std::string_view entry = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), entry.size() + 1));
    int port = -1;
    if (const size_t colon = entry.find(':'); colon != std::string_view::npos) {
      std::from_chars(entry.data() + colon + 1, entry.data() + entry.size(), port);
      entry = entry.substr(0, colon);
    }
    if (!entry.empty()) entries_.push_back({std::string(entry), port});
  }
}

bool PortFilter::allows(std::string_view adapter, int port) const {
  if (entries_.empty()) return true;
  const bool isListed = std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return (isExact_ ? adapter == entry.adapter : adapter.starts_with(entry.adapter)) &&
           (entry.port == -1 || entry.port == port);
  });
  return isListed != excludes_;
}

std::shared_ptr<VerbsDevice> VerbsDevice::open(const VerbsLibrary& library, ibv_device& device) {
  static std::mutex mutex;
  static auto& devices = *new std::map<std::string, std::weak_ptr<VerbsDevice>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<VerbsDevice>& known = devices[device.name];
  if (auto opened = known.lock()) return opened;
  std::shared_ptr<VerbsDevice> opened(new VerbsDevice(library, device));
  if (!opened->start(device)) return nullptr;
  known = opened;
  return opened;
}

bool VerbsDevice::start(ibv_device& device) {
  context_ = library_.open_device(&device);
  const char* failed = "opened";
  if (context_ != nullptr) {
    failed = library_.query_device(context_, &attributes_) != 0 ? "queried" : nullptr;
  }
  if (failed == nullptr) {
    domain_ = library_.alloc_pd(context_);
    if (domain_ == nullptr) failed = "given a protection domain";
  }
  if (failed != nullptr) {
    warnOnce(fmt::format("The adapter {} cannot be {}: {}", name_, failed, std::strerror(errno)));
    return false;
  }
  // The reactor's thread must not wait for an event that another process or nobody takes.
  const int flags = ::fcntl(context_->async_fd, F_GETFL);
  ::fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK);
  bootstrap::Reactor& reactor = bootstrap::Reactor::ofThisProcess();
  handler_ = reactor.add(*this);
  reactor.watch(handler_, context_->async_fd, bootstrap::Poller::Interest::read);
  return true;
}

VerbsDevice::~VerbsDevice() {
  if (handler_ != 0) {
    bootstrap::Reactor& reactor = bootstrap::Reactor::ofThisProcess();
    reactor.forget(context_->async_fd);
    reactor.remove(handler_);
  }
  if (domain_ != nullptr) static_cast<void>(library_.dealloc_pd(domain_));
  if (context_ != nullptr) static_cast<void>(library_.close_device(context_));
}

// A driver that can says that the descriptor is none, others that they cannot.
bool VerbsDevice::takesDmaBufs() const {
  if (library_.reg_dmabuf_mr == nullptr) return false;
  errno = 0;
  ibv_mr* const region = library_.reg_dmabuf_mr(domain_, 0, 0, 0, -1, 0);
  if (region != nullptr) static_cast<void>(library_.dereg_mr(region));
  return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT;
}

void VerbsDevice::serve(int) {
  ibv_async_event event{};
  if (library_.get_async_event(context_, &event) != 0) return;
  note(event);
  library_.ack_async_event(&event);
}

// Queue pairs and completion queues of an event exist until it is acknowledged.
void VerbsDevice::note(const ibv_async_event& event) {
  const char* text = library_.event_type_str(event.event_type);
  const auto fail = [&](void* user) {
    logWarn("The adapter {} reports: {}", name_, text);
    if (user != nullptr) {
      static_cast<FailureNote*>(user)->set(fmt::format("the adapter reports: {}", text));
    }
  };
  switch (event.event_type) {
    case IBV_EVENT_DEVICE_FATAL:
      fail(&failure_);
      break;
    case IBV_EVENT_CQ_ERR:
      fail(event.element.cq->cq_context);
      break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      fail(event.element.qp->qp_context);
      break;
    case IBV_EVENT_PORT_ERR:
      // Connections outlive a link that comes back within NCCL_IB_TIMEOUT.
      downPorts_ |= uint64_t{1} << (event.element.port_num % 64);
      logWarn("The port {}:{} went down", name_, event.element.port_num);
      break;
    case IBV_EVENT_PORT_ACTIVE:
      downPorts_ &= ~(uint64_t{1} << (event.element.port_num % 64));
      logWarn("The port {}:{} is active again", name_, event.element.port_num);
      break;
    default:
      logInfo("The adapter {} reports: {}", name_, text);
  }
}

std::vector<VerbsPort> findVerbsPorts(const VerbsLibrary& library, const PortFilter& filter,
                                      std::string& problem) {
  std::vector<VerbsPort> ports;
  int count = 0, active = 0;
  ibv_device** const list = library.get_device_list(&count);
  for (int i = 0; list != nullptr && i < count; i++) {
    if (list[i]->transport_type != IBV_TRANSPORT_IB) continue;  // iWARP connects otherwise
    const std::shared_ptr<VerbsDevice> device = VerbsDevice::open(library, *list[i]);
    if (device == nullptr) continue;
    for (int number = 1; number <= device->attributes().phys_port_cnt; number++) {
      VerbsPort port;
      port.device = device;
      port.number = static_cast<uint8_t>(number);
      if (library.queryPort(device->context(), port.number, port.attributes) != 0) continue;
      if (port.attributes.state != IBV_PORT_ACTIVE) continue;
      if (!port.isEthernet() && port.attributes.link_layer != IBV_LINK_LAYER_INFINIBAND) continue;
      active++;
      if (!filter.allows(device->name(), number)) continue;
      plugin::NetPort& facts = port.facts;
      facts.name = device->name();
      facts.pciPath = pciPathOf(*device);
      facts.guid = device->attributes().sys_image_guid;
      facts.megabits = speedOf(port.attributes);
      const auto sharesLink = [&](const VerbsPort& other) {
        return !facts.pciPath.empty() && other.facts.pciPath == facts.pciPath &&
               other.device != device;
      };
      facts.number = number + static_cast<int>(std::ranges::count_if(ports, sharesLink));
      facts.connections = device->attributes().max_qp;
      facts.messageBytes = port.attributes.max_msg_sz;
      facts.takesDmaBufs = device->takesDmaBufs();
      ports.push_back(std::move(port));
    }
  }
  if (list != nullptr) library.free_device_list(list);
  if (ports.empty()) {
    problem = count == 0    ? "there is no adapter"
              : active == 0 ? fmt::format("no port of {} adapter(s) is active", count)
                            : "NCCL_IB_HCA allows no active port";
  }
  return ports;
}

std::vector<Gid> readGids(const VerbsPort& port) {
  std::vector<Gid> gids(static_cast<size_t>(std::max(port.attributes.gid_tbl_len, 0)));
  const std::filesystem::path types = std::filesystem::path(port.device->folder()) / "ports" /
                                      fmt::to_string(port.number) / "gid_attrs" / "types";
  for (size_t i = 0; i < gids.size(); i++) {
    ibv_gid gid{};
    const int index = static_cast<int>(i);
    if (port.device->library().query_gid(port.device->context(), port.number, index, &gid) != 0) {
      continue;
    }
    std::copy(std::begin(gid.raw), std::end(gid.raw), gids[i].bytes.begin());
    const std::string type = readLine(types / fmt::to_string(i));
    gids[i].roceVersion = type.ends_with("RoCE v2") ? 2 : type.ends_with("RoCE v1") ? 1 : 0;
  }
  return gids;
}

}  // namespace unisono::transport
