# SPDX-License-Identifier: Apache-2.0
# Levels of the CPU's math (src/device/cpu/math_levels.h): each file for the instructions that its level has. At run
# time the machine is asked which it has. A file whose flags the compiler does not know is empty.

include(CheckCCompilerFlag)

function(epx_math_level name flags)
    string(REPLACE ";" " " spaced "-Werror;${flags}")
    check_c_compiler_flag("${spaced}" EPX_CC_KNOWS_${name})
    if(EPX_CC_KNOWS_${name})
        set_source_files_properties(${PROJECT_SOURCE_DIR}/src/device/cpu/math_${name}.c
            PROPERTIES COMPILE_OPTIONS "${flags}")
    endif()
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|amd64|AMD64")
    set(avx2 -mavx2 -mfma -mf16c)
    set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
    epx_math_level(avx2 "${avx2}")
    epx_math_level(avx512 "${avx512}")
    epx_math_level(avx512bf16 "${avx512};-mavx512bf16")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    epx_math_level(bf16 "-march=armv8.2-a+bf16")
endif()
