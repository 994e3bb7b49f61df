# SPDX-License-Identifier: Apache-2.0
# epx_build_source: a file with the number of this build, made again when a file under src/ has changed.

set(epx_build_source ${PROJECT_BINARY_DIR}/epx_build.c)
file(GLOB_RECURSE epx_build_inputs CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/*.c ${PROJECT_SOURCE_DIR}/src/*.h ${PROJECT_SOURCE_DIR}/src/*.cu
    ${PROJECT_SOURCE_DIR}/src/*.cuh)
add_custom_command(OUTPUT ${epx_build_source}
    COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR} -DOUT=${epx_build_source}
        -P ${PROJECT_SOURCE_DIR}/cmake/build_number.cmake
    COMMAND ${CMAKE_COMMAND} -E touch ${epx_build_source}
    DEPENDS ${epx_build_inputs} ${PROJECT_SOURCE_DIR}/include/epx/epx.h
        ${PROJECT_SOURCE_DIR}/cmake/build_number.cmake
    COMMENT "Making the number of this build" VERBATIM)
# Several targets compile it: it is made once for all of them.
add_custom_target(epx_build_number DEPENDS ${epx_build_source})
