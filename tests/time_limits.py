"""The time limits of tests with processes or a browser: so long that they only end processes that hang."""

HANG_SECONDS = 3600.0  # seconds after which a process or a response counts as hanging
BROWSER_MILLISECONDS = 300_000  # milliseconds after which a missing element of a page is an error
