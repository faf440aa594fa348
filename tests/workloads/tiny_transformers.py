"""Tiny models of transformers, texts for them, and workloads of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F

from dagsel.storage import RaggedArray
from dagsel.workloads import HFWorkload

N, BATCH = 13, 4


TINY: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 24,
    "n_positions": 16,
}


ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2(config: Any, **options: Any) -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY, **ENDS, **options))


def small_bert(num_labels: int = 3) -> transformers.BertConfig:
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_labels": num_labels}
    return transformers.BertConfig(**small, intermediate_size=16, vocab_size=24)


def bert(config: Any, num_labels: int = 3) -> transformers.BertForSequenceClassification:
    return transformers.BertForSequenceClassification(small_bert(num_labels))


def bert_mlm(config: Any) -> transformers.BertForMaskedLM:
    return transformers.BertForMaskedLM(small_bert())


def texts(seed: int, n: int = N) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 24, size=k) for k in rng.integers(2, 12, size=n)]


def tokens(seed: int, n: int = N) -> dict[str, Any]:
    return {"input_ids": RaggedArray.of(texts(seed, n))}


def partly(seed: int) -> dict[str, Any]:
    """Return texts of which some tokens are no labels, and one that has none at all."""
    ids, rng = texts(seed), np.random.default_rng(seed)
    share = rng.uniform(size=N)
    share[3] = 0
    labels = [np.where(rng.random(len(i)) < p, i, -100) for i, p in zip(ids, share, strict=True)]
    return {"input_ids": RaggedArray.of(ids), "labels": RaggedArray.of(labels)}


def reviews(seed: int, n: int = N) -> dict[str, Any]:
    ids = texts(seed, n)
    return {"input_ids": RaggedArray.of(ids), "label": np.array([int(row[0]) % 3 for row in ids])}


def tokenizer(**options: Any) -> transformers.PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, **{f"w{k}": k for k in range(1, 24)}}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w1")), **options
    )


def adamw(parameters: Any, config: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any, config: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.5)


def warmed(optimizer: Any, config: Any) -> Any:
    return transformers.get_linear_schedule_with_warmup(optimizer, 3, 20)


def cosine(optimizer: Any, config: Any) -> Any:
    return transformers.get_cosine_schedule_with_warmup(optimizer, 3, 20)


def lm(**options: Any) -> HFWorkload:
    given: dict[str, Any] = {"model": gpt2, "optimizer": adamw, "batch_size": BATCH}
    return HFWorkload(**{**given, **options})


def without_dropout(config: Any) -> transformers.GPT2LMHeadModel:
    return gpt2(config, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama(config: Any) -> transformers.LlamaForCausalLM:
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**small, intermediate_size=16, vocab_size=24, **ENDS)
    )


def lora(config: Any) -> Any:
    given: dict[str, Any] = {
        "r": 2,
        "target_modules": ["c_attn"],
        "fan_in_fan_out": True,
        "lora_dropout": 0.1,
    }
    return adapted(gpt2(config), **given)


def adapted(model: Any, **options: Any) -> Any:
    import peft  # here, as its import takes seconds in each process that collects tests

    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


def pretrained() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(11)
    return gpt2({})


def around(config: Any, base: Any) -> Any:
    given: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    return adapted(base, r=2, lora_dropout=0.1, **given)


def by_hand(config: Any) -> Any:
    """Build the same without a base; the base's random numbers are not the trial's."""
    streams = torch.get_rng_state()
    base = pretrained()
    torch.set_rng_state(streams)
    return around(config, base)


def padded(rows: list[Any], fill: int = 0) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def one_pass(model: Any, data: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the loss over the whole set, and the share of right guesses."""
    labels = padded([list(row["labels"]) for row in data], -100)[:, 1:]
    ids = padded([list(row["input_ids"]) for row in data])
    mask = padded([[1] * len(row["input_ids"]) for row in data])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1][labels != -100]
    labels = labels[labels != -100]
    loss = F.cross_entropy(logits.double(), labels)
    return loss.item(), (logits.argmax(1) == labels).double().mean().item()
