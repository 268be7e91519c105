from __future__ import annotations

from functools import partial

import anyio
import pytest

from wbridge.control.local import local_pair
from wbridge.control.messages import Bye, EpochReady, Message, Reconfigure, Rejected
from wbridge.errors import ConfigError, PeerLost, ProtocolError
from wbridge.ids import Epoch

pytestmark = pytest.mark.anyio


async def test_what_was_posted_before_the_end_arrives_in_order() -> None:
    near, far = local_pair("near", "far")
    messages = [EpochReady(Epoch(1, n)) for n in range(5)]
    for message in messages:
        near.post(message)
    near.finish()
    near.post(Bye())
    assert [await far.receive() for _ in messages] == messages
    with pytest.raises(PeerLost, match="near is gone"):
        await far.receive()


async def test_an_answer_is_taken_when_its_sender_has_returned() -> None:
    """Two machines that answer each other are never entered twice."""
    near, far = local_pair("near", "far")
    inside, taken = 0, []

    def take(answer: bool, message: Message) -> None:
        nonlocal inside
        assert inside == 0
        inside += 1
        taken.append(message)
        if answer:
            for n in range(3):
                far.post(Reconfigure(n, {}))
        inside -= 1
        if len(taken) == 4:
            near.abort("all have come")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expect_loss, partial(near.deliver, partial(take, False)), "all have come")
        tasks.start_soon(expect_loss, partial(far.deliver, partial(take, True)), "near is gone")
        near.post(Bye())
    assert taken == [Bye(), *(Reconfigure(n, {}) for n in range(3))]


async def expect_loss(deliver: partial[object], why: str) -> None:
    with pytest.raises(PeerLost, match=why):
        await deliver()  # type: ignore[misc]  # a coroutine function, which `partial` hides


async def test_what_take_raises_ends_the_delivery_and_loses_nothing() -> None:
    near, far = local_pair("near", "far")

    def refuse(message: Message) -> None:
        raise ProtocolError("not that")

    near.post(Bye())
    near.post(EpochReady(Epoch(1, 1)))
    with pytest.raises(ProtocolError, match="not that"):
        await far.deliver(refuse)
    assert await far.receive() == EpochReady(Epoch(1, 1))
    far.post(Rejected("ConfigError", "two values"))
    with pytest.raises(ConfigError, match="two values"):
        await near.receive()


async def test_a_cancelled_delivery_loses_nothing() -> None:
    near, far = local_pair("near", "far")
    with anyio.move_on_after(0.01):
        await far.deliver(lambda _: None)
    near.post(Bye())
    assert await far.receive() == Bye()


async def test_leaving_the_context_is_the_loss_of_this_side() -> None:
    near, far = local_pair("near", "far")
    async with near:
        pass
    with pytest.raises(PeerLost, match="near is gone"):
        await far.receive()
    with pytest.raises(PeerLost, match="far is given up: this side has left"):
        await near.receive()
