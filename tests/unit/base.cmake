# SPDX-License-Identifier: Apache-2.0
unisono_test(base_test SOURCES base_test.cpp DEPENDS unisono_base LABELS unit)
unisono_test(base_settings_test SOURCES base_settings_test.cpp DEPENDS unisono_base GTest::gmock
  LABELS unit)
add_test(NAME base_settings_sources_test
  COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/base_settings_sources_test.py)
set_tests_properties(base_settings_sources_test PROPERTIES LABELS unit TIMEOUT 60)
