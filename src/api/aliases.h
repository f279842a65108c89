// SPDX-License-Identifier: Apache-2.0
#pragma once

// UNISONO_ALIAS(ncclAllReduce) defines pncclAllReduce as an alias of ncclAllReduce: the same code
// at the same address. Use it at file scope in the file that defines the function, because an alias
// cannot refer to another object file. A program that defines ncclAllReduce itself, as profilers
// do, still reaches the library's function through the alias.
//
// The pragmas are for ncclResetDebugInit, which is deprecated for callers but has an alias too.
#define UNISONO_ALIAS(name)                                                                                            \
  _Pragma("GCC diagnostic push") _Pragma(                                                                              \
      "GCC diagnostic ignored \"-Wdeprecated-declarations\"") extern "C" UNISONO_ALIAS_ATTRIBUTES(name) decltype(name) \
      p##name;                                                                                                         \
  _Pragma("GCC diagnostic pop") static_assert(true, "takes the semicolon")

// GCC warns about an alias without the attributes that it inferred for the function, such as
// nothrow. Clang neither warns nor supports `copy`.
#if __has_attribute(copy)
#define UNISONO_ALIAS_ATTRIBUTES(name) \
  __attribute__((visibility("default"), alias(#name), copy(name)))
#else
#define UNISONO_ALIAS_ATTRIBUTES(name) __attribute__((visibility("default"), alias(#name)))
#endif
