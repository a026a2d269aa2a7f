"""Compiling for devices that are not here: what is moved, held and said."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from latte_eqx import ModelConfig
from tests.aot import target_or_skip
from train import compile as compiling
from train.compile import Collectives, Report, compile_step, main, read_collectives
from train.config import Config, DataConfig, load_config
from train.flops import train_flops_per_token
from train.hardware import ACCELERATORS, CompilerMissing, Target, target

CONFIG = Path(__file__).parents[2] / "configs" / "owt_latte_r_swa.py"
ROWS, SEQ, DIM, MLP, VOCAB = 8, 32, 128, 256, 64
TARGETS = [
    pytest.param("v5e:2x2", marks=pytest.mark.tpu_aot),
    pytest.param("a100:2", marks=pytest.mark.gpu_aot),
]


def config(num_layers=2, **changes):
    sizes = dict(dim=DIM, num_heads=4, mlp_dim=MLP, window=8)
    model = ModelConfig(mixer="swa", vocab_size=VOCAB, num_layers=num_layers, **sizes)
    return Config(model=model, data=DataConfig(seq=SEQ, batch_size=ROWS), **changes)


_REPORTS = {}


@pytest.fixture
def report_of(optimized):
    def compiled(name, num_layers):
        goal = target_or_skip(name)
        if (name, num_layers) not in _REPORTS:
            _REPORTS[name, num_layers] = compile_step(config(num_layers), goal)
        return _REPORTS[name, num_layers]

    return compiled


# Four projections and three matrices of the MLP in each layer; of the norms every device holds the whole.
LAYER = 4 * DIM**2 + 3 * DIM * MLP
NORMS = 2 * DIM


@pytest.mark.parametrize("name", TARGETS)
def test_each_device_holds_its_share_of_parameters_and_moments(name, report_of):
    report, num_devices = report_of(name, 2), len(target(name).devices)
    whole, cut = 2 * NORMS + DIM, 2 * LAYER + VOCAB * DIM
    assert report.num_parameters == report.num_trained == cut + whole
    state = 3 * 4 * (cut / num_devices + whole)
    batch = 4 * (2 * SEQ + 1) * ROWS / num_devices
    # A TPU fills up the last tile of an array.
    assert state + batch <= report.arguments < 1.04 * (state + batch)
    assert report.arguments + report.temporaries <= report.needed < 1.01 * (report.arguments + report.temporaries)
    assert report.peak <= report.needed


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_moved_is_what_sharding_asks_for(name, report_of):
    """Layers are gathered twice in bfloat16, and their gradients summed once in float32, in each turn of the loop."""
    two, four = report_of(name, 2).collectives, report_of(name, 4).collectives
    others = 1 - 1 / len(target(name).devices)
    assert two.num_unknown_loops == four.num_unknown_loops == 0
    gathered = lambda collectives: collectives.moved["all-gather", "bf16"]
    # The compiler may sum where a share of the sum would do, which moves twice as much.
    summed = lambda collectives: collectives.moved["reduce-scatter", "f32"] + collectives.moved["all-reduce", "f32"] / 2
    assert gathered(four) - gathered(two) == 2 * 2 * 2 * LAYER * others
    assert summed(four) - summed(two) == 2 * 4 * (LAYER + NORMS) * others
    assert four.arrays["all-gather", "bf16"] - two.arrays["all-gather", "bf16"] == 2 * 2 * 7
    # The embedding: gathered for the input, the output, and its backward pass, of which one may serve another.
    table, few = VOCAB * DIM * others, 4 * 2 * DIM
    assert gathered(two) - 2 * 2 * 2 * LAYER * others in (2 * 2 * table, 3 * 2 * table)
    assert 4 * table <= summed(two) - 2 * 4 * (LAYER + NORMS) * others <= 2 * 4 * table + few
    known = [("all-gather", "bf16"), ("reduce-scatter", "f32"), ("all-reduce", "f32")]
    assert sum(moved for kind, moved in two.moved.items() if kind not in known) < few


@pytest.mark.tpu_aot
def test_a_step_that_the_compiler_refuses_is_no_traceback(optimized, capsys):
    target_or_skip("v5e:2x2")
    huge = {"--data.batch-size": 2**19, "--model.num-layers": 2, "--model.mixer": "swa", "--model.dim": 128}
    words = [str(word) for pair in huge.items() for word in pair]
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(CONFIG), "--topology", "v5e:2x2", "--smoke", "--optim.accumulate", "2", *words])
    assert stop.value.code == 1
    output = capsys.readouterr().out
    assert "GB and has 16.91 GB" in output
    assert f"--optim.accumulate {2**17}: one row at a time" in output


@pytest.fixture
def pretend(monkeypatch):
    """Stand in for the compiler: a report of four devices of the given memory."""

    def install(memory):
        device = replace(ACCELERATORS["v5e"], memory=memory)
        four = Target("v5e:2x2", "tpu", device, tuple(jax.devices()[:4]))
        exchanged = Collectives(
            Counter({("all-gather", "bf16"): 12, ("all-reduce", "f32"): 3}),
            Counter({("all-gather", "bf16"): 3 * 10**9, ("all-reduce", "f32"): 10**9}),
            0,
        )
        sizes = dict(arguments=10**9, temporaries=7 * 10**9, needed=8 * 10**9, peak=6 * 10**9)
        report = lambda config, _: Report(
            config=config,
            target=four,
            mesh=dict(data=1, fsdp=4, seq=1),
            num_parameters=156_000_000,
            num_trained=156_000_000,
            **sizes,
            collectives=exchanged,
            compile_seconds=61.0,
        )
        monkeypatch.setattr(compiling, "target", lambda name: four)
        monkeypatch.setattr(compiling, "compile_step", report)
        return report(load_config(CONFIG), four)

    return install


def run(*words):
    main(["--config", str(CONFIG), "--topology", "v5e:2x2", *words])


def test_a_step_that_fits_is_shown(pretend, capsys):
    pretend(16e9)
    run()
    output = capsys.readouterr().out
    lines = ["4  TPU v5 lite", "156.0M  float32", "65,536  tokens: 64 rows of 1024", "8 GB  in all, 50% of 16 GB"]
    for line in [*lines, "3 GB  all-gather bf16, arrays: 12", "61 s"]:
        assert line in output
    assert "Does not fit" not in output


def test_a_step_that_does_not_fit_says_by_how_much_and_what_helps(pretend, capsys):
    pretend(5e9)
    with pytest.raises(SystemExit) as stop:
        run("--remat", "dots")
    assert stop.value.code == 1
    output = capsys.readouterr().out
    assert "a device needs 8 GB and has 5 GB, 3 GB too little" in output
    assert "--optim.accumulate 16: one row at a time" in output
    assert "--remat full" in output
    assert "replicas" not in output


def test_the_bound_is_the_slowest_of_three(pretend):
    """Arithmetic counts what is computed again; links and memory what the compiler says."""
    report = pretend(16e9)
    settings, device = report.config, ACCELERATORS["v5e"]
    flops = settings.data.batch_size * settings.data.seq * train_flops_per_token(settings.model, settings.data.seq)
    assert report.bounds["arithmetic"] == pytest.approx(flops * 4 / 3 / 4 / device.peak_flops)
    assert report.bounds["memory"] == pytest.approx(2e9 / device.memory_bandwidth)
    assert report.bounds["links"] == pytest.approx(4e9 / device.link_bandwidth)
    assert report.utilisation == pytest.approx(0.75)
    kept = replace(report, config=replace(settings, remat="none"))
    assert 0.75 < kept.utilisation < 1
    held_up = replace(report, collectives=report.collectives._replace(moved=Counter({("all-reduce", "f32"): 10**12})))
    assert held_up.step_seconds == pytest.approx(1e12 / device.link_bandwidth)


@pytest.mark.parametrize("name", ["v5x:2x2", "a100:2x2x2", "h100", "v5e:0x2"])
def test_unknown_topologies_are_named_without_a_traceback(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(CONFIG), "--topology", name])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"got {name!r}" in said
    assert "h100:2x8" in said


def test_a_missing_compiler_is_named_without_a_traceback(monkeypatch, capsys):
    def missing(name):
        raise CompilerMissing("TPUs")

    monkeypatch.setattr(compiling, "target", missing)
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 2
    assert "latte-eqx[aot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "accumulate", "hint"),
    [(66, 1, "Try --data.batch-size 68."), (64, 32, "Try --data.batch-size 128, or --optim.accumulate 16.")],
)
def test_batches_that_devices_cannot_share_come_with_a_hint(rows, accumulate, hint, monkeypatch, capsys):
    four = Target("v5e:2x2", "tpu", ACCELERATORS["v5e"], tuple(jax.devices()[:4]))
    monkeypatch.setattr(compiling, "target", lambda name: four)
    with pytest.raises(SystemExit) as stop:
        run("--data.batch-size", str(rows), "--optim.accumulate", str(accumulate))
    assert stop.value.code == 2
    assert hint in capsys.readouterr().err


def test_help_and_missing_options(capsys):
    for words, code in ((["--help"], 0), (["--config", str(CONFIG)], 2), (["--topology", "v5e:2x2"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == code
    said = capsys.readouterr()
    assert "python -m train.compile --config" in said.out
    assert "--topology" in said.err
    assert "--config must name a file" in said.err


HLO = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%piece.1 (p.1: bf16[1,8]) -> (bf16[1,8], bf16[1,32]) {
  %p.1 = bf16[1,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[1,32]{1,0:T(8,128)(2,1)} all-gather(%p.1), replica_groups={{0,1,2,3}}, dimensions={1}, \
frontend_attributes={chain_id="7"}
  ROOT %start = (bf16[1,8]{1,0}, bf16[1,32]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%piece.2 (p.2: bf16[1,8]) -> bf16[1,32] {
  %p.2 = bf16[1,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.2 = bf16[1,32]{1,0:T(8,128)(2,1)} all-gather(%p.2), replica_groups={{0,1,2,3}}, dimensions={1}, \
frontend_attributes={chain_id="7"}
}

%inner_body (q: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %q = (s32[], f32[2,4]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%q), index=0
  %value = f32[2,4]{1,0} get-tuple-element(%q), index=1
  %reduced = f32[2,4]{1,0} all-reduce(%value), replica_groups=mesh['data'=2,'fsdp'=2] {'fsdp'}, to_apply=%add
  ROOT %next = (s32[], f32[2,4]{1,0}) tuple(%count, %reduced)
}

%inner_condition (r: (s32[], f32[2,4])) -> pred[] {
  %end = s32[]{:T(128)} constant(6)
  %r = (s32[], f32[2,4]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%r), index=0
  ROOT %goes_on = pred[] compare(%at, %end), direction=LT
}

%body (b: (s32[], f32[2,4], bf16[1,8])) -> (s32[], f32[2,4], bf16[1,8]) {
  %b = (s32[], f32[2,4]{1,0}, bf16[1,8]{1,0}) parameter(0)
  %b.0 = s32[] get-tuple-element(%b), index=0
  %b.1 = f32[2,4]{1,0} get-tuple-element(%b), index=1
  %b.2 = bf16[1,8]{1,0} get-tuple-element(%b), index=2
  %first = (bf16[1,8]{1,0}, bf16[1,32]{1,0}) fusion(%b.2), kind=kCustom, calls=%piece.1
  %second = bf16[1,32]{1,0} fusion(%b.2), kind=kCustom, calls=%piece.2
  %one = s32[] constant(1)
  %from = s32[] copy(%one)
  %start.1 = (s32[], f32[2,4]{1,0}) tuple(%from, %b.1)
  %inner = (s32[], f32[2,4]{1,0}) while(%start.1), condition=%inner_condition, body=%inner_body
  %b.3 = f32[2,4]{1,0} get-tuple-element(%inner), index=1
  ROOT %b.4 = (s32[], f32[2,4]{1,0}, bf16[1,8]{1,0}) tuple(%b.0, %b.3, %b.2)
}

%condition (c: (s32[], f32[2,4], bf16[1,8])) -> pred[] {
  %c = (s32[], f32[2,4]{1,0}, bf16[1,8]{1,0}) parameter(0)
  ROOT %yes = pred[] custom-call(%c), custom_call_target="Anything"
}

ENTRY %main (a.0: f32[2,4], a.1: bf16[1,8]) -> f32[2] {
  %a.0 = f32[2,4]{1,0} parameter(0)
  %a.1 = bf16[1,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start.2 = (s32[], f32[2,4]{1,0}, bf16[1,8]{1,0}) tuple(%zero, %a.0, %a.1)
  %outer = (s32[], f32[2,4]{1,0}, bf16[1,8]{1,0}) while(%start.2), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %gather-start = ((bf16[1,8]{1,0}, f32[2,4]{1,0}), (bf16[1,32]{1,0}, f32[2,16]{1,0})) \
all-gather-start(%a.1, /*index=1*/%a.0), replica_groups=[1,4]<=[4], dimensions={1}
  %gather-done = (bf16[1,32]{1,0}, f32[2,16]{1,0}) all-gather-done(%gather-start)
  %sent = f32[2,4]{1,0} collective-permute(%a.0), source_target_pairs={{0,1},{1,0}}
  ROOT %scattered = f32[2]{0} reduce-scatter(%a.0), replica_groups={}, dimensions={1}, to_apply=%add
}
"""


def test_collectives_are_read_from_a_program():
    """Loops multiply, also nested ones; pieces of a chain, and the two ends of an asynchronous one, count once."""
    arrays, moved, num_unknown_loops = read_collectives(HLO, num_devices=4)
    assert num_unknown_loops == 0
    assert arrays == {
        ("all-gather", "bf16"): 3 + 1,
        ("all-gather", "f32"): 1,
        ("all-reduce", "f32"): 3 * 5,
        ("collective-permute", "f32"): 1,
        ("reduce-scatter", "f32"): 1,
    }
    assert moved == {
        ("all-gather", "bf16"): 4 * 3 * 16,
        ("all-gather", "f32"): 3 * 32,
        ("all-reduce", "f32"): 15 * 32,
        ("collective-permute", "f32"): 32,
        ("reduce-scatter", "f32"): 24,
    }


def test_loops_of_unknown_length_are_told():
    arrays, _, num_unknown_loops = read_collectives(HLO.replace("known_trip_count", "other"), num_devices=4)
    assert num_unknown_loops == 1
    assert arrays["all-reduce", "f32"] == 5
