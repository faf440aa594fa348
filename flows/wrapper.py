"""What flows around other flows share: the traits of the inner flow, and one state of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from typing import Any, Self

from dagsel.checks import shown
from dagsel.errors import SearchError
from dagsel.flow import Context, Decision, Event, Flow, Traits, TrialFailed
from dagsel.flow.argument_names import NEEDED
from dagsel.planning.capacity import Plan


@dataclass(frozen=True, slots=True)
class EndedWell(TrialFailed):
    """A trial that a flow has ended well: to the flow inside, one that trains no more.

    A flow that does not tell them apart takes it as one that has failed.
    """


@dataclass
class Wrapper(Flow):
    """A flow around another one: it passes events to the inner flow and returns its decisions.

    A subclass adds its configuration, keeps its own state in `own`, a dataclass, and changes what
    `start` and `handle` return. Its `state` holds both states, so that `dagsel.flow.save_state` and
    `load_state` work at any depth.

    Parameters
    ----------
    flow
        The inner flow.

    Raises
    ------
    SearchError
        If `flow` is no flow.

    Examples
    --------
    >>> from dagsel.flow import Context, load_state, save_state
    >>> from dagsel.flows import RandomSearch
    >>> outer, again = (Wrapper(Wrapper(RandomSearch(max_epochs=5, n_trials=8))) for _ in range(2))
    >>> outer.flow.flow.start(Context(n_workers=1))
    [Ask(n=4, sampling='random')]
    >>> load_state(again, save_state(outer))
    >>> again.flow.flow.state.drawing.n_asked, again.traits.max_epochs
    (4, 5)
    """

    flow: Flow
    own: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.flow, Flow):
            raise SearchError(
                f"{type(self).__name__} goes around a search such as RandomSearch, got "
                f"{shown(self.flow)}; write flow={NEEDED['flow']}"
            )

    @property
    def traits(self) -> Traits:
        """All that the inner flow says of itself."""
        return self.flow.traits

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Check what the inner flow checks."""
        self.flow.check_config(config)

    def workers_to_begin(self, context: Context) -> int | None:
        """Return what the inner flow wants."""
        return self.flow.workers_to_begin(context)

    def plan_for(self, context: Context) -> Plan | None:
        """Return the plan of the inner flow."""
        return self.flow.plan_for(context)

    def fresh(self) -> Self:
        """Return a flow of the same configuration around a fresh inner flow."""
        return replace(self, flow=self.flow.fresh())

    def start(self, context: Context) -> list[Decision]:
        """Begin the inner search."""
        return self.flow.start(context)

    def handle(self, event: Event) -> list[Decision]:
        """Return the answer of the inner flow."""
        return self.flow.handle(event)

    @property
    def state(self) -> Any:
        """Its own state and that of the inner flow."""
        own, inner = self.own, self.flow.state
        kinds: Any = type(own), type(inner)
        return _nested(*kinds)(own, inner)

    @state.setter
    def state(self, state: Any) -> None:
        self.own, self.flow.state = state.own, state.inner


@cache
def _nested(own: Any, inner: Any) -> type:
    return make_dataclass("Nested", [("own", own), ("inner", inner)])
