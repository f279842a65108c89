// SPDX-License-Identifier: Apache-2.0
#include "tuning/allowed.h"

#include <algorithm>

#include "base/error.h"

namespace unisono::tuning {
namespace {

// Splits off the part of `text` in front of the next `separator`.
std::string_view takePart(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(text.size(), part.size() + 1));
  return part;
}

// How the elements of one variable are called.
struct Vocabulary {
  std::string_view variable, kind;
  int (*find)(std::string_view);
  std::string (*names)();
  int count;
};
const Vocabulary kAlgorithmVocabulary{"NCCL_ALGO", "an algorithm", findAlgorithm, algorithmNames,
                                      device::kAlgorithms};
const Vocabulary kProtocolVocabulary{"NCCL_PROTO", "a protocol", findProtocol, protocolNames,
                                     device::kProtocols};

[[noreturn]] void refuse(const Vocabulary& words, std::string_view value, std::string_view name,
                         std::string_view kind, const std::string& names) {
  throw invalidUsage("{}={} names \"{}\", which is not {}", words.variable, value, name, kind)
      .remedy(fmt::format("Use {}, separated by commas, or a leading ^ to exclude some", names));
}

// A list as bits: the elements that it allows, and those that it names in order to allow them.
struct ElementBits {
  unsigned allowed = 0, named = 0;
};

ElementBits parseElements(const Vocabulary& words, std::string_view value, std::string_view list) {
  const bool excludes = list.starts_with('^');
  if (excludes) list.remove_prefix(1);
  unsigned named = 0;
  while (!list.empty()) {
    const std::string_view name = takePart(list, ',');
    if (name.empty()) continue;
    const int element = words.find(name);
    if (element < 0) refuse(words, value, name, words.kind, words.names());
    named |= 1U << element;
  }
  if (excludes) return {((1U << words.count) - 1) & ~named, 0};
  return {named, named};
}

// Calls `assign` with each operation that a list of `value` is for, and the list.
template <typename Assign>
void parseLists(const Vocabulary& words, std::string_view value, Assign assign) {
  std::string_view rest = value;
  for (bool first = true; !rest.empty();) {
    std::string_view list = takePart(rest, ';');
    if (list.empty()) continue;
    int operation = -1;
    if (const size_t colon = list.find(':'); colon != std::string_view::npos) {
      const std::string_view name = list.substr(0, colon);
      operation = findOperation(name);
      if (operation < 0) refuse(words, value, name, "an operation", operationNames());
      list.remove_prefix(colon + 1);
      if (list.empty()) {
        throw invalidUsage("{}={} has no list after \"{}:\"", words.variable, value, name)
            .remedy(fmt::format("Use {}", words.names()));
      }
    } else if (!first) {
      throw invalidUsage("{}={} has a list without an operation after the first one",
                         words.variable, value)
          .remedy("Put the name of an operation and a colon in front of each later list");
    }
    first = false;
    const ElementBits bits = parseElements(words, value, list);
    for (int o = 0; o < kCollectives; o++) {
      if (operation < 0 || o == operation) assign(o, bits);
    }
  }
}

}  // namespace

Allowed parseAllowed(std::string_view algorithms, std::string_view protocols) {
  Allowed allowed;
  parseLists(kAlgorithmVocabulary, algorithms, [&](int operation, ElementBits bits) {
    allowed.of[static_cast<size_t>(operation)].algorithms = static_cast<uint16_t>(bits.allowed);
  });
  parseLists(kProtocolVocabulary, protocols, [&](int operation, ElementBits bits) {
    Allowed::Lists& lists = allowed.of[static_cast<size_t>(operation)];
    lists.protocols = static_cast<uint8_t>(bits.allowed);
    lists.forced = static_cast<uint8_t>(bits.named);
  });
  return allowed;
}

Allowed intersect(const Allowed& a, const Allowed& b) {
  Allowed result = a;
  for (size_t o = 0; o < kCollectives; o++) {
    result.of[o].algorithms &= b.of[o].algorithms;
    result.of[o].protocols &= b.of[o].protocols;
    result.of[o].forced &= b.of[o].forced;
  }
  return result;
}

}  // namespace unisono::tuning
