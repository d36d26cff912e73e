"""A character-level GPT in plain torch, whole or cut into the stages of a pipeline."""

import copy
from collections.abc import Collection
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
    hidden: int = 0
    """Width of the feed-forward layers; 0: four times `width`."""
    tied: bool = True
    """Embedding and head are one tensor with two uses: less to learn, less to keep."""
    heads_first: bool = False
    """The rows of the query-key-value projection are ordered by head, so that a part of them is whole heads."""
    num_experts: int = 0
    """In every second block the feed-forward layer is one of so many, chosen for each character; 0: nowhere."""
    use_all_experts: bool = False
    """Run an expert that nobody chose on nothing: its gradients are zero then, where else it has none."""
    temperature: bool = False
    """Logits are scaled by a number that is learnt."""
    bfloat16: bool = False
    """Compute in bfloat16 what autocast does in it."""


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, both pre-normalized and residual."""

    def __init__(self, config: GPTConfig, *, with_experts: bool = False) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.heads_first = config.heads_first
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        feed_forward = [Experts(config)] if with_experts else _feed_forward(config)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.width), *feed_forward, nn.Dropout(config.dropout)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, context, _ = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        # The number of heads is whatever is here: under tensor parallelism a rank has some of them.
        if self.heads_first:
            heads = projected.view(batch, context, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        else:
            heads = projected.view(batch, context, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        attended = self.attention_out(attended.transpose(1, 2).reshape(batch, context, -1))
        hidden = hidden + functional.dropout(attended, self.dropout, self.training)
        fed: torch.Tensor = self.feed_forward(hidden)
        return hidden + fed


def _feed_forward(config: GPTConfig) -> list[nn.Module]:
    hidden = config.hidden or 4 * config.width
    return [nn.Linear(config.width, hidden), nn.GELU(), nn.Linear(hidden, config.width)]


class Experts(nn.Module):
    """Several feed-forward layers, of which a router picks one for each character."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.use_all = config.use_all_experts
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(*_feed_forward(config)) for _ in range(config.num_experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        fed = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            picked = (chosen == index).nonzero().flatten()
            if self.use_all or len(picked):
                weighted = weights[picked, None] * expert(flat[picked])
                fed = fed.index_add(0, picked, weighted.to(fed.dtype))
        return fed.view_as(hidden)


class GPT(nn.Module):
    """Character codes of shape (batch, context) in, logits of shape (batch, context, vocab_size) out.

    A stage of a pipeline (`stage`) has hidden states, of shape (batch, context, width), instead of codes
    or of logits where it is not the first or not the last.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.num_heads:
            raise ValueError(f"width {config.width} is not a multiple of num_heads {config.num_heads}")
        self.config = config
        self.characters: nn.Embedding | None = nn.Embedding(config.vocab_size, config.width)
        self.positions: nn.Embedding | None = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        # By name, not by place: a block keeps its name in whichever stage it is.
        self.blocks = nn.ModuleDict(
            {
                str(index): Block(config, with_experts=config.num_experts > 0 and index % 2 == 1)
                for index in range(config.num_layers)
            }
        )
        self.norm: nn.LayerNorm | None = nn.LayerNorm(config.width)
        self.head: nn.Linear | None = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.characters.weight
        if config.temperature:
            self.temperature = nn.Parameter(torch.ones(1))
        self.apply(_initialize)

    def stage(self, blocks: Collection[int], *, first: bool, last: bool) -> "GPT":
        """A copy of this model that holds `blocks` alone; the first has the embeddings, the last the head."""
        part = copy.deepcopy(self)
        for index in range(self.config.num_layers):
            if index not in blocks:
                del part.blocks[str(index)]
        if not first:
            part.characters = part.positions = None
        if not last:
            part.norm = part.head = None
            if self.config.temperature:
                del part.temperature
        return part

    def forward(self, arriving: torch.Tensor) -> torch.Tensor:
        with torch.autocast(arriving.device.type, torch.bfloat16, enabled=self.config.bfloat16):
            hidden = arriving
            if self.characters is not None and self.positions is not None:
                places = torch.arange(arriving.shape[1], device=arriving.device)
                hidden = self.dropout(self.characters(arriving) + self.positions(places))
            for block in self.blocks.values():
                hidden = block(hidden)
            if self.norm is None or self.head is None:
                return hidden
            logits: torch.Tensor = self.head(self.norm(hidden))
            return logits * self.temperature if self.config.temperature else logits

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
