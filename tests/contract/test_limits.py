"""docs/limits.md lists the limits of the code, and no others."""

from backhaul_server.worker import limits
from backhaul_server.worker.limits import Limit
from contract.test_layout import ROOT


def rows() -> list[str]:
    all_limits = [value for value in vars(limits).values() if isinstance(value, Limit)]
    return [f"| {limit.what} | {limit.most:,} | {limit.why} |" for limit in all_limits]


def sizes() -> list[str]:
    requests = limits.REQUESTS_BY_KIND.items()
    return [f"| `{kind.DESCRIPTOR.name}` | {request.most_bytes >> 10:,} KiB |" for kind, request in requests]


def test_the_page_lists_each_limit() -> None:
    page = (ROOT / "docs/limits.md").read_text().splitlines()
    table = [line for line in page if line.startswith("| ") and line.endswith(" |")]
    assert [line for line in table if not line.startswith(("| what", "| a request"))] == [*rows(), *sizes()]
