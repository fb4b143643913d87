"""What is to be done once an object has died.

NOTE [Endings]
1. Objects die in any thread and in the midst of anything: while their thread holds the lock that a destructor would
   wait for, or just when Ctrl-C comes. So no code of ours runs then. The interpreter itself puts the ending of the
   object into a queue, and whoever reads the queue does the rest.
2. A weak reference that dies in the same cycle of garbage as its object is never called. So endings are held here.
"""

import weakref
from collections.abc import Callable
from typing import Any


class DeathNotice(weakref.ref[Any]):
    """A weak reference to an object, which is put into a queue when that dies.

    Attributes:
        then: What is to be done, as the reader of the queue understands it.
    """

    __slots__ = ("then",)
    then: Any


class DeathQueue:
    """Of the objects that one queue is about.

    Args:
        put: Adds an ending to the queue: `SimpleQueue.put` or `deque.append`. It must be a built-in function that can
            be called during another call of itself.
    """

    def __init__(self, put: Callable[[DeathNotice], None]) -> None:
        self._put = put
        self._held: dict[int, DeathNotice] = {}

    def watch(self, of: object, then: Any) -> DeathNotice:
        """Puts an ending into the queue when an object dies."""
        ending = DeathNotice(of, self._put)
        ending.then = then
        self._held[id(ending)] = ending
        return ending

    def take(self, ending: DeathNotice) -> Any:
        """What is to be done, once the ending came out of the queue. Also calls one off that did not come yet."""
        self._held.pop(id(ending), None)
        return ending.then

    def to_come(self) -> list[Any]:
        """What is to be done for each object that is still there."""
        return [ending.then for ending in list(self._held.values()) if ending() is not None]
