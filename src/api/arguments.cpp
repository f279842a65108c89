// SPDX-License-Identifier: Apache-2.0
#include "api/arguments.h"

#include <array>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/math.h"
#include "device/reduce/element.h"
#include "plan/message_settings.h"
#include "runtime/fallback.h"

namespace unisono::api {
namespace {

using device::DataType;
using device::Reduction;

template <typename T>
uint64_t bitsOf(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

template <typename T>
T valueAt(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

// 1 / n in the type that `type` accumulates in.
uint64_t reciprocalBits(DataType type, int n) {
  return type == DataType::float64 ? bitsOf(1.0 / n) : bitsOf(1.0f / static_cast<float>(n));
}

std::string remedyForHostMemory(runtime::Backend backend) {
  if (backend == runtime::Backend::cuda) {
    return "Pass memory of the GPU (cudaMalloc) or pinned host memory (cudaHostAlloc)";
  }
  const std::string& reason = runtime::whyNoGpu();
  if (reason.empty()) return "Allocate it with unisonoHostMalloc or ncclMemAlloc";
  return fmt::format(
      "No GPU is used, because {}; for simulated devices allocate it with unisonoHostMalloc or "
      "ncclMemAlloc",
      reason);
}

// Buffers that a thread has passed to small calls and that were found good. To ask the driver about
// an address takes a tenth of the time of such a call. A buffer may have been freed since; a call
// that uses it then fails when it runs, as with NCCL.
class KnownBuffers {
 public:
  bool has(const void* buffer, int device) const {
    const Entry& entry = entries_[placeOf(buffer)];
    return entry.buffer == buffer && entry.device == device;
  }
  void add(const void* buffer, int device) { entries_[placeOf(buffer)] = {buffer, device}; }

 private:
  struct Entry {
    const void* buffer = nullptr;
    int device = -1;
  };
  static constexpr size_t kEntries = 64;

  static size_t placeOf(const void* buffer) {
    return static_cast<size_t>(mix64(reinterpret_cast<uint64_t>(buffer))) % kEntries;
  }

  std::array<Entry, kEntries> entries_{};
};
thread_local KnownBuffers knownBuffers;

// Nobody asks whether peers can reach the buffers of smaller calls, which are copied.
constexpr uint64_t kSmallCallBytes = plan::kOfferedBytes;

}  // namespace

DataType checkType(ncclDataType_t type) {
  if (static_cast<int>(type) < 0 || static_cast<int>(type) >= device::kDataTypes) {
    throw invalidArgument("datatype is {}, which is not a data type", static_cast<int>(type))
        .remedy("Pass one of ncclInt8 (0) to ncclFloat8e5m2 (11)");
  }
  return static_cast<DataType>(type);
}

void checkRank(const comm::Communicator& communicator, int rank, const char* name) {
  if (rank < 0 || rank >= communicator.ranks()) {
    throw invalidArgument("{} must be from 0 to {}, got {}", name, communicator.ranks() - 1, rank)
        .rank(communicator.rank())
        .remedy("Pass a rank of this communicator");
  }
}

runtime::PointerInfo checkBuffer(const comm::Communicator& communicator, const void* buffer,
                                 uint64_t elements, DataType type, const char* name) {
  if (elements == 0) return {};
  if (buffer == nullptr) {
    throw invalidArgument("{} is null, but the count is {}", name, elements)
        .rank(communicator.rank())
        .remedy("Pass device memory, or a count of 0");
  }
  const auto size = device::elementBytes(type);
  if (reinterpret_cast<uint64_t>(buffer) % size != 0) {
    throw invalidArgument("{} ({}) is not aligned to the element size, {} bytes", name, buffer,
                          size)
        .rank(communicator.rank())
        .remedy("Pass an address that is a multiple of the element size");
  }
  const bool isSmall =
      elements < kSmallCallBytes / size / static_cast<uint64_t>(communicator.ranks());
  if (isSmall && knownBuffers.has(buffer, communicator.device())) return {};
  auto& runtime = const_cast<comm::Communicator&>(communicator).runtime();
  const runtime::PointerInfo info = runtime.inspect(buffer);
  if (info.kind == runtime::PointerInfo::Kind::host) {
    throw invalidArgument("{} ({}) is not memory that the device can access", name, buffer)
        .rank(communicator.rank())
        .device(communicator.device())
        .remedy(remedyForHostMemory(runtime.backend()));
  }
  if (info.kind == runtime::PointerInfo::Kind::device && info.device != communicator.device()) {
    throw invalidArgument("{} ({}) is on device {}, but the communicator's rank is on device {}",
                          name, buffer, info.device, communicator.device())
        .rank(communicator.rank())
        .remedy("Pass a buffer on the communicator's device");
  }
  if (isSmall) knownBuffers.add(buffer, communicator.device());
  return info;
}

void checkCount(size_t count, int parts, DataType type) {
  const uint64_t most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) /
                        static_cast<uint64_t>(parts) / device::elementBytes(type);
  if (count > most) {
    throw invalidArgument("The count must be at most {}, got {}", most, count)
        .remedy("Pass the number of elements; this may be a negative number that was converted");
  }
}

device::ReductionSpec checkReduction(const comm::Communicator& communicator, ncclRedOp_t op,
                                     DataType type) {
  switch (static_cast<int>(op)) {
    case ncclSum:
      return {type, Reduction::sum, false, 0};
    case ncclProd:
      return {type, Reduction::prod, false, 0};
    case ncclMax:
      return {type, Reduction::max, false, 0};
    case ncclMin:
      return {type, Reduction::min, false, 0};
    case ncclAvg:
      if (device::isFloatingPoint(type)) {
        return {type, Reduction::preMulSum, false, reciprocalBits(type, communicator.ranks())};
      }
      return {type, Reduction::sumPostDivide, false, static_cast<uint64_t>(communicator.ranks())};
    default:
      break;
  }
  const comm::CustomReduction custom =
      communicator.reduction(static_cast<int>(op) - static_cast<int>(ncclNumOps));
  if (custom.type != type) {
    throw invalidArgument("The reduction operator was created for data type {}, the call has {}",
                          static_cast<int>(custom.type), static_cast<int>(type))
        .rank(communicator.rank())
        .remedy("Create one operator for each data type");
  }
  return {type, Reduction::preMulSum, custom.scalarIsPointer, custom.scalar};
}

uint64_t scalarBits(const void* value, DataType type) {
  using namespace device::host_target;
  switch (type) {
    case DataType::float16:
      return bitsOf(valueAt<Float16>(value).toFloat());
    case DataType::bfloat16:
      return bitsOf(valueAt<BFloat16>(value).toFloat());
    case DataType::float8e4m3:
      return bitsOf(valueAt<Float8E4M3>(value).toFloat());
    case DataType::float8e5m2:
      return bitsOf(valueAt<Float8E5M2>(value).toFloat());
    default: {
      uint64_t bits = 0;
      std::memcpy(&bits, value, device::elementBytes(type));
      return bits;
    }
  }
}

}  // namespace unisono::api
