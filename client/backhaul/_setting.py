"""How a setting is declared: one field has its name, type, default and check, and the text below it says what it does.

Does not import torch.
"""

import ast
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field
from importlib.util import find_spec
from inspect import getsource
from os import PathLike, fspath
from reprlib import repr as short
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import boolean, items, names_code, variable_of

T = TypeVar("T")
Check = Callable[[Any], str]
"""Returns the predicate of a sentence about a value that is not allowed, such as "must not be negative", or ""."""
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Default:
    """What a field holds until its object is complete, if it was not given. Signatures show the value."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def setting(default: T, check: Check | None = None) -> T:
    """Declares a field of a frozen dataclass as a setting.

    Args:
        default: The value if neither the program, nor the environment, nor a plan sets one.
        check: Looks at values of the right type; None: all are allowed.
    """
    return cast(T, field(default=Default(default), metadata={"check": check}))


def default_of(declared: "Field[Any]") -> Any:
    """Returns the default of a setting."""
    return cast(Default, declared.default).value


def checked(declared: "Field[Any]", value: Any) -> Any:
    """Returns a value as the setting holds it: a list as a tuple, a path as a text.

    Raises:
        SettingError: The value is not allowed. Names the setting, the value and what is allowed.
    """
    default, check = default_of(declared), declared.metadata["check"]
    if isinstance(default, tuple):
        value = _as_tuple(value)
    elif isinstance(default, str) and isinstance(value, PathLike):
        value = fspath(value)
    kinds = (int, float) if isinstance(default, float) else (type(default),)
    choices = get_args(declared.type) if get_origin(declared.type) is Literal else ()
    if not isinstance(value, kinds):
        problem = f"must be of type {kinds[-1].__name__}"
    elif choices and value not in choices:
        problem = f"is not one of {', '.join(map(repr, choices))}"
    else:
        problem = check(value) if check is not None else ""
    if problem:
        raise SettingError(f"{declared.name}={short(value)} {problem}")
    return value


def parsed(declared: "Field[Any]", text: str) -> Any:
    """Returns the value that a text stands for in the environment. Raises SettingError if it stands for none."""
    kind = type(default_of(declared))
    try:
        if kind is tuple:
            return tuple(items(text))
        return boolean(text) if kind is bool else kind(text)
    except ValueError:
        raise SettingError(f"{variable_of(declared.name)}={text!r} is not a valid {kind.__name__}") from None


def texts_of(kind: type) -> dict[str, str]:
    """Returns the texts below the fields that a class declares itself, by the names of the fields."""
    (definition,) = ast.parse(getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    texts, name = {}, ""
    for node in definition.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                texts[name] = " ".join(text.split())
            case _:
                name = ""
    return texts


def _as_tuple(value: Any) -> Any:
    """Returns a list as a tuple. A single text is split at commas, as in the environment."""
    if isinstance(value, str):
        return tuple(items(value))
    return tuple(value) if isinstance(value, Iterable) else value


def positive(value: float) -> str:
    """Allows finite numbers above 0."""
    return "" if 0 < value < math.inf else "must be finite and greater than 0"


def share(value: float) -> str:
    """Allows numbers from 0 to 1."""
    return "" if 0 <= value <= 1 else "must be from 0 to 1"


def not_negative(value: int) -> str:
    """Allows 0 and numbers above it."""
    return "" if value >= 0 else "must not be negative"


def no_longer_than(limit: int) -> Check:
    """Allows texts of at most so many characters."""

    def check(value: str) -> str:
        return "" if len(value) <= limit else f"has {len(value)} characters, and may have {limit}"

    return check


def texts(limit: int, longest: int) -> Check:
    """Allows at most `limit` texts, each of 1 to `longest` characters."""

    def check(value: tuple[Any, ...]) -> str:
        if len(value) > limit:
            return f"has {len(value)} items, and may have {limit}"
        wrong = [item for item in value if not isinstance(item, str) or not 0 < len(item) <= longest]
        return f"has {wrong[0]!r}, which must be a text of 1 to {longest} characters" if wrong else ""

    return check


def names_of_code(value: tuple[Any, ...]) -> str:
    """Allows names of packages, modules, and of what is in modules."""
    wrong = [name for name in value if not names_code(name)]
    return f'has {wrong[0]!r}: write the name of a package, module or class as "module:name"' if wrong else ""


def names_device(value: str) -> str:
    """Allows devices that a worker may have, and no text at all."""
    return "" if not value or _DEVICE.fullmatch(value) else 'is not "cpu", "cuda" or "cuda:N"'


def has_opentelemetry(value: bool) -> str:
    """Allows spans if OpenTelemetry's API is installed."""
    try:
        is_installed = not value or find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:  # the namespace package is missing too
        is_installed = False
    return "" if is_installed else "needs OpenTelemetry's API: pip install 'backhaul[otel]'"
