"""The error of a run directory that cannot be used."""


class RunError(Exception):
    """A directory that is not the expected run, is damaged, or is in use."""
