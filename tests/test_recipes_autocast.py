"""The recipe in force: the innermost, in its own thread or task, captured with each call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.recipes import in_force, weight_recipe
from saving_cases import grad_of

NAMES = bs.recipe_names()


def current() -> str:
    return bs.current_recipe().name


@pytest.fixture(autouse=True)
def nothing_is_left_in_force() -> Any:
    yield
    assert current() == "high_precision"
    assert in_force().step is None
    assert weight_recipe() is None


def test_outside_of_autocast_everything_is_in_high_precision() -> None:
    assert current() == "high_precision"


def test_autocast_without_a_recipe_is_mxfp8() -> None:
    with bs.autocast():
        assert current() == "mxfp8"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_given_by_name_or_as_itself(name: str) -> None:
    with bs.autocast(recipe=name):
        assert bs.current_recipe() == bs.recipe(name)
    with bs.autocast(recipe=(recipe := bs.recipe(name))):
        assert bs.current_recipe() is recipe


@pytest.mark.parametrize("given", [3, bs.MXFP8, "mxfp4", ["mxfp8"]], ids=str)
def test_what_is_no_recipe_is_refused_before_anything_is_entered(given: Any) -> None:
    with pytest.raises(bs.RecipeError):
        bs.autocast(recipe=given)
    with pytest.raises(bs.RecipeError):
        bs.quantized_model_init(given)


def test_the_inner_recipe_wins() -> None:
    with bs.autocast(recipe="mxfp8"):
        with bs.autocast(recipe="float8_current"):
            assert current() == "float8_current"
            with bs.autocast(enabled=False, recipe="mxfp8"):
                assert current() == "high_precision"
            assert current() == "float8_current"
        assert current() == "mxfp8"


def test_an_exception_leaves_the_outer_recipe_in_force() -> None:
    with bs.autocast(recipe="mxfp8"):
        with contextlib.suppress(KeyError), bs.autocast(recipe="float8_current"):
            raise KeyError
        assert current() == "mxfp8"


def test_one_object_can_be_entered_again_inside_itself() -> None:
    context = bs.autocast(recipe="mxfp8")
    with context, bs.autocast(recipe="float8_current"), context:
        assert current() == "mxfp8"


def test_it_decorates_a_function_each_call_of_which_is_inside() -> None:
    @bs.autocast(recipe="nvfp4")
    def inside(depth: int = 0) -> list[str]:
        """Say which recipe is in force, here and in a call of itself."""
        return [bs.current_recipe().name, *(inside(depth - 1) if depth else [])]

    assert inside(1) == ["nvfp4", "nvfp4"]
    assert inside.__name__ == "inside"
    with bs.autocast(recipe="mxfp8"):
        assert inside() == ["nvfp4"]
        assert bs.current_recipe().name == "mxfp8"


def test_contexts_may_be_left_in_the_order_in_which_they_were_entered() -> None:
    one, other = bs.autocast(recipe="mxfp8"), bs.autocast(recipe="float8_current")
    one.__enter__()
    other.__enter__()
    one.__exit__(None)
    assert current() == "float8_current"
    other.__exit__(None)


@pytest.mark.parametrize("make", [bs.autocast, lambda: bs.quantized_model_init("mxfp8")])
def test_leaving_what_was_not_entered_is_an_error(make: Callable[[], Any]) -> None:
    with pytest.raises(bs.ConfigError, match="not been entered"):
        make().__exit__(None)


def test_threads_have_a_recipe_of_their_own() -> None:
    shared = {name: bs.autocast(recipe=name) for name in NAMES}
    barrier = threading.Barrier(len(NAMES))
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            if current() != "high_precision":
                wrong.append("before")
            with shared["mxfp8"], shared[name]:
                barrier.wait()
                if current() != name:
                    wrong.append(name)
            barrier.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in NAMES]
    with bs.autocast(recipe="float8_current"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_tasks_share_an_autocast_and_keep_their_own_recipe() -> None:
    shared = bs.autocast(recipe="mxfp8")
    seen: list[str] = []

    async def work(name: str, turns: int) -> None:
        with shared:
            await asyncio.sleep(0)
            with bs.autocast(recipe=name):
                for _ in range(turns):
                    await asyncio.sleep(0)
                seen.append(f"{name}={current()}")
            await asyncio.sleep(0)
            seen.append(current())
        seen.append(current())

    async def main() -> None:
        await asyncio.gather(work("float8_current", 1), work("float8_delayed", 5))

    asyncio.run(main())
    assert sorted(seen) == [
        "float8_current=float8_current",
        "float8_delayed=float8_delayed",
        "high_precision",
        "high_precision",
        "mxfp8",
        "mxfp8",
    ]


def test_a_function_can_be_asked_from_a_generator() -> None:
    def steps() -> Any:
        with bs.autocast(recipe="mxfp8"):
            yield current()
            yield current()

    generator = steps()
    assert next(generator) == "mxfp8"
    generator.close()
    assert current() == "high_precision"


# A recipe shows in the values: what each computes differs from all others.
def _layer() -> tuple[bs.Linear, Tensor]:
    torch.manual_seed(0)
    return bs.Linear(33, 7), torch.randn(5, 33, requires_grad=True)


def _results(layer: bs.Linear, x: Tensor, y: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))
    return [y.detach(), *grads]


def _inside(name: str) -> list[Tensor]:
    layer, x = _layer()
    with bs.autocast(recipe=name):
        return _results(layer, x, layer(x))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", NAMES)
def test_backward_uses_the_recipe_of_its_forward_wherever_it_runs(name: str) -> None:
    layer, x = _layer()
    with bs.autocast(recipe=name):
        y = layer(x)
    outside = _results(layer, x, y)
    layer, x = _layer()
    with bs.autocast(recipe=name):
        y = layer(x)
    with bs.autocast(recipe="mxfp8" if name != "mxfp8" else "float8_current"):
        elsewhere = _results(layer, x, y)
    assert equal(outside, elsewhere)
    if name != "float8_delayed":  # whose scale for gradients moves on with the step
        assert equal(outside, _inside(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "without_reentry"])
def test_a_recomputation_outside_of_autocast_uses_the_recipe_of_its_forward(
    name: str, reentrant: bool
) -> None:
    layer, x = _layer()
    with bs.autocast(recipe=name):
        y = layer(x)
    y.square().sum().backward()
    want = [y.detach(), grad_of(x), grad_of(layer.weight)]
    layer, x = _layer()
    with bs.autocast(recipe=name):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    with bs.autocast(recipe="float8_current"):
        y.square().sum().backward()
    assert equal(want, [y.detach(), grad_of(x), grad_of(layer.weight)])


@pytest.mark.parametrize("reentrant", [True, False, None], ids=["reentrant", "without", "plain"])
def test_two_recipes_in_flight_do_not_mix(reentrant: bool | None) -> None:
    names = ["mxfp8", "float8_current", "high_precision", "mxfp8"]

    def run(layer: bs.Linear, x: Tensor) -> Tensor:
        y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y

    runs = []
    for name in names:
        layer, x = _layer()
        with bs.autocast(recipe=name):
            runs.append((layer, x, run(layer, x)))
    for index in (2, 0, 3, 1):
        layer, x, y = runs[index]
        y.square().sum().backward()
        _, dx, dw, _ = _inside(names[index])
        assert equal([grad_of(x), grad_of(layer.weight)], [dx, dw])


def test_one_layer_called_under_two_recipes_runs_each_backward_with_its_own() -> None:
    layer, x = _layer()
    with bs.autocast(recipe="mxfp8"):
        first = layer(x)
        with bs.autocast(recipe="float8_current"):
            second = layer(x)
    assert equal(_results(layer, x, second), _inside("float8_current"))
    assert equal(_results(layer, x, first), _inside("mxfp8"))


def test_recipes_compute_different_values() -> None:
    names = ("high_precision", "float8_current", "float8_delayed", "mxfp8")
    results = [_inside(name) for name in names]
    for i, one in enumerate(results):
        assert not any(equal(one, other) for other in results[i + 1 :])


def test_quantized_model_init_nests_and_ends_with_an_exception() -> None:
    with bs.quantized_model_init("mxfp8"):
        with contextlib.suppress(KeyError), bs.quantized_model_init("float8_current"):
            assert bs.Linear(4, 4).weight.format.name == "float8_current"  # pyright: ignore
            with bs.quantized_model_init("high_precision"):
                assert type(bs.Linear(4, 4).weight) is nn.Parameter
            raise KeyError
        assert bs.Linear(4, 4).weight.format.name == "mxfp8"  # pyright: ignore
    assert type(bs.Linear(4, 4).weight) is nn.Parameter


@pytest.mark.parametrize("enabled", ["float8_current", bs.recipe("mxfp8"), None, 1], ids=str)
def test_a_recipe_in_the_place_of_enabled_is_refused(enabled: Any) -> None:
    with pytest.raises(bs.ConfigError, match=r"True or False.*autocast\(recipe=\.\.\.\)"):
        bs.autocast(enabled)
