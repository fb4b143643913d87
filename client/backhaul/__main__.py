"""Runs the `backhaul` command by `python -m backhaul`."""

import sys

from backhaul._cli.main import main

sys.exit(main())
