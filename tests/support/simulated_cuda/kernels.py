"""Compiles CUDA kernels for the host: the same code, with a shim for what CUDA's C++ adds to C++.

A block has one thread, so a kernel must be right for any size of a block. Blocks run one after the other.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from shutil import which
from typing import Any

FOLDER = Path(__file__).parents[3] / "build/simulated_cuda"

SHIM = """
#include <cstring>
struct Index { unsigned x, y, z; };
// Each stream is a thread, and two of them may run one kernel at the same time.
static thread_local Index gridDim{1, 1, 1}, blockDim{1, 1, 1}, blockIdx{0, 0, 0}, threadIdx{0, 0, 0};
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
static inline void __syncthreads() {}
// The other threads of a block of one have nothing to add.
template <class T> static inline T __shfl_down_sync(unsigned, T, int) { return T(0); }
template <class T> static inline T atomicAdd(T* to, T value) { T before = *to; *to += value; return before; }
template <class T> static inline T __ldg(const T* from) { return *from; }
"""

RUNNER = """
extern "C" void run_on_host(unsigned grid, const long long* arguments) {{
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {name}({arguments});
}}
"""


def compile_for_host(code: str, name: str) -> Any:
    """Returns the ctypes function `run_on_host(grid, arguments)` of a kernel, whose arguments are 64-bit words.

    Args:
        code: The code of the kernel, which is `extern "C"` and includes nothing.
        name: The name of the kernel.
    """
    signature = re.search(rf"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?{name}\s*\(([^)]*)\)", code)
    assert signature is not None, f"there is no kernel {name}"
    types = [parameter.strip().rpartition(" ")[0] for parameter in signature[1].split(",")]
    arguments = ", ".join(f"({kind})arguments[{number}]" for number, kind in enumerate(types))
    text = SHIM + code + RUNNER.format(name=name, arguments=arguments)
    library = FOLDER / f"kernel-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            file, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            file.write_text(text)
            compiler = which(os.environ.get("CXX", "g++"))
            assert compiler is not None, "a kernel for the host needs a C++ compiler"
            flags = ("-shared", "-fPIC", "-std=c++17", "-O2", "-w", "-fno-strict-aliasing")
            subprocess.run([compiler, *flags, str(file), "-o", str(made)], check=True)
            made.rename(library)
    return ctypes.CDLL(str(library)).run_on_host
