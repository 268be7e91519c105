from __future__ import annotations

import os
import pickle  # noqa: TID251 the attack, not a use
import typing

import msgspec
import pytest

from wbridge.control import codec
from wbridge.control.messages import (
    Challenge,
    Digested,
    EpochReady,
    FlowMessage,
    Hello,
    Join,
    Keyed,
    Message,
    Rejected,
    StatusRequest,
    TakeDigest,
    Verified,
    Verify,
    Welcome,
    WithdrawVerify,
)
from wbridge.engine.wire import DataMessage
from wbridge.errors import ProtocolError
from wbridge.flow import messages as flow
from wbridge.ids import Epoch, WorkerId

WORKER = WorkerId("rollout", "e0", (2, 2), (1, 0))
EPOCH = Epoch(2**64 - 1, 3)


def decode_frame(frame: bytes) -> Message:
    nbytes = codec.decode_header(frame[: codec.HEADER_NBYTES], codec.MAX_FRAME_NBYTES)
    assert nbytes == len(frame) - codec.HEADER_NBYTES
    return codec.decode(frame[codec.HEADER_NBYTES :])


@pytest.mark.parametrize(
    "message",
    [
        Challenge(b"n" * 32, 1, "0.1"),
        Hello(WORKER, "host", "token", {"include": (("a", "b"), "argument"), "num_slots": (4, "env")}),
        Welcome(2**64 - 1, {"mode": "sync", "num_engines": 2}, 5.0),
        Join(b"map", b"\x00\xff", "127.0.0.1:1"),
        EpochReady(EPOCH),
        Rejected("BarrierTimeout", "late", ("rollout/e1[0]",)),
        StatusRequest(),
        Keyed(EPOCH, flow.Report(1, 42, b"meta")),
        Keyed(EPOCH, Verify(1, None, {"rollout/e0[0]": {"w": 2**64 - 1}})),
        Keyed(EPOCH, flow.Serve(7, 42, ("e0", "e1"))),
    ],
)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode_frame(codec.encode(message)) == message


def test_every_flow_message_can_be_framed() -> None:
    structs = {
        kind
        for kind in vars(flow).values()
        if isinstance(kind, type) and issubclass(kind, flow._Message) and kind is not flow._Message
    }
    verification = {Verify, WithdrawVerify, TakeDigest, Digested, Verified}
    data_path = set(typing.get_args(DataMessage))  # these never go through the control plane
    assert set(typing.get_args(FlowMessage)) == (structs - data_path) | verification


def test_digests_of_a_large_model_fit_into_a_frame() -> None:
    sums = {
        f"rollout/e0[{rank}]": {f"layers.{i}.weight": 2**64 - i for i in range(1, 4000)} for rank in range(16)
    }
    message = Keyed(EPOCH, Verify(1, 42, sums))
    assert (
        len(codec.encode(message)) > codec.MAX_SMALL_NBYTES and decode_frame(codec.encode(message)) == message
    )


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_c70_a_pickle_is_no_message(tmp_path: object) -> None:
    trace = f"{tmp_path}/exploded"

    with pytest.raises(ProtocolError, match="no wbridge control message"):
        codec.decode(pickle.dumps(Bomb(trace)))
    assert not os.path.exists(trace)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"kind": "Unheard"}),
        msgspec.msgpack.encode({"kind": "EpochReady"}),
        msgspec.msgpack.encode([1, 2]),
        b"\x91" * 100_000,
        codec.encode(StatusRequest())[codec.HEADER_NBYTES :] + b"\x00",
        msgspec.msgpack.encode({"kind": "Rejected", "error": b"\xff", "message": ""}),
    ],
)
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(body)


def test_an_impossible_worker_is_refused_with_the_reason() -> None:
    hello = msgspec.to_builtins(Hello(WORKER, "h", "t", {})) | {"kind": "Hello"}
    hello["worker"]["coordinate"] = (2, 0)
    with pytest.raises(ProtocolError, match="not inside mesh"):
        codec.decode(msgspec.msgpack.encode(hello))

    hello["worker"] = msgspec.to_builtins(WORKER) | {"role": "critic"}
    with pytest.raises(ProtocolError, match="critic"):
        codec.decode(msgspec.msgpack.encode(hello))


def test_only_maps_and_plans_may_be_large() -> None:
    large = b"x" * (2 * codec.MAX_SMALL_NBYTES)

    assert decode_frame(codec.encode(Join(large, b""))) == Join(large, b"")
    with pytest.raises(ProtocolError, match="Keyed takes"):
        codec.encode(Keyed(EPOCH, flow.Report(1, 1, large)))
    with pytest.raises(ProtocolError, match="Keyed takes"):
        codec.decode(msgspec.msgpack.encode(Keyed(EPOCH, flow.Report(1, 1, large))))


def test_the_announced_length_is_bounded() -> None:
    with pytest.raises(ProtocolError, match="4294967295"):
        codec.decode_header(b"\xff" * 4, codec.MAX_FRAME_NBYTES)
