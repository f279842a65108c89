# The user guide shows the program as it is tested.
file(READ ${GUIDE} guide)
file(READ ${PROGRAM} program)
string(FIND "${guide}" "${program}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "${GUIDE} does not hold ${PROGRAM} as it is")
endif()
