"""The resolver `ray:NAME`, which names the workers of a fleet in a Ray cluster. Imports neither Ray nor torch.

NOTE [Follower]
1. Another process asks Ray. Ray ends each process that has joined a cluster about a minute after the cluster's head is
   lost. It also takes over the handler of SIGTERM, and lets no process join a second time. None of that may happen to a
   training program.
2. The process is asked by a message, and answers with one. It ends when its connection to the trainer is closed.
3. The first call waits as long as Ray may take to join, and later ones for a moment only: the calling thread has
   other resolvers. An answer that comes later is the answer to the next call.
4. If the process ends, another one is started, at most once in `RESTART_S`, because importing Ray takes seconds of
   computing time.
"""

import json
import subprocess
import sys
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from backhaul_runtime.errors import ConnectError
from backhaul_runtime.process.addresses import Address, parse_address
from backhaul_runtime.process.ray_fleet import JOIN_S, default_address

FIRST_ANSWER_S = JOIN_S + 60.0
"""Seconds for the first answer: Ray is imported before it can join."""
NEXT_ANSWER_S = 2.0
RESTART_S = 10.0


class RayResolver:
    """The workers of a fleet. Their certificates must have the fleet's name.

    Args:
        text: The resolver as the user wrote it.
        name: The name of the fleet.

    Attributes:
        text: The resolver as the user wrote it.
        is_fixed: False, for workers join and leave the fleet.
    """

    is_fixed = False

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection
        self._started_at_s = -RESTART_S
        self._is_asked = self._has_answered = self._is_closed = False
        self._trouble = ""

    def resolve(self) -> list[Address]:
        """Asks Ray. See `Resolver.resolve`."""
        try:
            answer = self._ask()
        except (EOFError, OSError):
            self._end()
            answer = {"trouble": self._trouble or "The process that asks Ray has ended"}
        if "trouble" in answer:
            self._trouble = answer["trouble"]
            raise ConnectError(self._trouble, address=self.text)
        self._trouble = ""
        return [replace(parse_address(text), verified_name=self._name) for text in answer["addresses"]]

    def close(self) -> None:
        """Ends the process that asks Ray, and lets no later call start another one."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # an orderly end takes Ray a second, and nothing depends on it
            process.wait()
            self._channel.close()

    def _ask(self) -> Any:
        """Returns the process's answer, or that there is none yet.

        Raises:
            EOFError: The process has ended.
            OSError: The process has ended.
        """
        if self._process is None:
            if self._is_closed:
                return {"trouble": "The resolver is closed"}
            if monotonic() < self._started_at_s + RESTART_S:  # Rule 4
                return {"trouble": self._trouble}
            self._start()
        if not self._is_asked:
            self._channel.send_bytes(b"look")
            self._is_asked = True
        if not self._channel.poll(NEXT_ANSWER_S if self._has_answered else FIRST_ANSWER_S):
            return {"trouble": "Ray does not answer"}
        answer = json.loads(self._channel.recv_bytes())
        self._is_asked, self._has_answered = False, True
        return answer

    def _start(self) -> None:
        self._channel, theirs = Pipe()
        command = [
            "-P",
            "-m",
            "backhaul_runtime.process.ray_follower",
            self._name,
            default_address(),
            str(theirs.fileno()),
        ]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *command],  # -P keeps modules of the working directory out
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # answers say what is wrong
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach the trainer only, which may take a last step
            )
        self._started_at_s, self._is_asked = monotonic(), False
