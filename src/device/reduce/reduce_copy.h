// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/reductions.h"

// Moves elements from one or more sources, combined, to one or more destinations. A plain copy
// knows no types; a reduction is instantiated once for each (type, operator).
namespace unisono::device::UNISONO_TARGET {

inline constexpr int kMaxSources = 4;
inline constexpr int kMaxDestinations = 4;

// 16-byte vectors that one lane keeps in flight.
inline constexpr int kUnroll = 8;

struct ReduceCopy {
  const void* source[kMaxSources];
  void* destination[kMaxDestinations];
  int sources;
  int destinations;
  uint64_t elements;
  uint32_t prepare;  // bit s: source s is a rank's own input (Reducer::prepare)
  bool finish;       // the result is complete (Reducer::finish)
};

// Elements before the first 16-byte boundary that all pointers share, or all of them if there is
// none.
template <typename Element>
UNISONO_DEVICE uint64_t elementsBeforeVectors(const ReduceCopy& work) {
  uint64_t first = reinterpret_cast<uint64_t>(work.source[0]);
  uint64_t differing = 0;
  for (int s = 1; s < work.sources; s++) {
    differing |= first ^ reinterpret_cast<uint64_t>(work.source[s]);
  }
  for (int d = 0; d < work.destinations; d++) {
    differing |= first ^ reinterpret_cast<uint64_t>(work.destination[d]);
  }
  if (differing % 16 != 0) return work.elements;
  uint64_t before = (16 - first % 16) % 16 / sizeof(Element);
  return before < work.elements ? before : work.elements;
}

// One rank's operand: its own input prepared, or a partial result as it is.
template <typename R>
UNISONO_DEVICE typename R::Accumulator operandOf(const R& reducer, typename R::Element element,
                                                 bool prepare) {
  if constexpr (R::kPrepares) {
    if (prepare) return reducer.prepare(element);
  }
  return R::Traits::widen(element);
}

template <typename R>
UNISONO_DEVICE typename R::Element resultOf(const R& reducer, typename R::Accumulator value,
                                            bool finish) {
  if constexpr (R::kFinishes) {
    if (finish) value = reducer.finish(value);
  }
  return R::Traits::narrow(value);
}

template <typename R>
UNISONO_DEVICE void reduceElements(const ThreadGroup& group, const R& reducer,
                                   const ReduceCopy& work, uint64_t begin, uint64_t end) {
  using Element = typename R::Element;
  for (uint64_t i = begin + group.rank(); i < end; i += group.size()) {
    auto value =
        operandOf(reducer, static_cast<const Element*>(work.source[0])[i], work.prepare & 1);
    for (int s = 1; s < work.sources; s++) {
      Element element = static_cast<const Element*>(work.source[s])[i];
      value = R::combine(value, operandOf(reducer, element, work.prepare >> s & 1));
    }
    Element result = resultOf(reducer, value, work.finish);
    for (int d = 0; d < work.destinations; d++) {
      static_cast<Element*>(work.destination[d])[i] = result;
    }
  }
}

// Narrow elements need many registers a vector and much code, so fewer vectors are in flight.
template <typename Element>
inline constexpr int kReduceVectors = sizeof(Element) >= 4 ? 4 : static_cast<int>(sizeof(Element));

// Vectors `begin` to `end`, kVectors at a time a lane. More than one: only as far as they fill
// whole rounds of the group. Returns where it stopped.
template <int kVectors, typename R>
UNISONO_DEVICE uint64_t reduceVectors(const ThreadGroup& group, const R& reducer,
                                      const ReduceCopy& work, uint64_t firstElement, uint64_t begin,
                                      uint64_t end) {
  using Element = typename R::Element;
  constexpr int kPerVector = 16 / sizeof(Element);
  const uint64_t stride = group.size();
  const uint64_t whole = (end - begin) / (stride * kVectors) * (stride * kVectors);
  const uint64_t stop = kVectors == 1 ? end : begin + whole;
  for (uint64_t v = begin + group.rank(); v < stop; v += stride * kVectors) {
    typename R::Accumulator value[kVectors][kPerVector];
    auto load = [&](int s, auto apply) {
      const Element* base = static_cast<const Element*>(work.source[s]) + firstElement;
      Vector16 raw[kVectors];
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        raw[u] = loadVector(reinterpret_cast<const Vector16*>(base) + v + u * stride);
      }
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        Element element[kPerVector];
        memcpy(element, &raw[u], sizeof(element));
        UNISONO_UNROLL
        for (int e = 0; e < kPerVector; e++) {
          apply(value[u][e], operandOf(reducer, element[e], work.prepare >> s & 1));
        }
      }
    };
    load(0, [](auto& into, auto operand) { into = operand; });
    for (int s = 1; s < work.sources; s++) {
      load(s, [](auto& into, auto operand) { into = R::combine(into, operand); });
    }
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      Element element[kPerVector];
      UNISONO_UNROLL
      for (int e = 0; e < kPerVector; e++) {
        element[e] = resultOf(reducer, value[u][e], work.finish);
      }
      Vector16 result;
      memcpy(&result, element, sizeof(result));
      for (int d = 0; d < work.destinations; d++) {
        Element* base = static_cast<Element*>(work.destination[d]) + firstElement;
        storeVector(reinterpret_cast<Vector16*>(base) + v + u * stride, result);
      }
    }
  }
  return stop;
}

template <typename R>
UNISONO_DEVICE_CALL void reduceWith(const ThreadGroup& group, const ReductionSpec& spec,
                                    const ReduceCopy& work) {
  using Element = typename R::Element;
  const R reducer(spec);
  constexpr int kPerVector = 16 / sizeof(Element);
  uint64_t before = elementsBeforeVectors<Element>(work);
  reduceElements(group, reducer, work, 0, before);
  const uint64_t vectors = (work.elements - before) / kPerVector;
  uint64_t done = reduceVectors<kReduceVectors<Element>>(group, reducer, work, before, 0, vectors);
  done = reduceVectors<1>(group, reducer, work, before, done, vectors);
  reduceElements(group, reducer, work, before + done * kPerVector, work.elements);
}

// Called through a table: the compiler would inline a switch over direct calls, and every one of
// them would have a stack of its own.
using ReduceFunction = void (*)(const ThreadGroup&, const ReductionSpec&, const ReduceCopy&);
struct MakeReduceFunction {
  template <typename R>
  constexpr ReduceFunction operator()() const {
    return &reduceWith<R>;
  }
};
UNISONO_DEVICE_TABLE ReductionTable<ReduceFunction> kReduceFunctions =
    makeReductionTable<ReduceFunction>(MakeReduceFunction{});

template <typename Word>
UNISONO_DEVICE void copyWords(const ThreadGroup& group, const ReduceCopy& work, uint64_t begin,
                              uint64_t end) {
  for (uint64_t i = begin + group.rank(); i < end; i += group.size()) {
    Word word = static_cast<const Word*>(work.source[0])[i];
    for (int d = 0; d < work.destinations; d++) static_cast<Word*>(work.destination[d])[i] = word;
  }
}

// A copy of `bytes` bytes from one source; the widest word that all alignments allow.
UNISONO_DEVICE_CALL void copyBytes(const ThreadGroup& group, const ReduceCopy& work,
                                   uint64_t bytes) {
  ReduceCopy asBytes = work;
  asBytes.elements = bytes;
  uint64_t before = elementsBeforeVectors<uint8_t>(asBytes);
  if (before == bytes && bytes >= 16) {
    uint64_t misalignment = reinterpret_cast<uint64_t>(work.source[0]) | bytes;
    for (int d = 0; d < work.destinations; d++) {
      misalignment |= reinterpret_cast<uint64_t>(work.destination[d]);
    }
    if (misalignment % 8 == 0) return copyWords<uint64_t>(group, work, 0, bytes / 8);
    if (misalignment % 4 == 0) return copyWords<uint32_t>(group, work, 0, bytes / 4);
    if (misalignment % 2 == 0) return copyWords<uint16_t>(group, work, 0, bytes / 2);
  }
  copyWords<uint8_t>(group, work, 0, before);
  const uint64_t vectors = (bytes - before) / 16;
  const uint64_t stride = group.size();
  const Vector16* from =
      reinterpret_cast<const Vector16*>(static_cast<const std::byte*>(work.source[0]) + before);
  uint64_t v = group.rank();
  for (; v + (kUnroll - 1) * stride < vectors; v += kUnroll * stride) {
    Vector16 raw[kUnroll];
    UNISONO_UNROLL
    for (int u = 0; u < kUnroll; u++) raw[u] = loadVector(from + v + u * stride);
    for (int d = 0; d < work.destinations; d++) {
      Vector16* to =
          reinterpret_cast<Vector16*>(static_cast<std::byte*>(work.destination[d]) + before);
      UNISONO_UNROLL
      for (int u = 0; u < kUnroll; u++) storeVector(to + v + u * stride, raw[u]);
    }
  }
  for (; v < vectors; v += stride) {
    Vector16 raw = loadVector(from + v);
    for (int d = 0; d < work.destinations; d++) {
      storeVector(
          reinterpret_cast<Vector16*>(static_cast<std::byte*>(work.destination[d]) + before) + v,
          raw);
    }
  }
  copyWords<uint8_t>(group, work, before + vectors * 16, bytes);
}

// Whether `work` needs arithmetic: several sources, or an operator that changes a single one.
UNISONO_DEVICE bool needsArithmetic(const ReductionSpec& spec, const ReduceCopy& work) {
  return work.sources > 1 || (spec.reduction == Reduction::preMulSum && work.prepare != 0) ||
         (spec.reduction == Reduction::sumPostDivide && work.finish);
}

UNISONO_DEVICE_CALL void reduceCopy(const ThreadGroup& group, const ReductionSpec& spec,
                                    const ReduceCopy& work) {
  if (work.elements == 0 || work.destinations == 0) return;
  const uint64_t bytes = work.elements * elementBytes(spec.type);
  for (int s = 0; s < work.sources; s++) noteRead(work.source[s], bytes);
  for (int d = 0; d < work.destinations; d++) noteWrite(work.destination[d], bytes);
  if (!needsArithmetic(spec, work)) {
    copyBytes(group, work, bytes);
    return;
  }
  kReduceFunctions.of(spec)(group, spec, work);
}

}  // namespace unisono::device::UNISONO_TARGET
