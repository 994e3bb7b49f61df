# SPDX-License-Identifier: Apache-2.0
# What a Python wheel takes from this build (pyproject.toml): one folder with the library, its device modules and the
# program beside each other, which is where they look for each other. A wheel holds no symbolic links: one plain
# libepx.so.

add_custom_target(epx_python DEPENDS epx epx_tool)
install(FILES $<TARGET_FILE:epx> DESTINATION lib RENAME libepx.so COMPONENT python EXCLUDE_FROM_ALL)
install(PROGRAMS $<TARGET_FILE:epx_tool> DESTINATION lib COMPONENT python EXCLUDE_FROM_ALL)
foreach(module epx_cuda epx_hip)
    if(TARGET ${module})
        add_dependencies(epx_python ${module})
        install(TARGETS ${module} LIBRARY DESTINATION lib COMPONENT python EXCLUDE_FROM_ALL)
    endif()
endforeach()
