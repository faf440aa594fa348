"""HFWorkload against plain transformers, bit for bit."""

from __future__ import annotations

import inspect
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

import dagsel.metrics
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.storage import RaggedArray
from dagsel.testing import WorkloadSuite
from dagsel.workloads import Base, HFWorkload, Visit
from dagsel.workloads.huggingface.passes import Passes
from tests.fused import fused
from tests.workloads.test_device import HostDevice
from tests.workloads.test_device import device as device
from tests.workloads.tiny_transformers import (
    ENDS,
    TINY,
    N,
    adamw,
    around,
    bert,
    bert_mlm,
    by_hand,
    cosine,
    gpt2,
    llama,
    lm,
    lora,
    one_pass,
    padded,
    partly,
    pretrained,
    reviews,
    sgd,
    tokenizer,
    tokens,
    warmed,
    without_dropout,
)

#: peft 0.21 asks transformers 5.24 by a name that will be gone; HFWorkload ignores it, these loops
#: are without it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")


class TestGpt2(WorkloadSuite):
    gang_tolerance = None  # dropout

    def make_workload(self) -> HFWorkload:
        return lm(
            metrics=["perplexity", "accuracy"], lr_scheduler=warmed, max_grad_norm=0.5,
            gradient_checkpointing=True,
        )  # fmt: skip

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return tokens(seed)


class TestGang(WorkloadSuite):
    """Shares of a batch count by their labels, of which some samples have few."""

    def make_workload(self) -> HFWorkload:
        return lm(
            model=without_dropout, optimizer=sgd, max_batch=1, max_grad_norm=9.0, bucket_by=None
        )

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return partly(seed)


class TestClassifier(WorkloadSuite):
    gang_tolerance = None  # dropout

    def make_workload(self) -> HFWorkload:
        collator = transformers.DataCollatorWithPadding(tokenizer(pad_token="[PAD]"))
        return lm(model=bert, collator=collator, metrics=["accuracy"], precision="bf16")

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return reviews(seed)


class TestLora(WorkloadSuite):
    gang_tolerance = None  # dropout

    def make_workload(self) -> HFWorkload:
        return lm(model=around, base=pretrained, packing=True)

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return tokens(seed)


def made_of(workload: HFWorkload, batch: dict[str, Any]) -> Any:
    assert workload.collate is not None
    return workload.collate(batch)


def lm_batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = [row["input_ids"].tolist() for row in rows]
    return {
        "input_ids": padded(ids), "attention_mask": padded([[1] * len(row) for row in ids]),
        "labels": padded(ids, -100),
    }  # fmt: skip


def review_batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**lm_batch(rows), "labels": torch.tensor([int(row["label"]) for row in rows])}


def plain(model: Any, batch_of: Any, arrays: Any, schedule: Any = None, norm: float = 0.0) -> Any:
    """Train as a script does: no dagsel in here, but for the documented order of the samples."""
    torch.manual_seed(5)
    net = model({})
    optimizer = fused(adamw(net.parameters(), {}))
    scheduler = schedule and schedule(optimizer, {})
    losses = []
    # With a cache, keys and values are copied: some processors then add them up in another order.
    no_cache = {"use_cache": False} if takes_cache(net) else {}
    net.train()
    for epoch, shard in itertools.product((1, 2), (0, 1)):
        data = arrays(shard)
        for at in np.split(np.random.default_rng([7, 2, epoch, shard]).permutation(N), (4, 8, 12)):
            batch = batch_of([{name: data[name][k] for name in data} for k in at])
            optimizer.zero_grad()
            loss = net(**batch, **no_cache).loss
            loss.backward()
            if norm:
                torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
            optimizer.step()
            if scheduler:
                scheduler.step()
            losses.append((epoch, shard, len(at), loss.item()))
    return net.state_dict(), losses


def takes_cache(net: Any) -> bool:
    inner = net.get_base_model() if hasattr(net, "get_base_model") else net
    return "use_cache" in inspect.signature(inner.forward).parameters


def by_units(workload: HFWorkload, arrays: Any, stop_every: int | None = None) -> Any:
    state, losses = workload.init({}, 5), []
    for epoch, shard in itertools.product((1, 2), (0, 1)):
        prepared, finished = workload.prepare(arrays(shard)), False
        while not finished:
            asked = itertools.count(1)

            def stop(asked: Any = asked) -> bool:
                return next(asked) == stop_every

            trained = workload.train(
                State(bytes(state.buffer)), prepared, {}, visit=Visit(7, 2, epoch, shard),
                should_stop=stop,
            )  # fmt: skip
            state, finished = trained.state, trained.finished
        losses.append(trained.loss)
    return state, losses


LOOPS: dict[str, tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]] = {
    "lm": (gpt2, lm_batch, tokens, {}, {}),
    "linear": (gpt2, lm_batch, tokens, {"schedule": warmed}, {"lr_scheduler": warmed}),
    "cosine, clipped": (
        gpt2, lm_batch, tokens,
        {"schedule": cosine, "norm": 0.3}, {"lr_scheduler": cosine, "max_grad_norm": 0.3},
    ),
    "checkpointing": (gpt2, lm_batch, tokens, {}, {"gradient_checkpointing": True}),
    "lora around a base": (by_hand, lm_batch, tokens, {}, {"model": around, "base": pretrained}),
    "llama": (llama, lm_batch, tokens, {}, {}),
    "classifier": (bert, review_batch, reviews, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("stop_every", [None, 1])
@pytest.mark.parametrize("name", LOOPS)
def test_units_equal_a_plain_loop(name: str, stop_every: int | None) -> None:
    model, batch_of, arrays, in_plain, options = LOOPS[name]
    wanted, losses = plain(model, batch_of, arrays, **in_plain)
    workload = lm(**{"model": model, "bucket_by": None, **options})
    state, found = by_units(workload, arrays, stop_every)
    trained = workload.restore(state, {}).state_dict()
    assert trained.keys() == wanted.keys()
    assert all(torch.equal(trained[key], wanted[key]) for key in wanted)
    for (epoch, shard), loss in zip(itertools.product((1, 2), (0, 1)), found, strict=True):
        own = [(n, value) for e, s, n, value in losses if (e, s) == (epoch, shard)]
        assert loss == sum(n * value for n, value in own) / N


def test_a_state_of_an_adapter_holds_the_adapter() -> None:
    workload = lm(model=around, base=pretrained)
    state = by_units(workload, tokens)[0]
    trains = [p for p in around({}, pretrained()).parameters() if p.requires_grad]
    n_bytes = 3 * sum(parameter.nbytes for parameter in trains)  # weights, and Adam's moments
    held = {name: tensor for name, tensor in state.tensors.items() if "random" not in name}
    assert sum(tensor.data.nbytes for tensor in held.values()) <= 1.1 * n_bytes
    assert not [name for name in held if "base_layer" in name or "wte" in name]
    model: Any = workload.restore(state, {})
    assert torch.equal(model.base_model.model.lm_head.weight, pretrained().lm_head.weight)
    assert model.base_model.model.lm_head.weight is model.base_model.model.transformer.wte.weight


def test_a_base_may_be_the_file_of_a_checkpoint(tmp_path: Path) -> None:
    pretrained().save_pretrained(tmp_path)
    file = Base(lambda: gpt2({}), files=tmp_path / "model.safetensors")
    losses = [by_units(lm(model=around, base=base), tokens)[1] for base in (file, pretrained)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"collator": "transformers"}])
def test_what_is_sent_to_a_device_trains_as_what_is_there(
    device: HostDevice, options: dict[str, Any]
) -> None:
    if options.get("collator"):
        options = {"collator": transformers.DataCollatorWithPadding(tokenizer(pad_token="[PAD]"))}
    resident = by_units(lm(**options), tokens)
    assert device.n_sent == 0
    assert by_units(lm(**options, device_memory=0), tokens) == resident
    assert device.n_received == 4 * 4


def test_collators_of_transformers_and_tokenizers_make_the_same_batches() -> None:
    words = tokenizer(pad_token="[PAD]")
    for model, arrays, collator in (
        (bert, reviews, transformers.DataCollatorWithPadding(words)),
        (gpt2, tokens, transformers.DataCollatorForLanguageModeling(words, mlm=False)),
        (bert, reviews, lambda rows: review_batch(rows)),
    ):
        wanted = by_units(lm(model=model, bucket_by=None), arrays)
        assert by_units(lm(model=model, bucket_by=None, collator=collator), arrays) == wanted
        assert by_units(lm(model=model, bucket_by=None, collator=words), arrays) == wanted


def test_several_labels_a_sample_are_the_same_with_any_collator() -> None:
    words = tokenizer(pad_token="[PAD]")
    labels = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]])
    batch = {"input_ids": [torch.tensor([1, 2]), torch.tensor([3])], "labels": labels}
    for collator in (None, words, transformers.DataCollatorWithPadding(words)):
        made = made_of(lm(collator=collator), batch)
        assert torch.equal(made["labels"], labels)
        assert made["labels"].dtype == labels.dtype
        assert made["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_rows_are_filled_up_where_and_with_what_the_tokenizer_says() -> None:
    words = tokenizer(pad_token="w9", padding_side="left")
    labels = RaggedArray.of([[1, 2, 3], [4]])
    data = {"input_ids": labels, "token_type_ids": labels, "labels": labels}
    batch = {name: rows.rows([0, 1]) for name, rows in lm().prepare(data).items()}
    made = made_of(lm(collator=words), batch)
    assert made["input_ids"].tolist() == [[1, 2, 3], [9, 9, 4]]
    assert made["token_type_ids"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert made["labels"].tolist() == [[1, 2, 3], [-100, -100, 4]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_decoder_that_classifies_finds_the_last_token_without_a_tokenizer() -> None:
    three: dict[str, Any] = {"num_labels": 3}

    def decoder(config: Any) -> transformers.GPT2ForSequenceClassification:
        return transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(**TINY, **ENDS, **three, pad_token_id=3)
        )

    workload = lm(model=decoder)
    state, data = workload.init({}, 0), reviews(1)
    data["input_ids"] = RaggedArray.of([1 + row % 2 for row in data["input_ids"]])
    kept = workload.evaluate(state, workload.prepare(data), {}).kept
    assert kept is not None
    scored = workload.pool([kept])["loss"]
    model = workload.restore(state, {})
    rows = [(torch.tensor(data["input_ids"][k])[None], data["label"][k]) for k in range(N)]
    alone = [model(input_ids=ids, labels=torch.tensor([label])).loss.item() for ids, label in rows]
    assert scored == pytest.approx(np.mean(alone), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"eval_batch_size": 3}])
def test_scores_are_those_of_one_pass_over_the_whole_set(options: dict[str, Any]) -> None:
    right = dagsel.metrics.over_set(
        lambda logits, labels: float((logits.argmax(-1) == labels).float().mean())
    )
    metrics = {"perplexity": "perplexity", "accuracy": "accuracy", "of all": right}
    workload = lm(metrics=metrics, **options)
    state, kept, rows = workload.init({}, 1), [], []
    for seed, n in ((0, 13), (1, 2), (2, 7)):  # shards with unequal numbers of labels
        data = partly(seed)
        data = {name: RaggedArray.of([array[k] for k in range(n)]) for name, array in data.items()}
        rows += [{name: data[name][k] for name in data} for k in range(n)]
        scored = workload.evaluate(state, workload.prepare(data), {})
        assert scored.n_samples == n
        assert scored.kept is not None
        kept.append(State(bytes(scored.kept.buffer)))
    loss, accuracy = one_pass(workload.restore(state, {}), rows)
    assert workload.pool(kept) == {
        "loss": pytest.approx(loss, rel=1e-6), "perplexity": pytest.approx(math.exp(loss), 1e-6),
        "accuracy": pytest.approx(accuracy), "of all": pytest.approx(accuracy),
    }  # fmt: skip
    nothing = {"labels": RaggedArray.of([[-100, -100]]), "input_ids": RaggedArray.of([[1, 2]])}
    scored = workload.evaluate(state, workload.prepare(nothing), {})
    assert scored.kept is not None
    assert workload.pool([*kept, scored.kept]) == workload.pool(kept)
    with pytest.raises(WorkloadError, match="no label of the validation set counts: its labels"):
        workload.pool([scored.kept])
    assert list(workload.metrics) == [*workload.pooled_metrics] == list(workload.pool(kept))
    assert workload.metrics["perplexity"] == "minimize"


@pytest.mark.parametrize("model", [without_dropout, llama])
@pytest.mark.parametrize("arrays", [tokens, partly])
@pytest.mark.parametrize("options", [{"packing": True}, {"max_batch": 3}, {"max_batch": 1}])
def test_packing_and_accumulation_change_loss_and_gradients_by_rounding_alone(
    model: Any, arrays: Any, options: dict[str, Any]
) -> None:
    def step(**options: Any) -> tuple[Any, float]:
        workload = lm(model=model, optimizer=sgd, batch_size=N, bucket_by=None, **options)
        shard, state = workload.prepare(arrays(3)), workload.init({}, 1)
        trained = workload.train(state, shard, {}, visit=Visit(0, 0, 1, 0))
        before, after = (workload.restore(s, {}).state_dict() for s in (state, trained.state))
        assert trained.loss is not None
        return {name: after[name] - before[name] for name in after}, trained.loss

    (wanted, loss), (found, its) = step(), step(**options)
    assert its == pytest.approx(loss, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 0.01


def test_a_packed_row_holds_several_sequences() -> None:
    made = made_of(lm(packing=True), {"input_ids": [torch.arange(1, 1 + n) for n in (3, 6, 3, 5)]})
    assert made["input_ids"].shape == (3, 6)
    assert "attention_mask" not in made


def test_samples_of_a_batch_are_of_similar_length_by_default() -> None:
    def widths(**options: Any) -> list[int]:
        seen: list[int] = []

        def watching(output: Any, labels: torch.Tensor) -> Any:
            seen.append(labels.shape[1])
            return output.logits.mean()

        workload = lm(loss=watching, **options)
        shard = workload.prepare(tokens(4, 40))
        workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0))
        return seen

    assert sum(widths()) < 0.85 * sum(widths(bucket_by=None))
    assert sum(widths()) == sum(widths(bucket_by="input_ids"))


def test_a_loss_of_ones_own_gets_the_output_and_the_labels() -> None:
    def smooth(output: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = output.logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)

    first, second = (by_units(lm(**given), tokens) for given in ({}, {"loss": smooth}))
    assert first[1] == pytest.approx(second[1], rel=1e-5)


def test_masks_are_drawn_from_the_trial_and_for_scores_always_the_same() -> None:
    words = tokenizer(pad_token="[PAD]", mask_token="w5")
    workload = lm(model=bert_mlm, collator=transformers.DataCollatorForLanguageModeling(words))
    states = [by_units(workload, tokens, stop)[0] for stop in (None, 1)]
    assert states[0] == states[1]
    shard = workload.prepare(tokens(9))
    streams = {n: t for n, t in workload.init({}, 99).tensors.items() if n.startswith("random")}
    other = State.pack({**states[0].tensors, **streams}, states[0].meta)
    assert other != states[0]
    assert workload.evaluate(other, shard, {}) == workload.evaluate(states[0], shard, {})


def test_only_what_a_model_knows_reaches_it_and_float64_becomes_the_models_dtype() -> None:
    data = {**reviews(0), "spare": np.ones((N, 2)), "inputs_embeds": np.ones((N, 4, 16))}
    del data["input_ids"]
    workload = lm(model=bert, bucket_by=None)
    shard, state = workload.prepare(data), workload.init({}, 0)
    trained = workload.train(state, shard, {}, visit=Visit(0, 0, 1, 0))
    assert trained.loss is not None
    assert 0 < trained.loss < 5
    batch = {**made_of(workload, shard), "cache": torch.ones(1)}
    inputs, labels = Passes(("labels",)).given(bert({}), batch)
    assert {*inputs} == {"inputs_embeds", "labels"}
    assert [*labels] == ["labels"]
    inputs, _ = Passes(("labels",)).given(
        gpt2({}), {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    )
    assert [*inputs] == ["input_ids", "labels", "use_cache"]


def test_options_of_torch_workloads_do_here_what_they_do_there() -> None:
    shard = lm().prepare(tokens(0))

    def unit(ends_epoch: bool = True, **options: Any) -> Any:
        workload = lm(model=lora, lr_scheduler=warmed, compile=False, **options)
        visit = Visit(0, 0, 1, 0, ends_epoch=ends_epoch)
        return workload.train(workload.init({}, 0), shard, {}, visit=visit)

    def steps(trained: Any) -> int:
        return int(trained.state.meta["tree"]["schedule"]["last_epoch"])

    assert steps(unit()) == 4
    assert [steps(unit(e, lr_scheduler_interval="epoch")) for e in (False, True)] == [0, 1]
    assert (unit().n_samples, unit(drop_last=True).n_samples) == (N, 12)
    whole, part = unit(fused=False), unit(fused=False, state="trainable")
    assert whole.loss == part.loss
    assert whole.state.nbytes > part.state.nbytes + gpt2({}).lm_head.weight.nbytes


def test_checkpointing_computes_activations_anew() -> None:
    calls: list[int] = []

    def counted(config: Any) -> transformers.GPT2LMHeadModel:
        model: Any = gpt2(config)
        model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    n_calls = []
    for options in ({}, {"gradient_checkpointing": True}):
        workload = lm(model=counted, **options)
        state = workload.init({}, 0)
        calls.clear()
        trained = workload.train(state, workload.prepare(tokens(0)), {}, visit=Visit(0, 0, 1, 0))
        n_calls.append(len(calls))
        model: Any = workload.restore(trained.state, {})
        assert model.transformer.gradient_checkpointing is False
    assert n_calls == [4, 8]


def test_several_models_are_the_mean_of_their_logits() -> None:
    workload = lm()
    models = [workload.restore(workload.init({}, seed), {}) for seed in (0, 1)]
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        mean = workload.ensemble(models)(input_ids=ids).logits
        assert torch.equal(mean, (models[0](ids).logits + models[1](ids).logits) / 2)


def test_an_evaluation_that_ran_out_of_memory_is_tried_with_half_the_samples_at_once() -> None:
    sizes: list[int] = []

    def counted(config: Any) -> Any:
        model = without_dropout(config)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        return model

    work = lm(model=counted, eval_batch_size=8)
    state, shard = work.init({"lr": 0.01}, 0), work.prepare(tokens(0))
    sizes.clear()
    for halved in (work, work.halved(1)):
        halved.evaluate(state, shard, {"lr": 0.01})
        assert max(sizes) == halved.at_once({"lr": 0.01}, "evaluate")
        sizes.clear()
