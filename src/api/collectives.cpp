// SPDX-License-Identifier: Apache-2.0
#include "api/aliases.h"
#include "api/arguments.h"
#include "api/boundary.h"
#include "comm/group.h"

using namespace unisono;
using api::checkBuffer;
using api::checkCount;
using api::checkRank;
using api::checkReduction;
using api::checkType;
using comm::CallGroup;
using comm::Communicator;
using device::DataType;
using device::Reduction;
using device::ReductionSpec;
using plan::Call;

namespace {

// Checks a call and adds it to the thread's group, or runs it if there is none. `makeTask` checks
// the arguments for the communicator and returns the plan::Task.
template <typename MakeTask>
ncclResult_t enqueue(ncclComm_t id, cudaStream_t stream, MakeTask makeTask) {
  return api::guarded([&]() -> ncclResult_t {
    CallGroup& group = CallGroup::current();
    group.start();
    group.attempt([&] { group.add(id, stream, makeTask); });
    return group.end() ? ncclSuccess : ncclInProgress;
  });
}

ReductionSpec movement(DataType type) {
  return {type, Reduction::sum, false, 0};
}

bool isOpen(const runtime::PointerInfo& info) {
  return info.openToPeers;
}

}  // namespace

extern "C" {

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, 1, type);
    const ReductionSpec reduction = checkReduction(communicator, op, type);
    plan::Task task{Call::allReduce, sendbuff, recvbuff, count, reduction, 0};
    task.inputIsOpen = isOpen(checkBuffer(communicator, sendbuff, count, type, "sendbuff"));
    task.outputIsOpen = isOpen(checkBuffer(communicator, recvbuff, count, type, "recvbuff"));
    return task;
  });
}

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, 1, type);
    checkRank(communicator, root, "root");
    const ReductionSpec reduction = checkReduction(communicator, op, type);
    plan::Task task{Call::reduce, sendbuff, recvbuff, count, reduction, root};
    task.inputIsOpen = isOpen(checkBuffer(communicator, sendbuff, count, type, "sendbuff"));
    if (communicator.rank() == root) checkBuffer(communicator, recvbuff, count, type, "recvbuff");
    return task;
  });
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, 1, type);
    checkRank(communicator, root, "root");
    if (communicator.rank() == root) checkBuffer(communicator, sendbuff, count, type, "sendbuff");
    const bool open = isOpen(checkBuffer(communicator, recvbuff, count, type, "recvbuff"));
    return plan::Task{Call::broadcast, sendbuff, recvbuff, count, movement(type), root, open};
  });
}

ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, 1, type);
    checkRank(communicator, root, "root");
    const bool open = isOpen(checkBuffer(communicator, buff, count, type, "buff"));
    return plan::Task{Call::broadcast, buff, buff, count, movement(type), root, open};
  });
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(recvcount, communicator.ranks(), type);
    const ReductionSpec reduction = checkReduction(communicator, op, type);
    plan::Task task{Call::reduceScatter, sendbuff, recvbuff, recvcount, reduction, 0};
    task.inputIsOpen = isOpen(checkBuffer(communicator, sendbuff, recvcount, type, "sendbuff"));
    checkBuffer(communicator, recvbuff, recvcount, type, "recvbuff");
    return task;
  });
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(sendcount, communicator.ranks(), type);
    checkBuffer(communicator, sendbuff, sendcount, type, "sendbuff");
    const bool open = isOpen(checkBuffer(communicator, recvbuff, sendcount, type, "recvbuff"));
    return plan::Task{Call::allGather, sendbuff, recvbuff, sendcount, movement(type), 0, open};
  });
}

ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, communicator.ranks(), type);
    checkBuffer(communicator, sendbuff, count, type, "sendbuff");
    const bool open = isOpen(checkBuffer(communicator, recvbuff, count, type, "recvbuff"));
    return plan::Task{Call::allToAll, sendbuff, recvbuff, count, movement(type), 0, open};
  });
}

ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, communicator.ranks(), type);
    checkRank(communicator, root, "root");
    checkBuffer(communicator, sendbuff, count, type, "sendbuff");
    bool open = false;
    if (communicator.rank() == root) {
      open = isOpen(checkBuffer(communicator, recvbuff, count, type, "recvbuff"));
    }
    return plan::Task{Call::gather, sendbuff, recvbuff, count, movement(type), root, open};
  });
}

ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, communicator.ranks(), type);
    checkRank(communicator, root, "root");
    if (communicator.rank() == root) checkBuffer(communicator, sendbuff, count, type, "sendbuff");
    const bool open = isOpen(checkBuffer(communicator, recvbuff, count, type, "recvbuff"));
    return plan::Task{Call::scatter, sendbuff, recvbuff, count, movement(type), root, open};
  });
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, 1, type);
    checkRank(communicator, peer, "peer");
    checkBuffer(communicator, sendbuff, count, type, "sendbuff");
    return plan::Task{Call::send, sendbuff, nullptr, count, movement(type), peer};
  });
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, [=](const Communicator& communicator) {
    const DataType type = checkType(datatype);
    checkCount(count, 1, type);
    checkRank(communicator, peer, "peer");
    const bool open = isOpen(checkBuffer(communicator, recvbuff, count, type, "recvbuff"));
    return plan::Task{Call::receive, nullptr, recvbuff, count, movement(type), peer, open};
  });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  return api::guarded([&] {
    api::checkNotNull(op, "op");
    api::checkNotNull(scalar, "scalar");
    const DataType type = checkType(datatype);
    if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate) {
      throw invalidArgument("residence must be 0 or 1, got {}", static_cast<int>(residence))
          .remedy("Pass ncclScalarDevice or ncclScalarHostImmediate");
    }
    const auto communicator = comm::communicatorOf(comm);
    const bool onDevice = residence == ncclScalarDevice;
    if (onDevice) checkBuffer(*communicator, scalar, 1, type, "scalar");
    const int index = communicator->addReduction(
        {type, onDevice,
         onDevice ? reinterpret_cast<uint64_t>(scalar) : api::scalarBits(scalar, type)});
    *op = static_cast<ncclRedOp_t>(static_cast<int>(ncclNumOps) + index);
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return api::guarded([&] {
    const auto communicator = comm::communicatorOf(comm);
    communicator->removeReduction(static_cast<int>(op) - static_cast<int>(ncclNumOps));
  });
}

}  // extern "C"

UNISONO_ALIAS(ncclAllReduce);
UNISONO_ALIAS(ncclReduce);
UNISONO_ALIAS(ncclBroadcast);
UNISONO_ALIAS(ncclBcast);
UNISONO_ALIAS(ncclReduceScatter);
UNISONO_ALIAS(ncclAllGather);
UNISONO_ALIAS(ncclAlltoAll);
UNISONO_ALIAS(ncclGather);
UNISONO_ALIAS(ncclScatter);
UNISONO_ALIAS(ncclSend);
UNISONO_ALIAS(ncclRecv);
UNISONO_ALIAS(ncclRedOpCreatePreMulSum);
UNISONO_ALIAS(ncclRedOpDestroy);
