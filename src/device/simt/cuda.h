// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/common.h"

#define UNISONO_DEVICE __device__ __forceinline__
// One body for all callers, where inlining would multiply code. `inline`: several files have it.
#define UNISONO_DEVICE_CALL inline __device__ __noinline__
#define UNISONO_UNROLL _Pragma("unroll")
#define UNISONO_NO_UNROLL _Pragma("unroll 1")
// A constant table in device memory.
#define UNISONO_DEVICE_TABLE __device__ constexpr
#define UNISONO_TARGET cuda_target

namespace unisono::device::cuda_target {

inline constexpr int kWarpSize = 32;
// Words that a lane of protocol LL moves at a time, and lines of protocol LL128.
inline constexpr int kWordsPerPass = 4;
inline constexpr int kMaxGroups = 3;
inline constexpr int kGroupWords = 6;

// A range of whole warps of a block: workers, then a warp that waits for peers and one that posts
// to them. These two run at the same time as the workers, so that neither the polls before a slice
// nor the release after it, which waits for outstanding stores, cost the workers time. Where such
// polls are rare and nothing is released, the first and the last warp of the workers do both
// (Service::none). `barrier` is the first of three named barriers of the group (0 is the block's
// own).
enum class Service { none, warps };
UNISONO_DEVICE void syncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
class ThreadGroup {
 public:
  UNISONO_DEVICE ThreadGroup(int warps, int firstWarp, int barrier,
                             Service service = Service::warps)
      : rank_(static_cast<int>(threadIdx.x) - firstWarp * kWarpSize),
        service_(service == Service::warps ? kWarpSize : 0),
        workers_(warps * kWarpSize - 2 * service_),
        waiter_(service == Service::warps ? workers_ : 0),
        poster_(service == Service::warps ? workers_ + kWarpSize : workers_ - kWarpSize),
        barrier_(barrier),
        aborted_(abortedOf(barrier)) {
    if (rank_ == 0) *aborted_ = 0;
    syncAll();
  }
  // Among the workers.
  UNISONO_DEVICE int rank() const { return rank_; }
  UNISONO_DEVICE int size() const { return workers_; }
  UNISONO_DEVICE bool isWorker() const { return rank_ < workers_; }
  // Lane `index` of the waiting warp.
  UNISONO_DEVICE bool isWaiter(int index) const { return rank_ == waiter_ + index; }
  // Lane `index` of the posting warp.
  UNISONO_DEVICE bool isPoster(int index = 0) const { return rank_ == poster_ + index; }
  // One of those that load what the group shares: a lane of a warp of its own, while there are
  // enough warps, so that the latencies of their loads overlap.
  UNISONO_DEVICE bool isLoader(int index) const {
    const int lastWarp = (workers_ + 2 * service_) / kWarpSize - 1;
    const int warp = index < lastWarp ? index : lastWarp;
    return rank_ == warp * kWarpSize + (index - warp);
  }

  // What the waiter has seen holds for the workers after this.
  UNISONO_DEVICE void syncReady() const {
    if (rank_ < workers_ + service_) syncThreads(barrier_, workers_ + service_);
  }
  // What the workers have done may be posted after this.
  UNISONO_DEVICE void syncDone() const {
    const bool onlyWaits = rank_ >= workers_ && rank_ < workers_ + service_;
    if (!onlyWaits) syncThreads(barrier_ + 1, workers_ + service_);
  }
  UNISONO_DEVICE void syncAll() const { syncThreads(barrier_ + 2, workers_ + 2 * service_); }

  // Set by the waiter, seen by the workers after syncReady and by all after syncAll.
  UNISONO_DEVICE void setAborted() { *aborted_ = 1; }
  UNISONO_DEVICE bool aborted() const { return *aborted_ != 0; }

  // Words that the waiter leaves to the workers, seen as setAborted() is, and by the poster after
  // the next syncDone.
  UNISONO_DEVICE void setWord(int index, uint64_t value) { *wordOf(index) = value; }
  UNISONO_DEVICE uint64_t word(int index) const { return *wordOf(index); }

 private:
  UNISONO_DEVICE volatile uint64_t* wordOf(int index) const {
    __shared__ volatile uint64_t words[kMaxGroups][kGroupWords];
    return &words[barrier_ / 3][index];
  }
  UNISONO_DEVICE static volatile int* abortedOf(int barrier) {
    __shared__ volatile int flags[kMaxGroups];
    return &flags[barrier / 3];
  }

  int rank_;
  int service_;  // threads of each of the two warps that serve the workers
  int workers_;
  int waiter_, poster_;  // the first lanes of the warps that wait and post
  int barrier_;
  volatile int* aborted_;
};

// Waits until the kernels before this one in its stream have ended and what they stored is visible.
// By every thread, before anything else, of kernels that runtime::LaunchShape::startsEarly may be
// set for. Does nothing in other launches.
UNISONO_DEVICE void awaitEarlierKernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

UNISONO_DEVICE uint32_t loadRelaxed(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
UNISONO_DEVICE uint64_t loadRelaxed(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
UNISONO_DEVICE uint64_t loadAcquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
UNISONO_DEVICE void storeRelaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
UNISONO_DEVICE void storeRelaxed(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
UNISONO_DEVICE void storeRelease(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
// For the CPU, which may read the word at any time.
UNISONO_DEVICE void storeForCpu(uint64_t* address, uint64_t value) {
  storeRelaxed(address, value);
}
UNISONO_DEVICE void addForCpu(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
inline constexpr bool kLoadsMayHang = false;
// With acquire order.
UNISONO_DEVICE uint64_t exchange(uint64_t* address, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acquire.sys.global.exch.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}

// Returns the value before.
UNISONO_DEVICE uint64_t fetchAddAcquire(uint64_t* address, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acquire.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}
UNISONO_DEVICE void addRelease(uint64_t* address, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Orders what the thread, and those that a barrier puts before it, have stored before what it does
// with storeOrdered() and addOrdered() afterwards. These are for stores that need no order on a
// GPU, too: of loads whose values were used, and of earlier kernels.
UNISONO_DEVICE void releaseStores() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
UNISONO_DEVICE void storeOrdered(uint64_t* address, uint64_t value) {
  storeRelaxed(address, value);
}
UNISONO_DEVICE void addOrdered(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Orders what comes before through one address of some memory and after through another: the
// memory's own and the multicast address.
UNISONO_DEVICE void fenceAliases() {
  asm volatile("fence.proxy.alias;" ::: "memory");
}

// Instructions on multicast addresses, which GPUs before sm_90 do not have.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define UNISONO_MULTIMEM(...) asm volatile(__VA_ARGS__)
#else
#define UNISONO_MULTIMEM(...) __trap()
#endif

// For the checks of the host target.
UNISONO_DEVICE void noteRead(const void*, uint64_t) {}
UNISONO_DEVICE void noteWrite(const void*, uint64_t) {}

// Loads the word if it is wanted, else returns `otherwise`; without a branch.
UNISONO_DEVICE uint64_t loadWord(const uint64_t* address, bool wanted, uint64_t otherwise) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %2, 0;\n"
      "  @wanted ld.global.b64 %0, [%1];\n"
      "}"
      : "+l"(otherwise)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return otherwise;
}

// Loads a vector only if `wanted`, else zero. A predicate instead of a branch, so that the loads of
// several vectors are issued one after another. Without the zero, the registers would be live from
// the beginning of the function.
#define UNISONO_LOAD_VECTOR(LOAD, value, address, wanted)                                      \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      "  .reg .pred wanted;\n"                                                                 \
      "  setp.ne.s32 wanted, %5, 0;\n"                                                         \
      "  mov.b32 %0, 0;\n"                                                                     \
      "  mov.b32 %1, 0;\n"                                                                     \
      "  mov.b32 %2, 0;\n"                                                                     \
      "  mov.b32 %3, 0;\n"                                                                     \
      "  @wanted " LOAD                                                                        \
      " {%0, %1, %2, %3}, [%4];\n"                                                             \
      "}"                                                                                      \
      : "=&r"(value.word[0]), "=&r"(value.word[1]), "=&r"(value.word[2]), "=&r"(value.word[3]) \
      : "l"(address), "r"(static_cast<int>(wanted)))

UNISONO_DEVICE Vector16 loadVector(const void* address, bool wanted = true) {
  Vector16 value;
  UNISONO_LOAD_VECTOR("ld.global.L1::no_allocate.v4.u32", value, address, wanted);
  return value;
}
// Through the first-level cache, where another instruction loads the rest of the sectors.
UNISONO_DEVICE Vector16 loadVectorCached(const void* address, bool wanted) {
  Vector16 value;
  UNISONO_LOAD_VECTOR("ld.global.v4.u32", value, address, wanted);
  return value;
}
UNISONO_DEVICE void storeVector(void* address, const Vector16& value, bool wanted = true) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %5, 0;\n"
      "  @wanted st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(address),
      "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3]),
      "r"(static_cast<int>(wanted))
      : "memory");
}

// The two aligned vectors that a vector at any address is part of. Both hold bytes of it, so that
// both can be read.
struct Window {
  Vector16 low, high;
};
UNISONO_DEVICE Window loadWindow(const void* address, bool wanted) {
  const uint64_t begin = reinterpret_cast<uint64_t>(address) & ~uint64_t{15};
  const bool spans = reinterpret_cast<uint64_t>(address) % 16 != 0;
  Window window;
  window.low = loadVector(reinterpret_cast<const void*>(begin), wanted);
  window.high = loadVector(reinterpret_cast<const void*>(begin + 16), wanted && spans);
  return window;
}
// The vector `misalignment` bytes after the beginning of the window.
UNISONO_DEVICE Vector16 vectorOf(const Window& window, uint32_t misalignment) {
  uint32_t word[8];
  UNISONO_UNROLL
  for (int i = 0; i < 4; i++) {
    word[i] = window.low.word[i];
    word[i + 4] = window.high.word[i];
  }
  if (misalignment == 0) return window.low;
  UNISONO_UNROLL
  for (int i = 0; i < 6; i++) word[i] = (misalignment & 8) != 0 ? word[i + 2] : word[i];
  UNISONO_UNROLL
  for (int i = 0; i < 5; i++) word[i] = (misalignment & 4) != 0 ? word[i + 1] : word[i];
  Vector16 value;
  UNISONO_UNROLL
  for (int i = 0; i < 4; i++) {
    value.word[i] = __funnelshift_r(word[i], word[i + 1], misalignment % 4 * 8);
  }
  return value;
}
template <typename Word>
UNISONO_DEVICE void storePieces(void* address, const Vector16& value) {
  Word piece[16 / sizeof(Word)];
  memcpy(piece, &value, sizeof(piece));
  UNISONO_UNROLL
  for (unsigned i = 0; i < 16 / sizeof(Word); i++) static_cast<Word*>(address)[i] = piece[i];
}
UNISONO_DEVICE_CALL void storeUnaligned(void* address, Vector16 value) {
  const uint64_t bits = reinterpret_cast<uint64_t>(address);
  if (bits % 8 == 0) {
    storePieces<uint64_t>(address, value);
  } else if (bits % 4 == 0) {
    storePieces<uint32_t>(address, value);
  } else if (bits % 2 == 0) {
    storePieces<uint16_t>(address, value);
  } else {
    storePieces<uint8_t>(address, value);
  }
}
// To an address that need not be aligned; all lanes store to addresses of the same alignment.
UNISONO_DEVICE void storeAnywhere(void* address, const Vector16& value) {
  if (reinterpret_cast<uint64_t>(address) % 16 == 0) {
    storeVector(address, value);
  } else {
    storeUnaligned(address, value);
  }
}

// One 16-byte transaction each, on NVLink and in L2; the two 8-byte accesses, each of data and its
// flag, are all that the protocols rely on.
UNISONO_DEVICE void storeLine(Line* line, uint64_t data, uint32_t flag) {
  const uint64_t high = uint64_t{flag} << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(line),
               "l"((data & 0xffffffffu) | high), "l"(data >> 32 | high)
               : "memory");
}
// Without a branch.
UNISONO_DEVICE void storeLineIf(bool wanted, Line* line, uint64_t data, uint32_t flag) {
  const uint64_t high = uint64_t{flag} << 32;
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %3, 0;\n"
      "  @wanted st.relaxed.sys.global.v2.u64 [%0], {%1, %2};\n"
      "}" ::"l"(line),
      "l"((data & 0xffffffffu) | high), "l"(data >> 32 | high), "r"(static_cast<int>(wanted))
      : "memory");
}
UNISONO_DEVICE Line loadLine(const Line* line) {
  uint64_t first, second;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(line)
               : "memory");
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
          static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)};
}

// Orders between threads that only data carry: `dependent` is for the host target.
UNISONO_DEVICE void storeLine(Line* line, uint64_t data, uint32_t flag, bool dependent) {
  (void)dependent;
  storeLine(line, data, flag);
}
UNISONO_DEVICE Line loadLine(const Line* line, bool dependent) {
  (void)dependent;
  return loadLine(line);
}

inline constexpr int kLineLanes = 8;
inline constexpr int kLinesPerPass = 4;
inline constexpr int kLinesPerReduction = 2;
inline constexpr int kLaneWords = kLineWords / kLineLanes;

// Lane `lane` of a line's kLineLanes, all in one warp and in step: their 16-byte stores become one
// of 128 bytes, which NVLink and L2 keep whole. The last word of the last lane is the flag.
UNISONO_DEVICE void storeLine128(uint64_t* line, int lane, const uint64_t* word) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(line + lane * kLaneWords),
               "l"(word[0]), "l"(word[1])
               : "memory");
}
UNISONO_DEVICE void loadLine128(const uint64_t* line, int lane, uint64_t* word) {
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(word[0]), "=l"(word[1])
               : "l"(line + lane * kLaneWords)
               : "memory");
}

// For whole warps: until `ready` is true for every lane; false for all of them after an abort.
template <typename Ready>
UNISONO_DEVICE bool waitUntilAll(const uint32_t* abortFlag, const WaitSubject& subject,
                                 Ready ready) {
  (void)subject;
  constexpr unsigned kWarp = 0xffffffffu;
  constexpr uint32_t kPollsPerLook = 4096;
  uint32_t polls = 0;
  while (__all_sync(kWarp, ready()) == 0) {
    if (++polls % kPollsPerLook == 0 && __any_sync(kWarp, loadRelaxed(abortFlag) != 0) != 0) {
      return false;
    }
  }
  return true;
}
UNISONO_DEVICE void syncWarp() {
  __syncwarp();
}

template <typename Ready>
UNISONO_DEVICE bool waitUntil(const uint32_t* abortFlag, const WaitSubject& subject, Ready ready) {
  (void)subject;
  // The abort flag lies in host memory: look seldom.
  constexpr uint32_t kPollsPerLook = 4096;
  uint32_t polls = 0;
  while (!ready()) {
    if (++polls % kPollsPerLook == 0 && loadRelaxed(abortFlag) != 0) return false;
  }
  return true;
}
UNISONO_DEVICE uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
// For a wait that is short and must not end before its condition holds, unless the peer has died:
// the memory that it stored to is safe then. That is when its process has ended, or at the latest
// after kLongestShortWait.
template <typename Ready>
UNISONO_DEVICE void waitWhileAlive(const uint32_t* abortFlag, const WaitSubject& subject,
                                   Ready ready) {
  constexpr uint32_t kPollsPerLook = 4096;
  const bool isEndable = subject.peer >= 0 && subject.peer < kEndableRanks;
  const uint64_t begin = nanoseconds();
  uint32_t polls = 0;
  while (!ready() && nanoseconds() - begin < kLongestShortWait) {
    if (++polls % kPollsPerLook != 0 || !isEndable) continue;
    if ((loadRelaxed(abortFlag + endedWordOf(subject.peer)) & endedBitOf(subject.peer)) != 0) break;
  }
}

}  // namespace unisono::device::cuda_target
