// SPDX-License-Identifier: Apache-2.0
#include "base/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/configuration_file.h"
#include "base/error.h"
#include "base/log.h"

namespace unisono {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// A thread may still create a communicator while the process exits. This is destroyed after all
// objects that settingsFromEnvironment() creates at its first call: had they destructors, it would
// use what they destroyed, which AddressSanitizer reports.
struct ReadsSettingsAtExit {
  ~ReadsSettingsAtExit() {
    ::setenv("NCCL_CROSS_NIC", "none", 1);
    if (settingsFromEnvironment().crossNic != 2) std::abort();
  }
} readsSettingsAtExit;

std::string readFile(const std::string& path) {
  std::ifstream stream(path);
  std::stringstream text;
  text << stream.rdbuf();
  return text.str();
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) count++;
  return count;
}

// Starts without any variable of the library, on a machine without a configuration file.
class SettingsTest : public testing::Test {
 protected:
  void SetUp() override {
    clear();
    folder_ =
        std::filesystem::temp_directory_path() / ("unisono-settings-" + std::to_string(::getpid()));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override {
    clear();
    resetLog();
    std::filesystem::remove_all(folder_);
  }

  static void clear() {
    for (const SettingInfo& row : settingsTable()) ::unsetenv(row.name.c_str());
  }
  static Settings with(const std::string& name, const std::string& value) {
    ::setenv(name.c_str(), value.c_str(), 1);
    const Settings settings = settingsFromEnvironment();
    ::unsetenv(name.c_str());
    return settings;
  }
  std::string path(const char* name) const { return folder_ / name; }
  std::string write(const char* name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }
  // The log of what `body` does.
  template <typename Body>
  std::string logOf(Body body) const {
    ::setenv("NCCL_DEBUG", "WARN", 1);
    ::setenv("NCCL_DEBUG_FILE", path("log").c_str(), 1);
    resetLog();
    body();
    ::unsetenv("NCCL_DEBUG");
    ::unsetenv("NCCL_DEBUG_FILE");
    resetLog();
    return readFile(path("log"));
  }

  std::filesystem::path folder_;
};

// Some value of each row changes the settings, so each is parsed and stored.
TEST_F(SettingsTest, EveryRowIsParsed) {
  for (const SettingInfo& row : settingsTable()) {
    if (row.name == "NCCL_CONF_FILE") continue;  // Configuration below
    bool changed = false;
    std::stringstream values(row.values);
    std::string first;
    std::getline(values, first, ',');
    for (const std::string& value :
         {std::string("0"), std::string("1"), std::string("2"), std::string("7"), first}) {
      try {
        const Settings settings = with(row.name, value);
        const auto names = changedSettings(settings);
        if (settings == Settings{}) {
          EXPECT_TRUE(names.empty()) << row.name;
        } else {
          changed = true;
          ASSERT_EQ(names.size(), 1u) << row.name;
          EXPECT_EQ(names.front().first, row.name);
          EXPECT_NE(names.front().second, "");
        }
      } catch (const Error&) {
        // Not a value of this row.
      }
      ::unsetenv(row.name.c_str());
    }
    EXPECT_TRUE(changed) << row.name;
    EXPECT_NE(row.values, "") << row.name;
    EXPECT_NE(row.defaultText, "") << row.name;
    EXPECT_NE(row.meaning, "") << row.name;
  }
}

TEST_F(SettingsTest, EmptyMeansUnset) {
  for (const SettingInfo& row : settingsTable()) {
    EXPECT_EQ(with(row.name, ""), Settings{}) << row.name;
  }
}

TEST_F(SettingsTest, NumbersAreReadAsByStrtoll) {
  EXPECT_EQ(with("NCCL_BUFFSIZE", "4194304").bufferBytes, 4 << 20);
  EXPECT_EQ(with("NCCL_BUFFSIZE", "0x400000").bufferBytes, 4 << 20);
  EXPECT_EQ(with("NCCL_BUFFSIZE", "010").bufferBytes, 8);
  EXPECT_EQ(with("NCCL_MIN_NCHANNELS", " 4").minChannels, 4);
  EXPECT_EQ(with("NCCL_MIN_NCHANNELS", "+4 ").minChannels, 4);
}

TEST_F(SettingsTest, NumbersOutOfRangeAreTakenAsInNccl) {
  EXPECT_EQ(with("NCCL_SHM_LOCALITY", "1").shmLocality, 1);
  EXPECT_EQ(with("NCCL_SHM_LOCALITY", "3").shmLocality, 2);
  EXPECT_FALSE(with("NCCL_SHM_MEMCPY_MODE", "2").shmCopies);
  EXPECT_TRUE(with("NCCL_SHM_USE_CUDA_MEMCPY", "1").shmCopies);
  EXPECT_EQ(with("NCCL_SHM_MEMCPY_MODE", "3").shmCopyMode, 3);
  EXPECT_EQ(with("NCCL_SHM_MEMCPY_MODE", "4").shmCopyMode, 1);
  EXPECT_TRUE(with("NCCL_P2P_DISABLE", "5").p2pDisable);
  EXPECT_TRUE(with("NCCL_SHM_DISABLE", "-1").shmDisable);
  EXPECT_FALSE(with("NCCL_NET_GDR_C2C", "0x0").gdrC2c);
  EXPECT_EQ(with("NCCL_P2P_READ_ENABLE", "9").p2pRead, 1);
  EXPECT_EQ(with("NCCL_P2P_READ_ENABLE", "-2").p2pRead, -1);
  EXPECT_EQ(with("NCCL_CUMEM_ENABLE", "-2").cuMem, -1);
  EXPECT_EQ(with("NCCL_MIN_NCHANNELS", "-3").minChannels, 0);
  EXPECT_EQ(with("NCCL_MIN_NCHANNELS", "1000").minChannels, 64);
  EXPECT_EQ(with("NCCL_MAX_NCHANNELS", "0").maxChannels, 1);
  EXPECT_EQ(with("NCCL_MIN_CTAS", "0").minCtas, 0);
  EXPECT_EQ(with("NCCL_MAX_CTAS", "-1").maxCtas, 0);
  EXPECT_EQ(with("NCCL_NVLS_ENABLE", "0").nvls, 0);
  EXPECT_EQ(with("NCCL_NVLS_ENABLE", "9").nvls, 2);
  EXPECT_EQ(with("NCCL_MNNVL_ENABLE", "1").multiNodeNvlink, 1);
  EXPECT_EQ(with("NCCL_MNNVL_ENABLE", "77").multiNodeNvlink, 2);
  EXPECT_EQ(with("NCCL_MNNVL_ENABLE", "0").multiNodeNvlink, 0);
  EXPECT_EQ(with("NCCL_CROSS_NIC", "3").crossNic, 0);
  EXPECT_EQ(with("NCCL_CROSS_NIC", "1").crossNic, 1);
  EXPECT_EQ(with("NCCL_COMM_BLOCKING", "0").blocking, 0);
  EXPECT_EQ(with("NCCL_COMM_BLOCKING", "2").blocking, -1);
  EXPECT_EQ(with("NCCL_BUFFSIZE", "-4").bufferBytes, 0);
}

TEST_F(SettingsTest, NamesAreAcceptedInAnyCase) {
  EXPECT_EQ(with("NCCL_DEBUG", "info").debugLevel, "INFO");
  EXPECT_EQ(with("NCCL_SOCKET_FAMILY", "af_inet6").socketFamily, "AF_INET6");
  EXPECT_EQ(with("NCCL_P2P_LEVEL", "nvl").p2pLevel, "NVL");
  EXPECT_EQ(with("NCCL_NET_GDR_LEVEL", "Sys").gdrLevel, "SYS");
  EXPECT_EQ(with("UNISONO_BACKEND", "HOST").backend, "host");
  EXPECT_EQ(with("UNISONO_HOST_EXECUTOR", "Threads").hostExecutor, "threads");
}

TEST_F(SettingsTest, LevelsMayBeNumbers) {
  EXPECT_EQ(with("NCCL_P2P_LEVEL", "0").p2pLevel, "LOC");
  EXPECT_EQ(with("NCCL_P2P_LEVEL", "2").p2pLevel, "PXB");
  EXPECT_EQ(with("NCCL_P2P_LEVEL", "9").p2pLevel, "SYS");
  EXPECT_EQ(with("NCCL_P2P_LEVEL", "-1").p2pLevel, "");
}

TEST_F(SettingsTest, BadNcclValueIsLoggedOnceAndTheDefaultTaken) {
  const std::string log = logOf([] {
    for (int repeat = 0; repeat < 3; repeat++) {
      EXPECT_EQ(with("NCCL_BUFFSIZE", "4M").bufferBytes, 0);
      EXPECT_EQ(with("NCCL_CROSS_NIC", "yes").crossNic, 2);
      EXPECT_EQ(with("NCCL_P2P_DISABLE", "99999999999999999999").p2pDisable, false);
      EXPECT_EQ(with("NCCL_P2P_LEVEL", "NEAR").p2pLevel, "");
    }
  });
  EXPECT_EQ(occurrences(log, "NCCL_BUFFSIZE=4M"), 1) << log;
  EXPECT_THAT(log, HasSubstr("NCCL_BUFFSIZE=4M is not one of the allowed values (bytes, 1 or "
                             "more); using the default, automatic"));
  EXPECT_THAT(log, HasSubstr("NCCL_CROSS_NIC=yes is not one of the allowed values (0 to 2); using "
                             "the default, 2"));
  EXPECT_EQ(occurrences(log, "NCCL_P2P_DISABLE=99999999999999999999"), 1) << log;
  EXPECT_EQ(occurrences(log, "NCCL_P2P_LEVEL=NEAR"), 1) << log;
}

TEST_F(SettingsTest, BadUnisonoValueIsAnError) {
  const auto expectError = [](const char* name, const char* value, const char* allowed) {
    try {
      with(name, value);
      ADD_FAILURE() << name << "=" << value << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalidArgument);
      EXPECT_THAT(error.what(), AllOf(HasSubstr(std::string(name) + "=" + value),
                                      HasSubstr(std::string("Set ") + name + " to " + allowed)));
    }
    ::unsetenv(name);
  };
  expectError("UNISONO_BACKEND", "gpu", "host, cuda");
  expectError("UNISONO_HOST_DEVICES", "0", "1 to 1024");
  expectError("UNISONO_HOST_DEVICES", "4096", "1 to 1024");
  expectError("UNISONO_HOST_DEVICES", "many", "1 to 1024");
  expectError("UNISONO_HOST_SEED", "-2", "-1 or more");
  expectError("UNISONO_BOOTSTRAP_TIMEOUT", "10s", "seconds, 1 to 100000000");
  expectError("UNISONO_HOST_EXECUTOR", "fiber", "fibers, threads");
}

TEST_F(SettingsTest, UnknownUnisonoNameIsLoggedOnce) {
  const std::string log = logOf([] {
    with("UNISONO_HOST_DEVICE", "4");
    with("UNISONO_HOST_DEVICE", "4");
  });
  EXPECT_EQ(occurrences(log, "UNISONO_HOST_DEVICE is not a setting of Unisono"), 1) << log;
}

TEST_F(SettingsTest, LogLevelIsReadInAnyCase) {
  ::setenv("NCCL_DEBUG", "info", 1);
  resetLog();
  EXPECT_EQ(logLevel(), LogLevel::info);
  ::setenv("NCCL_DEBUG", "", 1);
  resetLog();
  EXPECT_EQ(logLevel(), LogLevel::none);
  ::setenv("NCCL_DEBUG", "bogus", 1);
  resetLog();
  EXPECT_EQ(logLevel(), LogLevel::none);
}

// NCCL_MIN_CTAS and NCCL_MAX_CTAS replace what the program set for its communicator.
TEST_F(SettingsTest, EnvironmentWinsOverTheConfigOfACommunicator) {
  const auto bounds = [](int64_t minCtas, int64_t maxCtas, int64_t minChannels, int64_t maxChannels,
                         ChannelBounds config) {
    Settings settings;
    settings.minCtas = minCtas;
    settings.maxCtas = maxCtas;
    settings.minChannels = minChannels;
    settings.maxChannels = maxChannels;
    const ChannelBounds result = channelBounds(settings, config);
    return std::pair(result.min, result.max);
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(bounds(0, 0, 0, 0, {}), Pair(0, 0));
  EXPECT_EQ(bounds(0, 0, 0, 0, {2, 8}), Pair(2, 8));
  EXPECT_EQ(bounds(3, 6, 0, 0, {2, 8}), Pair(3, 6));
  EXPECT_EQ(bounds(3, 12, 0, 0, {4, 8}), Pair(3, 12));
  EXPECT_EQ(bounds(0, 0, 4, 6, {2, 8}), Pair(4, 6));
  EXPECT_EQ(bounds(0, 0, 1, 16, {2, 8}), Pair(2, 8));
  EXPECT_EQ(bounds(0, 4, 0, 0, {6, 0}), Pair(4, 4));
  EXPECT_EQ(bounds(0, 0, 0, 4, {}), Pair(0, 4));
}

TEST_F(SettingsTest, ConfigurationFileHasTheSyntaxOfNccl) {
  Configuration configuration;
  addConfigurationFile(configuration,
                       write("conf",
                             "# NCCL_ALGO=tree\n"
                             "NCCL_ALGO=ring\n"
                             "NCCL_ALGO=direct\n"
                             "nonsense\n"
                             "\n"
                             " NCCL_PROTO=LL\n"
                             "NCCL_HOSTID= a=b \n"
                             "NCCL_BUFFSIZE=4096"),
                       true);
  EXPECT_THAT(configuration.problems, testing::IsEmpty());
  EXPECT_THAT(configuration.values, testing::ElementsAre(testing::Pair(" NCCL_PROTO", "LL"),
                                                         testing::Pair("NCCL_ALGO", "ring"),
                                                         testing::Pair("NCCL_BUFFSIZE", "4096"),
                                                         testing::Pair("NCCL_HOSTID", " a=b ")));
  addConfigurationFile(configuration, write("second", "NCCL_ALGO=tree\nNCCL_DEBUG=INFO\n"), true);
  EXPECT_EQ(configuration.values["NCCL_ALGO"], "ring");
  EXPECT_EQ(configuration.values["NCCL_DEBUG"], "INFO");
}

TEST_F(SettingsTest, ConfigurationFileThatCannotBeReadIsAProblem) {
  const auto problemOf = [](const std::string& file, bool required = true) {
    Configuration configuration;
    addConfigurationFile(configuration, file, required);
    EXPECT_THAT(configuration.values, testing::IsEmpty());
    return configuration.problems.empty() ? "" : configuration.problems.front();
  };
  EXPECT_EQ(problemOf(path("missing"), false), "");
  EXPECT_THAT(problemOf(path("missing")), HasSubstr("No such file"));
  EXPECT_THAT(problemOf(folder_), HasSubstr("not a regular file"));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_THAT(problemOf(path("fifo")), AllOf(HasSubstr(path("fifo")), HasSubstr("not a regular")));
  EXPECT_THAT(problemOf("/dev/zero"), HasSubstr("not a regular file"));
  EXPECT_THAT(problemOf(write("huge", "A=B\n" + std::string(1 << 20, 'x'))),
              HasSubstr("larger than 1048576 bytes"));
}

// A process reads the files once, so each of these cases runs in a process of its own.
class SettingsProcessTest : public SettingsTest {
 protected:
  void SetUp() override {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    SettingsTest::SetUp();
  }
  void exitUnless(bool right) {
    std::filesystem::remove_all(folder_);
    std::_Exit(right ? 0 : 1);
  }
};

TEST_F(SettingsProcessTest, ConfigurationFileIsReadAfterTheEnvironment) {
  const auto run = [this] {
    const std::string file = write("conf",
                                   "NCCL_BUFFSIZE=4096\nNCCL_ALGO=tree\nNCCL_HOSTID=file\n"
                                   "NCCL_DEBUG=warn\nUNISONO_HOST_DEVICES=3\n");
    ::setenv("NCCL_CONF_FILE", file.c_str(), 1);
    ::setenv("NCCL_ALGO", "ring", 1);
    ::setenv("NCCL_HOSTID", "", 1);  // hides the one in the file
    const Settings settings = settingsFromEnvironment();
    exitUnless(settings.bufferBytes == 4096 && settings.algorithm == "ring" &&
               settings.hostId.empty() && settings.hostDevices == 3 &&
               logLevel() == LogLevel::warn && std::getenv("NCCL_BUFFSIZE") == nullptr);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(SettingsProcessTest, MissingConfigurationFileIsLogged) {
  const auto run = [this] {
    ::setenv("NCCL_CONF_FILE", path("missing").c_str(), 1);
    const std::string log = logOf([] { settingsFromEnvironment(); });
    exitUnless(log.find(path("missing") + " was not read: No such file") != std::string::npos);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace unisono
