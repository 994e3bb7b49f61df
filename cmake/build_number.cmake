# SPDX-License-Identifier: Apache-2.0
# cmake -DROOT=TREE -DOUT=FILE.c -P build_number.cmake: the number of this build (src/util/build.h), from the names and
# the contents of the files that decide what ranks exchange and what lies in the memory that they share. It is the same
# for every compiler, architecture, device and folder.

# Libraries of their own, over epx.h.
set(apart "^src/nccl_ep/")
file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/src/*.c ${ROOT}/src/*.h ${ROOT}/src/*.cu ${ROOT}/src/*.cuh)
list(FILTER files EXCLUDE REGEX "${apart}")
list(APPEND files include/epx/epx.h)
list(SORT files)
foreach(file ${files})
    file(SHA256 ${ROOT}/${file} hash)
    string(APPEND text "${hash} ${file}\n")
endforeach()
string(SHA256 number "${text}")
string(SUBSTRING ${number} 0 8 number)
file(CONFIGURE OUTPUT ${OUT} @ONLY CONTENT [[/* Made by cmake/build_number.cmake. */
#include "util/build.h"

uint64_t build_number(void)
{
    return (uint64_t)EPX_VERSION_CODE << 32 | 0x@number@u;
}
]])
