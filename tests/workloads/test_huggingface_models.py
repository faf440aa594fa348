"""HFWorkload from a search to files that transformers reads; what it refuses before it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import transformers
from distributed import Client, LocalCluster

import dagsel
from dagsel.errors import WorkloadError
from dagsel.flows import RandomSearch
from dagsel.storage import RaggedArray, ShardedDataset
from dagsel.workloads import HFWorkload, Visit
from dagsel.workloads.base import DataOutline, checks
from tests.workloads.tiny_transformers import (
    adapted,
    bert,
    gpt2,
    lm,
    lora,
    one_pass,
    reviews,
    sgd,
    small_bert,
    texts,
    tokenizer,
    tokens,
)

READ = """
import json, sys, warnings
from pathlib import Path
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
base, adapter, whole = map(Path, sys.argv[1:])
around = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
models = [around, AutoModelForCausalLM.from_pretrained(whole)]
assert AutoTokenizer.from_pretrained(whole).pad_token == "[PAD]"
assert "dagsel" not in sys.modules
print(json.dumps([model.eval()(torch.arange(1, 7)[None]).logits.tolist() for model in models]))
"""


def read_without_dagsel(*folders: str) -> list[torch.Tensor]:
    """Return the logits of an adapter and of a whole model in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READ, *folders],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [torch.tensor(numbers) for numbers in json.loads(done.stdout)]


#: What is written of an adapter, and of a whole model with its tokenizer.
FILES = {
    "adapter": {"adapter_config.json", "adapter_model.safetensors", "trial.json", "metrics.json"},
    "whole": {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
              "tokenizer_config.json", "trial.json", "metrics.json"},
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(1, 7)[None]).logits


def written(folder: Path, arrays: dict[str, Any]) -> ShardedDataset:
    return ShardedDataset.write(folder, arrays, n_shards=2, validation=0.25)


@pytest.mark.alone
def test_a_search_exports_what_transformers_and_peft_read(tmp_path: Path, optimize: Any) -> None:
    base, data = tmp_path / "base", written(tmp_path / "data.zarr", tokens(0, 40))
    gpt2({}).save_pretrained(base)

    def adapter(config: Any) -> Any:
        given: dict[str, Any] = {
            "r": config["r"],
            "target_modules": ["c_attn"],
            "fan_in_fan_out": True,
        }
        return adapted(transformers.AutoModelForCausalLM.from_pretrained(base), **given)

    whole = lm(collator=tokenizer(pad_token="[PAD]"))
    flow = RandomSearch(max_epochs=2, n_trials=2)
    best: dict[str, Any] = {}
    written_to: list[str] = []
    here: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**here) as cluster, Client(cluster) as client:
        for name, workload in (("adapter", lm(model=adapter)), ("whole", whole)):
            run = optimize(
                study=optuna.create_study(), workload=workload, data=data, metric="loss", flow=flow,
                space=lambda trial: {"r": trial.suggest_int("r", 1, 3)}, client=client,
                run_dir=f"{tmp_path}/run/{name}",
            )  # fmt: skip
            best[name] = run.best_model()
            written_to += run.export(tmp_path / name)
            files = {path.name for path in (tmp_path / name).rglob("*") if path.is_file()}
            assert files >= FILES[name]
            assert ("model.safetensors" in files) == (name == "whole")
            seen = [data.validation_shard(k)["input_ids"] for k in range(2)]
            rows = [{"input_ids": ids, "labels": ids} for shard in seen for ids in shard]
            loss, _ = one_pass(run.best_model(), rows)
            assert run.best_value == pytest.approx(loss, rel=1e-6)
    folders = [folder.removeprefix("file://") for folder in written_to]
    for read, model in zip(read_without_dagsel(str(base), *folders), best.values(), strict=True):
        assert torch.equal(read, logits(model))


CASES: dict[str, tuple[Any, str, Any]] = {
    "no model": (
        lambda: lm(model=lambda config: torch.nn.Linear(1, 1)),
        "model gave the class Linear, not a PreTrainedModel .* dagsel.TorchWorkload trains",
        None,
    ),
    "no loss": (
        lambda: lm(model=lambda config: transformers.BertModel(small_bert())),
        "the loss of BertModel needs the labels 'labels', and no column gives them",
        tokens,
    ),
    "target": (
        lambda: lm(model=wrong_target),
        "target_modules {'q_proj'} of the adapter match no module of the GPT2LMHeadModel: it has "
        "c_attn, c_fc, c_proj, lm_head, wpe, wte; name some of these",
        None,
    ),
    "frozen": (
        lambda: lm(model=frozen),
        "no parameter of the GPT2LMHeadModel that model gave has requires_grad",
        None,
    ),
    "inputs": (
        lambda: lm(model=bert),
        "BertForSequenceClassification is called with 'input_ids', and no column gives it: the "
        "batches have ids, labels; write a column of that name, as in",
        lambda seed: {"ids" if n == "input_ids" else n: a for n, a in reviews(seed).items()},
    ),
    "labels": (
        lambda: lm(model=bert),
        "the loss of BertForSequenceClassification needs the labels 'labels', and no column gives "
        "them: the batches have input_ids, attention_mask; .* name yours in label_names=",
        tokens,
    ),
    "labels of loss": (
        lambda: lm(loss=lambda output, labels: output.logits.mean(), label_names=("next", "y")),
        "loss= needs the labels 'y'",
        lambda seed: {**tokens(seed), "next": np.zeros(13)},
    ),
    "packed models": (
        lambda: lm(model=bloom, packing=True),
        "packing=True, and a BloomForCausalLM lets the sequences of a row see each other",
        None,
    ),
    "packed samples": (
        lambda: lm(packing=True),
        "packing=True joins sequences into rows, and 'label' has one value a sample",
        reviews,
    ),
    "packed rows": (
        lambda: lm(packing=True),
        "packing=True joins sequences of unequal length, and 'input_ids' is samples of one shape",
        lambda seed: {"input_ids": np.ones((13, 4), int)},
    ),
    "bucket": (lambda: lm(bucket_by="y"), "bucket_by is 'y', no array", tokens),
    "clip": (
        lambda: lm(max_grad_norm=lambda config: 0),
        "max_grad_norm must be a number above 0, got 0",
        None,
    ),
}


def wrong_target(config: Any) -> Any:
    return adapted(gpt2(config), target_modules=["q_proj"])


def frozen(config: Any) -> Any:
    return gpt2(config).requires_grad_(False)


def bloom(config: Any) -> transformers.BloomForCausalLM:
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=24, **ends)
    )


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_train_is_told_of_before(name: str) -> None:
    make, says, arrays = CASES[name]
    data = ShardedDataset.write(
        "memory://hf.zarr", (arrays or tokens)(0), n_shards=1, overwrite=True
    )
    with pytest.raises(WorkloadError, match=says) as raised:
        checks(make(), data.manifest)({})
    assert "\n" not in str(raised.value)


def test_a_column_that_the_model_does_not_take_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrays = {**reviews(0), "mask": RaggedArray.of(texts(0))}
    data = ShardedDataset.write("memory://hf.zarr", arrays, n_shards=1, overwrite=True)
    workload = lm(model=bert)
    for config in ({}, {"lr": 0.1}):
        checks(workload, data.manifest)(config)
    (said,) = (it.getMessage() for it in caplog.records if it.name == "dagsel")
    assert (
        "BertForSequenceClassification takes no argument 'mask': columns of that name are left out"
        in said
    )
    assert "input_ids, attention_mask, token_type_ids" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"collator": "tokenizer"}, "no pad token.*tokenizer.pad_token = tokenizer.eos_token"),
        ({"collator": "collator"}, "TokenizersBackend has no pad token"),
        ({"collator": "seed"}, "has a seed, .* leave seed out"),
        ({"collator": 3}, "collator must be a data collator or a tokenizer .* got 3"),
        ({"collator": "pads", "packing": True}, "packing=True makes the rows itself"),
        ({"packing": 1}, "packing must be True or False, got 1"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing must be True or False"),
        ({"label_names": "labels"}, r"write label_names=\(\"labels\",\)"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be a number above 0, got -1.0"),
        ({"loss": 3}, "loss must be a function"),
        ({"metrics": ["bleu"]}, "dagsel has no metric 'bleu'"),
        ({"collator": "a class"}, "got the class DataCollatorWithPadding"),
        ({"model": "gpt2"}, r"write model=lambda config: AutoModel.*from_pretrained\('gpt2'\)"),
        (
            {"model": "a class of models"},
            r"got the class GPT2LMHeadModel; write .*: GPT2LMHeadModel.from_pretrained\(\.\.\.\)",
        ),
        ({"model": "a method"}, r"write .*: GPT2LMHeadModel.from_pretrained"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    padded = tokenizer(pad_token="[PAD]", mask_token="w5")
    known = {
        "tokenizer": tokenizer(), "collator": transformers.DataCollatorWithPadding(tokenizer()),
        "seed": transformers.DataCollatorForLanguageModeling(padded, seed=3),
        "pads": transformers.DataCollatorWithPadding(padded),
        "a class": transformers.DataCollatorWithPadding,
        "a class of models": transformers.GPT2LMHeadModel,
        "a method": transformers.GPT2LMHeadModel.from_pretrained,
    }  # fmt: skip
    for name, value in options.items():
        options = {**options, name: known.get(value, value) if isinstance(value, str) else value}
    with pytest.raises(WorkloadError, match=says):
        lm(**options)


def test_packing_for_a_model_of_one_label_a_row_is_refused() -> None:
    with pytest.raises(WorkloadError, match="a BertForSequenceClassification takes no rows"):
        lm(model=bert, packing=True).validate({})


def test_data_that_fits_is_not_refused(tmp_path: Path) -> None:
    def t5(config: Any) -> transformers.T5ForConditionalGeneration:
        small: dict[str, Any] = {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 16,
            "num_layers": 1,
            "num_heads": 2,
        }
        small |= {"decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**small, vocab_size=24)
        )

    pads = transformers.DataCollatorWithPadding(tokenizer(pad_token="[PAD]"))
    pairs = {**tokens(0), "labels": RaggedArray.of(texts(1))}
    for number, (workload, arrays) in enumerate((
        (lm(), tokens(0)),
        (lm(), {"input_ids": np.ones((9, 4), int), "spare": np.ones(9)}),
        (lm(model=t5, optimizer=sgd), pairs),
        (lm(model=bert, collator=pads), reviews(0)),
        (lm(model=lora, packing=True), tokens(0)),
    )):  # fmt: skip
        data = written(tmp_path / str(number), arrays)
        checks(workload, data.manifest)({})
        visit = dagsel.workloads.Visit(0, 0, 1, 0)
        shard = workload.prepare(data.shard(0))
        trained = workload.train(workload.init({}, 0), shard, {}, visit=visit)
        assert trained.loss is not None
        assert 0 < trained.loss < 20


def test_transformers_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WorkloadError, match=r"pip install \"dagsel\[transformers\]\""):
        HFWorkload(gpt2, sgd, batch_size=2)


def test_memory_is_said_or_counted_and_a_halved_batch_is_that_of_max_batch() -> None:
    about = DataOutline((13,), {"input_ids": (np.dtype("int64"), ())}, frozenset({"input_ids"}))
    assert lm(memory=lambda config: 10 * config["r"]).memory_bytes({"r": 3}, about) == 30
    parameters = sum(it.numel() for it in gpt2({}).parameters())
    counted = lm().memory_bytes({}, about)
    assert counted is not None
    assert counted >= 4 * 4 * parameters  # gradients and two moments too
    few, half = lm(max_batch=2), lm().halved(1)
    ends = [
        it.train(it.init({}, 0), it.prepare(tokens(0)), {}, visit=Visit(0, 0, 1, 0)).state
        for it in (few, half)
    ]
    assert ends[0] == ends[1]
