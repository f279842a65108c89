# SPDX-License-Identifier: Apache-2.0
# It prints the time of a plan.
unisono_test(plan_test SOURCES plan_test.cpp DEPENDS unisono_plan LABELS unit OPTIMIZED)
unisono_test(plan_direct_test SOURCES plan_direct_test.cpp DEPENDS unisono_plan LABELS unit)
unisono_test(plan_messages_test SOURCES plan_messages_test.cpp DEPENDS unisono_plan LABELS unit)
