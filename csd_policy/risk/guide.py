"""When a risk map is computed, and on what."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csd_policy.models.base import ImageTokenModel
from csd_policy.risk.base import RiskMap
from csd_policy.risk.canvas import Canvas
from csd_policy.rows import Rows


@dataclass(frozen=True)
class RiskGuide:
    """Keeps ``rows.risk`` as fresh as a map asks for.

    All rows begin together, so that a row's own pass count is that of the batch for as long as the
    row is not finished: a picture sees the same map alone as in a batch.

    ``preview`` holds the finished rows of the preview, if the map asks for one; ``code_of_slot``
    and ``codes_before`` as in ``Redrafter``.
    """

    risk_map: RiskMap
    model: ImageTokenModel
    prompts: Sequence[str]
    preview: Rows | None
    code_of_slot: Tensor
    codes_before: Tensor

    def __call__(self, number: int, rows: Rows) -> None:
        """Refresh the risk before pass ``number``, from 1, if it is due."""
        source = self.risk_map.source
        once = source in ("preview", "nothing")
        if number != 1 and (once or (number - 1) % self.risk_map.refresh):
            return
        if number == 1 and source == "progressive":
            return  # nothing is known yet, and rows begin with risk 1
        assert rows.risk is not None
        rows.risk.copy_(self.risk_map.risk(self._canvas(rows)))

    def _canvas(self, rows: Rows) -> Canvas:
        seen = rows if self.preview is None else self.preview
        tokens, known = seen.tokens, self.codes_before[seen.done]
        if self.risk_map.source == "drafts":
            ahead = torch.arange(rows.drafts.shape[1], device=tokens.device)
            position = self.code_of_slot[rows.done[:, None] + ahead]
            column = torch.where(position >= 0, position, tokens.shape[1] - 1)
            tokens = tokens.scatter(1, column, rows.drafts)
            known = self.codes_before[rows.done + len(ahead)]
        other = seen.others.get("alternative")
        other = None if other is None else other[:, :-1]
        return Canvas.of(tokens[:, :-1], known, self.model, self.prompts, other)
