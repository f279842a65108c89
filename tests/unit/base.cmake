unisono_test(base_test SOURCES base_test.cpp DEPENDS unisono_base LABELS unit)
