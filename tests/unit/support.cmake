# SPDX-License-Identifier: Apache-2.0
unisono_test(support_seed_test SOURCES support_seed_test.cpp LABELS unit)
unisono_test(support_pairwise_test SOURCES support_pairwise_test.cpp LABELS unit)
