"""The trainers: two FSDP2 ranks that learn from samples and publish every version of the weights."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from report import Channels, digest
from task import NUM_NEW_TOKENS, Group, Settings, policy_config, reward

import wbridge
from wbridge.integrations.torch_dtensor import source_from_module

LEARNING_RATE = {"tiny": 3e-3, "medium": 3e-4}
MAX_LAG = 4
"""Samples of weights older than this many versions are thrown away."""


def run_trainer(rank: int, settings: Settings, channels: Channels) -> None:
    """The life of one trainer process."""
    settings.enter_host("trainer")
    torch.set_num_threads(1)
    join_trainers(rank, settings)
    train(rank, settings, channels)
    dist.destroy_process_group()


def join_trainers(rank: int, settings: Settings) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.directory}/trainers",
        rank=rank,
        world_size=settings.num_trainers,
    )


def train(rank: int, settings: Settings, channels: Channels) -> None:
    """Learn for `settings.steps` steps; version k is the weights after k steps."""
    model = build_policy(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[settings.size])
    config = {"mode": settings.mode, "num_engines": settings.num_engines}
    with wbridge.sync.SenderAdapter(
        source_from_module(model), rendezvous=settings.rendezvous, config=config
    ) as sender:
        sender.connect()
        sender.send_weights(version=0).applied()  # the engines start from the trainer's weights
        channels.report(kind="sent", rank=rank, version=0, stall_s=0.0)
        for step in range(1, settings.steps + 1):
            groups, lag = collect(channels.samples[rank], settings, step - 1)
            loss = learn(model, optimizer, groups)
            rewards = torch.tensor([reward(s) for group in groups for s in group.samples])
            mean_reward = mean_over_ranks(rewards.mean())
            stall_s = 0.0
            if settings.sync:
                delivery = sender.send_weights(version=step, metadata={"loss": loss})
                stall_s = sender.last_send.stall_s if sender.last_send else 0.0
                channels.report(kind="sent", rank=rank, version=step, stall_s=stall_s)
                if step == settings.steps:
                    finish_last(sender, delivery, step, rank, channels)
            if rank == 0:
                now_s = time.perf_counter()
                channels.report(
                    kind="step", step=step, reward=mean_reward, lag=lag, stall_s=stall_s, end_s=now_s
                )
        report_weights(model, rank, settings, channels)
        channels.trained.set()
        channels.checked.wait()  # the engines leave first
        channels.report(kind="egress", rank=rank, nbytes=sender.counters["put_nbytes"])


def build_policy(settings: Settings) -> Any:
    """Build the policy and let FSDP2 shard it over the trainers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(policy_config(settings.size), dtype=torch.float32)
    mesh = init_device_mesh("cpu", (settings.num_trainers,), mesh_dim_names=("shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def collect(samples: Any, settings: Settings, version: int) -> tuple[list[Group], float]:
    """Take the groups of one step; return them and how many versions behind they are on average."""
    groups: list[Group] = []
    while len(groups) < settings.groups_per_step:
        group = samples.get(timeout=120)
        if version - group.version <= MAX_LAG or not settings.sync:
            groups.append(group)
    return groups, sum(version - group.version for group in groups) / len(groups)


def learn(model: Any, optimizer: torch.optim.Optimizer, groups: list[Group]) -> float:
    """One step of policy gradient: what did better than its group becomes more likely."""
    losses = []
    for group in groups:
        new = torch.tensor(group.samples)
        rewards = torch.tensor([reward(sample) for sample in group.samples])
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        prompt = torch.tensor(group.prompt).expand(len(new), -1)
        logits = model(input_ids=torch.cat([prompt, new], 1)).logits
        logits = logits[:, len(group.prompt) - 1 : len(group.prompt) - 1 + NUM_NEW_TOKENS]
        chosen = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        losses.append(-(advantage[:, None] * chosen).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def finish_last(sender: Any, delivery: Any, version: int, rank: int, channels: Channels) -> None:
    """Publish the last version again until every engine has it: modes that overlap may skip versions."""
    while True:
        outcomes = delivery.applied()
        missing = torch.tensor(float(any(outcome != "applied" for outcome in outcomes.values())))
        if not mean_over_ranks(missing):
            return
        time.sleep(0.05)
        delivery = sender.send_weights(version=version)
        channels.report(kind="sent", rank=rank, version=version, stall_s=sender.last_send.stall_s)


def report_weights(model: Any, rank: int, settings: Settings, channels: Channels) -> None:
    """Gather the full tensors, report their digests, and save them as a checkpoint."""
    from transformers import AutoModelForCausalLM

    full = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
    if rank != 0:
        return
    plain = AutoModelForCausalLM.from_config(policy_config(settings.size), dtype=torch.float32)
    plain.load_state_dict(full)
    plain.save_pretrained(settings.trained_directory)
    nbytes = sum(tensor.nbytes for tensor in full.values())
    digests = {name: digest(tensor) for name, tensor in full.items()}
    channels.report(kind="trainer_weights", digests=digests, nbytes=nbytes)
