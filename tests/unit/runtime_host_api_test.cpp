// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "runtime/host/devices.h"
#include "runtime_host_testing.h"
#include "unisono/host.h"

namespace unisono::runtime::host {
namespace {

class HostApiTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("UNISONO_BACKEND", "host", 1);
    ::setenv("UNISONO_HOST_DEVICES", "3", 1);
    ::unsetenv("UNISONO_HOST_TOPOLOGY");
  }
};

TEST_F(HostApiTest, CopiesThroughDevicesAndStreams) {
  int count = 0;
  ASSERT_EQ(unisonoHostGetDeviceCount(&count), ncclSuccess);
  EXPECT_EQ(count, 3);
  ASSERT_EQ(unisonoHostSetDevice(2), ncclSuccess);
  int device = -1;
  ASSERT_EQ(unisonoHostGetDevice(&device), ncclSuccess);
  EXPECT_EQ(device, 2);
  std::thread([&] { EXPECT_EQ(unisonoHostGetDevice(&device), ncclSuccess); }).join();
  EXPECT_EQ(device, 0);

  void* memory = nullptr;
  ASSERT_EQ(unisonoHostMalloc(&memory, 1000), ncclSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(unisonoHostStreamCreate(&stream), ncclSuccess);
  std::vector<char> data(1000, 'a'), back(1000);
  ASSERT_EQ(unisonoHostMemcpyAsync(memory, data.data(), 1000, stream), ncclSuccess);
  ASSERT_EQ(unisonoHostMemsetAsync(memory, 'b' + 256, 10, stream), ncclSuccess);
  ASSERT_EQ(unisonoHostStreamSynchronize(stream), ncclSuccess);
  EXPECT_EQ(unisonoHostStreamQuery(stream), ncclSuccess);
  ASSERT_EQ(unisonoHostMemcpy(back.data(), memory, 1000), ncclSuccess);
  EXPECT_EQ(std::string(back.data(), 12), "bbbbbbbbbbaa");
  ASSERT_EQ(unisonoHostMemset(memory, 0, 1000), ncclSuccess);
  EXPECT_EQ(*static_cast<char*>(memory), 0);
  ASSERT_EQ(unisonoHostDeviceSynchronize(), ncclSuccess);
  ASSERT_EQ(unisonoHostStreamDestroy(stream), ncclSuccess);
  ASSERT_EQ(unisonoHostFree(memory), ncclSuccess);
}

TEST_F(HostApiTest, WrongUseGivesACodeAndAText) {
  auto text = [] { return std::string(unisonoHostGetLastError()); };
  EXPECT_EQ(unisonoHostGetDeviceCount(nullptr), ncclInvalidArgument);
  EXPECT_EQ(text(), "count is null");
  EXPECT_EQ(unisonoHostSetDevice(3), ncclInvalidArgument);
  EXPECT_NE(text().find("Device 3 does not exist"), std::string::npos) << text();
  EXPECT_EQ(unisonoHostMalloc(nullptr, 8), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostMemcpy(nullptr, &text, 1), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostMemset(nullptr, 0, 1), ncclInvalidArgument);
  int local = 0;
  EXPECT_EQ(unisonoHostFree(&local), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostFree(nullptr), ncclSuccess);
  auto stream = reinterpret_cast<cudaStream_t>(&local);
  EXPECT_EQ(unisonoHostStreamDestroy(stream), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostStreamSynchronize(stream), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostStreamQuery(stream), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostStreamCreate(nullptr), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostStreamBeginCapture(nullptr), ncclInvalidUsage);
  EXPECT_EQ(unisonoHostStreamBeginCapture(stream), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostStreamEndCapture(nullptr, nullptr), ncclInvalidArgument);
  auto graph = reinterpret_cast<unisonoHostGraph_t>(&local);
  EXPECT_EQ(unisonoHostStreamEndCapture(nullptr, &graph), ncclInvalidUsage);
  EXPECT_EQ(unisonoHostGraphLaunch(graph, nullptr), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostGraphDestroy(graph), ncclInvalidArgument);
  void* memory = &local;
  EXPECT_EQ(unisonoHostMalloc(&memory, SIZE_MAX), ncclInvalidArgument);
  EXPECT_EQ(unisonoHostMalloc(&memory, SIZE_MAX / 2 - 5000), ncclSystemError);
  EXPECT_EQ(memory, &local);
  ASSERT_EQ(unisonoHostMalloc(&memory, 8), ncclSuccess);
  EXPECT_EQ(unisonoHostFree(memory), ncclSuccess);
  EXPECT_EQ(unisonoHostFree(memory), ncclInvalidArgument);
}

Settings topologySettings(const std::string& file) {
  Settings settings = hostSettings();
  settings.hostTopologyFile = file;
  return settings;
}

TEST(HostDevicesTest, ComeFromATopologyFile) {
  auto devices =
      simulatedDevices(topologySettings(UNISONO_TEST_DATA "/topologies/h800x8-vm.detected.xml"));
  ASSERT_EQ(devices.size(), 8u);
  EXPECT_EQ(devices[0].busId, "0000:65:02.0");
  EXPECT_EQ(devices[1].busId, "0000:67:02.0");
  EXPECT_EQ(devices[0].computeCapability, 90);
  EXPECT_NE(devices[0].uuid, devices[1].uuid);
}

class TopologyFile {
 public:
  explicit TopologyFile(const std::string& text)
      : name_(testing::TempDir() + "unisono-devices-" + std::to_string(::getpid()) + ".xml") {
    std::ofstream(name_) << text;
  }
  ~TopologyFile() { std::remove(name_.c_str()); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

TEST(HostDevicesTest, FollowTheirOrdinals) {
  TopologyFile file(
      "<system><cpu><pci busid='0000:AB:00.0'><gpu dev='1' sm='80'/></pci>"
      "<pci busid='0000:cd:00.0'><gpu dev='0' sm='100'/></pci></cpu></system>");
  auto devices = simulatedDevices(topologySettings(file.name()));
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(devices[0].busId, "0000:cd:00.0");
  EXPECT_EQ(devices[0].computeCapability, 100);
  EXPECT_EQ(devices[1].busId, "0000:ab:00.0");
}

void expectTopologyError(const std::string& file, const char* part) {
  try {
    HostRuntime runtime(topologySettings(file));
    FAIL() << "no error";
  } catch (const Error& error) {
    std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::invalidArgument);
    EXPECT_NE(text.find(file), std::string::npos) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(HostDevicesTest, ErrorsNameFileAndCause) {
  expectTopologyError("/nonexistent/topology.xml", "not found");
  {
    TopologyFile file("");
    expectTopologyError(file.name(), "cannot be read");
  }
  {
    TopologyFile file("<system><cpu></system>");
    expectTopologyError(file.name(), "mismatch");
  }
  {
    TopologyFile file("<system><cpu/></system>");
    expectTopologyError(file.name(), "has no <gpu>");
  }
  {
    TopologyFile file("<system><gpu dev='0'/></system>");
    expectTopologyError(file.name(), "not inside a <pci");
  }
  {
    TopologyFile file("<system><pci busid='a'><gpu/></pci><pci busid='A'><gpu/></pci></system>");
    expectTopologyError(file.name(), "two GPUs");
  }
  Settings settings = hostSettings("fibers", -1, 0);
  EXPECT_THROW(simulatedDevices(settings), Error);
}

}  // namespace
}  // namespace unisono::runtime::host
