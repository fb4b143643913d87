"""The process that asks Ray for the workers of a fleet: `python -m backhaul_runtime.process.ray_follower`.

Why it is a process of its own: see NOTE [Follower] in `ray_resolver.py`.
"""

import json
import sys
from multiprocessing.connection import Connection
from typing import Any

from backhaul_runtime.errors import ConnectError
from backhaul_runtime.process.ray_fleet import actor_of, fleets, join, unknown_fleet

ANSWER_S = 0.5
"""Seconds that a look waits for the actors that it asks."""


class Follower:
    """Knows the addresses of a fleet's workers, in a process that has joined the cluster.

    Args:
        name: The name of the fleet.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._existed = False
        self._actors: dict[int, Any] = {}
        self._questions: dict[int, Any] = {}  # those that have no answer yet
        self._addresses: dict[int, str] = {}

    def look(self) -> list[str]:
        """Returns the addresses of the workers that trainers may use now.

        An actor that takes long to answer still stands for its last address: Ray notices the loss of a machine after
        half a minute, and the trainer's connection sooner. It is not waited for again.

        Raises:
            ConnectError: There is no such fleet, and there was none at earlier looks.
        """
        import ray

        known = fleets()
        numbers = known.get(self._name, [])
        if not numbers and not self._existed:
            raise ConnectError(unknown_fleet(self._name, known))
        self._existed = True
        for by_number in (self._actors, self._questions, self._addresses):
            for number in by_number.keys() - numbers:
                del by_number[number]
        new = [question for number in numbers if (question := self._ask(number)) is not None]
        if new:
            ray.wait(new, num_returns=len(new), timeout=ANSWER_S)
        for number, question in list(self._questions.items()):
            if ray.wait([question], timeout=0)[0]:
                del self._questions[number]
                try:
                    self._addresses[number] = ray.get(question)
                except ray.exceptions.RayError:  # the actor is gone, or Ray is restarting it: its worker ended with it
                    del self._actors[number]
                    self._addresses[number] = ""
        return sorted(address for address in self._addresses.values() if address)

    def _ask(self, number: int) -> Any:
        """Asks an actor for its address. Returns the question, None if there is no actor or it still has a question."""
        if number in self._questions:
            return None
        actor = self._actors.get(number) or actor_of(self._name, number)
        if actor is None:
            return None
        self._actors[number] = actor
        self._questions[number] = actor.address.remote()
        return self._questions[number]


def main() -> None:
    """Answers each message on the connection with what a look has found, until the connection or the cluster ends."""
    name, address, connection = sys.argv[1:]
    with Connection(int(connection)) as channel:
        follower = None
        while True:
            try:
                channel.recv_bytes()
            except EOFError:  # the trainer has closed its session, or has ended
                return
            try:
                if follower is None:
                    join(address)
                    follower = Follower(name)
                answer: dict[str, Any] = {"addresses": follower.look()}
            except ConnectError as error:
                answer = {"trouble": error.message}
            channel.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
