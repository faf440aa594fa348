"""HFWorkload against plain transformers, bit for bit."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dagsel.metrics
from dagsel.collate import samples
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.storage import RaggedArray
from dagsel.testing import WorkloadSuite
from dagsel.workloads import HFWorkload, Visit
from tests.fused import fused
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

N, BATCH = 13, 4
TINY = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 24, "n_positions": 16}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2(config: Any, **options: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**TINY, **ENDS, **options))


def bert(config: Any) -> BertForSequenceClassification:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(**small, intermediate_size=16, vocab_size=24, num_labels=3)
    )


def texts(seed: int, n: int = N) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 24, size=k) for k in rng.integers(2, 12, size=n)]


def tokens(seed: int, n: int = N) -> dict[str, Any]:
    return {"input_ids": RaggedArray.of(texts(seed, n))}


def adamw(parameters: Any, config: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01)


def warmed(optimizer: Any, config: Any) -> Any:
    return get_linear_schedule_with_warmup(optimizer, 3, 20)


def lm(**options: Any) -> HFWorkload:
    given: dict[str, Any] = {"model": gpt2, "optimizer": adamw, "batch_size": BATCH}
    return HFWorkload(**{**given, **options})


class TestGpt2(WorkloadSuite):
    gang_tolerance = None  # dropout

    def make_workload(self) -> HFWorkload:
        return lm(
            metrics=["perplexity", "accuracy"], lr_scheduler=warmed, max_grad_norm=0.5,
            gradient_checkpointing=True,
        )  # fmt: skip

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return tokens(seed)
