"""Imports everything a training process needs sooner or later; the fork server does it once for all ranks.

Starts no thread, touches no accelerator and draws no random number: a fork of the process that imported this
module must differ from a fresh interpreter in nothing but the time it took.
"""

from __future__ import annotations

import torch
import torch.distributed
import torch.nn.parallel
import torch.utils.data

# The first optimizer of a process imports torch's compiler, which takes half as long as torch itself.
# Building one is the public way to have that behind us.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
