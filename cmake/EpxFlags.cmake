# SPDX-License-Identifier: Apache-2.0
# Compiler flags of everything that is ours.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
set(epx_system_libraries Threads::Threads m rt ${CMAKE_DL_LIBS})

if(NOT CMAKE_C_COMPILER_LAUNCHER)
    find_program(EPX_CCACHE ccache)
    if(EPX_CCACHE)
        # Depend mode: what is not in the cache is not preprocessed once more to see that.
        set(CMAKE_C_COMPILER_LAUNCHER env CCACHE_DEPEND=1 ${EPX_CCACHE})
    endif()
endif()

# One result for identical inputs on every machine: no contraction into fused multiply-add, no -ffast-math.
set(epx_compile_options -Wall -Wextra -ffp-contract=off -fno-math-errno -fno-strict-aliasing)
set(epx_link_options)
if(EPX_WERROR)
    list(APPEND epx_compile_options -Werror)
endif()

if(EPX_SANITIZE STREQUAL none)
    list(APPEND epx_compile_options $<$<CONFIG:Release>:-O3>)
    set(epx_timeout_factor 1)
elseif(EPX_SANITIZE STREQUAL address)
    list(APPEND epx_compile_options -g1 -O1 -fno-omit-frame-pointer
        -fsanitize=address,undefined -fno-sanitize-recover=all)
    list(APPEND epx_link_options -fsanitize=address,undefined)
    set(epx_timeout_factor 3)
elseif(EPX_SANITIZE STREQUAL fuzz)
    # clang's libFuzzer: tests/fuzz. Programs other than the harnesses are not meant to be built so.
    list(APPEND epx_compile_options -g1 -O1 -fno-omit-frame-pointer
        -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
    list(APPEND epx_link_options -fsanitize=address,undefined)
    set(epx_timeout_factor 3)
elseif(EPX_SANITIZE STREQUAL thread)
    list(APPEND epx_compile_options -g1 -O1 -fno-omit-frame-pointer -fsanitize=thread)
    list(APPEND epx_link_options -fsanitize=thread)
    if(CMAKE_C_COMPILER_ID STREQUAL GNU)
        # gcc warns that ThreadSanitizer does not follow stand-alone fences; say it, do not stop on it.
        list(APPEND epx_compile_options -Wno-error=tsan)
    endif()
    set(epx_timeout_factor 5)
else()
    message(FATAL_ERROR "EPX_SANITIZE is '${EPX_SANITIZE}'; expected none, address, thread or fuzz")
endif()

# What every target of ours is compiled with, examples included.
function(epx_target_flags target)
    set_target_properties(${target} PROPERTIES
        C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF C_VISIBILITY_PRESET hidden)
    target_compile_options(${target} PRIVATE ${epx_compile_options})
    target_link_options(${target} PRIVATE ${epx_link_options})
endfunction()

# Programs that call the library: tests, tools, examples. Where nobody waits for them, they compile three times as fast
# without optimisation, and sanitizers see accesses that it would have removed.
set(EPX_CALLER_OPTIONS "" CACHE STRING "Compiler options of tests, tools and examples, after those of all files")
mark_as_advanced(EPX_CALLER_OPTIONS)
function(epx_caller target)
    target_compile_options(${target} PRIVATE ${EPX_CALLER_OPTIONS})
endfunction()

# The flags of every target, for code that may look inside: internal headers, and the C library beyond C11.
function(epx_target_defaults target)
    epx_target_flags(${target})
    target_compile_definitions(${target} PRIVATE _GNU_SOURCE=)
    target_include_directories(${target} PRIVATE
        ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
endfunction()
