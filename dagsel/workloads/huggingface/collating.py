"""Rows of tokens as tensors: filled up, packed, or by a collator of transformers.

What is made here equals what the data collators of transformers make, without the way over lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dagsel.checks import shown, takes
from dagsel.collate import samples
from dagsel.errors import WorkloadError

#: The label that no loss counts.
IGNORED = -100
#: What a tokenizer returns beside the ids.
_OF_TOKENS = {"attention_mask": 0, "special_tokens_mask": 1}


@dataclass(frozen=True)
class Padding:
    """Fills up rows of unequal length, and makes the attention mask.

    Parameters
    ----------
    label_names
        Names of labels, which are filled up with -100.
    pad_id, type_id
        What ids and token types are filled up with. Ids are filled up with 0 if it is not known,
        and get the model's own later (`dagsel.workloads.huggingface.passes`).
    side
        Where a row is filled up.

    Examples
    --------
    >>> batch = {"input_ids": [torch.tensor([5, 7]), torch.tensor([3])]}
    >>> {name: rows.tolist() for name, rows in Padding(("labels",))(batch).items()}
    {'input_ids': [[5, 7], [3, 0]], 'attention_mask': [[1, 1], [1, 0]]}
    """

    label_names: tuple[str, ...]
    pad_id: int | None = None
    type_id: int = 0
    side: str = "right"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with tensors alone."""
        batch = named_labels(batch, self.label_names)
        made = {name: self._filled(name, rows) for name, rows in batch.items()}
        ids = batch.get("input_ids")
        if isinstance(ids, list) and "attention_mask" not in batch:
            made["attention_mask"] = _fill([torch.ones_like(row) for row in ids], 0, self.side)
        return made

    def _filled(self, name: str, rows: Any) -> torch.Tensor:
        if not isinstance(rows, list):
            whole: torch.Tensor = rows
            return whole
        fills = {"token_type_ids": self.type_id, **_OF_TOKENS}
        fills |= dict.fromkeys(self.label_names, IGNORED)
        return _fill(rows, fills.get(name, self.pad_id or 0), self.side)


@dataclass(frozen=True)
class Packing:
    """Puts several sequences into one row, as wide as the longest; positions begin anew in each.

    The longest sequences are placed first, each into the first row that has room. The first label
    of a sequence does not count: nothing of the row before it is its own. The end of a row is a
    sequence without labels. Without a column of labels they are the ids.

    Examples
    --------
    >>> batch = {"input_ids": [torch.arange(1, 1 + n) for n in (2, 5, 2)]}
    >>> made = Packing("labels")(batch)
    >>> made["input_ids"].tolist(), made["position_ids"].tolist()
    ([[1, 2, 3, 4, 5], [1, 2, 1, 2, 0]], [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]])
    >>> made["labels"].tolist()
    [[-100, 2, 3, 4, 5], [-100, 2, -100, 2, -100]]
    """

    label_name: str
    pad_id: int = 0

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the packed rows."""
        batch = named_labels(batch, (self.label_name,))
        ids: Sequence[torch.Tensor] = batch["input_ids"]
        sizes = [len(row) for row in ids]
        columns = {name: list(rows) for name, rows in batch.items() if name != "attention_mask"}
        columns.setdefault(self.label_name, list(ids))
        columns[self.label_name] = [_without_first(row) for row in columns[self.label_name]]
        columns["position_ids"] = [torch.arange(n, device=ids[0].device) for n in sizes]
        width, rows = max(sizes), first_fit(sizes)
        ends = {self.label_name: IGNORED, "input_ids": self.pad_id}
        return {
            name: torch.stack([
                _joined([parts[place] for place in row], width, ends.get(name, 0),
                        counts=name == "position_ids")
                for row in rows
            ])
            for name, parts in columns.items()
        }  # fmt: skip


def first_fit(sizes: Sequence[int]) -> list[list[int]]:
    """Return the places in each row: the largest first, each where there is room.

    Examples
    --------
    >>> first_fit([2, 5, 2, 3])
    [[1], [3, 0], [2]]
    """
    width = max(sizes)
    rows: list[list[int]] = []
    free: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        row = next((at for at, left in enumerate(free) if left >= sizes[place]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(place)
        free[row] -= sizes[place]
    return rows


def collating(collator: Any, label_names: tuple[str, ...], *, packing: bool) -> Any:
    """Return what makes tensors of a batch: of a tokenizer, a collator, or nothing.

    Raises
    ------
    WorkloadError
        If it is none of these, or a tokenizer has no token to fill up with.
    """
    tokenizer = tokenizer_of(collator)
    pad_id = None if tokenizer is None else tokenizer.pad_token_id
    if tokenizer is not None and pad_id is None:
        raise WorkloadError(
            f"the {type(tokenizer).__name__} has no pad token, and rows of unequal length are "
            "filled up with it; write tokenizer.pad_token = tokenizer.eos_token, or name another"
        )
    if packing and not (collator is None or collator is tokenizer):
        raise WorkloadError(
            f"packing=True makes the rows itself, and collator is {shown(collator)}; give "
            "collator=tokenizer, or leave it out"
        )
    if packing:
        return Packing(label_names[0], pad_id or 0)
    if collator is None:
        return Padding(label_names)
    if collator is tokenizer:
        type_id = getattr(tokenizer, "pad_token_type_id", 0)
        return Padding(label_names, pad_id, type_id, tokenizer.padding_side)
    if isinstance(collator, type) or not takes(collator, 1):
        raise WorkloadError(
            "collator must be a data collator or a tokenizer of transformers, or a function of a "
            f"list of samples, got {shown(collator)}"
        )
    if getattr(collator, "seed", None) is not None:
        raise WorkloadError(
            f"the {type(collator).__name__} has a seed, and with it random numbers of its own, "
            "which no trial's state has; leave seed out: it draws from the trial's then"
        )
    return Collator(collator)


def tokenizer_of(collator: Any) -> Any:
    """Return the tokenizer that a collator is or has, or None."""
    found = collator if hasattr(collator, "pad_token_id") else getattr(collator, "tokenizer", None)
    return found if hasattr(found, "pad_token_id") else None


@dataclass(frozen=True)
class Collator:
    """Runs a collator of samples: those of transformers get no tensors of one axis."""

    function: Any

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what it makes of the batch's samples."""
        batch = {name: _on_host(rows) for name, rows in batch.items()}
        if type(self.function).__module__.startswith("transformers."):
            batch = {name: _as_lists(rows) for name, rows in batch.items()}
        made = samples(self.function)(batch)
        return {name: value for name, value in made.items() if value is not None}


def named_labels(batch: Mapping[str, Any], label_names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return a batch whose ``label`` has the name that models know, as a `Trainer` has it."""
    if label_names != ("labels",) or "labels" in batch or "label" not in batch:
        return batch
    return {"labels" if name == "label" else name: rows for name, rows in batch.items()}


def _on_host(rows: Any) -> Any:
    return [row.cpu() for row in rows] if isinstance(rows, list) else rows.cpu()


def _as_lists(rows: Any) -> Any:
    if isinstance(rows, list):
        return [row.tolist() if row.dim() == 1 else row for row in rows]
    if rows.is_floating_point():
        return rows.numpy() if rows.dim() == 2 else rows  # no collator pads rows that are tensors
    return rows.tolist() if rows.dim() <= 2 else rows


def _fill(rows: Sequence[torch.Tensor], fill: float, side: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=fill, padding_side=side
    )


def _joined(
    parts: list[torch.Tensor], width: int, end: float, *, counts: bool = False
) -> torch.Tensor:
    """Return a row of some sequences, filled up to a width."""
    n_left = width - sum(map(len, parts))
    rest = torch.arange(n_left) if counts else torch.full((n_left,), end)
    return torch.cat([*parts, rest.to(parts[0].device, parts[0].dtype)])


def _without_first(labels: torch.Tensor) -> torch.Tensor:
    kept = labels.clone()
    kept[:1] = IGNORED
    return kept
