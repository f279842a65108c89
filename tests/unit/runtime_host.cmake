# SPDX-License-Identifier: Apache-2.0
unisono_test(runtime_host_stream_test
  SOURCES runtime_host_stream_test.cpp
  DEPENDS unisono_runtime
  LABELS unit)
unisono_test(runtime_host_schedule_test
  SOURCES runtime_host_schedule_test.cpp
  DEPENDS unisono_runtime
  LABELS unit)
unisono_test(runtime_host_memory_test
  SOURCES runtime_host_memory_test.cpp
  DEPENDS unisono_runtime
  LABELS unit)
unisono_test(runtime_host_api_test
  SOURCES runtime_host_api_test.cpp
  DEPENDS unisono_runtime
  LABELS unit)
if(UNISONO_SANITIZER STREQUAL "thread")
  # Races between fibers of one thread must be seen, and only races.
  add_executable(runtime_host_race_test runtime_host_race_test.cpp)
  target_link_libraries(runtime_host_race_test PRIVATE unisono_runtime)
  foreach(mode published relaxed plain launches)
    add_test(NAME runtime_host_race_${mode} COMMAND runtime_host_race_test ${mode})
    set_tests_properties(runtime_host_race_${mode} PROPERTIES LABELS unit TIMEOUT 60)
    if(NOT mode STREQUAL "published")
      set_tests_properties(runtime_host_race_${mode} PROPERTIES
        PASS_REGULAR_EXPRESSION "ThreadSanitizer: data race")
    endif()
  endforeach()
endif()
