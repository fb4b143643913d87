"""Runs a command in which torch has a simulated CUDA device: `python -m support.simulated_cuda COMMAND...` in tests/.

Python's options and modules are taken by `python -m support.simulated_cuda python -m pytest ...`. Processes that the
command starts have the device too. Where the device cannot be built, the command runs without, after the reason.
"""

import os
import sys

from support.simulated_cuda.build import HERE, library, obstacle


def main(command: list[str]) -> None:
    """Replaces this process by the command. Builds the device first if it is missing."""
    if not command:
        sys.exit("python -m support.simulated_cuda COMMAND...: which command?")
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    if why := obstacle():
        sys.stderr.write(f"WITHOUT THE SIMULATED DEVICE: {why}\n")
        os.execvp(command[0], command)
    path = os.pathsep.join([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"SIMULATED_CUDA": str(library()), "PYTHONPATH": path}
    os.execvpe(command[0], command, {"SIMULATED_CUDA_LAZY": "1", **os.environ, **variables})


main(sys.argv[1:])
