// SPDX-License-Identifier: Apache-2.0
#include "collective_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace unisono::system_test {
namespace {

constexpr size_t kGuardBytes = 512;
constexpr std::byte kPoison{0xa7};
constexpr int kFactor = 2;

const char* nameOf(Call call) {
  static constexpr const char* kNames[] = {"allReduce", "reduce",    "reduceScatter",
                                           "broadcast", "allGather", "allToAll",
                                           "gather",    "scatter",   "sendReceive"};
  return kNames[static_cast<int>(call)];
}

const char* nameOf(Operator op) {
  static constexpr const char* kNames[] = {"sum", "prod",         "max",           "min",
                                           "avg", "scaledByHost", "scaledByDevice"};
  return kNames[static_cast<int>(op)];
}

uint64_t hash(uint64_t rank, uint64_t index) {
  uint64_t x = (index * 4096 + rank + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 29);
}

}  // namespace

std::string Case::text() const {
  return std::string(nameOf(call)) + " " + bench::elementInfo(type).name + " " + nameOf(op) +
         (inPlace ? " in place" : "") + ", count " + std::to_string(count) + ", root " +
         std::to_string(root) + ", offset " + std::to_string(offsetElements);
}

CaseValues::CaseValues(const Case& call, int ranks)
    : case_(call), ranks_(ranks), info_(bench::elementInfo(call.type)) {
  if (!reduces(call.call)) return;
  const size_t count =
      call.call == Call::reduceScatter ? call.count * static_cast<size_t>(ranks) : call.count;
  const bool exact = call.op != Operator::avg || info_.kind != bench::NumberKind::floating ||
                     ((ranks & (ranks - 1)) == 0 && ranks <= 64);
  results_.resize(count);
  if (!exact) tolerances_.resize(count);
  for (size_t i = 0; i < count; i++) reduce(i);
}

double CaseValues::input(int rank, size_t index) const {
  const bool isSigned = info_.kind != bench::NumberKind::unsignedInteger;
  if (!reduces(case_.call) || case_.op == Operator::max || case_.op == Operator::min) {
    const uint64_t random = hash(static_cast<uint64_t>(rank), index);
    const double value = static_cast<double>(random % 8);
    return isSigned && random % 16 >= 8 ? -value - 1 : value;
  }
  return term(rank, index);
}

// A term of a sum or product. Of every `groups` ranks in a row, one has a term that matters.
double CaseValues::term(int rank, size_t index) const {
  const bool isSigned = info_.kind != bench::NumberKind::unsignedInteger;
  const size_t groups = (static_cast<size_t>(ranks_) + 7) / 8;
  const bool matters = (static_cast<size_t>(rank) + index) % groups == 0;
  if (!matters) return case_.op == Operator::prod ? 1 : 0;
  const uint64_t random = hash(static_cast<uint64_t>(rank), index);
  if (case_.op == Operator::prod) {
    const double value = random % 2 == 0 ? 1 : 2;
    return isSigned && random % 4 >= 2 ? -value : value;
  }
  return isSigned ? static_cast<double>(random % 3) - 1 : static_cast<double>(random % 2);
}

void CaseValues::reduce(size_t index) {
  double result = input(0, index), magnitude = std::abs(result);
  for (int rank = 1; rank < ranks_; rank++) {
    const double value = input(rank, index);
    magnitude += std::abs(value);
    if (case_.op == Operator::prod) {
      result *= value;
    } else if (case_.op == Operator::max) {
      result = std::max(result, value);
    } else if (case_.op == Operator::min) {
      result = std::min(result, value);
    } else {
      result += value;
    }
  }
  if (case_.op == Operator::scaledByHost || case_.op == Operator::scaledByDevice) {
    result *= kFactor;
  } else if (case_.op == Operator::avg) {
    result /= ranks_;
    if (info_.kind != bench::NumberKind::floating) {
      result = std::trunc(result);
    } else if (!tolerances_.empty()) {
      // One rounding of 1/n, one of each product, and one of each sum and store on the way.
      tolerances_[index] =
          (2 * ranks_ + 2) * info_.unitRoundoff() * magnitude / ranks_ + ranks_ * info_.smallest;
    }
  }
  results_[index] = result;
}

double CaseValues::expected(int rank, size_t index, double* tolerance) const {
  const size_t count = case_.count, from = count == 0 ? 0 : index / count,
               within = count == 0 ? 0 : index % count;
  const size_t mine = static_cast<size_t>(rank) * count;
  switch (case_.call) {
    case Call::broadcast:
      return input(case_.root, index);
    case Call::allGather:
    case Call::gather:
      return input(static_cast<int>(from), within);
    case Call::allToAll:
      return input(static_cast<int>(from), mine + within);
    case Call::scatter:
      return input(case_.root, mine + index);
    case Call::sendReceive:
      return input((rank + ranks_ - 1) % ranks_, index);
    default:
      break;
  }
  if (case_.call == Call::reduceScatter) index += mine;
  if (!tolerances_.empty()) *tolerance = tolerances_[index];
  return results_[index];
}

CaseBuffers::CaseBuffers(const Case& call, std::shared_ptr<const CaseValues> values, int rank,
                         int ranks, int device)
    : case_(call),
      values_(std::move(values)),
      rank_(rank),
      ranks_(ranks),
      device_(device),
      info_(bench::elementInfo(call.type)) {
  const size_t count = case_.count, all = count * static_cast<size_t>(ranks);
  const bool isRoot = rank == case_.root;
  size_t own = static_cast<size_t>(rank) * count;  // of the part that is the same in place
  inputCount_ = outputCount_ = count;
  switch (case_.call) {
    case Call::allReduce:
    case Call::sendReceive:
      own = 0;
      break;
    case Call::reduce:
      own = 0;
      if (!isRoot) outputCount_ = 0;
      break;
    case Call::broadcast:
      own = 0;
      if (!isRoot) inputCount_ = 0;
      break;
    case Call::reduceScatter:
      inputCount_ = all;
      break;
    case Call::allGather:
      outputCount_ = all;
      break;
    case Call::allToAll:
      inputCount_ = outputCount_ = all;
      break;
    case Call::gather:
      outputCount_ = isRoot ? all : 0;
      break;
    case Call::scatter:
      inputCount_ = isRoot ? all : 0;
      break;
  }
  const size_t guard = kGuardBytes / info_.bytes;
  inputStart_ = guard + case_.offsetElements;
  size_t end = 0;
  if (case_.inPlace) {
    outputStart_ = inputStart_;
    if (inputCount_ > outputCount_ && outputCount_ > 0) outputStart_ += own;
    if (outputCount_ > inputCount_ && inputCount_ > 0) inputStart_ += own;
    end = std::max(inputStart_ + inputCount_, outputStart_ + outputCount_) + guard;
  } else {
    outputStart_ = inputStart_ + inputCount_ + guard + case_.offsetElements;
    end = outputStart_ + outputCount_ + guard;
  }
  memory_ = DeviceBuffer(device, end * info_.bytes);
  std::memset(memory_.as(), static_cast<int>(kPoison), memory_.bytes());
  for (size_t i = 0; i < inputCount_; i++) put(at(inputStart_ + i), values_->input(rank, i));
  image_.assign(memory_.as(), memory_.as() + memory_.bytes());
  for (size_t i = 0; i < outputCount_; i++) {
    double tolerance = 0;
    const double value = values_->expected(rank, i, &tolerance);
    if (tolerance == 0) put(image_.data() + (outputStart_ + i) * info_.bytes, value);
  }
}

CaseBuffers::~CaseBuffers() {
  if (operatorOf_ != nullptr) ncclRedOpDestroy(operator_, operatorOf_);
}

std::byte* CaseBuffers::at(size_t element) const {
  return memory_.as() + element * info_.bytes;
}

void CaseBuffers::put(std::byte* where, double value) const {
  // Integers wrap around, as the library's do.
  const uint64_t bits = info_.kind == bench::NumberKind::floating
                            ? bench::encodeElement(info_.type, value)
                            : static_cast<uint64_t>(static_cast<int64_t>(value));
  std::memcpy(where, &bits, info_.bytes);
}

ncclResult_t CaseBuffers::enqueue(ncclComm_t comm, cudaStream_t stream) {
  const auto type = static_cast<ncclDataType_t>(case_.type);
  const size_t count = case_.count;
  void* in = inputCount_ > 0 ? at(inputStart_) : nullptr;
  void* out = outputCount_ > 0 ? at(outputStart_) : nullptr;
  const bool hasScalar = case_.op == Operator::scaledByHost || case_.op == Operator::scaledByDevice;
  if (reduces(case_.call)) {
    operator_ = static_cast<ncclRedOp_t>(case_.op);
    if (hasScalar) {
      uint64_t factor = 0;
      put(reinterpret_cast<std::byte*>(&factor), kFactor);
      void* where = &factor;
      if (case_.op == Operator::scaledByDevice) {
        scalar_ = DeviceBuffer(device_, 8);
        std::memcpy(scalar_.as(), &factor, 8);
        where = scalar_.as();
      }
      const ncclResult_t result = ncclRedOpCreatePreMulSum(
          &operator_, where, type, where == &factor ? ncclScalarHostImmediate : ncclScalarDevice,
          comm);
      if (result != ncclSuccess) return result;
      operatorOf_ = comm;
    }
  }
  switch (case_.call) {
    case Call::allReduce:
      return ncclAllReduce(in, out, count, type, operator_, comm, stream);
    case Call::reduce:
      return ncclReduce(in, out, count, type, operator_, case_.root, comm, stream);
    case Call::reduceScatter:
      return ncclReduceScatter(in, out, count, type, operator_, comm, stream);
    case Call::broadcast:
      if (case_.inPlace) return ncclBcast(out, count, type, case_.root, comm, stream);
      return ncclBroadcast(in, out, count, type, case_.root, comm, stream);
    case Call::allGather:
      return ncclAllGather(in, out, count, type, comm, stream);
    case Call::allToAll:
      return ncclAlltoAll(in, out, count, type, comm, stream);
    case Call::gather:
      return ncclGather(in, out, count, type, case_.root, comm, stream);
    case Call::scatter:
      return ncclScatter(in, out, count, type, case_.root, comm, stream);
    case Call::sendReceive:
      break;
  }
  check(ncclGroupStart());
  ncclSend(in, count, type, (rank_ + 1) % ranks_, comm, stream);
  ncclRecv(out, count, type, (rank_ + ranks_ - 1) % ranks_, comm, stream);
  return ncclGroupEnd();
}

void CaseBuffers::verify() const {
  const std::byte* actual = memory_.as();
  size_t begin = 0;  // of the bytes that must be as in image_
  double tolerance = 0;
  if (outputCount_ > 0) values_->expected(rank_, 0, &tolerance);
  if (tolerance > 0) {
    for (size_t i = 0; i < outputCount_; i++) {
      uint64_t bits = 0;
      std::memcpy(&bits, at(outputStart_ + i), info_.bytes);
      const double value = bench::decodeElement(info_.type, bits);
      double allowed = 0;
      const double wanted = values_->expected(rank_, i, &allowed);
      if (!(std::abs(value - wanted) <= allowed)) {
        throw std::runtime_error(case_.text() + ": rank " + std::to_string(rank_) + " of " +
                                 std::to_string(ranks_) + " has " + std::to_string(value) +
                                 " instead of " + std::to_string(wanted) + " at element " +
                                 std::to_string(i));
      }
    }
    const size_t outputByte = outputStart_ * info_.bytes;
    if (std::memcmp(actual, image_.data(), outputByte) != 0) {
      throw std::runtime_error(case_.text() + ": wrote before its output");
    }
    begin = outputByte + outputCount_ * info_.bytes;
  }
  if (std::memcmp(actual + begin, image_.data() + begin, image_.size() - begin) == 0) return;
  const auto wrong =
      std::mismatch(image_.begin() + static_cast<ptrdiff_t>(begin), image_.end(), actual + begin);
  throw std::runtime_error(describe(static_cast<size_t>(wrong.first - image_.begin())));
}

std::string CaseBuffers::describe(size_t byte) const {
  const size_t element = byte / info_.bytes;
  const bool inOutput = element >= outputStart_ && element < outputStart_ + outputCount_;
  std::string text =
      case_.text() + ": rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ": ";
  if (!inOutput) return text + "wrote outside its output, at byte " + std::to_string(byte);
  uint64_t bits = 0;
  std::memcpy(&bits, at(element), info_.bytes);
  double tolerance = 0;
  return text + "has " + std::to_string(bench::decodeElement(info_.type, bits)) + " instead of " +
         std::to_string(values_->expected(rank_, element - outputStart_, &tolerance)) +
         " at element " + std::to_string(element - outputStart_) + " of its output";
}

void runCase(const Ranks& ranks, const Case& call) {
  std::vector<std::unique_ptr<CaseBuffers>> buffers;
  const auto values = std::make_shared<CaseValues>(call, ranks.size());
  for (int rank = 0; rank < ranks.size(); rank++) {
    buffers.push_back(
        std::make_unique<CaseBuffers>(call, values, rank, ranks.size(), ranks.device(rank)));
  }
  ranks.inGroup([&](int rank) {
    check(buffers[static_cast<size_t>(rank)]->enqueue(ranks.comm(rank), ranks.stream(rank)));
  });
  ranks.synchronize();
  for (const auto& buffer : buffers) buffer->verify();
}

}  // namespace unisono::system_test
