"""What the benchmarks train: a small transformer on random tokens, built the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

VOCAB_SIZE = 96
Batch = list[torch.Tensor]
Loader = DataLoader[tuple[torch.Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model. Tokens per rank and step: batch x context."""

    width: int
    num_layers: int
    batch: int = 2
    context: int = 64


SIZES = {
    "tiny": Size(width=32, num_layers=1, context=16),
    "small": Size(width=192, num_layers=6),
    "large": Size(width=384, num_layers=8),
    # With AdamW's state about so many MB (10^6 bytes).
    "8MB": Size(width=96, num_layers=6),
    "16MB": Size(width=96, num_layers=12),
    "128MB": Size(width=384, num_layers=6),
    "512MB": Size(width=768, num_layers=6),
}


class Transformer(nn.Module):
    """Tokens of shape (batch, context) in, logits of shape (batch, context, VOCAB_SIZE) out; dropout on, so
    that random state moves in every step."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, size.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.width // 32, 4 * size.width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(size.num_layers)
        )
        self.head = nn.Linear(size.width, VOCAB_SIZE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def build(size: Size) -> Transformer:
    """The model with the same weights in every process; one thread per rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Transformer(size)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    (tokens,) = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def loader(size: Size, rank: int, num_batches: int = 1000) -> Loader:
    """Batches of random tokens, the rank's own. Reading one costs next to nothing: the loader is not what is
    measured here."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCAB_SIZE, (num_batches * size.batch, size.context), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=size.batch, shuffle=True)
