// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "device/reduce/reducer.h"

// Every pair of a data type and an operator. Kernels, loops and tables that exist once for each
// pair are made here, from ElementOf (element.h) and Reducer (reducer.h) alone.
namespace unisono::device::UNISONO_TARGET {

template <DataType kType, Reduction kReduction>
using ReducerOf = Reducer<typename ElementOf<reducedAs(kType, kReduction)>::type, kReduction>;

// Calls visit.template operator()<kType, kReduction>() for every pair that exists.
template <typename Visit>
constexpr void forEachReduction(const Visit& visit) {
  auto visitPair = [&]<DataType kType, Reduction kReduction>() {
    using Element = typename ElementOf<kType>::type;
    static_assert(sizeof(Element) == elementBytes(kType));
    static_assert(Arithmetic<Element>::kFloating == isFloatingPoint(kType));
    if constexpr (isReduction(kType, kReduction)) visit.template operator()<kType, kReduction>();
  };
  auto visitType = [&]<DataType kType, int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (visitPair.template operator()<kType, static_cast<Reduction>(kIndex)>(), ...);
  };
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (visitType.template operator()<static_cast<DataType>(kIndex)>(
         std::make_integer_sequence<int, kReductions>{}),
     ...);
  }
  (std::make_integer_sequence<int, kDataTypes>{});
}

// Calls visit.template run<R>() for the reducer R of the pair with number `index`, one of those
// that are reduced as their own type.
template <int kIndex = 0, typename Visit>
UNISONO_DEVICE void visitReducerAt(int index, const Visit& visit) {
  if constexpr (kIndex < kDataTypes * kReductions) {
    constexpr auto kType = static_cast<DataType>(kIndex / kReductions);
    constexpr auto kReduction = static_cast<Reduction>(kIndex % kReductions);
    constexpr bool kExists =
        isReduction(kType, kReduction) && reducedAs(kType, kReduction) == kType;
    if constexpr (kExists) {
      if (index == kIndex) {
        visit.template run<ReducerOf<kType, kReduction>>();
        return;
      }
    }
    visitReducerAt<kIndex + 1>(index, visit);
  }
}
// The same for the pair that `spec` names. Everything is inlined, which nvcc does not do to lambdas
// of this size.
template <typename Visit>
UNISONO_DEVICE void visitReducer(const ReductionSpec& spec, const Visit& visit) {
  const DataType type = reducedAs(spec.type, spec.reduction);
  visitReducerAt(static_cast<int>(type) * kReductions + static_cast<int>(spec.reduction), visit);
}

// A value for each pair that exists. The others are value-initialized.
template <typename Value>
struct ReductionTable {
  Value value[kDataTypes][kReductions];
  constexpr const Value& of(const ReductionSpec& spec) const {
    return value[static_cast<int>(spec.type)][static_cast<int>(spec.reduction)];
  }
};

// The table of the values that make.template operator()<R>() returns for each reducer R.
template <typename Value, typename Make>
constexpr ReductionTable<Value> makeReductionTable(const Make& make) {
  ReductionTable<Value> table{};
  forEachReduction([&]<DataType kType, Reduction kReduction>() {
    table.value[static_cast<int>(kType)][static_cast<int>(kReduction)] =
        make.template operator()<ReducerOf<kType, kReduction>>();
  });
  return table;
}

}  // namespace unisono::device::UNISONO_TARGET
