#pragma once

// UNISONO_TWIN(ncclAllReduce) makes pncclAllReduce a second name of ncclAllReduce: the same code at
// the same address. It stands at file scope after the definition, which has to be in the same file,
// as an alias cannot reach across object files. A program that defines ncclAllReduce itself, as
// profilers do, still reaches the library's through the twin.
//
// The pragmas are for ncclResetDebugInit, which is deprecated for callers but has a twin too.
#define UNISONO_TWIN(name)                                                                                            \
  _Pragma("GCC diagnostic push") _Pragma(                                                                             \
      "GCC diagnostic ignored \"-Wdeprecated-declarations\"") extern "C" UNISONO_TWIN_ATTRIBUTES(name) decltype(name) \
      p##name;                                                                                                        \
  _Pragma("GCC diagnostic pop") static_assert(true, "takes the semicolon")

// GCC warns about an alias that lacks what it found out about the function itself, such as that it
// throws nothing; Clang neither warns nor knows `copy`.
#if __has_attribute(copy)
#define UNISONO_TWIN_ATTRIBUTES(name) \
  __attribute__((visibility("default"), alias(#name), copy(name)))
#else
#define UNISONO_TWIN_ATTRIBUTES(name) __attribute__((visibility("default"), alias(#name)))
#endif
