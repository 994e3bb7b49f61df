# SPDX-License-Identifier: Apache-2.0
# cmake --install: the header, libepx.so, pkg-config's epx.pc and the CMake package that exports epx::epx.

set(epx_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/epx)

install(TARGETS epx EXPORT epx-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/epx DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT epx-targets NAMESPACE epx:: DESTINATION ${epx_cmake_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/epx-config-version.cmake COMPATIBILITY SameMinorVersion)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/epx-config.cmake.in ${PROJECT_BINARY_DIR}/epx-config.cmake
    INSTALL_DESTINATION ${epx_cmake_dir})
install(FILES ${PROJECT_BINARY_DIR}/epx-config.cmake ${PROJECT_BINARY_DIR}/epx-config-version.cmake
    DESTINATION ${epx_cmake_dir})

# epx.pc finds its prefix from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH epx_pc_to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/epx.pc.in ${PROJECT_BINARY_DIR}/epx.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/epx.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
