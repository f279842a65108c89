# SPDX-License-Identifier: Apache-2.0
# The user guide shows the program as it is tested, without its licence line.
file(READ ${GUIDE} guide)
file(READ ${PROGRAM} program)
string(REGEX REPLACE "^// SPDX-License-Identifier[^\n]*\n" "" program "${program}")
string(FIND "${guide}" "${program}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "${GUIDE} does not contain the code of ${PROGRAM}")
endif()
