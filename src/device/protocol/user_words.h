// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/low_latency.h"

namespace unisono::device::UNISONO_TARGET {

// A buffer of the user, of less than 2^32 bytes. It is aligned to its elements only. A
// Place names the words of a lane in one pass: word k is `distance(k)` after the first, and exists
// if `has(k)`. With `kHasVectors`, words 2v and 2v + 1 follow each other, and both exist or
// neither.
class UserWords {
 public:
  UNISONO_DEVICE UserWords(const void* address, uint32_t bytes, uint64_t elementSize)
      : address_(reinterpret_cast<uint64_t>(address)),
        bytes_(bytes),
        whole_(address_ % 8 == 0 ? bytes / 8 : 0),
        paired_(address_ % 16 == 0 ? bytes / 16 * 2 : 0),
        elementSize_(static_cast<uint32_t>(elementSize)) {}

  // Where words are not accessed as vectors or as a whole, calls keep the code for that out of the
  // way of the others.
  template <typename Place, int kWords>
  UNISONO_DEVICE void load(Place place, uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) word[k] = 0;
    if constexpr (Place::kHasVectors) {
      loadVectors(place, word);
      if (paired_ != words()) [[unlikely]] {
        take(loadRest(*this, place, Copied<kWords>(word)), word);
      }
    } else {
      loadWhole(place, word, 0);
      if (whole_ != words()) [[unlikely]] {
        take(loadParts(*this, place, Copied<kWords>(word)), word);
      }
    }
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE void store(Place place, const uint64_t (&word)[kWords]) const {
    if constexpr (Place::kHasVectors) {
      storeVectors(place, word);
      if (paired_ != words()) [[unlikely]] {
        storeRest(*this, place, Copied<kWords>(word));
      }
    } else {
      storeWhole(place, word, 0);
      if (whole_ != words()) [[unlikely]] {
        storeParts(*this, place, Copied<kWords>(word));
      }
    }
  }

 private:
  // Words that are passed to a function by value, so that those of the caller stay in registers.
  template <int kWords>
  struct Copied {
    UNISONO_DEVICE explicit Copied(const uint64_t (&word)[kWords]) {
      UNISONO_UNROLL
      for (int k = 0; k < kWords; k++) of[k] = word[k];
    }
    uint64_t of[kWords];
  };
  template <int kWords>
  UNISONO_DEVICE static void take(const Copied<kWords>& copied, uint64_t (&word)[kWords]) {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) word[k] = copied.of[k];
  }

  template <typename Place, int kWords>
  UNISONO_DEVICE void loadVectors(Place place, uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k += 2) {
      const uint32_t index = place.first() + place.distance(k);
      const bool isThere = place.has(k) && index < paired_;
      if (isThere) noteRead(at(index), 16);
      const Vector16 loaded = loadVectorCached(at(index), isThere);
      memcpy(&word[k], &loaded, sizeof(loaded));
    }
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE void storeVectors(Place place, const uint64_t (&word)[kWords]) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k += 2) {
      const uint32_t index = place.first() + place.distance(k);
      const bool isThere = place.has(k) && index < paired_;
      if (isThere) noteWrite(at(index), 16);
      Vector16 stored;
      memcpy(&stored, &word[k], sizeof(stored));
      storeVector(at(index), stored, isThere);
    }
  }

  // Words from `first` on that can be accessed as one.
  template <typename Place, int kWords>
  UNISONO_DEVICE void loadWhole(Place place, uint64_t (&word)[kWords], uint32_t first) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      const bool isWhole = place.has(k) && index >= first && index < whole_;
      if (isWhole) noteRead(at(index), 8);
      word[k] = loadWord(at(index), isWhole, word[k]);
    }
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE void storeWhole(Place place, const uint64_t (&word)[kWords],
                                 uint32_t first) const {
    UNISONO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      if (!place.has(k) || index < first || index >= whole_) continue;
      noteWrite(at(index), 8);
      *at(index) = word[k];
    }
  }
  // Words that cannot.
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static Copied<kWords> loadParts(UserWords from, Place place,
                                                      Copied<kWords> word) {
    UNISONO_NO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      if (place.has(k) && from.isInPart(index)) word.of[k] = from.loadPart(index);
    }
    return word;
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static void storeParts(UserWords to, Place place, Copied<kWords> word) {
    UNISONO_NO_UNROLL
    for (int k = 0; k < kWords; k++) {
      const uint32_t index = place.first() + place.distance(k);
      if (place.has(k) && to.isInPart(index)) to.storePart(index, word.of[k]);
    }
  }
  // All words but those in vectors.
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static Copied<kWords> loadRest(UserWords from, Place place,
                                                     Copied<kWords> word) {
    from.loadWhole(place, word.of, from.paired_);
    return from.whole_ == from.words() ? word : loadParts(from, place, word);
  }
  template <typename Place, int kWords>
  UNISONO_DEVICE_CALL static void storeRest(UserWords to, Place place, Copied<kWords> word) {
    to.storeWhole(place, word.of, to.paired_);
    if (to.whole_ != to.words()) storeParts(to, place, word);
  }

  UNISONO_DEVICE uint64_t* at(uint32_t index) const {
    return reinterpret_cast<uint64_t*>(address_) + index;
  }
  UNISONO_DEVICE uint32_t words() const { return (bytes_ + 7) / 8; }
  // Words that cannot be accessed as one.
  UNISONO_DEVICE bool isInPart(uint32_t index) const { return index >= whole_ && index < words(); }
  UNISONO_DEVICE uint64_t loadPart(uint64_t index) const {
    switch (elementSize_) {
      case 1:
        return loadPack<uint8_t>(at(0), index, bytes_);
      case 2:
        return loadPack<uint16_t>(at(0), index, bytes_);
      case 4:
        return loadPack<uint32_t>(at(0), index, bytes_);
      default:
        return loadPack<uint64_t>(at(0), index, bytes_);
    }
  }
  UNISONO_DEVICE void storePart(uint64_t index, uint64_t word) const {
    switch (elementSize_) {
      case 1:
        return storePack<uint8_t>(at(0), index, bytes_, word);
      case 2:
        return storePack<uint16_t>(at(0), index, bytes_, word);
      case 4:
        return storePack<uint32_t>(at(0), index, bytes_, word);
      default:
        return storePack<uint64_t>(at(0), index, bytes_, word);
    }
  }

  uint64_t address_;
  uint32_t bytes_;
  uint32_t whole_;   // words that can be accessed as one
  uint32_t paired_;  // of them, those that can be accessed as vectors of two
  uint32_t elementSize_;
};

}  // namespace unisono::device::UNISONO_TARGET
