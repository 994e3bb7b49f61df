# SPDX-License-Identifier: Apache-2.0
# What a Python wheel takes from this build (pyproject.toml): one folder with the library, its device modules, the
# extension for Python and the program beside each other, which is where they look for each other. A wheel holds no
# symbolic links: each library has the one name that others ask for. NCCL EP's interface and the stand-ins lie there
# too; standin/libnccl.so.2 is for programs that look for NCCL by that name (docs/nccl_ep.md).

add_custom_target(epx_python DEPENDS epx epx_tool nccl_ep epx_nccl epx_cudart)
install(FILES $<TARGET_FILE:epx> DESTINATION lib RENAME libepx.so.0 COMPONENT python EXCLUDE_FROM_ALL)
foreach(library nccl_ep epx_nccl epx_cudart)
    install(FILES $<TARGET_FILE:${library}> DESTINATION lib RENAME lib${library}.so COMPONENT python EXCLUDE_FROM_ALL)
endforeach()
install(FILES $<TARGET_FILE:epx_nccl> DESTINATION lib/standin RENAME libnccl.so.2 COMPONENT python EXCLUDE_FROM_ALL)
install(PROGRAMS $<TARGET_FILE:epx_tool> DESTINATION lib COMPONENT python EXCLUDE_FROM_ALL)
foreach(module epx_cuda epx_hip epx_calls)
    if(TARGET ${module})
        add_dependencies(epx_python ${module})
        install(TARGETS ${module} LIBRARY DESTINATION lib COMPONENT python EXCLUDE_FROM_ALL)
    endif()
endforeach()
