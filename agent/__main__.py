"""`python -m agent` is the command `carver`."""

import sys

from agent.cli.main import main

sys.exit(main())
