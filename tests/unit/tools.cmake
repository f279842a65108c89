# SPDX-License-Identifier: Apache-2.0
if(TARGET unisono_tool)
  foreach(part element_types operations options coordinator reference)
    unisono_test(tools_${part}_test SOURCES tools_${part}_test.cpp
      DEPENDS unisono_tool GTest::gmock LABELS unit)
  endforeach()

  # The stand-in twice, so that one can be measured against the other.
  foreach(copy nccl other)
    add_library(bench_fake_${copy} SHARED bench_fake_nccl.cpp)
    target_link_libraries(bench_fake_${copy} PRIVATE unisono_tool)
    set_target_properties(bench_fake_${copy} PROPERTIES
      CXX_VISIBILITY_PRESET default
      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/fake)
  endforeach()
  unisono_test(tools_bench_test SOURCES tools_bench_test.cpp
    DEPENDS unisono_options nlohmann_json::nlohmann_json GTest::gmock LABELS unit)
  add_dependencies(tools_bench_test unisono bench_fake_nccl bench_fake_other)
  target_compile_definitions(tools_bench_test PRIVATE
    UNISONO_PROGRAM="$<TARGET_FILE:unisono>"
    UNISONO_FAKE_LIBRARY="$<TARGET_FILE:bench_fake_nccl>"
    UNISONO_OTHER_LIBRARY="$<TARGET_FILE:bench_fake_other>")

  unisono_test(tools_topo_test SOURCES tools_topo_test.cpp
    DEPENDS unisono_tool ${UNISONO_PUGIXML_LIBRARY} GTest::gmock LABELS unit)
  add_dependencies(tools_topo_test unisono)
  target_compile_definitions(tools_topo_test PRIVATE UNISONO_PROGRAM="$<TARGET_FILE:unisono>")

  foreach(command explain tune)
    unisono_test(tools_${command}_test SOURCES tools_${command}_test.cpp
      DEPENDS unisono_tool nlohmann_json::nlohmann_json GTest::gmock LABELS unit)
    add_dependencies(tools_${command}_test unisono)
    target_compile_definitions(tools_${command}_test PRIVATE
      UNISONO_PROGRAM="$<TARGET_FILE:unisono>")
  endforeach()
  add_dependencies(tools_explain_test fake_net_11)
  target_compile_definitions(tools_explain_test PRIVATE
    UNISONO_FAKE_NETS="${CMAKE_BINARY_DIR}/tests/net")
endif()
