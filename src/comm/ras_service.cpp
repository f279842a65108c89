// SPDX-License-Identifier: Apache-2.0
#include "comm/ras_service.h"

#include <nccl.h>
#include <strings.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "bootstrap/reactor.h"
#include "diagnose/ras_report.h"
#include "diagnose/watchdog.h"

namespace unisono::comm {
namespace {

using bootstrap::Listener;
using bootstrap::Poller;
using bootstrap::Reactor;
using bootstrap::Socket;

constexpr const char* kDefaultAddress = "127.0.0.1:28028";
constexpr const char* kVariable = "NCCL_RAS_ADDR";
constexpr int kProtocol = 2;
constexpr size_t kMostClients = 64, kLongestCommand = 1024;
constexpr size_t kMaxUnreadBytes = 64 << 10;  // of answers that a client does not read

std::string ncclVersion() {
  return fmt::format("{}.{}.{}", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
}

// Whether `command` begins with `word`, in any case; then `rest` is what follows it.
bool beginsWith(const std::string& command, const char* word, std::string& rest) {
  const size_t length = std::char_traits<char>::length(word);
  if (::strncasecmp(command.c_str(), word, length) != 0) return false;
  rest = command.substr(length);
  return true;
}

// For processes that do not answer, in ns. Some clients that set none wait for a second.
constexpr int64_t kDefaultTimeout = 700'000'000;

// The nanoseconds of a number of seconds. 0, which is none in NCCL, is a year, as is all above.
std::optional<int64_t> parseTimeout(const std::string& seconds) {
  constexpr int64_t kMost = 365 * 86'400;
  const char* end = seconds.data() + seconds.size();
  int64_t value = 0;
  const auto [read, error] = std::from_chars(seconds.data(), end, value);
  if (read != end || error == std::errc::invalid_argument || value < 0) return std::nullopt;
  if (error == std::errc::result_out_of_range || value == 0) value = kMost;
  return std::min(value, kMost) * 1'000'000'000;
}

class RasService final : public Reactor::Handler {
 public:
  explicit RasService(const std::string& address)
      : listener_(bootstrap::parseAddress(address.empty() ? kDefaultAddress : address,
                                          bootstrap::AddressFamily::any, kVariable),
                  bootstrap::Wait(std::chrono::milliseconds(0), notAborted_)),
        number_(Reactor::ofThisProcess().add(*this)) {
    Reactor::ofThisProcess().watch(number_, listener_.descriptor(), Poller::Interest::read);
    logInfo("RAS clients are answered at {}", listener_.address().text());
  }

 private:
  struct Client {
    Socket socket;
    uint64_t number;
    std::string input, output;
    bool json = false, ends = false;
    int64_t timeout = kDefaultTimeout;                   // in ns
    std::shared_ptr<diagnose::JobInquiry> inquiry = {};  // whose result it waits for
    bool verbose = false;
    bool monitors = false;      // is told of events
    bool isSubscribed = false;  // to those that are there
    bool isCurrent = false;     // it knows what the last look has found
  };

  // Called by the thread of the reactor, which goes on with other sockets whatever happens here.
  void serve(int descriptor) override {
    const bool accepts = descriptor == listener_.descriptor();
    try {
      if (accepts) return accept();
      const auto client = clients_.find(descriptor);
      if (client == clients_.end() || talk(client->second)) return;
    } catch (const std::exception& error) {
      logInfo("A RAS client is not answered: {}", error.what());
    }
    Reactor::ofThisProcess().forget(descriptor);
    if (!accepts) {
      clients_.erase(descriptor);
      return;
    }
    // No descriptor is free: the queue stays as it is until the next tick.
    paused_ = true;
    Reactor::ofThisProcess().requestTick();
  }
  void tick() override {
    if (std::exchange(paused_, false)) {
      Reactor::ofThisProcess().watch(number_, listener_.descriptor(), Poller::Interest::read);
    }
    answerWaiting();
    if (!hasMonitors()) return;
    Reactor::ofThisProcess().requestTick();
    lookAtPeers();
  }

  // Goes on with the inquiries of clients that wait for the state of the job.
  void answerWaiting() {
    std::vector<int> gone;
    bool areWaiting = false;
    for (auto& [descriptor, client] : clients_) {
      if (client.inquiry == nullptr) continue;
      try {
        tellStatus(client);
        areWaiting = areWaiting || client.inquiry != nullptr;
        if (client.inquiry == nullptr && !write(client)) gone.push_back(descriptor);
      } catch (const std::exception& error) {
        logInfo("A RAS client is not answered: {}", error.what());
        gone.push_back(descriptor);
      }
    }
    forget(gone);
    if (areWaiting) Reactor::ofThisProcess().requestTick();
  }

  void forget(const std::vector<int>& descriptors) {
    for (const int descriptor : descriptors) {
      Reactor::ofThisProcess().forget(descriptor);
      clients_.erase(descriptor);
    }
  }

  // The answer, once the other processes of the job have answered.
  void tellStatus(Client& client) {
    const int64_t now = diagnose::steadyNow();
    if (!client.inquiry->proceed(now)) return;
    const diagnose::JobState job = client.inquiry->job(now);
    client.inquiry.reset();
    client.output += client.json ? diagnose::rasJson(job, ncclVersion())
                                 : diagnose::rasText(job, ncclVersion(), client.verbose);
    client.ends = true;
  }

  bool hasMonitors() const {
    return std::ranges::any_of(clients_, [](const auto& entry) { return entry.second.monitors; });
  }

  // Tells those who monitor what has changed since the last look.
  void lookAtPeers() {
    const int64_t now = diagnose::steadyNow();
    try {
      if (look_ == nullptr) {
        if (now < nextLook_) return;
        look_ = diagnose::JobInquiry::begin(now, kDefaultTimeout);
      }
      if (!look_->proceed(now)) return;
      nextLook_ = now + kLookInterval;
      diagnose::RasPeers peers = diagnose::rasPeers(look_->job(now));
      look_.reset();
      const auto events = diagnose::rasEvents(std::exchange(peers_, peers), peers);
      std::vector<int> gone;
      for (auto& [descriptor, client] : clients_) {
        const bool isNews = std::exchange(client.isCurrent, true);
        if (!isNews || !client.isSubscribed || client.ends || events.empty()) continue;
        for (const diagnose::RasEvent& event : events) {
          client.output += client.json ? diagnose::rasJson(event) : diagnose::rasText(event);
        }
        if (!write(client)) gone.push_back(descriptor);
      }
      forget(gone);
    } catch (const std::exception& error) {
      logInfo("RAS clients are not told of changes: {}", error.what());
    }
  }

  void accept() {
    while (auto socket = listener_.accept()) {
      // The oldest one goes, so that clients that say nothing do not keep others out.
      if (clients_.size() >= kMostClients) {
        const auto oldest = std::ranges::min_element(clients_, {}, [](const auto& entry) {
          return std::pair(entry.second.monitors, entry.second.number);
        });
        Reactor::ofThisProcess().forget(oldest->first);
        clients_.erase(oldest);
      }
      const int descriptor = socket->descriptor();
      clients_.emplace(descriptor, Client{std::move(*socket), accepted_++, "", ""});
      Reactor::ofThisProcess().watch(number_, descriptor, Poller::Interest::read);
    }
  }

  // Reads commands and writes answers. Returns whether the connection goes on.
  bool talk(Client& client) {
    std::byte buffer[kLongestCommand];
    if (!client.ends) {
      const auto read = client.socket.read(buffer);
      if (read.closed) return false;
      client.input.append(reinterpret_cast<const char*>(buffer), read.bytes);
      for (size_t end; !client.ends && (end = client.input.find('\n')) != std::string::npos;) {
        std::string command = client.input.substr(0, end);
        client.input.erase(0, end + 1);
        if (client.inquiry != nullptr) break;  // whoever waits says nothing more
        if (!command.empty() && command.back() == '\r') command.pop_back();
        answer(client, command);
      }
      if (client.input.size() > kLongestCommand) return false;
    }
    return write(client);
  }

  // Returns whether the connection goes on.
  bool write(Client& client) {
    if (!client.ends && client.output.size() > kMaxUnreadBytes) return false;
    const auto written = client.socket.write(std::as_bytes(std::span(client.output)));
    if (written.closed) return false;
    client.output.erase(0, written.bytes);
    if (client.output.empty() && client.ends) return false;
    const auto interest = client.ends             ? Poller::Interest::write
                          : client.output.empty() ? Poller::Interest::read
                                                  : Poller::Interest::both;
    Reactor::ofThisProcess().setInterest(number_, client.socket.descriptor(), interest);
    return true;
  }

  void answer(Client& client, const std::string& command) {
    std::string rest;
    if (beginsWith(command, "client protocol ", rest)) {
      client.output += fmt::format("SERVER PROTOCOL {}\n", kProtocol);
    } else if (beginsWith(command, "timeout ", rest)) {
      const std::optional<int64_t> timeout = parseTimeout(rest);
      client.timeout = timeout.value_or(client.timeout);
      client.output += timeout ? "OK\n" : fmt::format("ERROR: Invalid timeout value {}\n", rest);
    } else if (beginsWith(command, "set format ", rest)) {
      const bool text = ::strcasecmp(rest.c_str(), "text") == 0;
      const bool json = ::strcasecmp(rest.c_str(), "json") == 0;
      if (text || json) client.json = json;
      client.output += text || json ? "OK\n" : fmt::format("ERROR: Invalid format {}\n", rest);
    } else if (const bool verbose = ::strcasecmp(command.c_str(), "verbose status") == 0;
               verbose || ::strcasecmp(command.c_str(), "status") == 0) {
      client.verbose = verbose;
      client.inquiry = diagnose::JobInquiry::begin(diagnose::steadyNow(), client.timeout);
      tellStatus(client);
      if (client.inquiry != nullptr) Reactor::ofThisProcess().requestTick();
    } else if (::strcasecmp(command.c_str(), "monitor") == 0) {
      monitor(client, "");
    } else if (beginsWith(command, "monitor ", rest)) {
      monitor(client, rest);
    } else {
      client.output += fmt::format("ERROR: Unknown command {}\n", command);
    }
  }

  // `groups` names groups of events, separated by commas. There are none of the group "trace",
  // which NCCL has for the connections between its RAS threads.
  void monitor(Client& client, const std::string& groups) {
    bool lifecycle = false, any = false;
    std::istringstream list(groups);
    for (std::string group; std::getline(list, group, ',');) {
      group.erase(0, group.find_first_not_of(' '));
      if (group.empty()) continue;
      const bool trace = ::strcasecmp(group.c_str(), "trace") == 0;
      const bool all = ::strcasecmp(group.c_str(), "all") == 0;
      if (!trace && !all && ::strcasecmp(group.c_str(), "lifecycle") != 0) {
        client.output += fmt::format("ERROR: Invalid event group '{}'\n", group);
        return;
      }
      any = true;
      lifecycle = lifecycle || !trace;
    }
    client.output += "OK\n";
    // Only what happens from now on is news for this client.
    client.isCurrent = false;
    client.monitors = true;
    client.isSubscribed = lifecycle || !any;
    nextLook_ = 0;
    lookAtPeers();
    Reactor::ofThisProcess().requestTick();
  }

  static constexpr int64_t kLookInterval = 500'000'000;
  const std::function<bool()> notAborted_;
  const Listener listener_;
  // Of the reactor's thread.
  std::map<int, Client> clients_;
  uint64_t accepted_ = 0;
  bool paused_ = false;       // clients are accepted from the next tick on
  diagnose::RasPeers peers_;  // as of the last look
  int64_t nextLook_ = 0;
  std::shared_ptr<diagnose::JobInquiry> look_;  // that goes on
  const uint32_t number_;
};

}  // namespace

void startRasService(const Settings& settings) {
  if (!settings.ras) return;
  // Never destroyed, because the reactor's thread may outlive every destructor.
  static std::atomic<int> startedIn{-1};
  const int forks = forkCount();
  if (startedIn.exchange(forks) == forks) return;
  try {
    [[maybe_unused]] const auto* service = new RasService(settings.rasAddress);
  } catch (const std::exception& error) {
    warnOnce(fmt::format("RAS clients are not answered by this process: {}", error.what()));
  }
}

}  // namespace unisono::comm
