// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/reduce/any_reducer.h"

// Kernels, loops and tables that exist once for each reducer are made here.
namespace unisono::device::UNISONO_TARGET {

// `Typed`: the pairs with a reducer of their own.
template <DataType kType, Reduction kReduction, typename Typed>
using ReducerOf =
    std::conditional_t<Typed::contains(kType, kReduction),
                       Reducer<typename ElementOf<reducedAs(kType, kReduction)>::type, kReduction>,
                       AnyReducer>;

// Calls visit.template operator()<kType, kReduction>() for every pair that exists.
template <typename Visit>
constexpr void forEachReduction(const Visit& visit) {
  auto visitOne = [&]<DataType kType, Reduction kReduction>() {
    using Element = typename ElementOf<kType>::type;
    static_assert(sizeof(Element) == elementBytes(kType));
    static_assert(Arithmetic<Element>::kFloating == isFloatingPoint(kType));
    if constexpr (isReduction(kType, kReduction)) visit.template operator()<kType, kReduction>();
  };
  auto visitType = [&]<DataType kType, int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (visitOne.template operator()<kType, static_cast<Reduction>(kIndex)>(), ...);
  };
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (visitType.template operator()<static_cast<DataType>(kIndex)>(
         std::make_integer_sequence<int, kReductions>{}),
     ...);
  }
  (std::make_integer_sequence<int, kDataTypes>{});
}

// Calls visit.template run<R>() for the reducer R of the pair that `spec` names.
template <typename Visit>
UNISONO_DEVICE void visitReducer(const ReductionSpec& spec, const Visit& visit) {
  if (!visitPair<PairsWithLoops>(reducedPairOf(spec), visit)) visit.template run<AnyReducer>();
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
template <typename Value, typename Typed = PairsWithLoops, typename Make>
constexpr ReductionTable<Value> makeReductionTable(const Make& make) {
  ReductionTable<Value> table{};
  forEachReduction([&]<DataType kType, Reduction kReduction>() {
    table.value[static_cast<int>(kType)][static_cast<int>(kReduction)] =
        make.template operator()<ReducerOf<kType, kReduction, Typed>>();
  });
  return table;
}

}  // namespace unisono::device::UNISONO_TARGET
