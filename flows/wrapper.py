"""What flows around other flows share: one state that holds both, and the search's own traits."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from typing import Any, Self

from dagsel.errors import SearchError
from dagsel.flow import Context, Decision, Event, Flow, Traits


@dataclass
class Wrapper(Flow):
    """A flow around another one.

    A subclass adds its configuration and gives `own` a dataclass of its own. Its `state` holds both
    states, so that `dagsel.flow.save_state` and `load_state` work at any depth.

    Parameters
    ----------
    flow
        The search inside.

    Raises
    ------
    SearchError
        If it is none.

    Examples
    --------
    >>> from dagsel.flow import Context, load_state, save_state
    >>> from dagsel.flows import RandomSearch
    >>> outer, again = (Wrapper(Wrapper(RandomSearch(max_epochs=5, n_trials=8))) for _ in range(2))
    >>> outer.flow.flow.start(Context(n_workers=1))
    [Ask(n=4, sampling='random')]
    >>> load_state(again, save_state(outer))
    >>> again.flow.flow.state.n_asked, again.traits.max_epochs
    (4, 5)
    """

    flow: Flow
    own: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.flow, Flow):
            raise SearchError(
                f"{type(self).__name__} goes around a search such as RandomSearch, got "
                f"{self.flow!r}; give one as flow="
            )

    @property
    def traits(self) -> Traits:
        """All that the search inside says of itself."""
        return self.flow.traits

    def fresh(self) -> Self:
        """Return a flow of the same configuration, around a fresh one."""
        return replace(self, flow=self.flow.fresh())

    def start(self, context: Context) -> list[Decision]:
        """Begin the search inside."""
        return self.flow.start(context)

    def handle(self, event: Event) -> list[Decision]:
        """Let the search inside answer."""
        return self.flow.handle(event)

    @property
    def state(self) -> Any:
        """Its own state and the inner flow's."""
        inner = self.flow.state
        kinds: Any = type(self.own), type(inner)
        return _nested(*kinds)(self.own, inner)

    @state.setter
    def state(self, state: Any) -> None:
        self.own, self.flow.state = state.own, state.inner


@cache
def _nested(own: Any, inner: Any) -> type:
    return make_dataclass("Nested", [("own", own), ("inner", inner)])
