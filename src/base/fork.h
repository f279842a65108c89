#pragma once

namespace unisono {

// How often fork() has led to this process since the first call in any of its ancestors. What was
// made while the count was another one belongs to an ancestor: a child has none of its threads, and
// shares its descriptors.
int forkCount();

}  // namespace unisono
