"""What the workers of a gang tell each other by way of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable

from distributed.comm.addressing import get_address_host

from dagsel.dispatch.trials import Binding
from dagsel.messages import AbandonGang, GangCalls, JoinGang


def passed_on(
    told: GangCalls | AbandonGang, binding: Binding, is_there: Callable[[str], bool]
) -> tuple[str, JoinGang | AbandonGang]:
    """Return whom what is told of a gang goes on to, and how.

    Who is called joins the leader; if that one is gone, or cannot come, the leader waits no longer.
    """
    leader, unit, attempt = binding.worker, told.unit, told.attempt
    if isinstance(told, AbandonGang):
        return leader, told
    member = binding.workers[told.rank]
    if not is_there(member):  # the leader did not wait yet as it went
        return leader, AbandonGang(unit, attempt, f"{member} was lost")
    to = (len(binding.workers), get_address_host(leader), told.port)
    return member, JoinGang(unit, attempt, binding.shard, told.rank, *to, told.how)
