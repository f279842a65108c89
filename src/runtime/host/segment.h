// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "base/fork.h"
#include "base/unique_descriptor.h"
#include "runtime/descriptor_service.h"

namespace unisono::runtime::host {

// Addresses that are reserved for segments, which are mapped in it one after the other.
class AddressReservation {
 public:
  explicit AddressReservation(size_t bytes);
  AddressReservation(const AddressReservation&) = delete;
  AddressReservation& operator=(const AddressReservation&) = delete;
  ~AddressReservation();

  std::byte* address() const { return address_; }

 private:
  std::byte* address_;
  size_t bytes_;
  const int forks_ = forkCount();
};

// Where a segment is mapped: anywhere, or in a reservation.
struct SegmentPlace {
  std::shared_ptr<AddressReservation> reservation;
  size_t offset = 0;
};

// A mapped memfd: the unit that other processes map. Pages that were never written cost nothing.
// Its size is sealed, so that nobody's mapping of it can be cut short. A child that is forked off
// has no mapping of it.
class MemorySegment {
 public:
  // `name` is that of the file in /proc. Throws Error(systemError).
  explicit MemorySegment(size_t bytes, const char* name = "unisono-device",
                         SegmentPlace place = {});
  // Maps a descriptor of another process's segment; throws Error if it is not one of `bytes`.
  MemorySegment(const UniqueDescriptor& descriptor, size_t bytes, SegmentPlace place = {});
  MemorySegment(const MemorySegment&) = delete;
  MemorySegment& operator=(const MemorySegment&) = delete;
  ~MemorySegment();

  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }

  // For other processes; the offer stands while the segment lives. Only of one made here.
  const DescriptorTicket& ticket();

  // The descriptor of the file. Only of one made here.
  UniqueDescriptor duplicateDescriptor() const;

  // Zeroes a range, giving whole pages back to the system.
  void clear(size_t offset, size_t bytes);

 private:
  void map(int descriptor);

  UniqueDescriptor descriptor_;
  SegmentPlace place_;
  std::byte* address_ = nullptr;
  size_t bytes_;
  const int forks_ = forkCount();
  std::mutex mutex_;
  std::unique_ptr<DescriptorOffer> offer_;
};

// `bytes` rounded up to whole pages.
size_t roundUpToPages(size_t bytes);

}  // namespace unisono::runtime::host
