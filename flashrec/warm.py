"""Imports everything a training process needs sooner or later; the fork server does it once for all ranks.

Starts no thread, touches no accelerator and draws no random number: a fork of the process that imported this
module must differ from a fresh interpreter in nothing but the time it took.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch.utils.data

with warnings.catch_warnings():  # it uses what torch itself calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch.distributed.optim

# The first optimizer of a process imports torch's compiler, which takes half as long as torch itself.
# Building one is the public way to have that behind us.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
