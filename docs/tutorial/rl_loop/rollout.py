"""The rollouts: vLLM engines that never stop sampling while their weights are replaced under them."""

from __future__ import annotations

import queue
import random
from typing import Any

import torch
from report import Channels, digest
from task import GROUP_SIZE, NUM_NEW_TOKENS, TARGET, WORDS, Group, Settings, encode, random_prompt

MAX_GROUPS_IN_FLIGHT = 2
CHECK_PROMPT = encode("xyz")


def run_rollout(index: int, settings: Settings, channels: Channels) -> None:
    """The life of one rollout process."""
    settings.enter_host("rollout")
    Rollout(index, settings, channels).run()


class Rollout:
    """One vLLM engine in this process, its weights kept up to date by wbridge between its steps."""

    def __init__(self, index: int, settings: Settings, channels: Channels) -> None:
        from vllm import LLM

        from wbridge.integrations.vllm import engine_args

        self._index, self._settings, self._channels = index, settings, channels
        llm = LLM(
            model=str(settings.model_directory),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            seed=index,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=MAX_GROUPS_IN_FLIGHT * GROUP_SIZE,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            **engine_args(raw_weights=True),
        )
        self._engine: Any = llm.llm_engine
        self._worker: Any = self._engine.model_executor.driver_worker.worker
        self._transfer: Any = self._worker.weight_transfer_engine
        self._random = random.Random(index)
        self._groups: dict[int, tuple[list[int], list[list[int]], list[int]]] = {}
        self._finished: list[Group] = []
        self._num_groups = 0

    def run(self) -> None:
        """Sample until the trainers are done, then prove which weights are in use."""
        self._transfer.hooks = self
        self._worker.init_weight_transfer_engine(
            {
                "engine": f"rollout-{self._index}",
                "rendezvous": self._settings.rendezvous,
                "config": {"mode": self._settings.mode, "num_engines": self._settings.num_engines},
            }
        )
        while self._transfer.receiver.version is None:
            self._transfer.poll(wait_s=60)
        first = self._weights()
        while not self._channels.trained.is_set():
            self._advance()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._prove(first)
        self._transfer.shutdown()

    def before_apply(self) -> None:
        """A hook of wbridge. Nothing to drain here: requests simply go on with the new weights."""

    def after_apply(self, update: Any) -> None:
        """A hook of wbridge: note what the update cost."""
        if update is not None:
            self._channels.report(
                kind="update", engine=self._index, version=update.version, stall_s=update.stats.stall_s
            )

    def _advance(self) -> None:
        """Keep the engine busy unless the trainers have enough samples waiting."""
        self._deliver()
        while len(self._groups) < MAX_GROUPS_IN_FLIGHT and len(self._finished) < MAX_GROUPS_IN_FLIGHT:
            self._start_group()
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():  # wbridge polls inside, before the forward pass
                self._note(output)
        else:
            self._transfer.poll(wait_s=0.02)  # an idle engine makes no steps: poll for it

    def _start_group(self) -> None:
        from vllm import SamplingParams

        prompt = random_prompt(self._random)
        self._groups[self._num_groups] = (prompt, [], [])
        # Tokens cached by older weights are not reused: the salt is the version.
        salted = {"prompt_token_ids": prompt, "cache_salt": str(self._transfer.receiver.version)}
        for sample in range(GROUP_SIZE):
            seed = self._random.randrange(2**31)
            sampling = SamplingParams(
                temperature=1.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False, seed=seed
            )
            self._engine.add_request(f"{self._num_groups}/{sample}", salted, sampling)
        self._num_groups += 1

    def _note(self, output: Any) -> None:
        if not output.finished:
            return
        number = int(output.request_id.split("/")[0])
        prompt, samples, versions = self._groups[number]
        samples.append(list(output.outputs[0].token_ids))
        versions += [version for version, *_ in self._worker.wbridge_request_versions(output.request_id)]
        if len(samples) == GROUP_SIZE:
            del self._groups[number]
            self._finished.append(Group(prompt, samples, min(versions)))

    def _deliver(self) -> None:
        """Hand finished groups to whichever trainer has room; keep them otherwise."""
        trainers = self._channels.samples[self._index :] + self._channels.samples[: self._index]
        for samples in trainers:
            if self._finished:
                try:
                    samples.put_nowait(self._finished[0])
                except queue.Full:
                    continue
                self._finished.pop(0)

    def _prove(self, first: dict[str, torch.Tensor]) -> None:
        """Report digests of the live weights in checkpoint coordinates, and greedy tokens.

        A trained policy says nothing but `a`, so it is asked what it would say otherwise.
        """
        from vllm import SamplingParams

        last = self._weights()
        changed = sum(int((first[n].view(torch.uint8) != last[n].view(torch.uint8)).sum()) for n in last)
        others = [token for token in range(len(WORDS)) if token != TARGET]
        sampling = SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, allowed_token_ids=others
        )
        self._engine.add_request("check", {"prompt_token_ids": CHECK_PROMPT}, sampling)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
        self._channels.report(
            kind="rollout_weights",
            engine=self._index,
            version=self._transfer.receiver.version,
            digests={name: digest(tensor) for name, tensor in last.items()},
            changed_nbytes=changed,
            tokens=tokens,
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors that the live parameters hold.

        Where each element lies is asked of vLLM's loader by probing, which shares no code with the
        trace that wbridge made its plan of.
        """
        from wbridge.config import Config
        from wbridge.discovery.discover import discover
        from wbridge.integrations.vllm.target import checkpoint_of

        model = self._worker.model_runner.get_model()
        live = dict(model.named_parameters())
        checkpoint = checkpoint_of(self._worker.vllm_config)
        found = discover(
            checkpoint=checkpoint,
            parameters=live,
            load_weights=model.load_weights,
            config=Config(),
            method="probe",
        )
        tensors = {name: torch.full(spec.shape, torch.nan) for name, spec in checkpoint.items()}
        for m in found.mapped:
            source, target = m.region.source, m.region.target
            held = live[m.parameter].detach().as_strided(m.region.extents, target.strides, target.offset)
            tensors[m.tensor].as_strided(m.region.extents, source.strides, source.offset).copy_(held)
        return tensors
