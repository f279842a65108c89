# SPDX-License-Identifier: Apache-2.0
unisono_test(transport_net_test SOURCES transport_net_test.cpp DEPENDS unisono_transport LABELS unit)
