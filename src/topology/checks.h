// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "topology/paths.h"

// Who may talk to whom, and why. Each answer carries its reason as a sentence that a user can
// act on; they decide by the wires (PathTable::wirePath), so they can be asked while the rules
// are applied.
namespace unisono::topology {

struct PeerVerdict {
  bool allowed = false;            // direct reads and writes between the two GPUs
  bool byUser = false;             // refused by NCCL_P2P_DISABLE or NCCL_P2P_LEVEL
  bool read = false;               // the receiver should pull instead of the sender pushing
  int through = -1;                // GPU node between them; -1: none
  bool nvlink = false;             // joined by NVLink, or the same GPU
  PathType level = PathType::dis;  // the farthest path that is allowed
  std::string reason;
};
PeerVerdict checkPeer(const Topology& topology, const PathTable& paths,
                      const PathSettings& settings, int gpuA, int gpuB);

struct Verdict {
  bool allowed = false;
  std::string reason;
};
// Whether two GPUs' ranks can share host memory.
Verdict checkSharedMemory(const Topology& topology, const PathSettings& settings, int gpuA,
                          int gpuB);

struct GdrVerdict {
  bool allowed = false;
  bool flush = false;  // received data need a flush before the GPU may read them
  std::string reason;
};
// Whether a NIC may read (`read`: we send) or write (we receive) this GPU's memory directly.
GdrVerdict checkGdr(const Topology& topology, const PathTable& paths, const PathSettings& settings,
                    int gpu, int net, bool read);

// Whether a GPU should send to a NIC by way of another GPU, and which.
struct PxnVerdict {
  bool used = false;
  int through = -1;  // GPU node
  std::string reason;
};
PxnVerdict checkPxn(const Topology& topology, const PathTable& paths, const PathSettings& settings,
                    int gpu, int net);

// The ports of a GPU for messages, which its channels take in turn: those nearest to it, of which
// the GPUs that are as near have as equal a share as there can be.
std::vector<int> messagePorts(const Topology& topology, const PathTable& paths, int gpu);

// Whether messages of a GPU to a GPU of another machine leave through `net`, which on the other
// machine is the receiver's port, so that they stay on one rail. `through` is the GPU that forwards
// them, or `gpu` itself.
PxnVerdict checkMessagePxn(const Topology& topology, const PathTable& paths,
                           const PathSettings& settings, int gpu, int net);

// Whether two GPUs of one machine should talk over their NICs because that is wider than the way
// between them.
Verdict preferNet(const Topology& topology, const PathTable& paths, int gpuA, int gpuB);

// Explains the path from one node to another in a few lines: its links and the verdicts that shaped
// it (`--why A B`).
std::string explainPath(const Topology& topology, const PathTable& paths,
                        const PathSettings& settings, int from, int to);

}  // namespace unisono::topology
