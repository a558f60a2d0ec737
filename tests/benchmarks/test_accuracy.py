"""Published runs: read, asked for, and scored by hand-computed cases."""

import json
from dataclasses import replace
from pathlib import Path

import accuracy
import click
import pytest
from click.testing import CliRunner
from published import predict
from published.bands import bands_json, kind_of
from published.folds import folds
from published.frameworks import without_gradients
from published.predict import Prediction, predicted
from published.runs import DEFAULT, WITH_MEMORY, Run, read_runs
from published.score import Scored, Summary, ideal_s, regrets, yardstick
from published.setup import NotExpressible, setup_of

from meshfold.cost_models.hardware.error_bands import read_bands

RUNS = {run.id: run for run in read_runs(DEFAULT).runs}
SMALL = next(run for run in RUNS.values() if run.dataset == "vtrain_single" and run.pp == 2)


def scored(run: Run, step_s: float | None, **fields: object) -> Scored:
    return Scored(replace(run, **fields), Prediction(step_s=step_s))


def test_all_runs_that_come_along_are_complete() -> None:
    found = read_runs(DEFAULT)
    assert not found.incomplete
    assert len(found.runs) == len(RUNS) == 537
    assert all(run.is_dense_step for run in found.runs)


def test_runs_with_memory_are_complete() -> None:
    found = read_runs(WITH_MEMORY)
    assert not found.incomplete
    assert all(run.peak_mem_gib and run.attention in ("fused", "unfused") for run in found.runs)


def test_memory_is_a_row_a_source(tmp_path: Path) -> None:
    """Of 2 GiB and 4 GiB, 3 GiB are predicted each: 50 % too much and 25 % too little. A run that
    cannot be asked for is counted."""
    row = json.loads(WITH_MEMORY.read_text())["rows"][0]
    rows = [row | {"id": f"of {gib}", "peak_mem_gib": gib} for gib in (2.0, 4.0, 8.0)]
    runs, kept = tmp_path / "runs.json", tmp_path / "kept.json"
    runs.write_text(json.dumps({"rows": rows}))
    known = {r["id"]: {"step_s": 1.0, "allocated_bytes": 3 * 2.0**30} for r in rows[:2]}
    known[rows[2]["id"]] = {"reason": "precision int8"}
    none = {r.id: {"reason": "left out"} for r in read_runs(WITH_MEMORY).runs}
    kept.write_text(json.dumps(known | none))
    arguments = [str(runs), "--memory", "--save", str(kept), "--rows"]
    output = CliRunner().invoke(accuracy.main, arguments, catch_exceptions=False).output
    of_source = next(line for line in output.splitlines() if line.startswith(row["dataset"]))
    assert of_source.split()[1:] == ["2", "37.5%", "+12.5%", "+50.0%"]
    assert "not predicted:    1  precision int8" in output


def test_what_frameworks_of_a_time_do() -> None:
    """The last stage of DeepSpeed's pipelines recomputes nothing; hosts of A100s are slower, a
    quarter as slow without gradients; attention is what a run says it was."""
    setup = setup_of(SMALL)
    device = setup.cluster.groups[0].device
    assert setup.traits.keeps_last_stage and not device.fused_attention
    assert not setup_of(RUNS["tt-8b-8-compile"]).traits.keeps_last_stage
    assert (device.host_op_s, later_host_op_s()) == (52e-6, 34e-6)
    issued = without_gradients(setup.cluster).groups[0].device
    assert issued.host_op_s == pytest.approx(52e-6 / 4)
    fused = setup_of(replace(SMALL, attention="fused")).cluster.groups[0].device
    assert fused.fused_attention


def later_host_op_s() -> float:
    return setup_of(RUNS["tt-8b-8-compile"]).cluster.groups[0].device.host_op_s


def test_degrees_become_pins() -> None:
    setup = setup_of(SMALL)
    assert setup.options.pins["pp"] == 2
    assert setup.options.pins["schedule"] == "1f1b"
    assert setup.options.pins["microbatches"] == SMALL.num_microbatches
    assert setup.cluster.num_devices == SMALL.num_gpus
    assert setup.options.precision == "fp16"


def test_devices_and_networks_become_presets() -> None:
    on_v100 = next(
        run for run in RUNS.values() if run.gpu == "V100-SXM3-32GB" and run.num_gpus == 8
    )
    spec = setup_of(on_v100).cluster
    assert (spec.num_devices, spec.groups[0].devices_per_node) == (8, 8)
    run = replace(SMALL, gpu="GB200-186GB", gpus_per_node=4, num_gpus=128, tp=1, pp=2, dp=64)
    run = replace(run, micro_batch_size=1, global_batch_size=128, nic_gbps_per_node=800.0)
    spec = setup_of(run).cluster
    assert [(g.num_nodes, g.devices_per_node) for g in spec.groups] == [(2, 64)]
    assert spec.network.name == "ndr-ib@200g"
    with pytest.raises(NotExpressible, match="nodes of 4 H100"):
        setup_of(replace(run, gpu="H100-SXM5-80GB"))


def test_zero_3_of_2021_gathers_each_weight_alone() -> None:
    """Gains nothing by overlap; 4 collectives for 3, of 4 weights, at 18 us a rank."""
    run = replace(SMALL, framework="DeepSpeed ZeRO-3")
    now, then = (setup_of(r) for r in (SMALL, run))
    assert now.cluster.overlap_slowdown < then.cluster.overlap_slowdown == 2
    for link, of_then in (
        (now.cluster.network, then.cluster.network),
        (now.cluster.groups[0].link, then.cluster.groups[0].link),
    ):
        assert (link.rank_s, of_then.rank_s) == (0, pytest.approx(4 * 18e-6 * 4 / 3))
        assert of_then.bytes_per_s == pytest.approx(link.bytes_per_s * 3 / 4)
    assert then.options.pins["allgather_bucket_bytes"] == 0
    assert "allgather_bucket_bytes" not in now.options.pins


def test_every_second_product_runs_again() -> None:
    """Llama-3-8B: 1024 + 4096 + 14336 of 2 * 4096 + 2 * 1024 + 3 * 14336 + 8192."""
    run = RUNS["tt-8b-8-compile"]
    assert setup_of(run).traits.rerun_share == pytest.approx(19456 / 61440)
    assert setup_of(replace(run, recompute="full")).traits.rerun_share == 0
    assert setup_of(SMALL).traits.rerun_share == 0
    device = setup_of(run).cluster.groups[0].device
    assert (device.attention_efficiency, device.attention_backward_efficiency) == (0.35, 0.29)


def test_a_step_between_two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """19456 / 61440 of the way from 4 s to 8 s; memory of the plan that keeps more."""
    told = {"selective": (4.0, 8.0, 2.0), "full": (8.0, 4.0, 2.0)}
    monkeypatch.setattr(predict, "captured_shape", lambda shape: None)
    monkeypatch.setattr(
        predict, "_predicted", lambda captured, setup: told[setup.options.pins["recompute"]]
    )
    found = predicted(RUNS["tt-8b-8-compile"])
    assert found.step_s == pytest.approx(4 + 4 * 19456 / 61440)
    assert (found.peak_bytes, found.allocated_bytes) == (8.0, 6.0)


def test_gradients_of_16_bits_are_half() -> None:
    run = next(run for run in RUNS.values() if run.dataset == "dgxc_h100")
    then, now = setup_of(run).traits, setup_of(SMALL).traits
    assert (then.gradient_share, now.gradient_share) == (0.5, 1.0)
    assert (then.adds_16_bits, now.adds_16_bits) == (True, False)
    assert dict(setup_of(run).shape.fields)["hidden_act"] == "gelu"


def test_zero_inside_a_part_of_the_ranks_is_pinned() -> None:
    run = replace(SMALL, zero_stage="1 within 2 GPUs, replicated across")
    pins = setup_of(run).options.pins
    assert (pins["zero"], pins["dp_shard"]) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpu": "RTX-1"}, "no preset for RTX-1"),
        ({"zero_stage": "1 in part"}, "ZeRO 1 in part"),
        ({"precision": "int8"}, "precision int8"),
        ({"arch": "cnn"}, "architecture cnn"),
        ({"recompute": "some"}, "recompute some"),
        ({"dp": 3}, "do not make the devices"),
    ],
)
def test_what_cannot_be_said_has_a_reason(fields: dict[str, object], reason: str) -> None:
    run = replace(SMALL, **fields)  # type: ignore[arg-type]
    with pytest.raises(NotExpressible, match=reason):
        setup_of(run)
    assert reason in predicted(run).reason


def test_summary_by_hand() -> None:
    assert Summary.of([0.1, -0.3, 0.2]) == Summary(3, pytest.approx(0.2), pytest.approx(0.0), -0.3)
    with pytest.raises(ValueError, match="no runs"):
        Summary.of([])


def test_regret_is_of_the_plan_predicted_fastest() -> None:
    published, predictions = (1.0, 1.2, 2.0, 3.0, 4.0), (1.5, 1.4, 2.0, 3.0, 4.0)
    group = [
        scored(SMALL, predicted_s, iter_time_s=s)
        for s, predicted_s in zip(published, predictions, strict=True)
    ]
    assert regrets(group) == [pytest.approx(0.2)]
    assert regrets(group[:4]) == []


def test_the_yardstick_by_hand() -> None:
    run = replace(
        SMALL,
        dataset="one",
        gpu="A100-SXM4-80GB",
        calc_model_tflops_per_gpu=156.0,
        iter_time_s=3.0,
        recompute="full",
        pp=1,
    )
    assert ideal_s(run) == pytest.approx(3.0 / 2 * 4 / 3)
    # Efficiencies 2/3 and 1/3, their median 1/2: predicted 4/3 and 2/3 of the published times.
    both = [scored(run, 1.0), scored(run, 1.0, calc_model_tflops_per_gpu=78.0)]
    assert yardstick(both) == {"one": pytest.approx(1 / 3)}


def test_folds_by_hand() -> None:
    """Of two datasets each is a fold. Published over predicted is 2 in one and 1 in the other: the
    other's factor makes errors of -0.5 of the one, of 1 of the other."""
    names = ((1.0, "one"), (2.0, "two"))
    both = [scored(SMALL, step_s, dataset=name, iter_time_s=2.0) for step_s, name in names]
    first, second = folds(both)
    assert (first.datasets, first.factors) == (("one",), {"A100": 1.0})
    assert (first.fitted.bias, first.as_it_is.bias) == (-0.5, -0.5)
    assert (second.datasets, second.factors) == (("two",), {"A100": 2.0})
    assert (second.fitted.bias, second.as_it_is.bias) == (1.0, 0.0)


def test_a_file_without_runs_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(click.ClickException, match="no runs"):
        read_runs(tmp_path / "a.json")
    row = json.loads(DEFAULT.read_text())["rows"][0]
    del row["tp"]
    (tmp_path / "a.json").write_text(json.dumps({"rows": [row]}))
    assert read_runs(tmp_path / "a.json").incomplete == {"tp: Field required": 1}


def test_predictions_are_kept_and_taken_up(tmp_path: Path) -> None:
    """A tiny run is predicted; the second call reads what the first one saved."""
    row = json.loads(DEFAULT.read_text())["rows"][0]
    tiny = {
        "id": "tiny",
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 4,
        "vocab_size": 128,
        "seq_len": 16,
        "num_gpus": 2,
        "dp": 2,
        "tp": 1,
        "micro_batch_size": 1,
        "global_batch_size": 2,
    }
    runs, kept = tmp_path / "runs.json", tmp_path / "kept.json"
    runs.write_text(json.dumps({"rows": [row | tiny]}))
    arguments = [str(runs), "--save", str(kept), "--rows", "--folds"]
    first = CliRunner().invoke(accuracy.main, arguments, catch_exceptions=False)
    assert "summary: 1 runs, mean absolute error" in first.output
    assert "held out" in first.output
    known = json.loads(kept.read_text())
    assert known["tiny"]["step_s"] > 0
    known["tiny"]["step_s"] = 2 * row["iter_time_s"]
    kept.write_text(json.dumps(known))
    again = CliRunner().invoke(accuracy.main, arguments, catch_exceptions=False)
    assert "mean absolute error 100.0%" in again.output


def test_bands_by_hand() -> None:
    """Errors of -0.2 and 0.2 have their 10th percentile at -0.16."""
    runs = [scored(SMALL, s, iter_time_s=1.0) for s in (0.8, 1.2)]
    assert kind_of(SMALL) == ("A100", "stages", "one node")
    text = bands_json([*runs, scored(SMALL, None)], "a command")
    assert json.loads(text)["measured_by"] == "a command"
    assert json.loads(text)["memory"] is None
    band = read_bands(text).bands[kind_of(SMALL)]
    assert band.rows == 2
    assert (band.bias, band.low, band.high) == pytest.approx((0.0, -0.16, 0.16))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"pp": 1, "micro_batch_size": 1, "dp": 8, "global_batch_size": 8}, "one pass"),
        ({"pp": 1, "micro_batch_size": 1, "dp": 8, "global_batch_size": 16}, "microbatches"),
    ],
)
def test_runs_on_one_stage_are_told_apart(fields: dict[str, int], kind: str) -> None:
    assert kind_of(replace(SMALL, **fields))[1] == kind  # type: ignore[arg-type]
