from __future__ import annotations

from pathlib import Path

import pytest

from medckpt import search_path
from medckpt.blocks import SwinUnetrConfig, UnetrConfig
from medckpt.config import compose, compose_here, is_sweep, normalize
from medckpt.errors import ConfigError
from tests.conftest import TINY_UNETR

CPU = "memory=cpu"


def test_a_recipe_scales_itself_on_a_cpu_and_says_what_it_changed() -> None:
    composed = compose_here("swin_ct", [CPU])
    assert composed.device == "cpu"
    assert composed.config.model.feature_size == 12
    assert composed.scaled["model.feature_size"] == (48, 12)


def test_the_users_word_wins_over_the_cpu_size() -> None:
    assert compose("swin_ct", [CPU, "model.feature_size=24"]).model.feature_size == 24


def test_the_cpu_size_of_one_network_is_not_forced_on_another() -> None:
    config = compose("swin_ct", [CPU, *TINY_UNETR])
    assert isinstance(config.model, UnetrConfig)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_step=3"], "trainer.max_step: unknown key. Did you mean 'max_steps'?"),
        (["modle=unetr"], "modle: unknown key. Did you mean 'model'?"),
        (["model=unet"], "model=unet: there is no such choice. Did you mean 'unetr'? Known: swin_unetr, unetr."),
        (["model.featuresize=12"], "model.featuresize: unknown key. Did you mean 'feature_size'?"),
        (["model.feature_size=13"], "model.feature_size: 13 is not a multiple of 12"),
        (["trainer.max_steps=abc"], "trainer.max_steps: expected a whole number, got 'abc' (str)."),
        (["precision=fp16"], "precision: 'fp16' (str) is not a choice."),
        (["activation_ckpt=blocks"], "Did you mean 'block'?"),
        (["steps"], "'steps' is not an override. Write key=value"),
        (["data.window_hu=[5,1]"], "data.window_hu: the lower end must be below the upper end."),
        (["sampler.patch_size=[64,64]"], "sampler.patch_size: expected 3 values, got 2"),
        (["memory.device=cpus"], "memory.device: 'cpus' (str) is not a choice. Did you mean 'cpu'?"),
    ],
)
def test_mistakes_are_named_with_a_way_out(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("swin_ct", words)
    assert message in str(caught.value)


def test_several_mistakes_come_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        compose("swin_ct", [CPU, "trainer.max_steps=abc", "seed=true", "optimizer.lr=-1"])
    text = str(caught.value)
    assert all(part in text for part in ("trainer.max_steps", "seed", "optimizer.lr: must be above 0"))


def test_an_open_value_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"data\.path: recipe swin_mr leaves it open\. Say which data: data=PATH"):
        compose("swin_mr", [CPU])


def test_an_unknown_recipe_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe=swin_cx: .* Did you mean 'swin_ct'\? Known: .*swin_mr"):
        compose("swin_cx")
    with pytest.raises(ConfigError, match="there is no file"):
        compose(str(tmp_path / "mine.yaml"))


def test_a_users_own_recipe_composes_from_any_folder(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(search_path.find_recipe("swin_ct").read_text() + "seed: 7\n")
    assert compose(str(own), [CPU]).seed == 7


@pytest.mark.parametrize("path", ["/a b/c,d=e", "/x'y", "rel/ä肺", "/tmp/[1]", "~/scans", "C:\\data\\x", "/end\\"])
def test_any_path_passes_as_data(path: str) -> None:
    assert compose("swin_ct", [CPU, f"data={path}"]).data.path == str(Path(path).expanduser())


def test_data_can_still_name_a_group() -> None:
    assert compose("swin_ct", [CPU, "data=mr", "data.path=/x"]).data.intensity == "zscore"


@pytest.mark.parametrize(
    ("value", "expected"), [("0.25", 0.25), ("5", 5), ("[a,b]", ("a", "b")), ("[case_1]", ("case_1",))]
)
def test_validation_is_a_share_a_number_or_names(value: str, expected: object) -> None:
    assert compose("swin_ct", [CPU, f"data.validation={value}"]).data.validation == expected


def test_sweeps_are_recognised() -> None:
    assert [is_sweep(word) for word in normalize(["seed=0,1", "seed=0", "sampler.patch_size=[64,64,64]"])] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("patch", "nearest"),
    [((30, 64, 64), "[32, 64, 64]"), ((48, 48, 48), "[64, 64, 64]"), ((182, 218, 182), "[192, 224, 192]")],
)
def test_swin_unetr_names_the_nearest_legal_patch(patch: tuple[int, int, int], nearest: str) -> None:
    (problem,) = SwinUnetrConfig().patch_problems(patch)
    assert "multiple of 32" in problem
    assert nearest in problem


def test_swin_unetr_needs_more_than_one_voxel_at_the_bottleneck() -> None:
    (problem,) = SwinUnetrConfig().patch_problems((32, 32, 32))
    assert "at least one side of 64" in problem
    assert SwinUnetrConfig().patch_problems((64, 32, 32)) == []


def test_unetr_counts_in_tokens_of_16() -> None:
    assert UnetrConfig().patch_problems((96, 48, 16)) == []
    assert "[32, 32, 32]" in UnetrConfig().patch_problems((30, 30, 30))[0]
