"""`python -m holdfast` runs the command `holdfast`."""

from holdfast.cli.main import run_process

run_process()
