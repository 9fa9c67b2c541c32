"""Fixtures of the studio's tests."""

from conftest_studio import browser, studio, visit

__all__ = ["browser", "studio", "visit"]
