# SPDX-License-Identifier: Apache-2.0
# libepx_cuda.so, the module that the library opens when a group asks for the cuda device. Built where nvcc is; the
# library itself knows nothing of it.

set(EPX_CUDA AUTO CACHE STRING
    "Build the CUDA module: ON, OFF, or AUTO: where nvcc is, unless with clang or a sanitizer")
set_property(CACHE EPX_CUDA PROPERTY STRINGS AUTO ON OFF)
set(EPX_CUDA_ARCHITECTURES "" CACHE STRING
    "GPU architectures of the CUDA module; empty = those of its nvcc from 80 to 100")
if(NOT EPX_CUDA OR NOT EPX_SANITIZE STREQUAL none OR (EPX_CUDA STREQUAL AUTO AND NOT CMAKE_C_COMPILER_ID STREQUAL GNU))
    return()
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
set(CMAKE_CUDA_ARCHITECTURES 90) # for CMake's own trials
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER AND NOT EPX_CUDA STREQUAL AUTO)
    message(FATAL_ERROR "EPX_CUDA is ON, and there is no nvcc")
elseif(NOT CMAKE_CUDA_COMPILER)
    message(STATUS "No nvcc: the CUDA module is not built")
    return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(epx_cuda_architectures ${EPX_CUDA_ARCHITECTURES})
if(NOT epx_cuda_architectures AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    set(epx_cuda_architectures "80-real;90-real;90-virtual")
elseif(NOT epx_cuda_architectures)
    set(epx_cuda_architectures "80-real;90-real;100-real;100-virtual")
endif()

file(GLOB epx_cuda_sources CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/device/gpu/*.c ${PROJECT_SOURCE_DIR}/src/device/gpu/*.cu)
add_library(epx_cuda MODULE ${epx_cuda_sources} ${epx_build_source})
add_dependencies(epx_cuda epx_build_number)
set_target_properties(epx_cuda PROPERTIES
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_VISIBILITY_PRESET hidden
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden
    CUDA_ARCHITECTURES "${epx_cuda_architectures}"
    POSITION_INDEPENDENT_CODE ON LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
target_compile_definitions(epx_cuda PRIVATE $<$<COMPILE_LANGUAGE:C>:_GNU_SOURCE=>)
target_compile_options(epx_cuda PRIVATE
    $<$<COMPILE_LANGUAGE:C>:${epx_compile_options}>
    # One result for identical inputs, as everywhere: no fused multiply-add. The host's part is C but for what nvcc
    # adds: it needs no C++ library.
    "$<$<COMPILE_LANGUAGE:CUDA>:-O3;-lineinfo;-fmad=false;-Xptxas=-v>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-fno-exceptions,-fno-threadsafe-statics>")
set(epx_cuda_launcher
    ${PROJECT_SOURCE_DIR}/scripts/keep_report.sh ${CMAKE_BINARY_DIR}/ptxas ${CMAKE_CUDA_COMPILER_LAUNCHER})
set_target_properties(epx_cuda PROPERTIES CUDA_COMPILER_LAUNCHER "${epx_cuda_launcher}")
target_include_directories(epx_cuda PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(epx_cuda PRIVATE CUDA::cudart_static)
target_link_options(epx_cuda PRIVATE LINKER:--as-needed)
install(TARGETS epx_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
