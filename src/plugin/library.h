// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdarg>
#include <functional>
#include <memory>
#include <string>

// What plug-ins of every kind share: how their libraries are found, and how they log.
namespace unisono::plugin {

// Says that a plug-in is ignored, and why.
using Warn = std::function<void(const std::string&)>;

// ncclResult_t and ncclDebugLogLevel of the binary interfaces.
inline constexpr int kSuccess = 0;
inline constexpr int kLogWarn = 2;

// ncclDebugLogger_t.
using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line,
                        const char* format, ...);

// A library that is open. Closed with the last owner.
using OpenLibrary = std::shared_ptr<void>;

// Opens the plug-in of a kind ("tuner") that `setting` names: a library, or the word w of
// libnccl-KIND-w.so; "STATIC_PLUGIN" is the program itself and "none" no plug-in. Empty is
// libnccl-KIND.so, if there is one. Null without a plug-in; one that cannot be loaded is reported
// to `warn`. As with NCCL, the net plug-in that was started last then serves, unless none is
// wanted, if its library has a symbol that consists of `prefix` and a version.
OpenLibrary openPlugin(const std::string& kind, const std::string& setting, const Warn& warn,
                       const std::string& prefix = "");

// Remembers the library of a net plug-in that was started.
void noteStartedNet(OpenLibrary library);

// A symbol of a library; null if there is none.
const void* findSymbol(const OpenLibrary& library, const char* name);

// Writes a line of a plug-in to the log: see Logger.
void writePluginLog(const char* kind, int level, const char* format, va_list arguments);

}  // namespace unisono::plugin
