# SPDX-License-Identifier: Apache-2.0
unisono_test(tuning_test
  SOURCES tuning_allowed_test.cpp tuning_measured_test.cpp tuning_messages_test.cpp tuning_model_test.cpp
    tuning_choice_test.cpp tuning_golden_test.cpp
  DEPENDS unisono_tuning
  LABELS unit)
