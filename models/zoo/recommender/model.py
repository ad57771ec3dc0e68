"""A recommender: what a user has seen ``[N,20]`` and who the user is, to the ten best of 2,000 things.

Two outputs: the ids of the ten (integers), best first, and their scores. Id 0 pads a history.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recommender(nn.Module):
    def __init__(self, things: int = 2000, users: int = 500, width: int = 32) -> None:
        super().__init__()
        self.things, self.users = nn.Embedding(things, width), nn.Embedding(users, width)
        self.mix = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, user_id: Tensor, history_ids: Tensor) -> tuple[Tensor, Tensor]:
        kept = (history_ids > 0).unsqueeze(-1).float()
        taste = (self.things(history_ids) * kept).sum(1) / kept.sum(1).clamp(min=1.0)
        wish = taste + self.mix(torch.cat([taste, self.users(user_id)], dim=-1))
        scores = F.linear(wish, self.things.weight)
        best = scores.topk(10, dim=-1)
        return best.indices, best.values


def build() -> nn.Module:
    torch.manual_seed(0)
    return Recommender()
