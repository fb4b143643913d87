"""The machine's own Chromium, for tests in a browser."""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "no browser for the tests: install Chromium (on Debian: apt-get install chromium) or set BACKHAUL_CHROMIUM to one; "
    f"looked for {', '.join(NAMES)}"
)


def chromium() -> str:
    """Where it is: BACKHAUL_CHROMIUM, else the first that is found by name, else ""."""
    given = os.environ.get("BACKHAUL_CHROMIUM", "")
    return given or next((path for path in map(shutil.which, NAMES) if path), "")


def install() -> None:
    """Debian's, where that is possible: as root, with apt-get."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        subprocess.run(["apt-get", "-qq", *command], check=False)


if __name__ == "__main__":
    if not chromium() and "--install" in sys.argv:
        install()
    sys.exit(None if chromium() else MISSING)
