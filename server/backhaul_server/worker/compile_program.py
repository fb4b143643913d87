"""The child process that compiles a program for a worker: see NOTE [Compiling].

Usage: python -m backhaul_server.worker.compile_program DEVICE DIRECTORY SECONDS BYTES WORKER, with the encoded program
as standard input. It leaves what Inductor has made in the directory, or in Inductor's own if that is empty. If it
fails, it says why in one line. It ends with the worker, whose process id is the last argument.
"""

import os
import resource
import signal
import sys
import threading
import time

_POLL_S = 0.5


def _end_with(worker: int) -> None:
    """Ends this process and its compilers when the worker is gone, which may have been killed."""
    while os.getppid() == worker:
        time.sleep(_POLL_S)
    os.killpg(os.getpid(), signal.SIGKILL)  # the worker has started this process as the leader of a group


def _limit(what: int, most: int) -> None:
    """Limits a resource of this process. Only root could raise a limit that is lower already."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def main() -> int:
    """Compiles the program. Returns the exit code."""
    device_name, directory, limit_s, limit_bytes, worker = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(worker),), name="backhaul-end", daemon=True).start()
    _limit(resource.RLIMIT_CPU, int(float(limit_s)))
    if device_name == "cpu":  # CUDA maps more addresses than a machine has memory
        _limit(resource.RLIMIT_AS, int(limit_bytes))
    import torch

    from backhaul_runtime.errors import BackhaulError
    from backhaul_runtime.program.codec import decode_program
    from backhaul_runtime.replay.compiled_programs import compile_program
    from backhaul_runtime.torch_internals.inductor import CompiledFiles

    device = torch.device(device_name)
    try:
        program = decode_program(sys.stdin.buffer.read(), device)
        compile_program(program, device, CompiledFiles(directory, are_made=False))
    except BackhaulError as error:
        sys.stdout.write(error.message.splitlines()[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
