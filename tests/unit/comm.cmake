# SPDX-License-Identifier: Apache-2.0
unisono_test(comm_agreement_test SOURCES comm_agreement_test.cpp DEPENDS unisono_comm LABELS unit)
unisono_test(comm_device_clock_test SOURCES comm_device_clock_test.cpp DEPENDS unisono_comm LABELS unit)
unisono_test(comm_health_test SOURCES comm_health_test.cpp DEPENDS unisono_comm LABELS unit)
unisono_test(comm_launch_notes_test SOURCES comm_launch_notes_test.cpp DEPENDS unisono_comm LABELS unit)
unisono_test(comm_multicast_test SOURCES comm_multicast_test.cpp DEPENDS unisono_comm LABELS unit)
unisono_test(comm_node_links_test SOURCES comm_node_links_test.cpp DEPENDS unisono_comm LABELS unit)
unisono_test(comm_node_channels_test SOURCES comm_node_channels_test.cpp DEPENDS unisono_comm LABELS unit)
