"""Both ways to look where tensors lie find the same ones that have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch

from wbridge.discovery import places
from wbridge.discovery.places import Places, PythonPlaces, places_of
from wbridge.native.extension import places_type, why_missing

Build = Callable[[tuple[str, ...], Sequence[torch.Tensor]], Places]


def native(names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> Places:
    return places_type()(torch.Tensor, names, tensors)


needs_native = pytest.mark.skipif(
    why_missing() is not None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="the extension was not built, or torch does not let it look",
)


@pytest.fixture(params=[pytest.param(native, marks=needs_native), PythonPlaces])
def build(request: pytest.FixtureRequest) -> Build:
    found: Build = request.param
    return found


def replace_storage(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"].data = tensors["b"].data.clone()


def replace_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"] = torch.zeros(4, 6)


def delete(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["b"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"].data = tensors["b"].data.view(6, 4)


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"].data = tensors["b"].data[:, :5]


def change_axes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"].data = tensors["b"].data.flatten()


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"].data = tensors["b"].data.as_strided((4, 6), (1, 4))


def change_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"] = tensors["b"].detach().view(torch.int32)


def change_to_half_as_wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors["c"] = tensors["c"].view(torch.float16)


@pytest.mark.parametrize(
    ("move", "name"),
    [
        *((move, "b") for move in (replace_storage, replace_tensor, delete, reshape, cut, change_axes)),
        *((move, "b") for move in (transpose, change_dtype)),
        (change_to_half_as_wide, "c"),
    ],
)
def test_what_has_moved_is_found_where_one_looks(
    build: Build, move: Callable[[dict[str, torch.Tensor]], None], name: str
) -> None:
    tensors = {
        "a": torch.zeros(0),
        "b": torch.nn.Parameter(torch.zeros(4, 6)),
        "c": torch.zeros(3, dtype=torch.bfloat16),
        "d": torch.zeros(()),
    }
    found = build(tuple(tensors), list(tensors.values()))
    assert found.moved(tensors, 0, 4) == []
    move(tensors)
    assert found.moved(tensors, 0, 4) == [name]
    at = "abcd".index(name)
    assert found.moved(tensors, at, 9) == [name]
    assert found.moved(tensors, 0, at) == found.moved(tensors, at + 1, 4) == []


class Looking(Mapping[str, torch.Tensor]):
    """Views that last as long as somebody looks."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_a_mapping_is_asked_for_each_tensor(build: Build) -> None:
    looking = Looking({"a": torch.zeros(2), "b": torch.zeros(2)})
    found = build(tuple(looking), list(looking.values()))
    assert found.moved(looking, 0, 2) == []
    looking.tensors["b"] = torch.zeros(2)
    assert found.moved(looking, 0, 2) == ["b"]
    del looking.tensors["a"]
    assert found.moved(looking, 0, 2) == ["a", "b"]


def test_what_a_mapping_raises_goes_to_who_asks(build: Build) -> None:
    class Broken(Looking):
        def __getitem__(self, name: str) -> torch.Tensor:
            raise RuntimeError("sharded away")

    found = build(("a",), [torch.zeros(2)])
    with pytest.raises(RuntimeError, match="sharded away"):
        found.moved(Broken({}), 0, 1)


@needs_native
def test_what_dlpack_cannot_describe_has_to_be_looked_at_in_another_way() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2).to_sparse(), "c": "no tensor"}
    found = places_type()(torch.Tensor, tuple(tensors), list(tensors.values()))
    assert found.moved(tensors, 0, 3) == ["b", "c"]
    assert found.moved({**tensors, "a": 7}, 0, 1) == ["a"]

    class Other:
        """A type of tensors that shows nothing."""

    assert places_type()(Other, ("a",), [torch.zeros(2)]).moved(tensors, 0, 1) == ["a"]
    with pytest.raises(ValueError, match="one name"):
        places_type()(torch.Tensor, ("a",), [])


def test_python_looks_where_the_extension_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "why_missing", lambda: "not built")
    assert isinstance(places_of(("a",), [torch.zeros(2)]), PythonPlaces)
