// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "base/error.h"
#include "device/collective/collective.h"
#include "device/collective/direct_group.h"
#include "device/collective/direct_messages.h"
#include "device/collective/direct_wide.h"
#include "device/collective/nvls.h"
#include "device/collective/send_receive.h"
#include "device/collective/wide_messages.h"
#include "device/kernels.h"
#include "device/protocol/barrier.h"
#include "device/protocol/window.h"

namespace unisono::device {
namespace {

using namespace host_target;

template <Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>
void collective(const void* arguments, const runtime::HostGroupContext& context) {
  ThreadGroup group(context);
  Block block{};
  collectiveBlock<kAlgorithm, kProtocol, kCopies>(
      group, block, context.block, context.group,
      *static_cast<const CollectiveArguments*>(arguments));
}

template <typename View>
void heads(const void* arguments, const runtime::HostGroupContext& context) {
  ThreadGroup group(context);
  MulticastBlock block{};
  headBlock<View>(group, block, context.block, context.group,
                  *static_cast<const CollectiveArguments*>(arguments));
}

void sendReceive(const void* arguments, const runtime::HostGroupContext& context) {
  ThreadGroup group(context);
  const auto& launch = *static_cast<const SendReceiveArguments*>(arguments);
  Block block{};
  messageBlock(group, block, context.group == 0, context.block, launch);
}

// A launch of the direct family. The roles of a group are the lanes of a block.
class DirectBlock {
 public:
  DirectBlock(const uint32_t* launchFlag, const runtime::HostGroupContext& context,
              int firstBlock = 0)
      : group_(context),
        at_{context.block - firstBlock, context.blocks - firstBlock, context.role, context.roles} {
    if (group_.isPoster() && loadRelaxed(launchFlag) != 0) group_.setAborted();
    group_.syncAll();
  }

  void runGroup(const DirectArguments& arguments) {
    directGroup(
        arguments, at_, [this] { return group_.aborted(); }, [this] { group_.syncAll(); });
  }
  void runStream(const MessagesArguments& arguments, bool sends) {
    directStream(
        arguments, at_.block, sends, at_, [this] { return group_.aborted(); },
        [this] { group_.syncAll(); });
  }
  template <typename R>
  void runWide(const WideArguments& arguments) {
    directWide<R>(
        arguments, at_, arguments.memory.buffers + at_.block * (arguments.ranks - 1),
        [this] { return group_.aborted(); }, [this] { group_.syncAll(); });
  }
  // Of blocks of which `firstBlock` others come before.
  template <typename Arguments>
  void runTeam(const Arguments& arguments, const runtime::HostGroupContext& context,
               int firstBlock) {
    const std::atomic_ref ended(*static_cast<uint32_t*>(context.blockShared));
    wideTeam(
        arguments, at_, context.group, firstBlock, [this] { return group_.aborted(); },
        [this] { group_.syncAll(); },
        [&] {
          return at_.lane == 0 && ended.fetch_add(1) + 1 == static_cast<uint32_t>(context.groups);
        });
  }
  template <typename Ranks, typename Combine>
  static void runCall(DirectBlock& block, const DirectCallArguments& call) {
    directCall<Ranks, Combine>(
        call, block.at_, [&] { return block.group_.aborted(); }, [&] { block.group_.syncAll(); });
  }

 private:
  ThreadGroup group_;
  DirectLane at_;
};

template <typename Ranks>
void directCallOf(DirectBlock& block, const DirectCallArguments& call) {
  using Body = void (*)(DirectBlock&, const DirectCallArguments&);
  static constexpr auto kBodies = makeReductionTable<Body>(
      []<typename R>() -> Body { return &DirectBlock::runCall<Ranks, R>; });
  const DirectWork& work = call.work[0];
  if (work.reduces) {
    kBodies.of(work.reduction)(block, call);
  } else {
    DirectBlock::runCall<Ranks, DirectCopy>(block, call);
  }
}

void direct(const void* arguments, const runtime::HostGroupContext& context) {
  const auto& launch = *static_cast<const DirectArguments*>(arguments);
  DirectBlock block(launch.launchFlag, context);
  // All that a launch of one work passes.
  const auto& call = reinterpret_cast<const DirectCallArguments&>(launch);
  if (launch.works > 1) {
    block.runGroup(launch);
  } else if (launch.ranks == 2) {
    directCallOf<DirectRanks<2, true>>(block, call);
  } else {
    directCallOf<DirectRanks<4, false>>(block, call);
  }
}

void messages(const void* arguments, const runtime::HostGroupContext& context) {
  const auto& launch = *static_cast<const MessagesArguments*>(arguments);
  const bool sends = context.group == 0;
  if (context.block >= launch.firstWideBlock()) {
    DirectBlock block(launch.launchFlag, context, launch.firstWideBlock());
    return block.runTeam(launch, context, launch.firstWideBlock());
  }
  if (context.group >= kSendReceiveGroups) return;
  if (context.block >= launch.channels) {
    DirectBlock(launch.launchFlag, context, launch.channels).runStream(launch, sends);
    return;
  }
  ThreadGroup group(context);
  Block block{};
  messageBlock(group, block, sends, context.block, launch);
}

void wideMessages(const void* arguments, const runtime::HostGroupContext& context) {
  const auto& launch = *static_cast<const WideMessagesArguments*>(arguments);
  DirectBlock(launch.launchFlag, context).runTeam(launch, context, 0);
}

template <typename R>
void directWideWork(const void* arguments, const runtime::HostGroupContext& context) {
  const auto& launch = *static_cast<const WideArguments*>(arguments);
  DirectBlock(launch.launchFlag, context).runWide<R>(launch);
}

void barrier(const void* arguments, const runtime::HostGroupContext& context) {
  if (context.role != 0) return;
  const auto& launch = *static_cast<const BarrierArguments*>(arguments);
  markStart(launch.mark, 0, 0);
  for (int peer = 0; peer < launch.ranks - 1; peer++) arriveAt(launch, peer);
  for (int peer = 0; peer < launch.ranks - 1; peer++) awaitArrival(launch, peer);
  markEnd(launch.mark, 0, 0);
}

void change(const void* arguments, const runtime::HostGroupContext& context) {
  if (context.role == 0) changeWindow(*static_cast<const ChangeWindowArguments*>(arguments));
}

void stamp(const void* arguments, const runtime::HostGroupContext& context) {
  if (context.role == 0) stampReplay(*static_cast<const StampArguments*>(arguments));
}

}  // namespace

namespace {

template <Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>
const runtime::Kernel& collectiveKernelOf() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"collective",
                                      collectiveCudaFunction(kAlgorithm, kProtocol, kCopies),
                                      collective<kAlgorithm, kProtocol, kCopies>};
#else
  static const runtime::Kernel kernel{"collective", nullptr,
                                      collective<kAlgorithm, kProtocol, kCopies>};
#endif
  return kernel;
}

}  // namespace

const runtime::Kernel& collectiveKernel(Algorithm algorithm, Protocol protocol, bool copies) {
  const runtime::Kernel* found = nullptr;
  forEachCollectiveKernel([&]<Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>() {
    if (algorithm != kAlgorithm || protocol != kProtocol || copies != kCopies) return;
    found = &collectiveKernelOf<kAlgorithm, kProtocol, kCopies>();
  });
  if (found == nullptr) throw internalError("A work has an algorithm or protocol without a kernel");
  return *found;
}

const runtime::Kernel& headKernel(Algorithm algorithm) {
#ifdef UNISONO_CUDA
#ifdef UNISONO_CUDA_MULTICAST
  static const runtime::Kernel multicast{"multicast", multicastCudaFunction(),
                                         heads<MulticastView>};
#else
  static const runtime::Kernel multicast{"multicast", nullptr, heads<MulticastView>};
#endif
  static const runtime::Kernel direct{"collnet-direct", collNetDirectCudaFunction(),
                                      heads<MembersView>};
#else
  static const runtime::Kernel multicast{"multicast", nullptr, heads<MulticastView>};
  static const runtime::Kernel direct{"collnet-direct", nullptr, heads<MembersView>};
#endif
  return usesMulticast(algorithm) ? multicast : direct;
}

const runtime::Kernel& sendReceiveKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"send-receive", sendReceiveCudaFunction(), sendReceive};
#else
  static const runtime::Kernel kernel{"send-receive", nullptr, sendReceive};
#endif
  return kernel;
}

const runtime::Kernel& messagesKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"messages", messagesCudaFunction(), messages};
#else
  static const runtime::Kernel kernel{"messages", nullptr, messages};
#endif
  return kernel;
}

const runtime::Kernel& wideMessagesKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"messages", wideMessagesCudaFunction(), wideMessages};
#else
  static const runtime::Kernel kernel{"messages", nullptr, wideMessages};
#endif
  return kernel;
}

namespace {

using KernelTable = runtime::Kernel[kDataTypes][kReductions];

const runtime::Kernel& kernelOf(const KernelTable& table, const ReductionSpec& spec) {
  return table[static_cast<int>(spec.type)][static_cast<int>(spec.reduction)];
}

// The kernels of launches over LL128.
struct WideKernels {
  runtime::Kernel copy{"direct", nullptr, directWideWork<DirectCopy>};
  KernelTable reduction;

  WideKernels() {
    using Body = void (*)(const void*, const runtime::HostGroupContext&);
    static constexpr auto kBodies =
        makeReductionTable<Body>([]<typename R>() -> Body { return directWideWork<R>; });
#ifdef UNISONO_CUDA
    copy.cudaFunction = directWideCopyCudaFunction();
#endif
    for (int t = 0; t < kDataTypes; t++) {
      for (int r = 0; r < kReductions; r++) {
        const ReductionSpec spec{static_cast<DataType>(t), static_cast<Reduction>(r), false, 0};
        reduction[t][r] = {"direct", nullptr, kBodies.of(spec)};
#ifdef UNISONO_CUDA
        reduction[t][r].cudaFunction = directWideReductionCudaFunction(spec);
#endif
      }
    }
  }

  static const WideKernels& instance() {
    static const WideKernels kernels;
    return kernels;
  }
};

}  // namespace

const runtime::Kernel& directWideKernel(const DirectWork& work) {
  const WideKernels& kernels = WideKernels::instance();
  return work.reduces ? kernelOf(kernels.reduction, work.reduction) : kernels.copy;
}

const runtime::Kernel& barrierKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"barrier", barrierCudaFunction(), barrier};
#else
  static const runtime::Kernel kernel{"barrier", nullptr, barrier};
#endif
  return kernel;
}

const runtime::Kernel& changeWindowKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"change-window", changeWindowCudaFunction(), change};
#else
  static const runtime::Kernel kernel{"change-window", nullptr, change};
#endif
  return kernel;
}

const runtime::Kernel& stampKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"stamp", stampCudaFunction(), stamp};
#else
  static const runtime::Kernel kernel{"stamp", nullptr, stamp};
#endif
  return kernel;
}

namespace {

// The kernels of launches of one work, for some number of ranks.
struct DirectKernels {
  runtime::Kernel copy{"direct", nullptr, direct};
  KernelTable reduction;

  explicit DirectKernels(int ranks) {
    (void)ranks;
    for (int t = 0; t < kDataTypes; t++) {
      for (int r = 0; r < kReductions; r++) {
        reduction[t][r] = copy;
#ifdef UNISONO_CUDA
        reduction[t][r].cudaFunction = directReductionCudaFunction(
            ranks, {static_cast<DataType>(t), static_cast<Reduction>(r), false, 0});
#endif
      }
    }
#ifdef UNISONO_CUDA
    copy.cudaFunction = directCopyCudaFunction(ranks);
#endif
  }

  // By the number of ranks; directReductionCudaFunction() knows which share their kernels.
  static const DirectKernels& of(int ranks) {
    static const std::vector<DirectKernels> kernels = [] {
      std::vector<DirectKernels> all;
      for (int r = 0; r <= kDirectMaxRanks; r++) all.emplace_back(r);
      return all;
    }();
    return kernels[static_cast<size_t>(ranks)];
  }
};

const runtime::Kernel& directGroupKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"direct", directGroupCudaFunction(), direct};
#else
  static const runtime::Kernel kernel{"direct", nullptr, direct};
#endif
  return kernel;
}

}  // namespace

const runtime::Kernel& directKernel(const DirectArguments& arguments) {
  if (arguments.works > 1) return directGroupKernel();
  const DirectKernels& kernels = DirectKernels::of(arguments.ranks);
  const DirectWork& work = arguments.work[0];
  return work.reduces ? kernelOf(kernels.reduction, work.reduction) : kernels.copy;
}

std::vector<const runtime::Kernel*> kernelsOf(int localRanks) {
  std::vector<const runtime::Kernel*> kernels{&sendReceiveKernel(), &messagesKernel(),
                                              &changeWindowKernel(), &stampKernel(),
                                              &barrierKernel()};
  forEachCollectiveKernel([&]<Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>() {
    kernels.push_back(&collectiveKernelOf<kAlgorithm, kProtocol, kCopies>());
  });
  if (localRanks < 2 || localRanks > kDirectMaxRanks) return kernels;
  const DirectKernels& direct = DirectKernels::of(localRanks);
  kernels.push_back(&direct.copy);
  kernels.push_back(&directGroupKernel());
  const WideKernels& wide = WideKernels::instance();
  kernels.push_back(&wide.copy);
  kernels.push_back(&wideMessagesKernel());
  for (int t = 0; t < kDataTypes; t++) {
    for (int r = 0; r < kReductions; r++) {
      if (isReduction(static_cast<DataType>(t), static_cast<Reduction>(r))) {
        kernels.push_back(&direct.reduction[t][r]);
        kernels.push_back(&wide.reduction[t][r]);
      }
    }
  }
  return kernels;
}

}  // namespace unisono::device
