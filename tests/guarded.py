"""A pytest plugin that gives each GPU tensor memory of its own, between unmapped addresses instead of other tensors.

A kernel that reads or writes out of bounds then ends its process, which pytest-xdist reports with the test's name. The
bound is exact, to 256 bytes, at the start or at the end of a tensor, as `MOE_KERNELS_GUARD` says:

    MOE_KERNELS_GUARD=start python -m pytest -p tests.guarded -m gpu -n 8
    MOE_KERNELS_GUARD=end python -m pytest -p tests.guarded -m gpu -n 8

Why a process ended, and in which test, is written to guarded.log in the current folder. With this allocator CUDA graphs
cannot be captured, nor memory counted: tests are skipped where they begin to do so. Each tensor takes at least 2 MiB.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from triton.backends.nvidia import driver

# https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
SOURCE = r"""
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE ((size_t)2 << 20)
#define MOST 1048576
static struct { CUdeviceptr range, data; size_t size; CUmemGenericAllocationHandle handle; } live[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED) return;
    const char *message = "", *test = getenv("PYTEST_CURRENT_TEST");
    cuGetErrorString(result, &message);
    FILE *log = fopen(LOG, "a");
    if (log) fprintf(log, "%s: %s: %s\n", test ? test : "", what, message), fclose(log);
    _exit(70);
}

void *guarded_alloc(ssize_t size, int device, void *stream) {
    if (size <= 0) return NULL;
    size_t mapped = (size + PAGE - 1) / PAGE * PAGE, used = ((size_t)size + 255) / 256 * 256;
    CUmemLocation where = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = where};
    CUmemAccessDesc access = {.location = where, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr range;
    check(cuMemCreate(&handle, mapped, &prop, 0), "cuMemCreate");
    check(cuMemAddressReserve(&range, mapped + 2 * PAGE, 0, 0, 0), "cuMemAddressReserve");
    check(cuMemMap(range + PAGE, mapped, 0, handle, 0), "cuMemMap");
    check(cuMemSetAccess(range + PAGE, mapped, &access, 1), "cuMemSetAccess");
    CUdeviceptr data = range + PAGE + (getenv("MOE_KERNELS_GUARD")[0] == 'e' ? mapped - used : 0);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MOST && live[i].range) i++;
    if (i == MOST) check(CUDA_ERROR_OUT_OF_MEMORY, "too many tensors");
    live[i].range = range, live[i].data = data, live[i].size = mapped, live[i].handle = handle;
    pthread_mutex_unlock(&lock);
    return (void *)data;
}

void guarded_free(void *data, ssize_t size, int device, void *stream) {
    CUcontext context = NULL;
    cuCtxGetCurrent(&context);
    if (!context) {
        check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
        check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    }
    check(cuCtxSynchronize(), "a kernel touched what is not mapped, or failed");
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (live[i].range && live[i].data == (CUdeviceptr)data) {
            check(cuMemUnmap(live[i].range + PAGE, live[i].size), "cuMemUnmap");
            check(cuMemRelease(live[i].handle), "cuMemRelease");
            check(cuMemAddressFree(live[i].range, live[i].size + 2 * PAGE), "cuMemAddressFree");
            live[i].range = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
}
"""


def _use() -> None:
    include = Path(driver.__file__).parent / "include"
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "guarded.c", folder / "guarded.so"
    source.write_text(SOURCE)
    libcuda = Path(driver.libcuda_dirs()[0]) / "libcuda.so.1"
    log = f'-DLOG="{Path.cwd() / "guarded.log"}"'
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", log, f"-I{include}", "-o", library, source, libcuda]
    subprocess.run(command, check=True)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "guarded_alloc", "guarded_free")
    torch.cuda.memory.change_current_allocator(allocator)
    # A graph would be replayed on memory that is no longer mapped.
    torch.cuda.graph.__enter__ = _skip
    torch.cuda.reset_peak_memory_stats = torch.cuda.memory.memory_stats_as_nested_dict = _skip


def _skip(*args: Any, **kwargs: Any) -> NoReturn:
    pytest.skip("not with the allocator of tests/guarded.py")


if os.environ.get("MOE_KERNELS_GUARD") not in ("start", "end"):
    raise ValueError("MOE_KERNELS_GUARD: expected start or end")
_use()
