"""`python -m holdfast` runs the command `holdfast`."""

import sys

from holdfast.cli.main import main

sys.exit(main())
