# SPDX-License-Identifier: Apache-2.0
unisono_test(diagnose_test SOURCES diagnose_test.cpp DEPENDS unisono_diagnose LABELS unit)
unisono_test(diagnose_remote_test SOURCES diagnose_remote_test.cpp DEPENDS unisono_diagnose LABELS unit)
