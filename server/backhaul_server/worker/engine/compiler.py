"""Compiles trainers' programs with Inductor, in child processes. Event loop only.

NOTE [Compiling]
1. Inductor writes C++ or Triton code for a program, compiles it, and loads what it has made. The program is data that
   has passed all checks; the worker loads nothing that others have made, neither code nor compiled files.
2. Compiling takes seconds to minutes and much memory, and whoever sends a program decides how much. So a child process
   compiles it, with limits of time and memory, one program at a time. It leaves its files in a directory of the
   credential's own, from which this process then makes the function in a second or two. A worker that a trainer has
   started for itself uses Inductor's own directory, where the trainer's files are.
3. Until then the worker does not take the program: its trainer recomputes such segments itself.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from backhaul_runtime.errors import CompilingError, ProgramError
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.compiled_programs import compile_program, functions, why_not_compiled, why_not_for_others
from backhaul_runtime.torch_internals import inductor
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.limits import COMPILATIONS

logger = logging.getLogger("backhaul.worker")

COMPILE_LIMIT_S = 600.0
"""Seconds that the compilation of one program may take."""

COMPILE_LIMIT_BYTES = 16 << 30
"""Bytes of address space that each process of a compilation may have. torch alone maps some 4 GiB."""

MOST_PROGRAMS = 64
"""Number of programs that are kept compiled for one credential. Each takes some megabytes of files."""

_EXPECTED_S = 30.0
"""What trainers are told about the first compilation, before one was measured."""


@dataclass(slots=True, eq=False)
class _Compilation:
    """The compilation of one program for one credential.

    Attributes:
        began_at_s: When it was asked for, by the monotonic clock.
        error: Why it has failed; empty if it has not.
        is_done: Whether it has ended.
    """

    began_at_s: float = field(default_factory=monotonic)
    error: str = ""
    is_done: bool = False


class Compiler:
    """Compiles the programs of a worker.

    Args:
        device: The device on which programs run.
        is_trainers_own: Whether the only trainer has started this worker.
    """

    def __init__(self, device: torch.device, *, is_trainers_own: bool) -> None:
        self._device, self._is_trainers_own = device, is_trainers_own
        self._directory: Path | None = None
        self._compilations: dict[tuple[str, bytes], _Compilation] = {}
        self._one = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        self._facts: dict[str, str] | None = None
        self._expected_s = _EXPECTED_S

    async def close(self) -> None:
        """Ends the compilation in progress, and removes all files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def check(self, account: Account, address: bytes, encoded: bytes, program: Program) -> None:
        """Returns if a program is compiled for a credential. Otherwise begins to compile it.

        Args:
            account: The account of the credential.
            address: The address of the program.
            encoded: The program as it was sent.
            program: The program, which gets the compiled function when it first runs.

        Raises:
            CompilingError: It is being compiled.
            LimitError: Too many programs of this credential wait for that.
            ProgramError: It cannot be compiled, or was compiled with something else on the trainer.
        """
        reason = why_not_compiled(program)
        if not self._is_trainers_own:
            reason = reason or why_not_for_others(program)
        if reason:
            raise ProgramError(f"the program cannot run compiled: {reason}")
        present = self._compilations.get((account.name, address))
        if present is None:
            COMPILATIONS.check(1 + sum(not one.is_done for one in self._of(account).values()))
            present = self._compilations[account.name, address] = _Compilation()
            task = asyncio.create_task(self._compile(present, account, encoded, program))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if present.error:
            raise ProgramError(present.error)
        if not present.is_done:
            took_s = monotonic() - present.began_at_s
            raise CompilingError(
                f"the worker still compiles the program, which takes about {self._expected_s:.0f} s",
                expected_s=max(0.0, self._expected_s - took_s),
            )
        directory = self._directory_of(account)
        functions.note(program, partial(compile_program, device=self._device, directory=directory))

    def _of(self, account: Account) -> dict[tuple[str, bytes], _Compilation]:
        return {key: one for key, one in self._compilations.items() if key[0] == account.name}

    async def _forget(self, account: Account) -> None:
        """Forgets what was compiled for a credential, and removes the files. Functions that are in use stay."""
        for key, one in self._of(account).items():
            if one.is_done:
                del self._compilations[key]
        if directory := self._directory_of(account):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _directory_of(self, account: Account) -> str:
        if self._is_trainers_own:
            return ""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="backhaul-compiled-"))  # only this user can read it
        return str(self._directory / hashlib.sha256(account.name.encode()).hexdigest()[:16])

    async def _compile(self, present: _Compilation, account: Account, encoded: bytes, program: Program) -> None:
        try:
            async with self._one:
                if len(self._of(account)) > MOST_PROGRAMS:
                    await self._forget(account)
                began_at_s = monotonic()
                present.error = await self._difference(program) or await self._run(account, encoded)
                if not present.error:
                    self._expected_s = monotonic() - began_at_s
                    logger.info("A program was compiled in %.1f s.", self._expected_s)
                else:
                    logger.warning("A program was not compiled: %s", present.error)
        except Exception as error:  # such as a full disk: the trainer recomputes
            present.error = f"the worker could not compile the program: {type(error).__name__}: {error}"
            logger.exception("A program was not compiled.")
        finally:
            present.is_done = True

    async def _difference(self, program: Program) -> str:
        """Returns why this worker's kernels have other bits than the trainer's; empty if they have the same."""
        assert program.compilation is not None
        if self._facts is None:
            self._facts = await asyncio.to_thread(inductor.facts, self._device)
        theirs = dict(program.compilation.facts)
        different = [
            f"{name} is {theirs.get(name, '-')} there and {self._facts.get(name, '-')} here"
            for name in sorted({*theirs, *self._facts})
            if theirs.get(name) != self._facts.get(name)
        ]
        return f"the worker compiles otherwise than the trainer: {', '.join(different)}" if different else ""

    async def _run(self, account: Account, encoded: bytes) -> str:
        """Compiles a program in a child process. Returns why that has failed; empty if it has not."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "backhaul_server.worker.compile_program"),
            *(str(self._device), self._directory_of(account), str(COMPILE_LIMIT_S), str(COMPILE_LIMIT_BYTES)),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that its compilers end with it
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(encoded), COMPILE_LIMIT_S)
        except TimeoutError:
            return f"the program was not compiled in {COMPILE_LIMIT_S:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            text = said.decode(errors="replace").strip() or f"the compilation ended with code {process.returncode}"
            return f"the worker could not compile the program: {text.splitlines()[0][:500]}"
        return ""
