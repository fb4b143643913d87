"""The services of docker-compose.yml under a project name of their own, by whatever command there is for it."""

import json
import os
import secrets
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPOSE = shlex.split(os.environ.get("COMPOSE") or "docker compose")
UP = shlex.split(os.environ.get("COMPOSE_UP") or "--build")
"""`--no-build` where the image is there and can't be built by that command."""

_UP_S = 1800.0  # the image's build is in it
_CALL_S = 120.0
_POLL_S = 1.0

WORKER_TOKEN = "/run/backhaul/worker/token"
DASHBOARD_TOKEN = "/run/backhaul/dashboard/token"


def compose_config(*profiles: str) -> str:
    """The file as the command understands it with these profiles. Raises CalledProcessError where it does not."""
    options = [option for profile in profiles for option in ("--profile", profile)]
    return _called([*COMPOSE, *options, "config"], os.environ, _CALL_S).stdout


class Stack:
    """The default profile, on a free port. A context manager: nothing of it stays, nor of its volumes.

    Attributes:
        project: Its name.
        port: The dashboard's on 127.0.0.1.
    """

    def __init__(self) -> None:
        self.project = f"backhaul-test-{secrets.token_hex(4)}"
        self.port = _free_port()
        self._environment = os.environ | {"STACK_PORT": str(self.port)}

    def __enter__(self) -> "Stack":
        try:
            self.compose("up", "--detach", *UP, timeout_s=_UP_S)
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def compose(self, *arguments: str, timeout_s: float = _CALL_S) -> str:
        """What the command printed. Raises CalledProcessError with all it said where it failed."""
        command = [*COMPOSE, "--project-name", self.project, *arguments]
        return _called(command, self._environment, timeout_s).stdout

    def execute(self, service: str, *command: str) -> str:
        """What a command printed in a running container."""
        return self.compose("exec", "-T", service, *command)

    def logs(self) -> str:
        """Of all services."""
        return self.compose("logs")

    def down(self) -> None:
        """Ends and removes all of it."""
        self.compose("down", "--volumes", "--remove-orphans")

    def exit_code(self, service: str) -> int | None:
        """Of a container that has ended, None while it runs."""
        try:
            listed = self.compose("ps", "--all", "--format", "json")
        except subprocess.CalledProcessError:
            listed = self.compose("ps", "--format", "json")  # podman-compose has no --all: it shows all anyway
        # Docker prints an object a line, podman a list.
        containers = json.loads(listed) if listed.lstrip().startswith("[") else map(json.loads, listed.splitlines())
        for container in containers:
            if service == (container.get("Service") or container["Labels"]["com.docker.compose.service"]):
                return int(container["ExitCode"]) if container["State"] == "exited" else None
        raise AssertionError(f"there is no container of {service}: {listed}")

    def ended(self, service: str, timeout_s: float) -> int:
        """The exit code of a container, waited for."""
        deadline = time.monotonic() + timeout_s
        while (code := self.exit_code(service)) is None:
            assert time.monotonic() < deadline, f"{service} has not ended after {timeout_s:g} s"
            time.sleep(_POLL_S)
        return code

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        """Status and body of a page of the dashboard, redirections not followed."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())
        try:
            with opener.open(request, timeout=_CALL_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get_json(self, path: str, token: str) -> Any:
        """What the dashboard's API answers."""
        status, body = self.get(path, token)
        assert status == 200, body
        return json.loads(body)


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _called(command: list[str], environment: "os._Environ[str] | dict[str, str]", timeout_s: float) -> Any:
    done = subprocess.run(
        command, cwd=ROOT, env=dict(environment), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(f"{done.stdout}\n{done.stderr}")
        raise error
    return done


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
