# SPDX-License-Identifier: Apache-2.0
# The networks between nodes: libfabric (EPX_OFI) and libibverbs (EPX_VERBS). Only their headers are needed here; the
# libraries are opened at run time. Both are part of a build unless it is asked to leave them out. Every target is
# compiled with EPX_HAVE_OFI, EPX_HAVE_VERBS and EPX_HAVE_EFADV, each 1 or 0.

option(EPX_OFI "The network `ofi`: libfabric (needs rdma/fabric.h)" ON)
option(EPX_VERBS "The network `verbs`: libibverbs (needs infiniband/verbs.h)" ON)

# Finds `header` for the option `option`, and puts its folder into EPX_<name>_INCLUDE. A folder that no longer has the
# header is searched for again, and so is (by CMake itself) one that was not found before.
function(epx_find_header name header)
    if(EPX_${name}_INCLUDE AND NOT EXISTS ${EPX_${name}_INCLUDE}/${header})
        unset(EPX_${name}_INCLUDE CACHE)
    endif()
    find_path(EPX_${name}_INCLUDE ${header} DOC "Folder of ${header}")
    mark_as_advanced(EPX_${name}_INCLUDE)
endfunction()

function(epx_require_header option library header package)
    epx_find_header(${option} ${header})
    if(NOT EPX_${option}_INCLUDE)
        set(without "-DEPX_${option}=OFF")
        if(SKBUILD)
            set(without "CMAKE_ARGS=-DEPX_${option}=OFF pip install .")
        endif()
        message(FATAL_ERROR "${library}'s header ${header} was not found. Install it (Debian: ${package}), "
            "name its folder "
            "(-DEPX_${option}_INCLUDE=FOLDER), or build without this network (${without}).")
    endif()
    include_directories(SYSTEM ${EPX_${option}_INCLUDE})
endfunction()

set(epx_have_ofi 0)
set(epx_have_verbs 0)
set(epx_have_efadv 0)
if(EPX_OFI)
    epx_require_header(OFI libfabric rdma/fabric.h libfabric-dev)
    set(epx_have_ofi 1)
endif()
if(EPX_VERBS)
    epx_require_header(VERBS libibverbs infiniband/verbs.h libibverbs-dev)
    set(epx_have_verbs 1)
    # rdma-core before version 22, and vendors' builds of it, have no EFA.
    epx_find_header(EFADV infiniband/efadv.h)
    if(EPX_EFADV_INCLUDE)
        set(epx_have_efadv 1)
    else()
        message(STATUS "No infiniband/efadv.h: Amazon EFA's cards are used through libfabric alone")
    endif()
endif()
add_compile_definitions(EPX_HAVE_OFI=${epx_have_ofi} EPX_HAVE_VERBS=${epx_have_verbs} EPX_HAVE_EFADV=${epx_have_efadv})
message(STATUS "Networks between nodes: libfabric ${EPX_OFI}, verbs ${EPX_VERBS}")
