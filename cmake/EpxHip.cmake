# SPDX-License-Identifier: Apache-2.0
# libepx_hip.so: the kernels and the host part of src/device/gpu, compiled for AMD's GPUs against src/device/gpu/hip.
# hipcc is called as it is: the same *.cu are the CUDA module's, so that CMake cannot take them for HIP too.

set(EPX_HIP OFF CACHE STRING "Build the HIP module: ON (needs hipcc), OFF, or AUTO (where hipcc is)")
set_property(CACHE EPX_HIP PROPERTY STRINGS OFF ON AUTO)
set(EPX_HIP_ARCHITECTURES "gfx90a;gfx940" CACHE STRING "GPU architectures of the HIP module")
set(EPX_HIP_FLAVOUR_ARCHITECTURES "" CACHE STRING
    "Those that get the kernels of EPX_HIP_FLAVOURS, without which the module does not run there; empty: all")
set(EPX_HIP_FLAVOURS "_(one_node|marks)$" CACHE STRING "Names of kernels: a regular expression")
mark_as_advanced(EPX_HIP_FLAVOUR_ARCHITECTURES EPX_HIP_FLAVOURS)
if(NOT EPX_HIP MATCHES "^(ON|OFF|AUTO)$")
    message(FATAL_ERROR "EPX_HIP is '${EPX_HIP}'; expected ON, OFF or AUTO")
endif()
if(EPX_HIP STREQUAL OFF OR NOT EPX_SANITIZE STREQUAL none)
    return()
endif()

find_program(EPX_HIPCC hipcc HINTS $ENV{ROCM_PATH}/bin /opt/rocm/bin)
find_library(EPX_AMDHIP amdhip64 HINTS $ENV{ROCM_PATH}/lib /opt/rocm/lib)
find_path(EPX_HIP_INCLUDE hip/hip_runtime_api.h HINTS $ENV{ROCM_PATH}/include /opt/rocm/include)
if(NOT EPX_HIPCC OR NOT EPX_AMDHIP OR NOT EPX_HIP_INCLUDE)
    if(EPX_HIP STREQUAL ON)
        message(FATAL_ERROR "EPX_HIP is ON, but hipcc (${EPX_HIPCC}), libamdhip64 (${EPX_AMDHIP}) or its headers "
            "(${EPX_HIP_INCLUDE}) are not there (Debian: hipcc)")
    endif()
    message(STATUS "No hipcc: the HIP module is not built")
    return()
endif()

# -ffp-contract=off: one result for identical inputs, as everywhere. --hipcc-func-supp: steps stay functions; inlined
# into each other they take minutes to compile and more registers than there are.
set(epx_hip_flags -x hip --hipcc-func-supp -std=c++17 -O3 -DEPX_HIP -fPIC -fvisibility=hidden -ffp-contract=off
    -Wall -Wextra -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src)
if(EPX_WERROR)
    list(APPEND epx_hip_flags -Werror)
endif()

file(GLOB epx_hip_kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/device/gpu/*.cu)
file(GLOB epx_hip_sources CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/device/gpu/*.c ${PROJECT_SOURCE_DIR}/src/device/gpu/hip/*.c)
# Small kernels are one compilation: HIP's headers take 2 s of each, for all architectures and the host.
set(epx_hip_small clock first layout_count mask ring_bench)
set(small_text "")
foreach(name ${epx_hip_small})
    list(REMOVE_ITEM epx_hip_kernels ${PROJECT_SOURCE_DIR}/src/device/gpu/${name}.cu)
    string(APPEND small_text "#include \"device/gpu/${name}.cu\"\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/hip/small.cu CONTENT "${small_text}" @ONLY)
list(APPEND epx_hip_kernels ${CMAKE_CURRENT_BINARY_DIR}/hip/small.cu)

foreach(file ${epx_hip_kernels})
    get_filename_component(name ${file} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/hip/${name}.o)
    set(architectures ${EPX_HIP_ARCHITECTURES})
    if(name MATCHES "${EPX_HIP_FLAVOURS}" AND EPX_HIP_FLAVOUR_ARCHITECTURES)
        set(architectures ${EPX_HIP_FLAVOUR_ARCHITECTURES})
    endif()
    list(TRANSFORM architectures PREPEND --offload-arch=)
    add_custom_command(OUTPUT ${object}
        COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/hip
        COMMAND ${EPX_HIPCC} ${epx_hip_flags} ${architectures} -MD -MF ${object}.d -c ${file} -o ${object}
        DEPENDS ${file} DEPFILE ${object}.d COMMENT "Building HIP object hip/${name}.o" VERBATIM)
    list(APPEND epx_hip_objects ${object})
endforeach()

add_library(epx_hip MODULE ${epx_hip_sources} ${epx_build_source} ${epx_hip_objects})
add_dependencies(epx_hip epx_build_number)
set_target_properties(epx_hip PROPERTIES
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_VISIBILITY_PRESET hidden LINKER_LANGUAGE C
    POSITION_INDEPENDENT_CODE ON LINK_DEPENDS ${PROJECT_SOURCE_DIR}/src/device/module.map
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
target_compile_definitions(epx_hip PRIVATE _GNU_SOURCE= EPX_HIP)
target_compile_options(epx_hip PRIVATE ${epx_compile_options})
target_include_directories(epx_hip PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_include_directories(epx_hip SYSTEM PRIVATE ${EPX_HIP_INCLUDE})
target_link_options(epx_hip PRIVATE LINKER:--no-undefined
    LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/device/module.map)
target_link_libraries(epx_hip PRIVATE ${EPX_AMDHIP} Threads::Threads)
install(TARGETS epx_hip LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
