// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/copy.h"
#include "device/reduce/packed.h"
#include "device/reduce/reductions.h"

// Moves elements from one or more sources, combined, to one or more destinations. A plain copy
// knows no types; a reduction is instantiated once for each (type, operator), in forms for the
// shapes that rings and trees have, two or three operands to one or two destinations with the same
// alignment, and in a general one.
namespace unisono::device::UNISONO_TARGET {

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

// The elements outside of `range`.
template <typename R>
UNISONO_DEVICE void reduceElements(int lane, int lanes, const R& reducer, const ReduceCopy& work,
                                   VectorRange range) {
  using Element = typename R::Element;
  const uint64_t begin = range.begin / sizeof(Element), end = range.end / sizeof(Element);
  const uint64_t count = work.elements - (end - begin);
  for (uint64_t i = static_cast<uint32_t>(lane); i < count; i += static_cast<uint32_t>(lanes)) {
    const uint64_t index = i < begin ? i : i + (end - begin);
    auto value =
        operandOf(reducer, static_cast<const Element*>(work.source[0])[index], work.prepare & 1);
    UNISONO_NO_UNROLL
    for (int s = 1; s < work.sources; s++) {
      const Element element = static_cast<const Element*>(work.source[s])[index];
      value = R::combine(value, operandOf(reducer, element, work.prepare >> s & 1));
    }
    const Element result = resultOf(reducer, value, work.finish);
    UNISONO_NO_UNROLL
    for (int d = 0; d < work.destinations; d++) {
      static_cast<Element*>(work.destination[d])[index] = result;
    }
  }
}

// The result for one word of every operand on its way: the word itself where the operator works on
// whole words, else its elements widened. `kOperands` is their number, or the most.
template <typename R, int kOperands>
class PartialWord {
 public:
  using Element = typename R::Element;
  using Word = WordOf<Element>;
  static constexpr Packing kPacking = packingOf<Element, R::kReduction>();
  static constexpr bool kPacked =
      kPacking == Packing::any || (kPacking == Packing::pairs && kOperands <= 2);

  // The next operand, or the first. `factor` multiplies it, if the operator prepares.
  UNISONO_DEVICE void add(Word word, typename R::Accumulator factor, bool first) {
    if constexpr (kPacked) {
      word_ = first ? word : combineWord<Element, R::kReduction>(word_, word);
    } else {
      typename R::Accumulator value[kPerWord<Element>];
      R::Traits::widenWord(word, value);
      UNISONO_UNROLL
      for (int e = 0; e < kPerWord<Element>; e++) {
        if constexpr (R::kPrepares) value[e] = R::multiply(value[e], factor);
        value_[e] = first ? value[e] : R::combine(value_[e], value[e]);
      }
    }
  }
  UNISONO_DEVICE Word result(const R& reducer, bool finish) {
    if constexpr (R::kFinishes) {
      if (finish) {
        if constexpr (kPacked) R::Traits::widenWord(word_, value_);
        UNISONO_UNROLL
        for (auto& value : value_) value = reducer.finish(value);
        return R::Traits::narrowWord(value_);
      }
    }
    if constexpr (kPacked) {
      return word_;
    } else {
      return R::Traits::narrowWord(value_);
    }
  }

 private:
  Word word_{};
  typename R::Accumulator value_[kPerWord<Element>]{};
};

// A vector as words of `Word`.
template <typename Word>
struct Words {
  Word word[16 / sizeof(Word)];
};

// Combines `kSources` operands, to one destination or (`second` not null) two. All are aligned.
template <typename R, int kSources, int kVectors>
UNISONO_DEVICE void reduceFew(int lane, int lanes, const R& reducer,
                              const std::byte* const (&source)[kSources], std::byte* first,
                              std::byte* second, uint64_t bytes, uint32_t prepare, bool finish) {
  using Word = WordOf<typename R::Element>;
  constexpr int kWords = 16 / sizeof(Word);
  typename R::Accumulator factor[kSources];
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
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      Words<Word> words[kSources], result;
      UNISONO_UNROLL
      for (int s = 0; s < kSources; s++) words[s] = bitsAs<Words<Word>>(raw[s][u]);
      UNISONO_UNROLL
      for (int w = 0; w < kWords; w++) {
        PartialWord<R, kSources> partial;
        UNISONO_UNROLL
        for (int s = 0; s < kSources; s++) partial.add(words[s].word[w], factor[s], s == 0);
        result.word[w] = partial.result(reducer, finish);
      }
      raw[0][u] = bitsAs<Vector16>(result);
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
  using Word = WordOf<typename R::Element>;
  constexpr int kWords = 16 / sizeof(Word);
  const int sources = work.sources, destinations = work.destinations;
  for (Rounds<kVectors> rounds(lane, lanes, range.end - range.begin); rounds.more();
       rounds.next()) {
    const uint64_t offset = range.begin + rounds.offset();
    PartialWord<R, kMaxSources> partial[kVectors][kWords];
    UNISONO_NO_UNROLL
    for (int s = 0; s < sources; s++) {
      const std::byte* from = at(work.source[s], offset);
      const typename R::Accumulator factor = reducer.factorIf((work.prepare >> s & 1) != 0);
      Window window[kVectors];
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        window[u] = loadWindow(from + Rounds<kVectors>::distance(u), rounds.has(u));
      }
      UNISONO_UNROLL
      for (int u = 0; u < kVectors; u++) {
        const auto words = bitsAs<Words<Word>>(vectorOf(window[u], misalignmentOf(from)));
        UNISONO_UNROLL
        for (int w = 0; w < kWords; w++) partial[u][w].add(words.word[w], factor, s == 0);
      }
    }
    Vector16 value[kVectors];
    UNISONO_UNROLL
    for (int u = 0; u < kVectors; u++) {
      Words<Word> result;
      UNISONO_UNROLL
      for (int w = 0; w < kWords; w++) result.word[w] = partial[u][w].result(reducer, work.finish);
      value[u] = bitsAs<Vector16>(result);
    }
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

// By workers. Inlined, so that the operands stay in registers on the common path.
UNISONO_DEVICE void reduceCopy(const ThreadGroup& group, const ReductionSpec& spec,
                               const ReduceCopy& work) {
  const uint64_t bytes = work.elements * elementBytes(spec.type);
  if (!needsArithmetic(spec, work)) {
    copyOnly(group, work, bytes);
    return;
  }
  if (bytes == 0 || work.destinations == 0) return;
  noteOperands(work, bytes);
  if (isFew(work) && isAligned(work, bytes)) {
    reduceAligned(group.rank(), group.size(), spec, at(work.source[0], 0),
                  work.sources > 1 ? at(work.source[1], 0) : nullptr,
                  work.sources > 2 ? at(work.source[2], 0) : nullptr, at(work.destination[0], 0),
                  work.destinations > 1 ? at(work.destination[1], 0) : nullptr, bytes, work.prepare,
                  work.finish);
  } else {
    const ReduceCopy copy = work;  // whose address may be taken
    reduceSlowly(group.rank(), group.size(), spec, copy, bytes);
  }
}

}  // namespace unisono::device::UNISONO_TARGET
