"""Wrapper prefixes are stripped however they are nested, and collisions are named."""

from __future__ import annotations

import pytest

from wbridge.discovery.names import normalize_name, normalize_names
from wbridge.errors import LayoutError


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        ("module._orig_mod.module.x", "x"),
        ("_orig_mod.module.layers.0._orig_mod.w", "layers.0.w"),
        ("module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w", "layers.0.w"),
        ("base_model.model.layers.0.q_proj.base_layer.weight", "layers.0.q_proj.weight"),
        ("layers.0.module.w", "layers.0.module.w"),
        ("my_module.w", "my_module.w"),
    ],
)
def test_c17_prefixes_are_stripped_until_none_is_left(name: str, normal: str) -> None:
    assert normalize_name(name) == normal
    assert normalize_name(normal) == normal


def test_c17_two_names_with_one_normal_form_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"'module.w' and '_orig_mod.w' are both 'w'"):
        normalize_names(["module.w", "_orig_mod.w"])


def test_c18_only_wrapped_modules_have_the_suffix() -> None:
    names = ["a.base_layer.weight", "b.weight", "c.base_layer.weight"]
    assert list(normalize_names(names).values()) == ["a.weight", "b.weight", "c.weight"]
