"""Words that the page has of its own, beside those that the API says."""

import re
from pathlib import Path

import backhaul_server
from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2

SCRIPTS = Path(backhaul_server.__file__).parent / "dashboard/static/js"


def table(script: str, name: str) -> dict[str, str]:
    """The texts of a table in a script, by their keys."""
    text = (SCRIPTS / script).read_text().partition(f"const {name} = {{")[2].partition("};")[0]
    return dict(re.findall(r'(\w+): "([^"]+)"', text))


def test_the_page_says_what_each_rpc_and_each_kind_of_request_is_for() -> None:
    files = (program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    counted = {method.name for service in services for method in service.methods}
    requests = segment_pb2.Request.DESCRIPTOR.oneofs_by_name["request"].fields
    counted |= {kind.name.title().replace("_", "") for kind in requests}  # as the worker counts them
    assert set(table("latency.js", "MEANINGS")) == counted
