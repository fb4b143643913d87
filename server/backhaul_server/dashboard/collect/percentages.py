"""The one format of percentages in sentences and tables. `percent` in static/js/format.js is the same for the page."""

from math import floor

_LEAST, _MOST = 0.1, 99.9


def in_percent(share: float) -> str:
    """Returns a share of 1 in percent, with a decimal where it is not zero: "2 %", "12.3 %", "100 %".

    A share between none and all is never rounded to either.
    """
    # Halves are rounded up, as Math.round does: Python's own rounding would differ from the page's at exact halves.
    rounded = floor(1000 * share + 0.5) / 10
    if 0 < share < 1:
        rounded = min(_MOST, max(_LEAST, rounded))
    return f"{rounded:.1f}".removesuffix(".0") + " %"
