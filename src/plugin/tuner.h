// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/log.h"
#include "plugin/library.h"
#include "tuning/choice.h"

// Tuner plug-ins: libraries that change the predicted times of NCCL's algorithms. The interface is
// that of NCCL, versions 2 to 6.
namespace unisono::plugin {

struct TunerInterface;  // one version of the interface, see tuner.cpp

// The library of a tuner plug-in.
class TunerLibrary {
 public:
  // Opens what NCCL_TUNER_PLUGIN names: see openPlugin(). Null without a plug-in; one that cannot
  // be used is reported to `warn`.
  static std::shared_ptr<const TunerLibrary> open(const std::string& setting, Warn warn = warnOnce);
  ~TunerLibrary();
  TunerLibrary(const TunerLibrary&) = delete;
  TunerLibrary& operator=(const TunerLibrary&) = delete;

  // As the plug-in calls itself, with the version of its interface: "Example (v4)".
  const std::string& name() const { return name_; }
  const TunerInterface& interface() const { return *interface_; }
  void warn(const std::string& problem) const { warn_(problem); }

 private:
  TunerLibrary() = default;

  Warn warn_;
  OpenLibrary handle_;
  std::string name_;
  std::unique_ptr<TunerInterface> interface_;
};

// What a plug-in is told of a communicator.
struct TunedCommunicator {
  uint64_t id = 0;
  int ranks = 1, nodes = 1;
  int minRanksPerNode = 1, maxRanksPerNode = 1;
};

// The plug-in of one communicator. Answers that make no sense are reported once, and from then on
// the plug-in is not asked again.
class TunerPlugin : public tuning::Advisor {
 public:
  // `constants` of the cost model may be changed by the plug-in. Null if it refuses, which is
  // reported.
  static std::shared_ptr<const TunerPlugin> create(std::shared_ptr<const TunerLibrary> library,
                                                   const TunedCommunicator& communicator,
                                                   tuning::CostConstants& constants);
  ~TunerPlugin() override;

  int advise(const tuning::Question& question, tuning::TimeTable& times) const override;
  uint64_t adviseChunk(const tuning::Question& question,
                       const tuning::Choice& choice) const override;

 private:
  explicit TunerPlugin(std::shared_ptr<const TunerLibrary> library)
      : library_(std::move(library)) {}
  void reject(const std::string& problem) const;

  std::shared_ptr<const TunerLibrary> library_;
  void* context_ = nullptr;
  mutable std::atomic<bool> rejected_ = false;
};

}  // namespace unisono::plugin
