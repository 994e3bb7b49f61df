# SPDX-License-Identifier: Apache-2.0
# Which files make which part. A new file is picked up by the next build.

file(GLOB_RECURSE epx_library_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.c)
# These have compilers of their own,
list(FILTER epx_library_sources EXCLUDE REGEX "/src/device/gpu/")
# and these are libraries of their own (EpxNccl.cmake).
list(FILTER epx_library_sources EXCLUDE REGEX "/src/compat/")

file(GLOB epx_support_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/lib/*.c)
file(GLOB epx_tool_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tools/epx/*.c)
file(GLOB epx_mpi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tools/mpi/*.c)

# CMake refuses a library without sources.
foreach(list epx_library_sources epx_support_sources)
    if(NOT ${list})
        file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/${list}_empty.c CONTENT "typedef int ${list}_is_empty;\n" @ONLY)
        set(${list} ${PROJECT_BINARY_DIR}/${list}_empty.c)
    endif()
endforeach()
