# SPDX-License-Identifier: Apache-2.0
# Compiler settings, and the functions that declare the targets of each folder.

add_library(unisono_options INTERFACE)
target_include_directories(unisono_options INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
target_compile_options(unisono_options INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror>)
if(UNISONO_SANITIZER)
  target_compile_options(unisono_options INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${UNISONO_SANITIZER}> $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>
    # With a sanitizer's instrumentation GCC 12 takes std::optional for uninitialized. The other
    # presets keep the warning.
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wno-maybe-uninitialized>)
  target_link_options(unisono_options INTERFACE -fsanitize=${UNISONO_SANITIZER})
endif()
if(UNISONO_CUDA)
  target_compile_definitions(unisono_options INTERFACE UNISONO_CUDA=1)
endif()

# unisono_together(TARGET): compiles the files of a target in batches, if UNISONO_UNITY is set.
function(unisono_together target)
  if(UNISONO_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    # A file with types of its own is taken for a header that others include.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  endif()
endfunction()

# unisono_layer(NAME SOURCES ... DEPENDS ...): one folder of src/ as a static library unisono_NAME.
# DEPENDS names the layers and libraries that it may use. Listing only lower layers makes the linker
# enforce their order (CONTRIBUTING.md).
function(unisono_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(unisono_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(unisono_${name} PUBLIC unisono_options ${ARG_DEPENDS})
  unisono_together(unisono_${name})
endfunction()

# unisono_computes(TEST): a test that needs a core. CTest counts two processors for a core, so that
# one of the tests that sleep runs in addition to others on all cores.
function(unisono_computes test)
  set_tests_properties(${test} PROPERTIES PROCESSORS 2)
endfunction()

# How test code is optimized (unisono_test_code). Sanitizers compile all code alike (CMakePresets.json).
set(UNISONO_TEST_OPTIMIZATIONS -O0 -O1)
if(UNISONO_SANITIZER)
  set(UNISONO_TEST_OPTIMIZATIONS -O1)
endif()

# unisono_test_code(TARGET OPTIMIZATION): how a test's own code is compiled: it runs briefly and takes
# long to optimize. What it tests is built as shipped.
function(unisono_test_code target optimization)
  if(NOT optimization IN_LIST UNISONO_TEST_OPTIMIZATIONS)
    set(optimization -O1)
  endif()
  target_compile_options(${target} PRIVATE
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:${optimization}>)
  if(TARGET test_headers${optimization})
    target_precompile_headers(${target} REUSE_FROM test_headers${optimization})
    # For ccache.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  endif()
endfunction()

# unisono_limit_time(TEST SECONDS): ends a test that hangs. SECONDS holds for a slow machine that runs
# other tests at the same time; with a sanitizer a test may take three times as long.
function(unisono_limit_time test seconds)
  if(UNISONO_SANITIZER)
    math(EXPR seconds "3 * ${seconds}")
  endif()
  set_tests_properties(${test} PROPERTIES TIMEOUT ${seconds})
endfunction()

# unisono_test(NAME SOURCES ... DEPENDS ... LABELS ... TIMEOUT s [OPTIMIZED] [SLEEPS]): one GoogleTest
# program.
#   LABELS      unit, protocol, system; scripts/test chooses by them
#   OPTIMIZED   a test that itself computes much
#   SLEEPS      most of its time it waits for times to pass
function(unisono_test name)
  cmake_parse_arguments(ARG "OPTIMIZED;SLEEPS" "TIMEOUT" "SOURCES;DEPENDS;LABELS;ARGUMENTS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE unisono_options ${ARG_DEPENDS} test_support GTest::gtest
    GTest::gtest_main)
  # Protocol tests run device code of their own.
  set(optimization -O0)
  if("protocol" IN_LIST ARG_LABELS OR ARG_OPTIMIZED)
    set(optimization -O1)
  endif()
  unisono_test_code(${name} ${optimization})
  target_compile_definitions(${name} PRIVATE
    UNISONO_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data")
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGUMENTS})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}")
  unisono_limit_time(${name} ${ARG_TIMEOUT})
  if(ARG_SLEEPS)
    # One at a time, from the beginning.
    set_tests_properties(${name} PROPERTIES COST 1000 RESOURCE_LOCK sleeping)
  else()
    unisono_computes(${name})
  endif()
endfunction()
