// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/copy.h"
#include "device/reduce/pack_reduction.h"
#include "device/reduce/reductions.h"

// Moves elements from one or more sources, combined, to one or more destinations. A plain copy
// knows no types; a reduction is instantiated once for each (type, operator), in forms for the
// shapes that rings and trees have, two or three operands to one or two destinations with the same
// alignment, and in a general one.
namespace unisono::device::UNISONO_TARGET {

// Elements of a reduction: an operand, prepared if it is a rank's own input, two combined, and the
// result.
template <typename R>
UNISONO_DEVICE typename R::Accumulator loadOperand(const R& reducer, const void* source,
                                                   uint64_t index, bool prepare) {
  const auto element = static_cast<const typename R::Element*>(source)[index];
  if constexpr (R::kPrepares) {
    if (prepare) return reducer.prepare(element);
  }
  return R::Traits::widen(element);
}
template <typename R>
UNISONO_DEVICE typename R::Accumulator combineOperands(const R&, typename R::Accumulator a,
                                                       typename R::Accumulator b) {
  return R::combine(a, b);
}
template <typename R>
UNISONO_DEVICE void storeResult(const R& reducer, void* destination, uint64_t index,
                                typename R::Accumulator value, bool finish) {
  if constexpr (R::kFinishes) {
    if (finish) value = reducer.finish(value);
  }
  static_cast<typename R::Element*>(destination)[index] = R::Traits::narrow(value);
}
UNISONO_DEVICE uint64_t loadOperand(const AnyReducer& reducer, const void* source, uint64_t index,
                                    bool prepare) {
  const uint64_t element = reducer.loadElement(source, index);
  return prepare ? preparePack(reducer, element) : element;
}
UNISONO_DEVICE uint64_t combineOperands(const AnyReducer& reducer, uint64_t a, uint64_t b) {
  uint64_t sum[1] = {a};
  reducer.combine(sum, {b});
  return sum[0];
}
UNISONO_DEVICE void storeResult(const AnyReducer& reducer, void* destination, uint64_t index,
                                uint64_t value, bool finish) {
  uint64_t result[1] = {value};
  if (finish) reducer.finish(result);
  reducer.storeElement(destination, index, result[0]);
}

// The elements outside of `range`.
template <typename R>
UNISONO_DEVICE void reduceElements(int lane, int lanes, const R& reducer, const ReduceCopy& work,
                                   VectorRange range) {
  const uint64_t begin = range.begin / reducer.bytes(), end = range.end / reducer.bytes();
  const uint64_t count = work.elements - (end - begin);
  for (uint64_t i = static_cast<uint32_t>(lane); i < count; i += static_cast<uint32_t>(lanes)) {
    const uint64_t index = i < begin ? i : i + (end - begin);
    auto value = loadOperand(reducer, work.source[0], index, work.prepare & 1);
    UNISONO_NO_UNROLL
    for (int s = 1; s < work.sources; s++) {
      const auto operand = loadOperand(reducer, work.source[s], index, work.prepare >> s & 1);
      value = combineOperands(reducer, value, operand);
    }
    UNISONO_NO_UNROLL
    for (int d = 0; d < work.destinations; d++) {
      storeResult(reducer, work.destination[d], index, value, work.finish);
    }
  }
}

// Combines `kSources` operands, to one destination or (`second` not null) two. All are aligned.
template <typename R, int kSources, int kVectors>
UNISONO_DEVICE void reduceFew(int lane, int lanes, const R& reducer,
                              const std::byte* const (&source)[kSources], std::byte* first,
                              std::byte* second, uint64_t bytes, uint32_t prepare, bool finish) {
  typename R::Factor factor[kSources];
  UNISONO_UNROLL
  for (int s = 0; s < kSources; s++) factor[s] = reducer.factorIf((prepare >> s & 1) != 0);
  for (Rounds<kVectors> rounds(lane, lanes, bytes); rounds.more(); rounds.next()) {
    Vector16 raw[kSources][kVectors];
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      UNISONO_UNROLL
      for (int s = 0; s < kSources; s++) {
        raw[s][u] =
            loadVector(source[s] + rounds.offset() + Rounds<kVectors>::distance(u), rounds.has(u));
      }
    }
    PackReduction<R, kSources, 2 * kVectors> partial;
    uint64_t pack[2 * kVectors];
    UNISONO_UNROLL
    for (int s = 0; s < kSources; s++) {
      packsOf(raw[s], pack);
      partial.add(reducer, pack, s == 0, factor[s]);
    }
    partial.result(reducer, finish, pack);
    vectorsOf(pack, raw[0]);
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      storeVector(first + rounds.offset() + Rounds<kVectors>::distance(u), raw[0][u],
                  rounds.has(u));
    }
    if (second == nullptr) continue;
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      storeVector(second + rounds.offset() + Rounds<kVectors>::distance(u), raw[0][u],
                  rounds.has(u));
    }
  }
}

// Any number of operands of any alignment; the first destination is aligned. One source after
// another, because a body for several at once would be several times the code.
template <typename R, int kVectors>
UNISONO_DEVICE void reduceMany(int lane, int lanes, const R& reducer, const ReduceCopy& work,
                               VectorRange range) {
  const int sources = work.sources, destinations = work.destinations;
  for (Rounds<kVectors> rounds(lane, lanes, range.end - range.begin); rounds.more();
       rounds.next()) {
    const uint64_t offset = range.begin + rounds.offset();
    PackReduction<R, kMaxSources, 2 * kVectors> partial;
    Vector16 value[kVectors];
    uint64_t pack[2 * kVectors];
    UNISONO_NO_UNROLL
    for (int s = 0; s < sources; s++) {
      const std::byte* from = at(work.source[s], offset);
      Window window[kVectors];
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        window[u] = loadWindow(from + Rounds<kVectors>::distance(u), rounds.has(u));
      }
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        value[u] = vectorOf(window[u], misalignmentOf(from));
      }
      packsOf(value, pack);
      partial.add(reducer, pack, s == 0, reducer.factorIf((work.prepare >> s & 1) != 0));
    }
    partial.result(reducer, work.finish, pack);
    vectorsOf(pack, value);
    UNISONO_NO_UNROLL
    for (int d = 0; d < destinations; d++) {
      std::byte* to = at(work.destination[d], offset);
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        if (rounds.has(u)) storeAnywhere(to + Rounds<kVectors>::distance(u), value[u]);
      }
    }
  }
}

// The vectors of a work of up to three operands and two destinations, all aligned: nearly every
// slice of a ring or tree. One function for all reducers, without a stack: the stacks of 512
// threads do not fit into the first-level cache when data passes through it.
struct AlignedReduction {
  int lane, lanes;
  ReductionSpec spec;
  const std::byte *a, *b, *c;  // the last ones may be null
  std::byte *first, *second;
  uint64_t bytes;
  uint32_t prepare;
  bool finish;

  template <typename R>
  UNISONO_DEVICE void run() const {
    const R reducer(spec);
    if (c != nullptr) {
      const std::byte* const sources[3] = {a, b, c};
      reduceFew<R, 3, 2>(lane, lanes, reducer, sources, first, second, bytes, prepare, finish);
    } else if (b != nullptr) {
      const std::byte* const sources[2] = {a, b};
      reduceFew<R, 2, 4>(lane, lanes, reducer, sources, first, second, bytes, prepare, finish);
    } else if constexpr (R::kPrepares || R::kFinishes) {
      const std::byte* const sources[1] = {a};
      reduceFew<R, 1, 4>(lane, lanes, reducer, sources, first, second, bytes, prepare, finish);
    }
  }
};
UNISONO_DEVICE_CALL void reduceAligned(int lane, int lanes, ReductionSpec spec, const std::byte* a,
                                       const std::byte* b, const std::byte* c, std::byte* first,
                                       std::byte* second, uint64_t bytes, uint32_t prepare,
                                       bool finish) {
  visitReducer(spec,
               AlignedReduction{lane, lanes, spec, a, b, c, first, second, bytes, prepare, finish});
}

// Any work, or the elements outside of its vectors if these have been moved. A function for each
// reducer, called through a table: with direct calls, ptxas keeps the variables of all of them on
// one stack of 13 KB.
template <typename R>
UNISONO_DEVICE_CALL void reduceGeneral(int lane, int lanes, const ReductionSpec& spec,
                                       const ReduceCopy& work, const VectorRange& range) {
  const R reducer(spec);
  reduceElements(lane, lanes, reducer, work, range);
  constexpr int kVectors = sizeof(typename R::Element) == 1 ? 2 : 4;
  if (!range.done) reduceMany<R, kVectors>(lane, lanes, reducer, work, range);
}

using ReduceFunction = void (*)(int, int, const ReductionSpec&, const ReduceCopy&,
                                const VectorRange&);
struct MakeReduceFunction {
  template <typename R>
  constexpr ReduceFunction operator()() const {
    return &reduceGeneral<R>;
  }
};
UNISONO_DEVICE_TABLE ReductionTable<ReduceFunction> kReduceFunctions =
    makeReductionTable<ReduceFunction>(MakeReduceFunction{});

// Whether `work` needs arithmetic: several sources, or an operator that changes a single one.
UNISONO_DEVICE bool needsArithmetic(const ReductionSpec& spec, const ReduceCopy& work) {
  return work.sources > 1 || (spec.reduction == Reduction::preMulSum && work.prepare != 0) ||
         (spec.reduction == Reduction::sumPostDivide && work.finish);
}

UNISONO_DEVICE_CALL void reduceSlowly(int lane, int lanes, const ReductionSpec& spec,
                                      const ReduceCopy& work, uint64_t bytes) {
  VectorRange range = vectorRangeOf(work, bytes);
  if (isFew(work) && range.aligned) {
    reduceAligned(lane, lanes, spec, at(work.source[0], range.begin),
                  work.sources > 1 ? at(work.source[1], range.begin) : nullptr,
                  work.sources > 2 ? at(work.source[2], range.begin) : nullptr,
                  at(work.destination[0], range.begin),
                  work.destinations > 1 ? at(work.destination[1], range.begin) : nullptr,
                  range.end - range.begin, work.prepare, work.finish);
    range.done = true;
  }
  kReduceFunctions.of(spec)(lane, lanes, spec, work, range);
}

// By workers. Inlined, so that the operands stay in registers on the common path. `kGeneral`: with
// the general loops alone, which are a third of the code, for algorithms whose speed a network
// limits.
template <bool kGeneral = false>
UNISONO_DEVICE void reduceCopy(const ThreadGroup& group, const ReductionSpec& spec,
                               const ReduceCopy& work) {
  const uint64_t bytes = work.elements * elementBytes(spec.type);
  if (!needsArithmetic(spec, work)) {
    copyOnly(group, work, bytes);
    return;
  }
  if (bytes == 0 || work.destinations == 0) return;
  noteOperands(work, bytes);
  if constexpr (kGeneral) {
    const ReduceCopy copy = work;  // whose address may be taken
    kReduceFunctions.of(spec)(group.rank(), group.size(), spec, copy, vectorRangeOf(copy, bytes));
  } else if (isFew(work) && isAligned(work, bytes)) {
    reduceAligned(group.rank(), group.size(), spec, at(work.source[0], 0),
                  work.sources > 1 ? at(work.source[1], 0) : nullptr,
                  work.sources > 2 ? at(work.source[2], 0) : nullptr, at(work.destination[0], 0),
                  work.destinations > 1 ? at(work.destination[1], 0) : nullptr, bytes, work.prepare,
                  work.finish);
  } else {
    const ReduceCopy copy = work;
    reduceSlowly(group.rank(), group.size(), spec, copy, bytes);
  }
}

}  // namespace unisono::device::UNISONO_TARGET
