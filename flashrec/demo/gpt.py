"""A character-level GPT in plain torch."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model. The defaults make 2.7 million parameters."""

    vocab_size: int
    context: int = 64
    """Longest sequence, in characters."""
    width: int = 192
    num_layers: int = 6
    num_heads: int = 6
    dropout: float = 0.1


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, both pre-normalized and residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, context, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        heads = projected.view(batch, context, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        attended = self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        hidden = hidden + functional.dropout(attended, self.dropout, self.training)
        fed: torch.Tensor = self.feed_forward(hidden)
        return hidden + fed


class GPT(nn.Module):
    """Character codes of shape (batch, context) in, logits of shape (batch, context, vocab_size) out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.num_heads:
            raise ValueError(f"width {config.width} is not a multiple of num_heads {config.num_heads}")
        self.config = config
        self.characters = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.characters.weight  # one tensor, two uses: less to learn, less to keep
        self.apply(_initialize)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        hidden = self.dropout(self.characters(codes) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits

    def num_parameters(self) -> int:
        """Trained numbers, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per character: a scalar."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
