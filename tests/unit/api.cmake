# SPDX-License-Identifier: Apache-2.0
# The public header in the languages and standards that programs use, with all warnings, and with
# nothing of the library's own sources and options: that the objects compile is the test.
find_path(UNISONO_CUDA_HEADERS cuda_runtime.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS /usr/local/cuda/include)
mark_as_advanced(UNISONO_CUDA_HEADERS)

# api_header_object(NAME STANDARD OPTIONS...): STANDARD as in c99, cxx11.
function(api_header_object name standard)
  string(REGEX MATCH "^(c|cxx)([0-9]+)$" matched ${standard})
  string(TOUPPER ${CMAKE_MATCH_1} language)
  if(language STREQUAL CXX)
    add_library(api_header_${name} OBJECT api_header_cxx.cpp)
    target_compile_options(api_header_${name} PRIVATE -Wold-style-cast)
  else()
    add_library(api_header_${name} OBJECT api_header_c.c)
    target_compile_options(api_header_${name} PRIVATE -Wstrict-prototypes)
  endif()
  set_target_properties(api_header_${name} PROPERTIES
    ${language}_STANDARD ${CMAKE_MATCH_2} ${language}_EXTENSIONS OFF)
  target_include_directories(api_header_${name} PRIVATE ${CMAKE_SOURCE_DIR}/include)
  target_compile_options(api_header_${name} PRIVATE -Wall -Wextra -pedantic -Werror ${ARGN})
endfunction()

foreach(standard c99 c11 cxx11 cxx14 cxx17 cxx20)
  api_header_object(${standard} ${standard})
  api_header_object(${standard}_no_cuda ${standard} -DUNISONO_NO_CUDA_HEADERS)
endforeach()
# CUDA's own headers ask for C++17 and are slow to compile, so once in each language.
if(UNISONO_CUDA_HEADERS)
  api_header_object(c99_cuda c99 -isystem ${UNISONO_CUDA_HEADERS})
  api_header_object(cxx17_cuda cxx17 -isystem ${UNISONO_CUDA_HEADERS})
endif()

unisono_test(api_header_test
  SOURCES api_header_test.cpp $<TARGET_OBJECTS:api_header_c99>
  LABELS unit)
target_compile_definitions(api_header_test PRIVATE UNISONO_NO_CUDA_HEADERS)

unisono_test(api_unimplemented_test
  SOURCES api_unimplemented_test.cpp ${CMAKE_SOURCE_DIR}/src/api/unimplemented.cpp
  LABELS unit)
target_compile_definitions(api_unimplemented_test PRIVATE UNISONO_NO_CUDA_HEADERS)

add_test(NAME api_check_exports_test
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/api_check_exports_test.py ${CMAKE_C_COMPILER}
    ${CMAKE_SOURCE_DIR}/scripts/check_exports ${CMAKE_SOURCE_DIR}/src/api/exports.map)
set_tests_properties(api_check_exports_test PROPERTIES LABELS unit TIMEOUT 120)

# A sanitizer's run-time library is one more that its build needs.
if(TARGET nccl AND NOT UNISONO_SANITIZER)
  add_test(NAME api_exports_test
    COMMAND ${CMAKE_SOURCE_DIR}/scripts/check_exports $<TARGET_FILE:nccl>)
  set_tests_properties(api_exports_test PROPERTIES LABELS unit TIMEOUT 60)
endif()
