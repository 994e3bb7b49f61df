# SPDX-License-Identifier: Apache-2.0
# cmake --install: headers, libepx.so, libnccl_ep.so and the stand-ins, pkg-config's files, the CMake package, and
# completion for shells. What belongs to the stand-ins lies apart from the rest, so that a package of its own may have
# it (debian/).

set(epx_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/epx)

install(TARGETS epx nccl_ep EXPORT epx-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS epx_nccl epx_cudart EXPORT epx-standin-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/epx ${PROJECT_SOURCE_DIR}/include/nccl_ep
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/standin/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/epx-standin)
# For programs that look for NCCL by its name: LD_LIBRARY_PATH may have this folder.
install(FILES $<TARGET_FILE:epx_nccl> DESTINATION ${CMAKE_INSTALL_LIBDIR}/epx-standin RENAME libnccl.so.2)
install(EXPORT epx-targets NAMESPACE epx:: DESTINATION ${epx_cmake_dir})
install(EXPORT epx-standin-targets NAMESPACE epx:: DESTINATION ${epx_cmake_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/epx-config-version.cmake COMPATIBILITY SameMinorVersion)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/epx-config.cmake.in ${PROJECT_BINARY_DIR}/epx-config.cmake
    INSTALL_DESTINATION ${epx_cmake_dir})
install(FILES ${PROJECT_BINARY_DIR}/epx-config.cmake ${PROJECT_BINARY_DIR}/epx-config-version.cmake
    DESTINATION ${epx_cmake_dir})

# Each .pc finds its prefix from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH epx_pc_to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
foreach(package epx epx-nccl-ep epx-standin)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/${package}.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

install(FILES ${PROJECT_SOURCE_DIR}/tools/completion/epx.bash
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME epx)
install(FILES ${PROJECT_SOURCE_DIR}/tools/completion/_epx DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
