"""Numbers as the page is meant to write them, worked out apart from it."""

from decimal import ROUND_HALF_UP, Decimal

NONE = "\N{EN DASH}"
"""Where there is no number."""
MINUS = "\N{MINUS SIGN}"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def three_digits(value: float) -> str:
    """With a decimal point only as far as it matters, thousands apart, and a true minus."""
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.1 or size == 0 else 3
    # Browsers round what a number looks like, so 7.845 is 7.85, though it is stored a little below.
    text = f"{Decimal(repr(size)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,f}"
    return f"{MINUS}{text}" if value < 0 and float(text.replace(",", "")) else text


def in_bytes(count: int) -> str:
    """As KiB, MiB and so on."""
    value, unit = float(count), 0
    while value >= 1023.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{three_digits(value)} {UNITS[unit]}"


def in_ms(value: float | None) -> str:
    """As ms, from a second on as s."""
    if value is None:
        return NONE
    return f"{three_digits(value)} ms" if abs(value) < 1000 else f"{three_digits(value / 1000)} s"


def in_percent(share: float | None) -> str:
    """With at most one decimal, and never none or all where it is not none or all."""
    if share is None:
        return NONE
    rounded = Decimal(share * 100).quantize(Decimal("0.1"), ROUND_HALF_UP)
    if 0 < share < 1:
        rounded = max(Decimal("0.1"), min(Decimal("99.9"), rounded))
    return f"{rounded:f}".removesuffix(".0") + " %"
