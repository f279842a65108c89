unisono_test(support_seed_test SOURCES support_seed_test.cpp LABELS unit)
