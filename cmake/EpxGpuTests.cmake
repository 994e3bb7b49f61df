# SPDX-License-Identifier: Apache-2.0
# Test programs for machines with a GPU, run by scripts/gpu.sh; built wherever a GPU module is. gpu_prop and gpu_net
# reach the GPU through the module and link no vendor's library. They need no cmocka, which such machines often lack.

if(NOT TARGET epx_cuda AND NOT TARGET epx_hip)
    return()
endif()

foreach(program gpu_prop gpu_net)
    add_executable(${program} ${PROJECT_SOURCE_DIR}/tests/gpu/${program}.c)
    epx_target_defaults(${program})
    target_link_libraries(${program} PRIVATE epx_support epx_static)
    set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
endforeach()

# The tests of NCCL EP's interface (tests/nccl_ep) with the real CUDA runtime and GPU memory. Several ranks share a GPU,
# which NCCL refuses: NCCL stays the stand-in.
if(TARGET epx_cuda)
    file(GLOB epx_nccl_ranks CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/nccl_ep/*.c)
    list(FILTER epx_nccl_ranks EXCLUDE REGEX
        "/(comm|call_time|random|random_calls|random_checks|nonsense|model|sms)\\.c$")
    add_executable(nccl_ep_ranks_cuda ${epx_nccl_ranks} $<TARGET_OBJECTS:epx_oracle_objects>)
    epx_target_flags(nccl_ep_ranks_cuda)
    target_compile_definitions(nccl_ep_ranks_cuda PRIVATE _GNU_SOURCE=)
    target_include_directories(nccl_ep_ranks_cuda PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
    target_link_libraries(nccl_ep_ranks_cuda PRIVATE epx::nccl_ep epx::standin_nccl epx::epx CUDA::cudart_static m)
    add_executable(epx_ep_bench_cuda ${epx_ep_bench_sources})
    epx_target_flags(epx_ep_bench_cuda)
    target_compile_definitions(epx_ep_bench_cuda PRIVATE _GNU_SOURCE=)
    target_include_directories(epx_ep_bench_cuda PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(epx_ep_bench_cuda PRIVATE epx::nccl_ep epx::standin_nccl epx::epx CUDA::cudart_static m)
    set_target_properties(epx_ep_bench_cuda PROPERTIES OUTPUT_NAME epx-ep-bench-cuda
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
    set_target_properties(nccl_ep_ranks_cuda PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})

    # An example, which needs a GPU to run.
    add_executable(example_decode_graph_cuda ${PROJECT_SOURCE_DIR}/examples/decode_graph.cu)
    set_target_properties(example_decode_graph_cuda PROPERTIES
        OUTPUT_NAME decode_graph_cuda CUDA_STANDARD 17 CUDA_ARCHITECTURES "${epx_cuda_architectures}"
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/examples)
    target_link_libraries(example_decode_graph_cuda PRIVATE epx::epx)
endif()
