// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "base/open_descriptor.h"
#include "base/system.h"

namespace unisono::runtime::host {
size_t roundUpToPages(size_t bytes) {
  size_t page = pageBytes();
  if (bytes > SIZE_MAX - page) throw invalidArgument("{} bytes cannot be allocated", bytes);
  return roundUp(bytes, page);
}

AddressReservation::AddressReservation(size_t bytes) : bytes_(bytes) {
  void* address =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw systemError(errno, "mmap of addresses for simulated memory");
  address_ = static_cast<std::byte*>(address);
}

AddressReservation::~AddressReservation() {
  if (forks_ == forkCount()) ::munmap(address_, bytes_);
}

MemorySegment::MemorySegment(size_t bytes, const char* name, SegmentPlace place)
    : descriptor_(
          openDescriptor([name] { return ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING); },
                         "memfd_create")),
      place_(std::move(place)),
      bytes_(roundUpToPages(bytes)) {
  if (::ftruncate(descriptor_.get(), static_cast<off_t>(bytes_)) != 0) {
    throw systemError(errno, "ftruncate of simulated device memory");
  }
  if (::fcntl(descriptor_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw systemError(errno, "fcntl(F_ADD_SEALS)");
  }
  map(descriptor_.get());
}

MemorySegment::MemorySegment(const UniqueDescriptor& descriptor, size_t bytes, SegmentPlace place)
    : place_(std::move(place)), bytes_(bytes) {
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) throw systemError(errno, "fstat");
  int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) != bytes) {
    throw invalidArgument("The descriptor of a memory handle does not hold {} bytes of memory",
                          bytes)
        .remedy("Exchange handles between processes that use the same library");
  }
  map(descriptor.get());
}

MemorySegment::~MemorySegment() {
  // In a child something else may be at these addresses.
  if (address_ == nullptr || forks_ != forkCount()) return;
  if (place_.reservation == nullptr) {
    ::munmap(address_, bytes_);
  } else {
    // The addresses stay reserved, as others of the process may map there otherwise.
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    static_cast<void>(::mmap(address_, bytes_, PROT_NONE, kFlags, -1, 0));
  }
}

void MemorySegment::map(int descriptor) {
  const bool isPlaced = place_.reservation != nullptr;
  std::byte* where = isPlaced ? place_.reservation->address() + place_.offset : nullptr;
  const int flags = MAP_SHARED | MAP_NORESERVE | (isPlaced ? MAP_FIXED : 0);
  void* address = ::mmap(where, bytes_, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (address == MAP_FAILED) throw systemError(errno, "mmap of simulated device memory");
  address_ = static_cast<std::byte*>(address);
  // The mapping is shared, so a child that wrote to it would write to its parent's memory.
  if (::madvise(address, bytes_, MADV_DONTFORK) != 0) {
    throw systemError(errno, "madvise of simulated device memory");
  }
}

const DescriptorTicket& MemorySegment::ticket() {
  std::lock_guard lock(mutex_);
  if (offer_ == nullptr) offer_ = offerDescriptor(descriptor_.get());
  return offer_->ticket();
}

UniqueDescriptor MemorySegment::duplicateDescriptor() const {
  return openDescriptor([this] { return ::fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0); }, "fcntl");
}

void MemorySegment::clear(size_t offset, size_t bytes) {
  size_t end = offset + bytes;
  size_t firstPage = std::min(roundUpToPages(offset), end);
  size_t lastPage = std::max(end / pageBytes() * pageBytes(), firstPage);
  if (lastPage > firstPage &&
      ::fallocate(descriptor_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(firstPage), static_cast<off_t>(lastPage - firstPage)) != 0) {
    std::memset(address_ + firstPage, 0, lastPage - firstPage);
  }
  std::memset(address_ + offset, 0, firstPage - offset);
  std::memset(address_ + lastPage, 0, end - lastPage);
}

}  // namespace unisono::runtime::host
