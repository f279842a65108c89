// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/unique_descriptor.h"

namespace unisono::diagnose {

// A file in the trace format of Chrome and Perfetto, which PyTorch's profiler writes too. The file
// is valid JSON after every flush(), so that nothing but the last moments of a process that is
// killed is missing. All functions may be called from any thread.
class Timeline {
 public:
  // Opens the file that `pattern` names for `rank` (expandFileName()). Communicators of a process
  // that name the same file share it; it stays open until the process ends or somebody deletes it.
  // Null, and one warning, if it cannot be written.
  static std::shared_ptr<Timeline> open(const std::string& pattern, int rank);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Where an event is shown. Events of a GPU are in the process of the GPU's number, as in
  // PyTorch's traces.
  struct Track {
    int64_t process = 0, thread = 0;
  };
  void nameProcess(int64_t process, std::string_view name);
  void nameThread(Track track, std::string_view name);

  // Times are those of steadyNow(). `arguments` are the members of a JSON object.
  struct Slice {
    Track track;
    std::string_view name, category;
    int64_t start = 0, end = 0;
    std::string_view arguments;
  };
  void add(const Slice& slice);
  // An arrow from a slice that contains `start` to one that begins at `end`.
  void addArrow(Track from, int64_t start, Track to, int64_t end);

  // Writes what was added. A failure is one warning, and ends the file.
  void flush() noexcept;

 private:
  Timeline(std::string path, UniqueDescriptor file);
  void append(std::string_view event);  // with the lock held
  // Whether events may still be added, or the file has failed, which ends it. Not if it was
  // deleted.
  bool isCurrent();
  double microseconds(int64_t steady) const;

  const std::string path_;
  const int forks_;
  int64_t offset_ = 0;  // from the steady clock to the time base of the file
  std::mutex mutex_;
  UniqueDescriptor file_;
  std::string pending_;
  int64_t end_ = 0;  // of the events in the file
  bool isEmpty_ = true;
  uint64_t arrows_ = 0;
};

}  // namespace unisono::diagnose
