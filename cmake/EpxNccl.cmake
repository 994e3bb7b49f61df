# SPDX-License-Identifier: Apache-2.0
# NCCL EP's interface (docs/nccl_ep.md): libnccl_ep.so over libepx.so, and two stand-ins for machines without NCCL or
# CUDA. All are built against the stand-ins' headers, whose types are those of the real ones.

set(epx_nccl_include ${PROJECT_SOURCE_DIR}/include/nccl_ep)
set(epx_standin_nccl_include ${PROJECT_SOURCE_DIR}/standin/include/nccl)
set(epx_standin_cuda_include ${PROJECT_SOURCE_DIR}/standin/include/cuda)

function(epx_nccl_library name map)
    epx_target_defaults(${name})
    target_include_directories(${name} PRIVATE
        ${epx_nccl_include} ${epx_standin_nccl_include} ${epx_standin_cuda_include})
    target_link_libraries(${name} PRIVATE ${epx_system_libraries})
    target_link_options(${name} PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/${map})
    if(EPX_SANITIZE STREQUAL none)
        target_link_options(${name} PRIVATE LINKER:--no-undefined)
    endif()
    set_target_properties(${name} PROPERTIES
        SOVERSION 0 LINK_DEPENDS ${PROJECT_SOURCE_DIR}/${map} LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}
        INSTALL_RPATH "$ORIGIN")
endfunction()

file(GLOB epx_nccl_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/nccl_ep/*.c)
add_library(nccl_ep_objects OBJECT ${epx_nccl_sources}) # tests/fuzz has them too
epx_target_defaults(nccl_ep_objects)
target_include_directories(nccl_ep_objects PRIVATE
    ${epx_nccl_include} ${epx_standin_nccl_include} ${epx_standin_cuda_include})
set_target_properties(nccl_ep_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
add_library(nccl_ep SHARED $<TARGET_OBJECTS:nccl_ep_objects> $<TARGET_OBJECTS:epx_log_objects>)
epx_nccl_library(nccl_ep src/nccl_ep/nccl_ep.map)
set_target_properties(nccl_ep PROPERTIES LINKER_LANGUAGE C)
target_link_libraries(nccl_ep PRIVATE epx)
target_include_directories(nccl_ep INTERFACE
    $<BUILD_INTERFACE:${epx_nccl_include}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/nccl_ep>)

add_library(epx_nccl SHARED ${PROJECT_SOURCE_DIR}/standin/nccl_comm.c
    ${PROJECT_SOURCE_DIR}/standin/nccl_memory.c ${PROJECT_SOURCE_DIR}/standin/nccl_team.c
    ${PROJECT_SOURCE_DIR}/src/nccl_ep/driver.c
    $<TARGET_OBJECTS:epx_boot_objects> $<TARGET_OBJECTS:epx_log_objects>)
epx_nccl_library(epx_nccl standin/standin.map)
target_include_directories(epx_nccl INTERFACE
    $<BUILD_INTERFACE:${epx_standin_nccl_include}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/epx-standin/nccl>)

file(GLOB epx_cudart_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/standin/cudart*.c)
add_library(epx_cudart SHARED ${epx_cudart_sources} $<TARGET_OBJECTS:epx_log_objects>)
epx_nccl_library(epx_cudart standin/standin.map)
target_include_directories(epx_cudart INTERFACE
    $<BUILD_INTERFACE:${epx_standin_cuda_include}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/epx-standin/cuda>)

# Beside NCCL in one process, a stand-in calls its own functions, not those of the same name.
target_link_options(epx_nccl PRIVATE LINKER:-Bsymbolic-functions)
target_link_options(epx_cudart PRIVATE LINKER:-Bsymbolic-functions)

set_target_properties(epx_nccl PROPERTIES EXPORT_NAME standin_nccl)
set_target_properties(epx_cudart PROPERTIES EXPORT_NAME standin_cudart)
add_library(epx::nccl_ep ALIAS nccl_ep)
add_library(epx::standin_nccl ALIAS epx_nccl)
add_library(epx::standin_cudart ALIAS epx_cudart)

# The same library under the name that programs look for, in a folder of its own.
add_custom_command(TARGET epx_nccl POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/standin
    COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE:epx_nccl> ${CMAKE_BINARY_DIR}/standin/libnccl.so.2)
