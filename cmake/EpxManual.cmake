# SPDX-License-Identifier: Apache-2.0
# Manual pages from the headers' comments, the option tables and the table of variables (scripts/manual/make.py). They
# need Python, and a program that runs here: without these a build leaves them out and says so.

find_package(Python3 COMPONENTS Interpreter QUIET)
if(CMAKE_CROSSCOMPILING OR NOT EPX_SANITIZE STREQUAL none)
    return()
endif()
if(NOT Python3_Interpreter_FOUND)
    message(STATUS "No python3: the manual pages are not made")
    return()
endif()

file(GLOB epx_manual_scripts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/scripts/manual/*.py)
add_custom_command(OUTPUT ${PROJECT_BINARY_DIR}/man.stamp
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${PROJECT_BINARY_DIR}/man
    COMMAND ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/scripts/manual/make.py $<TARGET_FILE:epx_tool>
            ${PROJECT_BINARY_DIR}/man
    COMMAND ${CMAKE_COMMAND} -E touch ${PROJECT_BINARY_DIR}/man.stamp
    DEPENDS epx_tool epx_ep_bench ${epx_manual_scripts} ${PROJECT_SOURCE_DIR}/include/epx/epx.h
            ${PROJECT_SOURCE_DIR}/include/nccl_ep/nccl_ep.h
    COMMENT "Making the manual pages")
add_custom_target(epx_manual ALL DEPENDS ${PROJECT_BINARY_DIR}/man.stamp)
install(DIRECTORY ${PROJECT_BINARY_DIR}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR} OPTIONAL)
