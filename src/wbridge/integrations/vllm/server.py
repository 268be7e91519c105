"""An `AsyncLLM` that follows a trainer: updates while idle, and requests that know their versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any  # vLLM's prompts, parameters and outputs, passed through

import anyio
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from wbridge.session.requests import VersionSpan

OnUpdate = Callable[[int], Awaitable[None]]


class EngineBridge:
    """The server's side of one engine started with `engine_args()`.

    A busy engine takes updates by itself, between two of its steps, and its requests go on: no update
    pauses, aborts or restarts one, unless `recompute` asks for it. An idle engine makes no steps, so `run`
    polls for it. It also labels the engine with the version, which changes nothing else.
    """

    def __init__(
        self,
        engine: Any,
        *,
        name: str,
        rendezvous: str | None = None,
        secret: str | None = None,
        config: Mapping[str, Any] | None = None,
        idle_poll_s: float = 0.02,
        recompute: bool = False,
        salt_cache: bool = True,
        on_update: OnUpdate | None = None,
    ) -> None:
        """By default running requests keep what they have computed; with `recompute`, as soon as `run`
        notices an update, the prefix cache is dropped and running requests compute it again with the new
        weights. With `salt_cache` each request gets a cache salt with the version that `run` has noticed
        last, so that what older weights have cached serves none that starts later.
        `on_update(version)` is awaited after each update that `run` notices.
        """
        self._engine = engine
        self._init = {
            "engine": name,
            "rendezvous": rendezvous,
            "secret": secret,
            "config": dict(config or {}),
        }
        self._recompute = recompute
        self._salt_cache = salt_cache
        self._idle_poll_s = idle_poll_s
        self._on_update = on_update
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that `run` has last seen; the engine may already have a newer one."""
        return self._version

    async def connect(self, timeout_s: float | None = None) -> None:
        """Let every worker of the engine meet the trainers. No request is served meanwhile."""
        info = self._init | {"connect_timeout_s": timeout_s}
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def run(self) -> None:
        """Keep an idle engine up to date and notice updates, until cancelled.

        Polls reach all workers in the same order as steps, so they count equally on each.
        """
        while True:
            versions = await self._engine.collective_rpc("wbridge_poll")
            if versions[0] is not None and versions[0] != self._version:
                self._version = versions[0]
                if self._recompute:
                    await self._engine.reset_prefix_cache(reset_running_requests=True)
                await self._engine.update_weight_version(str(self._version))
                if self._on_update is not None:
                    await self._on_update(self._version)
            await anyio.sleep(self._idle_poll_s)  # vLLM has no way to wake an idle engine but a call

    async def rebind(self) -> None:
        """Call this after `wake_up()` of an engine whose weights were dropped, such as by `sleep(2)`.

        It must have no requests then: a step before a whole version has been applied would end it. While it
        sleeps, stop `run`.
        """
        await self._engine.collective_rpc("wbridge_rebind")
        self._version = None

    async def generate(
        self, prompt: Mapping[str, Any], sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        """As `AsyncLLM.generate`, for a prompt in dictionary form."""
        if self._salt_cache:
            prompt = {**prompt, "cache_salt": f"{prompt.get('cache_salt', '')}@{self._version}"}
        async for output in self._engine.generate(prompt, sampling_params, request_id):
            yield output

    async def request_versions(self, request_id: str) -> tuple[VersionSpan, ...]:
        """Return which versions computed the tokens of a finished request (those of its prompt included),
        oldest first; only once."""
        spans = await self._engine.collective_rpc("wbridge_request_versions", args=(request_id,))
        return tuple(VersionSpan(*span) for span in spans[0])

    async def close(self) -> None:
        """Leave the job; the engine goes on with the weights it has."""
        await self._engine.shutdown_weight_transfer_engine()
