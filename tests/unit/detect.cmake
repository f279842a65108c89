# SPDX-License-Identifier: Apache-2.0
# A stand-in for the driver's library.
add_library(detect_fake_nvml SHARED detect_fake_nvml.c)
set_target_properties(detect_fake_nvml PROPERTIES
  C_VISIBILITY_PRESET default
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/fake)
unisono_test(detect_test SOURCES detect_test.cpp detect_nvml_test.cpp
  DEPENDS unisono_detect GTest::gmock LABELS unit)
unisono_together(detect_test)
add_dependencies(detect_test detect_fake_nvml)
target_compile_definitions(detect_test PRIVATE
  UNISONO_FAKE_NVML="$<TARGET_FILE:detect_fake_nvml>")
