# SPDX-License-Identifier: Apache-2.0
# Which files make which part. A new file is picked up by the next build.

file(GLOB_RECURSE epx_library_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.c)
# These have compilers of their own,
list(FILTER epx_library_sources EXCLUDE REGEX "/src/device/gpu/")
# and these are a library of their own (EpxNccl.cmake).
list(FILTER epx_library_sources EXCLUDE REGEX "/src/nccl_ep/")
# The log, the environment it reads, and the guard of signal handlers; what makes a rendezvous; and the rest.
set(epx_log_sources ${PROJECT_SOURCE_DIR}/src/util/log.c ${PROJECT_SOURCE_DIR}/src/util/env.c
    ${PROJECT_SOURCE_DIR}/src/util/sigactions.c)
list(REMOVE_ITEM epx_library_sources ${epx_log_sources})
set(epx_boot_sources ${epx_library_sources})
list(FILTER epx_boot_sources INCLUDE REGEX "/src/(boot|util)/")
list(REMOVE_ITEM epx_library_sources ${epx_boot_sources})

file(GLOB epx_sim_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/sim/*.c)
file(GLOB epx_support_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/lib/*.c)
set(epx_oracle_sources ${epx_support_sources})
list(FILTER epx_oracle_sources INCLUDE REGEX "/(oracle|oracle_check|oracle_math|compare|workload)\\.c$")
list(REMOVE_ITEM epx_support_sources ${epx_oracle_sources})
file(GLOB epx_tool_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tools/epx/*.c)
file(GLOB epx_mpi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/bench/mpi/*.c)

# CMake refuses a library without sources.
foreach(list epx_library_sources epx_support_sources)
    if(NOT ${list})
        file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/${list}_empty.c CONTENT "typedef int ${list}_is_empty;\n" @ONLY)
        set(${list} ${PROJECT_BINARY_DIR}/${list}_empty.c)
    endif()
endforeach()
