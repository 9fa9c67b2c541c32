"""What compiled callers step out of their graphs for; importing this imports the compiler."""

import torch

from regard.core import features
from regard.core.backends import blocked

blocks = torch.compiler.disable(blocked.run)
drawn = torch.compiler.disable(features.drawn)
