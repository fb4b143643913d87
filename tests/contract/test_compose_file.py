"""docker-compose.yml against the commands it runs and the rules it keeps. Running it is `make compose-test`."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commands import parse

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ONCE = {"secrets", "prometheus-volume"}
OURS = [name for name, service in SERVICES.items() if "backhaul" in service["image"]]


def with_defaults(text: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("service", [name for name in OURS if name not in ONCE])
def test_commands_are_those_that_there_are(service: str) -> None:
    parse(shlex.split(with_defaults(SERVICES[service]["command"])))


def test_health_checks_and_secrets_are_made_by_commands_that_there_are() -> None:
    (commands,) = SERVICES["secrets"]["command"]
    for command in with_defaults(commands).split(";"):
        name, *arguments = shlex.split(command)
        assert name == "backhaul"
        parse(arguments)
    checks = [SERVICES[name]["healthcheck"] for name in OURS]
    for check in checks:
        if not check.get("disable"):
            assert check["test"][:2] == ["CMD", "backhaul"]
            parse(check["test"][2:])
    assert sum(not check.get("disable") for check in checks) == 4  # three workers and the dashboard


@pytest.mark.parametrize("service", SERVICES)
def test_containers_have_no_more_rights_than_they_need(service: str) -> None:
    settings = SERVICES[service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert "cap_add" not in settings
    assert "privileged" not in settings
    if service not in ONCE:
        assert set(settings["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}


def test_only_pages_are_published_and_only_on_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"dashboard", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert FILE["networks"]["workers"]["internal"] is True
    assert FILE["networks"]["monitoring"]["internal"] is True
    for name in ("worker-1", "worker-2", "worker-gpu", "trainer"):
        assert SERVICES[name]["networks"] == ["workers"]
    assert SERVICES["prometheus"]["networks"] == ["monitoring"]


def test_who_has_which_secret() -> None:
    holders = {
        volume: {
            name for name, service in SERVICES.items() for text in service.get("volumes", []) if volume in str(text)
        }
        for volume in (
            "worker-token",
            "dashboard-token",
            "authority",
            "worker-certificate",
            "trainer-certificate",
            "dashboard-certificate",
        )
    }
    assert holders["authority"] == {"secrets"}
    assert holders["worker-certificate"] == {"secrets", "worker-1", "worker-2", "worker-gpu"}
    assert holders["trainer-certificate"] == {"secrets", "trainer"}
    assert holders["dashboard-certificate"] == {"secrets", "dashboard"}
    assert holders["worker-token"] == {"secrets", "worker-1", "worker-2", "worker-gpu", "dashboard", "trainer"}
    assert holders["dashboard-token"] == {"secrets", "dashboard", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        for text in service.get("volumes", []):
            is_secret = "-token:" in str(text) or "-certificate:" in str(text)
            assert name == "secrets" or not is_secret or str(text).endswith(":ro")


def test_images_of_others_are_pinned() -> None:
    others = {name: service["image"] for name, service in SERVICES.items() if name not in OURS}
    assert set(others) == {"prometheus", "grafana"}
    assert all(re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", image) for image in others.values())


def test_files_that_are_mounted_exist() -> None:
    for service in SERVICES.values():
        for text in service.get("volumes", []):
            if str(text).startswith("./"):
                assert (ROOT / text.split(":")[0]).is_dir(), text
