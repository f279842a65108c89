# SPDX-License-Identifier: Apache-2.0
unisono_test(bootstrap_address_test SOURCES bootstrap_address_test.cpp
  DEPENDS unisono_bootstrap GTest::gmock LABELS unit)
unisono_test(bootstrap_test SOURCES bootstrap_test.cpp DEPENDS unisono_bootstrap GTest::gmock LABELS unit)
unisono_test(bootstrap_fault_test SOURCES bootstrap_fault_test.cpp
  DEPENDS unisono_bootstrap GTest::gmock LABELS unit SLEEPS)
unisono_test(bootstrap_key_test SOURCES bootstrap_key_test.cpp
  DEPENDS unisono_bootstrap GTest::gmock LABELS unit)
unisono_test(bootstrap_limits_test SOURCES bootstrap_limits_test.cpp
  DEPENDS unisono_bootstrap unisono_runtime GTest::gmock LABELS unit)
unisono_test(bootstrap_roots_test SOURCES bootstrap_roots_test.cpp
  DEPENDS unisono_bootstrap GTest::gmock LABELS unit SLEEPS)
unisono_test(bootstrap_fuzz_test SOURCES bootstrap_fuzz_test.cpp
  DEPENDS unisono_bootstrap LABELS unit)
unisono_test(bootstrap_family_test SOURCES bootstrap_family_test.cpp
  DEPENDS unisono_bootstrap GTest::gmock LABELS unit)
