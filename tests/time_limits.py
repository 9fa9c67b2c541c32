"""The time limits of the tests: they only end what hangs, even on slow machines."""

HANG_SECONDS = 3600.0  # seconds after which a process or a response counts as hanging
BROWSER_MILLISECONDS = 300_000  # milliseconds after which a missing element of a page is an error
