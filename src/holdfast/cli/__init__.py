"""The command `holdfast`: a module for each group of commands, and modules for what they share.

`main` assembles the commands, `app_loader` finds the user's app, and `exit_codes` turns an error into one line and an
exit code. Results go to stdout, everything else to stderr.
"""
