// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <typeindex>
#include <vector>

#include "base/error.h"
#include "bootstrap/frame.h"

namespace unisono::bootstrap {

// The ranks of one communicator that are in this process. They share what each would otherwise have
// a copy of: the results of all-gathers, and what follows from these. All of them ask for the same
// things, each once.
class LocalRanks {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;

  // Adds a rank of the communicator that `session` names.
  static std::shared_ptr<LocalRanks> join(const Secret& session, int rank);

  bool contains(int rank) const;
  // Adds the result of an all-gather, unless it is there, and returns the one that is there.
  Bytes add(uint64_t number, std::vector<std::byte> result);
  // Returns a result that another rank has added; null if there is none.
  Bytes find(uint64_t number);
  // Returns what `make` of the first rank returns; the others wait for it. An Error that it throws
  // is thrown on all ranks. `type` is that of the value.
  using Value = std::shared_ptr<const void>;
  Value makeOnce(uint64_t number, std::type_index type, const std::function<Value()>& make);

 private:
  struct Result {
    Bytes bytes;
    size_t taken = 0;
  };
  struct Made {
    explicit Made(std::type_index made) : type(made) {}
    const std::type_index type;
    std::mutex mutex;  // held while the value is made
    Value value;
    std::optional<Error> error;
    size_t taken = 0;
  };
  Bytes take(uint64_t number);

  mutable std::mutex mutex_;
  std::set<int> ranks_;
  // Kept until all ranks have them.
  std::map<uint64_t, Result> results_;
  std::map<uint64_t, std::shared_ptr<Made>> made_;
};

}  // namespace unisono::bootstrap
