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
