"""A second loss of the captioner: the cells of the picture say which words its caption holds."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.vocabulary import SPECIALS

_MOST = 1000  # words: the most frequent ones, as many as in the paper
_FIRST = len(SPECIALS)
_SELDOM = -6.0  # logit of a cell before training: few cells show any one word
_LEAST = 1e-6  # of Σ softplus, whose logarithm is taken


class WordDetector(nn.Module):
    """p(w) = 1 − Π_j (1 − σ(u_w · h_j + b_w)): a caption holds w where at least one cell shows it (noisy-OR).

    The cells are the instances of multiple-instance learning (Fang et al. 2015, section 3): no label says which cell
    shows the word. The gradient reaches the encoder without passing through the decoder, and the cells that show a
    word best get most of it.

    >>> detector = WordDetector(3, vocabulary=6)
    >>> detector.loss(torch.zeros(2, 5, 3), torch.tensor([[4, 2], [5, 2]])).shape
    torch.Size([2])
    """

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        self.score = nn.Linear(size, min(_MOST, vocabulary - _FIRST))
        nn.init.constant_(self.score.bias, _SELDOM)

    def loss(self, cells: Float[Tensor, "b k d"], target: Int[Tensor, "b t"]) -> Float[Tensor, "b"]:
        """−Σ_w ln p(w is in the caption, or is not) for each picture; 0 where the target has no word (−100)."""
        none = F.softplus(self.score(cells).float()).sum(1)  # −ln Π_j (1 − σ): no cell shows the word
        present = self._words(target)
        missed = -torch.log(-torch.expm1(-none.clamp_min(_LEAST)))
        losses = torch.where(present, missed, none).sum(-1)
        return torch.where((target >= 0).any(-1), losses, 0)

    def _words(self, target: Tensor) -> Tensor:
        """Which of the words each target holds, (b, words)."""
        last = _FIRST + self.score.out_features
        known = torch.where((target >= _FIRST) & (target < last), target, 0)
        held = torch.zeros(len(target), last, dtype=torch.bool, device=target.device)
        return held.scatter(1, known, True)[:, _FIRST:]
