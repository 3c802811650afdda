"""A GPU's memory as arithmetic: pages that fit, and refusals whose remedy works when it is
followed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given as given_by
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from tlt_server.attention.gpu import TREE_ROWS, TritonPaged
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.devices.sizing import MIB
from tlt_server.engine.gpu.memory.budget import GIB, RESERVE, MemoryPlan, Needs, Wider
from tlt_server.engine.gpu.memory.refusals import (
    BUSY,
    CONTEXT,
    OFF,
    SMALLER,
    budget,
    check_plan,
    exhausted,
    widen,
)
from tlt_server.engine.gpu.start.planning import exchange_bytes
from tlt_server.engine.gpu.steps.buckets import Shapes
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import ModelError, StartupError
from tlt_server.models.config import LayerShape, ModelConfig, Rope
from tlt_server.models.draft_networks import EAGLE3
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.training_memory import TrainingShape
from tlt_server.settings.server import settings as all_settings

CONFIG = ModelConfig(  # as Qwen2.5-7B
    architecture="Qwen2ForCausalLM",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    max_position=32768,
    norm_eps=1e-6,
    rope=Rope(),
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(0,),
)
WEIGHTS = 2 * 7_615_616_512  # bytes in half precision
TOTAL = 140 * GIB


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "model": "m",
            "device": "cuda",
            "dtype": "bfloat16",
            "max_running": 256,
            "max_rows": 4096,
            **changes,
        }
    )


class Drafter(NamedTuple):
    config: ModelConfig = replace(CONFIG, architecture=EAGLE3, layers=1)
    draft_vocab_size: int = 32_000
    kv_layers: int = 1


def needs(given: EngineSettings, drafter: Drafter | None = None) -> Needs:
    """Return the needs; captured features are those of a drafter that is trained."""
    weights = WEIGHTS * (1 + (given.dtype == "float32"))
    if not given.feature_bytes:
        return Needs.of(given, CONFIG, drafter, weights)
    return Needs.of(given, CONFIG, Drafter(), weights, 3 * CONFIG.hidden_size)


def plan(given: EngineSettings, free: int, length: int = 32768, total: int = TOTAL) -> MemoryPlan:
    return MemoryPlan(given, needs(given), length, free, total)


def pages(given: EngineSettings, free: int, length: int = 32768, total: int = TOTAL) -> int:
    accepted = plan(given, free, length, total)
    check_plan(accepted)
    return accepted.pages


def refusal(given: EngineSettings, free: int, length: int = 32768, total: int = TOTAL) -> str:
    with pytest.raises(StartupError) as caught:
        pages(given, free, length, total)
    return caught.value.message


def offered(message: str, setting: str) -> float:
    found = re.search(rf"{setting} to ([\d.]+)", message)
    assert found is not None, message
    return float(found[1])


def test_memory_needs_follow_the_models_shapes() -> None:
    given = settings()
    assert needs(given).weights == WEIGHTS and needs(given).per_page == 16 * 2 * 28 * 4 * 128 * 2
    assert needs(settings(dtype="float32")).per_page == 2 * needs(given).per_page
    assert needs(given, Drafter()).per_page - needs(given).per_page == 2 * (16 * 2 * 4 * 128 + 3584)
    rounded = settings(kv_cache_dtype="fp8_e4m3")
    assert needs(rounded).per_page == 16 * 2 * 28 * 4 * (128 + 4)
    assert needs(rounded, Drafter()).per_page - needs(rounded).per_page == (
        needs(given, Drafter()).per_page - needs(given).per_page
    )


def test_a_drafters_logits_are_counted() -> None:
    """A level has up to 512 rows; the target's vocabulary is five times the usual draft one."""
    given = settings(max_running=32)
    few, all_ids = (
        MemoryPlan(given, needs(given, drafter), 32768, TOTAL, TOTAL).working
        for drafter in (Drafter(), Drafter(draft_vocab_size=CONFIG.vocab_size))
    )
    assert all_ids - few == 512 * 4 * (152_064 - 32_000)


def test_memory_fraction_bounds_the_pages() -> None:
    given, free = settings(), TOTAL - 15 * GIB
    budget = plan(given, free)
    left = free - budget.kv - budget.working - RESERVE - TOTAL * (1 - given.memory_fraction)
    assert 0 <= left < needs(given).per_page and budget.staging == 0
    assert f"{budget.pages} pages" in budget.describe()
    assert "14.2 GiB of weights" in budget.describe()
    assert "pushed" not in budget.describe()
    pushed = plan(settings(weight_root="/w"), free)
    assert "28.4 GiB for pushed weights" in pushed.describe()
    assert pushed.staging == 2 * needs(given).weights
    assert 0 <= budget.kv - pushed.kv - pushed.staging < needs(given).per_page


def test_pages_are_bounded_by_running_sequences() -> None:
    assert pages(settings(max_running=2), TOTAL, length=1600) == 200
    assert pages(settings(max_running=2, kv_memory_mb=1024), TOTAL, length=1600) == 200


def test_memory_of_other_programs_reduces_the_pages() -> None:
    assert pages(settings(), 60 * GIB) < pages(settings(), 61 * GIB)


@pytest.mark.parametrize("free_gib", [18.2, 19.0, 19.5])
def test_too_little_memory_for_one_sequence_names_remedies(free_gib: float) -> None:
    given, free = settings(), int(free_gib * GIB)
    message = refusal(given, free)
    assert re.search(
        r"140\.0 GiB are \d+ MiB short of 14\.2 GiB of weights, 10\d\.\d GiB in other "
        r"programs, 1792 MiB for one sequence of max_model_len 32768, .*2083 MiB for "
        r"steps, 2048 MiB for graphs; ",
        message,
    )
    assert "nvidia-smi" in message
    assert pages(replace(given, memory_fraction=offered(message, "memory_fraction")), free) >= 2048
    length = int(offered(message, "max_model_len"))
    assert pages(given, free, length) >= length // 16
    with pytest.raises(StartupError):
        pages(given, free, length + 17)


def test_memory_refusal_offers_fewer_rows_and_other_staging() -> None:
    free = int(13.3 * GIB)
    message = refusal(settings(memory_fraction=0.98), free, length=131072)
    rows = int(offered(message, "max_rows"))
    assert 512 <= rows < 4096
    assert pages(settings(memory_fraction=0.98, max_rows=rows), free, length=131072) >= 8192
    assert "memory_fraction to" not in message, "it is as high as we advise"
    root = refusal(settings(weight_root="/w"), 40 * GIB)
    assert "set weight_staging to host" in root
    assert pages(settings(weight_root="/w", weight_staging="host"), 40 * GIB) >= 2048
    open_only = refusal(settings(weight_channels="ipc"), 40 * GIB)
    assert "set weight_staging to host" in open_only
    assert pages(settings(weight_channels="ipc", weight_staging="host"), 40 * GIB) >= 2048


def wider(given: EngineSettings, *widths: int) -> list[Wider]:
    """The widths with the needs of each rank; the model has 4 leaves."""
    own = needs(given)
    return [
        Wider(
            replace(given, tensor_parallel=width, reduction_leaves=max(4, width)),
            own._replace(weights=own.weights // width, per_page=own.per_page // width),
        )
        for width in widths
    ]


def test_memory_refusal_names_a_larger_width_where_it_fits() -> None:
    given = settings(weight_root="/w", reduction_leaves=4)
    short = plan(given, 30 * GIB)
    with pytest.raises(StartupError, match="; .*set tensor_parallel to 2, on 2 GPUs$"):
        check_plan(short, lambda: wider(given, 2, 4))
    check_plan(short.widened(wider(given, 2)[0]))
    shorter = plan(given, 20 * GIB)
    with pytest.raises(StartupError, match="set tensor_parallel to 4, on 4 GPUs$"):
        check_plan(shorter, lambda: wider(given, 2, 4, 8))
    assert not shorter.widened(wider(given, 2)[0]).fits
    with pytest.raises(StartupError, match="set tensor_parallel and reduction_leaves to 8, on 8"):
        check_plan(shorter, lambda: wider(given, 8))
    many = settings(weight_root="/w", reduction_leaves=4, max_running=65536)
    little = plan(many, GIB, total=16 * GIB)
    with pytest.raises(StartupError, match=f"several of .*, tensor_parallel, or {SMALLER}$"):
        check_plan(little, lambda: wider(many, 2, 4))


def test_exchange_buffers_of_ranks_are_budgeted() -> None:
    given = settings(weight_root="/w", reduction_leaves=4)
    shared, alone = (replace(given, tensor_parallel=ranks) for ranks in (2, 1))
    of_rank = needs(shared)._replace(exchange=GIB)
    refused = MemoryPlan(shared, of_rank, 32768, 10 * GIB, TOTAL)
    assert sum(row.bytes for row in budget(refused)) == refused.total + refused.short
    with pytest.raises(StartupError, match="1024 MiB for exchanges between GPUs"):
        check_plan(refused)
    widened = plan(alone, 100 * GIB).widened(Wider(shared, of_rank))
    assert widened.free == 99 * GIB and "1024 MiB for exchanges" in widened.describe()
    [other] = [row for row in budget(refused) if row.remedy == BUSY]
    assert list(other.values) == [TOTAL - WEIGHTS - GIB - CONTEXT]


def test_exchange_buffers_of_large_models_fit_next_to_weights() -> None:
    """Shapes of 7B on two GPUs: two rooms of two partial sums for 4,608 rows, and two landings of
    three sums for 512.
    """
    given = settings(tensor_parallel=2, reduction_leaves=4, max_running=512, max_rows=4096)
    found = exchange_bytes(given, CONFIG, Shapes(512, 8))
    rooms, landings = 2 * 2 * 4608 * 3584 * 4, 2 * 3 * 512 * 3584 * 4
    assert 0 < found - rooms - landings < MIB
    assert exchange_bytes(replace(given, tensor_parallel=1), CONFIG, Shapes(512, 8)) == 0


def test_refusal_on_several_ranks_offers_only_valid_staging() -> None:
    shared = settings(weight_root="/w", tensor_parallel=2)
    message = refusal(shared, 40 * GIB)
    assert "28.4 GiB for pushed weights" in message and "weight_staging" not in message


def test_refusal_without_a_fitting_setting_names_other_programs() -> None:
    message = refusal(settings(memory_fraction=0.98), 2 * GIB)
    assert "max_model_len to" not in message
    assert message.endswith("for graphs; end what else uses this GPU (nvidia-smi lists it)")
    assert refusal(settings(), GIB, total=16 * GIB).endswith(f"; {SMALLER}")


def test_too_small_requested_kv_names_remedies() -> None:
    message = refusal(settings(kv_memory_mb=100), TOTAL)
    assert message.startswith(
        "kv_memory_mb 100 holds 114 pages, one sequence of max_model_len 32768 needs "
        "2048; lower max_model_len to "
        "1824, or raise kv_memory_mb to 1792"
    )
    assert pages(settings(kv_memory_mb=1792), TOTAL) == 2048
    assert pages(settings(kv_memory_mb=100), TOTAL, length=1824) == 114
    message = refusal(settings(kv_memory_mb=50 * 1024), 30 * GIB)
    assert "short" in message
    assert pages(settings(kv_memory_mb=int(offered(message, "kv_memory_mb"))), 30 * GIB) > 2048
    message = refusal(settings(pages=10**6), 30 * GIB)
    assert pages(settings(pages=int(offered(message, "pages"))), 30 * GIB) > 2048


@pytest.mark.parametrize("named", [{"kv_memory_mb": 50 * 1024}, {"pages": 60_000}])
def test_requested_pages_leave_memory_for_graphs_and_pushes(named: dict[str, int]) -> None:
    asked = plan(settings(**named), 0)
    enough = asked.kv + asked.working + RESERVE
    assert pages(asked.settings, enough) == asked.pages
    assert "; end what else" in refusal(asked.settings, enough - 1)
    pushed = settings(weight_root="/w", **named)
    message = refusal(pushed, enough + asked.needs.weights)
    assert "28.4 GiB for pushed weights, " in message and "set weight_staging to host" in message
    assert pages(pushed, enough + 2 * asked.needs.weights) == asked.pages


def test_refusal_for_one_sequence_offers_no_less_memory() -> None:
    message = refusal(settings(kv_memory_mb=50 * 1024), 5 * GIB)
    assert "kv_memory_mb to" not in message and message.endswith(f"for graphs; {BUSY}")
    several = f"change several of other programs, pages, max_rows, max_running, or {SMALLER}"
    assert refusal(settings(pages=10**6), GIB).endswith(several)
    assert "raise kv_memory_mb" not in refusal(settings(kv_memory_mb=100), 5 * GIB), (
        "it would be refused next"
    )


def test_budget_sums_to_total_plus_shortfall() -> None:
    for given in (settings(), settings(weight_root="/w"), settings(pages=10**6)):
        refused = plan(given, 18 * GIB)
        rows = budget(refused)
        assert sum(row.bytes for row in rows) == refused.total + refused.short > refused.total


def test_small_gpu_refuses_max_running_beyond_its_logits_memory() -> None:
    total = 24 * GIB
    free = total - WEIGHTS - GIB // 2
    message = refusal(settings(max_running=65536), free, total=total)
    assert "112.8 GiB for steps" in message and "nvidia-smi" not in message, "nothing else uses it"
    most = int(offered(message, "max_running"))
    assert pages(settings(max_running=most), free, total=total) >= 2048
    with pytest.raises(StartupError):
        pages(settings(max_running=most + 1), free, total=total)


def test_refusal_names_helpful_settings_if_one_is_not_enough() -> None:
    total = 24 * GIB
    given, free = settings(max_running=65536, weight_root="/w"), total - WEIGHTS - GIB // 2
    message = refusal(given, free, total=total)
    assert message.endswith(
        "; change several of max_model_len, memory_fraction, weight_staging, max_rows, "
        f"max_running, or {SMALLER}"
    )
    both = settings(max_running=64, weight_root="/w", weight_staging="host")
    assert pages(both, free, total=total) >= 2048


DOCS = {setting.name: setting.doc for setting in all_settings()}
VALUE = re.compile(r"(lower|raise) (\w+) to ([\d.]+)")


def followed(refused: MemoryPlan, remedy: str) -> MemoryPlan:
    """The plan after one remedy, whose values must be such as the settings take."""
    changes: dict[str, Any] = {}
    free = refused.free
    if remedy == BUSY:
        free = refused.total - refused.needs.weights - CONTEXT
    elif remedy == OFF:
        changes["feature_bytes"] = 0
    elif found := re.fullmatch(r"set drafter_training_mb to (\d+)", remedy):
        changes["drafter_training_mb"] = int(found[1])
    elif remedy == "set weight_staging to host":
        changes["weight_staging"] = "host"
    else:
        found = VALUE.fullmatch(remedy)
        assert found is not None, remedy
        name, value = found[2], float(found[3]) if found[2] == "memory_fraction" else int(found[3])
        before = (
            refused.max_model_len if name == "max_model_len" else getattr(refused.settings, name)
        )
        assert (value < before) == (found[1] == "lower") and value != before
        assert DOCS[name].low <= value <= DOCS[name].high, remedy  # type: ignore[operator]
        changes[name] = value
    length = changes.pop("max_model_len", refused.max_model_len)
    return plan(replace(refused.settings, **changes), free, length, refused.total)


@pytest.mark.slow
@settings_of_hypothesis(max_examples=400, deadline=None, derandomize=True)
@given_by(st.data())
def test_every_offered_remedy_works(data: st.DataObject) -> None:
    """A refusal's remedy, followed to the letter, is accepted for all sizes."""
    draw = data.draw
    named = draw(st.sampled_from([{}, {"pages": None}, {"kv_memory_mb": None}]))
    total = draw(st.sampled_from([24, 80, 140])) * GIB
    asked = settings(
        **{name: draw(st.integers(1, 2**20)) for name in named},
        max_running=draw(st.one_of(st.integers(1, 512), st.integers(1, 65536))),
        max_rows=draw(st.integers(1, 65536)),
        memory_fraction=draw(st.integers(5, 99)) / 100,
        weight_root=draw(st.sampled_from(["", "/w"])),
        weight_channels=draw(st.sampled_from([None, "ipc,broadcast"])),
        feature_bytes=draw(st.sampled_from([0, GIB])),
        drafter_training_mb=draw(st.one_of(st.none(), st.integers(1, 2**16))),
    )
    refused = plan(
        asked, draw(st.integers(0, total - WEIGHTS)), draw(st.integers(2, 131072)), total
    )
    if refused.fits:
        check_plan(refused)
        return
    with pytest.raises(StartupError) as caught:
        check_plan(refused)
    remedies = caught.value.message.partition("; ")[2].split(", or ")
    for remedy in remedies if remedies[-1] != SMALLER else []:
        accepted = followed(refused, remedy)
        check_plan(accepted)
        assert accepted.pages >= min(accepted.least, accepted.settings.pages or accepted.least), (
            remedy
        )


def test_trainers_memory_share_is_reserved() -> None:
    plain, given = settings(max_running=8), settings(max_running=8, feature_bytes=GIB)
    share = TrainingShape.of(Drafter().config, 32_000, on_gpu=True).device_bytes(2048)
    without, with_share = (plan(each, 100 * GIB) for each in (plain, given))
    assert without.training == 0 and with_share.training == share + GIB // 2
    assert "to train the drafter" in with_share.describe()
    asked = replace(given, drafter_training_mb=12 * 1024)
    assert plan(asked, 100 * GIB).training == 12 * GIB + GIB // 2
    message = refusal(replace(given, drafter_training_mb=100), 100 * GIB)
    assert message.startswith("drafter_training_mb 100 is too little to train this drafter; set")
    least = int(offered(message, "drafter_training_mb"))
    assert plan(replace(given, drafter_training_mb=least), 100 * GIB).fits
    assert not plan(replace(given, drafter_training_mb=least - 1), 100 * GIB).fits
    assert plan(replace(given, drafter_training="share"), 100 * GIB) == with_share._replace(
        settings=replace(given, drafter_training="share")
    )
    assert plan(replace(given, drafter_training="device"), 100 * GIB).training == 0
    message = refusal(given, 24 * GIB, total=48 * GIB)
    assert "16.0 GiB to train the drafter" in message and OFF in message


def test_memory_refusal_names_fp8_where_it_fits() -> None:
    given = settings(weight_root="/w", reduction_leaves=4, quantization="none")
    own = needs(given)
    halved = own._replace(weights=own.weights * 8 // 15)  # the embedding and the head stay
    in_fp8 = Wider(replace(given, quantization="fp8"), halved)
    with pytest.raises(StartupError) as said:
        check_plan(plan(given, 30 * GIB), lambda: [*wider(given, 2, 4), in_fp8])
    assert said.value.message.endswith(
        "set tensor_parallel to 2, on 2 GPUs, or set quantization to fp8 (halves the target's "
        "linear maps)"
    )


def test_oversized_weights_are_refused_by_the_memory_plan() -> None:
    given = settings(reduction_leaves=4)
    loaded = needs(given).loaded
    with pytest.raises(
        StartupError, match=r"140.0 GiB are .* short of 14.2 GiB of weights"
    ) as said:
        check_plan(plan(given, 10 * GIB - loaded, total=TOTAL), lambda: wider(given, 2, 4))
    assert BUSY in said.value.message and "set tensor_parallel" not in said.value.message
    alone = 24 * GIB - CONTEXT  # what a GPU of 24 GiB has for one program
    large = settings(reduction_leaves=4, dtype="float32", max_running=8)
    whole = plan(large, alone - needs(large).loaded, total=24 * GIB)
    with pytest.raises(StartupError) as said:
        check_plan(whole, lambda: wider(large, 2, 4))
    assert "set tensor_parallel to 2, on 2 GPUs" in said.value.message
    assert "set dtype to bfloat16 (halves the weights)" in said.value.message
    check_plan(whole.halved)


SAID = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 "
    "GiB of which 1.50 GiB is free."
)


def test_allocator_error_names_remedies_of_the_plan() -> None:
    made = plan(settings(), TOTAL - WEIGHTS)
    message = exhausted(made, "buffers and graphs", SAID, free=int(1.5 * GIB), total=TOTAL)
    assert (
        "no room for buffers and graphs: 20.00 GiB more were asked for and 1536 MiB of "
        "its 140.0 GiB are free" in message
    )
    assert "; lower memory_fraction (0.9), or lower max_running (256), or end what" in message
    next_width = widen(*(settings(tensor_parallel=ranks, reduction_leaves=4) for ranks in (1, 2)))
    message = exhausted(made, "graphs", SAID, free=GIB, total=TOTAL, wider=next_width)
    assert message.endswith(f"max_running (256), or set tensor_parallel to 2, on 2 GPUs, or {BUSY}")
    named = plan(settings(kv_memory_mb=40 * 1024), TOTAL - WEIGHTS)
    assert "1024 MiB of its 140.0 GiB are free; lower kv_memory_mb (40960)" in exhausted(
        named, "graphs", "out of memory", free=GIB, total=TOTAL
    )


def test_weights_out_of_memory_error_suggests_no_setting() -> None:
    assert exhausted(None, "the weights", SAID, free=MIB, total=TOTAL).endswith(
        f"; {SMALLER}, or {BUSY}"
    )


def test_device_converts_the_allocators_error_to_a_typed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    from tlt_server.engine.gpu.device import Interpreted

    given = settings(device="interpreter", attention="triton", model=TARGET, drafter="none")
    device, config = Interpreted(replace(given, reduction_leaves=2)), ModelConfig.read(TARGET)
    monkeypatch.setattr(device, "_free", lambda: (3 * GIB, TOTAL))
    with pytest.raises(
        StartupError,
        match="no room for 77 KV pages: 20.00 GiB more were asked for and 3072 MiB of its 140.0 "
        "GiB are free",
    ):
        with device._memory("77 KV pages", config):
            raise torch.OutOfMemoryError(SAID)
    with pytest.raises(ZeroDivisionError), device._memory("77 KV pages", config):
        raise ZeroDivisionError


@pytest.mark.parametrize("drafter", ["none", str(DRAFTER)])
def test_device_refuses_oversized_weights_unread(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    from tlt_server.engine.gpu.device import Interpreted

    given = settings(device="interpreter", attention="triton", model=TARGET, drafter=drafter)
    device, config = Interpreted(replace(given, reduction_leaves=2)), ModelConfig.read(TARGET)
    monkeypatch.setattr(device, "_free", lambda: (9 * MIB, TOTAL))
    with pytest.raises(StartupError, match="short of .* of weights, .*; end what else"):
        device.load(config)
    with pytest.raises(StartupError, match=f"; {SMALLER}, or set tensor_parallel to 2, on 2 GPUs"):
        with device._memory("the weights", config):
            raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize(
    ("shape", "head_dim", "says"),
    [
        (LayerShape(output_bias=True), 128, "the target has 'attention_bias' true"),
        (LayerShape(mlp_bias=True), 128, "the target has 'mlp_bias' true"),
        (
            LayerShape(),
            80,
            "the target has 'head_dim' 80, but GPU kernels support 16, 32, 64, 128, 256",
        ),
        (LayerShape(), 512, "'head_dim' 512"),
    ],
)
def test_gpu_refuses_unsupported_shapes(shape: LayerShape, head_dim: int, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_shape(replace(CONFIG, head_dim=head_dim), shape, "the target")
    assert says in caught.value.message and caught.value.message.endswith("start with --device cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"heads": 34, "kv_heads": 2},
            "34 query heads over 2 KV heads, but GPU kernels support at most 16",
        ),
        (
            {"intermediate_size": 18945},
            "'intermediate_size' 18945, but GPU kernels need a multiple of 8",
        ),
        ({"hidden_size": 3588}, "'hidden_size' 3588"),
    ],
)
def test_gpu_refuses_unsupported_sizes(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_shape(replace(CONFIG, **changes), LayerShape(), "the target")
    assert says in caught.value.message and caught.value.message.endswith("start with --device cpu")


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_gpu_accepts_supported_shapes(head_dim: int) -> None:
    check_shape(
        replace(CONFIG, head_dim=head_dim), LayerShape(qkv_bias=True, qk_norm=True), "the target"
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(28, 4, 128), (64, 8, 128), (8, 1, 256)]
)
def test_attention_workspace_fits_the_trees_of_a_step(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    TritonPaged(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=4096, device=torch.device("cpu")
    )


def test_attention_too_small_for_its_trees_is_refused_at_start() -> None:
    says = (
        f"128 query heads of 128: .* room for 336 rows .* may have {TREE_ROWS}; start with "
        "--attention torch"
    )
    with pytest.raises(StartupError, match=says):
        TritonPaged(heads=128, kv_heads=8, head_dim=128, context=4096, device=torch.device("cpu"))


def test_the_ring_of_captured_states_is_counted() -> None:
    width = 3 * CONFIG.hidden_size
    plain, given = settings(), settings(feature_bytes=2**30)
    needs_of = [Needs.of(each, CONFIG, Drafter(), WEIGHTS, width) for each in (plain, given)]
    assert [each.per_state for each in needs_of] == [0, 2 * 4 * CONFIG.hidden_size]
    assert Needs.of(given, CONFIG, None, WEIGHTS).per_state == 0
    without, with_ring = (
        MemoryPlan(each, needs_of[1], 4096, 64 * GIB, TOTAL)._replace(needs=own)
        for each, own in zip((plain, given), needs_of, strict=True)
    )
    assert without.state_slots == 0
    ring = with_ring.state_slots * needs_of[1].per_state
    assert with_ring.working - without.working == ring
    assert with_ring.state_slots == 2 * (given.max_rows + 512)
