"""`python -m holdfast` is the command `holdfast`."""

import sys

from holdfast.cli.main import main

sys.exit(main())
