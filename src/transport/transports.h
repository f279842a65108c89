// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "transport/transport.h"

// The list of transports.
namespace unisono::transport {

// The first transport of the list that can connect two ranks; nothing if none can.
std::optional<TransportKind> chooseTransport(const PairFacts& pair);

// For log lines.
std::string_view nameOf(TransportKind kind);

std::unique_ptr<Transport> makeTransport(TransportKind kind, const TransportContext& context);

}  // namespace unisono::transport
