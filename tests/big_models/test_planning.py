"""Which device each module goes to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.big_models import (
    check_device_map,
    compute_module_sizes,
    get_balanced_memory,
    infer_auto_device_map,
    init_empty_weights,
)
from shardwise.errors import ConfigError
from tests.big_models.models import Tied

pytestmark = [
    pytest.mark.filterwarnings("ignore:max_memory names devices that are not here"),
    pytest.mark.filterwarnings("ignore:the buffers of offloaded modules take"),
]


class Three(nn.Module):
    """64, 72 and 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


def test_devices_are_filled_in_turn_with_room_for_the_largest_layer() -> None:
    # The first device keeps 100 bytes for linear2, so that linear1 (64) fits and batchnorm (72) does not.
    assert infer_auto_device_map(Three(), {0: 200, 1: 200}) == {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert infer_auto_device_map(Three(), {0: 236, 1: 0}) == {"": 0}
    assert infer_auto_device_map(Three(), {0: 1000}) == {"": 0}
    assert infer_auto_device_map(Three(), {0: 0, "cpu": 180}, offload_buffers=True) == {
        "linear1": "cpu",
        "batchnorm": "disk",
        "linear2": "disk",
    }
    assert set(infer_auto_device_map(Three(), {0: 1000}, clean_result=False)) == {"linear1", "batchnorm", "linear2"}


def test_modules_that_do_not_fit_are_split_unless_they_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(10, 10), Three())
    split = infer_auto_device_map(model, {0: 440 + 100 + 64, 1: 1000})
    assert split == {"0": 0, "1.linear1": 0, "1.batchnorm": 1, "1.linear2": 1}
    model.append(Three())
    assert infer_auto_device_map(model, {0: 440 + 236, 1: 1000})["1.linear1"] == 0
    whole = infer_auto_device_map(model, {0: 440 + 236, 1: 1000}, no_split_module_classes="Three")
    assert whole == {"0": 0, "1": 1, "2": 1}


def test_row_1548_parameters_on_the_root_module() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(25))
            self.register_buffer("shift", torch.ones(25))
            self.inner = Three()

    model = Root()
    found = infer_auto_device_map(model, {0: 300, 1: 100, "cpu": 1000}, clean_result=False, offload_buffers=True)
    check_device_map(model, found)
    assert found["scale"] == 0
    assert infer_auto_device_map(model, {"cpu": 1000}) == {"": "cpu"}
    assert infer_auto_device_map(nn.Linear(4, 4), {"cpu": 1000}) == {"": "cpu"}


def test_direct_tensors_of_a_split_module_are_in_the_map() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Three()
            self.inner.extra = nn.Parameter(torch.ones(2))
            self.inner.register_buffer("table", torch.ones(3))

    model = Outer()
    found = infer_auto_device_map(model, {0: 180, 1: 90, "cpu": 1000})
    check_device_map(model, found)
    assert {"inner.extra", "inner.table"} <= set(found)


@pytest.mark.parametrize("limit", range(0, 4000, 97))
def test_tied_weights_stay_together_whatever_the_limits(limit: int) -> None:
    with init_empty_weights():
        model = Tied()
    found = infer_auto_device_map(model, {0: limit, 1: limit // 2, "cpu": limit // 2}, clean_result=False)
    check_device_map(model, found)
    assert found["embed"] == found["head"]
    sizes = compute_module_sizes(model)
    for device, most in ((0, limit), (1, limit // 2), ("cpu", limit // 2)):
        names = [name for name, place in found.items() if place == device and name != "head"]
        assert sum(sizes[name] for name in names) <= most


def test_what_hangs_beside_a_tied_weight_counts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 10)  # 400 bytes
            self.head = nn.Linear(10, 10)  # and 40 of its own
            self.head.weight = self.embed.weight

    assert infer_auto_device_map(Model(), {0: 439, "cpu": 10**4}) == {"": "cpu"}
    assert infer_auto_device_map(Model(), {0: 440, "cpu": 10**4}) == {"": 0}


def test_row_958_a_head_that_was_removed() -> None:
    model = Tied()
    del model.head  # what names the tie is gone; the map asks the parameters themselves
    model._tied_weights_keys = ["head.weight"]
    found = infer_auto_device_map(model, {0: 1500, "cpu": 10**6})
    check_device_map(model, found)


def test_row_1750_buffers_of_offloaded_modules_count_where_they_stay() -> None:
    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(25))
            self.register_buffer("table", torch.zeros(100))

    model = nn.Sequential(*(Heavy() for _ in range(4)))  # 500 bytes each, of which 400 are buffers
    limit = 1900
    found = infer_auto_device_map(model, {0: limit, "cpu": 10**6}, clean_result=False)
    here = 500 * sum(device == 0 for device in found.values())
    away = sum(device == "cpu" for device in found.values())
    assert (here, away) == (2 * 500, 2)
    assert here + 400 * away + 100 <= limit  # and room for the weights of one that comes
    # Buffers that come and go need no room of their own: two fit where that is kept for only one layer.
    found = infer_auto_device_map(model, {0: 1500, "cpu": 10**6}, clean_result=False, offload_buffers=True)
    assert [found[str(i)] for i in range(4)] == [0, 0, "cpu", "cpu"]
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        infer_auto_device_map(model, {0: 600, "cpu": 10**6})


def test_row_762_a_map_must_cover_the_model() -> None:
    model = Tied()
    with pytest.raises(ConfigError, match=r"no device for gain, embed\.weight"):
        check_device_map(model, {"blocks": "cpu", "norm": "cpu", "head": "cpu"})
    with pytest.warns(UserWarning, match="'nowhere'"):
        check_device_map(model, {"": "cpu", "nowhere": 0})
    check_device_map(model, {"gain": 0, "embed": 0, "head.weight": 0, "blocks": 0, "norm": 0})


def test_fallback_looks_for_a_module_that_fits() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(2, 2))
    limits: dict[int | str, int | float | str] = {0: 1700 + 24, 1: 100, "cpu": 10**4}
    assert (
        1 not in infer_auto_device_map(nn.Sequential(model[0], model[0].__class__(20, 20), model[1]), limits).values()
    )
    deep = nn.Sequential(nn.Linear(20, 20), nn.Sequential(nn.Linear(20, 20), nn.Linear(2, 2)))
    found = infer_auto_device_map(deep, {0: 1700, 1: 1690, 2: 100, "cpu": 10**4}, fallback_allocation=True)
    check_device_map(deep, found)
    small = infer_auto_device_map(deep, {0: 1704, "cpu": 10**4}, fallback_allocation=True)
    assert small["1.1"] == 0
    assert small["0"] == "cpu"


def test_a_disk_with_a_limit_may_be_too_small() -> None:
    with pytest.raises(ConfigError, match="fit on none of the devices"):
        infer_auto_device_map(Three(), {"cpu": 100, "disk": 100})


def test_verbose_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(Tied(), {"cpu": 10**6}, verbose=True)
    printed = capsys.readouterr().out
    assert "embed" in printed
    assert "with a tied weight" in printed


def test_balanced_limits_spread_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(8)))  # 440 bytes each
    limits = get_balanced_memory(model, {0: 10**4, 1: 10**4, "cpu": 10**6})
    assert limits == {0: 4 * 440 + 550, 1: 10**4, "cpu": 10**6}
    low = get_balanced_memory(model, {0: 10**4, 1: 10**4, 2: 2000}, low_zero=True)
    assert low == {0: 0, 1: 4 * 440 + 550, 2: 2000}
    assert get_balanced_memory(model, {"cpu": 5}) == {"cpu": 5}
    assert get_balanced_memory(model, {0: 100, "cpu": 5}) == {0: 100, "cpu": 5}
