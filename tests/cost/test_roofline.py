"""The roofline: by hand, by its laws, and against the published H20 table."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from dcut_jax.bench.published import BLOCK, load_published
from dcut_jax.config import ConfigError
from dcut_jax.cost.devices import Device, find_device
from dcut_jax.cost.mesh import MeshShape, mesh_shape, mesh_shapes
from dcut_jax.cost.roofline import Roofline, fit
from dcut_jax.cost.shapes import (
    DrafterShape,
    ModelShape,
    read_shape,
    targets_directory,
    usual_drafter,
)
from dcut_jax.cost.table import CostError

# The reference implementation of D-Cut (vLLM #47131) profiles with this many cached
# positions; the page that the table is from does not say.
PROFILED_CONTEXT = 2048

MACHINE = Device("machine", 1e12, 1e11, 1e10, 1e9, 1e8, "made up for tests")
DENSE = ModelShape(
    layers=2, embed=8, heads=4, kv_heads=2, head_dim=4, mlp=16, name="dense", vocab=32
)
MIXTURE = replace(
    DENSE, name="mixture", experts=8, top_k=2, expert_mlp=12, shared_mlp=6
)
DRAFTER = DrafterShape(
    layers=1, embed=8, heads=4, kv_heads=2, head_dim=4, mlp=16, taps=2, block=8
)


def target(name):
    return read_shape(targets_directory() / f"{name}.toml")


def parts(steps):
    return {part.name: part for part in steps}


class TestByHand:
    def test_a_dense_step(self):
        """6 rows of 2 requests behind 10 positions, bfloat16."""
        model = Roofline(MACHINE, MeshShape(), DENSE)
        found = parts(model.verify(2, 6, 10))
        attention = 8 * 4 * 4 * 2 + 8 * 2 * 4 * 2  # q, o and k, v of a layer
        assert found["projections"].operations == 2 * 6 * 2 * attention
        assert found["projections"].bytes == 2 * 2 * attention
        assert found["mlp"].operations == 2 * 6 * 2 * (3 * 8 * 16)
        # Scores and values: 6 rows, 4 heads of 4, 10 positions, 2 layers.
        assert found["attention"].operations == 2 * 2 * 6 * 4 * 4 * 10 * 2
        # Keys and values of 2 requests: 2 heads of 4.
        assert found["attention"].bytes == 2 * (2 * 2 * 4) * 10 * 2 * 2
        assert found["head"].operations == 2 * 6 * 8 * 32
        assert found["logits"].bytes == 2 * 2 * 6 * 32
        values = 2 * (8 * 8 + 2 * (4 + 2) * 4 + 3 * 16)
        assert found["between products"].bytes == 2 * 6 * values
        assert sum(p.sent for p in found.values()) == 0

    def test_a_part_takes_the_slower_of_products_and_memory(self):
        model = Roofline(MACHINE, MeshShape(), DENSE)
        for part in model.verify(2, 6, 10):
            ms = 1e3 * max(part.operations / 1e12, part.bytes / 1e10)
            assert part.ms(MACHINE) == pytest.approx(ms)
        whole = model.verify_ms(2, 6, 10)
        assert whole == pytest.approx(
            sum(p.ms(MACHINE) for p in model.verify(2, 6, 10))
        )

    def test_drafting(self):
        model = Roofline(MACHINE, MeshShape(), DENSE, DRAFTER)
        found = parts(model.draft(3, 5, 10))
        rows = 3 * 6
        assert found["mlp"].operations == 2 * rows * 3 * 8 * 16
        assert found["head"].operations == 2 * 3 * 5 * 8 * 32  # anchors draft nothing
        assert found["attention"].operations == 4 * rows * 4 * 4 * (10 + 6)
        context = 8 * (2 * 8 + 2 * 2 * 4)
        assert parts(model.verify(3, 9, 10))["context"].operations == 2 * 9 * context
        assert "context" not in parts(model.verify(3, 3, 10, features=False))
        [caught] = model.catch_up(3, 4)
        assert caught.operations == 2 * 3 * 4 * context

    def test_a_mixture(self):
        model = Roofline(MACHINE, MeshShape(), MIXTURE)
        found = parts(model.verify(2, 3, 10))
        one = 3 * 8 * 12
        assert found["experts"].operations == 2 * 3 * 2 * one * 2
        distinct = 8 * (1 - (1 - 2 / 8) ** 3)
        assert found["experts"].bytes == pytest.approx(2 * distinct * one * 2)
        assert found["mlp"].operations == 2 * 3 * 3 * 8 * 6 * 2  # the shared expert
        assert found["router"].operations == 2 * 3 * 8 * 8 * 2

    def test_tensor_parallel(self):
        one = parts(Roofline(MACHINE, MeshShape(), DENSE).verify(2, 6, 10))
        two = parts(Roofline(MACHINE, MeshShape("tp", model=2), DENSE).verify(2, 6, 10))
        for name in ("projections", "mlp", "attention", "head"):
            assert two[name].operations == one[name].operations / 2
            assert two[name].bytes == one[name].bytes / 2
        # A ring of two sends each array once: two a layer, and the embedding.
        assert two["all-reduce"].sent == (2 * 2 + 1) * 6 * 8 * 2
        assert two["logits"].sent == 12 * 6

    def test_expert_parallel(self):
        place = MeshShape("ep", expert=4)
        found = parts(Roofline(MACHINE, place, MIXTURE).verify(8, 16, 10))
        alone = parts(Roofline(MACHINE, MeshShape(), MIXTURE).verify(8, 16, 10))
        # 4 rows of 2 requests a device; experts see the rows of all four.
        assert found["attention"].bytes == alone["attention"].bytes / 4
        assert found["experts"].operations == alone["experts"].operations / 4
        assert found["experts"].bytes == pytest.approx(alone["experts"].bytes / 4)
        assert found["projections"].bytes == alone["projections"].bytes
        # There and back, 2 layers, 4 rows, to 3 devices that have one of 2 experts.
        assert found["all-to-all"].sent == 2 * 2 * 4 * 3 * (1 - 0.75**2) * 8 * 4

    def test_data_parallel_lasts_as_long_as_the_fullest_shard(self):
        model = Roofline(MACHINE, MeshShape("dp", data=4), DENSE)
        alone = Roofline(MACHINE, MeshShape(), DENSE)
        assert model.verify_ms(9, 18, 10) == alone.verify_ms(3, 5, 10)

    def test_memory(self):
        model = Roofline(MACHINE, MeshShape(), DENSE, DRAFTER)
        found = model.memory(3, 20, 12)
        assert found.weights == 2 * (DENSE.params + DRAFTER.params)
        assert found.cache == 3 * 20 * 2 * (2 * 16 + 16)
        assert found.logits == 4 * 12 * 32
        wider = replace(model, dtype="float32").memory(3, 20, 12)
        tables = 2 * 8 * 32  # the drafter's own copies of embedding and head
        assert wider.weights == 4 * DENSE.params + 2 * (DRAFTER.params + tables)
        shared = Roofline(MACHINE, MeshShape("ep", expert=4), MIXTURE).memory(4, 20, 4)
        routed = 2 * 8 * 3 * 8 * 12
        assert shared.weights == 2 * (MIXTURE.params - routed * 3 / 4)


class TestPublished:
    """Full steps of Qwen3-8B on an H20, block 16: drafting and verifying."""

    def computed(self, context=PROFILED_CONTEXT):
        shape = target("qwen3-8b")
        model = Roofline(find_device("H20"), MeshShape(), shape, usual_drafter(shape))
        published = load_published()
        table = published.models[0].step_ms
        keys = [(bs, share) for bs in table for share in published.shares]
        got = [
            model.draft_ms(bs, BLOCK - 1, context)
            + model.verify_ms(bs, ceil(bs * BLOCK * share), context)
            for bs, share in keys
        ]
        said = [ms for row in table.values() for ms in row]
        large = np.array([bs >= 16 for bs, _ in keys])
        return np.array(got), np.array(said), large

    def test_nothing_fitted_is_within_15_percent_from_batch_16(self):
        got, said, large = self.computed()
        assert np.abs(got / said - 1)[large].max() < 0.15
        assert (got < said)[~large].all()  # what starts a step is not in a roofline

    def test_two_constants_are_within_3_percent_from_batch_16(self):
        got, said, large = self.computed()
        fitted = fit(got[large], said[large])
        errors = np.abs(np.array([fitted.ms(t) for t in got[large]]) / said[large] - 1)
        assert errors.max() < 0.03
        assert np.median(errors) < 0.015
        assert 2 < fitted.fixed_ms < 4
        assert 0.9 < fitted.scale < 1.1  # products run near the peak rate

    def test_and_within_5_percent_everywhere(self):
        got, said, _ = self.computed()
        fitted = fit(got, said)
        errors = np.abs(np.array([fitted.ms(t) for t in got]) / said - 1)
        assert errors.max() < 0.05


class TestLaws:
    @pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=lambda s: s.name)
    def test_more_work_takes_longer(self, shape):
        model = Roofline(MACHINE, MeshShape(), shape, DRAFTER)
        rows = [model.verify_ms(4, n, 100) for n in range(5, 40)]
        assert (np.diff(rows) > 0).all()
        assert model.verify_ms(4, 8, 200) > model.verify_ms(4, 8, 100)
        assert model.draft_ms(4, 7, 100) > model.draft_ms(4, 3, 100)

    def test_experts_that_rows_share_are_read_once(self):
        """A mixture's step grows with the experts touched, then hardly any more."""
        shape = target("qwen3-30b-a3b")
        model = Roofline(find_device("H200"), MeshShape(), shape)
        few = [model.verify_ms(1, rows, 100) for rows in (1, 2, 4, 8)]
        assert few[1] / few[0] > 1.3
        many = [model.verify_ms(1, rows, 100) for rows in (128, 256)]
        assert many[1] / many[0] < 1.1
        uneven = replace(model, concentration=10.0)
        assert uneven.verify_ms(1, 16, 100) < 0.9 * model.verify_ms(1, 16, 100)

    def test_a_mesh_that_does_not_divide_says_what_would(self):
        shape = target("qwen3-30b-a3b")
        with pytest.raises(ConfigError, match="key/value heads 4; sizes.*: 1, 2, 4$"):
            Roofline(find_device("H200"), MeshShape("tp", model=8), shape)
        with pytest.raises(ConfigError, match="experts 128; sizes.*: 1, 2, 4, 8, 16"):
            Roofline(find_device("H200"), MeshShape("ep", expert=3), shape)
        with pytest.raises(ConfigError, match="qwen3-8b has none; choose dp"):
            Roofline(find_device("H200"), MeshShape("ep", expert=2), target("qwen3-8b"))

    def test_a_device_without_a_link_is_alone(self):
        alone = replace(MACHINE, link_per_s=0.0)
        Roofline(alone, MeshShape(), DENSE)
        with pytest.raises(CostError, match="no link to others"):
            Roofline(alone, MeshShape("dp", data=2), DENSE)

    @pytest.mark.parametrize("name", ["llama-3.3-70b", "qwen3-235b-a22b"])
    def test_what_fits(self, name):
        h200, shape = find_device("H200"), target(name)
        drafter = usual_drafter(shape)
        alone = Roofline(h200, MeshShape(), shape, drafter).memory(1, 4096, 16)
        assert alone.total > h200.memory_bytes
        place = MeshShape("tp+ep", model=4, expert=2) if shape.experts else None
        place = place or MeshShape("tp", model=8)
        spread = Roofline(h200, place, shape, drafter).memory(16, 4096, 256)
        assert spread.total < h200.memory_bytes
        assert spread.weights * 8 > alone.weights * 0.99

    def test_meshes(self):
        found = [p.described for p in mesh_shapes(8, "dp+tp")]
        assert found == [(("data", 2), ("model", 4)), (("data", 4), ("model", 2))]
        assert [p.described for p in mesh_shapes(8, "ep")] == [(("expert", 8),)]
        mesh = (("data", 2), ("expert", 4))
        assert mesh_shape(mesh, "dp+ep") == MeshShape("dp+ep", data=2, expert=4)
        for strategy, axes in [("dp", mesh), ("pp", ()), ("tp", (("pipe", 2),))]:
            with pytest.raises(ConfigError):
                mesh_shape(axes, strategy)


class TestFit:
    def test_two_constants_are_found_again(self):
        x = np.array([1.0, 3.0, 9.0])
        fitted = fit(x, 2.5 + 1.25 * x)
        assert (fitted.fixed_ms, fitted.scale) == pytest.approx((2.5, 1.25))

    def test_neither_is_negative(self):
        assert fit([1.0, 2.0], [1.0, 3.0]).fixed_ms == 0
        assert fit([1.0, 2.0], [3.0, 2.0]).scale == 0
        one = fit([2.0], [5.0])
        assert (one.fixed_ms, one.ms(4.0)) == (0, pytest.approx(10))

    @pytest.mark.parametrize("measured", [[], [1.0], [0.0, 1.0]])
    def test_times_that_are_none_are_refused(self, measured):
        with pytest.raises(ValueError, match="above 0 ms"):
            fit([1.0, 2.0], measured)
