"""Queues work that is due once an object has died.

NOTE [Endings]
1. Objects die in any thread and between any two instructions: while their thread holds the lock that a destructor
   would wait for, or while it handles Ctrl-C. So no Python code runs then. The interpreter itself puts a notice into a
   queue, and the thread that reads the queue does the work.
2. The callback of a weak reference that dies in the same garbage cycle as its object is never called. So `DeathQueue`
   holds the notices.
"""

import weakref
from collections.abc import Callable
from typing import Any


class DeathNotice(weakref.ref[Any]):
    """A weak reference that is put into a queue when its object dies.

    Attributes:
        then: The work that is due then, in any form that the reader of the queue understands.
    """

    __slots__ = ("then",)
    then: Any


class DeathQueue:
    """The notices of the objects that one queue watches.

    Args:
        put: Adds a notice to the queue: `SimpleQueue.put` or `deque.append`. It must be a built-in, reentrant function:
            the interpreter may call it during another call of it (Rule 1).
    """

    def __init__(self, put: Callable[[DeathNotice], None]) -> None:
        self._put = put
        self._notices: dict[int, DeathNotice] = {}

    def watch(self, of: object, then: Any) -> DeathNotice:
        """Watches an object, and puts the returned notice into the queue when the object dies."""
        ending = DeathNotice(of, self._put)
        ending.then = then
        self._notices[id(ending)] = ending
        return ending

    def take(self, ending: DeathNotice) -> Any:
        """Returns the work of a notice and drops the notice. If its object is still alive, nothing will be queued."""
        self._notices.pop(id(ending), None)
        return ending.then

    def to_come(self) -> list[Any]:
        """Returns the work for each watched object that is still alive."""
        return [ending.then for ending in list(self._notices.values()) if ending() is not None]
