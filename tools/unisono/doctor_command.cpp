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
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "diagnose/outside_inquiries.h"
#include "diagnose/report.h"
#include "diagnose/segment_view.h"

namespace unisono::doctor {
namespace {

namespace fs = std::filesystem;

constexpr int kExitShown = 0, kExitNoNccl = 1, kExitNoAccess = 2;

// A file of another process, mapped for reading.
class MappedFile {
 public:
  enum class Access { read, write };
  explicit MappedFile(const fs::path& path, Access access = Access::read) {
    const bool writes = access == Access::write;
    const int descriptor = ::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (descriptor < 0) return;
    struct stat status {};
    if (::fstat(descriptor, &status) == 0 && status.st_size > 0) {
      bytes_ = static_cast<size_t>(status.st_size);
      address_ = ::mmap(nullptr, bytes_, writes ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                        descriptor, 0);
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

// A rank whose table can be read.
struct LocalRank {
  diagnose::RankView view;
  uint64_t host;  // as RankPlace::host
};

std::vector<LocalRank> readHost(int64_t now) {
  std::vector<LocalRank> all;
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
        all.push_back({std::move(view), table.host.load(std::memory_order_acquire)});
      });
    }
  }
  return all;
}

// The communicators of a process, each with the views of its ranks. A view is not known, and has no
// place, while nothing was read or told of a rank.
class Communicators {
 public:
  // `anyHost`: also takes the tables of processes that share no memory with this one, such as those
  // of other containers.
  Communicators(const std::vector<LocalRank>& local, int pid, bool anyHost) : pid_(pid) {
    std::map<uint64_t, std::set<uint64_t>> hosts;
    for (const LocalRank& rank : local) {
      if (rank.view.pid != pid) continue;
      hosts[rank.view.id].insert(rank.host);
      own_.emplace(rank.view.id, rank.view.rank);
    }
    for (const LocalRank& rank : local) {
      const auto own = hosts.find(rank.view.id);
      if (own != hosts.end() && (anyHost || own->second.contains(rank.host))) add(rank.view);
    }
  }

  void add(const diagnose::RankView& view) {
    const bool isOurs =
        std::ranges::any_of(own_, [&](const auto& own) { return own.first == view.id; });
    if (!isOurs) return;
    std::vector<diagnose::RankView>& ranks = ranks_[view.id];
    const size_t before = ranks.size();
    ranks.resize(std::max(before, static_cast<size_t>(std::max(view.ranks, view.rank + 1))));
    for (size_t rank = before; rank < ranks.size(); rank++) {
      ranks[rank].rank = static_cast<int>(rank);
      ranks[rank].id = view.id;
    }
    diagnose::RankView& known = ranks[static_cast<size_t>(view.rank)];
    if (!known.isKnown) known = view;
  }

  const std::map<uint64_t, std::vector<diagnose::RankView>>& all() const { return ranks_; }
  // Whether it is a rank of the process.
  bool isOwn(const diagnose::RankView& view) const { return own_.contains({view.id, view.rank}); }
  bool isComplete() const {
    return std::ranges::all_of(ranks_, [](const auto& entry) {
      return std::ranges::all_of(entry.second, &diagnose::RankView::isKnown);
    });
  }
  // Processes that can be asked for the ranks that are missing: this one, then a neighbour.
  std::vector<int64_t> informants() const {
    std::vector<int64_t> found;
    for (const bool own : {true, false}) {
      for (const auto& [id, ranks] : ranks_) {
        for (const diagnose::RankView& view : ranks) {
          const bool isUsable = view.isKnown && !view.isSilent() && (view.pid == pid_) == own;
          if (!isUsable || std::ranges::find(found, view.pid) != found.end()) continue;
          found.push_back(view.pid);
          break;
        }
      }
    }
    if (found.size() > kMostInformants) found.resize(kMostInformants);
    return found;
  }

 private:
  static constexpr size_t kMostInformants = 2;
  const int pid_;
  std::map<uint64_t, std::vector<diagnose::RankView>> ranks_;
  std::set<std::pair<uint64_t, int>> own_;  // communicator and rank
};

int64_t steadyNow() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

constexpr std::chrono::milliseconds kAnswerLimit{2500}, kAnswerPause{20};

// What a process says of the ranks of all hosts; nothing if it says nothing in time.
std::optional<std::vector<diagnose::RankView>> ask(int64_t pid) {
  const std::string descriptors = fmt::format("/proc/{}/fd", pid);
  std::error_code error;
  const auto forEachFile = [&](std::string_view name, const auto& visit) {
    for (const auto& entry : fs::directory_iterator(descriptors, error)) {
      const std::string target = fs::read_symlink(entry.path(), error).string();
      if (target.find(fmt::format("memfd:{}", name)) == std::string::npos) continue;
      if (visit(entry.path())) return;
    }
  };
  uint64_t number = 0;
  forEachFile(diagnose::kTableFile, [&](const fs::path& path) {
    const MappedFile file(path, MappedFile::Access::write);
    const bool isTable = file.address() != nullptr && file.bytes() == diagnose::kSegmentBytes &&
                         diagnose::isTables(file.address());
    if (isTable) number = diagnose::headOf(file.address()).inquiries.fetch_add(1) + 1;
    return isTable;
  });
  if (number == 0) return std::nullopt;
  std::optional<std::vector<diagnose::RankView>> answer;
  const auto end = std::chrono::steady_clock::now() + kAnswerLimit;
  while (!answer && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kAnswerPause);
    forEachFile(diagnose::kAnswerFile, [&](const fs::path& path) {
      const MappedFile file(path);
      if (file.address() == nullptr) return false;
      answer = diagnose::readAnswerFile({file.address(), file.bytes()}, number, steadyNow());
      return answer.has_value();
    });
  }
  return answer;
}

// The communicators of a process, with the ranks of other hosts as far as a process tells of them.
// Sets `silent` to those that were asked and did not answer.
Communicators lookAt(int pid, std::vector<int64_t>& silent) {
  const std::vector<LocalRank> local = readHost(steadyNow());
  Communicators communicators(local, pid, false);
  if (communicators.isComplete()) return communicators;
  for (const int64_t informant : communicators.informants()) {
    if (const auto answer = ask(informant)) {
      for (const diagnose::RankView& view : *answer) communicators.add(view);
      return communicators;
    }
    silent.push_back(informant);
  }
  return Communicators(local, pid, true);
}

// Who did not answer, and of whom nobody has told.
std::string describeMissing(const std::vector<diagnose::RankView>& ranks) {
  constexpr size_t kMost = 16;
  std::string text;
  size_t count = 0;
  std::vector<int> untold;
  for (const diagnose::RankView& view : ranks) {
    if (view.isKnown) continue;
    if (view.place.empty()) {
      untold.push_back(view.rank);
    } else if (++count <= kMost) {
      text += fmt::format("No answer from rank {} ({})\n", view.rank, view.place);
    }
  }
  if (count > kMost) text += fmt::format("No answer from {} more ranks\n", count - kMost);
  if (!untold.empty()) {
    text += fmt::format("Not shown, because no process reported them: {}\n",
                        diagnose::rankList(untold));
  }
  return text;
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
      "doctor",
      "Show what a process that uses NCCL is doing, and why its calls do not end. Exit status: 0 "
      "shown, 1 it uses no NCCL, 2 it does not exist or cannot be inspected");
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
               "unisono doctor: cannot inspect process {} ({}). Run this as its user or as "
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
  std::vector<int64_t> silent;
  const Communicators communicators = lookAt(pid, silent);
  const int64_t now = steadyNow();
  std::string missing;
  for (const auto& [id, ranks] : communicators.all()) {
    for (const diagnose::RankView& view : ranks) {
      if (communicators.isOwn(view)) showRank(ranks, view, now, arguments.json);
    }
    missing += describeMissing(ranks);
  }
  for (const int64_t each : silent) {
    missing += fmt::format(
        "Process {} was asked for the ranks of other hosts and did not answer in {} s\n", each,
        std::chrono::duration<double>(kAnswerLimit).count());
  }
  fmt::print(arguments.json ? stderr : stdout, "{}", missing);
  const bool any = !communicators.all().empty();
  if (!any && !arguments.json) {
    fmt::print(
        "It has no communicator that can be shown: none was made, UNISONO_HANG_SECONDS is 0, "
        "or the library is not Unisono\n");
  }
  return kExitShown;
}

}  // namespace unisono::doctor
