"""`RunError`, which is raised when a run directory cannot be used."""


class RunError(Exception):
    """Raised when a run directory is not the expected run, is damaged, or is in use; a base class of other errors."""
