// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/simt.h"
#if !defined(__CUDACC__)
#include <utility>
#include <vector>

#include "runtime/host/multicast.h"
#endif

// The buffers of the ranks of a node, accessed together: one by one, or at a multicast address.
namespace unisono::device::UNISONO_TARGET {

// By the address of each member, in any order with the accesses of others.
class MembersView {
 public:
  UNISONO_DEVICE MembersView(std::byte* const* members, int count)
      : members_(members), count_(count) {}
  UNISONO_DEVICE int members() const { return count_; }
  UNISONO_DEVICE std::byte* member(int index) const { return members_[index]; }

  // The smallest of the words of all members.
  UNISONO_DEVICE uint64_t loadMin(uint64_t offset) const { return loadMin<false>(offset); }
  UNISONO_DEVICE uint64_t loadMinAcquire(uint64_t offset) const { return loadMin<true>(offset); }
  // To all members.
  UNISONO_DEVICE void storeRelease(uint64_t offset, uint64_t value) const {
    for (int m = 0; m < count_; m++) UNISONO_TARGET::storeRelease(wordAt(m, offset), value);
  }
  UNISONO_DEVICE void storeVector(uint64_t offset, const Vector16& value) const {
    for (int m = 0; m < count_; m++) UNISONO_TARGET::storeVector(members_[m] + offset, value);
  }
  UNISONO_DEVICE void noteReads(uint64_t offset, uint64_t bytes) const {
    for (int m = 0; m < count_; m++) noteRead(members_[m] + offset, bytes);
  }
  UNISONO_DEVICE void noteWrites(uint64_t offset, uint64_t bytes) const {
    for (int m = 0; m < count_; m++) noteWrite(members_[m] + offset, bytes);
  }

 private:
  UNISONO_DEVICE uint64_t* wordAt(int member, uint64_t offset) const {
    return reinterpret_cast<uint64_t*>(members_[member] + offset);
  }
  template <bool kAcquire>
  UNISONO_DEVICE uint64_t loadMin(uint64_t offset) const {
    uint64_t smallest = ~uint64_t{0};
    for (int m = 0; m < count_; m++) {
      const uint64_t* word = wordAt(m, offset);
      const uint64_t value = kAcquire ? loadAcquire(word) : loadRelaxed(word);
      if (value < smallest) smallest = value;
    }
    return smallest;
  }

  std::byte* const* members_;
  int count_;
};

#if defined(__CUDACC__)
class MulticastView {
 public:
  UNISONO_DEVICE explicit MulticastView(std::byte* address) : address_(address) {}
  UNISONO_DEVICE std::byte* address() const { return address_; }

  // The smallest of the words of all members.
  UNISONO_DEVICE uint64_t loadMin(uint64_t offset) const {
    uint64_t value = 0;
    UNISONO_MULTIMEM("multimem.ld_reduce.relaxed.sys.global.min.u64 %0, [%1];"
                     : "=l"(value)
                     : "l"(address_ + offset)
                     : "memory");
    return value;
  }
  UNISONO_DEVICE uint64_t loadMinAcquire(uint64_t offset) const {
    uint64_t value = 0;
    UNISONO_MULTIMEM("multimem.ld_reduce.acquire.sys.global.min.u64 %0, [%1];"
                     : "=l"(value)
                     : "l"(address_ + offset)
                     : "memory");
    return value;
  }
  // To all members.
  UNISONO_DEVICE void storeRelease(uint64_t offset, uint64_t value) const {
    UNISONO_MULTIMEM("multimem.st.release.sys.global.u64 [%0], %1;" ::"l"(address_ + offset),
                     "l"(value)
                     : "memory");
  }
  UNISONO_DEVICE void storeVector(uint64_t offset, const Vector16& value) const {
    UNISONO_MULTIMEM(
        "multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address_ + offset),
        "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
        : "memory");
  }
  UNISONO_DEVICE void noteReads(uint64_t, uint64_t) const {}
  UNISONO_DEVICE void noteWrites(uint64_t, uint64_t) const {}

 private:
  std::byte* address_;
};
#else
// The host runtime has no multicast addresses: accesses are made member by member.
class MulticastView : public MembersView {
 public:
  explicit MulticastView(const std::byte* address)
      : MulticastView(runtime::host::multicastMembers(address)) {}
  MulticastView(const MulticastView&) = delete;
  MulticastView& operator=(const MulticastView&) = delete;

 private:
  explicit MulticastView(std::vector<std::byte*> members)
      : MembersView(members.data(), static_cast<int>(members.size())), owned_(std::move(members)) {}

  std::vector<std::byte*> owned_;
};
#endif

}  // namespace unisono::device::UNISONO_TARGET
