# SPDX-License-Identifier: Apache-2.0
# Tuner plug-ins of every version of the interface.
foreach(version 2 3 4 5 6)
  add_library(fake_tuner_${version} SHARED plugin_fake_tuner.c)
  target_compile_definitions(fake_tuner_${version} PRIVATE TUNER_VERSION=${version})
  set_target_properties(fake_tuner_${version} PROPERTIES C_VISIBILITY_PRESET default
    OUTPUT_NAME nccl-tuner-fake${version} LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/tuner)
endforeach()
unisono_test(plugin_tuner_test SOURCES plugin_tuner_test.cpp DEPENDS unisono_plugin
  LABELS unit)
foreach(version 2 3 4 5 6)
  add_dependencies(plugin_tuner_test fake_tuner_${version})
endforeach()
target_compile_definitions(plugin_tuner_test PRIVATE
  UNISONO_FAKE_TUNERS="${CMAKE_BINARY_DIR}/tests/tuner")
set_tests_properties(plugin_tuner_test PROPERTIES
  ENVIRONMENT LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/tuner)
