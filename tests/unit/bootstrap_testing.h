// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "bootstrap/bootstrap.h"

namespace unisono::bootstrap {

// Settings for ranks on this machine: loopback, and an end to every wait.
inline Settings localSettings(int64_t timeoutSeconds = 30) {
  Settings settings;
  settings.socketInterface = "lo";
  settings.socketFamily = "AF_INET";
  settings.bootstrapTimeoutSeconds = timeoutSeconds;
  return settings;
}

// Runs `body(rank)` on one thread for each of `ranks`, and returns what each threw.
inline std::vector<std::exception_ptr> runThreads(const std::vector<int>& ranks,
                                                  const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); i++) {
    threads.emplace_back([&, i] {
      try {
        body(ranks[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<int> firstRanks(int count) {
  std::vector<int> ranks;
  for (int rank = 0; rank < count; rank++) ranks.push_back(rank);
  return ranks;
}

// Fails the test for every rank that threw.
inline void expectNoErrors(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& what) {
      ADD_FAILURE() << what.what();
    }
  }
}

// Every rank of a communicator, as threads that connect first.
inline void runRanks(int count, const Settings& settings, const UniqueId& id,
                     const std::function<void(Bootstrap&)>& body) {
  expectNoErrors(runThreads(firstRanks(count), [&](int rank) {
    auto bootstrap = Bootstrap::connect(id, rank, count, settings);
    body(*bootstrap);
  }));
}

inline void runRanks(int count, const Settings& settings,
                     const std::function<void(Bootstrap&)>& body) {
  runRanks(count, settings, createUniqueId(settings), body);
}

// What `error` is, or a test failure.
inline Error errorOf(const std::exception_ptr& error) {
  if (!error) {
    ADD_FAILURE() << "no error";
    return Error(ErrorCode::success, "");
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& caught) {
    return caught;
  }
}

inline int openDescriptors() {
  int count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) count++;
  ::closedir(folder);
  return count;
}

inline std::vector<std::byte> randomBytes(std::mt19937& random, size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace unisono::bootstrap
