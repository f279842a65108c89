// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the build of a test is good for.
namespace unisono::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

#if defined(NDEBUG)
inline constexpr bool kTimesCount = !kSanitized;
#else
inline constexpr bool kTimesCount = false;
#endif

}  // namespace unisono::test
