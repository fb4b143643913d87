"""Compiles trainers' programs with Inductor, in child processes. Event loop only.

NOTE [Compiling]
1. Inductor writes C++ or Triton code for a program, compiles it, and loads what it has made. The program is data that
   has passed all checks; the worker loads nothing that others have made, neither code nor compiled files.
2. Compiling takes seconds to minutes and much memory, and whoever sends a program decides how much. So a child process
   compiles it, with limits of time and memory, one program at a time. It leaves its files in a directory of the
   credential's own. A worker that a trainer has started for itself uses Inductor's own directory, where the trainer's
   files are.
3. From the files the executor's thread then makes the function, in some hundredths of a second. Only that thread may
   change torch's settings, which take part in it. If a file is missing, that is an error: nothing compiles there.
4. Until then the worker does not take the program: its trainer recomputes such segments itself.
5. Python cannot unload code. So a function is kept until the worker ends, also for later sessions of its credential,
   and is charged as long. All of them together may take one part in `CODE_PART` of the budget.
"""

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

import torch

from backhaul_runtime.errors import BudgetError, CompilingError, ProgramError
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.compiled_programs import (
    CompiledFunction,
    compile_program,
    functions,
    why_not_compiled,
    why_not_for_others,
)
from backhaul_runtime.torch_internals import inductor
from backhaul_runtime.torch_internals.inductor import CompiledFiles
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.engine.compilation_directories import CompilationDirectories
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import StoredValue
from backhaul_server.worker.limits import COMPILATIONS

logger = logging.getLogger("backhaul.worker")

COMPILE_LIMIT_S = 600.0
"""Seconds that the compilation of one program may take."""

COMPILE_LIMIT_BYTES = 16 << 30
"""Bytes of address space that each process of a compilation may have. torch alone maps some 4 GiB."""

CODE_PART = 8
"""The part of the budget that compiled code may take."""

_PROGRAM_BYTES, _NODE_BYTES = 1 << 20, 48 << 10
"""Bytes that compiled code is charged with, and those for each op. 1.0 MiB were measured for 5 ops, 2.6 for 46."""

_MOST_FAILURES, _RETRY_S = 256, 600.0
"""The number of failures that are remembered, and the seconds after which such a program is compiled again."""

_EXPECTED_S = 30.0
"""What trainers are told about the first compilation, before one was measured."""


@dataclass(frozen=True, slots=True)
class _Code:
    """The owner of what a credential has compiled, in the store.

    Attributes:
        account: The account of the credential.
        id: What stands for the id of a session.
    """

    account: Account
    id: str = "compiled code"


@dataclass(slots=True, eq=False)
class _Compilation:
    """The compilation of one program for one credential.

    Attributes:
        began_at_s: When it was asked for, by the monotonic clock.
        function: What it has made; None before.
    """

    began_at_s: float
    function: CompiledFunction | None = None


_Key = tuple[str, bytes]
"""The name of a credential, and the digest of a program."""


class Compiler:
    """Compiles the programs of a worker.

    Args:
        device: The device on which programs run.
        store: The worker's memory accounts.
        executor: The thread that runs programs.
        is_trainers_own: Whether the only trainer has started this worker.
    """

    def __init__(
        self, device: torch.device, store: Store[StoredValue], executor: Executor, *, is_trainers_own: bool
    ) -> None:
        self._device, self._store, self._executor = device, store, executor
        self._is_trainers_own = is_trainers_own
        self._directories = CompilationDirectories()
        self._compilations: dict[_Key, _Compilation] = {}
        self._failed: dict[_Key, tuple[float, str]] = {}  # when, and why
        self._code_bytes = 0
        self._one = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        self._facts: dict[str, str] | None = None
        self._expected_s = _EXPECTED_S

    async def close(self) -> None:
        """Ends the compilation in progress, and removes all files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._directories.close)

    def check(self, account: Account, digest: bytes, encoded: bytes, program: Program) -> None:
        """Returns if a program is compiled for a credential. Otherwise begins to compile it.

        Args:
            account: The account of the credential.
            digest: The SHA-256 of the encoded program.
            encoded: The program as it was sent.
            program: The program, which gets the compiled function.

        Raises:
            BudgetError: There is no room for its code.
            CompilingError: It is being compiled.
            LimitError: Too many programs of this credential wait for that.
            ProgramError: It cannot be compiled, or was compiled with something else on the trainer.
        """
        reason = why_not_compiled(program)
        if not self._is_trainers_own:
            reason = reason or why_not_for_others(program)
        if reason:
            raise ProgramError(f"the program cannot run compiled: {reason}")
        key = account.name, digest
        failed_at_s, reason = self._failed.get(key, (0.0, ""))
        if reason and monotonic() < failed_at_s + _RETRY_S:
            raise ProgramError(reason)
        present = self._compilations.get(key)
        if present is None:
            of_account = [one for (name, _), one in self._compilations.items() if name == account.name]
            COMPILATIONS.check(1 + sum(one.function is None for one in of_account))
            code_bytes = self._charge(account, program)
            present = self._compilations[key] = _Compilation(monotonic())
            task = asyncio.create_task(self._compile(key, account, encoded, program, code_bytes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if present.function is None:
            took_s = monotonic() - present.began_at_s
            raise CompilingError(
                f"the worker still compiles the program, which takes about {self._expected_s:.0f} s",
                expected_s=max(0.0, self._expected_s - took_s),
            )
        functions[program] = present.function

    def _charge(self, account: Account, program: Program) -> int:
        """Charges a credential with the code of a program. Returns its bytes. Raises BudgetError."""
        code_bytes = _PROGRAM_BYTES + _NODE_BYTES * len(program.nodes)
        most_bytes = self._store.budget_bytes // CODE_PART
        if self._code_bytes + code_bytes > most_bytes:
            raise BudgetError(
                f"the worker has no room for the compiled code of a program, about {code_bytes} bytes: it may keep "
                f"{most_bytes}, and keeps {self._code_bytes} until it ends. Restart it, or give it more with --memory",
                needed_bytes=self._code_bytes + code_bytes,
                budget_bytes=most_bytes,
            )
        self._store.charge(_Code(account), f"{code_bytes} bytes of compiled code", code_bytes)
        self._code_bytes += code_bytes
        return code_bytes

    async def _compile(self, key: _Key, account: Account, encoded: bytes, program: Program, code_bytes: int) -> None:
        async with self._one:
            began_at_s, directory = monotonic(), ""
            try:
                if not self._is_trainers_own:
                    directory = await asyncio.to_thread(self._directories.of, account.name)
                error = await self._difference(program) or await self._run(directory, encoded)
                if not error:
                    files = CompiledFiles(directory, are_made=True)
                    make = partial(compile_program, program, self._device, files)
                    self._compilations[key].function = await self._executor.run(account.name, "compiled code", make)
            except Exception as raised:  # such as a full disk: the trainer recomputes
                logger.exception("A program was not compiled.")
                error = f"the worker could not compile the program: {type(raised).__name__}: {raised}"
        if not error:
            self._expected_s = monotonic() - began_at_s
            logger.info("A program was compiled in %.1f s.", self._expected_s)
            return
        logger.warning("A program was not compiled: %s", error)
        del self._compilations[key]
        self._store.refund(_Code(account), code_bytes)
        self._code_bytes -= code_bytes
        self._failed.pop(key, None)
        self._failed[key] = monotonic(), error
        if len(self._failed) > _MOST_FAILURES:
            del self._failed[next(iter(self._failed))]

    async def _difference(self, program: Program) -> str:
        """Returns why this worker's kernels have other bits than the trainer's; empty if they have the same."""
        assert program.compilation is not None
        if self._facts is None:
            self._facts = await asyncio.to_thread(inductor.prepare, self._device)
        theirs = dict(program.compilation.facts)
        different = [
            f"{name} is {theirs.get(name, '-')} there and {self._facts.get(name, '-')} here"
            for name in sorted({*theirs, *self._facts})
            if theirs.get(name) != self._facts.get(name)
        ]
        return f"the worker compiles otherwise than the trainer: {', '.join(different)}" if different else ""

    async def _run(self, directory: str, encoded: bytes) -> str:
        """Compiles a program in a child process. Returns why that has failed; empty if it has not."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "backhaul_server.worker.compile_program"),
            *(str(self._device), directory, str(COMPILE_LIMIT_S), str(COMPILE_LIMIT_BYTES), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that its compilers end with it
            pass_fds=[] if self._directories.lock < 0 else [self._directories.lock],
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
