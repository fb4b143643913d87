"""The child process that compiles a program for a worker: see NOTE [Compiling].

Usage: python -m backhaul_server.worker.compile_program DEVICE DIRECTORY SECONDS BYTES, with the encoded program as
standard input. It leaves what Inductor has made in the directory, or in Inductor's own if that is empty. If it fails,
it says why in one line.
"""

import resource
import sys
from pathlib import Path


def main() -> int:
    """Compiles the program. Returns the exit code."""
    device_name, directory, limit_s, limit_bytes = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (int(float(limit_s)), int(float(limit_s))))
    if device_name == "cpu":  # CUDA maps more addresses than a machine has memory
        resource.setrlimit(resource.RLIMIT_AS, (int(limit_bytes), int(limit_bytes)))
    import torch

    from backhaul_runtime.errors import BackhaulError
    from backhaul_runtime.program.codec import decode_program
    from backhaul_runtime.replay.compiled_programs import compile_program

    if directory:
        Path(directory).mkdir(mode=0o700, exist_ok=True)
    device = torch.device(device_name)
    try:
        program = decode_program(sys.stdin.buffer.read(), device)
        compile_program(program, device, directory=directory)
    except BackhaulError as error:
        sys.stdout.write(error.message.splitlines()[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
