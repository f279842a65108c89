// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace unisono {

// How often fork() has led to this process since the first call in any of its ancestors. What was
// made while the count was another one belongs to an ancestor: a child has none of its threads, and
// shares its descriptors.
int forkCount();

// Throws Error(invalidUsage) in a child of the process in which forkCount() was `forks`. `what` is
// what the caller wants to use, the start of a sentence.
void checkNotForked(int forks, const char* what);

}  // namespace unisono
