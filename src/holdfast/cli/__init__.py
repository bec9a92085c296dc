"""The command `holdfast`: one file for each group of commands, and one each for what they share.

`main` puts the commands together, `target` finds the user's app, `ending` turns what went wrong into one line and an
exit code. Results go to stdout, everything else to stderr.
"""
