"""What is installed here, as constants: torch.compile reads them without looking into how they were found."""

import importlib.util

TRITON = importlib.util.find_spec("triton") is not None
