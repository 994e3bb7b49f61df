/* SPDX-License-Identifier: Apache-2.0 */
/* A profiler for a test of NVTX ranges: says on stderr which begin and end. NVTX loads it by NVTX_INJECTION64_PATH.
 * tests/scripts/trace_nvtx.sh compiles it where the header is. */
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>

static int NVTX_API push(const char *name)
{
    fprintf(stderr, "nvtx %s\n", name);
    return 0;
}

static int NVTX_API pop(void)
{
    fprintf(stderr, "nvtx-pop\n");
    return 0;
}

int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table);
int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table)
{
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;

    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size))
        return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
#endif
