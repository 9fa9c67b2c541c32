"""`blocked` as compiled callers call it: outside of their graphs."""

import torch

from regard.core.backends import blocked

attend = torch.compiler.disable(blocked.run)
