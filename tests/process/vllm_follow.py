"""Runs an AsyncLLM that follows a trainer thread, and writes what came out: a program for the tests."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

PROMPT = [1, 5, 6, 7]
NUM_TOKENS = 12


def save_config(directory: Path, architecture: str = "qwen3") -> Any:
    from transformers import AutoConfig

    from tests.models.checkpoints import tiny_config

    fields = tiny_config(architecture) | {"initializer_range": 0.3}
    config = AutoConfig.for_model(**{k: v for k, v in fields.items() if k != "torch_dtype"})
    config.dtype = "float32"
    config.save_pretrained(directory)
    return config


def build_policy(config: Any, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def greedy(model: Any, num_tokens: int = NUM_TOKENS) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return list(ids[0, len(PROMPT) :].tolist())


class Trainer(threading.Thread):
    """Sends one version each time it is told to."""

    def __init__(self, models: list[Any], rendezvous: str, config: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.models, self.rendezvous, self.config = models, rendezvous, config
        self.go = threading.Semaphore(0)
        self.outcomes: list[Any] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.publish()
        except BaseException as exc:
            self.error = exc
            raise

    def publish(self) -> None:
        import wbridge
        from wbridge.integrations.torch_dtensor import source_from_module
        from wbridge.integrations.transformers import checkpoint_map

        live = self.models[0]
        source = source_from_module(live, whole=checkpoint_map(live))
        with wbridge.sync.SenderAdapter(source, rendezvous=self.rendezvous, config=self.config) as sender:
            sender.connect(50)
            for version, model in enumerate(self.models[1:], start=1):
                self.go.acquire()
                with torch.no_grad():
                    for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
                        mine.copy_(theirs)
                self.outcomes.append(sender.send_weights(version).applied())
            self.go.acquire()


async def follow(directory: Path, trainer: Trainer, raw: bool, mode: str, size: int) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from wbridge.integrations.vllm import engine_args
    from wbridge.integrations.vllm.server import EngineBridge

    arguments = AsyncEngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else "uni",
        **engine_args(raw_weights=raw),
    )
    settings = arguments.create_engine_config()
    # On CPUs vLLM asks for "spawn", as OpenMP's threads do not survive a fork; here it has none. The engine's
    # processes would import all again, which takes longer than the test.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = AsyncLLM.from_vllm_config(settings)
    trainer.start()  # threads of ours would not survive it either
    updated = asyncio.Condition()
    seen: list[int] = []

    async def on_update(version: int) -> None:
        async with updated:
            seen.append(version)
            updated.notify_all()

    bridge = EngineBridge(
        engine,
        name="rollout",
        rendezvous=trainer.rendezvous,
        config={"mode": mode},
        on_update=on_update,
    )

    async def until(version: int) -> None:
        async with updated:
            await updated.wait_for(lambda: version in seen)

    started: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def generate(request: str, num_tokens: int) -> list[int]:
        output = None
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        async for output in bridge.generate({"prompt_token_ids": PROMPT}, sampling, request):  # noqa: B007
            started[request].set()
        assert output is not None
        return list(output.outputs[0].token_ids)

    async def served(request: str) -> list[tuple[int | None, int]]:
        return [(span.version, span.count) for span in await bridge.request_versions(request)]

    try:
        await bridge.connect(50)
        await bridge.rebind()  # as after a sleep that has dropped the weights
        polling = asyncio.create_task(bridge.run())
        trainer.go.release()
        await until(1)  # the engine is idle
        first = await generate("first", NUM_TOKENS)
        running = [asyncio.create_task(generate(f"long-{k}", 200)) for k in range(3)]
        for k in range(3):  # else one may begin after the update
            await started[f"long-{k}"].wait()
        trainer.go.release()
        long = await asyncio.gather(*running)
        await until(2)
        spans = [await served(f"long-{k}") for k in range(3)]
        second = await generate("second", NUM_TOKENS)
        polling.cancel()
        trainer.go.release()
        await engine.start_weight_update()  # vLLM's own cycle takes versions as well
        await engine.update_weights(WeightTransferUpdateRequest(update_info={"wait_s": 30.0}))
        await engine.finish_weight_update(weight_version="three")
        third = await generate("third", NUM_TOKENS)
        return {
            "third": third,
            "third_spans": await served("third"),
            "first": first,
            "second": second,
            "long": [len(tokens) for tokens in long],
            "spans": spans,
            "first_spans": await served("first"),
            "label": await engine.get_weight_version(),
        }
    finally:
        trainer.go.release()
        trainer.go.release()
        await bridge.close()
        engine.shutdown()


def main(path: str, architecture: str, weights: str, mode: str, size: str) -> None:
    directory = Path(path)
    config = save_config(directory / "model", architecture)
    models = [build_policy(config, seed) for seed in range(4)]
    wanted = [greedy(model) for model in models]
    trainer = Trainer(models, f"file://{directory}/rendezvous", {"mode": mode})
    found = asyncio.run(follow(directory / "model", trainer, weights == "raw", mode, int(size)))
    trainer.join()
    if trainer.error is not None:
        raise trainer.error
    found |= {"wanted": wanted, "outcomes": trainer.outcomes, "prompt": len(PROMPT)}
    (directory / "result.json").write_text(json.dumps(found))
