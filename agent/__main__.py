"""Entry point of `python -m agent`, which is the command `carver`."""

import sys

from agent.cli.main import main

sys.exit(main())
