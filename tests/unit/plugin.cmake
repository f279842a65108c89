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
# For plug-ins by name. Sanitizers open libraries in the name of their own, whose RPATH counts then.
set_target_properties(plugin_tuner_test PROPERTIES BUILD_RPATH ${CMAKE_BINARY_DIR}/tests/tuner)
set_tests_properties(plugin_tuner_test PROPERTIES
  ENVIRONMENT LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/tuner)

# Network plug-ins of every version of the interface, also for system_net_plugin_test.
unisono_test(plugin_net_test SOURCES plugin_net_test.cpp DEPENDS unisono_plugin LABELS unit)
foreach(version RANGE 6 12)
  add_library(fake_net_${version} SHARED ${CMAKE_SOURCE_DIR}/tests/system/fake_net.c)
  if(NOT version MATCHES "^(7|10)$")  # these have no CollNet
    target_sources(fake_net_${version} PRIVATE ${CMAKE_SOURCE_DIR}/tests/system/fake_collnet.c)
  endif()
  target_compile_definitions(fake_net_${version} PRIVATE NET_VERSION=${version} _GNU_SOURCE)
  if(version EQUAL 9)  # a tuner in the library of the net plug-in
    target_sources(fake_net_${version} PRIVATE plugin_fake_tuner.c)
    target_compile_definitions(fake_net_${version} PRIVATE TUNER_VERSION=4)
  endif()
  set_target_properties(fake_net_${version} PROPERTIES C_VISIBILITY_PRESET hidden
    OUTPUT_NAME nccl-net-fake${version} LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/net)
  add_dependencies(plugin_net_test fake_net_${version})
endforeach()
target_compile_definitions(plugin_net_test PRIVATE UNISONO_FAKE_NETS="${CMAKE_BINARY_DIR}/tests/net")
set_target_properties(plugin_net_test PROPERTIES BUILD_RPATH ${CMAKE_BINARY_DIR}/tests/net)
set_tests_properties(plugin_net_test PROPERTIES
  ENVIRONMENT LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/net)
