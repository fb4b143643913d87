"""The entry point of the `backhaul` command."""

import logging
import sys
from collections.abc import Sequence

from backhaul._cli.environment_options import explain, options_of, parse
from backhaul._cli.registry import build
from backhaul._cli.typos import warn_of_unknown
from backhaul_runtime.errors import SettingError
from backhaul_runtime.process import logs

USAGE = 2
"""Exit code for a wrong command line, the same as that of argparse."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    parser, commands = build()
    options = {name: options_of(name, command) for name, command in commands.items()}
    for name, command in commands.items():
        explain(options[name], command)
    try:
        arguments, read = parse(parser, options, argv)
        name = arguments.command
        with logs.set_up(name):
            warn_of_unknown()
            try:
                code = int(arguments.run(arguments))
            except KeyboardInterrupt:
                return 130
            except Exception:
                logging.getLogger(f"backhaul.{name}").exception("The command ended with an error.")
                return 1
    except SettingError as error:
        print(f"backhaul: error: {error.message}", file=sys.stderr)
        return USAGE
    if code == USAGE and read:
        print(f"backhaul {name}: these variables of the environment were used: {', '.join(read)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
