"""What `ShardedDataset.write` was told of how samples are divided into training and validation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.division import Division, by_class, by_group
from dagsel.storage.datasets.inputs.labels import Labels

logger = logging.getLogger("dagsel")

_TRAIN, _VALIDATION, _TEST = range(3)
_WORDS = {"train": _TRAIN, "validation": _VALIDATION, "valid": _VALIDATION, "val": _VALIDATION}
_WORDS["test"] = _TEST
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """By what samples are divided: a column's name, or a value for each sample."""

    kind: Literal["split", "stratify", "groups"]
    by: Any

    @classmethod
    def of(cls, validation: Any, **given: Any) -> Rule | None:
        """Check `split`, `stratify` and `groups`; None if none of them is given."""
        rules = [cls(kind, by) for kind, by in given.items() if by is not None]  # type: ignore[arg-type]
        if not rules:
            return None
        if len(rules) > 1:
            first, second = rules[0].kind, rules[1].kind
            raise DatasetInputError(f"{first}= and {second}= do not go together; give one of them")
        (rule,) = rules
        if not is_share(validation):
            raise DatasetInputError(
                f"validation data of its own and {rule.kind}= do not go together; leave one out"
            )
        if not isinstance(rule.by, str) and not hasattr(rule.by, "__len__"):
            raise DatasetInputError(
                f"{rule.kind} must be a column's name, or an array with a value for each sample, "
                f"got {shown(rule.by)}"
            )
        return rule

    @property
    def name(self) -> str | None:
        """The column's name, if it is one."""
        return self.by if isinstance(self.by, str) else None

    @property
    def what(self) -> str:
        """What to call it in an error."""
        return f"{self.kind}={self.by!r}" if self.name is not None else f"{self.kind}="

    def given_labels(self) -> Labels:
        """Return the labels of values that were given."""
        values = self.by.to_numpy() if hasattr(self.by, "to_numpy") else self.by
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        return Labels.of(self.what, [np.asarray(values)])

    def divide(self, labels: Labels, n_samples: int, share: float, seed: int) -> Division:
        """Return who trains and who validates."""
        numbers = labels.numbers
        if len(numbers) != n_samples:
            raise DatasetInputError(
                f"{self.what} has {len(numbers)} values, and there are {n_samples} samples; "
                "give one value for each"
            )
        n_validation = round(n_samples * share)
        if self.kind == "split":
            return self._by_word(labels, seed)
        if self.kind == "stratify":
            self._check_classes(labels)
            chosen = by_class(numbers, n_validation, seed)
            self._tell_rare(labels, chosen)
        else:
            if len(labels.values) < 2:
                raise DatasetInputError(
                    f"{self.what} has one group, {labels.values[0]!r}, and no group may be in both "
                    "parts; give a column with more"
                )
            chosen = by_group(numbers, n_validation, seed)
            if abs(int(chosen.sum()) - n_validation) > max(1, n_samples / 100):
                logger.warning(
                    "%s: %.1f%% of the samples are for validation instead of %.1f%%, which is as "
                    "near as whole groups allow",
                    self.what,
                    100 * chosen.mean(),
                    100 * share,
                )
        return Division(np.flatnonzero(~chosen), np.flatnonzero(chosen), seed)

    def _by_word(self, labels: Labels, seed: int) -> Division:
        for number, value in enumerate(labels.values):
            if str(value).lower() not in _WORDS or not isinstance(value, str):
                row = int(np.flatnonzero(labels.numbers == number)[0])
                raise DatasetInputError(
                    f"{self.what}: row {row} says {value!r}; the values are 'train', and "
                    "'validation', 'valid' or 'val'; rows that say 'test' are left out"
                )
        words = np.array([_WORDS[value.lower()] for value in labels.values])
        parts = words[labels.numbers]
        n_test = int((parts == _TEST).sum())
        if n_test:
            logger.warning(
                "%s: %s of %s rows say 'test' and are left out: a search must not see them",
                self.what,
                f"{n_test:,}",
                f"{len(parts):,}",
            )
        for part, word in ((_TRAIN, "train"), (_VALIDATION, "validation")):
            if not (parts == part).any():
                raise DatasetInputError(
                    f"{self.what}: no row says {word!r}; give some rows that do, or leave "
                    "split= out"
                )
        return Division(np.flatnonzero(parts == _TRAIN), np.flatnonzero(parts == _VALIDATION), seed)

    def _check_classes(self, labels: Labels) -> None:
        fractions = [v for v in labels.values if isinstance(v, float) and not v.is_integer()]
        if fractions:
            raise DatasetInputError(
                f"{self.what} holds {fractions[0]!r}: classes are text or whole numbers; give "
                "another column, or leave stratify= out"
            )

    def _tell_rare(self, labels: Labels, chosen: NDArray[np.bool_]) -> None:
        sizes = np.bincount(labels.numbers)
        in_validation = np.bincount(labels.numbers[chosen], minlength=len(sizes))
        for label in np.flatnonzero(in_validation == sizes)[:1]:
            n = int(sizes[label])
            raise DatasetInputError(
                f"{self.what}: the class {labels.values[label]!r} is too rare ({n} "
                f"sample{'s' * (n > 1)}): none would be left to train on; leave it out, "
                "join it with another, or lower validation"
            )
        rare = np.flatnonzero(in_validation == 0)
        if rare.size:
            logger.warning(
                "%s: %s too rare to be in the validation part: %s",
                self.what,
                "a class is" if rare.size == 1 else f"{rare.size} classes are",
                _some([f"{labels.values[label]!r} ({sizes[label]})" for label in rare]),
            )


def is_share(validation: Any) -> bool:
    """Whether `validation` is a number and no data."""
    return isinstance(validation, (float, int, np.number)) and not isinstance(validation, bool)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
