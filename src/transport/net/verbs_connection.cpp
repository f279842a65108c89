// SPDX-License-Identifier: Apache-2.0
#include "transport/net/verbs_connection.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/error.h"

namespace unisono::transport {
namespace {

constexpr uint8_t kReceiverNotReadyTimer = 12;  // 0.64 ms
constexpr uint8_t kRetryWithoutLimit = 7;
constexpr uint8_t kHopLimit = 255;
constexpr uint32_t kPacketNumberMask = 0xffffff;

}  // namespace

VerbsConnection::VerbsConnection(const VerbsPort& port, const VerbsOptions& options,
                                 const Sizes& sizes)
    : port_(port),
      options_(options),
      firstPacket_(std::random_device()() & kPacketNumberMask),
      queue_(nullptr, library().destroy_cq),
      flushPair_(nullptr, library().destroy_qp) {
  if (library().query_gid(port_.device->context(), port_.number, port_.gidIndex, &gid_) != 0) {
    fail("ibv_query_gid", errno);
  }
  const auto entries = sizes.queuePairs * (sizes.sends + sizes.receives) + (sizes.flushes ? 1 : 0);
  queue_.reset(library().create_cq(port_.device->context(), static_cast<int>(entries), &events_,
                                   nullptr, 0));
  if (queue_ == nullptr) fail("ibv_create_cq", errno);
  for (size_t i = 0; i < sizes.queuePairs; i++) {
    pairs_.push_back(makePair(sizes, IBV_ACCESS_REMOTE_WRITE));
  }
  if (!sizes.flushes) return;
  flushPair_ = makePair({1, 1, 0}, IBV_ACCESS_REMOTE_READ);
  connect(*flushPair_, flushPair_->qp_num, endpoint());
}

// In state INIT.
VerbsConnection::Owned<ibv_qp> VerbsConnection::makePair(const Sizes& sizes,
                                                         unsigned int access) const {
  ibv_qp_init_attr wanted{};
  wanted.qp_context = const_cast<FailureNote*>(&events_);
  wanted.send_cq = wanted.recv_cq = queue_.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = sizes.sends;
  wanted.cap.max_recv_wr = sizes.receives;
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  Owned<ibv_qp> pair(library().create_qp(port_.device->domain(), &wanted), library().destroy_qp);
  if (pair == nullptr) fail("ibv_create_qp", errno);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = options_.keyIndex;
  attributes.port_num = port_.number;
  attributes.qp_access_flags = access;
  modify(*pair, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  return pair;
}

void VerbsConnection::fail(const char* function, int error) const {
  throw Error(ErrorCode::systemError,
              fmt::format("A network connection cannot be made: {} failed on port {}: {}", function,
                          port_.name(), std::strerror(error)))
      .remedy(
          "Look at ibv_devinfo, the limit of locked memory (ulimit -l) and the NCCL_IB_* "
          "variables, or use NCCL_NET=Socket");
}

void VerbsConnection::modify(ibv_qp& pair, ibv_qp_attr& attributes, int mask) const {
  const int error = library().modify_qp(&pair, &attributes, mask);
  if (error != 0) fail("ibv_modify_qp", error);
}

ibv_mr& VerbsConnection::registerMemory(void* data, size_t bytes, int access) {
  ibv_mr* const region = library().registerMemory(port_.device->domain(), data, bytes, access);
  if (region == nullptr) fail("ibv_reg_mr", errno);
  return keep({region, library().dereg_mr});
}

ibv_mr& VerbsConnection::keep(VerbsRegion region) {
  return *regions_.emplace_back(std::move(region));
}

VerbsEndpoint VerbsConnection::endpoint() const {
  VerbsEndpoint own;
  own.firstPacket = firstPacket_;
  own.queuePairs = static_cast<uint32_t>(pairs_.size());
  own.lid = port_.attributes.lid;
  own.linkLayer = port_.attributes.link_layer;
  own.mtu = static_cast<uint8_t>(port_.attributes.active_mtu);
  std::copy(std::begin(gid_.raw), std::end(gid_.raw), own.gid.begin());
  const std::string name = port_.name();
  std::copy_n(name.begin(), std::min(name.size(), own.port.size() - 1), own.port.begin());
  for (size_t i = 0; i < pairs_.size(); i++) own.numbers[i] = pairs_[i]->qp_num;
  return own;
}

void VerbsConnection::connect(const VerbsEndpoint& remote) {
  for (size_t i = 0; i < pairs_.size(); i++) connect(*pairs_[i], remote.numbers[i], remote);
}

void VerbsConnection::connect(ibv_qp& pair, uint32_t number, const VerbsEndpoint& remote) const {
  ibv_gid gid{};
  std::copy(remote.gid.begin(), remote.gid.end(), std::begin(gid.raw));
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(port_.attributes.active_mtu, static_cast<ibv_mtu>(remote.mtu));
  attributes.dest_qp_num = number;
  attributes.rq_psn = remote.firstPacket;
  attributes.max_dest_rd_atomic = 1;
  attributes.min_rnr_timer = kReceiverNotReadyTimer;
  ibv_ah_attr& address = attributes.ah_attr;
  address.port_num = port_.number;
  address.sl = remote.serviceLevel;
  if (!port_.isEthernet()) address.dlid = remote.lid;
  if (port_.isEthernet() || gid.global.subnet_prefix != gid_.global.subnet_prefix ||
      (port_.attributes.flags & IBV_QPF_GRH_REQUIRED) != 0) {
    address.is_global = 1;
    address.grh.dgid = gid;
    address.grh.sgid_index = static_cast<uint8_t>(port_.gidIndex);
    address.grh.hop_limit = kHopLimit;
    address.grh.traffic_class = remote.trafficClass;
  }
  modify(pair, attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = options_.timeout;
  attributes.retry_cnt = options_.retries;
  attributes.rnr_retry = kRetryWithoutLimit;
  attributes.sq_psn = firstPacket_;
  attributes.max_rd_atomic = 1;
  modify(pair, attributes,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC);
}

bool VerbsConnection::post(size_t pair, ibv_send_wr& request) {
  return post(*pairs_[pair], request);
}

bool VerbsConnection::flush(ibv_send_wr& request) {
  return post(*flushPair_, request);
}

bool VerbsConnection::post(ibv_qp& pair, ibv_send_wr& request) {
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(&pair, &request, &bad);
  if (error != 0 && failure_.empty()) {
    failure_ = fmt::format("ibv_post_send failed: {}", std::strerror(error));
  }
  return error == 0;
}

bool VerbsConnection::post(size_t pair, ibv_recv_wr& request) {
  ibv_recv_wr* bad = nullptr;
  const int error = ibv_post_recv(pairs_[pair].get(), &request, &bad);
  if (error != 0 && failure_.empty()) {
    failure_ = fmt::format("ibv_post_recv failed: {}", std::strerror(error));
  }
  return error == 0;
}

std::span<const ibv_wc> VerbsConnection::poll() {
  const int count =
      ibv_poll_cq(queue_.get(), static_cast<int>(completions_.size()), completions_.data());
  if (count < 0) {
    failure_ = fmt::format("ibv_poll_cq failed on port {}", port_.name());
    return {};
  }
  const std::span completions(completions_.data(), static_cast<size_t>(count));
  for (const ibv_wc& completion : completions) {
    if (completion.status == IBV_WC_SUCCESS) continue;
    // What was queued on the same pair is flushed after what has failed.
    const bool isFlush = completion.status == IBV_WC_WR_FLUSH_ERR;
    if (!failure_.empty() && (isFlush || !isFlush_)) continue;
    failure_ = describe(completion);
    isFlush_ = isFlush;
  }
  return failure_.empty() ? completions : std::span<const ibv_wc>();
}

std::string VerbsConnection::describe(const ibv_wc& completion) const {
  return fmt::format("{} (status {}, vendor error {:#x}) on queue pair {} of port {}{}",
                     library().wc_status_str(completion.status),
                     static_cast<int>(completion.status), completion.vendor_err, completion.qp_num,
                     port_.name(), port_.device->isDown(port_.number) ? ", which is down" : "");
}

const std::string& VerbsConnection::failure() {
  if (failure_.empty() || isFlush_) {
    std::string event = events_.get();
    if (event.empty()) event = port_.device->failure();
    if (!event.empty()) {
      failure_ = fmt::format("{} on port {}", event, port_.name());
      isFlush_ = false;
    }
  }
  return failure_;
}

}  // namespace unisono::transport
