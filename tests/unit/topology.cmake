# SPDX-License-Identifier: Apache-2.0
unisono_test(topology_test
  SOURCES topology_xml_test.cpp topology_graph_test.cpp topology_search_test.cpp
    topology_golden_test.cpp topology_known_test.cpp topology_layouts_test.cpp
    topology_merge_test.cpp topology_paths_test.cpp
  DEPENDS unisono_topology
  LABELS unit)
unisono_together(topology_test)
# Machines that others published are not in the repository: their tests exist where the files do.
set(foreign $ENV{UNISONO_TEST_TOPOLOGIES})
if(NOT foreign)
  set(foreign ${CMAKE_SOURCE_DIR}/../shared/data/topologies)
endif()
if(EXISTS ${foreign})
  unisono_test(topology_foreign_test SOURCES topology_foreign_test.cpp DEPENDS unisono_topology
    LABELS unit)
else()
  message(STATUS "topology_foreign_test is left out: there is no folder ${foreign}")
endif()
unisono_test(topology_join_test SOURCES topology_join_test.cpp DEPENDS unisono_topology LABELS unit)
unisono_test(topology_join_scale_test SOURCES topology_join_scale_test.cpp DEPENDS unisono_topology
  LABELS unit)
# Prints the channels of presets, files and generated layouts, for docs/results.
add_executable(topology_table topology_table.cpp)
target_link_libraries(topology_table PRIVATE unisono_options unisono_topology)
