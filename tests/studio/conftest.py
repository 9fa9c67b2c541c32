"""Fixtures for the tests of the studio, the web application of `regard studio`."""

from conftest_studio import browser, studio, visit

__all__ = ["browser", "studio", "visit"]
