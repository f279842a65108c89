unisono_test(detect_test SOURCES detect_test.cpp
  DEPENDS unisono_detect GTest::gmock LABELS unit)
