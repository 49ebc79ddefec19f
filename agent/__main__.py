"""`python -m agent` is the command `carver`."""

import sys

from agent.cli import main

sys.exit(main())
