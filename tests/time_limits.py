"""The time limits of the tests: they end what hangs, and no machine is so slow that they end anything else."""

HANG_SECONDS = 3600.0  # for a process or an answer
BROWSER_MILLISECONDS = 300_000  # for something to appear on a page: a failing test waits that long
