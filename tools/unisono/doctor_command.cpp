// SPDX-License-Identifier: Apache-2.0
#include "doctor_command.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "diagnose/report.h"
#include "diagnose/segment_view.h"

namespace unisono::doctor {
namespace {

namespace fs = std::filesystem;

constexpr int kExitShown = 0, kExitNoNccl = 1, kExitNoAccess = 2;

// A file of another process, mapped for reading.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return;
    struct stat status {};
    if (::fstat(descriptor, &status) == 0 && status.st_size > 0) {
      bytes_ = static_cast<size_t>(status.st_size);
      address_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, descriptor, 0);
      if (address_ == MAP_FAILED) address_ = nullptr;
    }
    ::close(descriptor);
  }
  ~MappedFile() {
    if (address_ != nullptr) ::munmap(address_, bytes_);
  }
  MappedFile(MappedFile&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  MappedFile& operator=(MappedFile&&) = delete;

  std::byte* address() const { return static_cast<std::byte*>(address_); }
  size_t bytes() const { return bytes_; }
  bool contains(std::string_view text) const {
    return address_ != nullptr && ::memmem(address_, bytes_, text.data(), text.size()) != nullptr;
  }

 private:
  void* address_ = nullptr;
  size_t bytes_ = 0;
};

// The copies of NCCL that are mapped into a process. Throws std::system_error if its maps cannot be
// read.
std::set<std::string> librariesOf(int pid) {
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  std::string line;
  if (!std::getline(maps, line)) {
    throw std::system_error(errno != 0 ? errno : EACCES, std::generic_category());
  }
  std::set<std::string> found;
  do {
    const size_t path = line.find('/');
    if (path == std::string::npos) continue;
    const std::string file = line.substr(path);
    const std::string name = file.substr(file.rfind('/') + 1);
    if (name.rfind("libnccl", 0) == 0 || name.rfind("libunisono", 0) == 0) found.insert(file);
  } while (std::getline(maps, line));
  return found;
}

// The tables of calls that a process has open.
std::vector<MappedFile> tablesOf(const std::string& pid) {
  std::vector<MappedFile> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc/" + pid + "/fd", error)) {
    const std::string target = fs::read_symlink(entry.path(), error).string();
    if (target.find(std::string("memfd:") + diagnose::kTableFile) == std::string::npos) continue;
    MappedFile file(entry.path());
    if (file.address() == nullptr || file.bytes() != diagnose::kSegmentBytes) continue;
    if (diagnose::isTables(file.address())) found.push_back(std::move(file));
  }
  return found;
}

// The ranks of all communicators of this host that can be read, by communicator.
using Communicators = std::map<uint64_t, std::vector<diagnose::RankView>>;

Communicators communicatorsOfHost(int64_t now) {
  Communicators all;
  std::set<std::pair<int64_t, uint64_t>> seen;  // descriptors of one table in one process
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    for (const MappedFile& file : tablesOf(name)) {
      diagnose::forEachTable(file.address(), [&](const diagnose::CallTable& table) {
        auto view = diagnose::readView(diagnose::headOf(file.address()), table, now);
        const size_t slot =
            static_cast<size_t>(reinterpret_cast<const std::byte*>(&table) - file.address());
        if (view.hasLeft || !seen.emplace(view.pid, slot).second) return;
        view.elsewhere = diagnose::waitElsewhere(file.address(), view, now);
        view.settings = diagnose::readSettings(diagnose::headOf(file.address()));
        std::vector<diagnose::RankView>& ranks = all[view.id];
        ranks.resize(static_cast<size_t>(std::max(view.ranks, view.rank + 1)));
        ranks[static_cast<size_t>(view.rank)] = std::move(view);
      });
    }
  }
  for (auto& [id, ranks] : all) {
    for (size_t rank = 0; rank < ranks.size(); rank++) ranks[rank].rank = static_cast<int>(rank);
  }
  return all;
}

void showRank(const std::vector<diagnose::RankView>& ranks, const diagnose::RankView& view,
              int64_t now, bool json) {
  const auto report = diagnose::explain(ranks, view.rank, now);
  if (report && json) {
    fmt::print("{}\n", report->json(view));
  } else if (report) {
    fmt::print("{}\n", report->text(view));
  } else if (!json) {
    fmt::print(
        "Communicator {}, rank {} of {} on device {}: in no call; {}\n",
        view.name.empty() ? "without a name" : view.name, view.rank, view.ranks, view.device,
        view.calls.empty() ? "none was made" : "the last was " + describe(view.calls.back()));
  }
}

constexpr int kMaxPid = 1 << 22;  // of Linux: /proc/sys/kernel/pid_max can be no larger

}  // namespace

CLI::App* addDoctorCommand(CLI::App& app, DoctorArguments& arguments) {
  CLI::App* command = app.add_subcommand(
      "doctor", "Show what a process that uses NCCL is doing, and why its calls do not end");
  command->add_option("pid", arguments.pid, "Process to look at")
      ->required()
      ->check(CLI::Range(1, kMaxPid));
  command->add_flag("--json", arguments.json, "Print one line of JSON for each call in progress");
  return command;
}

int runDoctor(const DoctorArguments& arguments) {
  const int pid = arguments.pid;
  if (!fs::exists(fmt::format("/proc/{}", pid))) {
    fmt::print(stderr, "unisono doctor: process {} does not exist\n", pid);
    return kExitNoAccess;
  }
  std::set<std::string> libraries;
  try {
    errno = 0;
    libraries = librariesOf(pid);
  } catch (const std::system_error& error) {
    fmt::print(stderr,
               "unisono doctor: process {} may not be looked at ({}). Run this as its user or as "
               "root\n",
               pid, error.code().message());
    return kExitNoAccess;
  }
  if (libraries.empty()) {
    fmt::print("Process {} uses no NCCL: no libnccl is mapped into it\n", pid);
    return kExitNoNccl;
  }
  if (!arguments.json) {
    for (const std::string& file : libraries) {
      const MappedFile content(file);
      const char* maker = content.address() == nullptr            ? "cannot be read"
                          : content.contains("unisonoHostMalloc") ? "Unisono"
                                                                  : "not Unisono";
      fmt::print("Process {} has loaded {} ({})\n", pid, file, maker);
    }
    if (libraries.size() > 1) fmt::print("More than one copy: calls may go to either of them\n");
  }
  const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  bool any = false;
  for (const auto& [id, ranks] : communicatorsOfHost(now)) {
    for (const diagnose::RankView& view : ranks) {
      if (!view.isKnown || view.pid != pid) continue;
      any = true;
      showRank(ranks, view, now, arguments.json);
    }
  }
  if (!any && !arguments.json) {
    fmt::print(
        "It has no communicator that can be looked at: none was made, UNISONO_HANG_SECONDS is 0, "
        "or the library is not Unisono\n");
  }
  return kExitShown;
}

}  // namespace unisono::doctor
