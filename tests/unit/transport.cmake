# SPDX-License-Identifier: Apache-2.0
unisono_test(transport_net_test SOURCES transport_net_test.cpp transport_collnet_test.cpp
  transport_copies_test.cpp transport_forwarding_test.cpp transport_message_forwarder_test.cpp
  DEPENDS unisono_transport LABELS unit)
unisono_together(transport_net_test)
target_compile_definitions(transport_net_test PRIVATE UNISONO_FAKE_NETS="${CMAKE_BINARY_DIR}/tests/net")
add_dependencies(transport_net_test fake_net_11)

# Loads the libibverbs of tests/net.
unisono_test(transport_verbs_test SOURCES transport_verbs_test.cpp DEPENDS unisono_transport LABELS unit)
target_compile_definitions(transport_verbs_test PRIVATE UNISONO_FAKE_VERBS="$<TARGET_FILE:fake_verbs>")
add_dependencies(transport_verbs_test fake_verbs)
