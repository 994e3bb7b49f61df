# SPDX-License-Identifier: Apache-2.0
# epx_calls.abi3.so: what deep_ep calls for each layer, in C over Python's limited API (python/calls). One file serves
# every Python from 3.9 on. It lies beside libepx.so.

option(EPX_CALLS "Build the extension for Python (needs Python's headers); OFF: deep_ep does not work" ON)
if(EPX_CALLS AND NOT CMAKE_CROSSCOMPILING)
    find_package(Python3 3.9 COMPONENTS Interpreter Development.Module)
    if(Python3_Development.Module_FOUND)
        file(GLOB epx_calls_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/calls/*.c)
        add_library(epx_calls MODULE ${epx_calls_sources})
        epx_target_flags(epx_calls)
        target_compile_definitions(epx_calls PRIVATE _GNU_SOURCE=)
        target_include_directories(epx_calls PRIVATE ${PROJECT_SOURCE_DIR}/include)
        target_include_directories(epx_calls SYSTEM PRIVATE ${Python3_INCLUDE_DIRS})
        set_target_properties(epx_calls PROPERTIES PREFIX "" SUFFIX ".abi3.so"
            LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
        target_link_libraries(epx_calls PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
    else()
        message(STATUS "No headers of Python 3.9 or newer: epx_calls.abi3.so is not built, and deep_ep will say so")
    endif()
endif()
