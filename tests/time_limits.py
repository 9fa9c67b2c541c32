"""The time limits of the tests: they only end what hangs, even on slow machines."""

HANG_SECONDS = 3600.0  # for a process or a response
BROWSER_MILLISECONDS = 300_000  # for an element to appear on a page
