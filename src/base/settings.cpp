#include "base/settings.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <variant>

#include "base/error.h"
#include "base/log.h"

extern char** environ;

namespace unisono {
namespace {

using Field = std::variant<std::string Settings::*, int64_t Settings::*, bool Settings::*>;

struct Row {
  SettingInfo info;
  Field field;
};

const std::vector<Row>& rows() {
  static const std::vector<Row> kRows = {
      {{"UNISONO_BACKEND", "host|cuda", "cuda if a GPU is there", "which device runtime to use"},
       &Settings::backend},
      {{"UNISONO_HOST_TOPOLOGY", "file", "", "topology file whose GPUs the host backend simulates"},
       &Settings::hostTopologyFile},
      {{"UNISONO_HOST_DEVICES", "number", "8", "simulated GPUs when no topology file is given"},
       &Settings::hostDevices},
      {{"UNISONO_HOST_EXECUTOR", "fibers|threads", "fibers", "how simulated GPUs run"},
       &Settings::hostExecutor},
      {{"UNISONO_HOST_SEED", "number", "-1",
        "seed of the fiber schedule; 0 or more makes a run replayable"},
       &Settings::hostSeed},
      {{"NCCL_SOCKET_IFNAME", "list", "", "interfaces for sockets: prefix, ^ excludes, = exact"},
       &Settings::socketInterface},
      {{"NCCL_SOCKET_FAMILY", "AF_INET|AF_INET6", "either", "address family of sockets"},
       &Settings::socketFamily},
      {{"NCCL_COMM_ID", "address:port", "", "where the root of the first communicator listens"},
       &Settings::commId},
      {{"NCCL_HOSTID", "text", "this host", "makes one host look like several"}, &Settings::hostId},
      {{"UNISONO_BOOTSTRAP_TIMEOUT", "seconds", "120", "how long to wait for every rank to come"},
       &Settings::bootstrapTimeoutSeconds},
      {{"NCCL_TOPO_FILE", "file", "the platform's", "topology file that detection completes"},
       &Settings::topologyFile},
      {{"NCCL_TOPO_DUMP_FILE", "file", "", "where the detected topology is written"},
       &Settings::topologyDumpFile},
      {{"NCCL_MULTI_RANK_GPU_ENABLE", "0|1", "0", "allow several ranks on one GPU"},
       &Settings::multiRankDevice},
      {{"NCCL_MIN_NCHANNELS", "number", "automatic", "fewest channels"}, &Settings::minChannels},
      {{"NCCL_MIN_CTAS", "number", "automatic", "fewest channels (newer name)"},
       &Settings::minChannels},
      {{"NCCL_MAX_NCHANNELS", "number", "automatic", "most channels"}, &Settings::maxChannels},
      {{"NCCL_MAX_CTAS", "number", "automatic", "most channels (newer name)"},
       &Settings::maxChannels},
      {{"NCCL_BUFFSIZE", "bytes", "automatic", "size of one connection's FIFO"},
       &Settings::bufferBytes},
      {{"NCCL_NTHREADS", "number", "512", "threads of a channel's block"}, &Settings::threads},
      {{"NCCL_ALGO", "list", "automatic", "algorithms that may be used"}, &Settings::algorithm},
      {{"NCCL_CUMEM_ENABLE", "0|1", "automatic", "share memory by CUDA VMM (1) or legacy IPC (0)"},
       &Settings::cuMem},
      {{"NCCL_GRAPH_FILE", "file", "", "graph file whose channels are taken instead of a search"},
       &Settings::graphFile},
      {{"NCCL_GRAPH_DUMP_FILE", "file", "", "where rank 0 writes the channel graphs of its node"},
       &Settings::graphDumpFile},
      {{"NCCL_P2P_DISABLE", "0|1", "0", "GPUs do not reach each other's memory"},
       &Settings::p2pDisable},
      {{"NCCL_P2P_LEVEL", "LOC|NVL|PIX|PXB|PHB|SYS", "by platform",
        "how far apart GPUs may be that reach each other's memory"},
       &Settings::p2pLevel},
      {{"NCCL_P2P_READ_ENABLE", "0|1", "by GPU",
        "whether receivers read from the memory of senders (1) or senders write to that of "
        "receivers (0)"},
       &Settings::p2pRead},
      {{"NCCL_NVB_DISABLE", "0|1", "0", "no way between two GPUs leads through a third one"},
       &Settings::nvbDisable},
      {{"NCCL_SHM_DISABLE", "0|1", "0", "processes do not share host memory"},
       &Settings::shmDisable},
      {{"NCCL_NET_GDR_LEVEL", "LOC|PIX|PXB|PHB|SYS", "by platform",
        "how far apart a GPU and a NIC may be that uses its memory"},
       &Settings::gdrLevel},
      {{"NCCL_NET_GDR_READ", "0|1", "by GPU", "whether NICs read GPU memory when they send"},
       &Settings::gdrRead},
      {{"NCCL_NET_GDR_C2C", "0|1", "1", "NICs reach GPU memory through a CPU that C2C joins to it"},
       &Settings::gdrC2c},
      {{"NCCL_PXN_DISABLE", "0|1", "0", "GPUs do not send to far NICs through a GPU beside them"},
       &Settings::pxnDisable},
      {{"NCCL_PXN_C2C", "0|1", "1", "such a way may lead through a CPU that C2C joins to the GPU"},
       &Settings::pxnC2c},
      {{"NCCL_MNNVL_ENABLE", "0|1|2", "2", "NVLink between hosts is used where there is one"},
       &Settings::multiNodeNvlink},
      {{"NCCL_CROSS_NIC", "0|1|2", "2",
        "whether rings may leave a node by another NIC than they enter it: never, always, where "
        "it gives more"},
       &Settings::crossNic},
  };
  return kRows;
}

int64_t parseNumber(const char* name, const char* text) {
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  auto result = std::from_chars(text, end, value);
  if (result.ec != std::errc() || result.ptr != end || text == end) {
    throw invalidArgument("{}={} is not a whole number", name, text)
        .remedy(fmt::format("Set {} to a whole number, or unset it", name));
  }
  return value;
}

void warnOfUnknownVariables() {
  static std::atomic<bool> done{false};
  if (done.exchange(true)) return;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; entry++) {
    std::string_view text = *entry;
    if (!text.starts_with("UNISONO_")) continue;
    std::string_view name = text.substr(0, text.find('='));
    bool known = false;
    for (const Row& row : rows()) known = known || name == row.info.name;
    if (!known) logWarn("{} is not a setting of Unisono and does nothing", name);
  }
}

}  // namespace

Settings settingsFromEnvironment() {
  warnOfUnknownVariables();
  Settings settings;
  for (const Row& row : rows()) {
    const char* text = std::getenv(row.info.name);
    if (text == nullptr) continue;
    if (auto* field = std::get_if<std::string Settings::*>(&row.field)) {
      settings.** field = text;
    } else if (auto* number = std::get_if<int64_t Settings::*>(&row.field)) {
      settings.** number = parseNumber(row.info.name, text);
    } else if (auto* flag = std::get_if<bool Settings::*>(&row.field)) {
      settings.** flag = parseNumber(row.info.name, text) != 0;
    }
  }
  return settings;
}

std::vector<SettingInfo> settingsTable() {
  std::vector<SettingInfo> table;
  for (const Row& row : rows()) table.push_back(row.info);
  return table;
}

}  // namespace unisono
