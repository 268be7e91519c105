"""Trace and probe of real vLLM model classes agree on every element, for ranks of TP 1, 2 and 4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.models.checkpoints import checkpoint_of, tiny_config
from tests.models.installed import needs
from tests.models.vllm_rank import close_vllm, vllm_rank
from tests.process.vllm_forks import VllmForks
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.discovery.pointers import bind, owners_of
from wbridge.discovery.trace import trace
from wbridge.layout.source_map import SourceMap

pytestmark = [pytest.mark.backend, needs("vllm")]

VOCABULARY_PADDED_BY = 6  # from 250 to a multiple of 64


@pytest.fixture(scope="module", autouse=True)
def one_process_group() -> Iterator[None]:
    yield
    close_vllm()


def indices(source_map: SourceMap) -> dict[str, torch.Tensor]:
    """Number all checkpoint elements from 1 and write each where the map says; 0 stays unfed."""
    numbered, start = {}, 1
    for name, spec in source_map.checkpoint.items():
        size = torch.Size(spec.shape).numel()
        numbered[name] = torch.arange(start, start + size)
        start += size
    result = {
        name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in source_map.parameters.items()
    }
    for m in source_map.mapped:
        read = numbered[m.tensor].as_strided(
            m.region.extents, m.region.source.strides, m.region.source.offset
        )
        into = result[m.parameter]
        into.as_strided(m.region.extents, m.region.target.strides, m.region.target.offset).copy_(read)
    return result


@pytest.mark.parametrize(
    "architecture", ["qwen3", "qwen3_tied", "qwen3_moe", "llama", "deepseek_v3", "gemma3"]
)
def test_trace_equals_probe(architecture: str, tmp_path: Path) -> None:
    config = tiny_config(architecture)
    checkpoint = checkpoint_of(config)
    for size in (1, 2, 4):
        for rank in range(size):
            with vllm_rank(config, tmp_path, rank=rank, tensor_parallel=size) as model:
                parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
                before = {n: t.detach().clone() for n, t in {**parameters, **buffers}.items()}
                bindings = bind(parameters, owners_of(model, parameters))
                traced, probed = (
                    discover(
                        checkpoint=checkpoint,
                        parameters=parameters,
                        buffers=buffers,
                        load_weights=model.load_weights,
                        config=Config(),
                        method=method,
                    )
                    for method in ("trace", "probe")
                )
                bindings.check()
                for name, tensor in {**parameters, **buffers}.items():
                    assert torch.equal(tensor.detach().view(torch.int32), before[name].view(torch.int32))
            expected, found = indices(probed), indices(traced)
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
            assert set(traced.mapped) == set(probed.mapped)
            assert len(traced.mapped) == len(checkpoint)
            assert traced.unfed == probed.unfed
            assert not traced.opaque
            padding = VOCABULARY_PADDED_BY * config["hidden_size"]
            embeddings = {"model.embed_tokens.weight", "lm_head.weight"} & set(traced.parameters)
            assert dict(traced.unfed) == (dict.fromkeys(embeddings, padding) if rank == size - 1 else {})


def trace_real_rank(path: str, rank: str) -> None:
    """What each of two processes does."""
    directory, config = Path(path), tiny_config("qwen3_moe")
    at = f"file://{directory}/meeting"
    with vllm_rank(config, directory / rank, rank=int(rank), tensor_parallel=2, rendezvous=at) as model:
        parameters = dict(model.named_parameters())
        checkpoint = checkpoint_of(config)
        found = trace(checkpoint=checkpoint, parameters=parameters, load_weights=model.load_weights)
    (directory / f"{rank}.map").write_bytes(msgspec.msgpack.encode(found.source_map))
    close_vllm()


@pytest.mark.process
@pytest.mark.timeout(120)
def test_rank_built_alone_is_the_rank_of_a_real_group(tmp_path: Path, vllm_forks: VllmForks) -> None:
    output = tmp_path / "output"
    ranks = [(str(tmp_path), str(rank)) for rank in range(2)]
    codes = vllm_forks.run(f"{__name__}:{trace_real_rank.__name__}", *ranks, output=output)
    assert codes == [0, 0], output.read_text()[-8000:]
    config = tiny_config("qwen3_moe")
    for rank in range(2):
        real = msgspec.msgpack.decode((tmp_path / f"{rank}.map").read_bytes(), type=SourceMap)
        with vllm_rank(config, tmp_path, rank=rank, tensor_parallel=2) as model:
            parameters = dict(model.named_parameters())
            alone = trace(
                checkpoint=checkpoint_of(config), parameters=parameters, load_weights=model.load_weights
            )
        assert real == alone.source_map


def test_parameters_on_meta_need_no_memory(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe") | {"hidden_size": 8192, "moe_intermediate_size": 32768}
    with vllm_rank(config, tmp_path, dtype=torch.bfloat16, device="meta") as model:
        parameters = dict(model.named_parameters())
        assert sum(p.numel() for p in parameters.values()) > 10**10
        source_map = discover(
            checkpoint=checkpoint_of(config, "bfloat16"),
            parameters=parameters,
            load_weights=model.load_weights,
            config=Config(),
        )
    assert len(source_map.mapped) == len(source_map.checkpoint)
