"""`python -m backhaul`."""

import sys

from backhaul._cli import main

sys.exit(main())
